"""The server's view of its clients: who has greeted, and what waits to be sent to whom.

A client must say hello, once and first, on every stream. What it says before, twice, or in a form
that is not a message, gets it cut. What waits for a slow client is bounded; beyond the bound it
is cut too, and may come back with nothing waiting. No client can make `next` raise (S29, S41).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from lightsecagg.drivers.federation.membership import Membership
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.peer_log import DEBUG_BURST, DEBUG_INTERVAL, PeerLog
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Received,
    ServerCommunicator,
)
from lightsecagg.errors import PeerGone, RemoteProtocolError
from lightsecagg.foreign import explain
from lightsecagg.session.envelope import (
    VERSION,
    Goodbye,
    Hello,
    NewMembers,
    Withdraw,
    describe,
    pack_control,
    unpack,
)

GREETING_DEADLINE = 10.0
"""Seconds in which a new stream must say hello."""
_SWEEP = 0.5
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Greeted:
    """A client has said hello on a new stream."""

    client: int
    round: int
    """The round whose party is still alive there; -1 for none."""


@dataclass(frozen=True, slots=True)
class Spoke:
    """A client that has greeted sent a message."""

    client: int
    content: Withdraw | tuple[int, memoryview] = field(repr=False)
    """A withdrawal, or a round number and an encoded protocol message."""


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """A client was cut for what it said."""

    client: int
    reason: str


PeerEvent = Greeted | Spoke | Misbehaved | Disconnected


class _Woken:
    """Nothing happened; somebody wants `next` to return."""


class _Outbox:
    """What waits for one stream, and the task that sends it: a slow client delays nobody else."""

    def __init__(self, communicator: ServerCommunicator, client: int) -> None:
        self._communicator, self._client = communicator, client
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.create_task(self._send_all())
        self.waiting = 0
        """Bytes."""

    def put(self, data: bytes) -> None:
        self.waiting += len(data)
        self._queue.put_nowait(data)

    async def drained(self) -> None:
        """Until everything was handed to the transport."""
        await self._queue.join()

    def close(self) -> None:
        """Send nothing more: what waits was meant for a stream that is gone."""
        self._task.cancel()

    async def _send_all(self) -> None:
        try:
            while True:
                data = await self._queue.get()
                await self._communicator.send(self._client, data)
                self.waiting -= len(data)
                self._queue.task_done()
        except PeerGone:
            return  # the transport reports it as an event too
        except Exception as error:
            log.error("nothing more is sent to client %d: %s", self._client, explain(error))
            self._communicator.disconnect(self._client, explain(error))


@dataclass(slots=True)
class _Peer:
    outbox: _Outbox
    since: float
    greeted: bool = False
    refused: bool = False
    """What else arrives on this stream is not listened to."""
    gone_since: float | None = None


class Peers:
    """Every client that has connected; one consumer."""

    def __init__(self, communicator: ServerCommunicator, admitted: int | None = None) -> None:
        """`admitted` is how many clients may connect, where that is known."""
        self._communicator, self._admitted = communicator, admitted
        self._events: asyncio.Queue[Event | _Woken] = asyncio.Queue(maxsize=64)
        self._peers: dict[int, _Peer] = {}
        self._reader: asyncio.Task[None] | None = None
        self._next_sweep = 0.0
        self._log = PeerLog(log)
        self._traffic = PeerLog(log, burst=DEBUG_BURST, interval=DEBUG_INTERVAL)
        self.backlog = _SMALL
        """The most bytes that may wait for one client; see `budgets.backlog_limit`."""
        self._members: Membership | None = None
        self.refusals: Counter[str] = Counter()
        """Why clients were cut, by the type of the error."""

    async def start(self) -> None:
        """Listen."""
        await self._communicator.start()
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """End every stream."""
        if self._reader is not None:
            self._reader.cancel()
        for peer in self._peers.values():
            peer.outbox.close()
        await self._communicator.close()
        self._log.close()
        self._traffic.close()

    async def drain(self, timeout: float) -> None:
        """Wait, but no longer than this, until nothing waits for those who are connected."""
        waits = [
            asyncio.create_task(peer.outbox.drained())
            for peer in self._peers.values()
            if peer.gone_since is None
        ]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout)
            for task in late:
                task.cancel()

    def ready(self) -> list[int]:
        """Who is connected and has greeted."""
        return sorted(client for client, peer in self._peers.items() if _is_ready(peer))

    def gone_since(self, client: int) -> float | None:
        """When (monotonic) its last stream ended; None if it has one, or never had."""
        peer = self._peers.get(client)
        return None if peer is None else peer.gone_since

    def known(self, client: int) -> bool:
        """Whether it has ever connected to this server process."""
        return client in self._peers

    def post(self, client: int, data: bytes) -> None:
        """Send when the client takes it; nothing happens if it is not there."""
        peer = self._peers.get(client)
        if peer is None or not _is_ready(peer):
            return
        waiting = peer.outbox.waiting
        if waiting and waiting + len(data) > self.backlog:
            self._cut(client, f"it takes its data too slowly: {waiting} bytes wait for it")
            return
        self._trace("to", client, data)
        peer.outbox.put(data)

    def cut(self, client: int, error: Exception) -> None:
        """End a client's stream because of what it sent, or of what that did here."""
        self.refusals[type(error).__name__] += 1
        self._cut(client, explain(error))

    def _cut(self, client: int, reason: str) -> None:
        self._warn(client, "client %d cut: %s", client, reason)
        peer = self._peers.get(client)
        if peer is not None:
            peer.refused = True
        self._communicator.disconnect(client, reason)

    def use_members(self, members: Membership) -> None:
        """From now on these are the members: the others leave, and all hear of the new list."""
        self._members, self._admitted = members, len(members.allow_list)
        news = pack_control(NewMembers(members.content))
        for client, peer in self._peers.items():
            if client in members.allow_list:
                self.post(client, news)
            elif peer.gone_since is None:
                self._turn_away(client, peer, "revoked", _revoked(client, members))

    def _turn_away(self, client: int, peer: _Peer, kind: str, reason: str) -> None:
        """Say goodbye to it and listen no more; if it does not leave, it is cut."""
        self._warn(client, "client %d is turned away: %s", client, reason)
        self.refusals[kind] += 1
        self.post(client, pack_control(Goodbye(reason, finished=False)))
        peer.greeted, peer.refused = False, True

    def wake(self) -> None:
        """Let `next` return now; it does anyway if events wait."""
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(_Woken())

    async def next(self, timeout: float) -> PeerEvent | None:
        """What happens next; None after `timeout` or `wake`, or when it concerns nobody else."""
        self._cut_the_silent()
        event = await self._take(timeout)
        match event:
            case Connected(client):
                self._open(client)
                return None
            case Disconnected(client):
                peer = self._peers[client]
                peer.gone_since = time.monotonic()
                peer.outbox.close()
                return event
            case Received(client, data):
                return self._on_message(client, self._peers[client], data)
        return None

    async def _take(self, timeout: float) -> Event | _Woken | None:
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._events.get_nowait()
        try:
            return await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return None

    async def _read(self) -> None:
        async for event in self._communicator.events():
            await self._events.put(event)

    def _open(self, client: int) -> None:
        if client in self._peers:
            self._peers[client].outbox.close()
        self._peers[client] = _Peer(_Outbox(self._communicator, client), time.monotonic())

    def _on_message(self, client: int, peer: _Peer, data: bytes) -> PeerEvent | None:
        if peer.refused or peer.gone_since is not None:
            return None
        self._trace("from", client, data)
        try:
            content = unpack(data)
            if isinstance(content, Hello):
                return self._on_hello(client, peer, content)
            if not peer.greeted:
                raise RemoteProtocolError(f"client {client} spoke before its hello")
            if not isinstance(content, Withdraw | tuple):
                raise RemoteProtocolError(
                    f"client {client} sent {type(content).__name__}, which only servers send"
                )
        except Exception as error:  # whatever these bytes did, they harm their sender only (S41)
            self.cut(client, error)
            return Misbehaved(client, explain(error))
        return Spoke(client, content)

    def _on_hello(self, client: int, peer: _Peer, hello: Hello) -> Greeted | None:
        if peer.greeted:
            raise RemoteProtocolError(f"client {client} said hello twice on one stream")
        peer.greeted = True
        if hello.version != VERSION:
            reason = (
                f"this server speaks version {VERSION} of the federation's messages, the client "
                f"version {hello.version}; use the same release on both sides"
            )
            self._turn_away(client, peer, "version", reason)
            return None
        if self._members is not None:
            if client not in self._members.allow_list:  # it connected when the list changed
                self._turn_away(client, peer, "revoked", _revoked(client, self._members))
                return None
            self._compare_members(client, hello.members, self._members)
        here = str(len(self.ready())) + (f" of {self._admitted}" if self._admitted else "")
        name = f"client {client}"
        self._log.write(logging.INFO, name, "client %d connected (%s)", client, here)
        return Greeted(client, hello.round)

    def _compare_members(self, client: int, number: int, members: Membership) -> None:
        if number < members.number:
            self.post(client, pack_control(NewMembers(members.content)))
        elif number > members.number:
            self._warn(
                client,
                "client %d holds allow-list number %d, this server number %d: its rounds are "
                "refused there until [federation] allow_list is the newest",
                client,
                number,
                members.number,
            )

    def _trace(self, direction: str, client: int, data: bytes) -> None:
        if log.isEnabledFor(logging.DEBUG):
            what, name = describe(data), f"client {client}"
            self._traffic.write(logging.DEBUG, name, "%s client %d: %s", direction, client, what)

    def _warn(self, client: int, message: str, *arguments: object) -> None:
        self._log.write(logging.WARNING, f"client {client}", message, *arguments)

    def _cut_the_silent(self) -> None:
        """Streams that do not greet, and those that were turned away and do not leave."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP
        for client, peer in self._peers.items():
            waits = peer.gone_since is None and not peer.greeted
            if waits and now - peer.since > GREETING_DEADLINE:
                self._cut(client, f"it did not say hello within {GREETING_DEADLINE:g} s")


def _revoked(client: int, members: Membership) -> str:
    return f"client {client} is not on the allow-list any more (number {members.number})"


def _is_ready(peer: _Peer) -> bool:
    return peer.greeted and not peer.refused and peer.gone_since is None
