"""R53: what has arrived and is not dealt with is bounded in bytes, whatever the number of peers."""

from __future__ import annotations

import asyncio
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightsecagg.drivers.transport.communicator import (
    Disconnected,
    Event,
    Limits,
    Received,
    Traffic,
)
from lightsecagg.drivers.transport.framing import MAX_CHUNK, PAYLOAD, chunks
from lightsecagg.drivers.transport.keeping import OnDisk
from lightsecagg.drivers.transport.link import Link
from lightsecagg.drivers.transport.room import Room
from lightsecagg.errors import ConfigurationError, PeerGone
from memory_transport import MemoryServer

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc.aio")

from lightsecagg.drivers.transport.grpc import GrpcClient, GrpcServer  # noqa: E402

Run = Callable[[Callable[[], Awaitable[None]]], None]

LONG = 4 << 20
CLIENTS = 8
LIMITS = Limits(initial_budget=4 * LONG, stall_timeout=20)


@asynccontextmanager
async def serving(limits: Limits) -> AsyncIterator[tuple[GrpcServer, AsyncIterator[Event]]]:
    server = GrpcServer("127.0.0.1:0", range(CLIENTS), None, plaintext=True, limits=limits)
    await server.start()
    try:
        yield server, server.events()
    finally:
        await server.close()


def lab_client(server: GrpcServer, client: int) -> GrpcClient:
    return GrpcClient(server.address, client, None, plaintext=True, limits=LIMITS)


async def settled() -> None:
    """Nothing in memory can move any more: every task has had its turn, often."""
    for _ in range(1000):
        await asyncio.sleep(0)


# -- short messages: room for all together ---------------------------------------------------------


@pytest.mark.parametrize(("memory", "waits"), [(1 << 25, 4 * CLIENTS), (4 * MAX_CHUNK, 4)])
def test_R53_what_waits_in_memory_is_bounded_over_all_peers(
    run: Run, memory: int, waits: int
) -> None:
    """With eight places for every peer, and no more to it, what waits grows with their number."""

    async def scenario() -> None:
        server = MemoryServer(range(CLIENTS), replace(LIMITS, memory=memory))
        await server.start()
        clients = [server.client(i) for i in range(CLIENTS)]
        for client in clients:
            await client.connect()
            for number in range(4):
                await client.send(bytes([number + 1]) * PAYLOAD)
        await settled()
        assert sum(isinstance(event, Received) for event in server._events._items) == waits
        received: dict[int, list[int]] = {i: [] for i in range(CLIENTS)}
        events = server.events()
        while sum(map(len, received.values())) < 4 * CLIENTS:
            event = await anext(events)
            if isinstance(event, Received):
                received[event.client].append(event.data[0])
        assert all(numbers == [1, 2, 3, 4] for numbers in received.values())
        for client in clients:
            client.vanish()
        await server.close()

    run(scenario)


def test_R53_a_link_that_is_cut_while_it_waits_for_room_takes_none(run: Run) -> None:
    async def scenario() -> None:
        server = MemoryServer(range(2), replace(LIMITS, memory=MAX_CHUNK))
        await server.start()
        first, second = server.client(0), server.client(1)
        for client in (first, second):
            await client.connect()
            await client.send(bytes(PAYLOAD))
            await settled()
        server.disconnect(1, "for the test")
        await settled()
        kinds = [type(event).__name__ for event in server._events._items]
        assert kinds == ["Connected", "Received", "Connected", "Disconnected"]
        events = server.events()
        for _ in kinds:
            await anext(events)
        await first.send(bytes(PAYLOAD))
        assert await anext(events) == Received(0, bytes(PAYLOAD))
        first.vanish()
        await server.close()

    run(scenario)


@pytest.mark.parametrize("memory", [0, MAX_CHUNK - 1])
def test_R53_room_for_less_than_a_chunk_is_refused_at_start(memory: int) -> None:
    with pytest.raises(ConfigurationError, match=f"lets {memory} bytes.*Limits.memory {MAX_CHUNK}"):
        MemoryServer(range(2), Limits(memory=memory))


def test_R53_without_a_folder_a_message_that_has_no_room_is_refused(run: Run) -> None:
    async def scenario() -> None:
        server = MemoryServer(range(2), replace(LIMITS, memory=MAX_CHUNK))
        await server.start()
        client = server.client(0)
        await client.connect()
        await client.send(bytes(MAX_CHUNK + 1))
        with pytest.raises(PeerGone, match=f"has room for {MAX_CHUNK}"):
            await client.receive()
        await client.close()
        await server.close()

    run(scenario)


def test_room_is_given_in_order_and_a_cancelled_wait_takes_nothing(run: Run) -> None:
    async def scenario() -> None:
        room = Room(10)
        await room.take(8)
        long, short = asyncio.create_task(room.take(9)), asyncio.create_task(room.take(1))
        await settled()
        assert not long.done()
        assert not short.done(), "it would overtake"
        long.cancel()
        await settled()
        assert short.done()
        room.give_back(8)
        assert room.left == 9
        late = asyncio.create_task(room.take(10))
        await settled()
        room.give_back(1)
        late.cancel()  # in the moment in which it was served
        await settled()
        assert room.left == 10

    run(scenario)


# -- long messages: files --------------------------------------------------------------------------


@pytest.mark.parametrize("in_files", [False, True])
def test_R53_long_messages_wait_in_files(run: Run, tmp_path: Path, in_files: bool) -> None:
    """In memory, 32 MiB of them are there at the same time."""
    message = bytes(range(1, 256)) * (LONG // 255)

    async def scenario() -> None:
        folder = tmp_path if in_files else None
        async with serving(replace(LIMITS, folder=folder, memory=1 << 26)) as (server, events):
            clients = [lab_client(server, i) for i in range(CLIENTS)]
            for client in clients:
                await client.connect()
            tracemalloc.start()
            for client in clients:
                await client.send(message)
            while len(server._events) < 2 * CLIENTS:
                await asyncio.sleep(0.01)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert (held < LONG) if in_files else (held > CLIENTS * LONG * 0.9)
            assert list(tmp_path.iterdir()) == [], "no name, nothing to leave behind"
            received = [await anext(events) for _ in range(2 * CLIENTS)]
            whole = [event.data for event in received if isinstance(event, Received)]
            assert all(data == message for data in whole)
            for client in clients:
                await client.close()

    run(scenario)


class Dripping:
    """Begins a message within its budget and sends a chunk of it now and then, for ever."""

    def __init__(self, server: GrpcServer, client: int) -> None:
        self._server, self._client = server, client

    async def __aenter__(self) -> Dripping:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = grpc.aio.insecure_channel(self._server.address, options)
        metadata = (("lightsecagg-client", str(self._client)),)
        self._call: Any = self._channel.stream_stream(_method())(metadata=metadata)
        self._chunks = chunks(bytes(LONG))
        await self.drip()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close()

    async def drip(self) -> None:
        await self._call.write(next(self._chunks))


def _method() -> str:
    from lightsecagg.drivers.transport import grpc as transport

    return f"/{transport._SERVICE}/{transport._METHOD}"


def test_R53_peers_that_drip_hold_up_nobody(run: Run, tmp_path: Path) -> None:
    """Room that is taken from the first byte to the last is theirs for as long as they like."""

    async def naive() -> None:
        room = Room(2 * LONG)
        for _ in range(2):
            await room.take(LONG)  # two that drip, and give nothing back
        honest = asyncio.create_task(room.take(LONG))
        await settled()
        assert not honest.done()
        honest.cancel()

    run(naive)

    async def scenario() -> None:
        limits = replace(LIMITS, folder=tmp_path, memory=MAX_CHUNK)
        async with (
            serving(limits) as (server, events),
            Dripping(server, 0) as first,
            Dripping(server, 1) as second,
        ):
            for client in range(2, CLIENTS):
                honest = lab_client(server, client)
                await honest.connect()
                await honest.send(bytes([client]) * LONG)
                await first.drip()
                await second.drip()
                received = await _next_message(events)
                assert received.client == client
                assert received.data == bytes([client]) * LONG
                await honest.close()

    run(scenario)


async def _next_message(events: AsyncIterator[Event]) -> Received:
    async for event in events:
        if isinstance(event, Received):
            return event
    raise AssertionError("the events ended")


def test_R53_a_disk_that_takes_nothing_costs_the_sender_its_stream_and_nobody_else(
    run: Run, tmp_path: Path
) -> None:
    async def scenario() -> None:
        folder = tmp_path / "gone"
        async with serving(replace(LIMITS, folder=folder)) as (server, events):
            unlucky = lab_client(server, 0)
            await unlucky.connect()
            await unlucky.send(bytes(LONG))
            cut = [await anext(events) for _ in range(2)][1]
            assert isinstance(cut, Disconnected)
            assert cut.reason == "a message cannot be kept on disk: No such file or directory"
            await unlucky.close()
            folder.mkdir()
            await unlucky.connect()
            await unlucky.send(bytes(LONG))
            assert (await _next_message(events)).data == bytes(LONG)
            await unlucky.close()

    run(scenario)


def test_R53_a_message_that_is_discarded_while_a_thread_writes_it_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, files = OnDisk(tmp_path, 8), list[Any]()
    create = tempfile.TemporaryFile

    def create_and_discard(**options: Any) -> Any:
        """As whoever waits for the thread does when it is cancelled twice."""
        keeper.discard()
        files.append(create(**options))
        return files[0]

    monkeypatch.setattr(tempfile, "TemporaryFile", create_and_discard)
    keeper.add(memoryview(bytes(4)))
    keeper.add(memoryview(bytes(4)))
    assert files[0].closed
    assert keeper.whole() == b""
    keeper.add(memoryview(bytes(4)))
    assert len(files) == 1


def test_R53_a_link_that_is_cancelled_twice_discards_what_it_has(run: Run) -> None:
    async def scenario() -> None:
        reading, discarded = asyncio.Event(), asyncio.Event()

        async def read() -> bytes:
            reading.set()
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                await asyncio.sleep(3600)  # as if a thread still wrote
                raise

        async def nothing(data: object) -> None: ...

        link = Link(LIMITS, Traffic(), lambda length: None, nothing, lambda reason: None)
        link._reassembler.discard = discarded.set  # type: ignore[method-assign]
        running = asyncio.create_task(link.run(read, nothing))
        await reading.wait()
        for _ in range(2):
            running.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(running, return_exceptions=True)
        assert discarded.is_set()

    run(scenario)
