"""R33: delays, cuts, duplicates, reordering and partitions between a client and its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from lightsecagg.drivers.transport.certificates import Authority
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Limits,
    Received,
)
from lightsecagg.drivers.transport.framing import PAYLOAD
from lightsecagg.drivers.transport.tls import Credentials
from lightsecagg.errors import PeerGone, TransportError

pytest.importorskip("grpc")

from lightsecagg.drivers.transport.grpc import GrpcClient, GrpcServer

Run = Callable[[Callable[[], Awaitable[None]]], None]
Save = Callable[..., Credentials]
Setting = tuple[GrpcServer, AsyncIterator[Event], Any, list[GrpcClient]]

LIMITS = Limits(connect_timeout=5, stall_timeout=5, close_timeout=1)


@pytest.fixture
def setting(
    fault_proxy: Any, save: Save, authority: Authority, server_credentials: Credentials
) -> Callable[..., Any]:
    """A server, its events, a proxy, and two clients of it that connect through the proxy."""
    credentials = [save(authority.issue_client(client)) for client in range(2)]

    @asynccontextmanager
    async def make(limits: Limits = LIMITS) -> AsyncIterator[Setting]:
        server = GrpcServer("127.0.0.1:0", range(2), server_credentials, limits=limits)
        await server.start()
        proxy = fault_proxy(server.address)
        await proxy.start()
        clients = [
            GrpcClient(proxy.address, client, own, limits=limits)
            for client, own in enumerate(credentials)
        ]
        for client in range(2):
            server.set_budget(client, 64 * PAYLOAD)
        try:
            yield server, server.events(), proxy, clients
        finally:
            await asyncio.gather(*(client.close() for client in clients))
            await server.close()
            await proxy.close()

    return make


async def gone(events: AsyncIterator[Event]) -> list[Event]:
    """The events up to the first `Disconnected`."""
    seen = []
    async for event in events:
        seen.append(event)
        if isinstance(event, Disconnected):
            break
    return seen


def test_R33_delayed_messages_arrive_whole_and_in_order(run: Run, setting: Any) -> None:
    async def scenario() -> None:
        async with setting() as (server, events, proxy, (client, _)):
            proxy.delay = 0.005
            await client.connect()
            messages = [bytes([n + 1]) * (PAYLOAD // 4) for n in range(6)]
            for message in messages:
                await client.send(message)
                await server.send(0, message)
            assert await anext(events) == Connected(0)
            assert [await anext(events) for _ in messages] == [Received(0, m) for m in messages]
            assert [await client.receive() for _ in messages] == messages

    run(scenario)


def test_R33_a_message_that_is_cut_in_the_middle_is_never_delivered(run: Run, setting: Any) -> None:
    async def scenario() -> None:
        async with setting() as (server, events, proxy, (client, _)):
            proxy.cut_after = 2 * PAYLOAD
            await client.connect()
            await client.send(b"whole")
            await client.send(bytes(4 * PAYLOAD))
            seen = await gone(events)
            assert seen[:2] == [Connected(0), Received(0, b"whole")]
            # Which of the two the server sees first, the end of the data or of the call, is chance.
            inside, lost = "the stream ended inside a message", "the connection was lost"
            assert seen[2:] in ([Disconnected(0, inside)], [Disconnected(0, lost)])
            with pytest.raises(PeerGone, match="the connection was lost"):
                await client.receive()
            assert server.stats.clients[0].messages_in == 1
            # The client repeats what it cannot know to have arrived: that is how duplicates come
            # to be, and the transport hands both over for the protocol to recognise.
            proxy.cut_after = None
            await client.connect()
            await client.send(b"whole")
            assert await anext(events) == Connected(0)
            assert await anext(events) == Received(0, b"whole")

    run(scenario)


def test_R33_messages_are_reordered_across_connections_only(run: Run, setting: Any) -> None:
    async def scenario() -> None:
        async with setting() as (_server, events, proxy, (first, second)):
            await first.connect()
            await second.connect()
            assert {await anext(events), await anext(events)} == {Connected(0), Connected(1)}
            proxy.connections[0].hold()
            await first.send(b"sent first")
            await first.send(b"sent second")
            await second.send(b"sent third")
            assert await anext(events) == Received(1, b"sent third")
            proxy.connections[0].release()
            assert await anext(events) == Received(0, b"sent first")
            assert await anext(events) == Received(0, b"sent second")

    run(scenario)


def test_R33_a_cut_connection_is_noticed_by_both_and_can_be_replaced(
    run: Run, setting: Any
) -> None:
    async def scenario() -> None:
        async with setting() as (server, events, proxy, (client, other)):
            await client.connect()
            await other.connect()
            assert {await anext(events), await anext(events)} == {Connected(0), Connected(1)}
            for number in range(3):
                proxy.connections[2 * number].cut()
                proxy.connections[2 * number + 1].cut()
                lost = {Disconnected(client, "the connection was lost") for client in range(2)}
                assert {await anext(events), await anext(events)} == lost
                with pytest.raises(PeerGone, match="the connection was lost"):
                    await client.receive()
                with pytest.raises(PeerGone, match="is not connected"):
                    await server.send(0, b"x")
                await client.connect()
                await other.connect()
                assert {await anext(events), await anext(events)} == {Connected(0), Connected(1)}
            await server.send(0, b"back")
            assert await client.receive() == b"back"

    run(scenario)


def test_R33_a_silent_partition_is_noticed_by_both(run: Run, setting: Any) -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, keepalive=0.4, connect_timeout=1)
        async with setting(limits) as (_server, events, proxy, (client, _)):
            await client.connect()
            proxy.partition()
            with pytest.raises(PeerGone, match="the connection was lost"):
                await client.receive()
            assert (await gone(events))[-1] == Disconnected(0, "the connection was lost")
            with pytest.raises(TransportError, match="did not answer within 1 s"):
                await client.connect()
            proxy.heal()
            await client.connect()
            await client.send(b"healed")
            seen: Event = Connected(0)
            while not isinstance(seen, Received):
                seen = await anext(events)
            assert seen == Received(0, b"healed")

    run(scenario)


def test_R33_a_newer_connection_wins_over_one_that_is_still_half_open(
    run: Run, setting: Any
) -> None:
    async def scenario() -> None:
        async with setting() as (_server, events, proxy, (client, _)):
            await client.connect()
            await client.send(b"one")
            assert await anext(events) == Connected(0)
            assert await anext(events) == Received(0, b"one")
            # The client's side of the connection breaks; the server is not told.
            old = proxy.connections[0]
            old.hold()
            await client.send(b"lost")
            reborn = GrpcClient(proxy.address, 0, client._credentials, limits=LIMITS)
            await reborn.connect()
            await reborn.send(b"two")
            reason = "replaced by a newer stream of the same identity"
            assert await anext(events) == Disconnected(0, reason)
            assert await anext(events) == Connected(0)
            assert await anext(events) == Received(0, b"two")
            old.release()
            await reborn.send(b"three")
            assert await anext(events) == Received(0, b"three")
            await reborn.close()

    run(scenario)


def test_R33_a_refusing_network_is_explained(run: Run, setting: Any) -> None:
    async def scenario() -> None:
        async with setting() as (_server, _events, proxy, (client, _)):
            proxy.refusing = True
            with pytest.raises(TransportError, match="cannot connect"):
                await client.connect()
            proxy.refusing = False
            await client.connect()

    run(scenario)
