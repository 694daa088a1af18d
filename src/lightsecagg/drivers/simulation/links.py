"""A model of the network: how long the measured bytes take, and the timeline of a round.

Every client has a full-duplex access link, and so has the server; the core of the network is
never the bottleneck. Each leg of a phase ends when the busiest link involved is done:

    server -> clients   latency + max(most bytes of a client / client rate, all / server rate)
    clients -> server   the same
    shares, relayed     2 latency + max(client up, client down, server in, server out)
                        (clients send and receive at the same time, as in the paper's Section 6)
    shares, direct      latency + max(client up, client down); the server carries nothing

A phase is: the server's messages, the slowest client's work, the clients' messages, the server's
work; the next phase begins when all of it is done. Training comes between the offline phase
(advertise, share) and the upload; with overlap it runs beside the offline phase, on a core of its
own. What the server waits for clients that will never answer (its deadlines) is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lightsecagg.drivers.simulation.metering import Load, PhaseLoads
from lightsecagg.errors import ParameterError
from lightsecagg.protocol.interface import Phase


class Topology(StrEnum):
    """How shares travel from client to client."""

    RELAY = "relay"
    """Through the server; what every driver of this package does."""
    DIRECT = "direct"
    """Over the clients' links only, as if every pair had a connection (the paper's picture)."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a federation."""

    bandwidth: float = 320.0
    """A client's, in Mbit/s each way; the paper's."""
    server_bandwidth: float = 10_000.0
    """The server's, in Mbit/s each way."""
    latency: float = 0.0
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

    def phase(self, loads: PhaseLoads) -> PhaseTimes:
        """How long the parts of one phase take."""
        clients = loads.clients.values()
        down = self._leg(clients, "received", loads.server.sent)
        up = self._leg(clients, "sent", loads.server.received)
        server = loads.server.seconds
        if self.topology is Topology.DIRECT:
            server -= loads.server.relay_seconds
        return PhaseTimes(
            down=down,
            client=max((load.seconds for load in clients), default=0.0),
            up=up + self._exchange(clients, loads.server),
            server=server,
        )

    def _leg(self, clients: Iterable[Load], way: str, total: int) -> float:
        if not total:
            return 0.0
        most = max(getattr(load, way) for load in clients)
        return self._seconds(1, most, total)

    def _exchange(self, clients: Iterable[Load], server: Load) -> float:
        if not server.shares_received:
            return 0.0
        most = max(max(load.shares_sent, load.shares_received) for load in clients)
        if self.topology is Topology.DIRECT:
            return self._seconds(1, most, 0)
        return self._seconds(2, most, max(server.shares_received, server.shares_sent))

    def _seconds(self, hops: int, client_bytes: int, server_bytes: int) -> float:
        return hops * self.latency / 1e3 + max(
            8 * client_bytes / (self.bandwidth * 1e6),
            8 * server_bytes / (self.server_bandwidth * 1e6),
        )


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long the parts of one phase take, in seconds."""

    down: float
    """The server's messages on their way."""
    client: float
    """The slowest client's work."""
    up: float
    """The clients' messages on their way, shares included."""
    server: float
    """The server's work."""

    @property
    def link(self) -> float:
        """All the time on the links."""
        return self.down + self.up


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a party was busy with."""

    party: str
    """`client` (the slowest one), `link` or `server`."""
    phase: str
    """A phase of the protocol, or `training`."""
    start: float
    end: float


def timeline(
    times: Mapping[Phase, PhaseTimes], training: float = 0.0, overlap: bool = True
) -> list[Span]:
    """Who was busy when, from the first message of the round to the recovered sum."""
    spans: list[Span] = []
    now = 0.0
    trained = False
    for phase, parts in times.items():
        if phase not in (Phase.ADVERTISE, Phase.SHARE) and not trained:
            trained = True
            start = 0.0 if overlap else now
            now = max(now, start + training)
            if training:
                spans.append(Span("client", "training", start, start + training))
        for party, seconds in (
            ("link", parts.down),
            ("client", parts.client),
            ("link", parts.up),
            ("server", parts.server),
        ):
            if seconds:
                spans.append(Span(party, phase.value, now, now + seconds))
                now += seconds
    return spans
