"""The server's end of a federation in synchronous rounds.

Theory of operation. Who waits, leaves and ends is the business of `server`. A failed round is tried
again, with the same clients if U1 was announced: those who signed for it sum no other from the same
model (S42). If none was, or too few signed for it, and clients may have uploaded, the next attempt
starts from a renewed model: nobody has answered, but their uploads from this one are used up, and
one liar could use up all of them (R59). A round that a crash cut short goes on first (`past`).
"""

from __future__ import annotations

import logging

from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.registry import server_party
from lightsecagg.protocol.settings import Settings, hash_model, version_hash
from lightsecagg.session import interface as session
from lightsecagg.session.budgets import backlog_limit
from lightsecagg.session.envelope import RoundModel, RoundOver
from lightsecagg.session.past import Unfinished, bring_back
from lightsecagg.session.record import RoundRecord, listed
from lightsecagg.session.round import RoundInProgress
from lightsecagg.session.server import Opened, ServerSession, State

_SPOILT = "the sum is spoilt: it cannot be used"
"""What clients hear. More would tell a liar about the others' part of the sum."""


class RoundServerSession(ServerSession[RoundInProgress]):
    """Runs the rounds of one federation; see the theory of operation and `interface`."""

    mode = "round"
    _failed: RoundRecord | None = None
    """The round after which the model is being renewed."""

    # -- the driver's side ---------------------------------------------------------------------

    @property
    def may_take_long(self) -> bool:
        """Whether the next call is better made where it holds up nobody.

        The last client that is awaited ends its phase, or whoever gives it up: then shares are
        bundled for everybody, or all reports on them are examined, which takes the longer the
        more was lied (S46).
        """
        return self._running is not None and self._running.is_closing

    @property
    def score(self) -> str:
        """How far the federation is, in words."""
        return f"{self.completed} of {self._plan.number} rounds done"

    # -- after a crash -------------------------------------------------------------------------

    def _resume_next(self, now: float) -> None:
        """The rounds that a crash cut short, then new ones."""
        while self._unfinished:
            left = self._unfinished.popleft()
            number = left.number
            if not left.has_uploads:
                text = "round %d had no acknowledged upload; it is dropped"
                self._log(logging.INFO, text, number)
                dropped = session.RoundAbandoned("dropped after a crash")
                self._emit(session.Store(number, dropped))
            elif left.allow_list is None:
                text = "round %d began with a lost allow-list; it is dropped"
                self._log(logging.WARNING, text, number)
                self._emit(session.Store(number, session.RoundAbandoned("its allow-list is lost")))
            else:
                self._resume(left, left.allow_list, now)
                return
        self._next_attempt(now)

    def _resume(self, left: Unfinished, allow_list: AllowList, now: float) -> None:
        number, settings = left.number, left.settings
        self._emit(session.Backlog(backlog_limit(settings, len(self._announcement.model))))
        party = bring_back(left, allow_list)
        self._log(
            logging.INFO,
            "resuming round %d: %d uploads are stored, U1 %s",
            number,
            len(party.uploaders),
            "was announced" if party.asked else "is open",
        )
        members = party.members or tuple(sorted(party.uploaders | party.pending))
        self._round = RoundInProgress(
            party, settings, members, self._plan, self._peers, self._emit, now, resumed=True
        )
        self._emit(session.RoundBegan(number, members))
        self._round.resume(now)

    # -- one round -----------------------------------------------------------------------------

    def _bound_to(self) -> list[int]:
        """The clients of a failed round from the current model whose U1 was agreed on.

        Those who signed for it will sum the same clients again, and no others (S42).
        """
        model, survivors = self._announced
        given = self._announcement.model
        if not given or model != hash_model(given) or survivors is None:
            return []
        revoked = [client for client in survivors if client not in self._allow_list]
        if revoked:
            self._log(
                logging.WARNING,
                "clients %s of the failed round were revoked since: the others will refuse to sum "
                "without them until their operators forgive the model (`lightsecagg ledger`)",
                listed(revoked),
            )
            return []
        return sorted(survivors)

    def _model_of(self, number: int) -> bytes:
        return version_hash(self._announcement.model, number)

    def _make_round(
        self, settings: Settings, invited: list[int], now: float
    ) -> Opened[RoundInProgress]:
        party = server_party(settings, self._allow_list, invited, durable=True)
        round_ = RoundInProgress(party, settings, invited, self._plan, self._peers, self._emit, now)
        given, bound = self._announcement, settings.quantizer.bound
        round_.record.local = {} if given.instructions is None else dict(given.instructions.local)
        message = RoundModel(settings.round, given.model, bound, given.instructions)
        return round_, message, party.start()

    def _conclude(self, round_: RoundInProgress, now: float) -> None:
        """The party is done: make a model of the sum, or give the round up."""
        round_.conclude()
        record = round_.record
        if round_.survivors and not round_.unanswered:
            self._announced = (round_.settings.model, round_.survivors)
        if record.aborted is None and round_.aggregate is not None:
            self.state = State.APPLYING
            self._emit(session.Apply(round_.settings, round_.aggregate, record))
            return
        record.aborted = record.aborted or "no result"
        self._end_round(round_, now)

    def _on_applied(self, event: session.Applied, now: float) -> None:
        if self._round is None:
            self._on_renewed(event.announcement, now)
            return
        self.completed += 1
        self._announcement, self._enough = event.announcement, event.enough
        self._end_round(self._round, now)

    def _renews(self, round_: RoundInProgress) -> bool:
        """Whether clients may have uploaded, and have answered for no set from this model.

        A client that withdraws may have uploaded in rounds of which this server knows nothing.
        """
        given, (model, survivors) = self._announcement.model, self._announced
        used = str(Phase.UPLOAD) in round_.record.phases or bool(round_.record.withdrawn)
        if not given or not used:
            return False
        return survivors is None or model != hash_model(given)

    def _on_renewed(self, announcement: session.Announcement, now: float) -> None:
        self._announcement, failed = announcement, self._failed
        if failed is None:
            raise AssertionError("a model is renewed, and no round has failed")
        self._failed = None
        self._after(failed, now)

    def _on_spoilt(self, reason: str, now: float) -> None:
        if self._round is None:
            raise AssertionError("applying, and there is no round")
        record = self._round.record
        record.spoilt, record.aborted = True, f"{_SPOILT}: {reason}"
        self._end_round(self._round, now)

    def _end_round(self, round_: RoundInProgress, now: float) -> None:
        record = round_.record
        self._say_how_it_ended(record)
        renews = record.aborted is not None and self._renews(round_)
        if record.aborted is not None:
            why = session.RoundAbandoned(record.aborted, renews)
            self._emit(session.Store(round_.number, why))
        self._uploaders |= dict.fromkeys(round_.stored, round_.number)
        if record.aborted is None:
            self._summed |= dict.fromkeys(record.included, round_.number)
        over = RoundOver(record.round, _SPOILT if record.spoilt else record.aborted)
        for client in round_.members:
            self._peers.tell(client, over)
        self.rounds += 1
        self._round = None
        self._emit(session.RoundEnded(record))
        if renews:
            self.state, self._failed = State.APPLYING, record
            self._emit(session.Renew(record.round, self.completed, None))
        else:
            self._after(record, now)

    def _after(self, record: RoundRecord, now: float) -> None:
        """What follows a round that is over."""
        if self._unfinished or record.resumed:
            self.state = State.RESUMING
            self._resume_next(now)
        else:
            self._count_attempt(record.aborted, now)

    def _say_how_it_ended(self, record: RoundRecord) -> None:
        if record.aborted is not None:
            reason = "round %d was aborted after %.1f s: %s"
            self._log(logging.WARNING, reason, record.round, record.seconds, record.aborted)
            return
        figures = "".join(f"; {text}" for text in record.told_figures())
        self._log(
            logging.INFO,
            "round %d is done after %.1f s: %d of %d clients included%s (%s)",
            record.round,
            record.seconds,
            len(record.included),
            len(record.invited),
            figures,
            self.score,
        )
