"""The in-process transport: order, budgets, back-pressure, and every way a stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Limits,
    Received,
    Traffic,
)
from lightsecagg.drivers.transport.framing import PAYLOAD, chunks
from lightsecagg.drivers.transport.link import CLOSED_HERE, Link
from lightsecagg.errors import LocalProtocolError, ParameterError, PeerGone, TransportError
from memory_transport import MemoryServer

LIMITS = Limits(stall_timeout=5, close_timeout=2)
SHORT = replace(LIMITS, stall_timeout=0.05, queue=2)
BIG = 3 << 20


Run = Callable[[Callable[[], Awaitable[None]]], None]


async def started(limits: Limits = LIMITS) -> tuple[MemoryServer, AsyncIterator[Event]]:
    server = MemoryServer(range(4), limits)
    await server.start()
    return server, server.events()


def test_messages_arrive_whole_and_in_order_both_ways(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        client = server.client(3)
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
        assert server.stats.total.bytes_in == BIG + 2
        await server.close()
        assert [event async for event in events] == []

    run(scenario)


@pytest.mark.parametrize(("turn", "least", "most"), [(3600.0, 0, 2), (0.0, 8, 1000)])
def test_others_have_their_turn_while_events_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch, turn: float, least: int, most: int
) -> None:
    """A consumer that never waits for anything else would keep the loop until no event is left."""
    monkeypatch.setattr("lightsecagg.drivers.transport.stream_server._TURN", turn)

    async def scenario() -> None:
        server, events = await started()
        client = server.client(0)
        await client.connect()
        for number in range(8):
            await client.send(bytes([number + 1]))
        while len(server._events) < 9:
            await asyncio.sleep(0)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(other())
        for _ in range(9):
            await anext(events)
        assert least <= turns <= most
        others.cancel()
        client.vanish()
        await server.close()

    run(scenario)


def test_close_lets_queued_messages_leave(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started()
        client = server.client(0)
        await client.connect()
        for number in range(5):
            await server.send(0, bytes([number + 1]))
        await server.close()
        assert [await client.receive() for _ in range(5)] == [bytes([n + 1]) for n in range(5)]
        with pytest.raises(PeerGone, match="the server closed the stream"):
            await client.receive()
        with pytest.raises(TransportError, match="no server listens"):
            await server.client(0).connect()

    run(scenario)


def test_newer_stream_of_an_identity_replaces_the_older(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        older, newer = server.client(1), server.client(1)
        await older.connect()
        await newer.connect()
        reason = "replaced by a newer stream of the same identity"
        expected = [Connected(1), Disconnected(1, reason), Connected(1)]
        assert [await anext(events) for _ in range(3)] == expected
        with pytest.raises(PeerGone, match="replaced by a newer stream"):
            await older.receive()
        await newer.send(b"still here")
        assert await anext(events) == Received(1, b"still here")
        await server.close()

    run(scenario)


def test_S24_unknown_clients_are_refused_and_counted(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started()
        with pytest.raises(TransportError, match="client 9 is not on the allow-list"):
            await server.client(9).connect()
        assert server.stats.refused == {"unknown client": 1}
        await server.close()

    run(scenario)


def test_S25_a_peer_beyond_its_budget_is_cut_and_reconnecting_renews_nothing(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        client = server.client(2)
        await client.connect()
        assert await anext(events) == Connected(2)
        server.set_budget(2, BIG)
        await client.send(bytes(BIG - 1))
        assert isinstance(await anext(events), Received)
        await client.send(b"12")
        cut = await anext(events)
        assert isinstance(cut, Disconnected)
        assert "a message of 2 bytes, 1 are left of its budget" in cut.reason
        with pytest.raises(PeerGone, match="1 are left of its budget"):
            await client.receive()
        await client.connect()
        assert await anext(events) == Connected(2)
        await client.send(bytes(LIMITS.initial_budget))
        assert isinstance(await anext(events), Received)
        await client.send(b"1")
        cut = await anext(events)
        assert isinstance(cut, Disconnected)
        assert "0 are left" in cut.reason
        await server.close()

    run(scenario)


def test_S25_a_client_refuses_an_oversized_message_of_its_server(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started(replace(LIMITS, max_message=1000))
        client = server.client(0)
        await client.connect()
        assert await anext(events) == Connected(0)
        await server.send(0, bytes(1001))
        with pytest.raises(PeerGone, match="1001 bytes, this client accepts 1000"):
            await client.receive()
        await client.close()
        await server.close()

    run(scenario)


def test_S27_queues_are_bounded_and_a_waiting_sender_is_woken(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started(replace(LIMITS, queue=2))
        client = server.client(0)
        await client.connect()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await client.send(b"x")
                sent += 1

        flooding = asyncio.create_task(flood())
        for _ in range(200):
            await asyncio.sleep(0)
        # Two queued here, one being written, one in the pipe, one being delivered, two as events.
        assert sent <= 7
        assert await anext(events) == Connected(0)
        for _ in range(50):
            assert await anext(events) == Received(0, b"x")
        server.disconnect(0, "enough")
        with pytest.raises(PeerGone, match="enough"):
            await flooding
        await server.close()

    run(scenario)


@pytest.mark.parametrize("size", [1, BIG])
def test_R35_sending_to_a_stalled_peer_ends_at_the_deadline(run: Run, size: int) -> None:
    async def scenario() -> None:
        server, events = await started(SHORT)
        client = server.client(0)
        await client.connect()

        async def flood() -> None:
            while True:
                await server.send(0, bytes(size))

        with pytest.raises(PeerGone, match=r"the peer took no data for 0\.05 s"):
            await flood()
        assert await anext(events) == Connected(0)
        assert await anext(events) == Disconnected(0, "the peer took no data for 0.05 s")
        with pytest.raises(PeerGone, match="client 0 is not connected"):
            await server.send(0, b"x")
        await server.close()

    run(scenario)


def test_S26_a_peer_that_stalls_inside_a_message_is_cut(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started(SHORT)
        server.set_budget(0, BIG)
        outwards, _inwards = server.accept(0)
        await outwards.put(next(chunks(bytes(BIG))))
        assert await anext(events) == Connected(0)
        reason = "the peer stalled inside a message for 0.05 s"
        assert await anext(events) == Disconnected(0, reason)
        await server.close()

    run(scenario)


def test_R33_a_client_that_vanishes_is_noticed_and_may_return(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started()
        client = server.client(0)
        await client.connect()
        await client.send(b"one")
        assert await anext(events) == Connected(0)
        assert await anext(events) == Received(0, b"one")
        client.vanish()
        assert await anext(events) == Disconnected(0, "the client is gone")
        await client.connect()
        assert await anext(events) == Connected(0)
        await client.send(b"two")
        assert await anext(events) == Received(0, b"two")
        await server.close()

    run(scenario)


def test_R35_closing_does_not_wait_for_messages_that_nobody_reads(run: Run) -> None:
    async def scenario() -> None:
        server, events = await started(replace(LIMITS, queue=2, close_timeout=300))
        client = server.client(0)
        await client.connect()
        for _ in range(5):
            await server.send(0, b"unread")
        await client.send(b"last words")
        await client.close()
        assert await anext(events) == Connected(0)
        assert await anext(events) == Received(0, b"last words")
        assert await anext(events) == Disconnected(0, "closed by the peer")
        await server.close()

    run(scenario)


def test_misuse_is_named(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started()
        client = server.client(0)
        with pytest.raises(LocalProtocolError, match="call connect"):
            await client.send(b"x")
        with pytest.raises(LocalProtocolError, match="call connect"):
            await client.receive()
        await client.connect()
        with pytest.raises(LocalProtocolError, match="connected already"):
            await client.connect()
        with pytest.raises(ParameterError, match="1 to"):
            await client.send(b"")
        with pytest.raises(ParameterError, match="1 to"):
            await server.send(0, b"")
        with pytest.raises(ParameterError, match="negative"):
            server.set_budget(0, -1)
        with pytest.raises(PeerGone, match="client 1 is not connected"):
            await server.send(1, b"x")
        await client.close()
        await client.close()
        await server.close()

    run(scenario)


def test_cancelled_waits_lose_nothing(run: Run) -> None:
    async def scenario() -> None:
        server, _events = await started()
        client = server.client(0)
        await client.connect()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.receive(), 0.01)
        await server.send(0, b"late")
        assert await client.receive() == b"late"
        await server.close()

    run(scenario)


class LeapingLoop(asyncio.SelectorEventLoop):
    """Its clock goes forward when it is told to."""

    leapt = 0.0

    def time(self) -> float:
        return super().time() + self.leapt


def test_R35_a_peer_that_steadily_takes_data_is_waited_for_however_long_it_takes() -> None:
    """Each chunk takes 40 s of the 60 that are allowed, and the outbox has room for one message."""
    limits = Limits(queue=1, stall_timeout=60.0)
    written: list[bytes] = []
    loop = LeapingLoop()

    async def write(chunk: bytes) -> None:
        loop.leapt += 40.0
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # timers that are due now have fired
        written.append(chunk)

    async def never() -> bytes:
        return await loop.create_future()

    async def ignore(message: object) -> None:
        raise AssertionError("nothing is sent to this side")

    async def scenario() -> str:
        link = Link(limits, Traffic(), lambda length: None, ignore, lambda reason: None)
        running = asyncio.create_task(link.run(never, write))
        for _ in range(4):
            await link.send(bytes(3 * PAYLOAD))
        link.finish()
        return await running

    try:
        assert loop.run_until_complete(scenario()) == CLOSED_HERE
    finally:
        loop.close()
    assert len(written) == 4 * 3 + 1


@pytest.mark.parametrize("steps", range(40))
def test_a_stream_is_freed_whenever_its_end_is_cancelled(run: Run, steps: int) -> None:
    async def scenario() -> None:
        server, _ = await started()
        client = server.client(3)
        await client.connect()
        freed = asyncio.Event()
        shut = client._shut

        async def shut_and_tell() -> None:
            freed.set()
            await shut()

        client._shut = shut_and_tell  # type: ignore[method-assign]
        closing = asyncio.create_task(client.close())
        for _ in range(steps + 1):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert freed.is_set()
        await server.close()

    run(scenario)
