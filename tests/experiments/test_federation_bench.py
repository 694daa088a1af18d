"""A small federation over real sockets is measured, and its sum is that of the survivors."""

from __future__ import annotations

import pytest

pytest.importorskip("grpc")

from lightsecagg.experiments.federation_bench import FederationBench, measure


def test_a_federation_is_measured() -> None:
    bench = FederationBench(
        clients=5, privacy=1, dropouts=1, lost=1, dimension=50, processes=1, timeout=300.0
    )
    run = measure(bench, ("lightsecagg",))["runs"]["lightsecagg"]
    assert run["included"] == 4
    assert run["dropped"] == {"upload": 1}
    assert run["max_abs_difference"] <= run["quantisation_bound"]
    assert set(run["phases"]) == {"advertise", "share", "upload", "agree", "recover"}
    assert run["cpu_seconds"] > run["server_cpu_seconds"] > 0, "the clients' is in it"
    assert "ratio_to_plain" not in run
