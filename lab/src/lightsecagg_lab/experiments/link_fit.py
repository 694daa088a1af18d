"""The terms of the transport, fitted to measured rounds: least squares, no term below zero.

The forecast of a phase is a maximum of sums of terms, so it is linear in them wherever another
part does not become the longest; each step solves the linear problem of where it stands. Errors
count relative to the round that they belong to: what is to be right is the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning.network import Network
from lightsecagg_lab.planning.timeline import PhaseTimes
from lightsecagg_lab.planning.traffic import PhaseTraffic
from lightsecagg_lab.planning.transport_costs import STATED, TransportCosts
from lightsecagg_lab.planning.work import PhaseWork

TERMS: Final = tuple(
    name for name, value in asdict(STATED).items() if isinstance(value, float) and value
)
_STEPS, _SWEEPS, _NUDGE = 30, 300, 1e-4

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observed:
    """A measured round, and what the forecast of it is made from."""

    network: Network
    traffic: Mapping[Phase, PhaseTraffic]
    work: Mapping[Phase, PhaseWork]
    seconds: Mapping[Phase, float]
    """Of each phase, measured."""
    client_cpu: float
    """CPU seconds of a client, measured."""
    server_cpu: float
    """CPU seconds of the server, measured."""

    def times(self, costs: TransportCosts) -> dict[Phase, PhaseTimes]:
        """The forecast."""
        return replace(self.network, transport=costs).round(self.traffic, self.work)

    def total(self, costs: TransportCosts) -> float:
        """Of the round, without training."""
        return sum(parts.total for parts in self.times(costs).values())

    def client_seconds(self, costs: TransportCosts) -> float:
        """The forecast of `client_cpu`."""
        carried = sum(each.client_upload + each.client_download for each in self.traffic.values())
        messages = sum(each.client_messages for each in self.traffic.values())
        work = sum(each.client for each in self.work.values())
        return work + messages * costs.client_message + carried * costs.client_byte

    def server_seconds(self, costs: TransportCosts) -> float:
        """The forecast of `server_cpu`, if what is stored is computed with meanwhile."""
        times = self.times(costs).values()
        carried = sum(each.server_bytes() for each in self.traffic.values())
        messages = sum(each.clients * each.client_messages for each in self.traffic.values())
        work = sum(each.server + each.storing for each in times)
        return work + messages * costs.server_message + carried * costs.server_byte


def fit(rounds: Sequence[Observed], source: str) -> TransportCosts:
    """The costs that forecast these rounds best."""
    start = replace(STATED, source=source)
    scale = np.array([getattr(start, name) for name in TERMS])
    x = np.ones(len(TERMS))

    def errors(x: Vector) -> Vector:
        costs = _with_terms(start, x * scale)
        return np.concatenate([_errors(each, costs) for each in rounds])

    best, least = x, np.inf
    for _ in range(_STEPS):
        found = errors(x)
        if (total := float(found @ found)) < least:
            best, least = x, total
        slopes = _slopes(errors, x, found)
        # Half way to where the linear problem has its minimum: its edges are not crossed in leaps.
        x = (x + _nonnegative(slopes, slopes @ x - found)) / 2
    return _with_terms(start, best * scale)


def _with_terms(costs: TransportCosts, values: Vector) -> TransportCosts:
    terms: dict[str, Any] = dict(zip(TERMS, map(float, values), strict=True))
    return replace(costs, **terms)


def _errors(observed: Observed, costs: TransportCosts) -> Vector:
    times, whole = observed.times(costs), sum(observed.seconds.values())
    phases = [times[phase].total - seconds for phase, seconds in observed.seconds.items()]
    client = observed.client_seconds(costs) - observed.client_cpu
    server = observed.server_seconds(costs) - observed.server_cpu
    return np.array([sum(phases), *phases, client, server]) / whole


def _slopes(errors: Callable[[Vector], Vector], x: Vector, at: Vector) -> Vector:
    nudged = [errors(x + _NUDGE * unit) for unit in np.eye(len(x))]
    return np.column_stack([(each - at) / _NUDGE for each in nudged])


def _nonnegative(A: Vector, b: Vector) -> Vector:
    """The x >= 0 with the least |Ax - b|, coordinate by coordinate."""
    H, g = A.T @ A, A.T @ b
    x = np.zeros(len(g))
    for _ in range(_SWEEPS):
        for j in np.flatnonzero(np.diag(H)):
            x[j] = max(0.0, x[j] + (g[j] - H[j] @ x) / H[j, j])
    return x
