"""The server's end of a federation in the asynchronous mode: all epochs, from the first to goodbye.

Theory of operation. Who waits, leaves and ends is the synchronous session's business (`server`),
whose rounds are epochs here: an epoch has one roster and many buffers (`epoch`), each of which
leads to another version of the model. Versions go on from epoch to epoch.

What must survive a crash is stored before it is acknowledged or announced, and the record of the
epoch in one step with the model that a buffer led to: a sum is applied once. A server that was
told to stop leaves the epoch as it is, and goes on with it when it is started again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from lightsecagg.errors import JournalError, LightSecAggError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import BufferedServerParty, Promised
from lightsecagg.protocol.registry import server_party
from lightsecagg.protocol.settings import Settings, version_hash
from lightsecagg.session import interface as session
from lightsecagg.session.budgets import backlog_limit
from lightsecagg.session.envelope import EpochBegins, RoundOver
from lightsecagg.session.epoch import EpochInProgress
from lightsecagg.session.past import Past, Unfinished, bring_back
from lightsecagg.session.plan import Flushing, Plan
from lightsecagg.session.server import Choose, Opened, ServerSession, State

_FAREWELL = 5.0
"""Seconds in which clients hear the goodbye, and leave."""
_OVER = Promised(is_over=True)
"""What is left of an epoch that is over."""


class EpochServerSession(ServerSession[EpochInProgress]):
    """Runs the epochs of one federation; see the theory of operation and `interface`."""

    mode = "epoch"

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        allow_list: AllowList,
        announcement: session.Announcement,
        choose: Choose,
        past: Past | None = None,
        members: session.Members | None = None,
        *,
        flushing: Flushing | None = None,
        version: int = 0,
        models: Mapping[int, bytes] | None = None,
        unfinished: Unfinished | None = None,
    ) -> None:
        """`settings` but for the number of an epoch; `plan.number` counts buffers.

        * `version`: of the model that is announced;
        * `models`: hashes of the versions before it (`version_hash`): who has trained from one of
          them through the end of an epoch brings its update to the next.
        """
        super().__init__(settings, plan, allow_list, announcement, choose, past, members)
        if settings.buffering is None:
            raise AssertionError("the asynchronous mode has settings with buffering")
        self._buffer_size = settings.buffering.max_updates
        self._max_staleness = settings.buffering.table.max_staleness
        self._flushing = flushing or Flushing()
        self._version, self._left = version, unfinished
        self._models = dict(models or {})
        self._note_model()

    # -- the driver's side ---------------------------------------------------------------------

    @property
    def score(self) -> str:
        """How far the federation is, in words."""
        return f"{self.completed} of {self._plan.number} buffers done"

    def handle(self, event: session.Event, now: float) -> list[session.Effect]:
        """See `Session.handle`."""
        epoch = self._round
        match event:
            case session.Applied() if self.state is State.RUNNING and epoch is not None:
                before = epoch.buffers
                epoch.on_applied(event, now)
                self._note_version(event, epoch, epoch.buffers - before)
                return self._taken(restless=True)
            case session.Spoilt(reason) if self.state is State.RUNNING and epoch is not None:
                epoch.on_spoilt(reason, now)
                return self._taken()
            case session.MembersChanged() if epoch is not None:
                epoch.changing = True
            case session.Stop() if epoch is not None:
                epoch.stop()
            case session.Disconnected(client) if self.state is State.LEAVING:
                self._absent.discard(client)
        return super().handle(event, now)

    def _leave(self, reason: str, now: float, error: LightSecAggError | None) -> None:
        """Stay until those who were told have left: they are busy, and would miss the goodbye."""
        super()._leave(reason, now, error)
        self._absent |= set(self._peers.ready())
        self._leave_at = max(self._leave_at, now + _FAREWELL)

    def _note_model(self) -> None:
        """Updates from the current model, and from those before it, are welcome."""
        self._models[self._version] = version_hash(self._announcement.model, self._version)
        oldest = self._version - self._max_staleness
        self._models = {v: model for v, model in self._models.items() if v >= oldest}

    def _note_version(self, event: session.Applied, epoch: EpochInProgress, recovered: int) -> None:
        self._announcement, self._version = event.announcement, epoch.version
        self._note_model()
        self.completed += recovered
        self._attempts = 0 if recovered else self._attempts
        if event.enough is not None:
            self._enough = event.enough
        epoch.finished = self._is_finished

    @property
    def _is_finished(self) -> bool:
        return self._enough is not None or self.completed >= self._plan.number

    # -- after a crash -------------------------------------------------------------------------

    def _resume_next(self, now: float) -> None:
        """The epoch that was left, then new ones."""
        left, self._left = self._left, None
        if left is None:
            self._next_attempt(now)
            return
        number = left.settings.round
        if not left.facts:
            self._log(logging.INFO, "epoch %d had promised nothing; it is dropped", number)
            self._emit(session.Store(number, session.RoundAbandoned("dropped after a crash")))
        elif left.allow_list is None:
            self._log(logging.WARNING, "epoch %d began with a lost allow-list", number)
            self._abandon_left(number, "its allow-list is lost")
            return
        else:
            self._resume_epoch(left, left.allow_list, now)
            return
        self._next_attempt(now)

    def _abandon_left(self, number: int, reason: str) -> None:
        """Give up an epoch that has uploads: their owners need another model (S42)."""
        self._emit(session.Store(number, session.RoundAbandoned(reason)))
        self.state = State.APPLYING
        self._emit(session.Renew(number, self._version + 1, _OVER))

    def _resume_epoch(self, left: Unfinished, allow_list: AllowList, now: float) -> None:
        number = left.settings.round
        party = bring_back(left, allow_list)
        if party.time != self._version:
            raise JournalError(
                f"epoch {number} is at version {party.time}, the stored model at {self._version}: "
                "they are of different times"
            )
        for version, model in self._models.items():
            party.intake.publish(model, version)
        self._log(
            logging.INFO,
            "resuming epoch %d: %d uploads wait, phase %s",
            number,
            party.intake.waiting,
            party.phase,
        )
        outputs = party.resume()
        for client in party.members:
            outputs += party.leave(client)
        self._emit(session.Backlog(backlog_limit(left.settings, len(self._announcement.model))))
        epoch = self._epoch_of(party, left.settings, party.members, now, resumed=True)
        epoch.finished = self._is_finished
        self.state, self._round = State.RUNNING, epoch
        epoch.begin(outputs, now)

    # -- one epoch -----------------------------------------------------------------------------

    def _make_round(
        self, settings: Settings, invited: list[int], now: float
    ) -> Opened[EpochInProgress]:
        party = server_party(
            settings,
            self._allow_list,
            invited,
            buffer_size=self._buffer_size,
            time=self._version,
            durable=True,
        )
        for version, model in self._models.items():
            party.intake.publish(model, version)
        message = EpochBegins(settings.round, self._announcement.instructions)
        return self._epoch_of(party, settings, invited, now), message, party.start()

    def _epoch_of(
        self,
        party: BufferedServerParty,
        settings: Settings,
        invited: Sequence[int],
        now: float,
        *,
        resumed: bool = False,
    ) -> EpochInProgress:
        return EpochInProgress(
            party,
            settings,
            invited,
            self._plan,
            self._flushing,
            self._announcement,
            self._peers,
            self._emit,
            now,
            resumed=resumed,
        )

    def _conclude(self, epoch: EpochInProgress, now: float) -> None:
        """The epoch is over, or the federation is to end with it."""
        self._uploaders |= dict.fromkeys(epoch.stored, epoch.number)
        if epoch.stopping and not epoch.finished and epoch.aborted is None:
            self._round = None
            self._end_stopped()
            return
        reason = epoch.aborted or ("" if epoch.finished else "others are to join")
        level = logging.INFO if epoch.aborted is None else logging.WARNING
        text = "epoch %d has ended%s; uploads that are in no sum: %d"
        self._log(level, text, epoch.number, reason and f": {reason}", epoch.unsummed)
        why = session.RoundAbandoned(reason or "the federation has finished")
        self._emit(session.Store(epoch.number, why))
        for client in epoch.members:
            self._peers.tell(client, RoundOver(epoch.number, epoch.aborted))
        if epoch.aborted is not None and epoch.stored and not epoch.finished:
            # Uploads are lost: their owners need another model to train from (S42).
            self.state = State.APPLYING
            self._emit(session.Renew(epoch.number, self._version + 1, _OVER))
            return
        self._after_epoch(epoch, now)

    def _after_epoch(self, epoch: EpochInProgress, now: float) -> None:
        self.rounds += 1
        self._round = None
        if epoch.aborted is not None and not epoch.buffers:
            self._count_attempt(epoch.aborted, now)
        else:
            self._next_attempt(now)

    def _on_applied(self, event: session.Applied, now: float) -> None:
        """The model of a version between two epochs."""
        self._announcement = event.announcement
        self._version += 1
        self._note_model()
        if self._round is None:
            self._next_attempt(now)
        else:
            self._after_epoch(self._round, now)
