"""The Communicator of Section 6: one interface, opaque bytes between a server and its clients.

A server sees one ordered sequence of events; a client sends and receives whole messages. Identity
is the transport's business (`Connected.client` is authenticated, S24) and so is size: a peer that
sends more than its budget is cut before memory is spent on it (S25). What the bytes mean is not.

Order: what one client sends arrives in the order it was sent. `Connected` of a client comes before
its messages, `Disconnected` after them, and when a newer stream of the same identity replaces an
older one, the `Disconnected` of the older comes before the `Connected` of the newer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from lightsecagg.drivers.transport.keeping import Data


@dataclass(frozen=True, slots=True)
class Connected:
    """A client has an authenticated stream."""

    client: int
    """The id its certificate carries."""


@dataclass(frozen=True, slots=True)
class Received:
    """A client sent one whole message."""

    client: int
    data: Data = field(repr=False)
    """A view of a file, if it is long and the server has a `Limits.folder`."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A client's stream ended; it may come back with another."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something of this process's own, which it put among the events with `notify`."""

    what: object


Event = Connected | Received | Disconnected | Notice


@dataclass(frozen=True, slots=True)
class Limits:
    """What one side spends on a peer, and how long it waits for it (S25-S27, R35)."""

    initial_budget: int = 64 * 1024
    """Bytes that a fresh stream may send before the server sets a budget for the phase."""
    max_message: int = 1 << 30
    """Bytes of the largest message that a client accepts from its server."""
    queue: int = 8
    """Whole messages that wait in each direction before back-pressure."""
    memory: int = 1 << 25
    """Bytes of whole messages from all clients together that wait in a server's memory before
    back-pressure; those in files do not count."""
    folder: Path | None = None
    """Where a server keeps messages of more than one chunk until it has dealt with them; without
    a folder, in memory too."""
    backlog: int = 1 << 20
    """Bytes of posted messages that may wait for one client until the server says otherwise."""
    ahead: int = 1 << 19
    """Bytes that a peer may send before this side reads on: so many a round trip, no more."""
    connections: int = 2**31 - 2
    """Connections that a gRPC server has open at a time, those without a handshake included; more
    are closed at once, so that descriptors are left for its files (R60)."""
    connect_timeout: float = 10.0
    """Seconds for one attempt to connect, handshakes included."""
    stall_timeout: float = 60.0
    """Seconds without progress, in either direction, after which a peer inside a message is cut."""
    keepalive: float = 20.0
    """Seconds of silence until a peer is asked whether it lives; it has half that to answer."""
    close_timeout: float = 5.0
    """Seconds for what is queued to leave before a stream is closed regardless."""


_AHEAD_OF_ALL, _LEAST_AHEAD, _MOST_AHEAD = 1 << 25, 1 << 19, 1 << 22


def ahead_of(clients: int) -> int:
    """What each of so many clients may be ahead of a server's reading.

    Few may fill a fast and long link, 800 Mbit/s over 40 ms; many take their part of what all may
    have together (R53), but half a megabyte each.
    """
    return min(max(_AHEAD_OF_ALL // max(clients, 1), _LEAST_AHEAD), _MOST_AHEAD)


@dataclass(slots=True)
class Traffic:
    """Whole messages, and the bytes in them, as one side saw them."""

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0


@dataclass(slots=True)
class Stats:
    """What a server's transport has carried and refused since it started."""

    clients: dict[int, Traffic] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """Why streams were refused, and how often."""
    handshakes: int = 0
    """TLS handshakes that peers began."""

    @property
    def total(self) -> Traffic:
        """The sum over all clients."""
        clients = self.clients.values()
        return Traffic(
            bytes_in=sum(traffic.bytes_in for traffic in clients),
            bytes_out=sum(traffic.bytes_out for traffic in clients),
            messages_in=sum(traffic.messages_in for traffic in clients),
            messages_out=sum(traffic.messages_out for traffic in clients),
        )


class ServerCommunicator(Protocol):
    """The server's end of every client's stream."""

    async def start(self) -> None:
        """Listen; `ConfigurationError` or `TransportError` if that is impossible."""

    def events(self) -> AsyncIterator[Event]:
        """Everything that happens, in order, for one consumer; ends after `close()`."""

    async def send(self, client: int, data: bytes) -> None:
        """Queue one message; waits while the client's queue is full.

        Raises `PeerGone` if the client is not connected, or takes no data until the deadline (it
        is then cut). Send to many clients from as many tasks, so that none waits for another.
        """

    def admit(self, clients: Container[int], revoked: Container[bytes]) -> None:
        """From now on these ids may connect, unless the SHA-256 of their certificate is revoked.

        Their streams with revoked certificates are cut; those of other ids are the caller's to end.
        """

    def post(self, client: int, data: bytes) -> None:
        """Send one message as soon as the client takes it; never waits.

        Nothing happens if the client is not connected; one that lets more than `set_backlog` says
        wait for it is cut.
        """

    def notify(self, what: object) -> None:
        """Put a `Notice` of this behind the events that wait; call it in the loop's thread."""

    def set_backlog(self, bytes_: int) -> None:
        """How many bytes of posted messages may wait for one client, from now on (S27)."""

    def disconnect(self, client: int, reason: str) -> None:
        """Cut a misbehaving client, telling it why; what was queued for it is dropped."""

    def set_budget(self, client: int, bytes_: int) -> None:
        """Let this client send that many more bytes in this phase, and no more (S25).

        The budget belongs to the identity, connected or not: reconnecting does not renew it,
        beyond the `initial_budget` that every fresh stream needs to introduce itself.
        """

    async def close(self) -> None:
        """Send what is queued, as long as the deadline allows, then end every stream."""

    @property
    def stats(self) -> Stats:
        """Bytes and messages, in total and per client, and refused connections."""


class ClientCommunicator(Protocol):
    """A client's end of its one stream to the server."""

    async def connect(self) -> None:
        """Try once, until a deadline; `TransportError` says what to check, `Refused` that trying
        again is of no use. May be called again after the stream has ended."""

    async def send(self, data: bytes) -> None:
        """Queue one message; waits while the queue is full. `PeerGone` once the stream ended."""

    async def receive(self) -> bytes:
        """The next whole message; `PeerGone` once the stream has ended and all are read."""

    async def close(self) -> None:
        """Send what is queued, as long as the deadline allows, then end the stream."""


class Transport(NamedTuple):
    """A way to carry messages that another distribution adds; see `plugins.TRANSPORTS`.

    Both sides are told whether the user accepts that an unsafe transport leaves the machine, as
    `understood`. A transport without certificates refuses other addresses than loopback otherwise.
    """

    server: Callable[..., ServerCommunicator]
    """address, ids of the clients, understood=, limits="""
    client: Callable[..., ClientCommunicator]
    """address, id, understood="""
