"""The messages of all protocols and both modes, one frozen class each.

Who sends what (C = client, S = server), in the order of a synchronous round:

    Opening          S -> C   the settings of a round or epoch
    Advertise        C -> S   fresh X25519 keys, signed
    Roster           S -> C   everybody's keys; fixes C1
    ShareBundle      C -> S -> C   sealed shares, each for one peer, which the server cannot read
    SharesClosed     S -> C   whose shares are complete
    Reports          C -> S   which shares are held here, and elements on them
    MaskedUpload     C -> S   the masked update, with its owner's tag
    SumRequest       S -> C   the tags of the updates that are summed: U1
    Consent          C -> S   malicious-server mode: a signature on (C1, U1)
    Certificate      S -> C   malicious-server mode: m signatures
    Refusal          C -> S   shares of these members of U1 are missing here
    AggregatedShare  C -> S   LightSecAgg's answer
    UnmaskingShares  C -> S   SecAgg's answer
    AbortRound       S -> C   the round is over, for this reason

The asynchronous mode registers clients with the same messages, shares stock with ShareBundle (a
serial counts an owner's masks), and asks for sums with the same SumRequest, Consent, Certificate,
Refusal and AggregatedShare, which name the time t of a buffer. Holders report on each mask as it is
delivered. It adds

    ReportsWanted    S -> C   report on these masks again
    UploadDropped    S -> C   the upload waits no longer, for a buffer that its owner would see

Control messages are encoded by msgspec, vector messages by a fixed header and raw bytes; see
`wire`. Nothing here is secret except what is sealed or masked; still, no `repr` prints payloads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.field.prime import Elements

MAX_SERIAL: Final = 2**62
"""Of a mask: larger ones travel, and fit no column of a database (S41)."""


class Control(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the small messages."""


class Opening(Control, frozen=True):
    """The server opens a round with these settings."""

    settings: bytes
    """`Settings.to_bytes()`, the pre-image of C0."""


class Advertise(Control, frozen=True):
    """A client's fresh keys for this round."""

    keys: tuple[bytes, ...]
    """X25519 public keys: LightSecAgg one, SecAgg two (sealing, masking)."""
    signature: bytes
    """Ed25519 over (C0, id, keys)."""


class Member(Control, frozen=True):
    """One line of the roster."""

    client: int
    keys: tuple[bytes, ...]
    signature: bytes


class Roster(Control, frozen=True):
    """Everybody who takes part; the order fixes positions and evaluation points."""

    members: tuple[Member, ...]
    graph: tuple[int, ...] = ()
    """SecAgg+: positions in ring order; empty for the complete graph."""


class SharesClosed(Control, frozen=True):
    """Sharing is over; these owners' shares were delivered to every roster member."""

    owners: tuple[int, ...]


class AbortRound(Control, frozen=True):
    """The round is over without a result for the recipient."""

    reason: str


class UnmaskingShares(Control, frozen=True):
    """SecAgg: shares of the survivors' self-mask seeds and of the dropped clients' mask keys.

    No ids: the server knows from the upload's bitmap whose shares follow one another here.
    """

    of_seeds: bytes
    """Field elements, 16 per share, in roster order of the shares' owners."""
    of_keys: bytes

    def __repr__(self) -> str:
        return f"UnmaskingShares({len(self.of_seeds)} and {len(self.of_keys)} bytes)"


@dataclass(frozen=True, slots=True)
class SealedShare:
    """One sealed share on its way from `owner` through the server to `recipient`."""

    owner: int
    recipient: int
    kind: ShareKind
    length: int
    """Plaintext bytes."""
    salt: bytes = field(repr=False)
    """Of the mask: no two shares that differ are sealed under one key."""
    sealed: bytes | memoryview = field(repr=False)
    """A received one is used where it lies, without a copy."""
    serial: int = 0
    """Which of the owner's masks; 0 in synchronous rounds."""
    mac: bytes = field(default=b"", repr=False)
    """By which the owner binds it to the header of its mask; empty without checks (S46)."""
    root: bytes = field(default=b"", repr=False)
    """Hash of all sealed shares of the mask, as the server got them; empty on the way there."""


@dataclass(frozen=True, slots=True)
class ShareBundle:
    """Sealed shares that travel together: an owner's to its peers, or the peers' to a client."""

    shares: tuple[SealedShare, ...]
    """At least one; each is sealed, and taken or refused, by itself."""


@dataclass(frozen=True, slots=True)
class AggregatedShare:
    """LightSecAgg's answer: the weighted sum of the shares that were asked for."""

    vector: Elements = field(repr=False)
    time: int = 0
    """Of the request."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AggregatedShare) and self.time == other.time and _same(self, other)


class Tag(Control, frozen=True):
    """What an owner says of its upload; in an epoch signed. A sum is a list of tags.

    A round has one model and one mask of each owner, which follow from C1: in its request a tag is
    the owner alone.
    """

    owner: int
    serial: int = 0
    """Which of the owner's masks hides the upload."""
    header: bytes = b""
    """Of that mask: under which header its shares count; empty without checks."""
    version: int = 0
    """t_i: the buffer time at which the owner downloaded the model."""
    model: bytes = b""
    """Hash of that model."""
    digest: bytes = b""
    """Hash of the masked upload."""
    signature: bytes = b""
    """Ed25519 over (C1, owner, serial, header, version, model, digest)."""


class Report(Control, frozen=True):
    """What a holder reports on its share of one mask (S46)."""

    owner: int
    serial: int
    values: bytes
    """`BLINDS` field elements; in an epoch nothing if no share of that mask is held here."""

    def __repr__(self) -> str:
        return f"Report(owner={self.owner}, serial={self.serial})"


class Reports(Control, frozen=True):
    """Reports on shares that came together."""

    reports: tuple[Report, ...]


class ReportsWanted(Control, frozen=True):
    """The server lacks this client's reports on these masks; it sends the same again."""

    masks: tuple[tuple[int, int], ...]
    """Owner and serial."""


class UploadDropped(Control, frozen=True):
    """The upload under this mask waits no longer; its mask stays used.

    It was too stale for any buffer, or its buffer went by while its owner was away.
    """

    serial: int


class SumRequest(Control, frozen=True):
    """The server asks for the sum of these updates' masks; once announced it never changes.

    A synchronous round has one, of time 0; whose sum it is follows from C1, in which rounds and
    epochs never agree.
    """

    time: int
    """t: larger than that of every buffer before; 0 in a round."""
    tags: tuple[Tag, ...]
    """In increasing order of owners."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The owners of the updates; in a round U1."""
        return tuple(tag.owner for tag in self.tags)


class Consent(Control, frozen=True):
    """A client's signature on the request of this time."""

    time: int
    signature: bytes


class Certificate(Control, frozen=True):
    """Signatures of distinct roster members on the request of this time."""

    time: int
    signatures: tuple[tuple[int, bytes], ...]


class Refusal(Control, frozen=True):
    """The client neither signs nor answers, because it lacks these owners' shares."""

    time: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MaskedUpload:
    """A masked update, and what its owner says of it."""

    tag: Tag
    vector: Elements = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskedUpload) and self.tag == other.tag and _same(self, other)


def _same(one: Any, other: Any) -> bool:
    """Equality for messages that carry arrays."""
    return bool(one.vector.shape == other.vector.shape and (one.vector == other.vector).all())


Message = (
    Opening
    | Advertise
    | Roster
    | ShareBundle
    | SharesClosed
    | SumRequest
    | Consent
    | Certificate
    | Refusal
    | AggregatedShare
    | UnmaskingShares
    | AbortRound
    | Reports
    | ReportsWanted
    | MaskedUpload
    | UploadDropped
)
