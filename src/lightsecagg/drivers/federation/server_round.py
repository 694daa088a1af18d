"""One round on its way: the party, its deadlines, what must be durable, and the record.

greeting with this round's number     the request of the current phase is repeated
greeting with another number          the client was restarted: a dropout of this round
disconnection                         a dropout after `grace`; at once while shares are under
                                      way, which cannot be repeated
withdrawal                            a dropout at once
a message that is refused             the client is cut and out of this round; the same if what
                                      it did here was not foreseen
a deadline                            the party goes on with what there is, or aborts
a journal that cannot be written      an upload is not acknowledged; anything else: abort
a job of the party                    is run in threads, one job after the other; events and
                                      deadlines go on meanwhile, until only its result is awaited
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from lightsecagg.drivers.federation.config import RoundsTable
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.federation.peers import Greeted, Misbehaved, PeerEvent, Peers, Spoke
from lightsecagg.drivers.transport.communicator import Disconnected, ServerCommunicator
from lightsecagg.errors import JournalError, RecoveryError
from lightsecagg.foreign import explain, shown
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Persist,
    Phase,
    RoundAborted,
    Send,
    SharingClosed,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.jobs import Compute, Job, Result
from lightsecagg.protocol.messages import MaskedUpload, Message
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.budgets import phase_budget
from lightsecagg.session.envelope import (
    RoundOver,
    UploadStored,
    Withdraw,
    pack_control,
    pack_protocol,
)
from lightsecagg.session.record import PhaseRecord, RoundRecord

Progress = Callable[[str, int, int], None]
"""Told (phase, messages in, messages expected) while a round runs."""

COMEBACK = 15.0
"""Seconds in which clients find a server that was restarted: they pause for up to 4.5 s between
attempts, and an attempt that nobody answers takes 10 s."""
_TICK = 0.05
_COLUMNS = 2**18
"""How many columns of a job are computed before it can be given up."""


class ServerRound:
    """Drives one party over `peers`; `drive` returns when the round is over."""

    def __init__(
        self,
        party: RoundServer,
        members: Iterable[int],
        table: RoundsTable,
        peers: Peers,
        communicator: ServerCommunicator,
        journal: Journal,
        progress: Progress,
        stored: Iterable[int] | None = None,
    ) -> None:
        """`stored` names the uploads that a resumed round has on disk; None for a new round."""
        settings = party.settings
        self.number, self.party, self.members = settings.round, party, list(members)
        self.aggregate: Aggregate | None = None
        self.record = RoundRecord(self.number, str(settings.protocol), list(self.members))
        self.record.quantisation_step = 1.0 / settings.quantizer.scale
        self.record.noise = settings.quantizer.residue
        self.record.resumed = stored is not None
        self._table, self._peers, self._communicator = table, peers, communicator
        self._journal, self._progress = journal, progress
        self._codec = Codec(settings.field)
        self._stored = set(stored or ())
        self._lost: set[int] = set()
        self._refusals: Counter[str] = Counter()
        self._phase: Phase | None = None
        self._deadline = self._next_tick = 0.0
        self._bytes = (0, 0)
        self._phase_began = time.monotonic()
        self._failed = False
        self._jobs: deque[Job] = deque()
        self._computing: asyncio.Task[Result] | None = None

    async def drive(self, outputs: list[Output]) -> RoundRecord:
        """Until the party is done; every wait has a deadline (R35)."""
        self._step(lambda: outputs)
        while not self._is_over():
            try:
                await self._advance()
            except Exception as error:  # not by a message: the round ends, the server does not
                self._fail(explain(error))
        if self._computing is not None:
            self._computing.cancel()
            await asyncio.gather(self._computing, return_exceptions=True)
        self._track_phase()
        self._refusals.update(self._peers.refusals)
        self._peers.refusals.clear()
        self.record.refusals = dict(self._refusals)
        self.record.late = dict(self.party.late_messages)
        return self.record

    async def _advance(self) -> None:
        """Until the next event, or the deadline."""
        self._compute()
        if self._is_over():  # by the last result: no event will come
            return
        now = time.monotonic()
        if now >= self._deadline and self.party.pending:  # else only a job is awaited
            log.info("round %d: the deadline of phase %s fired", self.number, self._phase)
            self._step(self.party.proceed)
            return
        remaining = self._deadline - now
        event = await self._peers.next(min(remaining, 0.25) if remaining > 0 else 0.25)
        if event is not None:
            await self._handle(event)
        self._tick()

    def _is_over(self) -> bool:
        return self._failed or self.party.phase is Phase.DONE

    # -- jobs --------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Hand over the result that is there, and begin the next job."""
        if self._computing is not None and self._computing.done():
            task, self._computing = self._computing, None
            job, result = self._jobs.popleft(), task.result()
            self._step(lambda: self.party.computed(job, result))
        if self._computing is None and self._jobs and not self._is_over():
            self._computing = asyncio.create_task(compute(self._jobs[0]))
            self._computing.add_done_callback(lambda _: self._peers.wake())

    # -- events ------------------------------------------------------------------------------

    async def _handle(self, event: PeerEvent) -> None:
        match event:
            case Greeted(client, number):
                self._on_greeting(client, number)
            case Disconnected(client):
                if self.party.phase in (Phase.ADVERTISE, Phase.SHARE):
                    self._drop(client, "disconnected")
            case Misbehaved(client, reason):
                self._drop(client, reason)
            case Spoke(client, Withdraw(number, reason)):
                if number == self.number and client in self.members and client not in self._lost:
                    self.record.withdrawn.setdefault(shown(reason), []).append(client)
                    self._drop(client, f"it withdraws: {shown(repr(reason))}")
            case Spoke(client, (number, body)):
                if number != self.number:
                    self.party.late_messages["other round"] += 1
                else:
                    await self._receive(client, body)

    def _on_greeting(self, client: int, number: int) -> None:
        if number not in (-1, self.number):
            self._peers.post(client, pack_control(RoundOver(number, "that round is over")))
        if number != self.number:
            self._drop(client, "restarted, its secrets of this round are gone")
        elif client not in self.members or client in self._lost:
            # It still waits for a round that goes on without it.
            reason = "the round goes on without this client"
            self._peers.post(client, pack_control(RoundOver(number, reason)))
        else:
            self._step(lambda: self.party.request_for(client))

    async def _receive(self, client: int, body: memoryview) -> None:
        if client in self._lost:
            self.party.late_messages["after a dropout"] += 1
            return
        try:
            message = self._codec.decode(body)
            outputs = self.party.receive(client, message)
        except Exception as error:  # at most its sender is harmed by a message (S41)
            self._peers.cut(client, error)
            self._drop(client, explain(error))
            return
        match outputs:
            case [Persist(UploadTaken() as record)]:
                await self._store_upload(record)
            case _:
                self._step(lambda: outputs)
        if isinstance(message, MaskedUpload) and client in self._stored:
            self._peers.post(client, pack_control(UploadStored(self.number)))

    async def _store_upload(self, record: UploadTaken) -> None:
        """Durable before it is counted, and counted before it is acknowledged."""
        client, number = record.client, self.number
        try:
            await asyncio.to_thread(self._journal.store_upload, number, client, record.upload)
        except JournalError as error:
            self._refusals["JournalError"] += 1
            log.error("round %d: the upload of client %d: %s", number, client, error)
            reason = "the server could not store the upload"
            self._peers.post(client, pack_control(RoundOver(number, reason)))
            self._drop(client, "its upload could not be stored")
            self._step(lambda: self.party.stored(record, None))
            return
        self._stored.add(client)
        self._step(lambda: self.party.stored(record, self._journal.upload(number, client)))

    # -- dropouts ----------------------------------------------------------------------------

    def _drop(self, client: int, why: str) -> None:
        """Wait for it, and listen to it, no more in this round; what it has delivered stays."""
        if client not in self.members or client in self._lost or self._is_over():
            return
        phase = str(self.party.phase)
        self._lost.add(client)
        self.record.dropped.setdefault(phase, []).append(client)
        log.info("round %d: client %d dropped in phase %s: %s", self.number, client, phase, why)
        self._step(lambda: self.party.drop(client))

    def _tick(self) -> None:
        """What need not be done at every message."""
        now = time.monotonic()
        if now < self._next_tick or self._is_over():
            return
        self._next_tick = now + _TICK
        pending = self.party.pending
        self._progress(str(self.party.phase), len(self.members) - len(pending), len(self.members))
        for client in sorted(pending):
            if now >= self._end_of_patience(client):
                self._drop(client, "did not come back")

    def _end_of_patience(self, client: int) -> float:
        if not self._peers.known(client):
            extra = COMEBACK if self.record.resumed else 0.0
            return self._phase_began + max(self._table.grace, extra)
        gone_since = self._peers.gone_since(client)
        return float("inf") if gone_since is None else gone_since + self._table.grace

    # -- outputs -----------------------------------------------------------------------------

    def _step(self, call: Callable[[], list[Output]]) -> None:
        """One step of the party; a damaged or full journal ends the round, nothing half-done."""
        try:
            self._release(call())
        except JournalError as error:
            self._fail(str(error))
        self._track_phase()

    def _fail(self, reason: str) -> None:
        log.error("round %d: %s", self.number, reason)
        self._failed, self.aggregate = True, None
        self.record.aborted = reason

    def _release(self, outputs: list[Output]) -> None:
        encoded: dict[int, bytes] = {}
        for output in outputs:
            match output:
                case Persist(SharingClosed(roster, closed)):
                    self._journal.close_sharing(self.number, roster, closed)
                case Persist(SurvivorsChosen(survivors)):
                    self._journal.announce(self.number, survivors)
                case Send(client, message):
                    self._peers.post(client, self._encode(message, encoded))
                case Aggregate():
                    self.aggregate = output
                    self.record.included = list(output.included)
                    self.record.responders = list(output.responders)
                    self.record.suspects = list(output.suspects)
                    self.record.accused = list(output.accused)
                case RoundAborted(reason, suspects, accused):
                    self.record.aborted = reason
                    self.record.suspects = list(suspects)
                    self.record.accused = list(accused)
                case Compute(job):
                    self._jobs.append(job)

    def _encode(self, message: Message, cache: dict[int, bytes]) -> bytes:
        """The same message to many clients is encoded once."""
        key = id(message)
        if key not in cache:
            cache[key] = pack_protocol(self.number, self._codec.encode(message))
        return cache[key]

    def _track_phase(self) -> None:
        phase = Phase.DONE if self._is_over() else self.party.phase
        if phase is self._phase:
            return
        now, traffic = time.monotonic(), self._communicator.stats.total
        if self._phase is not None and self._phase is not Phase.DONE:
            entry = self.record.phases[str(self._phase)]
            entry.seconds = now - self._phase_began
            entry.bytes_in = traffic.bytes_in - self._bytes[0]
            entry.bytes_out = traffic.bytes_out - self._bytes[1]
        self._phase, self._bytes = phase, (traffic.bytes_in, traffic.bytes_out)
        self._phase_began = now
        if phase is Phase.DONE:
            return
        self.record.phases[str(phase)] = PhaseRecord(time.time())
        seconds = getattr(self._table, str(phase))
        self._deadline = now + seconds
        awaited = len(self.party.pending)
        log.info(
            "round %d: %s: waiting for %d clients, %g s at most",
            self.number,
            phase,
            awaited,
            seconds,
        )
        budget = phase_budget(self.party.settings, phase)
        for client in self.members:
            self._communicator.set_budget(client, budget)


async def compute(job: Job) -> Result:
    """Run a job in threads, so that the loop stays free for everybody else."""
    try:
        await asyncio.to_thread(job.open)
        starts = range(0, job.columns, _COLUMNS)
        parts = [
            await asyncio.to_thread(job.run, start, min(start + _COLUMNS, job.columns))
            for start in starts
        ]
        return await asyncio.to_thread(job.join, parts)
    except RecoveryError as error:
        return error
