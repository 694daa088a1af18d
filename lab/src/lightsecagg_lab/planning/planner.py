"""The planner: what a federation will cost with each protocol, which U to take, and what to mind.

A larger U makes shares shorter (L = d / (U - T)) and, in seeded mode, leaves fewer of them to send
(N - U), so that it is faster on every link; a smaller U leaves spare answers, with which lies are
detected (one spare) or named (two per liar). The planner takes the fastest U of those that leave
room for the liars one asks for: U <= N - D - 2 E.

Short keys make shares short for every U. Of them the planner takes the smallest U that is about as
fast as any, and never recommends them by itself: they are experimental, and clients must name them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from lightsecagg.errors import ParameterError
from lightsecagg.masks.short_keys import ASSUMPTION, RING_DIMENSION
from lightsecagg.params import (
    DEFAULT_MODULUS,
    Parameters,
    ShareMode,
    ThreatModel,
    check_integer,
)
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.policy import GRAPH_SECURITY
from lightsecagg.protocol.quantizers import decoding_of, make_quantizer
from lightsecagg.protocol.schemes.traits import Traits, traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.planning.memory import PhaseMemory, forecast_memory
from lightsecagg_lab.planning.network import Network
from lightsecagg_lab.planning.timeline import PhaseTimes, round_seconds
from lightsecagg_lab.planning.traffic import (
    PhaseTraffic,
    forecast_traffic,
    in_units,
    share_counts,
)
from lightsecagg_lab.planning.unit_costs import STATED, UnitCosts, describe
from lightsecagg_lab.planning.work import PhaseWork, forecast_work
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.baselines import all_traits

SEEDED, PAPER = "lightsecagg-seeded", "lightsecagg-paper"
SHORT_KEY = "lightsecagg-short-key"
"""LightSecAgg in its share modes, as the plan names them."""

_LARGE_SHARES = 4.0
"""Warn when a client's offline upload exceeds so many times its update."""
_LARGE_MEMORY = 2 * 10**9
_AS_FAST = 1.02
"""Short keys: rounds this close to the fastest do not speak for a larger U."""


@dataclass(frozen=True, slots=True)
class Federation:
    """What a user knows before the first round."""

    clients: int
    """N"""
    privacy: int
    """T"""
    dropouts: int
    """D"""
    dimension: int
    """d"""
    network: Network = field(default_factory=Network)
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    training_seconds: float = 0.0
    overlap: bool = True
    liars: int = 0
    """E: wrong answers that the server shall be able to name."""
    survivors: int = 0
    """U of the forecast, if it shall not be the recommended one."""
    modulus: int = DEFAULT_MODULUS
    server_cores: int = 1
    """That share what the server does column by column."""

    def __post_init__(self) -> None:
        check_integer("dimension d", self.dimension, 1)
        check_integer("server cores", self.server_cores, 1)
        check_integer("liars E", self.liars, 0)
        if not 0 <= self.training_seconds < float("inf"):
            raise ParameterError(
                f"training seconds = {self.training_seconds} must be a number, at least 0"
            )
        N, T, D, E = self.clients, self.privacy, self.dropouts, self.liars
        if E and N - D - 2 * E <= T < N - D:
            raise ParameterError(
                f"naming E = {E} liars takes N - D - 2E > T, but N = {N}, T = {T}, D = {D}: "
                f"{N - D - 2 * E} <= {T}; lower E, T or D"
            )
        parameters = self.parameters()
        if self.liars and parameters.survivors > self.clients - self.dropouts - 2 * self.liars:
            raise ParameterError(
                f"naming E = {self.liars} liars takes U <= N - D - 2E = "
                f"{self.clients - self.dropouts - 2 * self.liars}, and U > T = {self.privacy}"
            )

    def parameters(self, survivors: int = 0, mode: ShareMode = ShareMode.SEEDED) -> Parameters:
        """LightSecAgg's parameters, with the given U, the federation's own, or the largest."""
        largest = self.clients - self.dropouts - 2 * self.liars
        return Parameters(
            clients=self.clients,
            privacy=self.privacy,
            dropouts=self.dropouts,
            survivors=survivors or self.survivors or largest,
            threat_model=self.threat_model,
            share_mode=mode,
            modulus=self.modulus,
        )


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """One phase of one protocol."""

    traffic: PhaseTraffic
    work: PhaseWork
    memory: PhaseMemory
    times: PhaseTimes
    server_bytes: int

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "client_upload_bytes": self.traffic.client_upload,
            "client_download_bytes": self.traffic.client_download,
            "client_seconds": self.times.client,
            "server_seconds": self.times.server,
            "storing_seconds": self.times.storing,
            "server_bytes": self.server_bytes,
            "link_seconds": self.times.link,
            "client_memory_bytes": self.memory.client,
            "server_memory_bytes": self.memory.server,
            "memory_bytes": max(self.memory.client, self.memory.server),
        }


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs with one protocol."""

    settings: Settings
    phases: dict[Phase, PhaseCost]
    round_seconds: float

    @property
    def client_upload(self) -> int:
        """All that a client sends in a round."""
        return sum(phase.traffic.client_upload for phase in self.phases.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """The forecast for a federation."""

    federation: Federation
    recommended_survivors: int
    """The best U; the forecasts are for the federation's own if it names one."""
    reason: str
    """Why this U."""
    short_key_survivors: int
    """The best U for short keys."""
    warnings: tuple[str, ...]
    protocols: dict[str, Costs]
    unit_costs: UnitCosts

    def document(self) -> dict[str, Any]:
        """What `lightsecagg plan --json` prints."""
        federation, network = self.federation, self.federation.network
        return {
            "recommended_survivors": self.recommended_survivors,
            "reason": self.reason,
            "recommended_survivors_short_key": self.short_key_survivors,
            "short_key_assumption": ASSUMPTION,
            "warnings": list(self.warnings),
            "settings": {
                "clients": federation.clients,
                "privacy": federation.privacy,
                "dropouts": federation.dropouts,
                "dim": federation.dimension,
                "threat_model": federation.threat_model.value,
                "bandwidth_mbps": network.bandwidth,
                "server_bandwidth_mbps": network.server_bandwidth,
                "latency_ms": network.latency,
                "topology": network.topology.value,
                "training_seconds": federation.training_seconds,
                "overlap": federation.overlap,
                "liars": federation.liars,
            },
            "protocols": {
                name: {phase.value: cost.document() for phase, cost in costs.phases.items()}
                for name, costs in self.protocols.items()
            },
            "round_seconds": {name: costs.round_seconds for name, costs in self.protocols.items()},
            "unit_costs": describe(self.unit_costs),
        }


def plan(federation: Federation, costs: UnitCosts = STATED) -> Plan:
    """Forecast a round of every protocol, with the best U for LightSecAgg.

    - `costs`: those that `simulation.calibration` measures here; otherwise the stated ones.
    """
    recommended, reason = recommend_survivors(federation, costs)
    small = recommend_short_key_survivors(federation, costs)
    protocols = {
        _name(traits, mode): _cost(
            federation,
            round_settings(
                federation,
                traits.name,
                federation.survivors or (small if mode is ShareMode.SHORT_KEY else recommended),
                mode,
            ),
            costs,
        )
        for traits in all_traits()
        if federation.threat_model in traits.threat_models
        for mode in traits.share_modes or (ShareMode.SEEDED,)
        if mode is not ShareMode.SHORT_KEY or federation.modulus == DEFAULT_MODULUS
    }
    survivors = federation.survivors or recommended
    warnings = tuple(_warnings(federation, survivors, protocols))
    return Plan(federation, recommended, reason, small, warnings, protocols, costs)


def recommend_survivors(federation: Federation, costs: UnitCosts = STATED) -> tuple[int, str]:
    """The U with the shortest forecast round in seeded mode, and why."""
    federation = replace(federation, survivors=0)
    largest = federation.parameters().survivors
    smallest = federation.privacy + 1
    seconds = {
        U: _cost(
            federation, round_settings(federation, ProtocolName.LIGHTSECAGG, U), costs
        ).round_seconds
        for U in _candidates(smallest, largest)
    }
    best = min(seconds, key=lambda U: (seconds[U], -U))
    bound = "N - D" if not federation.liars else f"N - D - 2E, to name E = {federation.liars} liars"
    if best == largest:
        why = (
            f"U = {best} = {bound}: shares have d / (U - T) elements and N - U of them are sent in "
            "full, so the largest U is the fastest"
        )
    else:
        why = (
            f"U = {best} is the fastest; the largest possible, {bound} = {largest}, takes "
            f"{seconds[largest]:.2f} s instead of {seconds[best]:.2f} s"
        )
    if not federation.liars:
        why += "; there are no spare answers to catch a lie with (--liars)"
    return best, why


def recommend_short_key_survivors(federation: Federation, costs: UnitCosts = STATED) -> int:
    """The smallest U that is about as fast as the fastest: a small one leaves spare answers.

    Keys are cut into two pieces at least: of one piece, T + 1 shares would be the key.
    """
    federation = replace(federation, survivors=0, modulus=DEFAULT_MODULUS)
    largest = federation.parameters().survivors
    smallest = min(federation.privacy + 2, largest)
    mode = ShareMode.SHORT_KEY
    seconds = {
        U: _cost(
            federation, round_settings(federation, ProtocolName.LIGHTSECAGG, U, mode), costs
        ).round_seconds
        for U in _candidates(smallest, largest)
    }
    return min(U for U in seconds if seconds[U] <= _AS_FAST * min(seconds.values()))


def _candidates(smallest: int, largest: int) -> list[int]:
    """Every U if there are few, else a hundred of them; the largest always."""
    step = max(1, (largest - smallest) // 100)
    return sorted({*range(smallest, largest, step), largest})


def _name(traits: Traits, mode: ShareMode) -> str:
    return f"{traits.name}-{mode}" if traits.share_modes else str(traits.name)


def round_settings(
    federation: Federation,
    protocol: str,
    survivors: int = 0,
    mode: ShareMode = ShareMode.SEEDED,
    graph: tuple[int, int] = (0, 0),
) -> Settings:
    """A round with this U, or with the parameters that the protocol has instead.

    * `graph`: SecAgg+'s k and t, if they shall not be the finder's.
    """
    traits = traits_of(protocol)
    parameters = federation.parameters(survivors, mode)
    parameters, neighbours, threshold = traits.resolve(parameters, *graph)
    return Settings(
        protocol=traits.name,
        parameters=parameters,
        quantizer=make_quantizer(
            parameters, federation.dimension, 1.0, group=traits.group(parameters)
        ),
        dimension=federation.dimension,
        session=bytes(32),
        round=1,
        allow_list=bytes(32),
        model=bytes(32),
        neighbours=neighbours,
        threshold=threshold,
    )


def _cost(federation: Federation, settings: Settings, costs: UnitCosts) -> Costs:
    # The clients with the smallest ids drop: then the lists of survivors are longest.
    return round_costs(federation, settings, range(federation.dropouts), costs)


def round_costs(
    federation: Federation, settings: Settings, dropped: Collection[int], costs: UnitCosts
) -> Costs:
    """The costs of one round in which the clients `dropped` vanish after sharing."""
    network = federation.network
    traffic = forecast_traffic(settings, dropped)
    one_core = forecast_work(settings, len(dropped), costs)
    work = {phase: each.on(federation.server_cores) for phase, each in one_core.items()}
    memory = forecast_memory(settings, traffic, federation.clients - len(dropped))
    times = network.round(traffic, work)
    phases = {
        phase: PhaseCost(
            traffic=traffic[phase],
            work=work[phase],
            memory=memory[phase],
            times=times[phase],
            server_bytes=traffic[phase].server_bytes(network.relays),
        )
        for phase in traffic
    }
    total = round_seconds(times, federation.training_seconds, federation.overlap)
    return Costs(settings, phases, total)


def _warnings(federation: Federation, survivors: int, protocols: dict[str, Costs]) -> list[str]:
    N, T, D = federation.clients, federation.privacy, federation.dropouts
    said = []
    if federation.threat_model is ThreatModel.MALICIOUS_SERVER:
        said += [
            f"{traits.name} is left out: it has no malicious-server mode"
            for traits in all_traits()
            if traits.weakness and traits.protected
        ]
    elif T + 2 * D >= N:
        said.append(
            f"malicious-server mode is infeasible for these T and D: it needs T + 2D < N, but "
            f"{T} + {2 * D} >= {N}"
        )
    for name, costs in protocols.items():
        shares, model = share_counts(costs.settings), 4 * costs.settings.length
        if costs.settings.has_short_keys:
            said.append(f"{name}: {_about_short_keys(costs.settings)}")
        elif shares.bytes > _LARGE_SHARES * model:
            said.append(
                f"{name}: with U = {survivors} and T = {T} every explicit share has "
                f"{in_units(shares.explicit_bytes)}, and a client sends {in_units(shares.bytes)} "
                f"of shares, {shares.bytes / model:.0f} times its update; raise U or lower T"
            )
    if survivors == T + 1:
        said.append("U = T + 1 makes every explicit share as long as the model")
    for name, costs in protocols.items():
        most = max(cost.memory.client for cost in costs.phases.values())
        if most > _LARGE_MEMORY:
            said.append(f"{name}: a client needs {most / 1e9:.1f} GB of memory")
    said += [
        _about_graph(costs.settings) for costs in protocols.values() if costs.settings.traits.ring
    ]
    return said


def _about_short_keys(settings: Settings) -> str:
    U, d = settings.parameters.survivors, settings.dimension
    pays = "" if d > RING_DIMENSION else f"; for d = {d} a key is no shorter than a mask"
    return (
        f"{ASSUMPTION}; forecast with U = {U} and {decoding_of(settings.quantizer)} decoding{pays}"
    )


def _about_graph(settings: Settings) -> str:
    parameters, k, t = settings.parameters, settings.neighbours, settings.sharing_threshold
    N, T, D = parameters.clients, parameters.privacy, parameters.dropouts
    leak = settings.traits.leak(settings, N)
    if k == N - 1:
        return (
            f"secagg+: no sparse graph is safe for N = {N}, T = {T}, D = {D}; it is SecAgg's "
            f"complete graph, k = {k}, t = {t}"
        )
    if not leak:
        return f"secagg+: k = {k} and t = {t} protect all clients, whatever the random graph"
    return (
        f"secagg+: with k = {k} and t = {t} a client is left unprotected with a probability of up "
        f"to {float(leak):.1g} (allowed: 2^-{GRAPH_SECURITY}), and "
        "the sum is lost with less than 2^-30"
    )
