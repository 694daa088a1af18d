"""The planner beside the simulator: bytes to the byte, for configurations drawn at random."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightsecagg.experiments import forecasts
from lightsecagg.experiments.forecasts import ForecastCell, forecast_cells, forecast_report
from lightsecagg.experiments.setups import FULL, QUICK
from lightsecagg.planning import STATED
from lightsecagg.protocol.settings import ProtocolName


def test_forecasts_of_bytes_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "calibrate", lambda: STATED)
    for cell in forecast_cells(QUICK)[:4]:
        assert isinstance(cell, ForecastCell)
        small = ForecastCell(replace(cell.round, dimension=997, repeats=1))
        found = small.measure()
        off = found["forecast"]["client_upload_bytes"] - found["simulated"]["client_upload_bytes"]
        assert 0 <= off <= (2 if cell.round.protocol is ProtocolName.SECAGG_PLUS else 0)
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
                "client_seconds": 0.04,
                "server_seconds": 0.2,
                "client_upload_bytes": 5 if index != 4 else 6,
            },
        }
        for index, cell in enumerate(forecast_cells(FULL))
    }
    report = forecast_report(FULL, results)
    # Clients are below 50 ms and do not count; of the servers, one is beyond a factor of 1.5.
    assert (report.figures["within"], report.figures["of"], report.figures["exact"]) == (9, 10, 9)
