"""Flower's own engines: its simulation, and a deployment of real processes with TLS and keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "flower-digits"
PROGRAMS = Path(sys.executable).parent

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        **OFFLINE,
        "FLWR_HOME": str(tmp_path),
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(EXAMPLE),
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_R30_the_simulation_engine_gives_fedavgs_model_though_nodes_fail(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs flwr[simulation]")
    done = subprocess.run(
        [sys.executable, str(HERE / "simulated_flower.py")],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(results[0].removeprefix("RESULT "))
    assert len(result["errors"]) == 3
    assert max(result["errors"]) < 1e-6
    assert result["accuracy"] > 0.8
