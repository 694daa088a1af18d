"""The report of one round: phases, bytes, dropouts; never a secret (S22)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from lightsecagg.protocol.interface import Aggregate, BufferAggregate, BufferFailed, RoundAborted

_RANGES = 12


@dataclass(slots=True)
class PhaseRecord:
    """One phase of one round, as the server saw it."""

    start: float
    """Seconds since the epoch: a stamp, which jumps with the clock of the machine."""
    seconds: float = 0.0
    """How long it took, by a clock that does not jump."""
    bytes_in: int = 0
    bytes_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"end": self.start + self.seconds}


@dataclass(frozen=True, slots=True)
class MetricMean:
    """What the clients measured on their own data, on average over all that are included."""

    mean: float
    """Weighted by sample counts."""
    error: float
    """How far rounding may have moved it."""


@dataclass(slots=True)
class RoundRecord:
    """One round, as the server saw it."""

    round: int
    protocol: str
    invited: list[int]
    included: list[int] = field(default_factory=list)
    responders: list[int] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    accused: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (owner, holder): what the one shared and what the other reported do not agree."""
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """Phase -> clients that were given up in it."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Why messages were refused, and how often."""
    withdrawn: dict[str, list[int]] = field(default_factory=dict)
    """Why clients sat the round out, in their own words -> who did."""
    late: dict[str, int] = field(default_factory=dict)
    aborted: str | None = None
    spoilt: bool = False
    """Aborted because of its sum, which was recovered and cannot be used."""
    resumed: bool = False
    recalled: bool = False
    """Made from the journal, after a crash: who was included and the outcome are all it tells."""
    phases: dict[str, PhaseRecord] = field(default_factory=dict)
    samples: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    """The server's own evaluation of the model after this round."""
    metrics: dict[str, MetricMean] = field(default_factory=dict)
    """The clients' evaluation of the model before it."""
    local: dict[str, int | float | str] = field(default_factory=dict)
    """Settings of local training that the clients were told."""
    stopped: str | None = None
    """Why no round follows, if it was stopped early."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Asynchronous: by how many versions an update was behind -> how many were."""
    quantisation_step: float = 0.0
    """1 / c_l: the rounding error of one weighted entry is below it."""
    noise: int = 0
    """Steps by which an entry of a dithered sum may be off, beside the rounding."""
    epoch: int = 0
    """Asynchronous: the roster that a buffer belongs to; `round` then counts buffers, from 1."""
    versions: list[int] = field(default_factory=list)
    """Asynchronous: t_i, of the model that each that is included was trained from."""
    weights: list[int] = field(default_factory=list)
    """Asynchronous: by how much each that is included counts."""

    def note(self, result: Aggregate | RoundAborted | BufferAggregate | BufferFailed) -> None:
        """The outcome, as the party sees it."""
        self.suspects, self.accused = list(result.suspects), list(result.accused)
        if isinstance(result, RoundAborted | BufferFailed):
            self.aborted = result.reason
            return
        self.responders = list(result.responders)
        if isinstance(result, Aggregate):
            self.included = list(result.included)
            return
        self.included, self.weights = list(result.owners), list(result.weights)
        self.versions = [result.time - tau for tau in result.staleness]
        self.staleness = dict(sorted(Counter(result.staleness).items()))

    @property
    def seconds(self) -> float:
        """How long the round took: its phases follow each other."""
        return sum(phase.seconds for phase in self.phases.values())

    def all_figures(self) -> dict[str, float]:
        """Figures by their full names: `clients.` and its own for what the clients measured."""
        measured = {f"clients.{name}": metric.mean for name, metric in self.metrics.items()}
        return self.figures | measured

    def told_figures(self) -> list[str]:
        """Figures by their own names; the clients' are those of the model before the round."""
        measured = [
            f"clients' {name} {metric.mean:.4g} before training"
            for name, metric in self.metrics.items()
        ]
        return [f"{name} {value:.4g}" for name, value in self.figures.items()] + measured

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        phases = {name: phase.to_json() for name, phase in self.phases.items()}
        return asdict(self) | {"phases": phases, "seconds": self.seconds}


def listed(clients: Iterable[int]) -> str:
    """Ids for a log line, neighbours as ranges: `0-3, 7`; of many ranges the first few."""
    ranges: list[list[int]] = []
    for client in sorted(clients):
        if ranges and ranges[-1][-1] == client - 1:
            ranges[-1][1:] = [client]
        else:
            ranges.append([client])
    more = ", ..." if len(ranges) > _RANGES else ""
    return ", ".join("-".join(map(str, each)) for each in ranges[:_RANGES]) + more
