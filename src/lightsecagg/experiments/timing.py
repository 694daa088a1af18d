"""From a measured round to its length on given links, phase by phase as the paper counts them.

offline     advertise + share
training    beside the offline phase, or after it
uploading   the upload phase: masking, the links, summing at the server
recovery    agree + recover
"""

from __future__ import annotations

from dataclasses import dataclass

from lightsecagg.drivers.simulation.links import Links, PhaseTimes
from lightsecagg.drivers.simulation.metering import Load, PhaseLoads
from lightsecagg.experiments.cells import Document
from lightsecagg.protocol.interface import Phase

_OFFLINE = (Phase.ADVERTISE, Phase.SHARE)
_RECOVERY = (Phase.AGREE, Phase.RECOVER)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round on given links."""

    phases: dict[Phase, PhaseTimes]
    training: float

    @property
    def offline(self) -> float:
        """Advertise and share."""
        return self._total(_OFFLINE)

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
        beside = max(self.offline, self.training) if overlap else self.offline + self.training
        return beside + self.uploading + self.recovery

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
        return sum(
            parts.down + parts.client + parts.up + parts.server
            for phase, parts in self.phases.items()
            if phase in wanted
        )


def round_times(document: Document, links: Links, training: float) -> RoundTimes:
    """How long the measured round takes on these links."""
    phases = {
        Phase(name): links.phase(_phase_loads(figures))
        for name, figures in document["phases"].items()
    }
    return RoundTimes(phases, training)


def _phase_loads(figures: dict[str, float]) -> PhaseLoads:
    """One client that stands for the slowest and busiest, and the server."""
    client = Load(
        seconds=figures["client_seconds"],
        sent=int(figures["client_sent"]),
        received=int(figures["client_received"]),
        shares_sent=int(figures["client_shares_sent"]),
        shares_received=int(figures["client_shares_received"]),
    )
    server = Load(
        seconds=figures["server_seconds"],
        sent=int(figures["server_sent"]),
        received=int(figures["server_received"]),
        shares_sent=int(figures["server_shares_sent"]),
        shares_received=int(figures["server_shares_received"]),
        relay_seconds=figures["server_relay_seconds"],
    )
    return PhaseLoads(server, {0: client})


def client_upload(document: Document) -> int:
    """All that the busiest client sends in a round."""
    return int(sum(p["client_sent"] + p["client_shares_sent"] for p in document["phases"].values()))


def client_download(document: Document) -> int:
    """All that the busiest client receives in a round."""
    return int(
        sum(p["client_received"] + p["client_shares_received"] for p in document["phases"].values())
    )
