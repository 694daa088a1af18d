"""The Server Manager of Section 6: drives `ServerParty` over any communicator.

One task reads the transport's events; the round loop feeds them to the party, with a deadline per
phase, and sends what comes back. What must survive a crash is in the journal before it is
acknowledged or announced. After a crash the last round is resumed if an upload had been
acknowledged; otherwise it is dropped and a new one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.budgets import phase_budget
from lightsecagg.drivers.federation.config import AggregationTable, RoundsTable
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
from lightsecagg.drivers.federation.jobs import ServerJob
from lightsecagg.drivers.federation.journal import Journal, PendingRound
from lightsecagg.drivers.federation.observer import Metrics, PhaseRecord, RoundRecord, log
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Received,
    ServerCommunicator,
)
from lightsecagg.errors import (
    Aborted,
    DecodeError,
    JournalError,
    PeerGone,
    RemoteProtocolError,
)
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.masks.sharing_graph import find_graph_parameters
from lightsecagg.params import Parameters
from lightsecagg.protocol.interface import Aggregate, Output, Phase, RoundAborted, Send
from lightsecagg.protocol.messages import MaskedUpload, Message
from lightsecagg.protocol.registry import PARTIES
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.settings import AllowList, ProtocolName, Settings, hash_model
from lightsecagg.protocol.wire import Codec

Progress = Callable[[str, int, int], None]
"""Told (phase, messages in, messages expected) while a round runs."""


def make_parameters(table: AggregationTable) -> tuple[Parameters, int]:
    """The parameters that a configuration asks for, and SecAgg+'s degree."""
    survivors, neighbours = table.survivors, 0
    if table.protocol is ProtocolName.SECAGG_PLUS:
        found = find_graph_parameters(table.clients, table.privacy, table.dropouts)
        neighbours = table.neighbours or found.degree
        survivors = survivors or found.threshold
    elif table.protocol is ProtocolName.SECAGG and not survivors:
        survivors = max(table.privacy + 1, (table.clients + table.privacy) // 2 + 1)
        survivors = min(survivors, table.clients - table.dropouts)
    parameters = Parameters(
        clients=table.clients,
        privacy=table.privacy,
        dropouts=table.dropouts,
        survivors=survivors,
        threat_model=table.threat_model,
        share_mode=table.share_mode,
        modulus=table.modulus,
    )
    return parameters, neighbours


@dataclass(slots=True)
class _Peer:
    """What the server knows of a connected client."""

    greeted: bool = False
    gone_since: float | None = None


class FederationServer:
    """Runs the rounds of one federation."""

    def __init__(
        self,
        aggregation: AggregationTable,
        rounds: RoundsTable,
        session: bytes,
        allow_list: AllowList,
        communicator: ServerCommunicator,
        job: ServerJob,
        journal: Journal,
        metrics: Metrics | None = None,
        progress: Progress | None = None,
        trace: Path | None = None,
    ) -> None:
        self._parameters, self._neighbours = make_parameters(aggregation)
        self._aggregation, self._rounds = aggregation, rounds
        self._session, self._allow_list = session, allow_list
        self._communicator, self._job, self._journal = communicator, job, journal
        self._metrics = metrics or Metrics()
        self._progress = progress or (lambda phase, done, expected: None)
        self._trace = trace
        field = PrimeField(aggregation.modulus)
        self._quantizer = Quantizer(
            field=field,
            bound=aggregation.bound,
            summands=aggregation.clients,
            max_samples=aggregation.max_samples if job.weighted else 1,
            weighted=job.weighted,
        )
        self._codec = Codec(field)
        self._events: asyncio.Queue[Event] = asyncio.Queue(maxsize=64)
        self._peers: dict[int, _Peer] = {}
        self._senders: set[asyncio.Task[None]] = set()
        self._outgoing: dict[int, asyncio.Queue[bytes]] = {}
        self._stopping = False
        self.records: list[RoundRecord] = []

    # -- the whole federation ----------------------------------------------------------------

    async def run(self) -> list[RoundRecord]:
        """All rounds, from wherever the journal stands; returns the records of this run."""
        await self._communicator.start()
        reader = asyncio.create_task(self._read_events())
        try:
            completed = self._restore_model()
            resumed = await self._resume_unfinished()
            completed += resumed
            while completed < self._rounds.number and not self._stopping:
                await self._one_round(completed)
                completed += 1
            await self._say_goodbye("the federation has finished", finished=True)
        finally:
            reader.cancel()
            for task in self._senders:
                task.cancel()
            await self._communicator.close()
            self._journal.close()
            self._metrics.close()
        return self.records

    def stop(self) -> None:
        """Finish the current round, then end (SIGTERM)."""
        self._stopping = True

    def _restore_model(self) -> int:
        stored = self._journal.load_model()
        if stored is None:
            return 0
        completed, data = stored
        self._job.load(data)
        log.info("resuming after %d completed rounds", completed)
        return completed

    async def _resume_unfinished(self) -> int:
        """Resume the round that a crash cut short; 1 if it completed."""
        done = 0
        for number in self._journal.unfinished():
            pending = self._journal.pending(number)
            if pending is None:
                log.info("round %d had no acknowledged upload; it is dropped", number)
                self._journal.abandon(number, "dropped after a crash")
                continue
            log.info(
                "resuming round %d: %d uploads are stored, U1 %s",
                number,
                len(pending.held),
                "was announced" if pending.survivors else "is open",
            )
            done += await self._resume(number, pending)
        return done

    async def _one_round(self, completed: int) -> None:
        reason = ""
        for attempt in range(self._rounds.retries + 1):
            invited = await self._wait_for_clients()
            record = await self._run_round(invited)
            if record.aborted is None:
                return
            reason = record.aborted
            log.warning("round %d was aborted: %s (attempt %d)", record.round, reason, attempt + 1)
        raise Aborted(f"{self._rounds.retries + 1} attempts at round {completed + 1}: {reason}")

    async def _wait_for_clients(self) -> list[int]:
        """Enough connected clients, at most N, lowest ids first."""
        least = self._rounds.min_clients or (self._parameters.clients - self._parameters.dropouts)
        least = max(least, self._parameters.minimum)
        deadline = time.monotonic() + self._rounds.wait_for_clients
        while len(self._ready()) < least:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise Aborted(
                    f"only {len(self._ready())} clients connected within "
                    f"{self._rounds.wait_for_clients:g} s, {least} are needed"
                )
            self._progress("connect", len(self._ready()), self._parameters.clients)
            await self._next_event(min(remaining, 0.5))
        settled = time.monotonic() + self._rounds.settle
        while len(self._ready()) < self._parameters.clients and time.monotonic() < settled:
            await self._next_event(0.1)
        return self._ready()[: self._parameters.clients]

    def _ready(self) -> list[int]:
        return sorted(
            client
            for client, peer in self._peers.items()
            if peer.greeted and peer.gone_since is None
        )

    # -- one round ---------------------------------------------------------------------------

    async def _run_round(self, invited: list[int]) -> RoundRecord:
        number, model = self._journal.next_round(), self._job.model()
        settings = Settings(
            protocol=self._aggregation.protocol,
            parameters=self._parameters,
            quantizer=self._quantizer,
            dimension=self._job.dimension,
            session=self._session,
            round=number,
            allow_list=self._allow_list.digest,
            model=hash_model(model) if model else hash_model(number.to_bytes(8, "big")),
            neighbours=self._neighbours,
        )
        self._journal.open_round(settings)
        party = PARTIES[settings.protocol][1](
            settings, self._allow_list, invited, uploads=self._journal.uploads(number)
        )
        round_ = _Round(self, number, party, invited)
        announcement = pack_control(RoundModel(number, model, self._aggregation.bound))
        for client in invited:
            self._post(client, announcement)
        return await self._finish(round_, party.start())

    async def _resume(self, number: int, pending: PendingRound) -> int:
        members = [member.client for member in pending.roster.members]
        party = PARTIES[pending.settings.protocol][1].resume(
            pending.settings,
            self._allow_list,
            pending.roster,
            pending.owners,
            uploads=self._journal.uploads(number),
        )
        outputs: list[Output] = []
        for client, held in sorted(pending.held.items()):
            vector = self._journal.load_upload(number, client)
            outputs += party.receive(client, MaskedUpload(held, vector))
        if pending.survivors is not None:
            if party.phase is Phase.UPLOAD:
                outputs += party.proceed()
            if party.survivors != pending.survivors:
                raise JournalError(
                    f"round {number}: the stored uploads do not give the survivor set that was "
                    "announced; refusing to announce another"
                )
        round_ = _Round(self, number, party, members)
        round_.record.resumed = True
        record = await self._finish(round_, outputs)
        return int(record.aborted is None)

    async def _finish(self, round_: _Round, outputs: list[Output]) -> RoundRecord:
        record = await round_.drive(outputs)
        if record.aborted is None and round_.aggregate is not None:
            settings = round_.party.settings
            average, samples = settings.average(round_.aggregate.total)
            stored = self._journal.load_model()
            completed = (stored[0] if stored else 0) + 1
            record.samples = samples
            if self._trace is not None:
                np.savez(self._trace / f"average-{record.round}.npz", average=average)
            record.figures = await asyncio.to_thread(self._job.apply, average, samples, completed)
            self._journal.complete(round_.number, completed, self._job.save())
        else:
            self._journal.abandon(round_.number, record.aborted or "no result")
        for client in round_.members:
            self._post(client, pack_control(RoundOver(round_.number, record.aborted)))
        self.records.append(record)
        self._metrics.record(record)
        return record

    async def _say_goodbye(self, reason: str, finished: bool) -> None:
        for client in self._ready():
            self._post(client, pack_control(Goodbye(reason, finished)))
        await self._drain()

    # -- transport ---------------------------------------------------------------------------

    async def _read_events(self) -> None:
        async for event in self._communicator.events():
            await self._events.put(event)

    async def _next_event(self, timeout: float) -> Event | None:
        """The next event, greetings and connections already noted; None after `timeout`."""
        try:
            event = await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return None
        match event:
            case Connected(client):
                self._peers[client] = _Peer()
                self._open_outgoing(client)
            case Disconnected(client):
                if client in self._peers:
                    self._peers[client].gone_since = time.monotonic()
        self._metrics.connected = len(self._ready())
        if isinstance(event, Received):
            return self._note_greeting(event)
        return event

    def _note_greeting(self, event: Received) -> Event | None:
        """Take a hello; every other message goes on to the round."""
        try:
            message = unpack(event.data)
        except DecodeError as error:
            self._communicator.disconnect(event.client, str(error))
            return None
        if not isinstance(message, Hello):
            return event
        if message.version != VERSION:
            reason = f"this server speaks version {VERSION}, the client {message.version}"
            self._post(event.client, pack_control(Goodbye(reason, finished=False)))
            return None
        self._peers.setdefault(event.client, _Peer()).greeted = True
        return Connected(event.client)

    def _open_outgoing(self, client: int) -> None:
        self._outgoing[client] = asyncio.Queue()
        task = asyncio.create_task(self._send_loop(client, self._outgoing[client]))
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)

    async def _send_loop(self, client: int, queue: asyncio.Queue[bytes]) -> None:
        """One sender per client, so that a slow one delays nobody else."""
        with contextlib.suppress(PeerGone):
            while True:
                data = await queue.get()
                await self._communicator.send(client, data)
                queue.task_done()

    def _post(self, client: int, data: bytes) -> None:
        peer = self._peers.get(client)
        if peer is not None and peer.gone_since is None and client in self._outgoing:
            self._outgoing[client].put_nowait(data)

    async def _drain(self, timeout: float = 5.0) -> None:
        waits: list[Coroutine[Any, Any, None]] = [
            queue.join() for client, queue in self._outgoing.items() if client in self._ready()
        ]
        if waits:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*waits), timeout)


class _Round:
    """One round on its way: the party, its deadlines and its record."""

    def __init__(
        self, server: FederationServer, number: int, party: RoundServer, members: Iterable[int]
    ) -> None:
        self.number, self.party, self.members = number, party, list(members)
        self.aggregate: Aggregate | None = None
        settings = party.settings
        self.record = RoundRecord(number, str(settings.protocol), list(self.members))
        self.record.quantisation_step = 1.0 / settings.quantizer.scale
        self._server = server
        self._refusals: Counter[str] = Counter()
        self._phase: Phase | None = None
        self._deadline = 0.0
        self._announced = False
        self._bytes = (0, 0)
        self._started_phase = time.monotonic()
        self._sharing_closed = party.roster is not None

    async def drive(self, outputs: list[Output]) -> RoundRecord:
        """Until the party is done; every wait has a deadline (R35)."""
        self._release(outputs)
        self._track_phase()
        while self.party.phase is not Phase.DONE:
            wait = min(self._deadline - time.monotonic(), 0.25)
            if self._deadline <= time.monotonic():
                self._step(self.party.proceed)
                continue
            event = await self._server._next_event(max(wait, 0.01))
            self._give_up_on_the_gone()
            if event is not None:
                await self._handle(event)
            self._report_progress()
        self._track_phase()
        self.record.refusals = dict(self._refusals)
        self.record.late = dict(self.party.late_messages)
        return self.record

    async def _handle(self, event: Event) -> None:
        match event:
            case Connected(client) if client in self.members:
                if self.party.phase in (Phase.UPLOAD, Phase.AGREE, Phase.RECOVER):
                    self._release(self.party.request_for(client))
            case Disconnected(client) if client in self.members:
                if self.party.phase in (Phase.ADVERTISE, Phase.SHARE):
                    self._drop(client)
            case Received(client, data):
                await self._receive(client, data)

    async def _receive(self, client: int, data: bytes) -> None:
        try:
            content = unpack(data)
            if not isinstance(content, tuple):
                raise RemoteProtocolError("a control message that only a server sends")
            number, body = content
            if number != self.number:
                self.party.late_messages["other round"] += 1
                return
            message = self._server._codec.decode(body)
            if isinstance(message, MaskedUpload):
                await self._store(client, message)
            self._step(lambda: self.party.receive(client, message))
            if isinstance(message, MaskedUpload):
                self._server._post(client, pack_control(UploadStored(self.number)))
        except (DecodeError, RemoteProtocolError) as error:
            self._refusals[type(error).__name__] += 1
            log.warning("round %d: client %d cut: %s", self.number, client, error)
            self._server._communicator.disconnect(client, str(error))
            self._drop(client)

    async def _store(self, client: int, message: MaskedUpload) -> None:
        """Durable before it is acknowledged."""
        wanted = self.party.phase is Phase.UPLOAD and client in self.party.pending
        if wanted and message.vector.shape == (self.party.settings.length,):
            journal = self._server._journal
            await asyncio.to_thread(
                journal.store_upload, self.number, client, message.held, message.vector
            )

    def _step(self, call: Callable[[], list[Output]]) -> None:
        self._release(call())
        self._track_phase()

    def _drop(self, client: int) -> None:
        if client in self.party.pending:
            phase = str(self.party.phase)
            self.record.dropped.setdefault(phase, []).append(client)
            log.info("round %d: client %d dropped in phase %s", self.number, client, phase)
        self._step(lambda: self.party.drop(client))

    def _give_up_on_the_gone(self) -> None:
        now = time.monotonic()
        for client in sorted(self.party.pending):
            peer = self._server._peers.get(client)
            if now >= self._deadline_of(peer):
                self._drop(client)

    def _deadline_of(self, peer: _Peer | None) -> float:
        if peer is None:
            return self._started_phase + self._server._rounds.grace
        if peer.gone_since is None:
            return float("inf")
        return peer.gone_since + self._server._rounds.grace

    def _release(self, outputs: list[Output]) -> None:
        """Make durable what these outputs announce, then let them go."""
        journal = self._server._journal
        if not self._sharing_closed and self.party.phase not in (Phase.ADVERTISE, Phase.SHARE):
            if self.party.roster is not None:
                journal.close_sharing(self.number, self.party.roster, self.party.owners)
            self._sharing_closed = True
        if self.party.survivors and not self._announced:
            journal.announce(self.number, self.party.survivors)
            self._announced = True
        encoded: dict[int, bytes] = {}
        for output in outputs:
            match output:
                case Send(client, message):
                    self._server._post(client, self._encode(message, encoded))
                case Aggregate():
                    self.aggregate = output
                    self.record.included = list(output.included)
                    self.record.responders = list(output.responders)
                    self.record.suspects = list(output.suspects)
                case RoundAborted(reason):
                    self.record.aborted = reason

    def _encode(self, message: Message, cache: dict[int, bytes]) -> bytes:
        """The same message to many clients is encoded once."""
        key = id(message)
        if key not in cache:
            cache[key] = pack_protocol(self.number, self._server._codec.encode(message))
        return cache[key]

    def _track_phase(self) -> None:
        phase = self.party.phase
        if phase is self._phase:
            return
        now, traffic = time.time(), self._server._communicator.stats.total
        if self._phase is not None:
            entry = self.record.phases[str(self._phase)]
            entry.end = now
            entry.bytes_in = traffic.bytes_in - self._bytes[0]
            entry.bytes_out = traffic.bytes_out - self._bytes[1]
        self._phase, self._bytes = phase, (traffic.bytes_in, traffic.bytes_out)
        self._started_phase = time.monotonic()
        if phase is Phase.DONE:
            return
        self.record.phases[str(phase)] = PhaseRecord(now)
        self._deadline = time.monotonic() + getattr(self._server._rounds, str(phase))
        budget = phase_budget(self.party.settings, phase)
        for client in self.members:
            self._server._communicator.set_budget(client, budget)

    def _report_progress(self) -> None:
        expected = len(self.members)
        self._server._progress(str(self.party.phase), expected - len(self.party.pending), expected)
