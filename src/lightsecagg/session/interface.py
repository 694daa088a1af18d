"""A session to its driver: events in, effects out.

A session is one end of a federation: it greets, announces models, opens rounds, gives up those who
are gone, acknowledges, resumes and says goodbye, and it drives the parties of the rounds. It never
sends, waits, reads a clock, stores or computes. The driver (asyncio and gRPC, Flower, a test) does,
and owes it this:

* `handle(event, now)` for all that happens, one call after the other, in the order in which it
  happened per peer; `now` is a clock that does not jump, in seconds. `tick(now)` once `deadline` is
  over. Each returns effects.
* Carry out the effects of a call in their order, and those of a call that they cause (`Stored`)
  before the rest.
* On `Store`, make the record durable and hand in `Stored`, and go on with the list only then. If it
  cannot be stored, hand in `StoreFailed`, and nothing that follows in the list may leave, ever.
  Of a round's upload (`Promised.upload`) either may be handed in later, and the list, and other
  events, go on meanwhile; but every other record is made durable after the uploads before it.
* On `Compute`, `Train` and `Apply`, do the work where it holds up nobody and hand in `Computed`,
  `Trained` or `TrainingFailed`, `Applied` or `Spoilt`; other events may come first. `ApplyBuffer`
  and `Renew` are answered before the rest of the list is carried out, as `Store` is.
* `Post` never waits: what a peer does not take is the driver's to bound, and the peer's to lose.
* A stream of a peer is announced with `Connected` and ends with `Disconnected`; after `Cut` too.
* `Finished` is the last effect that matters; an error in it is for the caller.

Peers are authenticated by the transport: `peer` is a client's id, or `SERVER`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from lightsecagg.errors import LightSecAggError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Aggregate, BufferAggregate, Promised, Record, Update
from lightsecagg.protocol.jobs import Compute, Job, Result, Upload
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.instructions import Instructions
from lightsecagg.session.record import PhaseRecord, RoundRecord

NEVER = float("inf")
"""The deadline of a session that waits for events alone."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What clients of a round are given before it is opened."""

    model: bytes = field(default=b"", repr=False)
    """float32, little-endian; empty where vectors are summed without training."""
    instructions: Instructions | None = None
    """How to train; None: as each client likes."""


@dataclass(frozen=True, slots=True)
class Members:
    """An allow-list that the authority has numbered and signed."""

    number: int
    allow_list: AllowList
    content: bytes = field(repr=False)
    """The signed file, as it travels."""


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer has a new stream; an older one of the same peer has ended."""

    peer: int


@dataclass(frozen=True, slots=True)
class Received:
    """A peer sent one whole message."""

    peer: int
    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A peer's stream ended; it may come back with another."""

    peer: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record is durable."""

    record: AnyRecord
    upload: Upload | None = field(default=None, repr=False)
    """Of an upload: where it is read from, from now on."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """A record could not be made durable."""

    record: AnyRecord
    reason: str


@dataclass(frozen=True, slots=True)
class Computed:
    """A job is done."""

    job: Job = field(repr=False)
    result: Result = field(repr=False)


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """A job cannot be done here (a damaged file, say); its own failures are a `Result`."""

    job: Job = field(repr=False)
    reason: str


@dataclass(frozen=True, slots=True)
class Trained:
    """At a client: the update of a round is ready."""

    round: int
    update: Update = field(repr=False)


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """At a client: there is no update."""

    round: int
    reason: str
    """For the client's own log. Nobody else hears of it."""


@dataclass(frozen=True, slots=True)
class TrainingRefused:
    """At a client: it does not train as the server wants it to; known before it has any update."""

    round: int
    reason: str
    """The server hears it."""


@dataclass(frozen=True, slots=True)
class Applied:
    """At the server: the aggregate of a round has become a model, which is stored."""

    announcement: Announcement
    """What the next round begins from."""
    enough: str | None = None
    """Why no other round is wanted, if so."""


@dataclass(frozen=True, slots=True)
class Spoilt:
    """At the server: the aggregate cannot be used; the model is what it was."""

    reason: str


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Another allow-list is in use, from the next round on."""

    members: Members
    settings: Settings | None = None
    """At the server: what its rounds are with these members."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The operator wants the session to end: after the round that is under way."""


Event = (
    Connected
    | Received
    | Disconnected
    | Stored
    | StoreFailed
    | Computed
    | ComputeFailed
    | Trained
    | TrainingFailed
    | TrainingRefused
    | Applied
    | Spoilt
    | MembersChanged
    | Stop
)

# -- what a session's driver stores --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """At the server: a round with these settings is about to be opened."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    """At the server: the round is over without a result."""

    reason: str
    renews: bool = False
    """Whether the next one starts from a renewed model (`Renew`), after a restart too."""


AnyRecord = Record | RoundOpened | RoundAbandoned

# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Post:
    """Send `data` to a peer as soon as it takes it; nothing, if it is not there."""

    peer: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """End a peer's stream now, telling it why; what waits for it is dropped."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Allow:
    """Let a peer send that many more bytes in this phase, and no more (S25)."""

    peer: int
    incoming: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """The most bytes that may wait for one peer from now on; one that lets more wait is cut."""

    outgoing: int


@dataclass(frozen=True, slots=True)
class Store:
    """Make `record` durable; what follows in the list may leave only then."""

    round: int
    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Train:
    """At a client: compute its update from what it was given."""

    round: int
    announcement: Announcement
    bound: float
    """The largest entry of an update."""
    update: Update | None = field(default=None, repr=False)
    """Its update from the same model and bound, if it has one: to be handed in again (S42)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """At a client: what is about to be masked; for demonstrations that compare sums."""

    round: int
    update: Update = field(repr=False)


@dataclass(frozen=True, slots=True)
class TakeMembers:
    """At a client: check an allow-list from the server, keep it and hand in `MembersChanged`.

    The members are not the session's to judge: whoever is refused here is not told.
    """

    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Apply:
    """At the server: average the aggregate, make a model of it and store that."""

    settings: Settings
    aggregate: Aggregate = field(repr=False)
    record: RoundRecord
    """Samples, figures and the like are filled in."""


@dataclass(frozen=True, slots=True)
class ApplyBuffer:
    """At the server, asynchronous: make a model of a buffer's sum and store it with `change`.

    Answered like `Apply`; what follows in the list may leave only then.
    """

    settings: Settings
    aggregate: BufferAggregate = field(repr=False)
    record: RoundRecord
    """Samples, figures and the like are filled in."""
    change: Promised


@dataclass(frozen=True, slots=True)
class Renew:
    """At the server: no sum has led to the next model.

    Change the model so little that it matters to nobody, lest clients that have spent their
    update from it have nothing to give (S42); store it with `change` and hand in `Applied`.
    """

    epoch: int
    """Or the round that has failed."""
    version: int
    """That of the new model."""
    change: Promised | None
    """With an empty memory, if the epoch is over; None in rounds, where `RoundAbandoned` has it."""


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """A round was announced, or goes on after a crash of the server."""

    round: int
    invited: tuple[int, ...] = ()
    """At the server: to whom."""


@dataclass(frozen=True, slots=True)
class RoundLeft:
    """At a client: a round is over, or goes on without it."""

    round: int
    included: bool
    """Whether its update is in the sum, as far as it knows."""
    reason: str | None = None
    """Why not, if it was not completed with this client."""


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """At the server: a round is over, and this is what there is to tell about it."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """At the server: a phase begins; the time of day belongs into its record."""

    phase: PhaseRecord


@dataclass(frozen=True, slots=True)
class Progress:
    """At the server: how far the current phase is."""

    phase: str
    done: int
    expected: int
    awaited: frozenset[int] = frozenset()
    """Whose messages the phase still waits for."""


class Leave(StrEnum):
    """How a client came to leave a round."""

    DROPPED = "dropped"
    """It is away, or took too long."""
    WITHDRAWN = "withdrawn"
    """It sits the round out, by its own word."""
    REFUSED = "refused"
    """It said what it must not."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """At the server: a client is waited for no more in this round."""

    client: int
    phase: str
    how: Leave
    reason: str
    """Fit to be seen: what is not our own of it is escaped and cut."""


@dataclass(frozen=True, slots=True)
class Log:
    """A line for whoever watches this end."""

    level: int
    """As `logging` has them."""
    message: str
    arguments: tuple[object, ...] = ()
    peer: int | None = None
    """Who caused it, where somebody could cause many."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The session is over."""

    goodbye: str | None = None
    """What was said at its end; None if nothing was."""
    error: LightSecAggError | None = None
    """Why, if it did not end as it should."""


Effect = (
    Post
    | Cut
    | Allow
    | Backlog
    | Store
    | Compute
    | Train
    | Prepared
    | TakeMembers
    | Apply
    | ApplyBuffer
    | Renew
    | RoundBegan
    | RoundLeft
    | RoundEnded
    | PhaseBegan
    | Progress
    | ClientLeft
    | Log
    | Finished
)


class Session(Protocol):
    """Either end of a federation."""

    @property
    def deadline(self) -> float:
        """When the session wants its next `tick`; NEVER if only events can move it."""

    def start(self, now: float) -> list[Effect]:
        """Begin; call once, before anything else."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take an event; carry out the effects, in order."""

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; a call before the deadline does no harm."""
