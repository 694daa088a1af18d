"""What rounds of the laboratory protect from: T, the threat model, and SecAgg+'s graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.policy import Policy
from lightsecagg_lab.experiments.cells import RoundCell
from lightsecagg_lab.experiments.setups import (
    FEW_COLLUDERS,
    MALICIOUS,
    SPARSE,
    STANDARD,
    Profile,
    Protection,
    sparse_graph,
)
from lightsecagg_lab.planning.planner import Federation, round_settings
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.scenario import run

LIGHT, SECAGG, SECAGG_PLUS, PLAIN = ProtocolName
TINY = Profile("quick", (20,), sample=2, repeats=1)
PROTECTIONS = [STANDARD, FEW_COLLUDERS, SPARSE, MALICIOUS]


def test_who_colludes_and_drops() -> None:
    assert (STANDARD.privacy(200), STANDARD.dropouts(200, 0.5)) == (100, 98)
    assert (FEW_COLLUDERS.privacy(200), FEW_COLLUDERS.dropouts(200, 0.5)) == (20, 100)
    assert (MALICIOUS.privacy(200), MALICIOUS.dropouts(200, 0.1)) == (100, 20)
    assert MALICIOUS.dropouts(200, 0.3) == 49  # T + 2D < N


@pytest.mark.parametrize("protection", PROTECTIONS, ids=lambda protection: protection.name)
@pytest.mark.parametrize("protocol", list(ProtocolName))
def test_every_protocol_has_rounds_that_are_summed(
    protocol: ProtocolName, protection: Protection
) -> None:
    N = 50 if protection is SPARSE else 20
    if protection is MALICIOUS and protocol in (SECAGG_PLUS, PLAIN):
        with pytest.raises(ParameterError, match="malicious-server mode"):
            TINY.round(protocol, N, 0.1, 50, protection=protection)
        return
    cell = TINY.round(protocol, N, 0.1, 50, protection=protection)
    (outcome,) = run(replace(cell, sample=0).scenario())
    assert outcome.report.exact
    agreed = outcome.report.meter.phases[Phase.AGREE].client_seconds > 0
    assert agreed is (protection is MALICIOUS)
    insecure = any("insecure" in said for said in outcome.scenario.warnings())
    assert insecure is (protection is SPARSE and protocol is SECAGG_PLUS)


def test_cells_of_other_protections_are_other_cells() -> None:
    for protocol, others in ((LIGHT, {MALICIOUS}), (SECAGG, {MALICIOUS}), (SECAGG_PLUS, {SPARSE})):
        protections = {STANDARD, FEW_COLLUDERS} | others
        cells = {TINY.round(protocol, 20, 0.1, 50, protection=each).key for each in protections}
        assert len(cells) == 3
    assert (
        TINY.round(SECAGG, 20, 0.1, 50, protection=SPARSE).key
        == TINY.round(SECAGG, 20, 0.1, 50).key
    )
    default = TINY.round(SECAGG, 20, 0.1, 50)
    assert default == TINY.round(SECAGG, 20, 0.1, 50, protection=STANDARD)
    assert default.threat_model is ThreatModel.HONEST_BUT_CURIOUS


@pytest.mark.parametrize("dropouts", [20, 60, 98])
def test_S15_a_client_refuses_the_sparse_graph_unless_its_policy_allows_it(dropouts: int) -> None:
    """k = O(log N), as in the paper's setting, protects nobody from N / 2 colluders."""
    graph = sparse_graph(200, dropouts)
    assert graph[0] == 32
    assert 0 < graph[1] <= 18
    federation = Federation(200, 100, dropouts, 10)
    settings = round_settings(federation, SECAGG_PLUS, graph=graph)
    assert settings.traits.leak(settings, 200) > 0.5
    security = Policy.__dataclass_fields__["graph_security"].default
    assert security == 40
    with pytest.raises(RemoteProtocolError, match="k = 32 neighbours"):
        settings.traits.check_roster(_Policy(security), settings, 200)  # type: ignore[arg-type]
    settings.traits.check_roster(_Policy(0), settings, 200)  # type: ignore[arg-type]


class _Policy:
    """All that a protocol's roster is held against."""

    def __init__(self, graph_security: int) -> None:
        self.graph_security = graph_security


def test_a_graph_is_named_by_its_cell() -> None:
    cell = RoundCell(SECAGG_PLUS, 20, 10, 2, 50, graph=(6, 3))
    assert "-k6-t3-" in cell.key
    assert (cell.scenario().neighbours, cell.scenario().threshold) == (6, 3)
