"""From what a user asks for to rounds and their report: what `lightsecagg simulate` runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from lightsecagg.drivers.cohort import Cohort, describe_leak
from lightsecagg.drivers.footprint import check_memory
from lightsecagg.errors import ParameterError
from lightsecagg.field import kernels
from lightsecagg.field.quantization import clip_to_bound
from lightsecagg.masks.short_keys import ASSUMPTION
from lightsecagg.params import Decoding, Parameters, ShareMode, check_integer
from lightsecagg.protocol.interface import Phase, Update
from lightsecagg.protocol.policy import GRAPH_SECURITY
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import Resolved, Traits, traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.planning.network import Network
from lightsecagg_lab.planning.timeline import PhaseTimes, round_seconds, timeline
from lightsecagg_lab.planning.transport_costs import FREE
from lightsecagg_lab.simulation.faults import Drop, choose_faults
from lightsecagg_lab.simulation.metering import PhaseLoads
from lightsecagg_lab.simulation.synchronous import Progress, RoundReport, simulate_round


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a simulation, except the masks."""

    protocol: str
    parameters: Parameters
    """As for LightSecAgg; `resolved` translates them for the other protocols."""
    dimension: int
    bound: float = 1.0
    """The quantiser's; the simulated inputs are uniform in [-1, 1)."""
    clip: bool = False
    """Clip inputs to the bound instead of refusing them."""
    neighbours: int = 0
    """SecAgg+: k; 0 for the finder's."""
    threshold: int = 0
    """SecAgg and SecAgg+: t; 0 for the smallest allowed, or the finder's."""
    drops: tuple[Drop, ...] = ()
    network: Network = field(default_factory=lambda: Network(latency=0.0, transport=FREE))
    """Without latency and transport unless they are asked for: what was measured takes time."""
    training_seconds: float = 0.0
    overlap: bool = True
    seed: int = 0
    """Steers inputs and the choice of who drops, and nothing else."""
    sample_clients: int | None = None
    """How many clients are real, if not all are; see `sampling`."""
    server_cores: int = 1
    """Threads that run the server's jobs, and cores of the server whose seconds are told."""
    decoding: Decoding | None = None
    """Short keys: what becomes of the noise; None for the finest rounding that makes sense."""

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, 0)
        check_integer("dimension d", self.dimension, 1)
        check_integer("server cores", self.server_cores, 1)
        if not 0 <= self.training_seconds < float("inf"):
            raise ParameterError(
                f"training seconds = {self.training_seconds} must be a number, at least 0"
            )
        self.traits.check_wishes(self.neighbours, self.threshold)
        if self.traits.ring and bool(self.neighbours) != bool(self.threshold):
            raise ParameterError(
                f"{self.protocol} takes neighbours and a threshold together, or neither"
            )

    @property
    def traits(self) -> Traits:
        """What the protocol is."""
        return traits_of(self.protocol)

    def cohort(self) -> Cohort:
        """The clients of this scenario."""
        parameters, neighbours, threshold = self.resolved()
        quantizer = make_quantizer(
            parameters,
            self.dimension,
            self.bound,
            decoding=self._decoding(),
            group=self.traits.group(parameters),
        )
        return Cohort(
            self.protocol,
            parameters,
            quantizer,
            self.dimension,
            neighbours,
            threshold,
            graph_security=0 if self.insecurity else GRAPH_SECURITY,
        )

    def _decoding(self) -> Decoding | None:
        """Stand-ins upload what no key belongs to: exact decoding would notice."""
        if self.sample_clients is None or self.parameters.share_mode is not ShareMode.SHORT_KEY:
            return self.decoding
        if self.decoding is Decoding.EXACT:
            raise ParameterError(
                "sampled clients upload random vectors, which exact decoding refuses; take "
                "dithered decoding, or let all clients be real"
            )
        return Decoding.DITHERED

    def resolved(self) -> Resolved:
        """The parameters that this protocol knows: of SecAgg, the threshold t instead of U."""
        return self.traits.resolve(self.parameters, self.neighbours, self.threshold)

    @property
    def insecurity(self) -> str:
        """Why real clients would refuse these parameters; empty if they would not."""
        return describe_leak(self.traits, self.resolved())

    def warnings(self) -> list[str]:
        """What must be said beside every figure of this scenario."""
        exposed = "" if self.traits.protected else "no protection: the server sees every update"
        assumed = ASSUMPTION if self.parameters.share_mode is ShareMode.SHORT_KEY else ""
        return [said for said in (exposed, self.insecurity, assumed) if said]

    def input(self, round_: int, client: int) -> Update:
        """A client's update: uniform in [-1, 1), the same whenever it is asked for."""
        generator = np.random.default_rng((self.seed, round_, client))
        vector = 2 * generator.random(self.dimension, dtype=np.float32) - 1
        return Update(clip_to_bound(vector, self.bound) if self.clip else vector)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated round, its report and its document."""

    scenario: Scenario
    report: RoundReport

    @property
    def times(self) -> dict[Phase, PhaseTimes]:
        """How long each phase takes on the scenario's links."""
        network, phases = self.scenario.network, self.report.meter.phases
        cores = self.scenario.server_cores
        return network.round(
            {phase: loads.traffic for phase, loads in phases.items()},
            {phase: loads.work.on(cores) for phase, loads in phases.items()},
        )

    def round_seconds(self, overlap: bool) -> float:
        """The length of the round, training included."""
        return round_seconds(self.times, self.scenario.training_seconds, overlap)

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        report, scenario = self.report, self.scenario
        aggregate = report.aggregate
        spans = timeline(self.times, scenario.training_seconds, scenario.overlap)
        return {
            "protocol": str(scenario.protocol),
            "parameters": _parameters(scenario, report.settings),
            "round": report.settings.round,
            "exact": report.exact,
            "largest_error": report.largest_error,
            "included": 0 if aggregate is None else len(aggregate.included),
            "responders": 0 if aggregate is None else len(aggregate.responders),
            "aborted": report.aborted,
            "warnings": scenario.warnings(),
            "phases": {
                phase.value: _phase(loads, self.times[phase], scenario.network.relays)
                for phase, loads in report.meter.phases.items()
            },
            "round_seconds": self.round_seconds(scenario.overlap),
            "timeline": [
                {"party": span.party, "phase": span.phase, "start": span.start, "end": span.end}
                for span in spans
            ],
        }


def run(scenario: Scenario, rounds: int = 1, progress: Progress | None = None) -> Iterator[Outcome]:
    """Simulate `rounds` rounds of the same clients, one after the other."""
    check_integer("rounds", rounds, 1)
    cohort = scenario.cohort()
    check_memory(cohort.settings(), scenario.sample_clients)
    threat_model = scenario.parameters.threat_model
    # Real clients are few, and are to be measured in every phase.
    droppable = cohort.clients[scenario.sample_clients or 0 :]
    _warm_up(scenario)
    for round_ in range(rounds):
        generator = np.random.default_rng((scenario.seed, round_))
        faults = choose_faults(droppable, scenario.drops, threat_model, generator)
        report = simulate_round(
            cohort,
            partial(scenario.input, round_),
            faults,
            sample=scenario.sample_clients,
            progress=progress,
            server_cores=scenario.server_cores,
        )
        yield Outcome(scenario, report)


def _warm_up(scenario: Scenario) -> None:
    """Load what is loaded at first use, so that the first client is not charged for it."""
    modulus = scenario.parameters.modulus
    mode = scenario.parameters.share_mode
    small = scenario.traits.resolve(Parameters(4, 1, 1, 2, share_mode=mode, modulus=modulus))
    quantizer = make_quantizer(
        small.parameters, 64, 1.0, group=scenario.traits.group(small.parameters)
    )
    cohort = Cohort(
        scenario.protocol, small.parameters, quantizer, 64, small.neighbours, small.threshold
    )
    simulate_round(cohort, lambda client: Update(np.full(64, client / 4)))


def _parameters(scenario: Scenario, settings: Settings) -> dict[str, Any]:
    parameters, network = settings.parameters, scenario.network
    document: dict[str, Any] = {
        "clients": parameters.clients,
        "privacy": parameters.privacy,
        "dropouts": parameters.dropouts,
        "dim": settings.dimension,
        "threat_model": parameters.threat_model.value,
        "modulus": parameters.modulus,
        "bound": settings.quantizer.bound,
        "clip": scenario.clip,
        "scale": settings.quantizer.scale,
    }
    return (
        document
        | settings.traits.describe(settings)
        | {
            "drop": [str(drop) for drop in scenario.drops],
            "bandwidth_mbps": network.bandwidth,
            "server_bandwidth_mbps": network.server_bandwidth,
            "server_cores": scenario.server_cores,
            "latency_ms": network.latency,
            "topology": network.topology.value,
            "training_seconds": scenario.training_seconds,
            "overlap": scenario.overlap,
            "seed": scenario.seed,
            "sample_clients": scenario.sample_clients,
            "kernels": kernels.backend(),
        }
    )


def _phase(loads: PhaseLoads, times: PhaseTimes, relayed: bool) -> dict[str, Any]:
    """The slowest client's and the server's figures of one phase."""
    clients = loads.clients.values()
    return {
        "client_seconds": times.client,
        "server_seconds": times.server,
        "server_cpu_seconds": loads.server.seconds,
        "server_spread_cpu_seconds": loads.server.spread_seconds,
        "server_spread_wall_seconds": loads.server.spread_wall_seconds,
        "client_upload_bytes": max((c.sent + c.shares_sent for c in clients), default=0),
        "client_download_bytes": max((c.received + c.shares_received for c in clients), default=0),
        "server_bytes": loads.traffic.server_bytes(relayed),
        "link_seconds": times.link,
    }
