"""A model of the network: how long the bytes of a phase take, forecast or measured.

Every client has a full-duplex access link, and so has the server; the core of the network is
never the bottleneck. Each leg of a phase ends when the busiest link involved is done:

    server -> clients   latency + max(most bytes of a client / client rate, all / server rate)
    clients -> server   the same
    shares, relayed     2 latency + max(client up, client down, server in, server out)
                        (clients send and receive at the same time, as in the paper's Section 6)
    shares, direct      latency + max(client up, client down); the server carries nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightsecagg.errors import ParameterError
from lightsecagg.planning.timeline import PhaseTimes
from lightsecagg.planning.traffic import PhaseTraffic
from lightsecagg.planning.work import PhaseWork


class Topology(StrEnum):
    """How shares travel from client to client."""

    RELAY = "relay"
    """Through the server; what every driver of this package does."""
    DIRECT = "direct"
    """Over the clients' links only, as if every pair had a connection (the paper's picture)."""


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a federation."""

    bandwidth: float = 320.0
    """A client's, in Mbit/s each way; the paper's."""
    server_bandwidth: float = 10_000.0
    """The server's, in Mbit/s each way."""
    latency: float = 20.0
    """One way, in milliseconds."""
    topology: Topology = Topology.RELAY

    def __post_init__(self) -> None:
        for name in ("bandwidth", "server_bandwidth"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ParameterError(
                    f"{name.replace('_', ' ')} = {getattr(self, name)} must be a positive number "
                    "of Mbit/s"
                )
        if not 0 <= self.latency < float("inf"):
            raise ParameterError(f"latency = {self.latency} must be a number of ms, at least 0")

    @property
    def relays(self) -> bool:
        """Whether shares pass through the server."""
        return self.topology is Topology.RELAY

    def phase(self, traffic: PhaseTraffic, work: PhaseWork) -> PhaseTimes:
        """How long the parts of one phase take; without relaying, if shares travel directly."""
        up = self._leg(1, traffic.client_sent, traffic.server_received)
        return PhaseTimes(
            down=self._leg(1, traffic.client_received, traffic.server_sent),
            client=work.client,
            up=up + self._exchange(traffic),
            server=work.server if self.relays else work.server - work.server_relaying,
        )

    def _exchange(self, traffic: PhaseTraffic) -> float:
        of_client = max(traffic.client_shares_sent, traffic.client_shares_received)
        if not self.relays:
            return self._leg(1, of_client, 0)
        of_server = max(traffic.server_shares_sent, traffic.server_shares_received)
        return self._leg(2, of_client, of_server)

    def _leg(self, hops: int, of_client: int, of_server: int) -> float:
        if not of_client:
            return 0.0
        return hops * self.latency / 1e3 + max(
            8 * of_client / (self.bandwidth * 1e6), 8 * of_server / (self.server_bandwidth * 1e6)
        )
