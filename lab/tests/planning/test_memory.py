"""Forecasts of memory, beside the limits that they stand for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightsecagg.drivers.transport.communicator import Limits, ahead_of
from lightsecagg.drivers.transport.framing import MAX_CHUNK
from lightsecagg.params import Parameters
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.planning.memory import (
    CHUNK,
    KEPT,
    PROGRAM,
    WAITING,
    PhaseMemory,
    forecast_memory,
)
from lightsecagg_lab.planning.traffic import forecast_traffic
from lightsecagg_lab.planning.transport_costs import window
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

VECTOR = 4 * 10_000_000


def forecast(
    clients: int, privacy: int = 2, dropouts: int = 2, dimension: int = VECTOR // 4
) -> dict[Phase, PhaseMemory]:
    parameters = Parameters(clients=clients, privacy=privacy, dropouts=dropouts)
    settings = Settings(
        protocol=ProtocolName.LIGHTSECAGG,
        parameters=parameters,
        quantizer=make_quantizer(parameters, dimension, 1.0),
        dimension=dimension,
        session=bytes(32),
        round=1,
        allow_list=bytes(32),
    )
    return forecast_memory(settings, forecast_traffic(settings, ()), clients)


def test_R53_uploads_are_not_counted_in_the_servers_memory() -> None:
    few, many = forecast(10)[Phase.UPLOAD].server, forecast(100)[Phase.UPLOAD].server
    assert many - few == 100 * (CHUNK + window(100)) - 10 * (CHUNK + window(10))
    assert few < VECTOR + 10 * (CHUNK + window(10)) + WAITING + PROGRAM + KEPT + 1


def test_R53_the_average_takes_the_place_of_the_sum() -> None:
    """Twelve answers and three checks of a tenth each, with the sum: two vectors and a half."""
    found = forecast(12, privacy=1, dropouts=1)[Phase.RECOVER].server - PROGRAM - KEPT
    assert found == pytest.approx(2.5 * VECTOR, rel=1e-3)
    shares_are_short = forecast(100)[Phase.RECOVER].server - PROGRAM - KEPT
    assert shares_are_short == pytest.approx((1 + 103 / 96) * VECTOR, rel=1e-3)


def test_R53_the_forecast_knows_the_transports_limits() -> None:
    assert CHUNK == MAX_CHUNK
    assert Limits().memory == WAITING
    assert all(window(clients) == ahead_of(clients) for clients in range(1, 2000))


def test_R53_few_clients_may_be_further_ahead_but_all_together_no_more() -> None:
    assert ahead_of(1) == ahead_of(8) == 4 * 2**20 >= 802e6 / 8 * 0.04
    assert ahead_of(64) == ahead_of(1000) == Limits().ahead
    assert all(clients * ahead_of(clients) <= 2**25 for clients in range(1, 65))


RECORDED = Path(__file__).parents[3] / "docs" / "results" / "federation.json"


def recorded() -> list[Any]:
    """Rounds over TLS, N = 12 to 200, d up to 100 million: arguments, and the server's peak."""
    found = []
    for entry in json.loads(RECORDED.read_text("utf-8")):
        words = shlex.split(entry["command"])
        at = {word: words[i + 1] for i, word in enumerate(words[:-1])}
        if "short-key" not in words:
            sizes = [int(at[f"--{name}"]) for name in ("clients", "privacy", "dropouts")]
            run = entry["runs"]["lightsecagg"]
            peak = run.get("server_peak_with_swap_bytes", run["server_peak_rss_bytes"])
            found.append(pytest.param(*sizes, int(at.get("--dim", 1_206_590)), peak))
    return found


@pytest.mark.parametrize(("clients", "privacy", "dropouts", "dimension", "peak"), recorded())
def test_R53_the_forecast_is_near_what_was_measured(
    clients: int, privacy: int, dropouts: int, dimension: int, peak: int
) -> None:
    phases = forecast(clients, privacy, dropouts, dimension)
    del phases[Phase.SHARE]  # the worst case, in which nobody's bundles are complete before the end
    assert 0.9 < max(phase.server for phase in phases.values()) / peak < 1.1
