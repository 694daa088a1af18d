"""The app with a convolutional network, and the notebook beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from local_grid import LocalGrid

EXAMPLE = Path(__file__).parents[3] / "examples" / "flower-cnn"
NOTEBOOK = EXAMPLE / "plain_to_protected.ipynb"


@pytest.mark.slow
def test_a_stock_network_with_batch_norm_learns_in_the_app_with_two_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from cnn import client_app, server_app, task  # type: ignore[import-not-found]

    grid = LocalGrid()
    settings: dict[str, Any] = {
        "num-server-rounds": 4,
        "fraction-evaluate": 0.0,
        "local-epochs": 2,
        "learning-rate": 0.05,
        "batch-size": 32,
    }
    for position in range(5):
        node = grid.add(101 + position, client_app.app, partition_id=position, num_partitions=5)
        node.run_config = settings
    seen = task.accuracy(task.Net(), task.load_test_data())
    assert seen < 0.3
    server_app.main(grid, Context(1, 1, {}, RecordDict(), settings))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert [line.split(":")[0] for line in lines] == [f"round {number}" for number in range(5)]
    assert float(lines[-1].rsplit(" ", 1)[1]) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_plain_to_protected(tmp_path: Path) -> None:
    """Its cells in their order; its own assertions check the image and the masked updates."""
    pytest.importorskip("ray", reason="needs the extra flower-simulation")
    cells = [
        c for c in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if c["cell_type"] == "code"
    ]
    assert not any(cell["outputs"] for cell in cells), "clear the outputs before a commit"
    program = tmp_path / "cells.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in cells), "utf-8")
    offline = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert sum(line.startswith("accuracy after three rounds") for line in said) == 2
    assert "15 masked updates of 651 numbers each" in said
