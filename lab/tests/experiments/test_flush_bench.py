"""`bench flushes`: buffers per minute, protected and not, over the same sockets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()"]


@pytest.mark.slow
def test_buffers_per_minute_are_counted_with_and_without_protection() -> None:
    size = ["--clients", "5", "--privacy", "1", "--dropouts", "1", "--buffer", "3", "--dim", "50"]
    command = [*COMMAND, "bench", "flushes", *size, "--flushes", "3", "--training", "0.2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["bench"]["training"] == 0.2
    runs = document["runs"]
    assert list(runs) == ["plain", "lightsecagg"]
    for run in runs.values():
        assert (run["buffers"], run["failed"]) == (3, 0)
        assert run["updates"] >= 6
        assert run["per_minute"] == pytest.approx(60 * 2 / run["seconds"])
    assert runs["plain"]["ratio_to_plain"] == 1
    assert runs["lightsecagg"]["ratio_to_plain"] > 0
