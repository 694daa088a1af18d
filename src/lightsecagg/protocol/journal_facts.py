"""What a server has promised, as facts: appended in order, replayed after a crash.

A fact is as long as what has happened, however much waits. What clients repeat when they are back
is no fact: consents, refusals and answers, and the shares of a mask under way. Reports are none in
an epoch; in a round they come once, with the upload, and are stored with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from lightsecagg.errors import DecodeError
from lightsecagg.foreign import decode
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.messages import Report, Roster, SealedShare, SumRequest, Tag

VERSION: Final = 5
"""Of these facts; there is no reading of others."""

Recall = Callable[[Tag], Upload]
"""Where the upload of a tag is stored."""

RecallShares = Callable[[int, int], Iterable[SealedShare]]
"""The stored shares of a mask, by owner and serial."""


class Fact(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of the facts."""


class RosterFixed(Fact, frozen=True):
    """The round or epoch has begun; the first fact."""

    version: int
    settings: bytes
    invited: tuple[int, ...]
    buffer_size: int
    """K; 0 in a round."""
    time: int
    roster: Roster


class SharingClosed(Fact, frozen=True):
    """Of a round: whose shares are complete, as everybody is about to hear."""

    masks: tuple[tuple[int, bytes], ...]
    """Owner and header."""


class Reported(Fact, frozen=True):
    """Of a round: whose shares this uploader holds, and what it says of them."""

    client: int
    reports: tuple[Report, ...]


class SharesTaken(Fact, frozen=True):
    """All shares of a mask are here; they are stored beside the fact."""

    owner: int
    serial: int
    time: int
    header: bytes


class UploadWaits(Fact, frozen=True):
    """An upload waits; it is stored beside the fact, unless its owner had one of its model."""

    tag: Tag
    shared: int
    """The time at which the shares of its mask were complete."""


class UploadsDropped(Fact, frozen=True):
    """These uploads wait no longer; used or not, these masks are past."""

    masks: tuple[tuple[int, int], ...]
    """Owner and serial."""


class SumAnnounced(Fact, frozen=True):
    """This buffer is asked for, and never changes."""

    request: SumRequest
    holders: tuple[int, ...]
    """Who holds good shares of all its masks."""
    trusted: tuple[int, ...]
    """Those of them who are in no quarrel (R59): reports are no facts, quarrels are lost."""


class SumAgreed(Fact, frozen=True):
    """m signatures on the sum in flight are here: who has answered signs no more."""

    signatures: tuple[tuple[int, bytes], ...]


class SumEnded(Fact, frozen=True):
    """The sum in flight is known, or lost; stored with the model that comes of it."""

    time: int


class TimeSkipped(Fact, frozen=True):
    """There is no buffer of the time before."""

    time: int


AnyFact = (
    RosterFixed
    | SharesTaken
    | UploadWaits
    | UploadsDropped
    | SumAnnounced
    | SumAgreed
    | SumEnded
    | TimeSkipped
    | SharingClosed
    | Reported
)
_decoder = msgspec.msgpack.Decoder(AnyFact)


def encode_fact(fact: AnyFact) -> bytes:
    """As bytes, for the driver to store."""
    return msgspec.msgpack.encode(fact)


def decode_facts(stored: Iterable[bytes]) -> tuple[RosterFixed, list[AnyFact]]:
    """The beginning of a round or epoch, and what followed; `DecodeError` for anything else."""
    first, *others = [decode(_decoder.decode, data, "fact of a server") for data in stored] or [
        None
    ]
    if not isinstance(first, RosterFixed) or any(isinstance(f, RosterFixed) for f in others):
        raise DecodeError("malformed facts of a server: they begin with a roster, and only once")
    if first.version != VERSION:
        raise DecodeError(
            f"a round or epoch of version {first.version} is not read by this release, which has "
            f"{VERSION}; open a new one"
        )
    return first, others
