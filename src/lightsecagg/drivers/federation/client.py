"""The Client Manager of Section 6: drives `ClientParty` over any communicator.

While training runs in a child process or thread, the party, which alone holds the secrets,
encodes and shares its mask: that is the overlap of the offline phase with training. A client is
crash-only: its secrets live in memory, so a restarted client is a dropout of the current round and
joins the next; it can never answer twice. A client that merely lost its connection comes back with
its party alive and sends again what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.config import ClientTable
from lightsecagg.drivers.federation.envelope import (
    VERSION,
    Goodbye,
    Hello,
    RoundModel,
    RoundOver,
    UploadStored,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.drivers.federation.jobs import ClientJob, TrainingClient
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.transport.communicator import ClientCommunicator
from lightsecagg.errors import (
    Aborted,
    DecodeError,
    LightSecAggError,
    PeerGone,
    ProtocolError,
    TransportError,
)
from lightsecagg.field.prime import PrimeField
from lightsecagg.protocol.interface import SERVER, NeedInput, Output, RoundAborted, Send, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AggregatedShare,
    MaskedUpload,
    Message,
    Opening,
    SurvivorSet,
    UnmaskingShares,
)
from lightsecagg.protocol.registry import PARTIES
from lightsecagg.protocol.round_client import RoundClient, Signed
from lightsecagg.protocol.settings import AllowList, Policy, ProtocolName, Settings, hash_model
from lightsecagg.protocol.wire import Codec


@dataclass(slots=True)
class _Round:
    """The round that this client is in."""

    number: int
    model: bytes = field(repr=False)
    party: RoundClient | None = None
    """Made when the opening tells which protocol is spoken."""
    codec: Codec | None = None
    bound: float = 0.0
    training: asyncio.Task[Update] | None = None
    needs_input: bool = False
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
        allow_list: AllowList,
        communicator: ClientCommunicator,
        job: ClientJob,
        executor: Executor | None = None,
    ) -> None:
        """`executor` runs training in `process` mode; one is made and owned if left out."""
        self._table = table
        self._identity = identity
        self._communicator = communicator
        self._job = job
        self._ledger = Ledger()
        self._policy = Policy(
            allow_list=allow_list,
            session=session,
            privacy=table.privacy,
            threat_model=table.threat_model,
            protocols=table.protocols,
            dimension=job.dimension,
            max_attempts=table.max_attempts,
        )
        self._executor = executor
        self._own_executor = False
        self._round: _Round | None = None
        self._finished: Goodbye | None = None
        self.rounds = 0
        """Rounds in which this client's update was included."""

    # -- connection --------------------------------------------------------------------------

    async def run(self) -> None:
        """Until goodbye; reconnects with back-off, and gives up after `reconnect` seconds."""
        needs_pool = self._table.overlap == "process" and isinstance(self._job, TrainingClient)
        if needs_pool and self._executor is None:
            self._executor, self._own_executor = _training_pool(), True
        try:
            while self._finished is None:
                await self._connect()
                try:
                    await self._listen()
                except PeerGone as error:
                    if self._finished is None:
                        log.info("client %d: connection lost: %s", self._table.id, error)
        finally:
            self._abandon("the client stopped")
            if self._own_executor and self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
            await self._communicator.close()
        if not self._finished.finished:
            raise Aborted(f"the server said goodbye: {self._finished.reason}")

    async def _connect(self) -> None:
        deadline = time.monotonic() + self._table.reconnect
        pause = 0.1
        while True:
            try:
                await self._communicator.connect()
                number = -1 if self._round is None else self._round.number
                await self._communicator.send(pack_control(Hello(VERSION, number)))
                if self._round is not None and self._round.unacknowledged is not None:
                    await self._communicator.send(self._round.unacknowledged)
                return
            except TransportError as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.debug("client %d: %s; trying again", self._table.id, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)

    async def _listen(self) -> None:
        """Messages and the end of training, whichever comes first."""
        receiving = asyncio.create_task(self._communicator.receive())
        try:
            while self._finished is None:
                waiting: set[asyncio.Task[Any]] = {receiving}
                training = self._awaited_training()
                if training is not None:
                    waiting.add(training)
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if training is not None and training in done:
                    await self._hand_over(training)
                if receiving in done:
                    data = receiving.result()
                    receiving = asyncio.create_task(self._communicator.receive())
                    await self._take(data)
        finally:
            receiving.cancel()

    def _awaited_training(self) -> asyncio.Task[Update] | None:
        round_ = self._round
        return round_.training if round_ is not None and round_.needs_input else None

    # -- messages ----------------------------------------------------------------------------

    async def _take(self, data: bytes) -> None:
        try:
            content = unpack(data)
        except DecodeError as error:
            log.warning("client %d: %s", self._table.id, error)
            return
        match content:
            case RoundModel():
                await self._begin(content)
            case UploadStored(number):
                if self._round is not None and self._round.number == number:
                    self._round.unacknowledged = None
            case RoundOver(number, aborted):
                self._end(number, aborted)
            case Goodbye():
                self._finished = content
            case (number, body):
                if self._round is not None and self._round.number == number:
                    await self._on_protocol(self._round, body)
            case Hello():
                log.warning("client %d: the server greeted like a client", self._table.id)

    async def _begin(self, message: RoundModel) -> None:
        self._abandon("another round has begun")
        round_ = self._round = _Round(message.round, message.model)
        training = self._train(message, round_)
        round_.training = asyncio.create_task(training)
        if self._table.overlap == "off":
            # One after the other: nothing else is done until training has ended.
            await asyncio.wait({round_.training})

    async def _train(self, message: RoundModel, round_: _Round) -> Update:
        start = time.time()
        loop = asyncio.get_running_loop()
        executor = self._executor if self._table.overlap == "process" else None
        update = await loop.run_in_executor(
            executor, self._job.compute, message.model, message.round, message.bound
        )
        round_.spans.append({"phase": "training", "start": start, "end": time.time()})
        return update

    async def _on_protocol(self, round_: _Round, body: memoryview) -> None:
        try:
            message = self._decode(round_, body)
            if round_.party is None:
                return
            start, party = time.time(), round_.party
            outputs = await asyncio.to_thread(party.receive, SERVER, message)
        except (DecodeError, ProtocolError) as error:
            log.warning("client %d, round %d: %s", self._table.id, round_.number, error)
            return
        self._note(round_, message, start)
        await self._release(round_, outputs)

    def _decode(self, round_: _Round, body: memoryview) -> Message:
        """Decode; an opening also makes the party that speaks its protocol."""
        if round_.codec is None:
            message = Codec(PrimeField(3)).decode(body)  # an opening holds no field element
            if not isinstance(message, Opening):
                raise DecodeError("a round begins with an opening")
            settings = Settings.from_bytes(message.settings)
            round_.codec, round_.bound = Codec(settings.field), settings.quantizer.bound
            round_.party = self._make_party(settings.protocol, round_.model)
            return message
        return round_.codec.decode(body)

    def _make_party(self, protocol: ProtocolName, model: bytes) -> RoundClient:
        if protocol not in self._policy.protocols:
            raise DecodeError(f"the server proposes {protocol}, which this client does not accept")
        policy = replace(
            self._policy, protocols=(protocol,), model=hash_model(model) if model else None
        )
        return PARTIES[protocol][0](self._table.id, self._identity, policy, self._ledger)

    async def _hand_over(self, training: asyncio.Task[Update]) -> None:
        """Training has ended: mask and upload."""
        round_ = self._round
        if round_ is None or round_.training is not training or round_.party is None:
            return
        round_.training, round_.needs_input = None, False
        try:
            update = self._clipped(training.result(), round_.bound)
            self._trace_update(round_, update)
            start = time.time()
            outputs = await asyncio.to_thread(round_.party.set_input, update)
            round_.spans.append({"phase": "upload", "start": start, "end": time.time()})
        except LightSecAggError as error:
            log.error("client %d sits round %d out: %s", self._table.id, round_.number, error)
            self._abandon(str(error))
            return
        await self._release(round_, outputs)

    def _clipped(self, update: Update, bound: float) -> Update:
        """As configured; how many entries were clipped stays here, it tells about the data."""
        if not self._table.clip:
            return update
        vector = np.clip(update.vector, -bound, bound, dtype=update.vector.dtype)
        return Update(vector, update.samples)

    async def _release(self, round_: _Round, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Send(_, message):
                    await self._send(round_, message)
                case NeedInput():
                    round_.needs_input = True
                case RoundAborted(reason):
                    log.info("client %d: round %d: %s", self._table.id, round_.number, reason)

    async def _send(self, round_: _Round, message: Message) -> None:
        assert round_.codec is not None  # noqa: S101 - a party has spoken
        data = pack_protocol(round_.number, round_.codec.encode(message))
        if isinstance(message, MaskedUpload):
            round_.unacknowledged = data
        start = time.time()
        await self._communicator.send(data)
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
        if aborted is None and round_.party is not None:
            self.rounds += 1
        self._trace_spans(round_)
        self._abandon("the round is over")

    def _abandon(self, reason: str) -> None:
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
        phase = {"Opening": "advertise", "Roster": "share", "SealedShare": "share"}.get(
            type(message).__name__
        )
        if isinstance(message, SurvivorSet) and round_.party is not None:
            phase = "agree" if isinstance(round_.party.state, Signed) else "recover"
        if phase is not None:
            round_.spans.append({"phase": phase, "start": start, "end": time.time()})

    def _trace_spans(self, round_: _Round) -> None:
        if self._table.trace is not None:
            path = self._table.trace / f"spans-{round_.number}-{self._table.id}.json"
            path.write_text(json.dumps(round_.spans), encoding="utf-8")

    def _trace_update(self, round_: _Round, update: Update) -> None:
        """The plain update, in the clear: only where the configuration asks for it."""
        if self._table.trace is not None:
            path: Path = self._table.trace / f"update-{round_.number}-{self._table.id}.npz"
            np.savez(path, vector=update.vector, samples=update.samples)


def _training_pool() -> ProcessPoolExecutor:
    from lightsecagg.training import training_pool

    return training_pool(1)
