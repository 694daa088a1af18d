"""The planner's unit costs, measured from small rounds."""

from __future__ import annotations

import pytest

from lightsecagg_lab.planning.unit_costs import describe
from lightsecagg_lab.simulation import calibration


def test_calibration_measures_every_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_TRIES", 1)
    costs = describe(calibration.calibrate())
    always = set(costs) - {"relay_growth", "sealed_byte", "relayed_byte", "element", "butterfly"}
    assert all(costs[name] for name in always)
