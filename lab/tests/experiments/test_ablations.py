"""What the ideas behind rounds save: computed from rounds, not typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightsecagg.field import kernels, ntt
from lightsecagg.protocol import share_exchange
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.experiments import ablations
from lightsecagg_lab.experiments.ablations import ABLATIONS, AblationCell, on_one_core
from lightsecagg_lab.experiments.cells import Results, RoundCell, TrainingCell
from lightsecagg_lab.experiments.report import write_report
from lightsecagg_lab.experiments.setups import Profile
from lightsecagg_lab.experiments.timing import RoundTimes
from lightsecagg_lab.planning.timeline import PhaseTimes

TINY = Profile("quick", (8, 12), sample=2, repeats=2)


@pytest.fixture(scope="module")
def results() -> Results:
    found: Results = {}
    for cell in ablations.ablation_cells(TINY):
        if isinstance(cell, RoundCell):
            found[cell.key] = replace(cell, dimension=64).measure()
        elif isinstance(cell, AblationCell):
            small = replace(cell.round, dimension=4000, clients=12)
            found[cell.key] = replace(cell, round=small).measure()
        elif isinstance(cell, TrainingCell):
            found[cell.key] = {"seconds": [1.9, 2.0, 2.2]}
    return found


def test_each_idea_is_switched_off_and_on_again(results: Results, tmp_path: Path) -> None:
    report = ablations.ablation_report(TINY, results)
    write_report(report, {}, "command", tmp_path)
    assert len(report.tables[0].rows) == len(ABLATIONS)
    ratios = {name: report.figures[name]["ratios"] for name in ABLATIONS}
    assert ratios["seeded"]["client sends"].median > 1.5, "the paper's shares are all long"
    assert ratios["bundles"]["client sends"].low >= 1
    assert ratios["malicious"]["client sends"].median > 1, "signatures"
    assert ratios["native"]["client sends"].median == pytest.approx(1, abs=0.01)
    assert kernels.backend() == "native"
    assert ntt.evaluation_pays.__name__ == "evaluation_pays"
    assert share_exchange.BUNDLE_BYTES > 1


def test_malicious_rounds_are_another_cell_and_agree(results: Results) -> None:
    (cell,) = [c for c in ablations.ablation_cells(TINY) if "ablation-malicious" in c.key]
    found = results[cell.key]
    for kind, agrees in (("with", False), ("without", True)):
        sent = found[kind][0]["cold"]["agree"]["client_sent"]
        assert (sent > 0) is agrees


def test_without_bundles_every_share_is_a_message() -> None:
    with ABLATIONS["bundles"].switched():
        share = share_exchange.SealedShare  # as it is imported there
        shares = [share(0, 1, 1, 0, bytes(16), b"sealed")] * 5
        assert len(list(share_exchange.bundles(shares))) == 5
    assert len(list(share_exchange.bundles(shares))) == 1


def test_on_one_core_training_waits_for_the_offline_work() -> None:
    idle = PhaseTimes(0, 0, 0, 0)
    phases = dict.fromkeys((phase for phase in Phase if phase is not Phase.DONE), idle)
    phases[Phase.SHARE] = PhaseTimes(down=1, client=2, up=3, server=1)
    times = RoundTimes(phases, training=6.0)
    assert times.total(overlap=True) == 7.0
    assert on_one_core(times) == 8.0, "6 s of training and 2 s of sharing"
    assert on_one_core(replace(times, training=1.0)) == 7.0
