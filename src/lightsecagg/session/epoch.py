"""One epoch of a server session on its way: the party, its buffers, who is here, its promises.

a client asks for a model           it gets the newest, or the next one if it has trained from that
                                    or if its last update must still wait for a buffer to land
a client uploads                    stored, acknowledged, counted; dropped if that is impossible
K updates wait                      the party forms a buffer; so does the deadline `flush_after`,
                                    and everybody here being done with the model, with T + 2 or more
a buffer is recovered               its sum becomes the model of the next version
a buffer fails, or none can be      the model of the next version is as good as the same, under
formed by those who are here, or    another hash: who has spent its update can train again (S42)
none is, for as long as an upload
may take
greeting with this epoch's number   the client gets what it missed
disconnection                       what it misses is kept; a buffer in flight waits `grace` seconds
                                    or, if it would fail without who is away, until its deadline

What else clients do is the business of `in_progress`.

An epoch is to end after a buffer, when somebody waits outside, its keys are old or its members
change, and ends when nothing waits (`epoch_ending`); at once, when too few of its clients have a
memory of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from lightsecagg.foreign import explain
from lightsecagg.protocol.buffering import LONG_EPOCH
from lightsecagg.protocol.interface import (
    BufferAggregate,
    BufferedServerParty,
    BufferFailed,
    Output,
    Persist,
    Phase,
    Promised,
    RoundAborted,
)
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.messages import MaskedUpload, Message
from lightsecagg.protocol.settings import Settings, version_hash
from lightsecagg.session import interface as session
from lightsecagg.session.budgets import version_budget
from lightsecagg.session.envelope import (
    EpochCloses,
    MasksKnown,
    UploadStored,
    Version,
    pack_control,
)
from lightsecagg.session.epoch_ending import Ending
from lightsecagg.session.in_progress import InProgress
from lightsecagg.session.peers import Peers
from lightsecagg.session.plan import Flushing, Plan
from lightsecagg.session.record import RoundRecord

_RELAY = 0.2
"""Seconds for which shares wait for others that go to the same clients."""


class EpochInProgress(InProgress[BufferedServerParty]):
    """Drives one party for its session; see the module."""

    mode = "epoch"

    def __init__(
        self,
        party: BufferedServerParty,
        settings: Settings,
        invited: Iterable[int],
        plan: Plan,
        flushing: Flushing,
        announcement: session.Announcement,
        peers: Peers,
        emit: Callable[[session.Effect], None],
        now: float,
        *,
        resumed: bool = False,
    ) -> None:
        super().__init__(party, settings, invited, plan, peers, emit, now, resumed=resumed)
        self.buffers = 0
        """Recovered since this process drives the epoch."""
        self.aborted: str | None = None
        """Why the epoch is over before it began, or cannot go on."""
        self.stopping = self.finished = self.changing = False
        """Whether the operator wants it to stop, no other buffer is wanted, or another allow-list
        waits."""
        self.announcement = announcement
        self._flushing = flushing
        self._able = set(self.members)
        """Who has a memory of this epoch, as far as is known."""
        self._wants: dict[int, int] = {}
        """Who can train, and which version it wants a newer model than."""
        self._result: BufferAggregate | BufferFailed | None = None
        """Of the call whose outputs are being released."""
        self._change: Promised | None = None
        self._renewing = False
        """Whether a new model without a buffer is being made."""
        self._record: RoundRecord | None = None
        self._storing: Promised | None = None
        """What may turn out not to be stored: nothing else is done before that is known."""
        self._ending = Ending(party, plan.upload)
        self._began = now
        self._renew_at = now + plan.upload
        """When those who wait for another model get one, though others may still upload."""
        self._deadline = self._reports_due = self._relay_at = session.NEVER
        self._quiet_since: float | None = None
        """Since when those who are here can bring no other update, or too few for a buffer."""
        self._short_since: float | None = None
        self._told = -1
        """How many waiting updates were last reported."""

    # -- what the session asks -----------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the current model."""
        return self._party.time

    @property
    def stored(self) -> frozenset[int]:
        """Whose uploads are durable."""
        return self._party.uploaders

    @property
    def unsummed(self) -> int:
        """How many uploads wait, or are in the buffer in flight."""
        return self._party.unsummed

    @property
    def is_over(self) -> bool:
        """Whether the session is to leave this epoch, or to end with it."""
        if self._party.phase is Phase.DONE or self._failed:
            return True
        if self._renewing:
            return False
        if self._party.phase in (Phase.AGREE, Phase.RECOVER):
            return self.finished
        ends = self.finished or self.stopping or self._ending.closed
        return ends or self.aborted is not None

    # -- events --------------------------------------------------------------------------------

    def _on_disconnection(self, client: int) -> None:
        """What it misses from now on is kept for it."""
        self._wants.pop(client, None)
        if client in self._able:
            self._release(self._party.leave(client))

    def on_stored(self, record: object, upload: Upload | None, now: float) -> None:
        """A record is durable; an upload counts now, and is acknowledged."""
        stored = self._storing
        if stored is None or stored is not record:
            return
        self._storing = None
        if stored.upload is None:
            self._next_look = now  # what was asked for with the record is not yet done
        else:
            self._guard(lambda: self._on_upload_stored(stored, upload), now)

    def _on_upload_stored(self, record: Promised, upload: Upload | None) -> None:
        if record.upload is not None:
            self._peers.tell(record.upload.tag.owner, UploadStored(self.number))
        self._release(self._party.stored(record, upload))

    def on_store_failed(self, record: object, reason: str, now: float) -> None:
        """A record is not durable: nothing that depends on it has left."""
        if record is self._storing:
            self._guard(lambda: self._do_without(reason), now)

    def _do_without(self, reason: str) -> None:
        """An upload, or masks, could not be stored: their owner has to send others."""
        record, self._storing = self._storing, None
        if record is None:
            return
        self._refusals["JournalError"] += 1
        owner = record.shares[0].owner if record.upload is None else record.upload.tag.owner
        what = "masks" if record.upload is None else "upload"
        self._log(logging.ERROR, "the %s of client %d: %s", what, owner, reason)
        self._release(self._party.unstored(record))

    def on_applied(self, event: session.Applied, now: float) -> None:
        """The model of the next version is stored."""
        self._guard(lambda: self._begin_version(event.announcement), now)

    def on_spoilt(self, reason: str, now: float) -> None:
        """The sum cannot be used: the next version is as good as the one before."""
        record, change = self._record, self._change
        if record is None or change is None:
            raise AssertionError("a sum is spoilt, and nobody has asked for one")
        record.aborted, record.spoilt = f"the sum is spoilt: it cannot be used: {reason}", True
        self._renew(change)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self._next_look:
            self._guard(lambda: None, now)

    def stop(self) -> None:
        """The operator wants it to stop: after the buffer that is in flight, if there is one."""
        self.stopping = self._party.paused = True

    def fail(self, reason: str) -> None:
        """Give the epoch up."""
        self._log(logging.ERROR, "%s", reason)
        self._failed, self.aborted = True, reason

    def _guard(self, step: Callable[[], None], now: float) -> None:
        self._now = now
        try:
            step()
            self._relay_if_due(now)
            self._look(now)
            self._serve_models()
            if self._storing is None:
                self._next_look = min(self._next_look, self._relay_at)
        except Exception as error:
            self.fail(explain(error))

    def _relay_if_due(self, now: float) -> None:
        """Shares wait a moment for others, which then leave in one message."""
        if not self._party.intake.has_shares_to_relay or self._failed:
            self._relay_at = session.NEVER
        elif self._relay_at == session.NEVER:
            self._relay_at = now + _RELAY
        elif now >= self._relay_at and self._storing is None:
            self._relay_at = session.NEVER
            self._release(self._party.intake.relay())

    # -- clients -------------------------------------------------------------------------------

    def _is_in(self, client: int) -> bool:
        return client in self._able

    def _is_out(self, client: int) -> bool:
        return client not in self._able

    def _go_on_with(self, client: int) -> None:
        ready, waiting = self._party.serials(client)
        if self._ending.closed:
            self._peers.tell(client, EpochCloses(self.number))
        if client in self._party.members:
            self._peers.tell(client, MasksKnown(self.number, tuple(ready), tuple(waiting)))
        self._emit(session.Allow(client, version_budget(self.settings)))
        self._release(self._party.rejoin(client))

    def _on_fetch(self, client: int, version: int) -> None:
        if client in self._able:
            self._wants[client] = version

    def _acknowledge(self, client: int, message: Message) -> None:
        if isinstance(message, MaskedUpload) and self._party.intake.is_stored(message.tag):
            self._peers.tell(client, UploadStored(self.number))  # it has sent it again

    def _drop(self, client: int, why: str, how: session.Leave = session.Leave.DROPPED) -> None:
        if client in self._able:
            self._able.discard(client)
            self._wants.pop(client, None)
            self._give_up(client, why, how)
            self._release(self._party.lose(client))

    # -- models --------------------------------------------------------------------------------

    def _serve_models(self) -> None:
        """The newest model for whoever wants it and is not held back, or is no longer.

        An upload may be dropped without a new version: its owner is served at once.
        """
        version, encoded = self._party.time, b""
        if self._renewing or not self._party.members:
            return
        for client, wanted in list(self._wants.items()):
            if wanted < version and not self._ending.holds_back(client):
                del self._wants[client]
                encoded = encoded or pack_control(Version(version, self.announcement.model))
                self._peers.post(client, encoded)

    def _begin_version(self, announcement: session.Announcement) -> None:
        """A model is stored: tell of the buffer that led to it, and let clients train from it."""
        self.announcement, self._renewing = announcement, False
        self._party.intake.publish(version_hash(announcement.model, self._party.time))
        record, self._record, self._change = self._record, None, None
        if record is not None:
            self.buffers += record.aborted is None
            self._conclude(record)
        self._began, self._renew_at = self._now, self._now + self._plan.upload
        self._quiet_since = None
        self._end_if_due()
        budget = version_budget(self.settings)
        for client in self._party.members:
            self._emit(session.Allow(client, budget))

    def _conclude(self, record: RoundRecord) -> None:
        self._close_phase(self._now)
        self._phase = None
        self._complete(record)
        self._party.late_messages.clear()
        record.phases, self._phases = self._phases, {}
        record.dropped, self._dropped = self._dropped, {}
        record.withdrawn, self._withdrawn = self._withdrawn, {}
        self._say_how_it_ended(record)
        self._emit(session.RoundEnded(record))

    def _say_how_it_ended(self, record: RoundRecord) -> None:
        if record.aborted is not None:
            self._log(logging.WARNING, "buffer %d is lost: %s", record.round, record.aborted)
            return
        figures = "".join(f"; {text}" for text in record.told_figures())
        text = "buffer %d is recovered: %d updates, up to %d versions old%s"
        oldest = max(record.staleness, default=0)
        self._log(logging.INFO, text, record.round, len(record.included), oldest, figures)

    def _end_if_due(self) -> None:
        """At a buffer's end: whether the epoch should make room for the next."""
        outside = set(self._peers.ready()) - self._able
        lost = len(self._able) < len(self._party.members)
        scarce = lost and len(self._able) <= self.settings.minimum  # one more costs all that waits
        crowded = outside and (scarce or self.buffers >= self._flushing.renew)
        if crowded or self.changing or self.buffers >= LONG_EPOCH:
            self._ending.begin(self._now)

    def _renew(self, change: Promised) -> None:
        self._renewing = True
        self._emit(session.Renew(self.number, self._party.time, change))

    # -- outputs -------------------------------------------------------------------------------

    def _note(self, output: Output) -> None:
        match output:
            case BufferAggregate() | BufferFailed():
                self._result = output
            case RoundAborted(reason):
                self.aborted = reason

    def _persist(self, record: object) -> None:
        if not isinstance(record, Promised):
            raise AssertionError("the party of an epoch has nothing else to store")
        result, self._result = self._result, None
        if result is None:
            self._storing = record if record.can_fail else None
            self._emit(session.Store(self.number, record))
            return
        self._record = self._new_record(result.time + 1, self._party.members)
        self._record.epoch, self._change = self.number, record
        self._record.note(result)
        if isinstance(result, BufferFailed):
            self._renew(record)
        else:
            self._renewing = True
            self._emit(session.ApplyBuffer(self.settings, result, self._record, record))

    # -- time ----------------------------------------------------------------------------------

    def _track_phase(self, now: float) -> None:
        if (phase := self._party.phase) is self._phase:
            return
        self._close_phase(now)
        # While a model is made, the buffer before it has no record yet, and its phases are there.
        self._phase, self._phase_began = None if self._renewing else phase, now
        self._reports_due = session.NEVER
        if self._renewing or phase is Phase.DONE:
            return
        self._open_phase(phase, now)
        if phase is not Phase.UPLOAD:
            pending = self._party.pending
            self._emit(session.Progress(str(phase), 0, len(pending), pending))
            return
        self._deadline = session.NEVER
        self._able &= set(self._party.members or self._able)

    def _look(self, now: float) -> None:
        """At the phase, the clock, and who is here."""
        self._track_phase(now)
        waits = self._renewing or self._storing is not None
        if waits or self._party.phase is Phase.DONE:
            self._next_look = session.NEVER
            return
        if self._ending.close_if_nothing_waits():
            for client in self._able:
                self._peers.tell(client, EpochCloses(self.number))
        if self.is_over:
            self._next_look = session.NEVER
        elif self._party.phase is Phase.UPLOAD:
            self._look_at_uploads(now)
            self._report_progress()
        else:
            self._look_at_answers(now)

    def _report_progress(self) -> None:
        if self._party.intake.waiting != self._told:
            self._told = self._party.intake.waiting
            self._emit(session.Progress("upload", self._told, self._party.buffer_size))

    def _look_at_answers(self, now: float) -> None:
        """Registration, or a buffer in flight: the deadline, and the patience with the absent."""
        pending = self._party.pending
        if now >= self._deadline and pending:  # else only a job is awaited
            self._log(logging.INFO, "the deadline of phase %s fired", self._phase)
            self._deadline = session.NEVER
            self._release(self._party.proceed())
            self._look(now)
            return
        away = {c: self._end_of_patience(c) for c in pending if not self._peers.is_ready(c)}
        if self._is_short:
            away = {}  # they have until the phase's deadline
        for client in sorted(client for client, end in away.items() if now >= end):
            del away[client]
            self._release(self._party.drop(client))
        if self._party.phase is not self._phase:
            self._look(now)
            return
        self._next_look = min(self._deadline, *away.values(), session.NEVER)

    @property
    def _is_short(self) -> bool:
        """Whether the buffer in flight fails without those who are away, and not with them."""
        flies = self._party.phase is not Phase.ADVERTISE
        return flies and len(self._here) < self.settings.minimum <= len(self._able)

    def _look_at_uploads(self, now: float) -> None:
        party, here, needed = self._party, len(self._here), self.settings.minimum
        if len(self._able) < needed:
            able = len(self._able)
            self._end_early(f"only {able} of its clients have a memory of it, {needed} are needed")
            return
        if here < needed:
            self._wait_for_enough(here, now)
            return
        self._short_since = None
        if party.intake.waiting >= self._ending.wanted and self._reports_due == session.NEVER:
            self._reports_due = now + self._flushing.reports
        if now >= self._reports_due:
            self._reports_due = session.NEVER
            self._release(party.proceed())
            if self._left_uploads(now):
                return
        if self._is_due(now):
            self._flush_or_renew(now)
            if self._left_uploads(now):
                return
        self._next_look = min(self._flush_at, self._reports_due)

    def _left_uploads(self, now: float) -> bool:
        """Whether what was done here has begun another phase, or a version."""
        if self._party.phase is Phase.UPLOAD and not self._renewing:
            return False
        self._look(now)
        return True

    @property
    def _here(self) -> list[int]:
        return [client for client in self._able if self._peers.is_ready(client)]

    @property
    def _flush_at(self) -> float:
        if self._ending.is_ripe:
            return self._now
        quiet = session.NEVER if self._quiet_since is None else self._quiet_since + self._plan.grace
        flush_at = self._began + self._flushing.flush_after
        return min(flush_at, self._ending.until, quiet, self._renew_at)

    def _is_due(self, now: float) -> bool:
        """Whether a buffer should be formed of what there is."""
        givers = [client for client in self._here if not self._has_nothing_to_give(client)]
        if givers and self._party.intake.may_fill(givers):
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        return now >= self._flush_at

    def _has_nothing_to_give(self, client: int) -> bool:
        trained = self._wants.get(client, -1) >= self._party.time
        return trained or (client in self._wants and self._ending.holds_back(client))

    def _flush_or_renew(self, now: float) -> None:
        """T + 2 or more share a buffer now; if none can come any more, the model changes."""
        self._release(self._party.proceed())  # no upload waits for reports any longer
        if self._party.phase is not Phase.UPLOAD:
            return
        if self._party.can_proceed:
            self._log(logging.INFO, "a buffer is formed of what waits")
            self._release(self._party.flush())
        elif now >= self._ending.until:
            self._end_early(f"the {self._party.intake.waiting} updates that wait make no buffer")
        elif self._quiet_since is not None and now >= self._quiet_since + self._plan.grace:
            text = "those who are here have too few updates to give: a new version"
            self._log(logging.WARNING, text)
            self._skip()
        elif now >= self._renew_at and any(map(self._has_nothing_to_give, self._here)):
            self._log(logging.WARNING, "no buffer within rounds.upload: a new version")
            self._skip()
        else:
            self._release(self._party.forgo())
            self._began = now
            if now >= self._renew_at:
                self._renew_at = now + self._plan.upload

    def _skip(self) -> None:
        for output in self._party.skip():
            if isinstance(output, Persist) and isinstance(output.record, Promised):
                self._renew(output.record)
            else:
                self._release([output])

    def _wait_for_enough(self, here: int, now: float) -> None:
        """Too few are connected for any buffer; others may be, who wait outside."""
        needed = self.settings.minimum
        if self._short_since is None:
            self._short_since = now
            self._log(logging.INFO, "%d clients are here, %d are needed", here, needed)
        patience = self._patience
        if len(self._peers.ready()) < needed:
            patience = max(patience, self._plan.wait_for_clients)
        end = self._short_since + patience
        if now >= end:
            self._end_early(f"only {here} of its clients are here, {needed} are needed")
        else:
            self._next_look = end

    def _end_early(self, why: str) -> None:
        """Nothing can be recovered any more."""
        self._next_look = session.NEVER
        self.aborted = self.aborted or why
