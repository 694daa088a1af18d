"""What a client keeps in an epoch: its states, and what changes in them without a message.

Every state is frozen; a change makes a new one. `epoch_client` says what leads from one to another.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from lightsecagg.protocol.client_machine import Advertised, Closed, Fixed, Waiting
from lightsecagg.protocol.messages import MaskReport, SumRequest
from lightsecagg.protocol.schemes.interface import MaskRef, Term
from lightsecagg.protocol.share_exchange import Share


class KeptShare(msgspec.Struct, frozen=True, array_like=True):
    """A share that waits for its buffer."""

    share: Share
    since: int | None = None
    """The first buffer that this client consented to after the share came; it expires by this.

    Not the last one before: a client that was away for long would forget what it has just got.
    """
    report: MaskReport | None = None
    """What this client has said of it; it says the same again (S46)."""

    def __repr__(self) -> str:
        return f"KeptShare(since={self.since})"


Kept = dict[int, dict[int, KeptShare]]
"""Owner -> serial -> share, the own ones included."""


class Registered(Fixed, frozen=True, kw_only=True):
    """Masks, shares and models, but no buffer."""

    private_keys: tuple[bytes, ...]
    next_serial: int
    stock: dict[int, bytes]
    """Serial -> what the scheme makes the mask of."""
    outstanding: tuple[int, ...]
    """Serials that wait for their buffer, ascending."""
    kept: Kept
    last_serial: dict[int, int]
    """Owner -> the newest serial that was seen."""
    chains: dict[int, tuple[int, bytes]]
    """Owner -> the number of its last check secret, and the secret."""
    models: dict[int, bytes]
    """Version -> hash, as used or signed for here."""
    time: int
    """Of the last buffer that this client has consented to; -1 before the first."""


class Signed(Registered, frozen=True, kw_only=True):
    """The buffer of `time` is signed; the answer waits for the certificate."""

    buffer: SumRequest
    answer: bytes
    """The sum of the shares, which are burnt."""
    signature: bytes


class Answered(Registered, frozen=True, kw_only=True):
    """The buffer of `time` is answered for."""

    buffer: SumRequest
    answer: bytes


AnyState = Waiting | Advertised | Registered | Signed | Answered | Closed

R = TypeVar("R", bound=Registered)


def become(kind: type[R], state: Registered, **fields: Any) -> R:
    """The state of another kind with everything that is not of the buffer."""
    common = {name: getattr(state, name) for name in Registered.__struct_fields__}
    return kind(**common, **fields)


def with_share(state: R, owner: int, serial: int, share: KeptShare) -> R:
    """This share is kept, too."""
    mine = {**state.kept.get(owner, {}), serial: share}
    return replace(state, kept={**state.kept, owner: mine})


def dated(share: KeptShare, time: int) -> KeptShare:
    """A share that had seen no buffer has seen that of this time."""
    return replace(share, since=time) if share.since is None else share


def held_for(state: Registered, terms: tuple[Term, ...]) -> dict[MaskRef, Share]:
    """Those shares of the terms' masks that are kept here."""
    kept = {term.ref: state.kept.get(term.ref.owner, {}) for term in terms}
    return {ref: of[ref.serial].share for ref, of in kept.items() if ref.serial in of}
