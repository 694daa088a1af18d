"""PyTorch RPC against gRPC in the pattern of the offline phase: 200 messages of 120 KiB.

The paper chose PyTorch RPC because "its tensor-aware communication API can reduce the latency" when
every client sends N coded segments. Two processes on loopback; each way is timed from the first
message to the last acknowledgement, after one run that warms up:

* gRPC, one stream: raw chunks on one bidirectional stream, as this package's transport does
* gRPC, unary calls: one call per message, one after the other
* PyTorch RPC: one call per message with a tensor argument, all under way at once, over TCP
* either of them through the `Communicator`, as a federation uses it: framing, queues, budgets
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lightsecagg.drivers.transport.communicator import (
    ClientCommunicator,
    Disconnected,
    Received,
)
from lightsecagg.errors import ConfigurationError, MissingExtra
from lightsecagg_lab.experiments.cells import VERSION, Cell, Document, Results
from lightsecagg_lab.experiments.report import Report, Table
from lightsecagg_lab.experiments.setups import Profile
from lightsecagg_lab.experiments.statistics import Spread

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.queues import Queue

_METHODS = {
    "grpc-stream": "gRPC, one stream of raw chunks",
    "grpc-unary": "gRPC, one unary call per message",
    "torch-rpc": "PyTorch RPC, one call per message",
    "grpc-communicator": "gRPC, through the Communicator",
    "torch-rpc-communicator": "PyTorch RPC, through the Communicator",
}
_TRIES = 15
_WAIT = 120.0
"""Seconds after which a peer that does not answer is given up."""
# Loopback only, and only raw bytes and tensors of our own: this is a laboratory.
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TransportCell(Cell):
    """Seconds for all messages, by one way of sending them."""

    extras: ClassVar[tuple[str, ...]] = ("grpc", "torch")
    timed: ClassVar[bool] = True
    method: str
    messages: int = 200
    size: int = 120 * 1024
    tries: int = _TRIES

    @property
    def key(self) -> str:
        return f"transport-{self.method}-{self.messages}x{self.size}-r{self.tries}-{VERSION}"

    def measure(self) -> Document:
        seconds = _SENDERS[self.method](self)
        return {"cell": asdict(self), "seconds": seconds}


def transport_cells(profile: Profile) -> list[Cell]:
    """Every way."""
    return [TransportCell(method) for method in _METHODS]


def transport_report(profile: Profile, results: Results) -> Report:
    """How long 200 shares take."""
    report = Report("transport", "PyTorch RPC against gRPC: 200 messages of 120 KiB on loopback")
    rows = []
    for method, title in _METHODS.items():
        cell = TransportCell(method)
        seconds = Spread.of(results[cell.key]["seconds"])
        rate = Spread.exactly(cell.messages * cell.size) / seconds
        report.figures[method] = {"seconds": seconds, "bytes_per_second": rate}
        rows.append([title, f"{seconds.scaled(1e3):.0f} ms", f"{rate.scaled(1e-6):,.0f} MB/s"])
    report.tables.append(
        Table("From the first message to the last acknowledgement", ["way", "time", "rate"], rows)
    )
    report.paragraphs = [
        "Two processes on one machine, loopback, elapsed time, the median and interquartile range "
        f"of {_TRIES} runs after one that warms up; no TLS on any of them. Each message is one "
        "coded segment of about 30,000 "
        "elements. The bare ways hand a message over and forget it. The Communicator's also limit "
        "what waits, keep the order, and notice who is gone. PyTorch RPC executes pickled calls "
        "and does not authenticate its peer, so it stays in the laboratory."
    ]
    return report


def _timed(cell: TransportCell, send_all: Callable[[], None]) -> list[float]:
    send_all()
    seconds = []
    for _ in range(cell.tries):
        started = time.perf_counter()
        send_all()
        seconds.append(time.perf_counter() - started)
    return seconds


# -- gRPC ----------------------------------------------------------------------------------------


def _grpc() -> Any:
    try:
        import grpc
    except ModuleNotFoundError as error:
        raise MissingExtra("this needs gRPC", "grpc") from error
    return grpc


def _serve_grpc(pipe: Connection) -> None:
    from concurrent.futures import ThreadPoolExecutor

    grpc = _grpc()

    def stream(chunks: Iterator[bytes], context: object) -> bytes:
        return str(sum(len(chunk) for chunk in chunks)).encode("ascii")

    def unary(message: bytes, context: object) -> bytes:
        return b"ok"

    handlers = {
        "Stream": grpc.stream_unary_rpc_method_handler(stream),
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("lab", handlers),))
    pipe.send(server.add_insecure_port(f"{_HOST}:0"))
    server.start()
    pipe.recv()
    server.stop(None)


def _over_grpc(cell: TransportCell) -> list[float]:
    grpc = _grpc()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve_grpc, args=(theirs,), daemon=True)
    process.start()
    try:
        if not pipe.poll(_WAIT):
            raise ConfigurationError("the gRPC peer did not start")
        payload = bytes(cell.size)
        with grpc.insecure_channel(f"{_HOST}:{pipe.recv()}") as channel:
            stream, unary = channel.stream_unary("/lab/Stream"), channel.unary_unary("/lab/Unary")

            def send_stream() -> None:
                total = stream(iter([payload] * cell.messages), timeout=_WAIT)
                if int(total) != cell.messages * cell.size:
                    raise ConfigurationError("messages were lost on loopback")

            def send_unary() -> None:
                for _ in range(cell.messages):
                    unary(payload, timeout=_WAIT)

            seconds = _timed(cell, send_stream if cell.method == "grpc-stream" else send_unary)
        pipe.send(None)
        return seconds
    finally:
        _end(process)


# -- PyTorch RPC ---------------------------------------------------------------------------------


def _accept(tensor: Any) -> int:
    return int(tensor.numel())


def _torch_peer(rank: int, port: int, cell: TransportCell, queue: Queue[list[float]]) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{_HOST}:{port}",
        rpc_timeout=_WAIT,
        # Between machines neither shared memory nor infiniband is there: TCP, as in the paper.
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"party{rank}", rank=rank, world_size=2, rpc_backend_options=options
    )
    if rank == 0:
        payload = torch.zeros(cell.size, dtype=torch.uint8)

        def send_all() -> None:
            futures = [
                rpc.rpc_async("party1", _accept, args=(payload,)) for _ in range(cell.messages)
            ]
            for future in futures:
                future.wait()

        queue.put(_timed(cell, send_all))
    rpc.shutdown()


def _over_torch(cell: TransportCell) -> list[float]:
    context = multiprocessing.get_context("spawn")
    queue: Queue[list[float]] = context.Queue()
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    peers = [
        context.Process(target=_torch_peer, args=(rank, port, cell, queue), daemon=True)
        for rank in (0, 1)
    ]
    for peer in peers:
        peer.start()
    try:
        return queue.get(timeout=_WAIT)
    finally:
        for peer in peers:
            _end(peer)


# -- through the interface -----------------------------------------------------------------------


def _communicator_server(cell: TransportCell) -> Any:
    if cell.method == "grpc-communicator":
        from lightsecagg.drivers.transport.grpc import GrpcServer

        return GrpcServer(f"{_HOST}:0", {0}, None, plaintext=True)
    from lightsecagg_lab.transport.torch_rpc import TorchRpcServer

    return TorchRpcServer(f"{_HOST}:0", {0})


def _communicator_client(cell: TransportCell, address: str) -> ClientCommunicator:
    if cell.method == "grpc-communicator":
        from lightsecagg.drivers.transport.grpc import GrpcClient

        return GrpcClient(address, 0, None, plaintext=True)
    from lightsecagg_lab.transport.torch_rpc import TorchRpcClient

    return TorchRpcClient(address, 0)


def _serve_communicator(pipe: Connection, cell: TransportCell) -> None:
    """Acknowledges every batch of messages, until the client leaves."""

    async def serve() -> None:
        server = _communicator_server(cell)
        server.set_budget(0, (cell.tries + 1) * cell.messages * cell.size)
        await server.start()
        pipe.send(server.address)
        received = 0
        async for event in server.events():
            if isinstance(event, Disconnected):
                break
            if isinstance(event, Received):
                received += 1
                if received % cell.messages == 0:
                    await server.send(0, b"all are here")
        await server.close()

    asyncio.run(serve())


def _over_communicator(cell: TransportCell) -> list[float]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve_communicator, args=(theirs, cell), daemon=True)
    process.start()

    async def drive(address: str) -> list[float]:
        client = _communicator_client(cell, address)
        payload, seconds = bytes(cell.size), []
        async with asyncio.timeout(_WAIT):
            await client.connect()
            for _ in range(cell.tries + 1):
                started = time.perf_counter()
                for _ in range(cell.messages):
                    await client.send(payload)
                await client.receive()
                seconds.append(time.perf_counter() - started)
            await client.close()
        return seconds[1:]  # the first warmed up

    try:
        if not pipe.poll(_WAIT):
            raise ConfigurationError("the peer did not start")
        return asyncio.run(drive(pipe.recv()))
    finally:
        _end(process)


def _end(process: Any) -> None:
    process.join(5)
    if process.is_alive():
        process.terminate()
        process.join()


_SENDERS: dict[str, Callable[[TransportCell], list[float]]] = {
    "grpc-stream": _over_grpc,
    "grpc-unary": _over_grpc,
    "torch-rpc": _over_torch,
    "grpc-communicator": _over_communicator,
    "torch-rpc-communicator": _over_communicator,
}
