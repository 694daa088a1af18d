"""The buffered-asynchronous mode with N parties in one process, over the bytes of a network.

Theory of operation. A schedule says which client is done next (`schedule`), a workload what it has
computed (random vectors, or a model trained with PyTorch), and a federation what becomes of it:
`ProtectedFederation` runs asynchronous LightSecAgg, `PlainFederation` FedBuff. All three have their
own random streams, so that runs with and without protection differ in quantisation and masks only.

Inside the protected federation messages travel as encoded bytes through two first-in-first-out
queues, up to the server and down to the clients, until nothing is on its way; if the server still
waits for answers then, its deadline fires. Clients refill their stock of masks right after they
have used one, so no upload waits for the offline phase.

Every recovered sum is compared, element for element in F_q, with the weighted sum of the quantised
updates that were announced for it.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH, uint
from lightsecagg.drivers.simulation.memory import check_memory
from lightsecagg.drivers.simulation.metering import Meter
from lightsecagg.drivers.simulation.recording import quantised
from lightsecagg.drivers.simulation.schedule import Finished, Left, Returned, Schedule
from lightsecagg.errors import Aborted, ParameterError, RemoteProtocolError
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import StalenessFunction, constant, hinge, polynomial
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.interface import SERVER, Output, Phase, RoundAborted, Send, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.lightsecagg_async_client import AsyncLightSecAggClient
from lightsecagg.protocol.lightsecagg_async_server import (
    AsyncLightSecAggServer,
    AsyncOutput,
    BufferAggregate,
    BufferFailed,
)
from lightsecagg.protocol.messages import (
    Advertise,
    BufferAnnounced,
    BufferAnswer,
    BufferCertificate,
    BufferedUpload,
    BufferRefusal,
    BufferSignature,
    Message,
    Opening,
    Roster,
    SealedShare,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.plain_async import FedBuffClient, FedBuffServer, PlainUpload
from lightsecagg.protocol.settings import (
    AllowList,
    Buffering,
    Policy,
    ProtocolName,
    Settings,
    hash_model,
)
from lightsecagg.protocol.wire import Codec

Vector = NDArray[np.float32] | NDArray[np.float64]

# To which phase the bytes of a message and the work of its recipient belong.
_PHASES: dict[type, Phase] = {
    Opening: Phase.ADVERTISE,
    Advertise: Phase.ADVERTISE,
    Roster: Phase.ADVERTISE,
    SealedShare: Phase.SHARE,
    BufferedUpload: Phase.UPLOAD,
    UploadDropped: Phase.UPLOAD,
    BufferSignature: Phase.AGREE,
    BufferCertificate: Phase.RECOVER,
    BufferRefusal: Phase.RECOVER,
    BufferAnswer: Phase.RECOVER,
}


class Workload(Protocol):
    """What clients compute, and what the server does with the mean of a buffer."""

    @property
    def dimension(self) -> int:
        """d"""

    @property
    def model_hash(self) -> bytes:
        """Hash of the current model."""

    def update(self, client: int, version: int, job: int) -> Vector:
        """The update of a client that trained from the model of this version.

        `job` counts the updates of the whole run and seeds the client's batches.
        """

    def advance(self, mean: NDArray[np.float64] | None) -> None:
        """Make the model of the next version; None if the buffer was lost."""


class RandomVectors:
    """Uniform random vectors instead of updates, for tests of the protocol alone."""

    def __init__(self, dimension: int, bound: float = 1.0, seed: int = 0) -> None:
        self.dimension = dimension
        self._bound = bound
        self._seed = seed
        self._version = 0

    @property
    def model_hash(self) -> bytes:
        """There is no model; the version stands for it."""
        return hash_model(uint(self._version))

    def update(self, client: int, version: int, job: int) -> Vector:
        """A vector of this client and job."""
        generator = np.random.default_rng((self._seed, client, job))
        return generator.uniform(-self._bound, self._bound, self.dimension)

    def advance(self, mean: NDArray[np.float64] | None) -> None:
        """Nothing learns."""
        self._version += 1


@dataclass(frozen=True, slots=True)
class Flush:
    """What became of one buffer."""

    time: int
    owners: tuple[int, ...]
    staleness: tuple[int, ...] = ()
    """t - t_i, by owner."""
    mean: NDArray[np.float64] | None = field(default=None, repr=False)
    """The weighted mean of the updates; None if the buffer was lost."""
    exact: bool | None = None
    """Whether the sum over F_q is what it must be; None without protection, or if lost."""
    responders: int = 0
    lost: str | None = None
    """Why the buffer was lost."""


class Federation(Protocol):
    """N clients and their server, between a schedule and a workload."""

    meter: Meter

    @property
    def time(self) -> int:
        """t: the version of the current model."""

    def publish(self, model: bytes) -> None:
        """The hash of the current model."""

    def ready(self, client: int) -> bool:
        """Whether this client may upload; not while too many of its updates wait."""

    def upload(self, client: int, vector: Vector, version: int, model: bytes) -> list[Flush]:
        """A client hands in its update; the buffers that this fills."""

    def leave(self, client: int) -> list[Flush]:
        """A client is gone."""

    def rejoin(self, client: int) -> list[Flush]:
        """A client is back."""

    def flush(self) -> list[Flush]:
        """The server will not wait any longer for a full buffer."""


class Staleness(StrEnum):
    """The functions s(tau) by name."""

    CONSTANT = "constant"
    POLY = "poly"
    HINGE = "hinge"

    def function(self, alpha: float = 1.0, knee: int = 3) -> StalenessFunction:
        """s(tau): `alpha` is poly's exponent and hinge's slope, `knee` where hinge begins."""
        match self:
            case Staleness.CONSTANT:
                return constant()
            case Staleness.POLY:
                return polynomial(alpha)
            case Staleness.HINGE:
                return hinge(alpha, knee)


def quantizer_of_scale(modulus: int, buffer: int, max_weight: int, scale: float) -> Quantizer:
    """The quantizer with this c_l and the largest bound that cannot wrap around."""
    field = PrimeField(modulus)
    budget = Quantizer(field, 1.0, buffer, max_weight=max_weight).budget
    return Quantizer(field, budget / scale, buffer, max_weight=max_weight, scale=scale)


def phase_costs(meter: Meter) -> dict[str, dict[str, float]]:
    """CPU seconds and bytes by phase: all clients together, and the server."""
    return {
        phase.value: {
            "client_seconds": sum(load.seconds for load in loads.clients.values()),
            "server_seconds": loads.server.seconds,
            "upload_bytes": loads.server.received + loads.server.shares_received,
            "download_bytes": loads.server.sent + loads.server.shares_sent,
        }
        for phase, loads in meter.phases.items()
        if loads.clients or loads.server.seconds
    }


@dataclass(frozen=True, slots=True)
class AsyncConfig:
    """The parameters of an asynchronous federation."""

    parameters: Parameters
    buffering: Buffering
    quantizer: Quantizer
    dimension: int
    buffer_size: int
    """K"""
    stock: int = 2
    """How many masks each client keeps shared ahead of time."""
    departures: float = 0.0
    """How often a client vanishes while a buffer is in flight, and comes back after it."""

    def __post_init__(self) -> None:
        if not 1 <= self.stock < self.buffering.stock:
            raise ParameterError(
                f"stock = {self.stock} must be at least 1 and below the {self.buffering.stock} "
                "masks that peers keep per owner, because uploads that wait count as well"
            )
        if not 0 <= self.departures < 1:
            raise ParameterError(f"departures = {self.departures} must lie in [0, 1)")


class GivenCoins:
    """The operating system's randomness, except for one draw: the coins of the next rounding.

    Rounding is not secret in a simulation; given coins make a run reproducible and let it compute
    the very vector that a client masked.
    """

    __slots__ = ("coins",)

    def __init__(self) -> None:
        self.coins: bytes | None = None

    def __call__(self, count: int) -> bytes:
        coins, self.coins = self.coins, None
        return system_entropy(count) if coins is None else coins

    def __repr__(self) -> str:
        return "GivenCoins()"


class ProtectedFederation:
    """Asynchronous LightSecAgg, every party and every byte."""

    def __init__(
        self,
        config: AsyncConfig,
        rounding: np.random.Generator,
        on_stocked: Callable[[], None] | None = None,
    ) -> None:
        """Registers the clients and shares their first masks.

        * `on_stocked`: called for every client that has shared its first masks.
        """
        self.config = config
        self.meter = Meter()
        self.refused: Counter[str] = Counter()
        """Messages that a party refused, by type."""
        parameters = config.parameters
        keys = [IdentityKey.generate() for _ in range(parameters.clients)]
        allow_list = AllowList({client: key.public for client, key in enumerate(keys)})
        session = draw(system_entropy, HASH_LENGTH)
        self.settings = Settings(
            protocol=ProtocolName.LIGHTSECAGG,
            parameters=parameters,
            quantizer=config.quantizer,
            dimension=config.dimension,
            session=session,
            round=0,
            allow_list=allow_list.digest,
            buffering=config.buffering,
        )
        check_memory(self.settings, masks=config.stock + 1)  # one more is in use
        self.server = AsyncLightSecAggServer(self.settings, allow_list, config.buffer_size)
        policy = Policy(
            allow_list=allow_list,
            session=session,
            privacy=parameters.privacy,
            threat_model=parameters.threat_model,
            dimension=config.dimension,
            buffering=config.buffering,
            # A simulated run is long and its data is no secret; models may repeat.
            max_attempts=2**31,
        )
        self._entropy = [GivenCoins() for _ in keys]
        self.clients = [
            AsyncLightSecAggClient(client, key, policy, Ledger.volatile(), self._entropy[client])
            for client, key in enumerate(keys)
        ]
        self._rounding = rounding
        self._codec = Codec(self.settings.field)
        self._up: deque[tuple[int, bytes]] = deque()
        self._down: deque[tuple[int, bytes]] = deque()
        self._away: set[int] = set()
        self._returning: list[int] = []
        self._tags: dict[int, tuple[Tag, ...]] = {}
        self._quantised: dict[tuple[int, int], Elements] = {}
        self._flushes: list[Flush] = []
        with self.meter.server_cpu(Phase.ADVERTISE):
            outputs = self.server.start()
        self._from_server(outputs)
        self._settle()
        for client in range(parameters.clients):
            self._restock(client)
            if on_stocked is not None:
                on_stocked()

    @property
    def time(self) -> int:
        """t"""
        return self.server.time

    def publish(self, model: bytes) -> None:
        """See `Federation`."""
        self.server.publish(model)

    def ready(self, client: int) -> bool:
        """See `Federation`."""
        return bool(self.clients[client].stock or self.clients[client].room)

    def upload(self, client: int, vector: Vector, version: int, model: bytes) -> list[Flush]:
        """See `Federation`."""
        party = self.clients[client]
        if not party.stock:
            self._restock(client)
        update, coins = Update(vector), self._rounding.bytes(32)
        self._entropy[client].coins = coins
        with self.meter.client_cpu(Phase.UPLOAD, client):
            outputs = party.set_input(update, version, model)
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.message, BufferedUpload):
                tag = output.message.tag
                self._quantised[client, tag.serial] = quantised(self.settings, update, coins)
        self._from_client(client, outputs)
        flushes = self._settle()
        self._restock(client)
        return flushes

    def leave(self, client: int) -> list[Flush]:
        """See `Federation`."""
        self._away.add(client)
        with self.meter.server_cpu(Phase.RECOVER):
            outputs = self.server.drop(client)
        self._from_server(outputs)
        return self._settle()

    def rejoin(self, client: int) -> list[Flush]:
        """See `Federation`."""
        self._away.discard(client)
        with self.meter.server_cpu(Phase.SHARE):
            outputs = self.server.rejoin(client)
        self._from_server(outputs)
        flushes = self._settle()
        self._restock(client)
        return flushes

    def flush(self) -> list[Flush]:
        """See `Federation`; does nothing while fewer than T + 2 updates wait."""
        if self.server.waiting < self.config.parameters.privacy + 2:
            return []
        with self.meter.server_cpu(Phase.UPLOAD):
            outputs = self.server.flush()
        self._from_server(outputs)
        return self._settle()

    def _restock(self, client: int) -> None:
        """Share masks ahead of time, until the stock is full or peers would drop old ones."""
        party = self.clients[client]
        while client not in self._away and party.room and party.stock < self.config.stock:
            with self.meter.client_cpu(Phase.SHARE, client):
                outputs = party.restock()
            self._from_client(client, outputs)
            self._settle()

    # -- the network -------------------------------------------------------------------------

    def _settle(self) -> list[Flush]:
        """Deliver everything; fire the server's deadline if it waits for what never comes."""
        while True:
            while self._up or self._down:
                if self._up:
                    self._to_server(*self._up.popleft())
                else:
                    self._to_client(*self._down.popleft())
            if self.server.phase is Phase.UPLOAD:
                break
            with self.meter.server_cpu(Phase.RECOVER):
                outputs = self.server.proceed()
            self._from_server(outputs)
        flushes, self._flushes = self._flushes, []
        returning, self._returning = self._returning, []
        for client in returning:
            flushes += self.rejoin(client)
        return flushes

    def _to_server(self, sender: int, data: bytes) -> None:
        message = self._codec.decode(data)
        phase, is_share = self._phase(message), isinstance(message, SealedShare)
        self.meter.client_sent(phase, sender, len(data), is_share)
        with self.meter.server_cpu(phase, relaying=is_share):
            try:
                outputs = self.server.receive(sender, message)
            except RemoteProtocolError:
                self.refused[type(message).__name__] += 1
                outputs = []
        self._from_server(outputs)

    def _from_server(self, outputs: list[AsyncOutput]) -> None:
        message: Message | None = None
        data = b""
        for output in outputs:
            match output:
                case Send():
                    if output.message is not message:  # a broadcast is encoded once
                        message = output.message
                        with self.meter.server_cpu(self._phase(message)):
                            data = self._codec.encode(message)
                        if isinstance(message, BufferAnnounced):
                            self._tags[message.time] = message.tags
                    self._down.append((output.to, data))
                case BufferAggregate():
                    self._flushes.append(self._recovered(output))
                case BufferFailed():
                    self._take_expected(output.time)
                    self._flushes.append(Flush(output.time, output.owners, lost=output.reason))
                case RoundAborted():
                    raise Aborted(output.reason)

    def _to_client(self, client: int, data: bytes) -> None:
        if client in self._away:
            return
        message = self._codec.decode(data)
        is_share = isinstance(message, SealedShare)
        phase = self._phase(message)
        departs = isinstance(message, BufferAnnounced) and self._departs()
        if departs and self._rounding.random() < 0.5:
            self._depart(client)
            return
        self.meter.server_sent(phase, client, len(data), is_share)
        with self.meter.client_cpu(phase, client):
            try:
                outputs = self.clients[client].receive(SERVER, message)
            except RemoteProtocolError:
                self.refused[type(message).__name__] += 1
                outputs = []
        self._from_client(client, outputs)
        if departs:
            self._depart(client)

    def _from_client(self, client: int, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Send):
                with self.meter.client_cpu(self._phase(output.message), client):
                    self._up.append((client, self._codec.encode(output.message)))

    def _phase(self, message: Message) -> Phase:
        if isinstance(message, BufferAnnounced):
            malicious = self.config.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
            return Phase.AGREE if malicious else Phase.RECOVER
        return _PHASES[type(message)]

    def _departs(self) -> bool:
        return self.config.departures > 0 and self._rounding.random() < self.config.departures

    def _depart(self, client: int) -> None:
        """The client vanishes with a buffer in flight, and is back when that is over."""
        self._away.add(client)
        self._returning.append(client)
        self._from_server(self.server.drop(client))

    # -- the check ---------------------------------------------------------------------------

    def _take_expected(self, time: int) -> list[tuple[int, Elements]]:
        """Weight and quantised update of everything that was announced for this buffer."""
        return [
            (
                self.config.buffering.table.weight(time - tag.version),
                self._quantised.pop((tag.owner, tag.serial)),
            )
            for tag in self._tags.pop(time)
        ]

    def _recovered(self, aggregate: BufferAggregate) -> Flush:
        time = aggregate.time
        staleness = tuple(time - tag.version for tag in self._tags[time])
        weights, vectors = zip(*self._take_expected(time), strict=True)
        expected = self.settings.field.weighted_sum(list(weights), list(vectors))
        return Flush(
            time=time,
            owners=aggregate.owners,
            staleness=staleness,
            mean=self.settings.buffer_average(aggregate.total, aggregate.weights),
            exact=bool(np.array_equal(aggregate.total, expected)),
            responders=len(aggregate.responders),
        )


class PlainFederation:
    """FedBuff: the server sees every update."""

    def __init__(self, clients: int, server: FedBuffServer) -> None:
        self.meter = Meter()
        self.server = server
        self.clients = [FedBuffClient(client) for client in range(clients)]

    @property
    def time(self) -> int:
        """t"""
        return self.server.time

    def publish(self, model: bytes) -> None:
        """Nobody checks."""

    def ready(self, client: int) -> bool:
        """Always."""
        return True

    def upload(self, client: int, vector: Vector, version: int, model: bytes) -> list[Flush]:
        """See `Federation`."""
        with self.meter.client_cpu(Phase.UPLOAD, client):
            data = self.clients[client].set_input(Update(vector), version).to_bytes()
        self.meter.client_sent(Phase.UPLOAD, client, len(data), False)
        with self.meter.server_cpu(Phase.UPLOAD):
            means = self.server.receive(client, PlainUpload.from_bytes(data))
        return [
            Flush(mean.time, mean.owners, mean.staleness, mean.mean, responders=0) for mean in means
        ]

    def leave(self, client: int) -> list[Flush]:
        """Its uploads stay."""
        return []

    def rejoin(self, client: int) -> list[Flush]:
        """It has missed nothing."""
        return []

    def flush(self) -> list[Flush]:
        """FedBuff waits for K updates."""
        return []


@dataclass(slots=True)
class AsyncReport:
    """What happened in an asynchronous run."""

    flushes: list[Flush] = field(default_factory=list)
    """Every buffer; the means are left out."""
    uploads: int = 0
    too_stale: int = 0
    """Updates that were too stale when they were done, and not uploaded."""
    held_back: int = 0
    """Updates of clients too many of whose updates were waiting already."""
    departures: int = 0
    clock: float | None = None
    """Virtual seconds, if the schedule has a clock."""

    @property
    def recovered(self) -> int:
        """Buffers that were not lost."""
        return sum(flush.lost is None for flush in self.flushes)

    @property
    def exact(self) -> bool | None:
        """Whether every recovered sum was exact; None without protection."""
        checks = [flush.exact for flush in self.flushes if flush.lost is None]
        return None if None in checks else all(checks)


def simulate_async(
    federation: Federation,
    workload: Workload,
    schedule: Schedule,
    flushes: int,
    *,
    max_staleness: int,
    flush_after: float | None = None,
    on_flush: Callable[[Flush], None] | None = None,
) -> AsyncReport:
    """Run until so many buffers are recovered.

    * `flush_after`: virtual seconds after which the server flushes what there is.
    * `on_flush`: called when the model has been updated.
    """
    collecting = gc.isenabled()
    gc.disable()  # collecting garbage at random moments would be charged to whoever is at work
    try:
        return _run(federation, workload, schedule, flushes, max_staleness, flush_after, on_flush)
    finally:
        if collecting:
            gc.enable()


def _run(
    federation: Federation,
    workload: Workload,
    schedule: Schedule,
    flushes: int,
    max_staleness: int,
    flush_after: float | None,
    on_flush: Callable[[Flush], None] | None,
) -> AsyncReport:
    report = AsyncReport()
    hashes = {federation.time: workload.model_hash}
    federation.publish(workload.model_hash)
    idle, flushed_at = 0, 0.0
    while report.recovered < flushes:
        event = schedule.next(federation.time)
        done: list[Flush] = []
        match event:
            case Left(client):
                report.departures += 1
                done = federation.leave(client)
            case Returned(client):
                done = federation.rejoin(client)
            case Finished(client, version) if version < federation.time - max_staleness:
                report.too_stale += 1
            case Finished(client) if not federation.ready(client):
                report.held_back += 1
            case Finished(client, version):
                vector = workload.update(client, version, report.uploads)
                report.uploads += 1
                done = federation.upload(client, vector, version, hashes[version])
        now = schedule.clock
        impatient = flush_after is not None and (now or 0.0) - flushed_at > flush_after
        if impatient and not done:
            done = federation.flush()
        for flush in done:
            workload.advance(flush.mean)
            hashes[flush.time + 1] = workload.model_hash
            flushed_at = now or 0.0
            report.flushes.append(replace(flush, mean=None))
            if on_flush is not None:
                on_flush(flush)
        if done:
            federation.publish(workload.model_hash)
            hashes = {v: h for v, h in hashes.items() if v >= federation.time - max_staleness}
        idle = 0 if any(flush.lost is None for flush in done) else idle + 1
        if idle > _PATIENCE:
            raise Aborted(
                f"no buffer was recovered during {idle} events: too many clients are away or too "
                "slow; lower K, U or the dropout rate, or raise tau_max"
            )
    report.clock = schedule.clock
    return report


_PATIENCE = 100_000
