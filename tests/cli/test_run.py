"""`lightsecagg run`: the whole demonstration, and nothing left behind when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.demo import DemoConfig, plan_deaths
from lightsecagg.errors import ConfigurationError

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()", "run"]
SMALL = ["--clients", "5", "--rounds", "2", "--epochs", "1", "--timeout", "200"]


def processes_of(session: int) -> list[int]:
    """Every live process of a session, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[3]) == session and stat[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_run_trains_kills_compares_and_reports(tmp_path: Path) -> None:
    command = [*COMMAND, *SMALL, "--json", "--out", str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rounds"] == 2
    assert 0.3 < document["accuracy"] <= 1
    assert document["seconds"] > 0
    assert document["matches_plain_average"] is True
    assert 0 < document["max_abs_difference"] <= document["quantisation_bound"] < 1e-4
    assert set(document["phases"]) == {"advertise", "share", "upload", "agree", "recover"}
    for phase in document["phases"].values():
        assert phase["seconds"] > 0
        assert phase["client_upload_bytes"] > 0
    planned = plan_deaths(DemoConfig(clients=5, privacy=1, dropouts=1, dropout=1, rounds=2))
    killed = {(death["client"], death["round"], death["phase"]) for death in document["dropped"]}
    assert killed == {(c, r, phase) for c, deaths in planned.items() for r, phase in deaths.items()}
    assert killed, "a demonstration without a dropout shows little"
    report = tmp_path / "report"
    assert document["report"] == str(report)
    assert (report / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((report / "run.json").read_text()) == document
    assert "no real client does that" in done.stderr


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [*COMMAND, *SMALL, "--rounds", "500", "--out", str(tmp_path / "report")]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(processes_of(process.pid)) < 7:  # the parent, the server and five clients
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
        while processes_of(process.pid):
            assert time.monotonic() < deadline + 60, processes_of(process.pid)
            time.sleep(0.1)
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_more_kills_than_dropouts_are_a_usage_error() -> None:
    with pytest.raises(ConfigurationError, match=r"--dropout 3 must be 0 to D = 2"):
        plan_deaths(DemoConfig(dropouts=2, dropout=3))
    result = CliRunner().invoke(app, ["run", "--dropout", "7"])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigurationError)


def test_who_is_killed_follows_from_the_seed_alone() -> None:
    config = DemoConfig(rounds=30, seed=5)
    assert plan_deaths(config) == plan_deaths(config)
    assert plan_deaths(config) != plan_deaths(DemoConfig(rounds=30, seed=6))
    per_round = [
        sum(number in deaths for deaths in plan_deaths(config).values()) for number in range(1, 31)
    ]
    assert 0 < max(per_round) <= config.dropouts
