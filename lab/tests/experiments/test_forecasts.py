"""The planner beside the simulator: bytes to the byte, for configurations drawn at random."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightsecagg_lab.experiments import forecasts
from lightsecagg_lab.experiments.forecasts import ForecastCell, forecast_cells, forecast_report
from lightsecagg_lab.experiments.setups import FULL, QUICK
from lightsecagg_lab.planning import STATED
from lightsecagg_lab.schemes.baseline_traits import ProtocolName


def test_forecasts_of_bytes_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "calibrate", lambda: STATED)
    for cell in forecast_cells(QUICK)[:4]:
        assert isinstance(cell, ForecastCell)
        small = ForecastCell(replace(cell.round, dimension=997, repeats=1))
        found = small.measure()
        (sent,) = found["simulated"]["client_upload_bytes"]
        off = found["forecast"]["client_upload_bytes"] - sent
        # Of SecAgg+ it is by chance whose shares a client holds, and how long their ids are.
        sparse = cell.round.protocol is ProtocolName.SECAGG_PLUS
        assert 0 <= off <= (60 if sparse else 0)
        assert found["forecast"]["server_seconds"] > 0


def test_the_report_counts_what_is_within_the_factor() -> None:
    results = {
        cell.key: {
            "forecast": {
                "client_seconds": 0.1,
                "server_seconds": 0.3 if index else 0.31,
                "client_upload_bytes": 5,
            },
            "simulated": {
                "client_seconds": [0.04, 0.03, 0.9],
                "server_seconds": [0.2, 0.2, 0.2],
                "client_upload_bytes": [5, 5, 5 if index != 4 else 6],
            },
        }
        for index, cell in enumerate(forecast_cells(FULL))
    }
    report = forecast_report(FULL, results)
    # Clients take less than 50 ms by the median and do not count; one server is beyond the factor.
    assert (report.figures["within"], report.figures["of"], report.figures["exact"]) == (9, 10, 9)
