"""The Server Manager of Section 6: drives a `RoundServerSession` over any communicator.

The transport's events, the results of jobs and the ticks of the clock go through one queue, the
transport's, into the session; its effects go to the transport, the journal, threads and the job.
While something is averaged or evaluated, a promise is being stored, or the session takes long, the
loop is free, and events wait; for an upload that is being stored they do not (`upload_store`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from lightsecagg.drivers.federation.callbacks import CONNECT, Callbacks, Overview, ServerCallback
from lightsecagg.drivers.federation.checkpoints import Checkpoints
from lightsecagg.drivers.federation.computing import Computer
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.jobs import ServerJob
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.learning import Learned, Learning
from lightsecagg.drivers.federation.membership import Membership, MembersInUse
from lightsecagg.drivers.federation.observer import Metrics, log
from lightsecagg.drivers.federation.selection import choose
from lightsecagg.drivers.federation.stopping import EarlyStopping
from lightsecagg.drivers.federation.tables import RoundsTable
from lightsecagg.drivers.federation.upload_store import UploadStore
from lightsecagg.drivers.peer_log import DEBUG_BURST, DEBUG_INTERVAL, PeerLog
from lightsecagg.drivers.transport import communicator as transport
from lightsecagg.errors import ConfigurationError, JournalError, ParameterError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.jobs import Compute
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.session import interface as session
from lightsecagg.session.envelope import describe
from lightsecagg.session.past import Past, Unfinished
from lightsecagg.session.plan import Plan
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_server import RoundServerSession
from lightsecagg.session.server import ServerSession, State

TellProgress = Callable[[str, int, int], None]
"""Told (phase, messages in, messages expected) while a round runs."""


_LOOK = 0.1
"""Seconds between two looks for a new allow-list, while no round is under way."""


class _Tick:
    """The session's deadline is over."""


class _UploadsDone:
    """It is known what became of some uploads."""


class FederationServer:
    """Runs the rounds of one federation."""

    session_type: type[ServerSession[Any]] = RoundServerSession

    def __init__(
        self,
        settings: Settings,
        rounds: RoundsTable,
        allow_list: AllowList,
        communicator: transport.ServerCommunicator,
        job: ServerJob,
        journal: Journal,
        metrics: Metrics | None = None,
        progress: TellProgress | None = None,
        learned: Learned | None = None,
        callbacks: Iterable[ServerCallback] = (),
        stopping: EarlyStopping | None = None,
        members: MembersInUse | None = None,
        settings_for: Callable[[AllowList], Settings] | None = None,
        checkpoints: Checkpoints | None = None,
        cores: int = 1,
        names: Mapping[int, str] | None = None,
    ) -> None:
        """`settings` as `make_settings` makes them; each round fills in its number and model.

        With `members` the allow-list may change between rounds; `settings_for` says what they
        are with another one. `names` are for people, on the page.
        """
        self._names = names or {}
        self._settings, self._rounds = settings, rounds
        self._allow_list = allow_list
        self._communicator, self._journal = communicator, journal
        self._metrics = metrics or Metrics()
        self._progress = progress or (lambda phase, done, expected: None)
        self._callbacks = Callbacks(callbacks)
        self._members, self._settings_for = members, settings_for
        self._learning = Learning(job, checkpoints or Checkpoints(journal), stopping, learned)
        self._history = History(journal.folder / "rounds.json")
        self._computer = Computer(communicator.notify, cores)
        self._uploads = UploadStore(journal, partial(communicator.notify, _UploadsDone()))
        self._log = PeerLog(log)
        self._traffic = PeerLog(log, burst=DEBUG_BURST, interval=DEBUG_INTERVAL)
        self._timer: asyncio.TimerHandle | None = None
        self._finished: session.Finished | None = None
        self._settled = False
        """Whether the journal knows that all rounds from now on are of the list in use."""
        self.records: list[RoundRecord] = []

    # -- the whole federation ----------------------------------------------------------------

    async def run(self, *, abandon: bool = False) -> list[RoundRecord]:
        """All rounds, from wherever the journal stands; returns the records of this run.

        `abandon` gives up a round that a crash left unfinished: always safe, its updates are lost.
        A server that was told to stop says no goodbye: its clients wait for it to come back. One
        that was restarted does not end before they had the time to hear its goodbye.
        """
        try:
            self._session = self._begin(abandon)
            await self._communicator.start()
            await self._carry_out(self._session.start(time.monotonic()))
            self._recall()
            past = self._history.records()
            self._metrics.begin(self._session.completed, self._rounds.number, past)
            self._callbacks.tell("begins", self._overview(), past)
            self._tell_members()
            await self._serve()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._computer.clear()
            await self._communicator.close()
            await self._uploads.settle()
            self._journal.close()
            self._metrics.close()
            await asyncio.to_thread(self._callbacks.close)
            self._log.close()
            self._traffic.close()
        if self._finished is not None and self._finished.error is not None:
            raise self._finished.error
        return self.records

    def stop(self) -> None:
        """Finish the current round, then end (SIGTERM)."""
        self._communicator.notify(session.Stop())

    @property
    def connected(self) -> list[int]:
        """Who is here and has greeted."""
        return self._session.connected if hasattr(self, "_session") else []

    @property
    def _job(self) -> ServerJob:
        return self._learning.job

    async def _serve(self) -> None:
        events = self._communicator.events()
        while self._finished is None:
            self._set_timer()
            await self._handle(await anext(events))

    async def _handle(self, event: transport.Event) -> None:
        for outcome in self._uploads.take():
            await self._tell(outcome)
        if self._session.state is State.WAITING:
            await self._look_for_members()
        match event:
            case transport.Connected(client):
                self._metrics.here.add(client)
                self._callbacks.tell("connected", client)
                await self._tell(session.Connected(client))
            case transport.Received(client, data):
                self._trace_message("from", client, data)
                await self._tell(session.Received(client, data))
            case transport.Disconnected(client, reason):
                self._metrics.here.discard(client)
                self._callbacks.tell("disconnected", client)
                await self._tell(session.Disconnected(client, reason))
            case transport.Notice(_Tick()):
                self._timer = None
                await self._call(self._session.tick, long=True)  # it may end a phase
            case transport.Notice(
                session.Stop() | session.Computed() | session.ComputeFailed() as what
            ):
                await self._tell(what)

    async def _tell(self, event: session.Event) -> None:
        # A message so long that it is in a file has to be read from there, and checked.
        long = isinstance(event, session.Received) and not isinstance(event.data, bytes)
        await self._call(partial(self._session.handle, event), long)

    async def _call(
        self, call: Callable[[float], list[session.Effect]], long: bool = False
    ) -> None:
        """Call the session, in a thread if that may take long."""
        now = time.monotonic()
        if long or self._session.may_take_long:
            effects = await asyncio.to_thread(call, now)
        else:
            effects = call(now)
        await self._carry_out(effects)

    def _set_timer(self) -> None:
        """Wake the session at its deadline."""
        loop, deadline = asyncio.get_running_loop(), self._session.deadline
        if self._members is not None and self._session.state is State.WAITING:
            deadline = min(deadline, loop.time() + _LOOK)
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return  # one that comes too early does no harm, and a second one no good
            self._timer.cancel()
            self._timer = None
        if deadline < session.NEVER:
            self._timer = loop.call_at(deadline, self._communicator.notify, _Tick())

    # -- the past ----------------------------------------------------------------------------

    def _begin(self, abandon: bool) -> ServerSession[Any]:
        """The session of what the journal knows."""
        completed = self._learning.restore(self._journal)
        if abandon:
            for number in self._journal.unfinished():
                log.warning("round %d is abandoned as demanded", number)
                renews = self._journal.announced(number) is None
                self._journal.abandon(number, "abandoned by the operator", renews=renews)
        for _ in range(self._journal.renewals()):
            self._job.renew()
        try:
            unfinished = self._unfinished()
        except JournalError as error:
            raise JournalError(
                f"{error}; restore it, or give the round up with --abandon-round"
            ) from error
        model = self._job.model()
        announced = self._journal.announced_for(hash_model(model)) if model else None
        return self._open(completed, Past(announced=announced, unfinished=unfinished))

    def _open(self, completed: int, past: Past, **more: Any) -> ServerSession[Any]:
        """A session after so many sums; `more` is what this kind of session takes beside."""
        self._learning.look_back(self._history.records())
        past = replace(
            past,
            next_round=self._journal.next_round(),
            completed=completed,
            uploaders=self._journal.uploaders(),
            summed=self._journal.summed(),
            enough=self._learning.enough(completed),
        )
        plan = Plan(**{each.name: getattr(self._rounds, each.name) for each in fields(Plan)})
        members = None if self._members is None else as_travels(self._members.current)
        announcement = self._announcement(completed)
        fixed = (self._settings, plan, self._allow_list, announcement, self._choose, past, members)
        return self.session_type(*fixed, **more)

    def _overview(self) -> Overview:
        parameters = self._settings.parameters
        return Overview(
            protocol=str(self._settings.protocol),
            threat_model=str(parameters.threat_model),
            clients=parameters.clients,
            privacy=parameters.privacy,
            dropouts=parameters.dropouts,
            survivors=parameters.survivors,
            rounds=self._rounds.number,
            completed=self._session.completed,
        )

    def _unfinished(self) -> list[Unfinished]:
        """The rounds that a crash cut short, with the lists that they began with."""
        journal = self._journal
        return [
            journal.left(number, self._allow_list_of(journal.settings(number)))
            for number in journal.unfinished()
        ]

    def _allow_list_of(self, settings: Settings) -> AllowList | None:
        """The list that a round began with, which may be older than the one in use."""
        if self._members is not None:
            return self._members.allow_list(settings.allow_list)
        return self._allow_list if self._allow_list.digest == settings.allow_list else None

    async def _look_for_members(self) -> None:
        """Between rounds: another allow-list is in use from now on, if there is one."""
        if self._members is None or self._settings_for is None:
            return
        if not self._settled:  # no round of the list before is under way any more
            self._settled = True
            self._members.settle()
        found = self._members.newer()
        if found is None:
            return
        try:
            settings = self._settings_for(found.allow_list)
        except ParameterError as error:
            raise ConfigurationError(
                f"allow-list number {found.number} has {len(found.allow_list)} clients, too few "
                f"for [aggregation]: {error}; add clients, or change it and start again"
            ) from error
        self._allow_list, self._settings = found.allow_list, settings
        self._communicator.admit(frozenset(found.allow_list.clients), found.revoked)
        self._members.settle()
        await self._tell(session.MembersChanged(as_travels(found), settings))
        self._tell_members()

    def _tell_members(self) -> None:
        """Who may take part, and how many of them a round waits for."""
        names = {client: self._names.get(client, "") for client in self._allow_list.clients}
        parameters = self._settings.parameters
        least = self._rounds.min_clients or (parameters.clients - parameters.dropouts)
        needed = max(min(least, parameters.clients), self._settings.minimum)
        self._metrics.admitted, self._metrics.needed = len(names), needed
        self._callbacks.tell("members", names, needed)

    def _announcement(self, completed: int) -> session.Announcement:
        return session.Announcement(self._job.model(), self._job.instructions(completed))

    def _choose(self, ready: list[int], number: int, first: list[int]) -> list[int]:
        return choose(
            ready,
            self._settings.parameters.clients,
            number,
            sampling=self._rounds.sampling,
            seed=self._rounds.seed,
            invited=self._history.invited,
            first=first,
        )

    def _recall(self) -> None:
        """Rounds that are over in the journal alone: a crash or a full disk came in between."""
        missing = []
        for number, aborted in self._journal.ended().items():
            if number in self._history:
                continue
            record = RoundRecord(number, str(self._settings.protocol), [], recalled=True)
            record.aborted = aborted
            if aborted is None:
                record.included = list(self._journal.announced(number) or ())
            missing.append(record)
        if missing:
            self._history.put(*missing)

    # -- effects -----------------------------------------------------------------------------

    async def _carry_out(self, effects: list[session.Effect]) -> None:
        """In order; nothing that follows a record leaves before the record is stored."""
        for effect in effects:
            match effect:
                case session.Post(client, data):
                    self._trace_message("to", client, data)
                    self._communicator.post(client, data)
                case session.Store():
                    if not await self._store(effect):
                        return
                case session.Log(level, message, arguments, peer):
                    self._write(level, message, arguments, peer)
                case session.Cut(client, reason):
                    self._communicator.disconnect(client, reason)
                case session.Allow(client, incoming):
                    self._communicator.set_budget(client, incoming)
                case session.Backlog(outgoing):
                    self._communicator.set_backlog(outgoing)
                case Compute(job):
                    self._computer.put(job)
                case session.Apply():
                    await self._tell(await self._apply(effect))
                case session.ApplyBuffer() | session.Renew():
                    await self._tell(await self._advance(effect))
                case session.PhaseBegan(phase):
                    phase.start = time.time()
                case session.Progress(phase_name, done, expected, awaited):
                    if phase_name == CONNECT:
                        self._metrics.round = 0
                    self._progress(phase_name, done, expected)
                    self._callbacks.tell("progress", phase_name, awaited)
                case session.ClientLeft(client, phase_name, how, reason):
                    self._callbacks.tell("client_left", client, phase_name, how, reason)
                case session.RoundBegan(number, invited):
                    self._metrics.round = number
                    self._callbacks.tell("round_begins", number, list(invited))
                case session.RoundEnded(record):
                    await self._end_round(record)
                case session.Finished(goodbye):
                    self._finished, self._metrics.round = effect, 0
                    if goodbye is not None:
                        self._callbacks.tell("finished", goodbye)

    async def _store(self, effect: session.Store) -> bool:
        """Make a record durable, and tell the session; False if that was impossible.

        Records are stored in their order, but nothing that follows an upload waits for it: the
        session hears of it later, and acknowledges it then.
        """
        record = effect.record
        promised = record if isinstance(record, Promised) else None
        if promised is not None and promised.one_sum and promised.upload is not None:
            await self._uploads.put(effect.round, promised)
            return True
        await self._uploads.settle()
        try:
            upload = await asyncio.to_thread(self._journal.store, effect.round, record)
        except JournalError as error:
            if promised is None or not (promised.one_sum or promised.can_fail):
                raise  # without knowing of its rounds the server must not go on
            await self._tell(session.StoreFailed(record, str(error)))
            return False
        await self._tell(session.Stored(record, upload))
        return True

    def _write(
        self, level: int, message: str, arguments: tuple[object, ...], peer: int | None
    ) -> None:
        if peer is None:
            log.log(level, message, *arguments)
        else:
            self._log.write(level, f"client {peer}", message, *arguments)

    def _trace_message(self, direction: str, client: int, data: bytes | memoryview) -> None:
        if log.isEnabledFor(logging.DEBUG):
            what, name = describe(data), f"client {client}"
            self._traffic.write(logging.DEBUG, name, "%s client %d: %s", direction, client, what)

    async def _end_round(self, record: RoundRecord) -> None:
        await self._computer.clear()
        if record.aborted is not None:
            self._learning.judge(record, self._session.completed)
        self.records.append(record)
        self._metrics.done = self._session.completed
        self._metrics.record(record)
        await asyncio.to_thread(self._history.put, record)
        self._callbacks.tell("round_ended", record)

    # -- what becomes of a sum -----------------------------------------------------------------

    async def _apply(self, effect: session.Apply) -> session.Applied | session.Spoilt:
        """Average, step and store; or leave model and optimiser alone and call the round spoilt."""
        settings, aggregate, record = effect.settings, effect.aggregate, effect.record
        completed, included = self._session.completed + 1, len(aggregate.included)
        average = partial(settings.average, aggregate.total, included, in_place=True)
        after = await self._learning.step(record, average, included, completed)
        if isinstance(after, session.Spoilt):
            return after
        store = partial(self._journal.complete, record.round, completed, after)
        await asyncio.to_thread(store)
        await self._learning.note(record, completed)
        self._learning.judge(record, completed)
        return session.Applied(self._announcement(completed), record.stopped)

    async def _advance(
        self, effect: session.ApplyBuffer | session.Renew
    ) -> session.Applied | session.Spoilt:
        if isinstance(effect, session.ApplyBuffer):
            raise AssertionError("rounds have no buffers; see `epoch_server`")
        # How often the model was renewed is in the journal; it can be done again (`_begin`).
        await asyncio.to_thread(self._job.renew)
        return session.Applied(self._announcement(effect.version))


def as_travels(found: Membership) -> session.Members:
    """An allow-list as a session passes it on."""
    return session.Members(found.number, found.allow_list, found.content)
