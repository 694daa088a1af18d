"""A scheme from outside the package is registered, and spoken by the parties there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from async_driver import AsyncFederation
from driver import Federation
from pydantic import ValidationError
from secagg_driver import Fault
from secagg_driver import Federation as Baseline
from toy import PADS, PadsClient, PadsServer
from typer.testing import CliRunner

import lightsecagg
from lightsecagg.cli.main import app
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.tables import AggregationTable
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg.drivers.simulation.asynchronous import simulate_async
from lightsecagg.drivers.simulation.faults import Drop
from lightsecagg.drivers.simulation.scenario import Scenario, run
from lightsecagg.drivers.simulation.schedule import EventQueue, Fleet
from lightsecagg.drivers.simulation.workload import RandomVectors
from lightsecagg.errors import DecodeError, ParameterError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import StalenessTable, polynomial
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.planning import Federation as PlannedFederation
from lightsecagg.planning import plan
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import Aggregate, Phase, RoundAborted
from lightsecagg.protocol.schemes.coded_keys import CodedKeysClient, CodedKeysServer
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.pairwise_masks import PairwiseMasksClient, PairwiseMasksServer
from lightsecagg.protocol.schemes.registry import SCHEMES, register, scheme_of
from lightsecagg.protocol.schemes.traits import TRAITS, ProtocolName, traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.budgets import phase_budget


@pytest.fixture
def pads() -> Iterator[str]:
    register(PADS, PadsClient, PadsServer)
    yield PADS.name
    del TRAITS[PADS.name], SCHEMES[PADS.name]


def test_every_protocol_has_traits_and_a_scheme() -> None:
    assert list(TRAITS) == list(SCHEMES) == list(ProtocolName)
    for name, traits in TRAITS.items():
        assert traits.name is ProtocolName(name)
        assert traits_of(name) is traits


def test_a_name_is_registered_once(pads: str) -> None:
    with pytest.raises(ParameterError, match="there is a protocol 'pads' already"):
        register(PADS, PadsClient, PadsServer)
    with pytest.raises(ParameterError, match="there is a protocol 'plain' already"):
        register(replace(PADS, name="plain"), PadsClient, PadsServer)


def test_a_name_that_nobody_registered_is_refused() -> None:
    settings = Federation().settings()
    with pytest.raises(ParameterError, match="protocol 'pads' is unknown; choose one of light"):
        replace(settings, protocol="pads")
    data = settings.to_bytes().replace(b"\xablightsecagg", b"\xa4pads")
    with pytest.raises(DecodeError, match="unknown protocol 'pads'"):
        Settings.from_bytes(data)


def test_settings_carry_the_name(pads: str) -> None:
    settings = replace(Federation().settings(), protocol=pads)
    assert Settings.from_bytes(settings.to_bytes()) == settings
    assert settings.traits is PADS
    assert scheme_of(pads) == (PadsClient, PadsServer)


def test_a_party_speaks_one_protocol_and_short_keys_only_if_they_are_named() -> None:
    assert scheme_of("secagg", "secagg+") == (PairwiseMasksClient, PairwiseMasksServer)
    for protocols in (("lightsecagg", "secagg"), ()):
        with pytest.raises(ParameterError, match="a party speaks one protocol"):
            scheme_of(*protocols)
    masks, keys = (CodedMasksClient, CodedMasksServer), (CodedKeysClient, CodedKeysServer)
    assert scheme_of("lightsecagg") == scheme_of("lightsecagg", share_mode=ShareMode.PAPER) == masks
    assert scheme_of("lightsecagg", share_mode=ShareMode.SHORT_KEY) == keys
    pairwise = scheme_of("secagg", share_mode=ShareMode.SHORT_KEY)
    assert pairwise == (PairwiseMasksClient, PairwiseMasksServer)


@pytest.mark.parametrize("malicious", [False, True])
@pytest.mark.parametrize("phase", [Phase.SHARE, Phase.UPLOAD, Phase.RECOVER])
def test_a_foreign_scheme_speaks_synchronously(pads: str, malicious: bool, phase: Phase) -> None:
    federation = Baseline(pads, N=8, T=0, D=2, malicious=malicious)
    gone = frozenset(federation.ids[:2])
    federation.fault = Fault(phase, "before", gone)
    result = federation.run()
    assert isinstance(result, Aggregate)
    included = set(federation.ids) - (gone if phase is not Phase.RECOVER else set())
    assert set(result.included) == included
    np.testing.assert_array_equal(result.total, federation.exact_sum(included))


def test_a_foreign_scheme_has_its_own_demands(pads: str) -> None:
    federation = Baseline(pads, N=8, T=0, D=2)
    federation.fault = Fault(Phase.RECOVER, "before", frozenset(federation.ids))
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert result.reason == "nobody answered"


@pytest.mark.parametrize("threat_model", ThreatModel)
def test_a_foreign_scheme_speaks_asynchronously(pads: str, threat_model: ThreatModel) -> None:
    fed = AsyncFederation(privacy=0, threat_model=threat_model, protocol=pads).open(masks=2)
    stale = [(4, 0), (5, 0)]
    for uploads in ([(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (1, 1), *stale]):
        for client, version in uploads:
            fed.upload(client, version)
        fed.settle()
    assert [set(result.weights) for result in fed.results] == [{64}, {64, 32}]
    fed.assert_exact()


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


def test_a_foreign_scheme_aggregates(pads: str) -> None:
    vectors = [np.full(3, 0.25 * client) for client in range(4)]
    result = lightsecagg.aggregate(vectors, privacy=0, bound=1.0, protocol=pads)
    np.testing.assert_allclose(result.mean, np.full(3, 0.375), atol=1e-6)


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


def test_a_foreign_scheme_has_budgets_and_a_configuration(pads: str) -> None:
    table = AggregationTable(
        protocol=pads, threat_model=ThreatModel.HONEST_BUT_CURIOUS, clients=9, privacy=0, dropouts=3
    )
    allow_list = AllowList({c: IdentityKey.generate().public for c in range(9)})
    settings = make_settings(table, VectorServer(VectorsTable(dimension=50)), bytes(32), allow_list)
    assert settings.traits is PADS
    assert phase_budget(settings, Phase.SHARE) > 8 * 4 * 50
    with pytest.raises(ValidationError, match="should be one of 'lightsecagg'"):
        AggregationTable(protocol="morse", clients=9, privacy=0, dropouts=3)
