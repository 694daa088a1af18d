"""The Client Manager of Section 6: drives `ClientParty` over any communicator.

While training runs in a child process or thread, the party, which alone holds the secrets,
encodes and shares its mask: that is the overlap of the offline phase with training. A client is
crash-only: its secrets live in memory, so a restarted client is a dropout of the current round and
joins the next; it can never answer twice. What it has spent is in its ledger, on disk. A client
that merely lost its connection comes back with its party alive and, when the server asks again,
sends again what was not acknowledged.

Whatever the server sends, `run` ends only by a goodbye, by giving up a server that cannot be
reached or says nothing, or by cancellation (S29, S41, R35). A client that cannot take part in a
round says so and waits for the next one: at the opening, if its policy forbids it; where the
upload would leave, if it has no update, whatever the reason (S44).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Iterable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.callbacks import Callbacks, ClientCallback
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.config import ClientTable
from lightsecagg.drivers.federation.jobs import ClientJob, TrainingClient
from lightsecagg.drivers.federation.membership import KnownMembers
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.peer_log import DEBUG_BURST, DEBUG_INTERVAL, PeerLog
from lightsecagg.drivers.transport.communicator import ClientCommunicator
from lightsecagg.errors import (
    Aborted,
    ConfigurationError,
    DecodeError,
    JournalError,
    LightSecAggError,
    PeerGone,
    Refused,
    RemoteProtocolError,
    TransportError,
)
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import clip_to_bound
from lightsecagg.foreign import explain, shown, where
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    SERVER,
    LedgerChanged,
    NeedInput,
    Output,
    Persist,
    RoundAborted,
    Send,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AggregatedShare,
    MaskedUpload,
    Message,
    Opening,
    Roster,
    SharesClosed,
    SurvivorSet,
    UnmaskingShares,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.registry import client_party
from lightsecagg.protocol.round_client import Answered, RoundClient, Signed, Uploaded
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import (
    VERSION,
    Goodbye,
    Hello,
    NewMembers,
    RoundModel,
    RoundOver,
    UploadStored,
    Withdraw,
    describe,
    pack_control,
    pack_protocol,
    unpack,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
_NEWS_BURST, _NEWS_INTERVAL = 200, 1.0
"""Lines about what the server does that are written at once, and seconds per line after that."""
_NO_UPDATE = "it has no update to upload"
_STEADY = 10.0
"""Seconds after which a stream counts as a success although the server said nothing."""


@dataclass(slots=True)
class _Round:
    """The round that this client is in."""

    number: int
    model: bytes = field(repr=False)
    bound: float
    instructions: bytes = b""
    """Hash of what came with the model."""
    party: RoundClient | None = None
    """Made when the opening tells which protocol is spoken."""
    codec: Codec | None = None
    weighted: bool = False
    training: asyncio.Task[Update] | None = None
    needs_input: bool = False
    without_update: bool = False
    """There is nothing to upload, which the server hears when the upload is due."""
    unacknowledged: bytes | None = field(default=None, repr=False)
    """The masked upload, until the server has stored it."""
    spans: list[dict[str, Any]] = field(default_factory=list)


class FederationClient:
    """Takes part in a federation until the server says goodbye."""

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
    ) -> None:
        """`ledger` is this client's memory of the session, see `client_ledger`.

        `members` are fixed, or those of a list that the server may replace by a newer one.
        `executor` runs training in `process` mode; one is made and owned if left out.
        """
        self._table = table
        self._identity = identity
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
        self._policy = Policy(
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
        )
        if table.id not in allow_list:
            raise ConfigurationError(f"[client] id {table.id} is not on the allow-list")
        if allow_list[table.id] != identity.public:
            raise ConfigurationError(
                f"[client] identity is not the key that the allow-list names for client {table.id}"
            )
        self._executor = executor
        self._own_executor = False
        self._busy: asyncio.Future[Update] | None = None
        self._trained: tuple[tuple[bytes, float], Update, bytes] | None = None
        """From which model and bound, the update, and by which instructions."""
        self._unremembered = -1
        """A round with an upload of this client's of which its ledger knows nothing."""
        self._round: _Round | None = None
        self._finished: Goodbye | None = None
        self._failing_since: float | None = None
        self._pause = _FIRST_PAUSE
        self._complaint = ""
        self._callbacks = Callbacks(callbacks)
        self._log = PeerLog(log)
        # Its own lines, which the server's messages cause, must not crowd out the warnings.
        self._news = PeerLog(log, burst=_NEWS_BURST, interval=_NEWS_INTERVAL)
        self._traffic = PeerLog(log, burst=DEBUG_BURST, interval=DEBUG_INTERVAL)
        self.rounds = 0
        """Rounds in which this client's update was included."""

    # -- connection --------------------------------------------------------------------------

    async def run(self) -> None:
        """Until goodbye; reconnects with back-off, and gives up after `reconnect` seconds."""
        if self._table.trace is not None:
            log.warning(
                "client %d writes its plain updates to %s: for demonstrations only",
                self._table.id,
                self._table.trace,
            )
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
        finally:
            self._abandon("the client stopped")
            if self._own_executor and self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
            await self._communicator.close()
            await asyncio.to_thread(self._callbacks.close)
            self._log.close()
            self._news.close()
            self._traffic.close()
        if not self._finished.finished:
            raise Aborted(f"the server said goodbye: {shown(self._finished.reason)}")

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
        self._tell("its task is loaded")

    async def _connect(self) -> None:
        while True:
            if self._failing_since is not None:
                # Spread out, lest all clients return to a restarted server at once. No secret
                # depends on it, so `random` will do.
                await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))  # noqa: S311
            try:
                await self._communicator.connect()
                number = -1 if self._round is None else self._round.number
                edition = 0 if self._members is None else self._members.current.number
                await self._post(pack_control(Hello(VERSION, number, edition)))
                self._tell("connected")
                return
            except Refused:
                raise  # trying again would not mend it
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
        """Messages and the end of training, whichever comes first."""
        receiving = asyncio.create_task(self._communicator.receive())
        try:
            while self._finished is None:
                waiting: set[asyncio.Task[Any]] = {receiving}
                training = self._awaited_training()
                if training is not None:
                    waiting.add(training)
                done, _ = await asyncio.wait(
                    waiting, timeout=self._table.patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise Aborted(
                        f"the server said nothing for {self._table.patience:g} s; "
                        "[client] patience is how long this client waits"
                    )
                if training is not None and training in done:
                    await self._survive(self._hand_over(training))
                if receiving in done:
                    data = receiving.result()
                    self._failing_since = None
                    receiving = asyncio.create_task(self._communicator.receive())
                    await self._survive(self._take(data))
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _survive(self, step: Awaitable[None]) -> None:
        """Whatever the server's bytes do here, they cost this client a round at most (S41)."""
        try:
            await step
        except TransportError:
            raise
        except Exception as error:
            self._warn("cannot follow the server: %s", explain(error))
            if self._round is not None:
                await self._withdraw(self._round, "this client cannot follow")

    def _warn(self, message: str, *arguments: object) -> None:
        self._log.write(
            logging.WARNING, "the server", f"client %d: {message}", self._table.id, *arguments
        )

    def _tell(self, message: str, *arguments: object) -> None:
        """What goes well, for whoever watches."""
        self._news.write(
            logging.INFO, "the server", f"client %d: {message}", self._table.id, *arguments
        )

    async def _post(self, data: bytes) -> None:
        self._note_message("sends", data)
        await self._communicator.send(data)

    def _note_message(self, verb: str, data: bytes) -> None:
        if log.isEnabledFor(logging.DEBUG):
            message = "client %d %s %s"
            what = describe(data)
            self._traffic.write(logging.DEBUG, "the server", message, self._table.id, verb, what)

    def _awaited_training(self) -> asyncio.Task[Update] | None:
        round_ = self._round
        return round_.training if round_ is not None and round_.needs_input else None

    # -- messages ----------------------------------------------------------------------------

    async def _take(self, data: bytes) -> None:
        self._note_message("receives", data)
        try:
            content = unpack(data)
        except DecodeError as error:
            self._warn("%s", error)
            return
        match content:
            case RoundModel():
                await self._begin(content)
            case NewMembers(signed):
                self._take_members(signed)
            case UploadStored(number):
                self._unremembered = number if number > self._ledger.last_round else -1
                if self._round is not None and self._round.number == number:
                    self._round.unacknowledged = None
            case RoundOver(number, aborted):
                self._end(number, aborted)
            case Goodbye(reason, finished):
                self._finished = content
                self._callbacks.tell("finished", shown(reason))
                if finished:
                    words, count = shown(reason), self.rounds
                    self._tell("goodbye: %s; rounds with its update: %d", words, count)
            case (number, body):
                if self._round is not None and self._round.number == number:
                    await self._on_protocol(self._round, body)
            case Hello() | Withdraw():
                self._warn("the server speaks like a client")

    def _take_members(self, signed: bytes) -> None:
        """Later rounds are of these members; the one under way keeps those it began with."""
        if self._members is None:
            self._warn("the server sent an allow-list; this client's is fixed")
            return
        most = self._table.max_removed
        try:
            found = self._members.take(signed, self._table.privacy if most is None else most)
        except LightSecAggError as error:
            self._warn("%s", error)
            return
        if found is not None:
            self._policy = replace(self._policy, allow_list=found.allow_list)
            count = len(found.allow_list)
            self._tell("allow-list number %d is in use, with %d clients", found.number, count)

    async def _begin(self, message: RoundModel) -> None:
        self._abandon("another round has begun")
        asked = message.instructions
        digest = b"" if asked is None else asked.digest
        round_ = self._round = _Round(message.round, message.model, message.bound, digest)
        source = f" from a model of {len(message.model) // 4} entries" if message.model else ""
        self._tell("round %d begins%s", message.round, source)
        self._callbacks.tell("round_begins", message.round)
        if self._unremembered > self._ledger.last_round:
            self._warn(
                "the server has stored an upload of this client's in round %d, but its ledger's "
                "latest round is %d: the ledger is new, or an older copy, and does not know what "
                "is spent. Restore the newest; if it is lost, see `lightsecagg ledger accept-loss`",
                self._unremembered,
                self._ledger.last_round,
            )
            await self._withdraw(round_, "its ledger is older than its latest upload")
            return
        try:
            job = self._job if asked is None else self._job.instructed(asked)
        except RemoteProtocolError as error:
            self._warn("round %d: %s", message.round, error)
            await self._withdraw(round_, str(error))
            return
        if isinstance(job, TrainingClient) and job.set_by_server:
            self._tell("round %d: the server sets %s", message.round, job.set_by_server)
        training = self._train(message, round_, job)
        round_.training = asyncio.create_task(training)
        if self._table.overlap == "off":
            # One after the other: nothing else is done until training has ended.
            await asyncio.wait({round_.training})

    async def _train(self, message: RoundModel, round_: _Round, job: ClientJob) -> Update:
        if self._busy is not None and not self._busy.done():
            # The training of a round that went on without this client cannot be interrupted.
            await asyncio.wait({self._busy})
        start, began = time.time(), time.monotonic()
        task = (hash_model(message.model), message.bound)
        if message.model and self._trained is not None and self._trained[0] == task:
            # A repeat must bring the same update, and not every processor computes it twice; with
            # other instructions none would (S42).
            self._tell("round %d: its update from this model is used again", message.round)
            if self._trained[2] != round_.instructions:
                self._warn("round %d: the server now asks for other settings", round_.number)
            return self._trained[1]
        loop = asyncio.get_running_loop()
        self._busy = loop.run_in_executor(
            self._pool(), job.compute, message.model, message.round, message.bound
        )
        # When the round is abandoned nobody asks for the result, nor for the error.
        self._busy.add_done_callback(lambda done: done.cancelled() or done.exception())
        update = await asyncio.shield(self._busy)
        self._trained = (task, update, round_.instructions)
        seconds = time.monotonic() - began
        self._tell("round %d: its update is ready after %.1f s", message.round, seconds)
        self._callbacks.tell("trained", message.round, seconds)
        round_.spans.append({"phase": "training", "start": start, "end": time.time()})
        return update

    def _pool(self) -> Executor | None:
        """Where training runs: a child process, or (None) a thread."""
        if self._table.overlap != "process" or not isinstance(self._job, TrainingClient):
            return None
        if self._executor is None:
            self._executor, self._own_executor = _training_pool(), True
        return self._executor

    async def _on_protocol(self, round_: _Round, body: memoryview) -> None:
        unacknowledged = round_.unacknowledged
        message: Message | None = None
        try:
            message = self._decode(round_, body)
            if round_.party is None:
                return
            start, party = time.time(), round_.party
            outputs = await asyncio.to_thread(party.receive, SERVER, message)
        except LightSecAggError as error:
            self._warn("round %d: %s", round_.number, error)
            final = isinstance(message, Opening | Roster | SurvivorSet)  # no other will come
            if round_.party is None or final:
                await self._withdraw(round_, str(error))
            return
        self._note(round_, message, start)
        await self._release(round_, outputs)
        if unacknowledged is not None and isinstance(message, Opening | SharesClosed):
            # The server asks again: the upload was lost with the connection.
            await self._post(unacknowledged)
        if round_.without_update:
            await self._withdraw_when_due(round_)

    async def _withdraw_when_due(self, round_: _Round) -> None:
        """Withdraw where the upload would leave, at the same moment and always in the same words.

        Had the server not closed sharing, it would not have heard of an update either. So it
        learns that there is none only in a round that goes on to its uploads, and never why: a
        bound that was exceeded, NaN, a failure, a vector that is spent (S44).
        """
        if round_.party is not None and round_.party.upload_is_due:
            await self._withdraw(round_, _NO_UPDATE)

    async def _withdraw(self, round_: _Round, reason: str) -> None:
        """Sit this round out, and tell the server, which would wait until its deadline."""
        await self._post(pack_control(Withdraw(round_.number, reason[:500])))
        self._abandon(reason)

    def _decode(self, round_: _Round, body: memoryview) -> Message:
        """Decode; an opening also makes the party that speaks its protocol."""
        if round_.codec is None:
            message = Codec(PrimeField(3)).decode(body)  # an opening holds no field element
            if not isinstance(message, Opening):
                raise DecodeError("a round begins with an opening")
            settings = Settings.from_bytes(message.settings)
            self._check_announcement(settings, round_)
            round_.codec, round_.weighted = Codec(settings.field), settings.quantizer.weighted
            round_.party = self._make_party(settings.protocol, round_)
            return message
        return round_.codec.decode(body)

    def _check_announcement(self, settings: Settings, round_: _Round) -> None:
        """The opening must say what came with the model, which training has begun with (S44).

        Scalars that ride along an update are scaled to the announced bound. If another one were
        compared with them, a server could search for their size.
        """
        opened, bound = settings.round, settings.quantizer.bound
        if (opened, bound) != (round_.number, round_.bound):
            raise RemoteProtocolError(
                f"the server announced round {round_.number} with bound {round_.bound} and opens "
                f"round {opened} with bound {bound}"
            )

    def _make_party(self, protocol: str, round_: _Round) -> RoundClient:
        if protocol not in self._policy.protocols:
            raise DecodeError(f"the server proposes {protocol}, which this client does not accept")
        # Where vectors are summed that descend from no model, each round is its own.
        model = hash_model(round_.model or round_.number.to_bytes(8, "big"))
        policy = replace(
            self._policy, protocols=(protocol,), model=model, instructions=round_.instructions
        )
        return client_party(self._table.id, self._identity, policy, self._ledger)

    async def _hand_over(self, training: asyncio.Task[Update]) -> None:
        """Training has ended: mask and upload."""
        round_ = self._round
        if round_ is None or round_.training is not training or round_.party is None:
            return
        round_.training, round_.needs_input = None, False
        try:
            update = self._prepared(training.result(), round_)
            self._trace_update(round_, update)
            start = time.time()
            outputs = await asyncio.to_thread(round_.party.set_input, update)
            round_.spans.append({"phase": "upload", "start": start, "end": time.time()})
        except Exception as error:
            self._log_failure(round_, error)
            if isinstance(error, BrokenExecutor) and self._own_executor:
                self._executor = None  # its process is dead; the next round gets another
            round_.without_update = True
            await self._withdraw_when_due(round_)
            return
        await self._release(round_, outputs)

    def _log_failure(self, round_: _Round, error: Exception) -> None:
        """Our own messages are free of secrets; those of foreign code may quote the data (S22)."""
        known = isinstance(error, LightSecAggError)
        what = str(error) if known else f"training failed with {where(error)}"
        message = "client %d sits round %d out: %s"
        self._log.write(logging.ERROR, "the server", message, self._table.id, round_.number, what)

    def _prepared(self, update: Update, round_: _Round) -> Update:
        """Clipped, as configured; that it was stays in the log here, it tells about the data.

        Where no counts are summed the count is 1 for everybody: refusing those who have another
        one would tell who they are.
        """
        vector, samples = update.vector, update.samples if round_.weighted else 1
        if self._table.clip:
            vector = clip_to_bound(vector, round_.bound)
            if not np.array_equal(vector, update.vector, equal_nan=True):
                log.info("client %d: its update was cut to the bound", self._table.id)
        return Update(vector, samples)

    async def _release(self, round_: _Round, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Persist(LedgerChanged(entries)):
                    if not await self._persist(round_, entries):
                        return  # nothing leaves that a restart would not remember
                case Send(_, message):
                    await self._send(round_, message)
                case NeedInput():
                    round_.needs_input = True
                case RoundAborted(reason):
                    self._log.write(
                        logging.INFO,
                        "the server",
                        "client %d: round %d: %s",
                        self._table.id,
                        round_.number,
                        reason,
                    )

    async def _persist(self, round_: _Round, entries: bytes) -> bool:
        """Store the ledger; if that is impossible, sit the round out."""
        assert isinstance(self._ledger, ClientLedger)  # noqa: S101 - no other asks to be stored
        try:
            await asyncio.to_thread(self._ledger.store, entries)
        except JournalError as error:
            self._warn("round %d: %s", round_.number, error)
            # The name of a file is nobody else's business.
            await self._withdraw(round_, "its ledger cannot be written")
            return False
        return True

    async def _send(self, round_: _Round, message: Message) -> None:
        assert round_.codec is not None  # noqa: S101 - a party has spoken
        data = pack_protocol(round_.number, round_.codec.encode(message))
        if isinstance(message, MaskedUpload):
            round_.unacknowledged = data
            self._tell("round %d: uploads its masked update, %d bytes", round_.number, len(data))
        start = time.time()
        await self._post(data)
        kind = "upload" if isinstance(message, MaskedUpload) else None
        if isinstance(message, AggregatedShare | UnmaskingShares):
            kind = "recover"
        if kind:
            round_.spans.append({"phase": kind, "start": start, "end": time.time()})

    # -- the end of a round ------------------------------------------------------------------

    def _end(self, number: int, aborted: str | None) -> None:
        round_ = self._round
        if round_ is None or round_.number != number:
            return
        state = None if round_.party is None else round_.party.state
        included = aborted is None and isinstance(state, Uploaded | Signed | Answered)
        if aborted is not None:
            self._tell("round %d was aborted: %s", number, shown(aborted))
        elif included:
            self.rounds += 1
            self._tell("round %d is done, with this client's update", number)
        else:
            self._tell("round %d is done, without this client", number)
        self._trace_spans(round_)
        self._leave("the round is over")
        self._callbacks.tell("round_ended", number, included, aborted and shown(aborted))

    def _abandon(self, reason: str) -> None:
        """Leave a round that this client does not see the end of."""
        if self._round is not None:
            self._callbacks.tell("round_ended", self._round.number, False, reason)
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        """Forget the round and its secrets."""
        if self._round is None:
            return
        if self._round.training is not None:
            self._round.training.cancel()
        if self._round.party is not None:
            self._round.party.abort(reason)
        self._round = None

    # -- traces, for demonstrations only -----------------------------------------------------

    def _note(self, round_: _Round, message: Message, start: float) -> None:
        phase = {"Opening": "advertise", "Roster": "share", "ShareBundle": "share"}.get(
            type(message).__name__
        )
        if isinstance(message, SurvivorSet) and round_.party is not None:
            phase = "agree" if isinstance(round_.party.state, Signed) else "recover"
        if phase is not None:
            round_.spans.append({"phase": phase, "start": start, "end": time.time()})

    def _trace_spans(self, round_: _Round) -> None:
        if self._table.trace is not None:
            self._trace(f"spans-{round_.number}-{self._table.id}.json", json.dumps(round_.spans))

    def _trace_update(self, round_: _Round, update: Update) -> None:
        """The plain update, in the clear: only where the configuration asks for it."""
        if self._table.trace is not None:
            file = BytesIO()
            np.savez(file, vector=update.vector, samples=update.samples)
            self._trace(f"update-{round_.number}-{self._table.id}.npz", file.getvalue())

    def _trace(self, name: str, content: str | bytes) -> None:
        assert self._table.trace is not None  # noqa: S101 - asked for
        data = content.encode() if isinstance(content, str) else content
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._table.trace.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(self._table.trace / name, flags, 0o600), "wb") as file:
            file.write(data)


def _training_pool() -> ProcessPoolExecutor:
    from lightsecagg.training import training_pool

    return training_pool(1)
