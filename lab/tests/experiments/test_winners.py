"""The winner of a setting is computed, with the phase that decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.experiments.breakdown import Column, table4_cells, table4_report
from lightsecagg_lab.experiments.cells import RoundCell
from lightsecagg_lab.experiments.setups import RATES, Profile
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.experiments.timing import TimedRounds
from lightsecagg_lab.experiments.winners import Breakdown, winner
from lightsecagg_lab.planning import Topology
from lightsecagg_lab.planning.timeline import PhaseTimes

TINY = Profile("quick", (8,), sample=2, repeats=1)


def parts(offline: float, uploading: float, recovery: float, training: float = 3.0) -> Breakdown:
    """A round whose quartiles are 1 % off."""
    seconds = {
        "offline": offline,
        "training": training,
        "uploading": uploading,
        "recovery": recovery,
        "total": offline + training + uploading + recovery,
        "overlapped": max(offline, training) + uploading + recovery,
    }
    return {name: Spread(value, value * 0.99, value * 1.01) for name, value in seconds.items()}


LIGHT, SECAGG = parts(2.0, 1.0, 0.1), parts(1.0, 1.2, 15.0)


def test_the_recovery_decides_for_lightsecagg() -> None:
    for overlap in (True, False):
        found = winner({"SecAgg": SECAGG, "LightSecAgg": LIGHT}, overlap)
        assert (found.name, found.runner_up, found.decisive) == (
            "LightSecAgg",
            "SecAgg",
            "recovery",
        )
        assert found.decisive_seconds == 14.9
        assert found.clear


def test_a_long_offline_phase_decides_against_it() -> None:
    found = winner({"LightSecAgg": parts(50.0, 1.0, 0.1), "SecAgg": SECAGG}, overlap=True)
    assert (found.name, found.decisive) == ("SecAgg", "offline")
    assert found.decisive_seconds == 47.0, "3 s of it are hidden by training"


def test_what_training_hides_decides_nothing() -> None:
    light, other = parts(2.9, 1.0, 0.1), parts(0.1, 1.1, 0.1)
    assert winner({"LightSecAgg": light, "other": other}, overlap=True).name == "LightSecAgg"
    assert winner({"LightSecAgg": light, "other": other}, overlap=False).name == "other"


def test_close_rounds_have_no_clear_winner() -> None:
    found = winner({"a": parts(1.0, 1.0, 0.10), "b": parts(1.0, 1.0, 0.12)}, overlap=True)
    assert found.name == "a"
    assert not found.clear


def rounds(
    offline: float, uploading: float, recovery: float, trainings: tuple[float, ...] = (3.0,)
) -> TimedRounds:
    """Three rounds whose server takes about so long."""
    seconds = {Phase.SHARE: offline, Phase.UPLOAD: uploading, Phase.AGREE: 0.0}
    warm = tuple(
        {
            phase: PhaseTimes(0.0, 0.0, 0.0, factor * each)
            for phase, each in (seconds | {Phase.RECOVER: recovery}).items()
        }
        for factor in (0.98, 1.0, 1.02)
    )
    return TimedRounds(warm, warm[0], trainings)


def test_a_column_says_where_lightsecagg_loses_even_if_short_keys_win() -> None:
    measured = {
        "LightSecAgg": rounds(50.0, 1.0, 0.1),
        "SecAgg": rounds(1.0, 1.2, 15.0),
        "SecAgg+": rounds(1.0, 1.2, 16.0),
        "LightSecAgg, short keys": rounds(2.0, 1.0, 0.1),
    }
    column = Column(Topology.RELAY, 0.5, True, measured)
    assert column.verdict() == [
        "relay, p = 50%, overlapped",
        "LightSecAgg, short keys",
        "4.10 (4.09-4.11)",
        "SecAgg",
        "4.68 (4.63-4.74)",
        "recovery: 14.90 s less",
    ]
    assert column.loss() == (
        "relay, p = 50%, overlapped: LightSecAgg takes 2.66 (2.61-2.71) times as long as SecAgg, "
        "and loses 47.00 s in the offline phase."
    )
    won = Column(Topology.DIRECT, 0.1, True, {**measured, "LightSecAgg": rounds(2.0, 1.0, 0.1)})
    assert won.loss() == ""


def test_what_trainings_differ_by_does_not_hide_what_protocols_differ_by() -> None:
    """They train the same model: beside the same training one is always the faster."""
    trainings = (2.0, 3.0, 4.0)
    fast, slow = rounds(1.0, 1.0, 0.1, trainings), rounds(1.0, 1.0, 0.4, trainings)
    assert slow.total(overlap=True).low < fast.total(overlap=True).high, "they look alike"
    column = Column(Topology.RELAY, 0.1, True, {"a": slow, "b": fast})
    assert (column.fastest.name, column.fastest.clear) == ("b", True)


def test_table4_names_a_winner_for_every_column() -> None:
    results: dict[str, Any] = {}
    for cell in table4_cells(TINY):
        small = replace(cell, dimension=64) if isinstance(cell, RoundCell) else None
        results[cell.key] = small.measure() if small else {"seconds": [2.0]}
    report = table4_report(TINY, results)
    names = {name for name in report.figures["relay"] if report.figures["relay"][name]}
    assert names == {"LightSecAgg", "SecAgg", "SecAgg+", "LightSecAgg, short keys"}
    assert len(report.figures["fastest"]) == len(RATES) * len(Topology) * 2
    assert {each["name"] for each in report.figures["fastest"].values()} <= names
    assert report.tables[-1].rows == [
        row for row in report.tables[-1].rows if row[1] in names and row[3] in names - {row[1]}
    ]
    assert "Of 12 settings the fastest is " in " ".join(report.paragraphs)
