"""The planner: bytes to the byte, the best U, warnings, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from lightsecagg.errors import ParameterError
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.commands.plan import app
from lightsecagg_lab.planning import STATED, Federation, Network, plan
from lightsecagg_lab.planning.planner import (
    PAPER,
    SEEDED,
    SHORT_KEY,
    recommend_survivors,
    round_costs,
)
from lightsecagg_lab.planning.traffic import forecast_traffic
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.faults import Faults, Moment
from lightsecagg_lab.simulation.scenario import Scenario
from lightsecagg_lab.simulation.synchronous import RoundReport, simulate_round

LIGHTSECAGG, SECAGG, SECAGG_PLUS, PLAIN = ProtocolName
ARGUMENTS = ["--clients=20", "--privacy=8", "--dropouts=3", "--dim=5000", "--stated"]


def simulate(scenario: Scenario, dropped: tuple[int, ...]) -> RoundReport:
    """A round in which these clients vanish after sharing."""
    cohort = scenario.cohort()
    faults = Faults(drops=dict.fromkeys(dropped, (Phase.UPLOAD, Moment.BEFORE)))
    report = simulate_round(cohort, lambda client: scenario.input(0, client), faults)
    assert report.exact
    return report


def random_scenarios() -> list[tuple[Scenario, tuple[int, ...]]]:
    """Ten configurations: protocol, mode, threat model, sizes and dropouts drawn at random."""
    generator = np.random.default_rng(7)
    found: list[tuple[Scenario, tuple[int, ...]]] = []
    while len(found) < 10:
        N = int(generator.integers(5, 24))
        T = int(generator.integers(0, N - 2))
        D = int(generator.integers(0, N - T - 1))
        malicious = bool(generator.integers(2)) and T + 2 * D < N
        protocol = [LIGHTSECAGG, LIGHTSECAGG, SECAGG][int(generator.integers(3))]
        least = (N + T) // 2 + 1 if malicious else T + 1
        scenario = Scenario(
            protocol=protocol,
            parameters=Parameters(
                N,
                T,
                D,
                int(generator.integers(T + 1, N - D + 1)),
                ThreatModel.MALICIOUS_SERVER if malicious else ThreatModel.HONEST_BUT_CURIOUS,
                list(ShareMode)[int(generator.integers(2))],
            ),
            dimension=int(generator.integers(1, 3000)),
            threshold=least if protocol is SECAGG else 0,
        )
        dropped = tuple(sorted(generator.permutation(N)[: generator.integers(D + 1)].tolist()))
        found.append((scenario, dropped))
    return found


@pytest.mark.parametrize(("scenario", "dropped"), random_scenarios())
def test_bytes_are_exact(scenario: Scenario, dropped: tuple[int, ...]) -> None:
    report = simulate(scenario, dropped)
    forecast = forecast_traffic(report.settings, dropped)
    assert forecast == {phase: loads.traffic for phase, loads in report.meter.phases.items()}


def test_bytes_of_ids_beyond_one_byte_are_exact() -> None:
    scenario = Scenario(LIGHTSECAGG, Parameters(140, 2, 4), dimension=50)
    report = simulate(scenario, (3, 130))
    forecast = forecast_traffic(report.settings, (3, 130))
    assert forecast == {phase: loads.traffic for phase, loads in report.meter.phases.items()}


def test_bytes_of_plain_summation_are_exact() -> None:
    scenario = Scenario(PLAIN, Parameters(9, 2, 3), dimension=321)
    report = simulate(scenario, (1, 5))
    forecast = forecast_traffic(report.settings, (1, 5))
    assert forecast == {phase: loads.traffic for phase, loads in report.meter.phases.items()}


def test_bytes_of_secagg_plus_are_exact_but_for_the_headers_of_answers() -> None:
    # 10 of 20 neighbours may be gone, wherever on the ring those who drop have come to stand.
    parameters = Parameters(40, 3, 10, survivors=10)
    scenario = Scenario(SECAGG_PLUS, parameters, dimension=100, neighbours=20, threshold=10)
    report = simulate(scenario, tuple(range(10)))
    forecast = forecast_traffic(report.settings, range(10))
    for phase, loads in report.meter.phases.items():
        found = loads.traffic
        if phase is Phase.RECOVER:
            assert 0 <= forecast[phase].client_sent - found.client_sent <= 2
            assert 0 <= forecast[phase].server_received - found.server_received <= 2 * 30
            found = replace(
                found,
                client_sent=forecast[phase].client_sent,
                server_received=forecast[phase].server_received,
            )
        assert forecast[phase] == found


def test_recommends_the_largest_survivors_and_leaves_room_for_liars() -> None:
    federation = Federation(200, 100, 20, 1_206_590)
    assert recommend_survivors(federation)[0] == 180
    survivors, reason = recommend_survivors(replace(federation, liars=5))
    assert survivors == 170
    assert "liars" in reason


def test_the_recommendation_is_the_fastest_of_the_forecasts() -> None:
    federation = Federation(30, 10, 6, 20_000, Network(98.0))
    best = plan(federation)
    rounds = {
        U: plan(replace(federation, survivors=U)).protocols[SEEDED].round_seconds
        for U in range(11, 25)
    }
    assert rounds[best.recommended_survivors] == min(rounds.values())


def test_seeded_shares_are_shorter_and_recovery_of_secagg_is_longer() -> None:
    made = plan(Federation(200, 100, 20, 1_206_590))
    seeded, paper = made.protocols[SEEDED], made.protocols[PAPER]
    assert seeded.client_upload < 1.35 * made.protocols["plain"].client_upload
    assert paper.client_upload > 2.5 * seeded.client_upload
    recovery = {name: costs.phases[Phase.RECOVER] for name, costs in made.protocols.items()}
    assert recovery["secagg"].times.server > 13.2 * recovery[SEEDED].times.server


def test_recommends_another_survivors_than_the_given() -> None:
    made = plan(Federation(30, 10, 6, 20_000, survivors=12))
    assert made.recommended_survivors == 24
    assert made.protocols[SEEDED].settings.parameters.survivors == 12


def test_warns_of_shares_as_long_as_the_model() -> None:
    warnings = plan(Federation(100, 50, 10, 1_200_000, survivors=51)).warnings
    assert any("U = T + 1" in warning for warning in warnings)
    assert any("475 MB" in warning for warning in warnings)  # 99 shares of 4.8 MB


def test_warns_that_malicious_mode_is_infeasible_and_of_the_graph() -> None:
    warnings = plan(Federation(100, 50, 25, 1000)).warnings
    assert any("malicious-server mode is infeasible" in warning for warning in warnings)
    assert any("t = 51 protect all clients" in warning for warning in warnings)
    sparse = plan(Federation(200, 100, 20, 1000)).warnings
    assert any("unprotected with a probability of up to 3e-18" in warning for warning in sparse)
    dense = plan(Federation(20, 10, 8, 1000)).warnings
    assert any("no sparse graph is safe" in warning for warning in dense)


def test_bytes_of_short_keys_are_exact() -> None:
    parameters = Parameters(20, 4, 6, 7, share_mode=ShareMode.SHORT_KEY)
    scenario = Scenario(LIGHTSECAGG, parameters, dimension=5000)
    report = simulate(scenario, (1, 5))
    forecast = forecast_traffic(report.settings, (1, 5))
    assert forecast == {phase: loads.traffic for phase, loads in report.meter.phases.items()}


def test_short_keys_are_forecast_with_a_small_U_and_what_they_assume() -> None:
    made = plan(Federation(200, 100, 98, 1_206_590))
    short, seeded = made.protocols[SHORT_KEY], made.protocols[SEEDED]
    assert short.phases[Phase.SHARE].traffic.client_upload < 450_000
    assert short.round_seconds < 0.2 * seeded.round_seconds
    assert made.short_key_survivors == 102
    (said,) = [warning for warning in made.warnings if warning.startswith(SHORT_KEY)]
    assert "experimental" in said
    assert "ring-LWE" in said
    assert "U = 102 and exact decoding" in said
    spare = plan(Federation(200, 100, 20, 1_206_590))
    assert spare.short_key_survivors < 150, "a small U leaves answers to spare"
    longer = plan(Federation(200, 100, 98, 5_288_548)).protocols[SHORT_KEY]
    size = longer.phases[Phase.SHARE].traffic.client_upload
    assert size == short.phases[Phase.SHARE].traffic.client_upload, "whatever d is"


def test_malicious_plans_leave_out_what_has_no_such_mode() -> None:
    federation = Federation(60, 20, 10, 1000, threat_model=ThreatModel.MALICIOUS_SERVER)
    made = plan(federation)
    assert set(made.protocols) == {SEEDED, PAPER, SHORT_KEY, "secagg"}
    assert made.protocols[SEEDED].phases[Phase.AGREE].server_bytes > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 10, "privacy": 5, "dropouts": 5, "dimension": 10},
        {"clients": 10, "privacy": 5, "dropouts": 2, "dimension": 0},
        {"clients": 10, "privacy": 5, "dropouts": 2, "dimension": 10, "liars": 2},
        {"clients": 10, "privacy": 5, "dropouts": 2, "dimension": 10, "survivors": 5},
        {"clients": 10, "privacy": 5, "dropouts": 2, "dimension": 9, "training_seconds": -1.0},
    ],
)
def test_refuses_what_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(ParameterError):
        Federation(**wrong)  # type: ignore[arg-type]


def test_refuses_more_dropped_clients_than_the_parameters_tolerate() -> None:
    federation = Federation(10, 4, 2, 50)
    settings = plan(federation).protocols[SEEDED].settings
    with pytest.raises(ParameterError, match="at most D = 2"):
        round_costs(federation, settings, range(3), STATED)


def test_command_prints_the_documented_json() -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["recommended_survivors"] == 17
    costs = document["protocols"][SEEDED]["share"]
    keys = {"client_upload_bytes", "client_seconds", "server_seconds", "server_bytes"}
    assert keys | {"memory_bytes"} <= set(costs)


def test_command_prints_a_table() -> None:
    result = CliRunner().invoke(app, ARGUMENTS, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "recommended" in result.stdout
    assert "secagg+" in result.stdout
