"""The model of the links: the busiest one decides, transport is charged, nonsense is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import ParameterError
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning import Network, Topology
from lightsecagg_lab.planning.timeline import PhaseTimes
from lightsecagg_lab.planning.traffic import PhaseTraffic
from lightsecagg_lab.planning.transport_costs import (
    FRAME,
    FREE,
    INITIAL_WINDOW,
    STATED,
    TransportCosts,
    slow_start,
    window,
)
from lightsecagg_lab.planning.work import PhaseWork

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
UPLOADS = PhaseTraffic(client_sent=MEGABYTE, server_received=10 * MEGABYTE)
NOTHING = replace(FREE, fluid=False)
"""Links as they are, and a transport that costs nothing."""


def phase(
    network: Network, traffic: PhaseTraffic, phase: Phase = Phase.SHARE, work: PhaseWork = WORK
) -> PhaseTimes:
    return network.round({phase: traffic}, {phase: work})[phase]


def test_links_charge_the_busiest_link() -> None:
    # 8 Mbit/s = 1 MB/s. Relayed: the server's 6 MB at 2 MB/s take 3 s, the client's 4 MB 4 s.
    slow_clients = phase(Network(8, 16, latency=10, transport=FREE), TRAFFIC)
    assert slow_clients.up == pytest.approx((0.01 + 1) + (0.01 + 4))
    assert slow_clients.down == 0
    assert slow_clients.client == 0.5
    assert slow_clients.server == 0.3
    assert slow_clients.link == slow_clients.up
    assert slow_clients.total == pytest.approx(5.02 + 0.5 + 0.3)
    slow_server = phase(Network(80, 8, latency=0, transport=FREE), TRAFFIC)
    assert slow_server.up == pytest.approx(1 + 6)


def test_direct_shares_cost_the_server_nothing() -> None:
    network = Network(8, 8, latency=10, topology=Topology.DIRECT, transport=FREE)
    direct = phase(network, TRAFFIC)
    assert direct.up == pytest.approx((0.01 + 1) + (0.01 + 4))
    assert direct.server == pytest.approx(0.2)
    assert TRAFFIC.server_bytes(network.relays) == MEGABYTE
    assert TRAFFIC.server_bytes(Network().relays) == 12 * MEGABYTE
    dear = replace(FREE, server_byte=1.0, server_message=1.0)
    assert phase(replace(network, transport=dear), replace(TRAFFIC, client_sent=0)).up == (
        phase(network, replace(TRAFFIC, client_sent=0)).up
    )


def played_slow_start(size: int, rate: float, round_trip: float) -> float:
    """Round trip by round trip: a window is sent, and the next one is twice as long."""
    clock, left, ahead = 0.0, float(size), float(INITIAL_WINDOW)
    while ahead < rate * round_trip and left > ahead:
        clock, left, ahead = clock + round_trip, left - ahead, 2 * ahead
    return clock + left / rate


@given(
    size=st.integers(1, 10**8),
    rate=st.floats(1e5, 1e9),
    round_trip=st.floats(0.0, 0.5),
)
def test_slow_start_is_what_playing_it_gives(size: int, rate: float, round_trip: float) -> None:
    played = played_slow_start(size, rate, round_trip)
    assert size / rate + slow_start(size, rate, round_trip) == pytest.approx(played)


def test_uploads_begin_slowly_and_other_phases_do_not() -> None:
    network = Network(98, latency=20, transport=NOTHING)
    rate = 98e6 / 8 / FRAME
    begins = slow_start(MEGABYTE, rate, 0.04)
    assert begins > 0.1
    assert phase(network, UPLOADS, Phase.UPLOAD).up == pytest.approx(
        0.02 + MEGABYTE / rate + begins
    )
    assert phase(network, UPLOADS, Phase.RECOVER).up == pytest.approx(0.02 + MEGABYTE / rate)


def test_flow_control_bounds_what_a_long_link_carries() -> None:
    long = Network(10_000, 10**6, latency=100, transport=NOTHING)
    assert UPLOADS.clients == 10
    up = phase(long, UPLOADS, Phase.RECOVER).up
    assert up == pytest.approx(0.1 + MEGABYTE / (window(10) / 0.2))
    assert phase(replace(long, transport=FREE), UPLOADS, Phase.RECOVER).up < up / 1.4


def test_whoever_has_more_to_carry_is_waited_for() -> None:
    costs = TransportCosts("a test", 1e-3, 1e-7, 2e-3, 4e-7, 0, 0, 0)
    network = Network(10_000, 10**6, latency=20, transport=costs)
    assert phase(network, UPLOADS).up == pytest.approx(0.02 + 10 * 1e-3 + 1.0)
    alone = replace(UPLOADS, server_received=MEGABYTE)
    assert phase(network, alone).up == pytest.approx(0.02 + 2e-3 + 0.4)
    # On two cores: ten clients of 0.402 s and a server of 1.01 s have 5.03 s to share.
    shared = replace(network, cores=2)
    assert phase(shared, UPLOADS).up == pytest.approx(0.02 + (10 * 0.402 + 1.01) / 2)
    assert phase(shared, UPLOADS).client == pytest.approx(10 * 0.5 / 2)
    assert phase(replace(network, cores=100), UPLOADS).client == 0.5


def test_what_is_stored_is_waited_for() -> None:
    costs = replace(FREE, stored_upload=0.05, stored_byte=1e-7, result_byte=1e-6)
    network = Network(transport=costs)
    upload = phase(network, UPLOADS, Phase.UPLOAD)
    assert upload.storing == pytest.approx(10 * 0.05 + 1.0 + 1.0)  # the average is made at once
    assert upload.total == pytest.approx(upload.link + 0.8 + 2.5)
    work = dict.fromkeys(Phase, WORK)
    traffic = {Phase.UPLOAD: UPLOADS, Phase.RECOVER: UPLOADS}
    times = network.round(traffic, work)
    assert times[Phase.UPLOAD].storing == pytest.approx(1.5)
    assert times[Phase.RECOVER].storing == pytest.approx(1.0)  # now it is made here


def test_transport_is_charged_unless_one_says_otherwise() -> None:
    assert Network().transport == STATED
    charged, free = (
        phase(Network(transport=costs), UPLOADS, Phase.UPLOAD).total for costs in (STATED, FREE)
    )
    assert charged > 1.3 * free


@pytest.mark.parametrize("topology", list(Topology))
def test_a_phase_without_messages_takes_no_time_on_the_links(topology: Topology) -> None:
    assert phase(Network(topology=topology), PhaseTraffic()).link == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"bandwidth": 0},
        {"server_bandwidth": -1},
        {"latency": -1},
        {"latency": np.inf},
        {"cores": -1},
    ],
)
def test_impossible_links_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match="must be"):
        Network(**arguments)  # type: ignore[arg-type]
