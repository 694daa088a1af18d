"""How long bytes take: the links of a federation and the length of a round.

Every client has a full-duplex access link, and so has the server; the core of the network is never
the bottleneck. A leg ends when the busiest link involved is done:

    server -> clients   latency + max(most bytes of a client / client rate, all / server rate)
    clients -> server   the same
    shares, relayed     2 latency + max(client up or down, server in or out)
    shares, direct      latency + client up or down; the server carries nothing

A phase is: the server's messages, the slowest client's work, the clients' messages, the server's
work. Training comes before the upload; with overlap it runs beside the offline phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lightsecagg.errors import ParameterError
from lightsecagg.planning.traffic import PhaseTraffic
from lightsecagg.protocol.interface import Phase

OFFLINE = (Phase.ADVERTISE, Phase.SHARE)
"""The phases that may overlap training."""


class Route(StrEnum):
    """How shares travel from client to client."""

    RELAY = "relay"
    """Through the server."""
    DIRECT = "direct"
    """Over the clients' links only (the paper's picture)."""


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a federation."""

    bandwidth: float = 320.0
    """A client's, in Mbit/s each way; the paper's."""
    server_bandwidth: float = 10_000.0
    """The server's, in Mbit/s each way."""
    latency: float = 20.0
    """One way, in milliseconds."""
    route: Route = Route.RELAY

    def __post_init__(self) -> None:
        for name in ("bandwidth", "server_bandwidth"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ParameterError(
                    f"{name.replace('_', ' ')} = {getattr(self, name)} must be a positive number "
                    "of Mbit/s"
                )
        if not 0 <= self.latency < float("inf"):
            raise ParameterError(f"latency = {self.latency} must be a number of ms, at least 0")

    def seconds(self, traffic: PhaseTraffic) -> float:
        """The time that one phase spends on the links."""
        relayed = self.route is Route.RELAY
        shares = max(traffic.client_shares_sent, traffic.client_shares_received)
        return (
            self._leg(1, traffic.client_received, traffic.server_sent)
            + self._leg(1, traffic.client_sent, traffic.server_received)
            + self._leg(2 if relayed else 1, shares, traffic.shares if relayed else 0)
        )

    def _leg(self, hops: int, of_client: int, of_server: int) -> float:
        if not of_client:
            return 0.0
        return hops * self.latency / 1e3 + max(
            8 * of_client / (self.bandwidth * 1e6), 8 * of_server / (self.server_bandwidth * 1e6)
        )


def round_seconds(phases: Mapping[Phase, float], training: float, overlap: bool) -> float:
    """The length of a round whose phases take so long."""
    offline = sum(seconds for phase, seconds in phases.items() if phase in OFFLINE)
    online = sum(seconds for phase, seconds in phases.items() if phase not in OFFLINE)
    return (max(offline, training) if overlap else offline + training) + online
