"""From a measured round to its length on given links, phase by phase as the paper counts them.

offline     advertise + share
training    beside the offline phase, or after it
uploading   the upload phase: masking, the links, summing at the server
recovery    agree + recover
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.experiments.cells import Document, Loads, warm_rounds
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.planning import Network
from lightsecagg_lab.planning.timeline import OFFLINE, PhaseTimes, round_seconds
from lightsecagg_lab.planning.traffic import PhaseTraffic
from lightsecagg_lab.planning.work import PhaseWork

_RECOVERY = (Phase.AGREE, Phase.RECOVER)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round on given links."""

    phases: dict[Phase, PhaseTimes]
    training: float

    @property
    def offline(self) -> float:
        """Advertise and share."""
        return self._total(OFFLINE)

    @property
    def uploading(self) -> float:
        """The upload phase."""
        return self._total((Phase.UPLOAD,))

    @property
    def recovery(self) -> float:
        """Agree and recover, links and clients included."""
        return self._total(_RECOVERY)

    @property
    def server_recovery(self) -> float:
        """What the server computes to recover the sum."""
        return sum(self.phases[phase].server for phase in _RECOVERY)

    def total(self, overlap: bool) -> float:
        """The round."""
        return round_seconds(self.phases, self.training, overlap)

    @property
    def aggregation(self) -> float:
        """The round without training: the paper's "aggregation-only"."""
        return self.offline + self.uploading + self.recovery

    def _total(self, wanted: tuple[Phase, ...]) -> float:
        return sum(parts.total for phase, parts in self.phases.items() if phase in wanted)


Figure = Callable[[RoundTimes], float]
"""A figure of a round."""


def total(overlap: bool) -> Figure:
    """The length of the round."""
    return lambda times: times.total(overlap)


PARTS: dict[str, Figure] = {
    "offline": lambda times: times.offline,
    "training": lambda times: times.training,
    "uploading": lambda times: times.uploading,
    "recovery": lambda times: times.recovery,
    "server_recovery": lambda times: times.server_recovery,
    "total": total(overlap=False),
    "overlapped": total(overlap=True),
}
"""What a round is broken down to, for tables and JSON."""


@dataclass(frozen=True, slots=True)
class TimedRounds:
    """The rounds of a cell on given links, each beside each of the measured trainings."""

    warm: tuple[dict[Phase, PhaseTimes], ...]
    cold_phases: dict[Phase, PhaseTimes]
    """Of the first round of its process."""
    trainings: tuple[float, ...]

    @property
    def training(self) -> float:
        """The median."""
        return statistics.median(self.trainings)

    @property
    def cold(self) -> RoundTimes:
        """The first round of its process, beside the median training."""
        return RoundTimes(self.cold_phases, self.training)

    def steady(self) -> TimedRounds:
        """All beside the median training, which is to be the same when protocols are compared."""
        return replace(self, trainings=(self.training,))

    def spread(self, of: Figure) -> Spread:
        """What this figure of a round comes to."""
        return Spread.of(of(RoundTimes(*each)) for each in product(self.warm, self.trainings))

    def over(self, other: TimedRounds, of: Figure) -> Spread:
        """How many times as much it is as with another protocol."""
        return self.steady().spread(of) / other.steady().spread(of)

    def total(self, overlap: bool) -> Spread:
        """The round."""
        return self.spread(total(overlap))

    def breakdown(self) -> dict[str, Spread]:
        """All of `PARTS`."""
        return {name: self.spread(of) for name, of in PARTS.items()}

    def median_phases(self) -> dict[Phase, PhaseTimes]:
        """A round of which every part takes its median."""
        return {
            phase: PhaseTimes(
                **{
                    part.name: statistics.median(
                        getattr(phases[phase], part.name) for phases in self.warm
                    )
                    for part in fields(PhaseTimes)
                }
            )
            for phase in self.cold_phases
        }


def timed_rounds(
    document: Document, network: Network, trainings: Sequence[float], server_cores: int = 1
) -> TimedRounds:
    """How long the measured rounds of a cell take on these links, with so many cores."""
    return TimedRounds(
        tuple(_phases(loads, network, server_cores) for loads in warm_rounds(document)),
        _phases(document["cold"], network, server_cores),
        tuple(trainings),
    )


def _phases(loads: Loads, network: Network, server_cores: int) -> dict[Phase, PhaseTimes]:
    return network.round(
        {Phase(name): _traffic(figures) for name, figures in loads.items()},
        {Phase(name): _work(figures).on(server_cores) for name, figures in loads.items()},
    )


def _traffic(figures: dict[str, float]) -> PhaseTraffic:
    return PhaseTraffic(**{item.name: int(figures[item.name]) for item in fields(PhaseTraffic)})


def _work(figures: dict[str, float]) -> PhaseWork:
    return PhaseWork(
        client=figures["client_seconds"],
        server=figures["server_seconds"],
        server_relaying=figures["server_relay_seconds"],
        server_spread=figures["server_spread_seconds"],
    )


def client_upload(document: Document) -> Spread:
    """All that the busiest client sends in a round."""
    return _bytes(document, "client_sent", "client_shares_sent")


def client_download(document: Document) -> Spread:
    """All that the busiest client receives in a round."""
    return _bytes(document, "client_received", "client_shares_received")


def _bytes(document: Document, *names: str) -> Spread:
    return Spread.of(
        sum(phase[name] for phase in loads.values() for name in names)
        for loads in warm_rounds(document)
    )
