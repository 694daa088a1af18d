"""The states of a holder: the shares that it keeps, and the answer that is made of them.

Every state is frozen; a change makes a new one. `holder` says what leads from one to another.

Explicit shares and the answer are megabytes that are written once and never change, in a state of
kilobytes that changes with every message. `set_apart` takes them out, for a driver that stores them
once, and leaves their hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from lightsecagg.protocol.client_machine import State
from lightsecagg.protocol.messages import SumRequest, Tag
from lightsecagg.protocol.schemes.interface import MaskRef

SMALL = 1024
"""Bytes that stay in the snapshot: seeds, and what is not worth a file."""


class Part(msgspec.Struct, frozen=True):
    """Stands for bytes that a driver keeps apart from the snapshot."""

    digest: bytes
    """Their SHA-256."""


Data = bytes | Part


class Snapshot(NamedTuple):
    """A client whose large parts are kept apart."""

    content: bytes
    """For `restore`."""
    parts: dict[bytes, bytes]
    """What the driver has not been given before, by SHA-256; to be stored before the content."""
    needed: frozenset[bytes]
    """All parts that the content refers to; the others are spent, and to be deleted after it."""

    def __repr__(self) -> str:
        return f"Snapshot(needed={len(self.needed)})"


class KeptShare(msgspec.Struct, frozen=True, array_like=True):
    """A share that waits for its buffer."""

    share: tuple[int, Data]
    """A `Share`, whose bytes may be kept apart."""
    since: int | None = None
    """The first buffer that this client consented to after the share came; it expires by this.

    Not the last one before: a client that was away for long would forget what it has just got.
    """
    header: bytes = b""
    """Of its mask: under which it counts, and by which it is reported on (S46)."""

    def __repr__(self) -> str:
        return f"KeptShare(since={self.since})"


Kept = dict[int, dict[int, KeptShare]]
"""Owner -> serial -> share, the own ones included."""


class Holding(State, frozen=True, kw_only=True):
    """Shares and models, but no sum."""

    kept: Kept = msgspec.field(default_factory=dict)
    last_serial: dict[int, int] = msgspec.field(default_factory=dict)
    """Owner -> the newest serial that was seen."""
    models: dict[int, bytes] = msgspec.field(default_factory=dict)
    """Version -> hash, as used or signed for here."""
    time: int = -1
    """Of the last buffer that this holder has consented to; -1 before the first."""

    @property
    def stored(self) -> int:
        """Bytes of the shares that are here."""
        shares = (kept.share[1] for of in self.kept.values() for kept in of.values())
        return sum(len(data) for data in shares if isinstance(data, bytes))


class Signed(Holding, frozen=True, kw_only=True):
    """The buffer of `time` is signed; the answer waits for the certificate."""

    buffer: SumRequest
    answer: Data
    """The encoded answer, from shares that are burnt."""
    signature: bytes


class Answered(Holding, frozen=True, kw_only=True):
    """The buffer of `time` is answered for."""

    buffer: SumRequest
    answer: Data


AnyHolding = Holding | Signed | Answered

R = TypeVar("R", bound=Holding)


def become(kind: type[R], state: Holding, **fields: Any) -> R:
    """The state of another kind with everything that is not of the buffer."""
    common = {name: getattr(state, name) for name in Holding.__struct_fields__}
    return kind(**common, **fields)


def with_share(state: R, owner: int, serial: int, share: KeptShare) -> R:
    """This share is kept, too."""
    mine = {**state.kept.get(owner, {}), serial: share}
    return replace(state, kept={**state.kept, owner: mine})


def dated(share: KeptShare, time: int) -> KeptShare:
    """A share that had seen no buffer has seen that of this time."""
    return replace(share, since=time) if share.since is None else share


def kept_for(state: Holding, tags: Iterable[Tag]) -> dict[MaskRef, KeptShare]:
    """Those shares of the uploads' masks that are kept here, under the header that a tag names."""
    found: dict[MaskRef, KeptShare] = {}
    for tag in tags:
        kept = state.kept.get(tag.owner, {}).get(tag.serial)
        if kept is not None and kept.header == tag.header:
            found[MaskRef(tag.owner, tag.serial)] = kept
    return found


def set_apart(state: AnyHolding) -> tuple[AnyHolding, dict[bytes, bytes]]:
    """The state without its large parts, and those of them that were in it, by SHA-256."""
    parts: dict[bytes, bytes] = {}

    def leave(data: Data) -> Data:
        if isinstance(data, Part) or len(data) <= SMALL:
            return data
        digest = hashlib.sha256(data).digest()
        parts[digest] = data
        return Part(digest)

    return _with_data(state, leave), parts


def parts_of(state: AnyHolding) -> frozenset[bytes]:
    """The hashes of all parts that are kept apart from this state."""
    return frozenset(data.digest for data in _data(state) if isinstance(data, Part))


def _data(state: AnyHolding) -> Iterator[Data]:
    yield from (kept.share[1] for of in state.kept.values() for kept in of.values())
    if isinstance(state, Signed | Answered):
        yield state.answer


def _with_data(state: AnyHolding, change: Callable[[Data], Data]) -> AnyHolding:
    kept = {
        owner: {
            serial: replace(share, share=(share.share[0], change(share.share[1])))
            for serial, share in of.items()
        }
        for owner, of in state.kept.items()
    }
    if isinstance(state, Signed | Answered):
        return replace(state, kept=kept, answer=change(state.answer))
    return replace(state, kept=kept)
