"""The model of the links: the busiest one decides, and impossible ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from lightsecagg.errors import ParameterError
from lightsecagg.planning import Network, Topology
from lightsecagg.planning.traffic import PhaseTraffic
from lightsecagg.planning.work import PhaseWork

MEGABYTE = 10**6

TRAFFIC = PhaseTraffic(
    client_sent=MEGABYTE,
    client_shares_sent=4 * MEGABYTE,
    client_shares_received=3 * MEGABYTE,
    server_received=MEGABYTE,
    server_shares_sent=5 * MEGABYTE,
    server_shares_received=6 * MEGABYTE,
)
WORK = PhaseWork(client=0.5, server=0.3, server_relaying=0.1)


def test_links_charge_the_busiest_link() -> None:
    # 8 Mbit/s = 1 MB/s. Relayed: the server's 6 MB at 2 MB/s take 3 s, the client's 4 MB 4 s.
    slow_clients = Network(bandwidth=8, server_bandwidth=16, latency=10).phase(TRAFFIC, WORK)
    assert slow_clients.up == pytest.approx((0.01 + 1) + (0.02 + 4))
    assert slow_clients.down == 0
    assert slow_clients.client == 0.5
    assert slow_clients.server == 0.3
    assert slow_clients.link == slow_clients.up
    assert slow_clients.total == pytest.approx(5.03 + 0.5 + 0.3)
    slow_server = Network(bandwidth=80, server_bandwidth=8, latency=0).phase(TRAFFIC, WORK)
    assert slow_server.up == pytest.approx(1 + 6)


def test_direct_shares_cost_the_server_nothing() -> None:
    network = Network(bandwidth=8, server_bandwidth=8, latency=10, topology=Topology.DIRECT)
    direct = network.phase(TRAFFIC, WORK)
    assert direct.up == pytest.approx((0.01 + 1) + (0.01 + 4))
    assert direct.server == pytest.approx(0.2)
    assert TRAFFIC.server_bytes(network.relays) == MEGABYTE
    assert TRAFFIC.server_bytes(Network().relays) == 12 * MEGABYTE


@pytest.mark.parametrize("topology", list(Topology))
def test_a_phase_without_messages_takes_no_time_on_the_links(topology: Topology) -> None:
    assert Network(topology=topology).phase(PhaseTraffic(), WORK).link == 0


@pytest.mark.parametrize(
    "arguments", [{"bandwidth": 0}, {"server_bandwidth": -1}, {"latency": -1}, {"latency": np.inf}]
)
def test_impossible_links_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match="must be"):
        Network(**arguments)  # type: ignore[arg-type]
