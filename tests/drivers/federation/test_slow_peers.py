"""S26 and S27: peers that hold streams open, stall or flood cost the others next to nothing.

What a round costs is counted in Python calls of the server's event loop, not in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from network_federation import DIMENSION, Contribution, NetworkFederation, contribution
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_client
from lightsecagg.drivers.federation.provisioning import free_port, provision
from lightsecagg.drivers.federation.tables import AggregationTable
from lightsecagg.drivers.transport.communicator import Limits, Received
from lightsecagg.drivers.transport.framing import PAYLOAD, chunks
from lightsecagg.protocol.interface import Update
from lightsecagg.session.envelope import (
    VERSION,
    Hello,
    Withdraw,
    name_of,
    pack_control,
)
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_server import RoundServerSession

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc.aio")

from lightsecagg.drivers.transport.grpc import GrpcClient, GrpcServer  # noqa: E402

HONEST, SLOW = 6, 500
GREETING = next(chunks(pack_control(Hello(VERSION, -1))))
BEGUN = next(chunks(bytes(2 * PAYLOAD)))  # the first chunk of two
METHOD = "/lightsecagg.v2.Transport/Stream"


class Work:
    """Counts the Python calls of each round, on the thread that runs the server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[int] = []
        open_round, end_round = RoundServerSession._open_round, RoundServerSession._end_round
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        def begin(session: RoundServerSession, invited: list[int], now: float) -> None:
            nonlocal calls
            calls = 0
            sys.setprofile(count)
            open_round(session, invited, now)

        def end(session: RoundServerSession, *arguments: Any) -> None:
            sys.setprofile(None)
            self.rounds.append(calls)
            end_round(session, *arguments)

        monkeypatch.setattr(RoundServerSession, "_open_round", begin)
        monkeypatch.setattr(RoundServerSession, "_end_round", end)


@asynccontextmanager
async def slow_stream(address: str, client: int, *said: bytes) -> AsyncIterator[Any]:
    """A client of the allow-list that says this much and then nothing."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address, options) as channel:
        call = channel.stream_stream(METHOD)(metadata=(("lightsecagg-client", str(client)),))
        await call.initial_metadata()
        for chunk in said:
            await call.write(chunk)
        yield call
        call.cancel()


class Crowd:
    """Honest clients with the lowest ids, and identities for the slow ones."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.transport = GrpcServer(
            "127.0.0.1:0", range(HONEST + SLOW), None, plaintext=True, limits=limits
        )
        self.federation = Federation(folder, HONEST + SLOW, transport=self.transport)  # type: ignore[arg-type]
        self.federation.aggregation = AggregationTable(clients=HONEST, privacy=1, dropouts=1)

    async def round(self, slow: Callable[[str], Any] | None = None) -> RoundRecord:
        """One round of the honest clients, while the slow ones are there."""
        federation, listening = self.federation, asyncio.Event()
        start = self.transport.start

        async def started() -> None:
            await start()
            listening.set()

        self.transport.start = started  # type: ignore[method-assign]
        # Not before the slow ones are there: the honest ones come last.
        federation.awaited = HONEST
        serving = asyncio.create_task(federation.server(wait_for_clients=60, settle=0).run())
        try:
            await asyncio.wait_for(listening.wait(), 10)
            address = self.transport.address
            async with AsyncExitStack() as stack:
                if slow is not None:
                    await stack.enter_async_context(slow(address))
                honest = [
                    federation.client(
                        i, communicator=GrpcClient(address, i, None, plaintext=True), reconnect=30
                    )
                    for i in range(HONEST)
                ]
                async with federation.connected(honest):
                    (record,) = await asyncio.wait_for(serving, 60)
        finally:
            serving.cancel()
        assert record.included == list(range(HONEST))
        federation.check(record)
        return record


@asynccontextmanager
async def crowd_of(address: str, *said: bytes) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(slow_stream(address, HONEST + i, *said))
            for i in range(SLOW)
        ]


@pytest.mark.slow
def test_S27_500_slow_streams_do_not_double_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Authenticated, and each in the middle of a message that never ends."""
    work = Work(monkeypatch)
    # On a busy machine they would be cut while they come, which is work of another kind.
    monkeypatch.setattr("lightsecagg.session.peers.GREETING_DEADLINE", 600.0)
    limits = Limits(initial_budget=4 * PAYLOAD, stall_timeout=600)
    asyncio.run(Crowd(tmp_path / "alone", limits).round())
    asyncio.run(Crowd(tmp_path / "crowded", limits).round(lambda address: crowd_of(address, BEGUN)))
    alone, crowded = work.rounds
    assert crowded < 2 * alone


@pytest.mark.slow
def test_S27_500_connections_without_a_handshake_do_not_double_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can open a connection; each is closed when its time for a handshake is up."""
    work = Work(monkeypatch)
    monkeypatch.setattr(
        "lightsecagg.drivers.transport.grpc.Limits", lambda: Limits(connect_timeout=3)
    )

    async def scenario(folder: Path, strangers: int) -> None:
        federation = NetworkFederation(folder)
        host, _, port = federation.address.rpartition(":")
        server = federation.server(min_clients=HONEST, wait_for_clients=60)
        sockets: list[socket.socket] = []

        async def crowd_then_clients() -> None:
            while len(sockets) < strangers:
                try:
                    sockets.append(socket.create_connection((host, int(port))))
                except ConnectionRefusedError:  # not listening yet
                    await asyncio.sleep(0.02)
            await asyncio.gather(*(federation.client(i).run() for i in range(HONEST)))

        (record,), _ = await asyncio.wait_for(
            asyncio.gather(server.run(), crowd_then_clients()), 60
        )
        assert record.included == list(range(HONEST))
        federation.check(record)
        for stranger in sockets:
            stranger.settimeout(10)
            assert stranger.recv(1) == b"", "closed by the server"
            stranger.close()

    asyncio.run(scenario(tmp_path / "alone", 0))
    asyncio.run(scenario(tmp_path / "crowded", SLOW))
    alone, crowded = work.rounds
    assert crowded < 2 * alone
    assert caplog.text.count("refused a stream (TLS handshake") <= 20, "nor do they fill the log"


class Strangers(threading.Thread):
    """So many silent connections at any time: one that is closed is opened again."""

    def __init__(self, address: str, count: int) -> None:
        super().__init__(daemon=True)
        host, _, port = address.rpartition(":")
        self.address, self.count, self.refused, self.ended = (host, int(port)), count, 0, False
        self.sockets: list[socket.socket] = []

    def run(self) -> None:
        while not self.ended:
            while len(self.sockets) < self.count and not self.ended:
                with suppress(OSError):
                    self.sockets.append(socket.create_connection(self.address, 1))
            for closed in select.select(self.sockets, [], [], 0.1)[0]:
                closed.close()
                self.sockets.remove(closed)
                self.refused += 1
        for each in self.sockets:
            each.close()


@dataclass
class Held(Contribution):
    """Its update is ready when the strangers are there."""

    wait: Callable[[], Any] = bool

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        self.wait()
        return super().compute(model, round_number, bound)


@pytest.mark.unix
def test_R60_strangers_that_take_every_descriptor_do_not_end_the_server(tmp_path: Path) -> None:
    """The round is done while more of them than the server has descriptors come and come again."""
    most, clients = 160, 4
    made = provision(
        tmp_path / "federation", clients, vectors=DIMENSION, privacy=1, dropouts=0, port=free_port()
    )
    program = f"ulimit -n {most} && exec {sys.executable} -m lightsecagg server --config"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(["sh", "-c", f"{program} {made.server}"], stderr=log)
    address = load_config(ServerConfig, made.server).server.address
    strangers = Strangers(address, 2 * most)
    all_here = threading.Barrier(clients, strangers.start)

    def wait() -> None:
        all_here.wait(300)
        while not (strangers.refused or len(os.listdir(f"/proc/{server.pid}/fd")) >= most):
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)

    async def end() -> None:
        while server.poll() is None:
            await asyncio.sleep(0.05)
        assert server.returncode == 0, (tmp_path / "log").read_text()

    async def run() -> None:
        overrides = ["client.overlap=thread", "client.reconnect=300.0"]
        configs = {i: load_config(ClientConfig, made.clients[i], overrides) for i in made.clients}
        parties = [build_client(configs[i], job=Held(i, wait=wait)) for i in configs]
        await asyncio.gather(end(), *(party.run() for party in parties))

    try:
        asyncio.run(asyncio.wait_for(run(), 280))
    finally:
        strangers.ended = True
        server.kill()
        server.wait()
    strangers.join()
    with np.load(made.server.with_name("result.npz")) as stored:
        expected = np.sum([contribution(i, 1) for i in range(clients)], axis=0)
        np.testing.assert_allclose(stored["result"], expected, atol=1e-3)
    assert "waits for a descriptor" not in (tmp_path / "log").read_text(), "some were left"


class Stalling(FederationClient):
    """Sends the first chunk of its upload, and no more."""

    async def _post(self, data: bytes) -> None:
        assert isinstance(self._communicator, GrpcClient)
        if name_of(data) == "Reports":  # it must be out before the upload begins
            for chunk in chunks(data):
                await self._communicator._write(chunk)
            return
        if name_of(data) != "MaskedUpload":
            await super()._post(data)
            return
        assert len(data) > PAYLOAD
        await self._communicator._write(next(chunks(data)))
        await asyncio.Event().wait()


def test_S27_a_member_that_stalls_inside_its_upload_is_cut_long_before_the_phase_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    transport = GrpcServer(
        "127.0.0.1:0", range(4), None, plaintext=True, limits=Limits(stall_timeout=1)
    )
    federation = Federation(
        tmp_path,
        4,
        dimension=PAYLOAD // 4 + 1,
        privacy=1,
        dropouts=1,
        transport=transport,  # type: ignore[arg-type]
    )

    async def scenario() -> RoundRecord:
        serving = asyncio.create_task(federation.server(upload=600, share=600).run())
        while transport._server is None:
            await asyncio.sleep(0.01)
        clients = [
            federation.client(
                i,
                Stalling if i == 3 else FederationClient,
                GrpcClient(transport.address, i, None, plaintext=True),
            )
            for i in range(4)
        ]
        async with federation.connected(clients):
            (record,) = await asyncio.wait_for(serving, 60)
        return record

    record = asyncio.run(scenario())
    assert record.included == [0, 1, 2]
    assert record.dropped == {"upload": [3]}
    assert "the peer stalled inside a message for 1 s" in caplog.text
    federation.check(record)


def test_S26_a_quota_belongs_to_an_identity_however_many_streams_it_opens() -> None:
    """Nobody takes the events: what one identity can make the server hold does not grow."""
    limits = Limits(queue=4)
    whole = next(chunks(pack_control(Withdraw(1, "again"))))

    async def scenario() -> None:
        server = GrpcServer("127.0.0.1:0", range(2), None, plaintext=True, limits=limits)
        await server.start()
        async with asyncio.timeout(30):
            for number in range(1, 6):
                async with slow_stream(server.address, 0, GREETING, *[whole] * 20):
                    # Each stream gets one message beyond the queue read, and is held up there.
                    while server.stats.clients[0].messages_in < limits.queue + number:
                        await asyncio.sleep(0.01)
            waiting = [e for e in server._events._items if isinstance(e, Received)]
            assert len(waiting) == limits.queue
            other = GrpcClient(server.address, 1, None, plaintext=True)
            await other.connect()
            await other.send(b"nobody is in my way")
            async for event in server.events():
                if isinstance(event, Received) and event.client == 1:
                    break
            await other.close()
            await server.close()

    asyncio.run(scenario())
