"""Sampled rounds: the server and the real clients meet exactly what they meet in a full round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightsecagg.drivers.cohort import Cohort
from lightsecagg.errors import ParameterError
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.faults import Drop, Faults
from lightsecagg_lab.simulation.scenario import Outcome, Scenario, run
from lightsecagg_lab.simulation.synchronous import simulate_round

HONEST, MALICIOUS = ThreatModel.HONEST_BUT_CURIOUS, ThreatModel.MALICIOUS_SERVER


def outcome(scenario: Scenario) -> Outcome:
    return next(run(scenario))


def make_scenario(
    protocol: ProtocolName, threat_model: ThreatModel, share_mode: ShareMode
) -> Scenario:
    parameters = Parameters(12, 3, 3, 7, threat_model, share_mode)
    drops = (Drop(Phase.UPLOAD, 2), Drop(Phase.RECOVER, 1))
    return Scenario(protocol, parameters, dimension=100, drops=drops)


@pytest.mark.parametrize(
    ("protocol", "threat_model", "share_mode"),
    [
        (ProtocolName.LIGHTSECAGG, HONEST, ShareMode.SEEDED),
        (ProtocolName.LIGHTSECAGG, HONEST, ShareMode.PAPER),
        (ProtocolName.LIGHTSECAGG, MALICIOUS, ShareMode.SEEDED),
        (ProtocolName.SECAGG, HONEST, ShareMode.SEEDED),
        (ProtocolName.SECAGG, MALICIOUS, ShareMode.SEEDED),
        (ProtocolName.SECAGG_PLUS, HONEST, ShareMode.SEEDED),
        (ProtocolName.PLAIN, HONEST, ShareMode.SEEDED),
    ],
)
def test_a_sampled_round_moves_the_same_bytes_as_a_full_one(
    protocol: ProtocolName, threat_model: ThreatModel, share_mode: ShareMode
) -> None:
    scenario = make_scenario(protocol, threat_model, share_mode)
    full = outcome(scenario)
    sampled = outcome(replace(scenario, sample_clients=2))
    assert full.report.exact is True
    assert sampled.report.exact is None
    assert sampled.report.aborted is None
    assert sampled.report.aggregate is not None
    assert full.report.aggregate is not None
    assert len(sampled.report.aggregate.included) == len(full.report.aggregate.included) == 10
    answered = 0 if protocol is ProtocolName.PLAIN else 9
    assert len(sampled.report.aggregate.responders) == answered
    assert not sampled.report.aggregate.suspects
    assert not sampled.report.refused
    for phase, costs in full.document()["phases"].items():
        for name, value in costs.items():
            if name.endswith("_bytes"):
                assert sampled.document()["phases"][phase][name] == value, (phase, name)


def test_only_real_clients_are_charged() -> None:
    scenario = make_scenario(ProtocolName.LIGHTSECAGG, HONEST, ShareMode.SEEDED)
    report = outcome(replace(scenario, sample_clients=3)).report
    for phase in (Phase.ADVERTISE, Phase.SHARE, Phase.UPLOAD, Phase.RECOVER):
        loads = report.meter.phases[phase].clients
        assert {client for client, load in loads.items() if load.seconds} == {0, 1, 2}


def _cohort() -> Cohort:
    return Scenario(ProtocolName.LIGHTSECAGG, Parameters(8, 2, 2, 5), dimension=10).cohort()


@pytest.mark.parametrize("size", [0, 6])
def test_a_sample_is_at_most_as_large_as_U(size: int) -> None:
    scenario = Scenario(ProtocolName.LIGHTSECAGG, Parameters(8, 2, 2, 5), dimension=10)
    with pytest.raises(ParameterError, match="between 1 and U = 5"):
        simulate_round(_cohort(), lambda c: scenario.input(0, c), sample=size)


def test_sampled_clients_do_not_drop_and_are_not_late() -> None:
    scenario = Scenario(
        ProtocolName.LIGHTSECAGG,
        Parameters(8, 2, 2, 5),
        dimension=10,
        drops=(Drop(Phase.UPLOAD, 6),),
        sample_clients=4,
    )
    with pytest.raises(ParameterError, match="6 clients should drop, but there are only 4"):
        outcome(scenario)
    with pytest.raises(ParameterError, match="not be late"):
        simulate_round(
            _cohort(), lambda c: scenario.input(0, c), Faults(late={1: Phase.UPLOAD}), sample=2
        )
