"""From a measured round to its length on given links, phase by phase as the paper counts them.

offline     advertise + share
training    beside the offline phase, or after it
uploading   the upload phase: masking, the links, summing at the server
recovery    agree + recover
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightsecagg.experiments.cells import Document
from lightsecagg.planning import Network
from lightsecagg.planning.timeline import OFFLINE, PhaseTimes, round_seconds
from lightsecagg.planning.traffic import PhaseTraffic
from lightsecagg.planning.work import PhaseWork
from lightsecagg.protocol.interface import Phase

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

    def breakdown(self) -> dict[str, float]:
        """For tables and JSON."""
        return {
            "offline": self.offline,
            "training": self.training,
            "uploading": self.uploading,
            "recovery": self.recovery,
            "server_recovery": self.server_recovery,
            "total": self.total(overlap=False),
            "overlapped": self.total(overlap=True),
        }

    def _total(self, wanted: tuple[Phase, ...]) -> float:
        return sum(parts.total for phase, parts in self.phases.items() if phase in wanted)


def round_times(document: Document, network: Network, training: float) -> RoundTimes:
    """How long the measured round takes on these links."""
    phases = {
        Phase(name): network.phase(_traffic(figures), _work(figures))
        for name, figures in document["phases"].items()
    }
    return RoundTimes(phases, training)


def _traffic(figures: dict[str, float]) -> PhaseTraffic:
    return PhaseTraffic(**{item.name: int(figures[item.name]) for item in fields(PhaseTraffic)})


def _work(figures: dict[str, float]) -> PhaseWork:
    return PhaseWork(
        client=figures["client_seconds"],
        server=figures["server_seconds"],
        server_relaying=figures["server_relay_seconds"],
    )


def client_upload(document: Document) -> int:
    """All that the busiest client sends in a round."""
    return int(sum(p["client_sent"] + p["client_shares_sent"] for p in document["phases"].values()))


def client_download(document: Document) -> int:
    """All that the busiest client receives in a round."""
    return int(
        sum(p["client_received"] + p["client_shares_received"] for p in document["phases"].values())
    )
