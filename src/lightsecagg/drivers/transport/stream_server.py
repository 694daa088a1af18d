"""What the servers of all transports share: who is connected, what each may still send, events.

A transport adds a way to get chunks in and out. Quotas belong to an identity, not to a stream, so
reconnecting renews nothing (S26).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Container
from dataclasses import dataclass

from lightsecagg.drivers.peer_log import PeerLog
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Limits,
    Notice,
    Received,
    Stats,
    Traffic,
)
from lightsecagg.drivers.transport.framing import MAX_CHUNK, MAX_MESSAGE, PAYLOAD
from lightsecagg.drivers.transport.keeping import Data, keeping
from lightsecagg.drivers.transport.link import CLOSED_HERE, LOST, Link
from lightsecagg.drivers.transport.mailbox import Mailbox
from lightsecagg.drivers.transport.room import Room
from lightsecagg.errors import (
    ConfigurationError,
    ParameterError,
    PeerGone,
    Refused,
    RemoteProtocolError,
    TransportError,
)

_log = logging.getLogger(__name__)
_LOGGED = 10
"""Refused streams of a kind that are logged one by one."""
_TURN = 0.01
"""Seconds for which events that wait are dealt with before others have their turn of the loop."""


@dataclass(slots=True)
class _Peer:
    """What the server keeps about one identity across its streams."""

    budget: int
    room: asyncio.Semaphore
    """Messages of this peer that may still wait for the consumer of events."""
    traffic: Traffic
    link: Link | None = None


class StreamServer(ABC):
    """A `ServerCommunicator` over whatever streams `start` lets in.

    A transport asks `_admit` for the link of an authenticated stream, runs it, and gives it back
    with `_release`.
    """

    def __init__(self, clients: Container[int], limits: Limits) -> None:
        """`clients` holds the ids that may connect."""
        self.stats = Stats()
        self._clients = clients
        self._revoked: Container[bytes] = frozenset()
        self._limits = limits
        if limits.memory < MAX_CHUNK:
            raise ConfigurationError(
                f"a server that lets {limits.memory} bytes of messages wait could take none: give "
                f"Limits.memory {MAX_CHUNK} bytes, a chunk, or more"
            )
        self._room = Room(limits.memory)
        self._keep = keeping(limits.folder, PAYLOAD)
        self._peers: dict[int, _Peer] = {}
        self._links: set[Link] = set()  # those a carrier holds: live, or cut and unwinding
        self._events: Mailbox[Event] = Mailbox()
        self._closing = False
        self._backlog = limits.backlog
        self._log = PeerLog(_log)

    @abstractmethod
    async def start(self) -> None:
        """Accept clients from now on."""

    def admit(self, clients: Container[int], revoked: Container[bytes]) -> None:
        """From now on these ids may connect; certificates concern transports that have them."""
        self._clients, self._revoked = clients, revoked

    def _refuse(self, kind: str, explanation: str) -> Refused:
        """Count and log a refused stream; the caller raises or reports what is returned."""
        self.stats.refused[kind] += 1
        count = self.stats.refused[kind]
        # Strangers must not fill the log: of a kind, the first ten, then the 16th, the 32nd, ...
        if count <= _LOGGED or count.bit_count() == 1:
            number = f", number {count}" if count > 1 else ""
            _log.warning("refused a stream (%s%s): %s", kind, number, explanation)
        return Refused(explanation)

    def _admit(self, client: int) -> Link:
        """A link for a new stream of this authenticated identity; the newer stream wins.

        A client whose machine crashed must not wait until the server notices that its old
        connection is dead.
        """
        if self._closing:
            raise TransportError(str(self._refuse("closing", "the server is closing")))
        if client not in self._clients:
            raise self._refuse("unknown client", f"client {client} is not on the allow-list")
        peer = self._peer(client)
        if peer.link is not None:
            peer.link.cut("replaced by a newer stream of the same identity")
        peer.budget = max(peer.budget, self._limits.initial_budget)
        link = self._link(client, peer)
        peer.link = link
        self._links.add(link)
        self._events.put_now(Connected(client))
        return link

    def _release(self, link: Link) -> None:
        """The carrier is done with this link."""
        link.cut(LOST)
        self._links.discard(link)
        link.released.set()

    async def events(self) -> AsyncIterator[Event]:
        """Everything that happens, in order; ends after `close()`."""
        loop = asyncio.get_running_loop()
        turn = loop.time()
        while True:
            if loop.time() - turn >= _TURN:
                await asyncio.sleep(0)
                turn = loop.time()
            try:
                event = await self._events.get()
            except PeerGone:
                return
            yield event
            if isinstance(event, Received):  # and dealt with, since the next one is asked for
                self._peers[event.client].room.release()
                self._room.give_back(self._weight(event.data))
            del event  # while nothing happens nothing is kept

    async def send(self, client: int, data: bytes) -> None:
        """Queue a message for a connected client."""
        if not 0 < len(data) <= MAX_MESSAGE:
            raise ParameterError(f"a message has 1 to {MAX_MESSAGE} bytes, not {len(data)}")
        peer = self._peers.get(client)
        if peer is None or peer.link is None:
            raise PeerGone(f"client {client} is not connected")
        await peer.link.send(data)

    def post(self, client: int, data: bytes) -> None:
        """Send as soon as the client takes it, if it is connected."""
        if not 0 < len(data) <= MAX_MESSAGE:
            raise ParameterError(f"a message has 1 to {MAX_MESSAGE} bytes, not {len(data)}")
        peer = self._peers.get(client)
        link = None if peer is None else peer.link
        if link is None or self._closing:
            return
        if link.waiting and link.waiting + len(data) > self._backlog:
            link.cut(f"it takes its data too slowly: {link.waiting} bytes wait for it")
        else:
            link.post(data)

    def notify(self, what: object) -> None:
        """Put a notice behind the events that wait."""
        if not self._closing:
            self._events.put_now(Notice(what))

    def set_backlog(self, bytes_: int) -> None:
        """How many bytes of posted messages may wait for one client."""
        self._backlog = bytes_

    def disconnect(self, client: int, reason: str) -> None:
        """Cut a client, telling it why, if it is connected."""
        peer = self._peers.get(client)
        if peer is not None and peer.link is not None:
            peer.link.cut(reason)

    def set_budget(self, client: int, bytes_: int) -> None:
        """Let this client send that many more bytes in this phase."""
        if bytes_ < 0:
            raise ParameterError(f"a budget of {bytes_} bytes must not be negative")
        self._peer(client).budget = bytes_

    async def close(self) -> None:
        """Let queued messages leave until the deadline, then cut; end the events."""
        self._closing = True
        for link in tuple(self._links):
            link.finish()
        await self._released()
        for link in tuple(self._links):
            link.cut(CLOSED_HERE)
        await self._released()
        self._events.close(CLOSED_HERE)
        self._log.close()

    async def _released(self) -> None:
        """Wait, but not past the deadline, until carriers are done with their links."""
        ends = [asyncio.create_task(link.released.wait()) for link in tuple(self._links)]
        if ends:
            _, late = await asyncio.wait(ends, timeout=self._limits.close_timeout)
            for task in late:
                task.cancel()

    def _peer(self, client: int) -> _Peer:
        if client not in self._peers:
            traffic = self.stats.clients.setdefault(client, Traffic())
            room = asyncio.Semaphore(self._limits.queue)
            self._peers[client] = _Peer(self._limits.initial_budget, room, traffic)
        return self._peers[client]

    def _weight(self, message: Data) -> int:
        """What a message that waits takes of the memory for all."""
        return len(message) if isinstance(message, bytes) else 0

    def _link(self, client: int, peer: _Peer) -> Link:
        def accept(length: int) -> None:
            if length > peer.budget:
                raise RemoteProtocolError(
                    f"client {client} announced a message of {length} bytes, "
                    f"{peer.budget} are left of its budget for this phase"
                )
            if self._limits.folder is None and length > self._limits.memory:
                raise RemoteProtocolError(
                    f"client {client} announced a message of {length} bytes; without a folder this "
                    f"server has room for {self._limits.memory}"
                )
            peer.budget -= length

        async def deliver(message: Data) -> None:
            await peer.room.acquire()
            try:
                await self._room.take(self._weight(message))
            except asyncio.CancelledError:  # the link was cut
                peer.room.release()
                raise
            if link.reason is None:
                self._events.put_now(Received(client, message))
            else:
                peer.room.release()
                self._room.give_back(self._weight(message))

        def on_cut(reason: str) -> None:
            if peer.link is link:
                peer.link = None
            self._log.write(
                logging.INFO, f"client {client}", "client %d disconnected: %s", client, reason
            )
            self._events.put_now(Disconnected(client, reason))

        link = Link(self._limits, peer.traffic, accept, deliver, on_cut, self._keep)
        return link
