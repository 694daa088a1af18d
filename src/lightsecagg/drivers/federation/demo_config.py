"""What a demonstration on this machine is to show; see `demo` and `epoch_demo`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightsecagg.drivers.federation.tables import AggregationTable
from lightsecagg.params import Decoding, ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import ProtocolName
from lightsecagg.training.config import LocalConfig, TaskConfig

_MAX_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What to demonstrate."""

    clients: int = 8
    privacy: int = 3
    dropouts: int = 2
    survivors: int = 0
    protocol: str = ProtocolName.LIGHTSECAGG
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    share_mode: ShareMode = ShareMode.SEEDED
    decoding: Decoding | None = None
    rounds: int = 4
    dropout: int = 2
    """How many clients are killed per round, at most."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """Its clients and seed are those of the demonstration."""
    local: LocalConfig = field(default_factory=LocalConfig)
    bound: float = 4.0
    overlap: str = "thread"
    """Where clients train while they share masks; `process` doubles the processes."""
    seed: int = 0
    """Steers data, training and who is killed when; never a mask."""
    dashboard_port: int | None = None
    """Where the server shows its rounds to browsers."""
    timeout: float = 600.0

    @property
    def own_task(self) -> TaskConfig:
        """The task, for these clients and this seed."""
        return replace(self.task, clients=self.clients, seed=self.seed)

    @property
    def aggregation(self) -> AggregationTable:
        """The protocol and its parameters, as the server has them."""
        return AggregationTable(
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
