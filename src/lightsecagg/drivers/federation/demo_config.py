"""What a demonstration on this machine is to show; see `demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightsecagg.drivers.federation.jobs import ClientJob
from lightsecagg.drivers.federation.tables import AggregationTable, ServerBufferingTable
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import Decoding, ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG
from lightsecagg.training.config import LocalConfig, TaskConfig

SERVER = -1
"""The server, among those who are killed."""
_MAX_SAMPLES = 10_000
_ENDLESS = 10**6


@dataclass(frozen=True, slots=True)
class Kill:
    """Who is killed from outside, and when."""

    victim: int
    """A client, or `SERVER`."""
    after: int
    """Not before so many sums are known,"""
    delay: float
    """and so many seconds have passed since then and since the kill before."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What to demonstrate.

    With `kills` it goes on until all of them have happened and been recovered from, however many
    sums that takes.
    """

    clients: int = 8
    privacy: int = 3
    dropouts: int = 2
    survivors: int = 0
    protocol: str = LIGHTSECAGG
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    share_mode: ShareMode = ShareMode.SEEDED
    decoding: Decoding | None = None
    rounds: int = 4
    """Or buffers."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """Its clients and seed are those of the demonstration."""
    local: LocalConfig = field(default_factory=LocalConfig)
    server_rate: float = 1.0
    """eta_g: stale updates overshoot with 1."""
    vectors: int | None = None
    """Entries of vectors, which `job` makes, to be summed instead of training a task."""
    job: Callable[[int], ClientJob] | None = None
    """Of a client; None: to train."""
    bound: float = 4.0
    overlap: str = "thread"
    """Where clients train while they share masks; `process` doubles the processes."""
    seed: int = 0
    """Steers data, training and who is killed when; never a mask."""
    dashboard_port: int | None = None
    """Where the server shows its rounds to browsers."""
    timeout: float = 600.0

    dropout: int = 2
    """How many clients are killed in the middle of a phase of each round, at most."""
    slow: int = 0
    """How many clients are stragglers: the last ones."""
    slowdown: float = 10.0
    """How many times as long they train."""
    least_training: float = 0.0
    """Seconds that no training is faster than."""
    kills: tuple[Kill, ...] = ()
    afterwards: int = 1
    """The fewest sums after the last kill."""
    patience: float = 120.0
    """With buffers or kills: seconds without a sum after which it hangs."""

    mode: Literal["sync", "async"] = "sync"
    buffer: int = 4
    """Asynchronous, as all below: K"""
    staleness: Staleness = Staleness.CONSTANT
    tau_max: int = 20
    least_staleness: int | None = 0
    """With kills: how stale an update of every straggler must have been; None: they need not be in
    a sum at all, as where T + 2 owners must share a model."""

    @property
    def number(self) -> int:
        """Rounds or buffers after which the server ends by itself."""
        return _ENDLESS if self.kills else self.rounds

    @property
    def stragglers(self) -> range:
        """The slow clients."""
        return range(self.clients - self.slow, self.clients)

    @property
    def own_task(self) -> TaskConfig:
        """The task, for these clients and this seed."""
        return replace(self.task, clients=self.clients, seed=self.seed)

    @property
    def aggregation(self) -> AggregationTable:
        """The protocol and its parameters, as the server has them."""
        return AggregationTable(
            mode=self.mode,
            protocol=self.protocol,
            threat_model=self.threat_model,
            clients=self.clients,
            privacy=self.privacy,
            dropouts=self.dropouts,
            survivors=self.survivors,
            share_mode=self.share_mode,
            decoding=self.decoding,
            bound=self.bound,
            max_samples=_MAX_SAMPLES,
        )

    @property
    def buffering(self) -> ServerBufferingTable | None:
        """What server and clients agree on, and the server's deadlines; None for rounds."""
        if self.mode == "sync":
            return None
        return ServerBufferingTable(
            size=self.buffer,
            staleness=self.staleness,
            tau_max=self.tau_max,
            flush_after=10.0,
            reports=5.0,
            renew=2,
        )

    @property
    def provisioned(self) -> dict[str, Any]:
        """Arguments of `provision`."""
        if self.mode == "sync":
            return {"bound": self.bound, "vectors": self.vectors}
        return {
            "privacy": self.privacy,
            "dropouts": self.dropouts,
            "vectors": self.vectors,
            "weighted": self.vectors is not None,
            "bound": self.bound,
            "mode": self.mode,
            "buffer": self.buffer,
            "staleness": self.staleness,
        }
