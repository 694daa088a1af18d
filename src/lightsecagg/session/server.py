"""The server's end of a federation: all rounds, from the first to goodbye.

Theory of operation. A session is in one of these states; an event that a state does not name is
taken note of (who is here) and changes nothing else.

    Resuming     a round that a crash cut short is on its way again
    Waiting      for enough clients to open a round with
    Running      a round is on its way (`round`)
    Applying     its sum is made a model of, by the driver
    Leaving      goodbye is said; clients that come back in time hear it too
    Ended        nothing happens any more

What must survive a crash is stored before it is acknowledged or announced: the party names it, the
session passes it on (`Store`). A failed round is tried again, with the same clients if U1 was
announced: those who signed for it sum no other from the same model (S42).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from lightsecagg.errors import Aborted, LightSecAggError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.registry import server_party
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.session.budgets import backlog_limit
from lightsecagg.session.envelope import (
    Goodbye,
    RoundModel,
    RoundOver,
    UploadStored,
    pack_control,
)
from lightsecagg.session.interface import (
    NEVER,
    Announcement,
    Applied,
    Apply,
    Backlog,
    Computed,
    ComputeFailed,
    Connected,
    Disconnected,
    Effect,
    Event,
    Finished,
    Log,
    Members,
    MembersChanged,
    Progress,
    Received,
    RoundAbandoned,
    RoundBegan,
    RoundEnded,
    RoundOpened,
    Spoilt,
    Stop,
    Store,
    Stored,
    StoreFailed,
    UploadDiscarded,
)
from lightsecagg.session.past import Past, PromisedRound, bring_back
from lightsecagg.session.peers import Greeted, Misbehaved, Peers, Spoke
from lightsecagg.session.record import RoundRecord, listed
from lightsecagg.session.round import COMEBACK, Plan, RoundInProgress

_SPOILT = "the sum is spoilt: it cannot be used"
"""What clients hear. More would tell a liar about the others' part of the sum."""


class State(StrEnum):
    """See the theory of operation."""

    RESUMING = "resuming"
    WAITING = "waiting"
    RUNNING = "running"
    APPLYING = "applying"
    LEAVING = "leaving"
    ENDED = "ended"


Choose = Callable[[list[int], int, list[int]], list[int]]
"""Whom to invite of those who are ready, for round number so-and-so; the last ones first."""


@dataclass(slots=True)
class _Wait:
    """For clients, before a round."""

    wanted: list[int]
    """Those of a failed round, whom a rerun needs again."""
    least: int
    most: int
    until: float
    settled: float
    few: bool = False
    """Whether too few were here when it was last decided."""


class ServerSession:
    """Runs the rounds of one federation; see the theory of operation and `interface`."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        allow_list: AllowList,
        announcement: Announcement,
        choose: Choose,
        past: Past | None = None,
        members: Members | None = None,
    ) -> None:
        """`settings` but for the number and the model of a round, which each one fills in.

        With `members` the allow-list may be replaced between rounds.
        """
        past = past or Past()
        self.state = State.RESUMING
        self.completed = past.completed
        self.rounds = 0
        """Rounds that have ended in this session."""
        self._settings, self._plan, self._allow_list = settings, plan, allow_list
        self._announcement, self._choose = announcement, choose
        self._next_round, self._restarted = past.next_round, past.next_round > 1
        self._uploaders = dict(past.uploaders)
        self._announced = (hash_model(announcement.model), past.announced)
        self._unfinished = deque(past.unfinished)
        self._enough = past.enough
        self._effects: list[Effect] = []
        self._peers = Peers(self._emit, len(allow_list), members)
        self._next_members: MembersChanged | None = None
        self._wait: _Wait | None = None
        self._round: RoundInProgress | None = None
        self._attempts = 0
        self._stopping = self._restless = False
        self._comeback = self._leave_at = 0.0
        self._goodbye = Goodbye("", finished=False)
        self._error: LightSecAggError | None = None
        self._absent: set[int] = set()

    # -- the driver's side ---------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """See `Session.deadline`."""
        if self.state is State.ENDED:
            return NEVER
        if self._restless:
            return 0.0
        mine = NEVER
        if self._round is not None and self.state in (State.RESUMING, State.RUNNING):
            mine = self._round.deadline
        elif self._wait is not None and self.state is State.WAITING:
            mine = self._next_decision(self._wait)
        elif self.state is State.LEAVING:
            mine = self._leave_at
        return min(mine, self._peers.deadline)

    @property
    def may_take_long(self) -> bool:
        """Whether the next call is better made where it holds up nobody.

        The last upload ends its phase, and so does whoever is given up instead: then all reports
        on shares are examined, which takes the longer the more was lied (S46).
        """
        return self._running is not None and self._running.is_uploading

    @property
    def connected(self) -> list[int]:
        """Who is here and has greeted."""
        return self._peers.ready()

    @property
    def score(self) -> str:
        """How far the federation is, in words."""
        return f"{self.completed} of {self._plan.number} rounds done"

    def start(self, now: float) -> list[Effect]:
        """See `Session.start`."""
        self._comeback = now + COMEBACK if self._restarted else 0.0
        if self.completed:
            self._log(logging.INFO, "resuming after %d completed rounds", self.completed)
        self._resume_next(now)
        return self._taken(restless=True)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """See `Session.handle`."""
        if self.state is State.ENDED:
            return []
        match event:
            case Connected(client):
                self._peers.connected(client, now)
            case Received(client, data):
                content = self._peers.received(client, data)
                if content is not None:
                    self._on_peer(content, now)
            case Disconnected(client):
                self._peers.disconnected(client, now)
                if self._running is not None:
                    self._running.on_disconnection(client, now)
            case Stored() | StoreFailed():
                self._on_storage(event, now)
                return self._taken(restless=self._running is None or self._running.is_over)
            case Computed(job, result) if self._running is not None:
                self._running.on_computed(job, result, now)
            case ComputeFailed(job, reason) if self._running is not None:
                self._running.on_compute_failed(job, reason, now)
            case Applied() if self.state is State.APPLYING:
                self._on_applied(event, now)
                return self._taken(restless=True)
            case Spoilt(reason) if self.state is State.APPLYING:
                self._on_spoilt(reason, now)
                return self._taken(restless=True)
            case MembersChanged():
                self._next_members = event
            case Stop():
                self._on_stop()
        self._go_on(now)
        return self._taken()

    def _on_storage(self, event: Stored | StoreFailed, now: float) -> None:
        """Nothing else happens here: what was asked for with the record is not yet done."""
        match event:
            case Stored(record, upload) if self._running is not None:
                self._running.on_stored(record, upload, now)
            case StoreFailed(record, reason) if self._running is not None:
                self._running.on_store_failed(record, reason, now)

    def tick(self, now: float) -> list[Effect]:
        """See `Session.tick`."""
        if self.state is not State.ENDED:
            self._peers.tick(now)
            if self._running is not None:
                self._running.tick(now)
            self._go_on(now)
        return self._taken()

    def _go_on(self, now: float) -> None:
        """What the state can do by itself now: one thing.

        Whatever can follow waits for the next tick, so that the driver has done what this asks for:
        whom to invite depends on who was invited before.
        """
        before = (self.state, self._round)
        if self._running is not None and self._running.is_over:
            self._conclude(self._running, now)
        elif self.state is State.WAITING and self._next_members is not None:
            self._use_members(self._next_members, now)
        elif self.state is State.WAITING:
            self._decide(now)
        elif self.state is State.LEAVING and (now >= self._leave_at or not self._absent):
            self.state = State.ENDED
            self._emit(Finished(self._goodbye.reason, self._error))
        waits = self.state is State.WAITING and self._next_members is not None
        self._restless = waits or before != (self.state, self._round)

    @property
    def _running(self) -> RoundInProgress | None:
        return self._round if self.state in (State.RESUMING, State.RUNNING) else None

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _taken(self, *, restless: bool = False) -> list[Effect]:
        self._restless = self._restless or restless
        effects, self._effects = self._effects, []
        return effects

    def _log(self, level: int, message: str, *arguments: object) -> None:
        self._emit(Log(level, message, arguments))

    def _on_peer(self, content: Greeted | Spoke | Misbehaved, now: float) -> None:
        if self._running is not None:
            self._running.on_peer(content, now)
        elif isinstance(content, Greeted):
            if content.round >= 0 and not self._is_applying(content.round):
                self._peers.tell(content.client, RoundOver(content.round, "that round is over"))
            if self.state is State.LEAVING:
                self._peers.tell(content.client, self._goodbye)
                self._absent.discard(content.client)

    def _is_applying(self, number: int) -> bool:
        """Whether its members are still to hear how it ended."""
        return (
            self.state is State.APPLYING
            and self._round is not None
            and (number == self._round.number)
        )

    # -- after a crash -------------------------------------------------------------------------

    def _resume_next(self, now: float) -> None:
        """The rounds that a crash cut short, then new ones."""
        while self._unfinished:
            unfinished = self._unfinished.popleft()
            number, promised = unfinished.number, unfinished.promised
            if promised is None:
                text = "round %d had no acknowledged upload; it is dropped"
                self._log(logging.INFO, text, number)
                self._emit(Store(number, RoundAbandoned("dropped after a crash")))
            elif unfinished.allow_list is None:
                text = "round %d began with a lost allow-list; it is dropped"
                self._log(logging.WARNING, text, number)
                self._emit(Store(number, RoundAbandoned("its allow-list is lost")))
            else:
                self._resume(number, promised, unfinished.allow_list, now)
                return
        self._next_attempt(now)

    def _resume(
        self, number: int, promised: PromisedRound, allow_list: AllowList, now: float
    ) -> None:
        self._emit(Backlog(backlog_limit(promised.settings, len(self._announcement.model))))
        back = bring_back(promised, allow_list)
        for client, reason in back.refused.items():
            text = "round %d: a stored upload is refused: %s"
            self._log(logging.WARNING, text, number, reason)
            self._emit(Store(number, UploadDiscarded(client)))
        self._log(
            logging.INFO,
            "resuming round %d: %d uploads are stored, U1 %s",
            number,
            len(back.stored),
            "is open" if promised.survivors is None else "was announced",
        )
        members = [member.client for member in promised.roster.members]
        self._round = RoundInProgress(
            back.party,
            promised.settings,
            members,
            self._plan,
            self._peers,
            self._emit,
            now,
            stored=back.stored,
        )
        self._emit(RoundBegan(number, tuple(members)))
        self._round.begin(back.outputs, now)

    # -- waiting for clients -------------------------------------------------------------------

    def _next_attempt(self, now: float) -> None:
        """A round, or the end."""
        if self.completed >= self._plan.number:
            self._leave("the federation has finished", now, error=None)
        elif self._enough is not None:
            self._leave(self._enough, now, error=None)
        elif self._stopping:
            self._end_stopped()
        else:
            self._begin_to_wait(now)

    def _begin_to_wait(self, now: float) -> None:
        parameters, wanted = self._settings.parameters, self._bound_to()
        # Before the first round all that are admitted get `settle` seconds to come, or those with
        # the fastest start would be chosen for it.
        most = parameters.clients if self.rounds else len(self._allow_list)
        least = self._plan.min_clients or (parameters.clients - parameters.dropouts)
        least = max(min(least, parameters.clients), self._settings.minimum)
        self._wait = _Wait(
            wanted, least, most, now + self._plan.wait_for_clients, now + self._plan.settle
        )
        self.state = State.WAITING
        here = len(self._peers.ready())
        if wanted:
            self._log(logging.INFO, "waiting for clients %s of the failed round", listed(wanted))
        elif here < least:
            text = "waiting for clients: %d here, %d needed, N = %d at most"
            self._log(logging.INFO, text, here, least, parameters.clients)

    def _bound_to(self) -> list[int]:
        """The clients of a failed round from the current model whose U1 was announced.

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

    def _use_members(self, event: MembersChanged, now: float) -> None:
        """Between rounds: from now on these are the members."""
        members, self._next_members = event.members, None
        known, present = set(self._allow_list.clients), set(members.allow_list.clients)
        self._allow_list = members.allow_list
        self._settings = event.settings or self._settings
        parameters = self._settings.parameters
        self._peers.use_members(members, now)
        self._log(
            logging.INFO,
            "allow-list number %d is in use: added clients: %s; removed: %s; N = %d, T = %d, "
            "D = %d, U = %d",
            members.number,
            listed(present - known) or "none",
            listed(known - present) or "none",
            parameters.clients,
            parameters.privacy,
            parameters.dropouts,
            parameters.survivors,
        )
        self._begin_to_wait(now)

    def _next_decision(self, wait: _Wait) -> float:
        few = len(self._peers.ready()) < wait.least
        return wait.until if few or wait.wanted else wait.settled

    def _decide(self, now: float) -> None:
        """Enough connected clients, at most N; a rerun wants the same again."""
        wait, ready = self._wait, self._peers.ready()
        if wait is None:
            raise AssertionError("waiting, and nobody knows for whom")
        if self._stopping:
            self._end_stopped()
            return
        few, wait.few = wait.few, len(ready) < wait.least
        if few and not wait.few:
            wait.settled = now + self._plan.settle
        if wait.wanted and set(wait.wanted) <= set(ready):
            self._open_round(wait.wanted, now)
            return
        enough = len(ready) >= wait.most or (len(ready) >= wait.least and now >= wait.settled)
        if enough and not wait.wanted:
            self._open_round(self._choose(ready, self._next_round, []), now)
        elif enough and now >= wait.until:
            absent = sorted(set(wait.wanted) - set(ready))
            text = "clients %s of the failed round are away, others will refuse"
            self._log(logging.WARNING, text, absent)
            self._open_round(self._choose(ready, self._next_round, wait.wanted), now)
        elif wait.few and now >= wait.until:
            seconds = self._plan.wait_for_clients
            self._give_up(
                f"only {len(ready)} clients connected within {seconds:g} s, "
                f"{wait.least} are needed",
                now,
            )
        if self.state is State.WAITING:
            self._emit(Progress("connect", len(ready), self._settings.parameters.clients))

    # -- one round -----------------------------------------------------------------------------

    def _open_round(self, invited: list[int], now: float) -> None:
        number, model = self._next_round, self._announcement.model
        instructions = self._announcement.instructions
        self._next_round += 1
        settings = replace(
            self._settings,
            round=number,
            model=hash_model(model or number.to_bytes(8, "big")),
            instructions=b"" if instructions is None else instructions.digest,
        )
        self._emit(Store(number, RoundOpened(settings)))
        text = "round %d begins with %d clients: %s (%s)"
        self._log(logging.INFO, text, number, len(invited), listed(invited), self.score)
        party = server_party(settings, self._allow_list, invited, durable=True)
        self._emit(Backlog(backlog_limit(settings, len(model))))
        self._round = RoundInProgress(
            party, settings, invited, self._plan, self._peers, self._emit, now
        )
        self._round.record.local = {} if instructions is None else dict(instructions.local)
        self._emit(RoundBegan(number, tuple(invited)))
        self._announce(settings, invited)
        self.state, self._wait = State.RUNNING, None
        self._round.begin(party.start(), now)

    def _announce(self, settings: Settings, invited: list[int]) -> None:
        given, bound = self._announcement, settings.quantizer.bound
        message = pack_control(RoundModel(settings.round, given.model, bound, given.instructions))
        for client in invited:
            if client in self._uploaders:
                self._peers.tell(client, UploadStored(self._uploaders[client]))
            self._peers.post(client, message)

    def _conclude(self, round_: RoundInProgress, now: float) -> None:
        """The party is done: make a model of the sum, or give the round up."""
        round_.conclude()
        record = round_.record
        if round_.survivors:
            self._announced = (round_.settings.model, round_.survivors)
        if record.aborted is None and round_.aggregate is not None:
            self.state = State.APPLYING
            self._emit(Apply(round_.settings, round_.aggregate, record))
            return
        record.aborted = record.aborted or "no result"
        self._end_round(round_, now)

    def _on_applied(self, event: Applied, now: float) -> None:
        if self._round is None:
            raise AssertionError("applying, and there is no round")
        self.completed += 1
        self._announcement, self._enough = event.announcement, event.enough
        self._end_round(self._round, now)

    def _on_spoilt(self, reason: str, now: float) -> None:
        if self._round is None:
            raise AssertionError("applying, and there is no round")
        record = self._round.record
        record.spoilt, record.aborted = True, f"{_SPOILT}: {reason}"
        self._end_round(self._round, now)

    def _end_round(self, round_: RoundInProgress, now: float) -> None:
        record = round_.record
        self._say_how_it_ended(record)
        if record.aborted is not None:
            self._emit(Store(round_.number, RoundAbandoned(record.aborted)))
        self._uploaders |= dict.fromkeys(round_.stored, round_.number)
        over = RoundOver(record.round, _SPOILT if record.spoilt else record.aborted)
        for client in round_.members:
            self._peers.tell(client, over)
        self.rounds += 1
        self._round = None
        self._emit(RoundEnded(record))
        if self._unfinished or record.resumed:
            self.state = State.RESUMING
            self._resume_next(now)
        else:
            self._count_attempt(record, now)

    def _count_attempt(self, record: RoundRecord, now: float) -> None:
        attempts = self._plan.retries + 1
        if record.aborted is None:
            self._attempts = 0
        elif not self._stopping:
            self._attempts += 1
            if self._attempts >= attempts:
                number = self.completed + 1
                self._give_up(f"{attempts} attempts at round {number}: {record.aborted}", now)
                return
            self._log(logging.INFO, "trying again: attempt %d of %d", self._attempts + 1, attempts)
        self._next_attempt(now)

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

    # -- the end -------------------------------------------------------------------------------

    def _on_stop(self) -> None:
        self._stopping = True
        if self.state is State.LEAVING:
            self._leave_at = 0.0

    def _give_up(self, reason: str, now: float) -> None:
        self._leave(reason, now, error=Aborted(reason))

    def _leave(self, reason: str, now: float, error: LightSecAggError | None) -> None:
        """Tell everybody who is here and, if the server was restarted, those who come back.

        Clients wait for a server that was told to stop, and for one that crashed: one that was
        restarted does not end before they had the time to hear its goodbye.
        """
        self.state, self._error = State.LEAVING, error
        self._goodbye = Goodbye(reason, finished=error is None)
        told = self._peers.ready()
        for client in told:
            self._peers.tell(client, self._goodbye)
        self._log(logging.INFO, "goodbye to %d clients: %s", len(told), reason)
        self._absent = set(self._allow_list.clients) - set(told)
        waits = error is None and not self._stopping
        self._leave_at = self._comeback if waits else 0.0
        if self._absent and now < self._leave_at:
            text = "all rounds are done; waiting for clients that come back, to tell them"
            self._log(logging.INFO, text)

    def _end_stopped(self) -> None:
        """Without a goodbye: clients wait for this server to come back."""
        text = "stopped with %s; clients wait for this server to come back"
        self._log(logging.INFO, text, self.score)
        self.state = State.ENDED
        self._emit(Finished())
