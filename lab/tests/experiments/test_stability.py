"""Two recordings compared, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.commands.experiments import app
from lightsecagg_lab.experiments.report import Report, write_report
from lightsecagg_lab.experiments.stability import stability_report
from lightsecagg_lab.experiments.statistics import Spread


def record(folder: Path, **figures: Spread) -> Path:
    """A recording of one experiment."""
    report = Report("overhead", "t", figures={"relay": figures, "cold": 3.0})
    write_report(report, {}, "command", folder)
    return folder


def test_two_recordings_are_compared(tmp_path: Path) -> None:
    first = record(tmp_path / "1", ratio=Spread(1.0, 0.9, 1.1), round=Spread(4.0, 3.9, 4.1))
    second = record(tmp_path / "2", ratio=Spread(1.05, 0.95, 1.2), round=Spread(5.0, 4.9, 5.1))
    run = f"stability {first} {second} --out {tmp_path} --json".split()
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["stable"], document["not_stable"]) == (1, 1)
    assert document["overhead"]["relay/ratio"]["stable"] is True
    text = (tmp_path / "stability.md").read_text("utf-8")
    assert "| relay/round | 4 (3.9-4.1) | 5 (4.9-5.1) | 1.250 | not stable |" in text
    assert "1 are not stable" in text
    assert "No two medians differ by more than 25.0 %." in text


def test_recordings_without_repetitions_are_not_compared(tmp_path: Path) -> None:
    folders = [record(tmp_path / name) for name in ("1", "2")]
    with pytest.raises(ConfigurationError, match="no repeated measurement in common"):
        stability_report(*folders)
    (tmp_path / "1" / "overhead.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is not the report of an experiment"):
        stability_report(*folders)
