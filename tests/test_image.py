"""What can be said of the container image without building it; `scripts/image` does that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightsecagg.drivers.federation.observer import Metrics

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"from urllib\.request import [^\"]*\)")


@pytest.mark.parametrize("name", ["compose.yaml", "docs/containers.md", "scripts/image"])
def test_the_health_check_tells_a_server_that_answers_from_one_that_does_not(name: str) -> None:
    (program,) = set(PROGRAM.findall((ROOT / name).read_text("utf-8")))
    metrics = Metrics()
    metrics.serve(0)
    command = [sys.executable, "-c", program.replace(":9100/", f":{metrics.port}/")]
    assert command[-1] != program
    assert subprocess.run(command).returncode == 0
    metrics.close()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 1


def test_the_last_stage_installs_nothing_and_is_not_root() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.M)[1:]
    assert len(stages) == 2
    assert "g++" in stages[0]
    assert not re.search(r"apt|pip install", stages[-1])
    assert re.findall(r"^USER (.*)", stages[-1], re.M) == ["1000:1000"]


def test_what_was_compiled_here_stays_here() -> None:
    """A library from the working tree would hide that the image's own build failed."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines.index("**/*.so") > lines.index("!src")
