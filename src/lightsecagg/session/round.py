"""One round of a server session on its way: the party, its deadlines, its promises, its record.

greeting with this round's number     the request of the current phase is repeated
greeting with another number          the client was restarted: a dropout of this round
disconnection                         a dropout after `grace`; at once while shares are under
                                      way, which cannot be repeated
withdrawal                            a dropout at once
a message that is refused             the client is cut and out of this round; the same if what
                                      it did here was not foreseen
a deadline                            the party goes on with what there is, or aborts
a record that cannot be stored        an upload is not acknowledged; anything else: abort
a job of the party                    is an effect; events and deadlines go on meanwhile, until
                                      only its result is awaited

Grace is for single clients. Once an upload is stored, and as long as so many are away that the
round would fail without them, the network is at fault, or the server: then nobody is given up
before the phase's deadline, as after a restart of the server (R31).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightsecagg.foreign import explain, shown
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Persist,
    Phase,
    RoundAborted,
    Send,
    ServerParty,
    SharingClosed,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.jobs import Compute, Job, Result, Upload
from lightsecagg.protocol.messages import MaskedUpload, Message, Refusal
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.budgets import phase_budget
from lightsecagg.session.envelope import RoundOver, UploadStored, Withdraw, pack_protocol
from lightsecagg.session.interface import (
    NEVER,
    Allow,
    AnyRecord,
    ClientLeft,
    Effect,
    Leave,
    Log,
    PhaseBegan,
    Progress,
    Store,
)
from lightsecagg.session.peers import Greeted, Misbehaved, Peers, Spoke
from lightsecagg.session.record import PhaseRecord, RoundRecord

COMEBACK = 15.0
"""Seconds in which clients find a server that was restarted: they pause for up to 4.5 s between
attempts, and an attempt that nobody answers takes 10 s."""
_PROGRESS = 0.05
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds there are, and for how long the server waits for what (seconds)."""

    number: int = 10
    min_clients: int = 0
    """Fewest connected clients that start a round; 0 for N - D."""
    wait_for_clients: float = 120.0
    settle: float = 1.0
    advertise: float = 30.0
    share: float = 120.0
    upload: float = 900.0
    agree: float = 30.0
    recover: float = 120.0
    grace: float = 5.0
    retries: int = 2


class RoundInProgress:
    """Drives one party for its session; see the module."""

    def __init__(
        self,
        party: ServerParty,
        settings: Settings,
        members: Iterable[int],
        plan: Plan,
        peers: Peers,
        emit: Callable[[Effect], None],
        now: float,
        *,
        stored: Iterable[int] | None = None,
    ) -> None:
        """`stored` names the uploads that a resumed round has on disk; None for a new round."""
        self.number, self.settings, self.members = settings.round, settings, list(members)
        self.aggregate: Aggregate | None = None
        self.record = RoundRecord(self.number, str(settings.protocol), list(self.members))
        self.record.quantisation_step = 1.0 / settings.quantizer.scale
        self.record.noise = settings.quantizer.residue
        self.record.resumed = stored is not None
        self.stored = set(stored or ())
        """Whose uploads are durable."""
        self.survivors: tuple[int, ...] = ()
        """U1, once it is announced."""
        self._party, self._plan, self._peers, self._emit = party, plan, peers, emit
        self._codec = Codec(settings.field)
        self._able = set(self.members)
        """Who can still be in the sum."""
        self._promise: AnyRecord | None = None
        """What is being stored before it is announced; the phase that it begins waits for it."""
        self._jobs: list[Job] = []
        self._lost: set[int] = set()
        self._refusals: Counter[str] = Counter()
        self._failed = False
        self._phase: Phase | None = None
        self._now = self._phase_began = self._deadline = now
        self._traffic = (peers.bytes_in, peers.bytes_out)
        self._short = False
        """Whether so many are away that the round would fail without them."""
        self._enough_since = now
        """When that ended, last."""
        self._next_look = NEVER
        self._next_progress = now

    # -- what the session asks -----------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing can change the outcome any more."""
        return self._failed or self._party.phase is Phase.DONE

    @property
    def is_uploading(self) -> bool:
        """Whether the upload phase may end now."""
        return self._party.phase is Phase.UPLOAD

    @property
    def deadline(self) -> float:
        """When it wants its next tick."""
        return self._next_look

    def begin(self, outputs: list[Output], now: float) -> None:
        """With what the party's `start` returned, or its resumption."""
        self._guard(lambda: self._release(outputs), now)

    def conclude(self) -> None:
        """Complete the record; call once, when it is over."""
        self._refusals.update(self._peers.refusals)
        self._peers.refusals.clear()
        self.record.refusals = dict(self._refusals)
        self.record.late = dict(self._party.late_messages)

    # -- events --------------------------------------------------------------------------------

    def on_peer(self, event: Greeted | Spoke | Misbehaved, now: float) -> None:
        """A client has said something."""
        self._guard(lambda: self._on_peer(event), now)

    def on_disconnection(self, client: int, now: float) -> None:
        """A client's stream has ended."""
        if self._party.phase in (Phase.ADVERTISE, Phase.SHARE):
            self._guard(lambda: self._drop(client, "disconnected"), now)
        else:
            self._guard(lambda: self._look(now), now)

    def on_stored(self, record: AnyRecord, upload: Upload | None, now: float) -> None:
        """A record is durable; an upload counts now, and is acknowledged."""
        if isinstance(record, UploadTaken):
            self._guard(lambda: self._on_upload_stored(record, upload), now)
        elif record is self._promise:
            self._promise = None
            self._track_phase(now)

    def on_store_failed(self, record: AnyRecord, reason: str, now: float) -> None:
        """A record is not durable: nothing that depends on it has left."""
        if isinstance(record, UploadTaken):
            self._guard(lambda: self._on_upload_lost(record, reason), now)
        elif record is self._promise:
            self._guard(lambda: self.fail(reason), now)

    def on_computed(self, job: Job, result: Result, now: float) -> None:
        """A job of the party is done, or one of a round before."""
        self._jobs = [mine for mine in self._jobs if mine is not job]
        self._guard(lambda: self._release(self._party.computed(job, result)), now)

    def on_compute_failed(self, job: Job, reason: str, now: float) -> None:
        """A job cannot be done: there will be no sum, if it is one of this round."""
        if any(job is mine for mine in self._jobs):
            self._guard(lambda: self.fail(reason), now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self._next_look and not self.is_over:
            self._guard(lambda: self._look(now), now)

    def fail(self, reason: str) -> None:
        """Give the round up."""
        self._log(logging.ERROR, "%s", reason)
        self._failed, self.aggregate = True, None
        self.record.aborted = reason

    def _guard(self, step: Callable[[], None], now: float) -> None:
        """What nobody foresaw ends the round, not the server."""
        self._now = now
        try:
            if not self.is_over:
                step()
            self._track_phase(now)
        except Exception as error:
            self.fail(explain(error))
            self._track_phase(now)

    def _on_peer(self, event: Greeted | Spoke | Misbehaved) -> None:
        match event:
            case Greeted(client, number):
                self._on_greeting(client, number)
            case Misbehaved(client, reason):
                self._drop(client, reason, Leave.REFUSED)
            case Spoke(client, Withdraw(number, reason)):
                if number == self.number and client in self.members and client not in self._lost:
                    self.record.withdrawn.setdefault(shown(reason), []).append(client)
                    self._drop(client, f"it withdraws: {shown(repr(reason))}", Leave.WITHDRAWN)
            case Spoke(client, (number, body)):
                if number != self.number:
                    self._party.late_messages["other round"] += 1
                else:
                    self._receive(client, body)

    def _on_greeting(self, client: int, number: int) -> None:
        if number not in (-1, self.number):
            self._peers.tell(client, RoundOver(number, "that round is over"))
        if number != self.number:
            self._drop(client, "restarted, its secrets of this round are gone")
        elif client not in self.members or client in self._lost:
            # It still waits for a round that goes on without it.
            self._peers.tell(client, RoundOver(number, "the round goes on without this client"))
        else:
            self._next_look = min(self._next_look, self._now)  # perhaps enough are here again
            self._release(self._party.request_for(client))

    def _receive(self, client: int, body: memoryview) -> None:
        if client in self._lost:
            self._party.late_messages["after a dropout"] += 1
            return
        try:
            message = self._codec.decode(body)
            outputs = self._party.receive(client, message)
        except Exception as error:  # at most its sender is harmed by a message (S41)
            self._peers.cut(client, error)
            self._drop(client, explain(error), Leave.REFUSED)
            return
        if isinstance(message, Refusal):
            self._note_refusal(client, len(message.missing))
        self._release(outputs)
        if isinstance(message, MaskedUpload) and client in self.stored:
            self._peers.tell(client, UploadStored(self.number))  # it has sent it again

    def _note_refusal(self, client: int, missing: int) -> None:
        """Shares were lost on their way to it: the party goes on without its answer."""
        reason = f"it lacks the shares of {missing} peers"
        refusing = self.record.withdrawn.setdefault(reason, [])
        if client not in refusing:
            refusing.append(client)
            self._log(logging.INFO, "client %d refuses: %s", client, reason)

    def _on_upload_stored(self, record: UploadTaken, upload: Upload | None) -> None:
        """Durable before it is counted, and counted before it is acknowledged."""
        self.stored.add(record.client)
        self._release(self._party.stored(record, upload))
        self._peers.tell(record.client, UploadStored(self.number))

    def _on_upload_lost(self, record: UploadTaken, reason: str) -> None:
        client = record.client
        self._refusals["JournalError"] += 1
        self._log(logging.ERROR, "the upload of client %d: %s", client, reason)
        self._peers.tell(client, RoundOver(self.number, "the server could not store the upload"))
        self._give_up(client, "its upload could not be stored")
        self._release(self._party.stored(record, None))

    # -- dropouts ------------------------------------------------------------------------------

    def _drop(self, client: int, why: str, how: Leave = Leave.DROPPED) -> None:
        """Wait for it, and listen to it, no more in this round; what it has delivered stays."""
        if client in self.members and client not in self._lost and not self.is_over:
            self._give_up(client, why, how)
            self._release(self._party.drop(client))

    def _give_up(self, client: int, why: str, how: Leave = Leave.DROPPED) -> None:
        phase = str(self._party.phase)
        self._lost.add(client)
        self.record.dropped.setdefault(phase, []).append(client)
        self._log(logging.INFO, "client %d dropped in phase %s: %s", client, phase, why)
        self._emit(ClientLeft(client, phase, how, shown(why)))

    def _look(self, now: float) -> None:
        """At the clock: the phase's deadline, and the patience with those who are away."""
        pending = self._party.pending
        if now >= self._deadline:
            self._next_look = NEVER
            if pending:  # else only a job is awaited
                self._log(logging.INFO, "the deadline of phase %s fired", self._phase)
                self._release(self._party.proceed())
            return
        away = {client for client in pending if not self._peers.is_ready(client)}
        self._count_those_here(away, now)
        ends = {} if self._short else {client: self._end_of_patience(client) for client in away}
        self._next_look = min((self._deadline, *ends.values()))
        for client in sorted(client for client, end in ends.items() if now >= end):
            self._drop(client, "did not come back")

    def _count_those_here(self, away: set[int], now: float) -> None:
        enough = len(self._able - self._lost - away) >= self.settings.minimum
        if self._short and enough:
            self._enough_since = now
        self._short = bool(self.stored) and not enough

    def _end_of_patience(self, client: int) -> float:
        grace, extra = self._plan.grace, COMEBACK if self.record.resumed else 0.0
        if not self._peers.is_known(client):
            return max(self._phase_began + max(grace, extra), self._enough_since + grace)
        gone_since = self._peers.gone_since(client)
        return NEVER if gone_since is None else max(gone_since, self._enough_since) + grace

    # -- outputs -------------------------------------------------------------------------------

    def _release(self, outputs: list[Output]) -> None:
        """Do what the party asks for; its records come before what depends on them."""
        encoded: dict[int, bytes] = {}
        for output in outputs:
            match output:
                case Send(client, message):
                    self._peers.post(client, self._encode(message, encoded))
                case Persist(record):
                    self._note_promise(record)
                    self._emit(Store(self.number, record))
                case Compute(job):
                    self._jobs.append(job)
                    self._emit(output)
                case Aggregate():
                    self.aggregate = output
                    self.record.included = list(output.included)
                    self.record.responders = list(output.responders)
                    self.record.suspects = list(output.suspects)
                    self.record.accused = list(output.accused)
                case RoundAborted(reason, suspects, accused):
                    self.record.aborted = reason
                    self.record.suspects = list(suspects)
                    self.record.accused = list(accused)

    def _note_promise(self, record: AnyRecord) -> None:
        match record:
            case SharingClosed(_, closed):
                self._promise = record
                self._able = set(closed.owners)
            case SurvivorsChosen(survivors):
                self._promise = record
                self.survivors = survivors
                self._able = set(survivors)

    def _encode(self, message: Message, cache: dict[int, bytes]) -> bytes:
        """The same message to many clients is encoded once."""
        key = id(message)
        if key not in cache:
            cache[key] = pack_protocol(self.number, self._codec.encode(message))
        return cache[key]

    # -- phases --------------------------------------------------------------------------------

    def _track_phase(self, now: float) -> None:
        phase = Phase.DONE if self.is_over else self._party.phase
        if self._promise is not None and phase is not Phase.DONE:
            return
        if phase is not self._phase:
            self._enter(phase, now)
        elif now >= self._next_progress and not self.is_over:
            self._report_progress(now)

    def _enter(self, phase: Phase, now: float) -> None:
        if self._phase is not None and self._phase is not Phase.DONE:
            entry, traffic = self.record.phases[str(self._phase)], self._traffic
            entry.seconds = now - self._phase_began
            self._traffic = (self._peers.bytes_in, self._peers.bytes_out)
            entry.bytes_in = self._traffic[0] - traffic[0]
            entry.bytes_out = self._traffic[1] - traffic[1]
        self._phase, self._phase_began = phase, now
        if phase is Phase.DONE:
            self._next_look = NEVER
            return
        self._begin_phase(phase, now)

    def _begin_phase(self, phase: Phase, now: float) -> None:
        entry = self.record.phases[str(phase)] = PhaseRecord(0.0)
        self._emit(PhaseBegan(entry))
        seconds: float = getattr(self._plan, str(phase))
        self._deadline = now + seconds
        self._next_look = now  # somebody may be away already
        awaited = len(self._party.pending)
        self._log(logging.INFO, "%s: waiting for %d clients, %g s at most", phase, awaited, seconds)
        budget = phase_budget(self.settings, phase)
        for client in self.members:
            self._emit(Allow(client, budget))
        self._report_progress(now)

    def _report_progress(self, now: float) -> None:
        self._next_progress = now + _PROGRESS
        total, awaited = len(self.members), self._party.pending
        self._emit(Progress(str(self._party.phase), total - len(awaited), total, awaited))

    def _log(self, level: int, message: str, *arguments: object) -> None:
        self._emit(Log(level, f"round %d: {message}", (self.number, *arguments)))
