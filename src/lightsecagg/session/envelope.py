"""What travels between the federation's programs: control messages, and protocol messages by round.

    0x00 | msgpack of one control message
    0x01 | round u64, little-endian | a protocol message, as `protocol.wire` encodes it

The round number lets both sides drop what belongs to a round that is over.
"""

from __future__ import annotations

import struct
from typing import Annotated, get_args

import msgspec

from lightsecagg.errors import DecodeError
from lightsecagg.foreign import decode
from lightsecagg.protocol.wire import kind_of
from lightsecagg.session.instructions import Instructions

VERSION = 6
"""Of control and protocol messages together: both sides must speak the same."""
MAX_SEEN = 2**62
"""The largest number of a round that a greeting names: liars who claim it leave enough others."""
_ROUND = struct.Struct("<BQ")


class Control(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the control messages."""


class Hello(Control, frozen=True):
    """C -> S, first on every stream."""

    version: int
    round: int
    """The round whose party is still alive here; -1 for none."""
    members: int = 0
    """The number of the allow-list that it holds; 0 where lists have none."""
    seen: Annotated[int, msgspec.Meta(ge=-1, le=MAX_SEEN)] = -1
    """The newest round that its ledger has; -1 for none."""


class Withdraw(Control, frozen=True):
    """C -> S: this client sits the round out; nobody need wait for it."""

    round: int
    reason: Annotated[str, msgspec.Meta(max_length=500)]
    """For the server's log. Never about the update: the server must not learn of it."""


class NewMembers(Control, frozen=True):
    """S -> C: an allow-list that is newer than the client's; the authority has signed it."""

    content: bytes
    """The signed file."""

    def __repr__(self) -> str:
        return f"NewMembers({len(self.content)} bytes)"


class RoundModel(Control, frozen=True):
    """S -> C: a round begins with this global model."""

    round: int
    model: bytes
    """float32, little-endian; empty when vectors are aggregated without training."""
    bound: float
    """The largest entry of an update in this round, as the settings will say too."""
    instructions: Instructions | None = None
    """How to train, if there is anything to train; the settings will name their hash."""

    def __repr__(self) -> str:
        return f"RoundModel(round={self.round}, {len(self.model)} bytes)"


class UploadStored(Control, frozen=True):
    """S -> C: the masked update of this round is on disk.

    Said again of the latest one before a round begins: a client whose ledger is lost, or older
    than that, notices.
    """

    round: int
    summed: bool = False
    """Whether it is in a sum: also that of a client which was away when the others consented."""


class EpochBegins(Control, frozen=True):
    """S -> C: an epoch of the asynchronous mode is about to be opened."""

    round: int
    """Its number; rounds and epochs are counted together."""
    instructions: Instructions | None = None
    """How to train in this epoch; its settings will name their hash."""


class EpochCloses(Control, frozen=True):
    """S -> C: the epoch takes no more uploads; updates that are ready wait for the next one."""

    round: int


class Fetch(Control, frozen=True):
    """C -> S, asynchronous: this client can train, and wants a newer model than this version."""

    version: int
    """-1 for any."""


class Version(Control, frozen=True):
    """S -> C, asynchronous: the global model of this version, the newest there is."""

    version: int
    model: bytes
    """float32, little-endian; empty when vectors are aggregated without training."""

    def __repr__(self) -> str:
        return f"Version({self.version}, {len(self.model)} bytes)"


class MasksKnown(Control, frozen=True):
    """S -> C, asynchronous, to a client that is back: what has become of its masks.

    Shares and uploads may have been lost with a connection, or with the server.
    """

    round: int
    ready: tuple[int, ...]
    """Serials whose shares are complete, not yet used."""
    waiting: tuple[int, ...]
    """Serials of uploads that wait for their buffer, or are being summed."""


class RoundOver(Control, frozen=True):
    """S -> C: the round has ended."""

    round: int
    aborted: str | None = None


class Goodbye(Control, frozen=True):
    """S -> C: the federation is done, or cannot go on with this client."""

    reason: str
    finished: bool


FromClient = Hello | Withdraw | Fetch
AnyControl = (
    FromClient
    | NewMembers
    | RoundModel
    | EpochBegins
    | EpochCloses
    | Version
    | MasksKnown
    | UploadStored
    | RoundOver
    | Goodbye
)
_decoder = msgspec.msgpack.Decoder(AnyControl)


class _Tagged(msgspec.Struct):
    """What every control message has in common; the rest is skipped, not copied."""

    type: str


_tags = msgspec.msgpack.Decoder(_Tagged)
_NAMES = frozenset(kind.__name__ for kind in get_args(AnyControl))


def pack_control(message: AnyControl) -> bytes:
    """A control message as bytes."""
    return b"\x00" + msgspec.msgpack.encode(message)


def pack_protocol(round_number: int, message: bytes) -> bytes:
    """An encoded protocol message as bytes."""
    return protocol_head(round_number) + message


def protocol_head(round_number: int) -> bytes:
    """What a protocol message follows; a long one is encoded behind it, without a copy."""
    return _ROUND.pack(1, round_number)


def unpack(data: bytes | memoryview) -> AnyControl | tuple[int, memoryview]:
    """A control message, or the round number and the encoded protocol message."""
    if data[:1] == b"\x00":
        control: AnyControl = decode(_decoder.decode, memoryview(data)[1:], "control message")
        return control
    if data[:1] == b"\x01" and len(data) >= _ROUND.size:
        return _ROUND.unpack_from(data)[1], memoryview(data)[_ROUND.size :]
    raise DecodeError("neither a control nor a protocol message")


def describe(data: bytes | memoryview) -> str:
    """Of which type a message claims to be and how long it is, never what it says (S22)."""
    return f"{name_of(data)}, {len(data)} bytes"


def name_of(data: bytes | memoryview) -> str:
    """Of which type a message claims to be."""
    view = memoryview(data)
    if data[:1] == b"\x01":
        return kind_of(view[_ROUND.size :])
    try:
        name = decode(_tags.decode, view[1:], "control message").type
    except DecodeError:
        name = ""
    return name if name in _NAMES else "an unknown message"
