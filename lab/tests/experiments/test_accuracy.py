"""Accuracy through the masks: every way averages the same, and the report judges by the spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lightsecagg.training import LocalUpdate, TaskConfig
from lightsecagg_lab.commands.experiments import app
from lightsecagg_lab.experiments.accuracy import (
    PLAIN,
    WAYS,
    AccuracyCell,
    _average,
    accuracy_cells,
    accuracy_report,
)
from lightsecagg_lab.experiments.cells import Document

CELL = AccuracyCell(PLAIN, TaskConfig("digits", clients=20), seed=0)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_averaging_gives_the_average_of_the_clipped_updates(way: str) -> None:
    rng = np.random.default_rng(3)
    updates = [LocalUpdate(rng.normal(0, 0.3, 500).astype(np.float32), 60) for _ in range(20)]
    average = _average(replace(CELL, way=way), updates).delta
    expected = np.mean([np.clip(update.delta, -0.5, 0.5) for update in updates], axis=0)
    error = np.abs(average - expected).max()
    assert error < 0.005
    # Exact decoding leaves fewer bits than a float32 has; the others as many or more.
    assert (error > 1e-6) == (way == "short keys, exact")


def document(way: str, seed: int, accuracy: float) -> Document:
    cell = {"way": way, "seed": seed, "rounds": 2, "privacy": 1, "dropouts": 1, "bound": 0.5}
    return {"cell": cell | {"task": {"clients": 5}}, "accuracy": [0.1, accuracy]}


@pytest.mark.parametrize(("worse", "within"), [(0.01, True), (0.03, False)])
def test_a_difference_is_judged_by_the_spread_over_seeds(worse: float, within: bool) -> None:
    results = {
        f"{way}/{seed}": document(way, seed, accuracy - worse * (way == "short keys, exact"))
        for way in WAYS
        for seed, accuracy in enumerate((0.90, 0.92, 0.94))
    }
    report = accuracy_report("digits", results)
    assert report.figures["within_noise"] is within
    assert ("NOT within noise" in report.paragraphs[0]) is not within
    assert report.figures["short keys, exact"]["differences"] == pytest.approx([-worse] * 3)


def test_all_ways_are_trained_with_each_seed_and_one_seed_gives_no_verdict(tmp_path: Path) -> None:
    cells = accuracy_cells("mnist", tmp_path, seeds=2)
    assert len({cell.key for cell in cells}) == 2 * len(WAYS)
    command = ["accuracy", "--seeds", "1", "--rounds", "1", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "one seed gives no spread" in shown.output
    assert "short keys, dithered" in (tmp_path / "accuracy-digits.md").read_text()
