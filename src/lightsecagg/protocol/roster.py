"""The roster of a round and the context C1 that it fixes.

C1 hashes C0 and, in order, every member's id, identity key, ephemeral keys and evaluation point.
Every later signature, key and associated data binds C1: a server that shows one client the same
members in another order has thereby split the round into two that share nothing.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property

from lightsecagg.crypto import identity
from lightsecagg.crypto.agreement import check_public_key
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import context_hash, uint
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field import ntt
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.messages import Roster
from lightsecagg.protocol.settings import Settings

_ADVERTISE = "advertise keys"


@dataclass(frozen=True)
class Round:
    """A round whose roster is fixed."""

    settings: Settings
    context: bytes
    """C1"""
    members: tuple[int, ...]
    """Ids in roster order; the index is the client's position."""
    keys: tuple[tuple[bytes, ...], ...] = field(repr=False)
    """Ephemeral public keys, by position."""
    graph: tuple[int, ...] = field(default=(), repr=False)
    """SecAgg+: positions in ring order; empty for the complete graph."""

    @cached_property
    def positions(self) -> dict[int, int]:
        """Client id -> position."""
        return {client: position for position, client in enumerate(self.members)}


def sign_keys(key: IdentityKey, context: bytes, client: int, keys: tuple[bytes, ...]) -> bytes:
    """What a client advertises with its ephemeral keys: a signature over (C0, id, keys)."""
    return key.sign(_ADVERTISE, context, uint(client), *keys)


def check_keys(
    settings: Settings,
    allow_list: AllowList,
    client: int,
    keys: tuple[bytes, ...],
    signature: bytes,
    count: int,
) -> None:
    """Refuse advertised keys that are not this client's, well-formed and for this round."""
    if client not in allow_list:
        raise RemoteProtocolError(f"client {client} is not on the allow-list")
    if len(keys) != count:
        raise RemoteProtocolError(
            f"client {client} advertised {len(keys)} keys, {settings.protocol} takes {count}"
        )
    if len(set(keys)) != len(keys):
        raise RemoteProtocolError(
            f"client {client} advertised one key for two purposes; it must draw two key pairs"
        )
    try:
        for key in keys:
            check_public_key(key, client)
        identity.verify(
            f"client {client}",
            allow_list[client],
            signature,
            _ADVERTISE,
            settings.context,
            uint(client),
            *keys,
        )
    except CryptoError as error:
        raise RemoteProtocolError(f"keys of client {client} refused: {error}") from error


def check_fresh(client: int, keys: tuple[bytes, ...], taken: Container[bytes]) -> None:
    """Refuse keys that another client has advertised before: nobody would accept the roster (S45).

    Keys of honest clients never meet by chance, and nobody sees another's before the roster is
    out. So whoever comes second with a key has agreed on it with the first, and is the one to go.
    Keys are canonical (`check_keys`): equal bytes are equal keys.
    """
    if any(key in taken for key in keys):
        raise RemoteProtocolError(
            f"client {client} advertised a key that another client has advertised before; every "
            "client draws its own"
        )


def accept_roster(
    settings: Settings, allow_list: AllowList, roster: Roster, own: int, own_keys: tuple[bytes, ...]
) -> Round:
    """The round that a roster fixes, if the client `own` may accept it (S02)."""
    members = [member.client for member in roster.members]
    least, most = settings.minimum, settings.parameters.clients
    if not least <= len(members) <= most:
        raise RemoteProtocolError(
            f"a roster of {len(members)} members is refused: it must have {least} to {most}"
        )
    if len(set(members)) != len(members):
        raise RemoteProtocolError("the roster names a client twice")
    _check_graph(settings, roster)
    if own not in members:
        raise RemoteProtocolError(f"the roster does not name this client, {own}")
    if roster.members[members.index(own)].keys != own_keys:
        raise RemoteProtocolError("the roster gives this client other keys than it advertised")
    all_keys = [key for member in roster.members for key in member.keys]
    if len(set(all_keys)) != len(all_keys):
        raise RemoteProtocolError("two keys of the roster are equal")
    for member in roster.members:
        if member.client != own:
            check_keys(
                settings, allow_list, member.client, member.keys, member.signature, len(own_keys)
            )
    return fix_round(settings, allow_list, roster)


def _check_graph(settings: Settings, roster: Roster) -> None:
    if not settings.traits.ring:
        if roster.graph:
            raise RemoteProtocolError(
                f"the roster brings a sharing graph, but {settings.protocol} shares with everybody"
            )
    elif sorted(roster.graph) != list(range(len(roster.members))):
        raise RemoteProtocolError(
            f"the roster's ring is no permutation of its {len(roster.members)} positions"
        )


def fix_round(settings: Settings, allow_list: AllowList, roster: Roster) -> Round:
    """The round and its context C1, without checks: for the server's own roster."""
    points = ntt.points(settings.field, settings.parameters.clients)
    parts = [settings.context, uint(len(roster.members))]
    for member, point in zip(roster.members, points, strict=False):
        parts += [
            uint(member.client),
            allow_list[member.client],
            *member.keys,
            uint(int(point)),
        ]
    parts += [uint(position) for position in roster.graph]
    return Round(
        settings=settings,
        context=context_hash("roster", *parts),
        members=tuple(member.client for member in roster.members),
        keys=tuple(member.keys for member in roster.members),
        graph=roster.graph,
    )
