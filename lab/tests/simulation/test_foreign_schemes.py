"""A scheme from outside the package is simulated and planned like the others."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from toy import PADS, PadsClient, PadsServer
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import StalenessTable, polynomial
from lightsecagg.params import Parameters
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.schemes.registry import SCHEMES, register
from lightsecagg.protocol.schemes.traits import TRAITS
from lightsecagg_lab.planning import Federation as PlannedFederation
from lightsecagg_lab.planning import plan
from lightsecagg_lab.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg_lab.simulation.asynchronous import simulate_async
from lightsecagg_lab.simulation.faults import Drop
from lightsecagg_lab.simulation.scenario import Scenario, run
from lightsecagg_lab.simulation.schedule import EventQueue, Fleet
from lightsecagg_lab.simulation.workload import RandomVectors


@pytest.fixture
def pads() -> Iterator[str]:
    register(PADS, PadsClient, PadsServer)
    yield PADS.name
    del TRAITS[PADS.name], SCHEMES[PADS.name]


def test_a_foreign_scheme_is_simulated(pads: str) -> None:
    parameters = Parameters(9, 0, 3)
    drops = (Drop(Phase.SHARE, 1), Drop(Phase.UPLOAD, 2))
    scenario = Scenario(pads, parameters, dimension=50, drops=drops)
    for outcome in run(scenario, rounds=2):
        assert outcome.report.exact
        document = outcome.document()
        assert document["protocol"] == "pads"
        assert document["included"] == 6
        assert document["parameters"]["survivors"] == 6
        share = document["phases"]["share"]
        assert share["client_upload_bytes"] > 8 * 4 * 50
    sampled = Scenario(pads, parameters, dimension=50, sample_clients=2)
    (outcome,) = run(sampled)
    assert outcome.report.aggregate is not None


def test_a_foreign_scheme_is_simulated_asynchronously(pads: str) -> None:
    table = StalenessTable.from_function(polynomial(1.0), 64, 6)
    config = AsyncConfig(
        parameters=Parameters(10, 0, 3),
        buffering=Buffering(table, max_updates=5),
        quantizer=Quantizer(DEFAULT_FIELD, 1.0, 5, max_weight=table.max_weight),
        dimension=29,
        buffer_size=5,
        protocol=pads,
    )
    federation = ProtectedFederation(config, np.random.default_rng(1))
    schedule = EventQueue(10, 4 * 29, Fleet(), np.random.default_rng(2))
    report = simulate_async(federation, RandomVectors(29), schedule, 4, max_staleness=6)
    assert report.recovered == 4
    assert report.exact is True


def test_a_foreign_scheme_is_simulated_by_the_command_in_both_modes(pads: str) -> None:
    common = f"--clients 10 --privacy 0 --dropouts 3 --dim 29 --protocol {pads} --json"
    for mode in ("sync", "async --buffer 5 --flushes 2"):
        arguments = f"simulate --mode {mode} {common}".split()
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert (document["protocol"], document["exact"]) == (pads, True)


@pytest.mark.parametrize("name", ["plain", "secagg", "nix"])
def test_the_asynchronous_simulator_names_the_protocols_that_it_takes(pads: str, name: str) -> None:
    arguments = "simulate --mode async --clients 10 --privacy 0 --dropouts 3 --dim 29 --buffer 5"
    result = CliRunner().invoke(app, [*arguments.split(), "--protocol", name])
    assert result.exit_code == 2
    shown = " ".join(result.output.replace("│", " ").split())
    assert f"protocol '{name}': choose one of lightsecagg, pads, fedbuff" in shown


def test_a_foreign_scheme_is_planned(pads: str) -> None:
    """To the byte: what the simulator measures for the same round."""
    planned = plan(PlannedFederation(9, 0, 3, 50)).protocols[pads]
    drops = (Drop(Phase.UPLOAD, 3),)
    scenario = Scenario(pads, Parameters(9, 0, 3), dimension=50, drops=drops)
    (outcome,) = run(scenario)
    phases = outcome.document()["phases"]
    for phase in (Phase.SHARE, Phase.UPLOAD, Phase.RECOVER):
        measured = phases[phase.value]["client_upload_bytes"]
        assert planned.phases[phase].traffic.client_upload == measured
        assert planned.phases[phase].times.client > 0
    assert planned.round_seconds > 0
