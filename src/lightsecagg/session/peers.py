"""The server's view of its clients: who has a stream, and who has said hello on it.

A client must say hello, once and first, on every stream. What it says before, twice, or in a form
that is not a message, gets it cut. Whatever a client's bytes do here, they harm nobody else (S29,
S41).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.foreign import explain
from lightsecagg.session.envelope import (
    VERSION,
    AnyControl,
    Fetch,
    Goodbye,
    Hello,
    NewMembers,
    Withdraw,
    pack_control,
    unpack,
)
from lightsecagg.session.interface import NEVER, Cut, Effect, Log, Members, Post

GREETING_DEADLINE = 10.0
"""Seconds in which a new stream must say hello."""


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
    content: Withdraw | Fetch | tuple[int, memoryview] = field(repr=False)
    """A control message, or a round number and an encoded protocol message."""


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """A client was cut for what it said."""

    client: int
    reason: str


@dataclass(slots=True)
class _Peer:
    since: float
    greeted: bool = False
    refused: bool = False
    """What else arrives on this stream is not listened to."""
    gone_since: float | None = None
    seen: int = -1
    """The newest round that it has seen, as it greets."""

    @property
    def ready(self) -> bool:
        return self.greeted and not self.refused and self.gone_since is None


class Peers:
    """Every client that has connected."""

    def __init__(
        self, emit: Callable[[Effect], None], admitted: int, members: Members | None = None
    ) -> None:
        """`admitted` is how many clients may connect; `members`, where they can change."""
        self._emit, self._admitted, self._members = emit, admitted, members
        self._peers: dict[int, _Peer] = {}
        self._silent: dict[int, float] = {}
        """Streams that must say hello, or leave, and until when."""
        self.refusals: Counter[str] = Counter()
        """Why clients were cut, by the type of the error."""
        self.bytes_in = self.bytes_out = 0

    # -- who is here ---------------------------------------------------------------------------

    def ready(self) -> list[int]:
        """Who is connected and has greeted."""
        return sorted(client for client, peer in self._peers.items() if peer.ready)

    def is_ready(self, client: int) -> bool:
        """Whether it is connected and has greeted."""
        peer = self._peers.get(client)
        return peer is not None and peer.ready

    def is_known(self, client: int) -> bool:
        """Whether it has ever connected to this session."""
        return client in self._peers

    def gone_since(self, client: int) -> float | None:
        """When its last stream ended; None if it has one, or never had."""
        peer = self._peers.get(client)
        return None if peer is None else peer.gone_since

    def seen(self, client: int) -> int:
        """The newest round that a client that is ready claims to have seen; -1 for none."""
        return self._peers[client].seen

    # -- what is said to it --------------------------------------------------------------------

    def post(self, client: int, data: bytes) -> None:
        """Send, if the client is there."""
        if self.is_ready(client):
            self.bytes_out += len(data)
            self._emit(Post(client, data))

    def tell(self, client: int, message: AnyControl) -> None:
        """Send a control message, if the client is there."""
        self.post(client, pack_control(message))

    def cut(self, client: int, error: Exception) -> None:
        """End a client's stream because of what it sent, or of what that did here."""
        self.refusals[type(error).__name__] += 1
        self._cut(client, explain(error))

    def _cut(self, client: int, reason: str) -> None:
        self._warn(client, "client %d cut: %s", client, reason)
        peer = self._peers.get(client)
        if peer is not None:
            peer.refused = True
        self._emit(Cut(client, reason))

    # -- what happens to it --------------------------------------------------------------------

    def connected(self, client: int, now: float) -> None:
        """It has a new stream."""
        self._peers[client] = _Peer(now)
        self._silent[client] = now + GREETING_DEADLINE

    def disconnected(self, client: int, now: float) -> None:
        """Its stream has ended."""
        self._silent.pop(client, None)
        if client in self._peers:
            self._peers[client].gone_since = now

    def received(
        self, client: int, data: bytes | memoryview
    ) -> Greeted | Spoke | Misbehaved | None:
        """What a message means to the rest of the session; None if it concerns nobody else."""
        peer = self._peers.get(client)
        self.bytes_in += len(data)
        if peer is None or peer.refused or peer.gone_since is not None:
            return None
        try:
            content = unpack(data)
            if isinstance(content, Hello):
                return self._on_hello(client, peer, content)
            if not peer.greeted:
                raise RemoteProtocolError(f"client {client} spoke before its hello")
            if not isinstance(content, Withdraw | Fetch | tuple):
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
        if hello.version != VERSION:
            reason = (
                f"this server speaks version {VERSION} of the federation's messages, the client "
                f"version {hello.version}; use the same release on both sides"
            )
            self._turn_away(client, peer, "version", reason)
            return None
        members = self._members
        if members is not None and client not in members.allow_list:
            self._turn_away(client, peer, "revoked", _revoked(client, members))
            return None
        peer.greeted, peer.seen = True, hello.seen
        del self._silent[client]
        if members is not None:
            self._compare_members(client, hello.members, members)
        here = f"{len(self.ready())} of {self._admitted}"
        self._emit(Log(logging.INFO, "client %d connected (%s)", (client, here), client))
        return Greeted(client, hello.round)

    def _turn_away(self, client: int, peer: _Peer, kind: str, reason: str) -> None:
        """Say goodbye to it and listen no more; if it does not leave, it is cut."""
        self._warn(client, "client %d is turned away: %s", client, reason)
        self.refusals[kind] += 1
        self._emit(Post(client, pack_control(Goodbye(reason, finished=False))))
        peer.greeted, peer.refused = False, True

    # -- members -------------------------------------------------------------------------------

    def use_members(self, members: Members, now: float) -> None:
        """From now on these are the members: the others leave, and all hear of the new list."""
        self._members, self._admitted = members, len(members.allow_list)
        news = pack_control(NewMembers(members.content))
        for client, peer in self._peers.items():
            if client in members.allow_list:
                self.post(client, news)
            elif peer.gone_since is None and not peer.refused:
                self._turn_away(client, peer, "revoked", _revoked(client, members))
                self._silent[client] = now + GREETING_DEADLINE

    def _compare_members(self, client: int, number: int, members: Members) -> None:
        if number < members.number:
            self.tell(client, NewMembers(members.content))
        elif number > members.number:
            self._warn(
                client,
                "client %d holds allow-list number %d, this server number %d: its rounds are "
                "refused there until [federation] allow_list is the newest",
                client,
                number,
                members.number,
            )

    # -- time ----------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When a silent stream is to be cut."""
        return min(self._silent.values(), default=NEVER)

    def tick(self, now: float) -> None:
        """Cut streams that do not greet, and those that were turned away and do not leave."""
        for client, until in list(self._silent.items()):
            if now >= until:
                del self._silent[client]
                self._cut(client, f"it did not say hello within {GREETING_DEADLINE:g} s")

    def _warn(self, client: int, message: str, *arguments: object) -> None:
        self._emit(Log(logging.WARNING, message, arguments, client))


def _revoked(client: int, members: Members) -> str:
    return f"client {client} is not on the allow-list any more (number {members.number})"
