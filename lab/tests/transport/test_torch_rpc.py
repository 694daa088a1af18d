"""PyTorch RPC: the same streams, for laboratories; and what keeps it there."""

from __future__ import annotations

import asyncio
import importlib.util
import pickletools
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.drivers.federation.provisioning import free_port
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Limits,
    Received,
)
from lightsecagg.errors import (
    ConfigurationError,
    DecodeError,
    MissingExtra,
    PeerGone,
    Refused,
    TransportError,
)
from lightsecagg_lab.transport import torch_agent, torch_rpc
from lightsecagg_lab.transport.torch_rpc import TorchRpcClient, TorchRpcServer

Run = Callable[[Callable[[], Awaitable[None]]], None]
LIMITS = Limits(stall_timeout=20, close_timeout=5, connect_timeout=20)
BIG = 3 << 20


async def started(
    limits: Limits = LIMITS, port: int = 0
) -> tuple[TorchRpcServer, AsyncIterator[Event]]:
    server = TorchRpcServer(f"127.0.0.1:{port}", range(4), limits=limits)
    await server.start()
    return server, server.events()


def party(server: TorchRpcServer, client: int) -> TorchRpcClient:
    return TorchRpcClient(server.address, client, limits=LIMITS)


def patiently(scenario: Callable[[], Awaitable[None]]) -> None:
    """For scenarios in which other processes import torch, which takes as long as it takes."""

    async def bounded() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(bounded())


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A program in a process of its own, with its standard input and output here."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_messages_arrive_whole_and_in_order_both_ways(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        client = party(server, 3)
        await client.connect()
        assert await anext(events) == Connected(3)
        server.set_budget(3, 2 * BIG)
        messages = [b"a", bytes(BIG), b"b"]
        for message in messages:
            await client.send(message)
            await server.send(3, message)
        assert [await anext(events) for _ in messages] == [Received(3, m) for m in messages]
        assert [await client.receive() for _ in messages] == messages
        await client.close()
        assert await anext(events) == Disconnected(3, "closed by the peer")
        assert server.stats.total == server.stats.clients[3] == client.traffic
        await server.close()
        assert [event async for event in events] == []

    run(scenario)


def test_several_clients_of_a_process_share_its_agent(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        clients = [party(server, i) for i in range(3)]
        await asyncio.gather(*(client.connect() for client in clients))
        assert {await anext(events) for _ in clients} == {Connected(i) for i in range(3)}
        for i, client in enumerate(clients):
            await client.send(bytes([i + 1]))
            assert await anext(events) == Received(i, bytes([i + 1]))
        await asyncio.gather(*(client.close() for client in clients))
        await server.close()

    run(scenario)


def test_a_client_that_is_early_waits_until_the_server_is_in_the_list_of_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were both in the midst of joining, the client's list could replace the server's for good."""
    arrived: list[bool] = []
    real = torch_rpc.rpc.TensorPipeAgent

    def slow(group: Any, *arguments: Any) -> Any:
        store = group.underlying_store
        store.wait(["agents"], timedelta(seconds=200))  # the client is at the door
        time.sleep(2)
        arrived.append(store.check(["lightsecagg/AllWorkerInfos"]))
        return real(group, *arguments)

    async def scenario() -> None:
        port = free_port()
        monkeypatch.setattr(torch_rpc.rpc, "TensorPipeAgent", slow)
        early = python(EARLY_CLIENT, str(port))
        try:
            server, events = await started(port=port)
            assert await anext(events) == Connected(0)
            assert arrived == [False]
            await asyncio.to_thread(early.communicate, "leave\n", timeout=100)
            assert early.returncode == 0
            await server.close()
        finally:
            early.kill()
            early.communicate()

    patiently(scenario)


EARLY_CLIENT = """
import asyncio, sys
from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg_lab.transport.torch_rpc import TorchRpcClient
from lightsecagg.errors import TransportError

async def main():
    client = TorchRpcClient(f"127.0.0.1:{sys.argv[1]}", 0, limits=Limits(connect_timeout=100))
    while True:
        try:
            await client._knock()
            break
        except TransportError:
            await asyncio.sleep(0.05)
    await client.connect()
    await asyncio.to_thread(sys.stdin.readline)
    await client.close()

asyncio.run(main())
"""


def test_close_lets_queued_messages_leave(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started()
        client = party(server, 0)
        await client.connect()
        for number in range(5):
            await server.send(0, bytes([number + 1]))
        closing = asyncio.create_task(server.close())
        assert [await client.receive() for _ in range(5)] == [bytes([n + 1]) for n in range(5)]
        with pytest.raises(PeerGone, match="the server closed the stream"):
            await client.receive()
        await client.close()
        await closing

    run(scenario)


def test_a_closed_server_is_followed_by_another_on_the_same_port(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started(port=free_port())
        address = server.address
        await server.close()
        with pytest.raises(TransportError, match=f"no server listens at {address}"):
            await party(server, 0).connect()
        again = TorchRpcServer(address, range(4), limits=LIMITS)
        await again.start()
        client = party(again, 0)
        await client.connect()
        await client.close()
        await again.close()

    run(scenario)


def test_a_port_in_use_is_named(run: Run) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(TransportError, match=f"cannot listen on {address}"):
                await TorchRpcServer(address, range(4)).start()

    run(scenario)


def test_R35_a_listener_that_is_no_server_is_given_up_at_the_deadline(run: Run) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            client = TorchRpcClient(address, 0, limits=replace(LIMITS, connect_timeout=0.5))
            with pytest.raises(TransportError, match=r"cannot connect"):
                await client.connect()

    run(scenario)


def test_S24_unknown_clients_are_refused_and_counted(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started()
        with pytest.raises(Refused, match="client 9 is not on the allow-list"):
            await party(server, 9).connect()
        assert server.stats.refused == {"unknown client": 1}
        await server.close()

    run(scenario)


def test_S25_a_peer_beyond_its_budget_is_cut_and_told(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        client = party(server, 2)
        await client.connect()
        assert await anext(events) == Connected(2)
        server.set_budget(2, 10)
        await client.send(bytes(11))
        cut = await anext(events)
        assert isinstance(cut, Disconnected)
        assert "a message of 11 bytes, 10 are left of its budget" in cut.reason
        with pytest.raises(PeerGone, match="10 are left of its budget"):
            await client.receive()
        await client.close()
        await server.close()

    run(scenario)


@pytest.mark.parametrize("request_", [b"", b"x", bytes(17), b"\x09" + bytes(40), bytes(99)])
def test_S41_a_malformed_call_harms_nobody(run: Run, request_: bytes) -> None:
    async def scenario() -> None:
        server, events = await started()
        client = party(server, 0)
        await client.connect()
        assert await anext(events) == Connected(0)
        answer = await server._serve_safely(request_)
        assert answer[0] in (torch_rpc._GONE, torch_rpc._REFUSED)
        await client.send(b"still here")
        assert await anext(events) == Received(0, b"still here")
        await client.close()
        await server.close()

    run(scenario)


# -- peers that die --------------------------------------------------------------------------------

CLIENT = """
import asyncio, sys
from lightsecagg_lab.transport.torch_rpc import TorchRpcClient

async def main():
    client = TorchRpcClient(sys.argv[1], 0)
    await client.connect()
    await client.send(b"one")
    await client.receive()

asyncio.run(main())
"""

SERVER = """
import asyncio, sys
from lightsecagg_lab.transport.torch_rpc import TorchRpcServer

async def main():
    server = TorchRpcServer(sys.argv[1], range(4))
    await server.start()
    print(server.address, flush=True)
    async for _ in server.events():
        pass

asyncio.run(main())
"""


def test_R33_a_client_that_is_killed_is_noticed_and_another_may_come() -> None:
    async def scenario() -> None:
        server, events = await started()
        process = python(CLIENT, server.address)
        try:
            assert await anext(events) == Connected(0)
            assert await anext(events) == Received(0, b"one")
            process.kill()
            process.wait()
            server._limits = replace(LIMITS, keepalive=0.1)
            server._watch(next(iter(server._streams)))  # as if it had just pulled
            assert await anext(events) == Disconnected(0, "the connection was lost")
        finally:
            process.kill()
            process.communicate()
        server._limits = LIMITS
        client = party(server, 0)
        await client.connect()
        assert await anext(events) == Connected(0)
        await client.close()
        await server.close()

    patiently(scenario)


def test_R33_a_server_that_is_killed_is_noticed_and_found_again() -> None:
    async def scenario() -> None:
        first = python(SERVER, "127.0.0.1:0")
        second = None
        try:
            assert first.stdout is not None
            address = (await asyncio.to_thread(first.stdout.readline)).strip()
            client = TorchRpcClient(address, 0, limits=LIMITS)
            await client.connect()
            first.kill()
            with pytest.raises(PeerGone, match="the connection was lost"):
                await client.receive()
            second = python(SERVER, address)
            assert second.stdout is not None
            assert (await asyncio.to_thread(second.stdout.readline)).strip() == address
            await client.connect()
            await client.send(b"two")
            await client.close()
        finally:
            for process in filter(None, (first, second)):
                process.kill()
                process.communicate()

    patiently(scenario)


# -- S21: it executes code, so it stays at home ----------------------------------------------------


@pytest.mark.parametrize("host", ["192.0.2.1", "fl.example.org", "[::]"])
def test_S21_other_addresses_than_loopback_are_refused_unless_the_user_understands(
    host: str,
) -> None:
    for make in (
        lambda **words: TorchRpcServer(f"{host}:7700", range(4), **words),
        lambda **words: TorchRpcClient(f"{host}:7700", 0, **words),
    ):
        with pytest.raises(ConfigurationError, match="--unsafe-transport"):
            make()
        make(understood=True)


def test_S21_a_stranger_at_the_port_executes_code_which_is_why(tmp_path: Path) -> None:
    """The attack that loopback keeps out: any function, at the server, without a password."""
    stranger = """
import sys
from pathlib import Path
from lightsecagg_lab.transport import torch_agent, torch_rpc
host, port = sys.argv[1].split(":")
agent = torch_agent.join(host, int(port), 20)
torch_agent.rpc.rpc_sync("server", Path.touch, args=(Path(sys.argv[2]),), timeout=20)
torch_agent.leave(agent)
"""

    async def scenario() -> None:
        server, _events = await started()
        process = python(stranger, server.address, str(tmp_path / "written by the server"))
        assert await asyncio.to_thread(process.wait) == 0
        process.communicate()
        await server.close()

    patiently(scenario)
    assert (tmp_path / "written by the server").exists()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_S21_nothing_listens_but_on_loopback(run: Run) -> None:
    def listening() -> set[tuple[str, str]]:
        """Address and inode of this process's listening sockets."""
        own = {
            match[1]
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and (match := re.match(r"socket:\[(\d+)\]", str(link.readlink())))
        }
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        ]
        return {(row[1].split(":")[0], row[9]) for row in rows if row[3] == "0A" and row[9] in own}

    async def scenario() -> None:
        before = listening()
        server, _events = await started()
        client = party(server, 0)
        await client.connect()
        found = {address for address, _ in listening() - before}
        assert found == {"0100007F"}
        await client.close()
        await server.close()

    run(scenario)


def test_S21_of_ours_only_bytes_cross(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that PyTorch pickles is the name of one function and the place of one tensor."""
    pickled: list[bytes] = []
    tensors: list[Any] = []
    serialize = torch_rpc.rpc.api._default_pickler.serialize

    def spy(thing: Any) -> Any:
        data, table = serialize(thing)
        pickled.append(data)
        tensors.extend(table)
        return data, table

    monkeypatch.setattr(torch_rpc.rpc.api._default_pickler, "serialize", spy)

    async def scenario() -> None:
        server, events = await started()
        client = party(server, 0)
        await client.connect()
        assert await anext(events) == Connected(0)
        await client.send(b"a secret of ours")
        assert await anext(events) == Received(0, b"a secret of ours")
        await client.close()
        await server.close()

    run(scenario)
    words = {
        argument
        for data in pickled
        for opcode, argument, _ in pickletools.genops(data)
        if isinstance(argument, str | bytes) and opcode.name not in ("PROTO", "FRAME")
    }
    theirs = {"builtins", "getattr", "_InternalRPCPickler", "_tensor_receiver"}
    theirs |= {"torch.distributed.rpc.internal", "PythonUDF"}
    assert words == theirs | {torch_rpc.__name__, "exchange"}
    assert {str(tensor.dtype) for tensor in tensors} == {"torch.uint8"}
    assert any(b"a secret of ours" in tensor.numpy().tobytes() for tensor in tensors)


# -- torch that cannot -----------------------------------------------------------------------------


def load_again() -> None:
    spec = importlib.util.spec_from_file_location("torch_agent_again", torch_agent.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_torch_without_rpc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rpc.rpc, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"has no RPC; .* server.transport = \"grpc\""):
        load_again()


def test_a_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="PyTorch RPC needs torch"):
        load_again()


# -- whatever bytes come --------------------------------------------------------------------------


def read_request(data: bytes) -> None:
    """Of a server with one stream, whose token is sixteen zeros, and no place for another."""

    def refuse(*_: object) -> Any:
        return Refused("not expected")

    def accept(_: int) -> Any:
        raise refuse()

    async def nothing(*_: object) -> bytes:
        return b""

    server = object.__new__(TorchRpcServer)
    streams: dict[bytes, object] = {bytes(16): None}
    vars(server).update(_streams=streams, accept=accept, _refuse=refuse)
    vars(server).update(_push=nothing, _pull=nothing, _forget=streams.pop)
    try:
        server._serve(data).send(None)
    except StopIteration:  # answered
        return
    raise AssertionError("it waits for something")


def requests() -> Iterator[bytes]:
    for operation in range(5):
        yield torch_rpc._REQUEST.pack(operation, bytes(16)) + b"payload"
    yield torch_rpc._REQUEST.pack(0, bytes(16)) + torch_rpc._OPENING.pack(1, 7)


@given(
    st.one_of(
        st.binary(max_size=64),
        st.tuples(st.sampled_from(list(requests())), st.integers(0, 40), st.binary(max_size=8)).map(
            lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + len(t[2]) :]
        ),
    )
)
def test_S41_whatever_a_peer_sends_is_answered_or_refused(data: bytes) -> None:
    with suppress(DecodeError):
        read_request(data)
