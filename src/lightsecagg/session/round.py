"""One round of a server session on its way: the party, its deadlines, its promises, its record.

greeting with this round's number     the request of the current phase is repeated
disconnection                         a dropout after `grace`; at once while shares are under
                                      way, which cannot be repeated
a deadline                            the party goes on with what there is, or aborts
a record that cannot be stored        an upload is not acknowledged; anything else: abort
a job of the party                    is an effect; events and deadlines go on meanwhile, until
                                      only its result is awaited

What else clients do is the business of `in_progress`; whoever is out there is a dropout here.

Grace is for single clients. Once an upload is stored, and as long as so many are away that the
round would fail without them, the network is at fault, or the server: then nobody is given up
before the phase's deadline, as after a restart of the server (R31).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from lightsecagg.foreign import explain
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Phase,
    Promised,
    RoundAborted,
    ServerParty,
)
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import SharingClosed, SumAnnounced
from lightsecagg.protocol.messages import MaskedUpload, Message, Refusal
from lightsecagg.protocol.settings import Settings
from lightsecagg.session import interface as session
from lightsecagg.session.budgets import phase_budget
from lightsecagg.session.envelope import RoundOver, UploadStored
from lightsecagg.session.in_progress import InProgress
from lightsecagg.session.peers import Peers
from lightsecagg.session.plan import Plan

_PROGRESS = 0.05
"""Seconds between two reports of progress."""


class RoundInProgress(InProgress[ServerParty]):
    """Drives one party for its session; see the module."""

    mode = "round"

    def __init__(
        self,
        party: ServerParty,
        settings: Settings,
        members: Iterable[int],
        plan: Plan,
        peers: Peers,
        emit: Callable[[session.Effect], None],
        now: float,
        *,
        resumed: bool = False,
    ) -> None:
        super().__init__(party, settings, members, plan, peers, emit, now, resumed=resumed)
        self.aggregate: Aggregate | None = None
        self.record = self._new_record(self.number, self.members)
        self.record.phases, self.record.dropped = self._phases, self._dropped
        self.record.withdrawn = self._withdrawn
        self.stored = set(party.uploaders)
        """Whose uploads are durable."""
        self.survivors = party.asked
        """U1, once it is announced."""
        self.unanswered = False
        """Whether it was lost for want of signatures: without a certificate nobody answers."""
        self._able = set(self.survivors or self.members)
        """Who can still be in the sum."""
        self._promise: session.AnyRecord | None = None
        """What is being stored before it is announced; the phase that it begins waits for it."""
        self._storing: dict[int, Promised] = {}
        self._lost: set[int] = set()
        self._short = False
        """Whether so many are away that the round would fail without them."""
        self._enough_since = self._next_progress = now

    # -- what the session asks -----------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing can change the outcome any more."""
        return self._failed or self._party.phase is Phase.DONE

    @property
    def is_closing(self) -> bool:
        """Whether one event more may end the phase."""
        return len(self._party.pending) <= 1

    def conclude(self) -> None:
        """Complete the record; call once, when it is over."""
        self._complete(self.record)

    # -- events --------------------------------------------------------------------------------

    def _on_disconnection(self, client: int) -> None:
        if self._party.phase in (Phase.ADVERTISE, Phase.SHARE):
            self._drop(client, "disconnected")
        else:
            self._look(self._now)

    def resume(self, now: float) -> None:
        """After a crash; a fault here ends the round, or every restart would end with it (S41)."""
        self._guard(lambda: self._release(self._party.resume()), now)

    def on_stored(self, record: session.AnyRecord, upload: Upload | None, now: float) -> None:
        """A record is durable; an upload counts now, and is acknowledged."""
        if isinstance(record, Promised) and record.upload is not None:
            if self._ends_storing(record):
                self._guard(lambda: self._on_upload_stored(record, upload), now)
        elif record is self._promise:
            self._promise = None
            self._track_phase(now)

    def on_store_failed(self, record: session.AnyRecord, reason: str, now: float) -> None:
        """A record is not durable: nothing that depends on it has left."""
        if isinstance(record, Promised) and record.upload is not None:
            if self._ends_storing(record):
                self._guard(lambda: self._on_upload_lost(record, reason), now)
        elif record is self._promise:
            self._guard(lambda: self.fail(reason), now)

    def _ends_storing(self, record: Promised) -> bool:
        """Whether it is of this round; what became of one of the round before may come late."""
        return self._storing.pop(record.sender, None) is record

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self._next_look:
            self._guard(lambda: self._look(now), now)

    def fail(self, reason: str) -> None:
        """Give the round up."""
        self._log(logging.ERROR, "%s", reason)
        self._failed, self.aggregate = True, None
        self.record.aborted = reason

    def _guard(self, step: Callable[[], None], now: float) -> None:
        self._now = now
        try:
            if not self.is_over:
                step()
            self._track_phase(now)
        except Exception as error:
            self.fail(explain(error))
            self._track_phase(now)

    def _on_upload_stored(self, record: Promised, upload: Upload | None) -> None:
        """Durable before it is counted, and counted before it is acknowledged."""
        self.stored.add(record.sender)
        self._release(self._party.stored(record, upload))
        self._peers.tell(record.sender, UploadStored(self.number))

    def _on_upload_lost(self, record: Promised, reason: str) -> None:
        client = record.sender
        self._refusals["JournalError"] += 1
        self._log(logging.ERROR, "the upload of client %d: %s", client, reason)
        self._peers.tell(client, RoundOver(self.number, "the server could not store the upload"))
        self._give_up(client, "its upload could not be stored")
        self._release(self._party.unstored(record))

    # -- clients -------------------------------------------------------------------------------

    def _is_in(self, client: int) -> bool:
        return client in self.members and client not in self._lost and not self.is_over

    def _is_out(self, client: int) -> bool:
        return client in self._lost

    def _go_on_with(self, client: int) -> None:
        self._next_look = min(self._next_look, self._now)  # perhaps enough are here again
        self._release(self._party.rejoin(client))

    def _acknowledge(self, client: int, message: Message) -> None:
        if isinstance(message, Refusal):
            self._note_refusal(client, len(message.missing))
        elif isinstance(message, MaskedUpload) and client in self.stored:
            self._peers.tell(client, UploadStored(self.number))  # it has sent it again

    def _note_refusal(self, client: int, missing: int) -> None:
        """Shares were lost on their way to it: the party goes on without its answer."""
        reason = f"it lacks the shares of {missing} peers"
        refusing = self.record.withdrawn.setdefault(reason, [])
        if client not in refusing:
            refusing.append(client)
            self._log(logging.INFO, "client %d refuses: %s", client, reason)

    def _give_up(self, client: int, why: str, how: session.Leave = session.Leave.DROPPED) -> None:
        self._lost.add(client)
        super()._give_up(client, why, how)

    def _look(self, now: float) -> None:
        """At the clock: the phase's deadline, and the patience with those who are away."""
        pending = self._party.pending
        if now >= self._deadline:
            self._next_look = session.NEVER
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
        if self._short:
            self._enough_since = now
        enough = len(self._able - self._lost - away) >= self.settings.minimum
        self._short = bool(self.stored) and not enough

    # -- outputs -------------------------------------------------------------------------------

    def _persist(self, record: session.AnyRecord) -> None:
        if not isinstance(record, Promised):
            raise AssertionError("a server's party stores what it promises")
        if record.upload is not None:
            self._storing[record.sender] = record
        else:
            self._promise = record
        for fact in record.facts:
            match fact:
                case SharingClosed(masks):
                    self._able = {owner for owner, _ in masks}
                case SumAnnounced(request):
                    self.survivors = request.survivors
                    self._able = set(self.survivors)
        self._emit(session.Store(self.number, record))

    def _note(self, output: Output) -> None:
        match output:
            case Aggregate():
                self.aggregate = output
                self.record.note(output)
            case RoundAborted():
                self.record.note(output)
                self.unanswered = self._phase is Phase.AGREE and not self._resumed

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
        self._close_phase(now)
        self._phase, self._phase_began = phase, now
        if phase is Phase.DONE:
            self._next_look = session.NEVER
            return
        seconds = self._open_phase(phase, now)
        self._next_look = now  # somebody may be away already
        awaited = len(self._party.pending)
        self._log(logging.INFO, "%s: waiting for %d clients, %g s at most", phase, awaited, seconds)
        budget = phase_budget(self.settings, phase)
        for client in self.members:
            self._emit(session.Allow(client, budget))
        self._report_progress(now)

    def _report_progress(self, now: float) -> None:
        self._next_progress = now + _PROGRESS
        total, awaited = len(self.members), self._party.pending
        self._emit(session.Progress(str(self._party.phase), total - len(awaited), total, awaited))
