"""What every protocol looks like to its driver: messages in, messages out.

A party never sends, waits, reads a clock or starts a thread. The driver (a simulation, a network
federation, Flower, your own sockets) does, and owes a party this:

* Deliver messages in the order in which they were sent, per pair of parties (FIFO links). A
  message out of order is refused, never turned into a wrong sum.
* Send every returned `Send`, in order.
* On `Persist`, store the record durably, and release what follows it in the list only then. If
  that fails nothing that follows may leave, ever: `abort` the client, give the server's round up.
  A server's record is answered with `stored`, or with `unstored` where it `can_fail` and has; in a
  round messages may be delivered meanwhile. Parties whose memory nobody keeps (`Ledger.volatile`, a
  server that is not `durable`) ask for nothing to be stored.
* On `Compute`, run the job, in a thread or elsewhere, and call `computed` with its result; messages
  may be delivered meanwhile. Or run it on the spot (`jobs.at_once`).
* On `NeedInput`, call `set_input` once, whenever training is done; messages may be delivered
  meanwhile, which is how the offline phase overlaps training.
* When a client is known to be gone, call the server's `drop`; when the driver's deadline for the
  current phase fires, call `proceed`. The server has no clock of its own.
* `receive` raises `RemoteProtocolError` when the message is refused, and `DecodeError` or
  `CryptoError` never: the party is unchanged then, and what to do with the peer is the driver's
  business.

A client driver that must survive a process boundary stores `snapshot()`, which includes the ledger,
durably *before* it releases the outputs of the same call; see `Client.restore`. A server driver
that must survive a crash stores what `Persist` names; see `Server.restore`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lightsecagg.field.prime import Elements
from lightsecagg.protocol.jobs import Compute, Computing, Job, Result, Upload
from lightsecagg.protocol.journal_facts import AnyFact
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Message,
    SealedShare,
)

if TYPE_CHECKING:
    from lightsecagg.protocol.in_flight import InFlight
    from lightsecagg.protocol.intake import Intake
    from lightsecagg.protocol.kept_shares import Snapshot
    from lightsecagg.protocol.ledger import Ledger
    from lightsecagg.protocol.settings import Settings

SERVER = 2**64 - 1
"""The server's name as sender or recipient; client ids are smaller."""


class Phase(StrEnum):
    """The phases of a synchronous round, in order."""

    ADVERTISE = "advertise"
    SHARE = "share"
    UPLOAD = "upload"
    AGREE = "agree"
    RECOVER = "recover"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Update:
    """What a client contributes."""

    vector: NDArray[np.float32] | NDArray[np.float64] = field(repr=False)
    """The model update, one-dimensional."""
    samples: int = 1
    """The weight of this update in the average, e.g. its number of training samples."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `to` (a client id or SERVER)."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class NeedInput:
    """The client may now be given its update; train first."""


@dataclass(frozen=True, slots=True)
class LedgerChanged:
    """At a client: what it must never forget, as of now."""

    entries: bytes = field(repr=False)
    """The whole ledger, in the place of the one before; `Ledger.from_bytes` reads it."""


@dataclass(frozen=True, slots=True)
class Promised:
    """At the server: what it has promised, to be appended to what it had.

    Right behind a `BufferAggregate` or `BufferFailed` it belongs to the model that comes of it:
    both are stored, or neither.
    """

    facts: tuple[AnyFact, ...] = field(default=(), repr=False)
    """In their order, to be stored by `encode_fact`; `Server.restore` replays all of them."""
    upload: MaskedUpload | None = field(default=None, repr=False)
    """One that has just come, to be stored with them."""
    shares: tuple[SealedShare, ...] = field(default=(), repr=False)
    """Those of masks that have just come, to be stored with them."""
    past: tuple[tuple[int, int], ...] = ()
    """Owner and serial of masks whose upload and shares nobody needs any more."""
    is_over: bool = False
    """Whether the epoch is: nothing of it is needed."""
    one_sum: bool = False
    """Whether it is of a round, which alone is lost if this cannot be stored."""

    @property
    def can_fail(self) -> bool:
        """Whether only its sender loses something if this is not stored: see `Server.unstored`."""
        return self.upload is not None or bool(self.shares)

    @property
    def sender(self) -> int:
        """Of what has just come with it."""
        return self.shares[0].owner if self.upload is None else self.upload.tag.owner


Record = LedgerChanged | Promised


@dataclass(frozen=True, slots=True)
class Persist:
    """Store `record` durably; what follows in the list may leave only then."""

    record: Record


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The round's result, at the server."""

    total: Elements = field(repr=False)
    """The sum over F_q of the included clients' quantised vectors."""
    included: tuple[int, ...]
    """U1: the clients whose updates are in the sum."""
    responders: tuple[int, ...]
    """The clients whose answers were used or checked."""
    suspects: tuple[int, ...] = ()
    """Clients that contradicted the others, in their answers or in too many reports on shares.
    A suspicion, never proof."""
    accused: tuple[tuple[int, int], ...] = ()
    """Pairs (owner, holder): what the one shared and what the other reported do not agree."""


@dataclass(frozen=True, slots=True)
class RoundAborted:
    """The round ended without a result."""

    reason: str
    suspects: tuple[int, ...] = ()
    """At the server: as those of `Aggregate`."""
    accused: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BufferAggregate:
    """The result of one buffer of the asynchronous mode, at the server."""

    time: int
    total: Elements = field(repr=False)
    """The weighted sum over F_q of the buffer's quantised updates."""
    owners: tuple[int, ...]
    weights: tuple[int, ...]
    """w(t - t_i), by owner."""
    responders: tuple[int, ...]
    suspects: tuple[int, ...] = ()
    """Clients that contradicted the others, in their answers or in too many reports on shares of
    this epoch. A suspicion, never proof."""
    accused: tuple[tuple[int, int], ...] = ()
    """Pairs (owner, holder) of this epoch: what was shared and what was reported do not agree."""
    staleness: tuple[int, ...] = ()
    """t - t_i, by owner."""


@dataclass(frozen=True, slots=True)
class BufferFailed:
    """A buffer of the asynchronous mode was lost, at the server; its owners must train anew."""

    time: int
    owners: tuple[int, ...]
    reason: str
    missing: tuple[int, ...] = ()
    """Owners whose shares some client lacked, or says it lacked. A suspicion, never proof."""
    suspects: tuple[int, ...] = ()
    """As those of `BufferAggregate`."""
    accused: tuple[tuple[int, int], ...] = ()


Output = (
    Send | NeedInput | Persist | Compute | Aggregate | RoundAborted | BufferAggregate | BufferFailed
)
"""What parties return; those of a round never the last two, those of an epoch no `Aggregate`."""


class Party(Protocol):
    """Either end of a wire, in a round or in the asynchronous mode."""

    def receive(self, sender: int, message: Message) -> Sequence[object]:
        """Take a message from `sender`; send every returned message, in order."""


class Server(Party, Computing, Protocol):
    """The server's end of a wire."""


class ClientParty(Party, Protocol):
    """One client, in a round or in an epoch."""

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from `sender`; send every returned message, in order."""

    def snapshot(self) -> bytes:
        """The whole state, secrets included; store it before releasing this call's outputs."""

    def abort(self, reason: str) -> None:
        """The driver gives this round or epoch up; the party forgets all its secrets."""

    @property
    def stored(self) -> int:
        """Bytes of the secrets and shares that it keeps for later phases."""

    @property
    def upload_is_due(self) -> bool:
        """Of a round: whether the upload would leave now if the input were set; who has none
        withdraws here."""

    @property
    def stock(self) -> int:
        """How many shared masks are ready; an upload takes one."""

    @property
    def room(self) -> int:
        """How many more masks may be shared before peers drop old ones."""

    keeps_masks: bool
    """Whether masks that are shared ahead stay expanded in memory until their uploads."""

    @property
    def is_registered(self) -> bool:
        """Whether it is on a roster: it can share masks and upload."""

    @property
    def serials(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of its masks, those that are ready, and those whose uploads wait for their sum."""

    def restock(self, count: int = 1) -> list[Output]:
        """Draw and share `count` more masks, ahead of time; a round has one, drawn by itself."""

    def discard(self, serials: Iterable[int]) -> None:
        """The shares of these masks were lost on their way: no upload is to be wasted on them."""

    def take_model(self, model: bytes) -> list[Output]:
        """Training from this model (`hash_model`) begins; refuse it once too often (S44)."""

    def set_input(
        self, update: Update, version: int = 0, model: bytes | None = None
    ) -> list[Output]:
        """Hand over the update; the party masks it, uploads it as soon as it may, and forgets it.

        * `version`: of the model that it was trained from; 0 in a round.
        * `model`: the hash of the model that was really trained from (`hash_model`), computed
          here. In a round it may be left out where the policy holds it.
        """


class TravellingClientParty(ClientParty, Protocol):
    """One client, whose large parts a driver keeps apart from its snapshot."""

    ledger: Ledger
    parts: Mapping[bytes, bytes]
    """Where `snapshot_apart` left its parts, by SHA-256; to be set after it was restored."""

    @property
    def needed_parts(self) -> frozenset[bytes]:
        """What must be in `parts`, because a snapshot left it there."""

    def snapshot_apart(self) -> Snapshot:
        """`snapshot` in kilobytes, with the peers' explicit shares and the answer beside it."""


class ServerParty(Server, Protocol):
    """The server, in a round or in an epoch."""

    settings: Settings
    late_messages: Counter[str]
    """Messages that came again or too late and were ignored, by type."""

    @property
    def phase(self) -> Phase:
        """What it collects. In epochs UPLOAD, and AGREE or RECOVER while a buffer is in flight."""

    @property
    def pending(self) -> frozenset[int]:
        """Clients whose messages the current phase still waits for."""

    @property
    def members(self) -> tuple[int, ...]:
        """Whoever is on the roster, in its order; nobody before there is one."""

    @property
    def uploaders(self) -> frozenset[int]:
        """Whose uploads it has taken."""

    @property
    def asked(self) -> tuple[int, ...]:
        """Whose updates are in the sum in flight; nobody's if there is none."""

    def start(self) -> list[Output]:
        """Open the round or epoch; call once."""

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`, as the transport authenticated it."""

    def drop(self, client: int) -> list[Output]:
        """The client is gone; what it has delivered stays, and phases may end without it."""

    def rejoin(self, client: int) -> list[Output]:
        """The client is back, with its memory: it gets what it missed, and is asked again."""

    @property
    def can_proceed(self) -> bool:
        """Whether `proceed` would go on now: the current phase has messages enough.

        If not, `proceed` aborts. A sum may still fail later, by lies or departures. While an epoch
        collects: whether `flush` would lose nothing now.
        """

    def proceed(self) -> list[Output]:
        """The deadline of the current phase fired: go on with what there is, or abort.

        While an epoch collects: the deadline of the reports.
        """

    def computed(self, job: Job, result: Result) -> list[Output]:
        """Take the result of a job; one that nobody waits for any more changes nothing."""

    def resume(self) -> list[Output]:
        """After a crash: what was being computed, to be computed again."""

    def stored(self, record: Promised, upload: Upload | None) -> list[Output]:
        """This record is durable; its upload, if it has one, counts and is read there."""

    def unstored(self, record: Promised) -> list[Output]:
        """This record `can_fail`, and has: what has just come with it is given up."""


class BufferedServerParty(ServerParty, Protocol):
    """The server in one epoch of the asynchronous mode."""

    @property
    def intake(self) -> Intake:
        """What it takes in, and what waits; see there."""

    @property
    def buffer_size(self) -> int:
        """K"""

    paused: bool
    """Whether no more buffers are formed, because the server is to stop."""
    in_flight: InFlight
    """The buffer that is asked for, if there is one."""

    @property
    def unsummed(self) -> int:
        """How many uploads wait or are being summed."""

    @property
    def takes_all(self) -> bool:
        """Whether a `flush` now would leave nothing waiting."""

    def serials(self, client: int) -> tuple[list[int], list[int]]:
        """A client's masks that it may use, and those of its uploads that are not summed yet."""

    @property
    def time(self) -> int:
        """t: the version of the current model, and the time of the next buffer."""

    @property
    def summable(self) -> int:
        """How many of the waiting uploads may share a buffer now; `flush` wants T + 2."""

    def leave(self, client: int) -> list[Output]:
        """The client is offline and may be back soon: a buffer in flight waits for it."""

    def lose(self, client: int) -> list[Output]:
        """The client has no memory of this epoch any more: nothing is kept for it."""

    def flush(self) -> list[Output]:
        """Form a buffer now, with as many updates as wait."""

    def forgo(self) -> list[Output]:
        """No buffer could be formed for long: older models' updates without company are dropped."""

    def skip(self) -> list[Output]:
        """No buffer of this time will be formed: the next model is of the time after it."""
