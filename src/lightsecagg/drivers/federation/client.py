"""The Client Manager of Section 6: drives a `RoundClientSession` over any communicator.

The session's steps run in a thread, one after the other; training runs in a child process or
another thread meanwhile: that is the overlap of the offline phase with training. The connection is
this module's business: it reconnects with back-off, and gives a server up that cannot be reached
for too long.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from functools import partial
from typing import Any

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.callbacks import Callbacks, ClientCallback
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.jobs import ClientJob, TrainingClient
from lightsecagg.drivers.federation.membership import KnownMembers
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.federation.tables import ClientTable
from lightsecagg.drivers.federation.watch import ClientWatch
from lightsecagg.drivers.peer_log import DEBUG_BURST, DEBUG_INTERVAL, PeerLog
from lightsecagg.drivers.transport.communicator import ClientCommunicator
from lightsecagg.errors import (
    ConfigurationError,
    JournalError,
    LightSecAggError,
    PeerGone,
    Refused,
    RemoteProtocolError,
    TransportError,
)
from lightsecagg.field.quantization import clip_to_bound, percent_clipped
from lightsecagg.foreign import where
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import SERVER, LedgerChanged, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import Policy
from lightsecagg.session.envelope import describe, name_of
from lightsecagg.session.epoch_client import EpochClientSession
from lightsecagg.session.interface import (
    NEVER,
    Connected,
    Disconnected,
    Effect,
    Event,
    Finished,
    Log,
    Members,
    MembersChanged,
    Post,
    Received,
    RoundBegan,
    RoundLeft,
    Stop,
    Store,
    Stored,
    StoreFailed,
    TakeMembers,
    Train,
    Trained,
    TrainingFailed,
    TrainingRefused,
)
from lightsecagg.session.round_client import RoundClientSession

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
_NEWS_BURST, _NEWS_INTERVAL = 200, 1.0
"""Lines about what the server does that are written at once, and seconds per line after that."""
_STEADY = 10.0
"""Seconds after which a stream counts as a success although the server said nothing."""

_BRIEF, _BRIEF_BYTES = ("ShareBundle", "ReportsWanted"), 1 << 14
"""Messages whose handling takes no longer than a thread takes to be asked, if they are small. In
the asynchronous mode they are most of all, two for every mask of every peer."""


def _is_brief(event: Event) -> bool:
    if isinstance(event, Received):
        return len(event.data) <= _BRIEF_BYTES and name_of(event.data) in _BRIEF
    return isinstance(event, Stored)


class FederationClient:
    """Takes part in a federation until the server says goodbye."""

    session_type = RoundClientSession
    epoch_session_type = EpochClientSession

    def __init__(
        self,
        table: ClientTable,
        session: bytes,
        identity: IdentityKey,
        members: AllowList | KnownMembers,
        communicator: ClientCommunicator,
        job: ClientJob,
        ledger: Ledger,
        executor: Executor | None = None,
        callbacks: Iterable[ClientCallback] = (),
        buffering: Buffering | None = None,
        watch: ClientWatch | None = None,
    ) -> None:
        """`ledger` is this client's memory of the session, see `client_ledger`.

        With `buffering` it takes part in the asynchronous mode, with these settings exactly (S09).

        `members` are fixed, or those of a list that the server may replace by a newer one.
        `executor` runs training in `process` mode; one is made and owned if left out. `watch` sees
        all that it does, its updates too.
        """
        self._table = table
        self._communicator = communicator
        self._job = job
        self._ledger = ledger
        if ledger.durable and not isinstance(ledger, ClientLedger):
            raise ConfigurationError(
                "a federation's client keeps its ledger in a file (ClientLedger), or says that it "
                "keeps none (Ledger.volatile)"
            )
        self._members = None if isinstance(members, AllowList) else members
        allow_list = members if isinstance(members, AllowList) else members.current.allow_list
        policy = Policy(
            allow_list=allow_list,
            session=session,
            privacy=table.privacy,
            threat_model=table.threat_model,
            protocols=table.protocols,
            dimension=job.dimension,
            max_dimension=table.max_dimension,
            max_attempts=table.max_attempts,
            max_openings=table.max_openings,
            minimum=table.minimum,
            share_mode=table.share_mode,
            bound=table.bound,
            scale=table.scale,
            max_share_bytes=table.max_share_bytes,
            buffering=buffering,
        )
        if table.id not in allow_list:
            raise ConfigurationError(f"[client] id {table.id} is not on the allow-list")
        if allow_list[table.id] != identity.public:
            raise ConfigurationError(
                f"[client] identity is not the key that the allow-list names for client {table.id}"
            )
        self._unit = "round" if buffering is None else "version"
        kind: type[RoundClientSession | EpochClientSession]
        kind = self.session_type if buffering is None else self.epoch_session_type
        self._session = kind(
            table.id,
            identity,
            policy,
            ledger,
            patience=table.patience,
            clip=table.clip,
            edition=0 if self._members is None else self._members.current.number,
        )
        self._executor = executor
        self._own_executor = False
        self._training: asyncio.Task[Trained | TrainingFailed] | None = None
        self._busy: asyncio.Future[Update] | None = None
        self._finished: Finished | None = None
        self._failing_since: float | None = None
        self._pause = _FIRST_PAUSE
        self._complaint = ""
        self._watch = watch or ClientWatch()
        self._watch.begins(table.id)
        self._callbacks = Callbacks(callbacks)
        self._log = PeerLog(log)
        # Its own lines, which the server's messages cause, must not crowd out the warnings.
        self._news = PeerLog(log, burst=_NEWS_BURST, interval=_NEWS_INTERVAL)
        self._traffic = PeerLog(log, burst=DEBUG_BURST, interval=DEBUG_INTERVAL)

    @property
    def rounds(self) -> int:
        """Rounds in which this client's update was included."""
        return self._session.rounds

    # -- connection --------------------------------------------------------------------------

    async def run(self) -> None:
        """Until goodbye; reconnects with back-off, and gives up after `reconnect` seconds."""
        try:
            await self._prepare()
            while self._finished is None:
                await self._connect()
                opened = time.monotonic()
                try:
                    await self._listen()
                except PeerGone as error:
                    if time.monotonic() - opened > _STEADY:
                        self._failing_since = None
                    if self._finished is None:
                        self._note_failure(error)
                await self._tell(Disconnected(SERVER))
        finally:
            self._forget()
            if isinstance(self._ledger, ClientLedger):
                self._ledger.close()  # before anything is awaited that a cancellation would skip
            if self._own_executor and self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
            await self._communicator.close()
            await asyncio.to_thread(self._callbacks.close)
            self._log.close()
            self._news.close()
            self._traffic.close()
        if self._finished.error is not None:
            raise self._finished.error

    async def _prepare(self) -> None:
        """Load what training needs before the server counts on this client, and on its answers."""
        if not isinstance(self._job, TrainingClient):
            return
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool(), self._job.prepare)
        except BrokenExecutor:
            self._executor = None  # its process was killed; the first round gets another
            return
        self._say("its task is loaded")

    def _forget(self) -> None:
        """The secrets of a round that is under way, and its training."""
        if self._training is not None:
            self._training.cancel()
        for effect in self._session.handle(Stop(), time.monotonic()):
            if isinstance(effect, RoundLeft):
                self._on_round_left(effect)

    async def _connect(self) -> None:
        while True:
            if self._failing_since is not None:
                # Spread out, lest all clients return to a restarted server at once. No secret
                # depends on it, so `random` will do.
                await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))  # noqa: S311
            try:
                await self._communicator.connect()
                await self._tell(Connected(SERVER))
                return
            except Refused:
                raise  # trying again would not help
            except TransportError as error:
                self._note_failure(error)

    def _note_failure(self, error: TransportError) -> None:
        """Back off; give up once nothing has worked for `reconnect` seconds."""
        now = time.monotonic()
        reason = str(error).removeprefix(f"client {self._table.id} cannot connect: ")
        if self._failing_since is None:
            self._failing_since, self._pause, self._complaint = now, _FIRST_PAUSE, ""
        elif now - self._failing_since > self._table.reconnect:
            raise TransportError(
                f"client {self._table.id} gives up after {self._table.reconnect:g} s: {reason}"
            ) from error
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if reason != self._complaint:
            self._complaint = reason
            self._warn("%s; trying again for %g s", reason, self._table.reconnect)

    async def _listen(self) -> None:
        """Messages, the end of training and the session's deadline, whichever comes first."""
        receiving = asyncio.create_task(self._communicator.receive())
        try:
            while self._finished is None:
                waiting: set[asyncio.Task[Any]] = {receiving}
                training = self._training
                if training is not None:
                    waiting.add(training)
                left = self._session.deadline - time.monotonic()
                done, _ = await asyncio.wait(
                    waiting,
                    timeout=None if left == NEVER else max(0.0, left),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    await self._carry_out(self._session.tick(time.monotonic()))
                if training is not None and training in done:
                    if self._training is training:
                        self._training = None
                    await self._tell(training.result())
                if receiving in done:
                    data = receiving.result()
                    self._failing_since = None
                    receiving = asyncio.create_task(self._communicator.receive())
                    self._note_message("receives", data)
                    await self._tell(Received(SERVER, data))
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def _note_message(self, verb: str, data: bytes) -> None:
        if log.isEnabledFor(logging.DEBUG):
            message = "client %d %s %s"
            what = describe(data)
            self._traffic.write(logging.DEBUG, "the server", message, self._table.id, verb, what)

    # -- the session -------------------------------------------------------------------------

    async def _tell(self, event: Event) -> None:
        """One step of the session, in a thread, where masks are made and encoded, unless it is
        brief: then the way there and back would cost more."""
        start = time.time()
        if _is_brief(event):
            effects = self._session.handle(event, time.monotonic())
        else:
            effects = await asyncio.to_thread(self._session.handle, event, time.monotonic())
        with self._watch.step(event, effects, start):
            await self._carry_out(effects)

    async def _carry_out(self, effects: list[Effect]) -> None:
        """In order; nothing that follows a record leaves before the record is stored."""
        gone: PeerGone | None = None
        for effect in effects:
            match effect:
                case Post(_, data):
                    try:
                        if gone is None:
                            await self._post(data)
                    except PeerGone as error:
                        gone = error  # what is not sent is asked for again; the rest is not
                case Store():
                    if not await self._store(effect):
                        break
                case Train():
                    await self._train(effect)
                case TakeMembers(signed):
                    await self._take_members(signed)
                case RoundBegan(number):
                    self._callbacks.tell("round_begins", number)
                case RoundLeft():
                    self._on_round_left(effect)
                case Log(level, message, arguments):
                    lines = self._news if level <= logging.INFO else self._log
                    lines.write(level, "the server", message, *arguments)
                case Finished(goodbye):
                    self._finished = effect
                    if goodbye is not None:
                        self._callbacks.tell("finished", goodbye)
        if gone is not None:
            raise gone

    async def _post(self, data: bytes) -> None:
        self._note_message("sends", data)
        await self._communicator.send(data)

    async def _store(self, effect: Store) -> bool:
        """The ledger; False if that is impossible."""
        if not isinstance(effect.record, LedgerChanged):
            raise AssertionError("a client has nothing else to remember")
        if not isinstance(self._ledger, ClientLedger):
            raise AssertionError("no other ledger asks to be stored")
        try:
            await asyncio.to_thread(self._ledger.store, effect.record.entries)
        except JournalError as error:
            await self._tell(StoreFailed(effect.record, str(error)))
            return False
        await self._tell(Stored(effect.record))
        return True

    async def _take_members(self, signed: bytes) -> None:
        """An allow-list that the server passes on, if it may follow the one in use."""
        if self._members is None:
            self._warn("the server sent an allow-list; this client's is fixed")
            return
        most = self._table.privacy if self._table.max_removed is None else self._table.max_removed
        try:
            found = await asyncio.to_thread(self._members.take, signed, most)
        except LightSecAggError as error:
            self._warn("%s", error)
            return
        if found is not None:
            members = Members(found.number, found.allow_list, found.content)
            await self._tell(MembersChanged(members))

    def _warn(self, message: str, *arguments: object) -> None:
        text = f"client %d: {message}"
        self._log.write(logging.WARNING, "the server", text, self._table.id, *arguments)

    def _on_round_left(self, effect: RoundLeft) -> None:
        self._callbacks.tell("round_ended", effect.round, effect.included, effect.reason)

    # -- training ----------------------------------------------------------------------------

    async def _train(self, effect: Train) -> None:
        """Begin to train, or refuse to."""
        number, asked = effect.round, effect.announcement.instructions
        try:
            job = self._job if asked is None else self._job.instructed(asked)
        except RemoteProtocolError as error:
            await self._tell(TrainingRefused(number, str(error)))
            return
        if isinstance(job, TrainingClient) and job.set_by_server:
            self._say("%s %d: the server sets %s", self._unit, number, job.set_by_server)
        if effect.update is not None:
            await self._tell(Trained(number, effect.update))
            return
        training = self._watch.training(number, partial(self._trained, effect, job))
        self._training = asyncio.create_task(training)
        if self._table.overlap == "off":
            # One after the other: nothing else is done until training has ended.
            await asyncio.wait({self._training})

    async def _trained(self, effect: Train, job: ClientJob) -> Trained | TrainingFailed:
        number, model = effect.round, effect.announcement.model
        if self._busy is not None and not self._busy.done():
            # The training of a round that went on without this client cannot be interrupted.
            await asyncio.wait({self._busy})
        began = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            self._busy = loop.run_in_executor(
                self._pool(), job.compute, model, number, effect.bound
            )
            # When the round is abandoned nobody asks for the result, nor for the error.
            self._busy.add_done_callback(lambda done: done.cancelled() or done.exception())
            update = await asyncio.shield(self._busy)
            if self._table.clip:
                update = await asyncio.to_thread(self._clipped, number, update, effect.bound)
        except Exception as error:
            if isinstance(error, BrokenExecutor) and self._own_executor:
                self._executor = None  # its process is dead; the next round gets another
            # Our own messages are free of secrets; those of foreign code may quote the data (S22).
            known = isinstance(error, LightSecAggError)
            what = str(error) if known else f"training failed with {where(error)}"
            return TrainingFailed(number, what)
        seconds = time.monotonic() - began
        self._say("%s %d: its update is ready after %.1f s", self._unit, number, seconds)
        self._callbacks.tell("trained", number, seconds)
        return Trained(number, update)

    def _clipped(self, number: int, update: Update, bound: float) -> Update:
        """Within the bound; how much was cut stays in the log here."""
        vector = clip_to_bound(update.vector, bound)
        if percent := percent_clipped(update.vector, vector):
            self._news.write(
                logging.WARNING,
                "its updates",
                "client %d: %s %d: %.3g %% of the entries were clipped to the bound %g; "
                "if training stalls, raise it",
                *(self._table.id, self._unit, number, percent, bound),
            )
        return Update(vector, update.samples)

    def _say(self, message: str, *arguments: object) -> None:
        text = f"client %d: {message}"
        self._news.write(logging.INFO, "the server", text, self._table.id, *arguments)

    def _pool(self) -> Executor | None:
        """Where training runs: a child process, or (None) a thread."""
        if self._table.overlap != "process" or not isinstance(self._job, TrainingClient):
            return None
        if self._executor is None:
            self._executor, self._own_executor = _training_pool(), True
        return self._executor


def _training_pool() -> ProcessPoolExecutor:
    from lightsecagg.training import training_pool

    return training_pool(1)
