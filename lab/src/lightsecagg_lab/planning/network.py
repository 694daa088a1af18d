"""A model of the network: how long the bytes of a round take, forecast or measured.

Every client has a full-duplex access link, and so has the server; the core of the network is
never the bottleneck. Each leg of a phase ends when the busiest link or party involved is done:

    server -> clients   latency + max(slow start + link, carrying)
    clients -> server   the same
    shares, relayed     latency + max(link, carrying), both ways at once: clients send and receive
                        at the same time, as in the paper's Section 6
    shares, direct      latency + max(link, a client's carrying)

    link                max(most bytes of a client / client rate, all bytes / server rate)
    client rate         its bandwidth, or what flow control lets through: window / round trip
    slow start          of uploads: connections were silent while clients trained; the other phases
                        follow each other, and the last ones of the round before
    carrying            CPU time of the transport, of whoever has more of it: the server or a client

Storing comes after: the server looks at one upload after the other and has each on disk before it
acknowledges it, and stores the average. Handshakes are not charged: connections outlive rounds.

With `cores` all parties are processes of one machine: what N clients compute or carry, with the
server's carrying, takes no less than its sum over the cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from lightsecagg.errors import ParameterError
from lightsecagg.params import check_integer
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning.timeline import PhaseTimes
from lightsecagg_lab.planning.traffic import PhaseTraffic
from lightsecagg_lab.planning.transport_costs import (
    FRAME,
    STATED,
    TransportCosts,
    slow_start,
    window,
)
from lightsecagg_lab.planning.work import PhaseWork


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
    transport: TransportCosts = STATED
    cores: int = 0
    """Of the one machine that all parties share; 0: each has a machine of its own."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "server_bandwidth"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ParameterError(
                    f"{name.replace('_', ' ')} = {getattr(self, name)} must be a positive number "
                    "of Mbit/s"
                )
        if not 0 <= self.latency < float("inf"):
            raise ParameterError(f"latency = {self.latency} must be a number of ms, at least 0")
        check_integer("cores", self.cores, 0)

    @property
    def relays(self) -> bool:
        """Whether shares pass through the server."""
        return self.topology is Topology.RELAY

    def round(
        self, traffic: Mapping[Phase, PhaseTraffic], work: Mapping[Phase, PhaseWork]
    ) -> dict[Phase, PhaseTimes]:
        """How long the parts of each phase take; without relaying, if shares travel directly."""
        times = {phase: self._phase(phase, traffic[phase], work[phase]) for phase in traffic}
        ends = [phase for phase, loads in traffic.items() if loads.server_bytes()]
        if ends and Phase.UPLOAD in traffic:
            result = traffic[Phase.UPLOAD].client_sent * self.transport.result_byte
            times[ends[-1]] = replace(times[ends[-1]], storing=times[ends[-1]].storing + result)
        return times

    def _phase(self, phase: Phase, traffic: PhaseTraffic, work: PhaseWork) -> PhaseTimes:
        clients = traffic.clients
        uploads = phase is Phase.UPLOAD
        up = self._leg(clients, traffic.client_sent, traffic.server_received, anew=uploads)
        stored = clients * self.transport.stored_upload * uploads
        stored += traffic.server_received * self.transport.stored_byte * uploads
        return PhaseTimes(
            down=self._leg(clients, traffic.client_received, traffic.server_sent),
            client=self._together(clients, work.client),
            up=up + self._exchange(clients, traffic),
            server=work.server if self.relays else work.server - work.server_relaying,
            storing=stored,
        )

    def _exchange(self, clients: int, traffic: PhaseTraffic) -> float:
        """The shares on their way from client to client.

        The last latency of relayed ones is not their own: the message that closes the phase, which
        the next one begins with, is on the same way behind them.
        """
        sent, received = traffic.client_shares_sent, traffic.client_shares_received
        if not sent:
            return 0.0
        passed = (traffic.server_shares_sent, traffic.server_shares_received)
        if not self.relays:
            passed = (0, 0)
        link = self._link(clients, max(sent, received), max(passed))
        return self.latency / 1e3 + max(
            link, self._carrying(clients, 2, sent + received, sum(passed))
        )

    def _leg(self, clients: int, of_client: int, of_server: int, *, anew: bool = False) -> float:
        """One message to or from each client."""
        if not of_client:
            return 0.0
        carrying = self._carrying(clients, 1, of_client, of_server)
        return self.latency / 1e3 + max(
            self._link(clients, of_client, of_server, anew=anew), carrying
        )

    def _link(self, clients: int, of_client: int, of_server: int, *, anew: bool = False) -> float:
        """Until the last byte has left; `anew`: by connections that were silent before."""
        rate, server_rate = self.bandwidth * 1e6 / 8, self.server_bandwidth * 1e6 / 8
        if self.transport.fluid:
            return max(of_client / rate, of_server / server_rate)
        rate, round_trip = rate / FRAME, 2 * self.latency / 1e3
        if round_trip:
            rate = min(rate, window(clients) / round_trip)
        begins = slow_start(of_client, rate, round_trip) if anew else 0.0
        return max(begins + of_client / rate, of_server * FRAME / server_rate)

    def _carrying(self, clients: int, messages: int, of_client: int, of_server: int) -> float:
        """Of the party with more to do: `messages` of each client, bytes of it and of all."""
        costs = self.transport
        client = messages * costs.client_message + of_client * costs.client_byte
        server = of_server * costs.server_byte
        if of_server:
            server += clients * messages * costs.server_message
        return max(server, self._together(clients, client, server))

    def _together(self, clients: int, client: float, server: float = 0.0) -> float:
        """What a client does takes longer where all clients, and the server, share cores."""
        if not self.cores:
            return client
        return max(client, (clients * client + server) / self.cores)
