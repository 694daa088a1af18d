"""The server's end of a federation, whatever its mode: all rounds, from the first to goodbye.

Theory of operation. A session is in one of these states; an event that a state does not name is
taken note of (who is here) and changes nothing else.

    Resuming     a round that a crash cut short is on its way again
    Waiting      for enough clients to open a round with
    Running      a round is on its way (`round`)
    Applying     its sum is made a model of, by the driver
    Leaving      goodbye is said; clients that come back in time hear it too
    Ended        nothing happens any more

What a round is, how it ends and what a crash left of it is the business of `round_server`; in the
asynchronous mode it is an epoch (`epoch_server`). What must survive a crash is stored before it is
acknowledged or announced: the party names it, the session passes it on (`Store`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final, Generic, TypeVar

from lightsecagg.errors import Aborted, LightSecAggError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Output
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.session import interface as session
from lightsecagg.session.budgets import backlog_limit
from lightsecagg.session.envelope import AnyControl, Goodbye, RoundOver, UploadStored, pack_control
from lightsecagg.session.epoch import EpochInProgress
from lightsecagg.session.in_progress import IS_OVER, Happening
from lightsecagg.session.past import Past
from lightsecagg.session.peers import Greeted, Misbehaved, Peers, Spoke
from lightsecagg.session.plan import COMEBACK, Plan
from lightsecagg.session.record import listed
from lightsecagg.session.round import RoundInProgress


class State(StrEnum):
    """See the theory of operation."""

    RESUMING = "resuming"
    WAITING = "waiting"
    RUNNING = "running"
    APPLYING = "applying"
    LEAVING = "leaving"
    ENDED = "ended"


FARTHEST_LEAP: Final = 2**24
"""The most rounds of which an older journal may know nothing: clients refuse a number that is too
far from their last one (`FARTHEST_ROUND`), and liars could bring a federation there, for ever."""

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


AnyProgress = TypeVar("AnyProgress", RoundInProgress, EpochInProgress)
Opened = tuple[AnyProgress, AnyControl, list[Output]]


class ServerSession(ABC, Generic[AnyProgress]):
    """Runs the rounds of one federation; see the theory of operation and `interface`."""

    mode: ClassVar[str]
    """What a round is: round or epoch."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        allow_list: AllowList,
        announcement: session.Announcement,
        choose: Choose,
        past: Past | None = None,
        members: session.Members | None = None,
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
        self._uploaders, self._summed = dict(past.uploaders), dict(past.summed)
        self._announced = (hash_model(announcement.model), past.announced)
        """The model of the latest round whose U1 was announced, and that U1."""
        self._unfinished = deque(past.unfinished)
        self._enough = past.enough
        self._effects: list[session.Effect] = []
        self._peers = Peers(self._emit, len(allow_list), members)
        self._next_members: session.MembersChanged | None = None
        self._wait: _Wait | None = None
        self._round: AnyProgress | None = None
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
            return session.NEVER
        if self._restless:
            return 0.0
        mine = session.NEVER
        if self._round is not None and self.state in (State.RESUMING, State.RUNNING):
            mine = self._round.deadline
        elif self._wait is not None and self.state is State.WAITING:
            mine = self._next_decision(self._wait)
        elif self.state is State.LEAVING:
            mine = self._leave_at
        return min(mine, self._peers.deadline)

    @property
    def may_take_long(self) -> bool:
        """Whether the next `handle` is better called where it holds up nobody; `tick` always is."""
        return False

    @property
    def connected(self) -> list[int]:
        """Who is here and has greeted."""
        return self._peers.ready()

    @property
    @abstractmethod
    def score(self) -> str:
        """How far the federation is, in words."""

    def start(self, now: float) -> list[session.Effect]:
        """See `Session.start`."""
        self._comeback = now + COMEBACK if self._restarted else 0.0
        if self.completed:
            self._log(logging.INFO, "resuming after %d completed rounds", self.completed)
        self._resume_next(now)
        return self._taken(restless=True)

    def handle(self, event: session.Event, now: float) -> list[session.Effect]:
        """See `Session.handle`."""
        if self.state is State.ENDED:
            return []
        match event:
            case session.Connected(client):
                self._peers.connected(client, now)
            case session.Received(client, data):
                content = self._peers.received(client, data)
                if content is not None:
                    self._on_peer(content, now)
            case session.Disconnected(client):
                self._peers.disconnected(client, now)
                self._pass_on(event, now)
            case session.Stored() | session.StoreFailed():
                self._on_storage(event, now)
                return self._taken(restless=self._running is None or self._running.is_over)
            case session.Computed() | session.ComputeFailed():
                self._pass_on(event, now)
            case session.Applied() if self.state is State.APPLYING:
                self._on_applied(event, now)
                return self._taken(restless=True)
            case session.Spoilt(reason) if self.state is State.APPLYING:
                self._on_spoilt(reason, now)
                return self._taken(restless=True)
            case session.MembersChanged():
                self._next_members = event
            case session.Stop():
                self._on_stop()
        self._go_on(now)
        return self._taken()

    def _pass_on(self, event: Happening, now: float) -> None:
        if self._running is not None:
            self._running.take(event, now)

    def _on_storage(self, event: session.Stored | session.StoreFailed, now: float) -> None:
        """Nothing else happens here: what was asked for with the record is not yet done."""
        match event:
            case session.Stored(record, upload) if self._running is not None:
                self._running.on_stored(record, upload, now)
            case session.StoreFailed(record, reason) if self._running is not None:
                self._running.on_store_failed(record, reason, now)

    def tick(self, now: float) -> list[session.Effect]:
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
            self._emit(session.Finished(self._goodbye.reason, self._error))
        waits = self.state is State.WAITING and self._next_members is not None
        self._restless = waits or before != (self.state, self._round)

    @property
    def _running(self) -> AnyProgress | None:
        return self._round if self.state in (State.RESUMING, State.RUNNING) else None

    def _emit(self, effect: session.Effect) -> None:
        self._effects.append(effect)

    def _taken(self, *, restless: bool = False) -> list[session.Effect]:
        self._restless = self._restless or restless
        effects, self._effects = self._effects, []
        return effects

    def _log(self, level: int, message: str, *arguments: object) -> None:
        self._emit(session.Log(level, message, arguments))

    def _on_peer(self, content: Greeted | Spoke | Misbehaved, now: float) -> None:
        if self._running is not None:
            self._running.take(content, now)
        elif isinstance(content, Greeted):
            if content.round >= 0 and not self._is_applying(content.round):
                over = RoundOver(content.round, IS_OVER.format(mode=self.mode))
                self._peers.tell(content.client, over)
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

    # -- what each mode does in its own way ----------------------------------------------------

    @abstractmethod
    def _resume_next(self, now: float) -> None:
        """What a crash cut short, then new rounds."""

    @abstractmethod
    def _make_round(
        self, settings: Settings, invited: list[int], now: float
    ) -> Opened[AnyProgress]:
        """A round of these clients, how it is announced, and what its party asks for."""

    def _model_of(self, number: int) -> bytes:
        """The hash of the model that the settings of this round name."""
        return self._settings.model

    @abstractmethod
    def _conclude(self, round_: AnyProgress, now: float) -> None:
        """The party is done."""

    @abstractmethod
    def _on_applied(self, event: session.Applied, now: float) -> None:
        """The next model is stored."""

    def _on_spoilt(self, reason: str, now: float) -> None:
        """The sum cannot be used."""
        raise AssertionError("a sum is spoilt, and nobody has asked for one")

    def _bound_to(self) -> list[int]:
        """Clients without whom the others would refuse the next round."""
        return []

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

    def _use_members(self, event: session.MembersChanged, now: float) -> None:
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
            self._emit(session.Progress("connect", len(ready), self._settings.parameters.clients))

    def _open_round(self, invited: list[int], now: float) -> None:
        """Begin with these clients."""
        number, given = self._first_unseen(invited), self._announcement
        self._next_round = number + 1
        settings = replace(
            self._settings,
            round=number,
            model=self._model_of(number),
            instructions=b"" if given.instructions is None else given.instructions.digest,
        )
        self._emit(session.Store(number, session.RoundOpened(settings)))
        text = f"{self.mode} %d begins with %d clients: %s (%s)"
        self._log(logging.INFO, text, number, len(invited), listed(invited), self.score)
        self._emit(session.Backlog(backlog_limit(settings, len(given.model))))
        round_, announcement, outputs = self._make_round(settings, invited, now)
        self._emit(session.RoundBegan(number, tuple(invited)))
        message = pack_control(announcement)
        for client in invited:
            if client in self._uploaders:
                latest = self._uploaders[client]
                summed = self._summed.get(client) == latest
                self._peers.tell(client, UploadStored(latest, summed))
            self._peers.post(client, message)
        self.state, self._wait, self._round = State.RUNNING, None, round_
        round_.begin(outputs, now)

    def _first_unseen(self, invited: list[int]) -> int:
        """The next number; a later one, if this server's journal is older than its clients.

        Clients refuse a round that they have seen. What any D of them claim moves nothing; and more
        liars than that may not use up the numbers that the others will take.
        """
        claims = sorted(self._peers.seen(client) for client in invited)
        believed = claims[: max(1, len(claims) - self._settings.parameters.dropouts)]
        number = min(max(self._next_round, believed[-1] + 1), self._next_round + FARTHEST_LEAP)
        if number > self._next_round:
            text = f"clients have seen {self.mode} %d; this journal is older: going on with %d"
            self._log(logging.WARNING, text, number - 1, number)
        return number

    def _count_attempt(self, aborted: str | None, now: float) -> None:
        attempts = self._plan.retries + 1
        if aborted is None:
            self._attempts = 0
        elif not self._stopping:
            self._attempts += 1
            if self._attempts >= attempts:
                number = self.completed + 1
                self._give_up(f"{attempts} attempts at round {number}: {aborted}", now)
                return
            self._log(logging.INFO, "trying again: attempt %d of %d", self._attempts + 1, attempts)
        self._next_attempt(now)

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
        self._emit(session.Finished())
