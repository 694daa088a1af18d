"""A short soak over real sockets, and one that is interrupted (R38, R40)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("grpc")

if not Path("/proc/self/statm").exists():
    pytest.skip("the system does not tell a process's memory", allow_module_level=True)

from lightsecagg_lab.experiments.soak import Plan, Progress

PROGRAM = "from lightsecagg.cli.main import main; main()"


def start(*arguments: str, bench: str = "soak") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "bench", bench, *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_of(session: int) -> list[str]:
    """Command lines of the living processes of this session."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((status.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def nobody_is_left(session: int) -> bool:
    deadline = time.monotonic() + 60
    while processes_of(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_R38_a_short_soak_measures_memory_and_checks_the_last_sum() -> None:
    with start("--rounds", "20", "--dim", "50", "--timeout", "120", "--json") as run:
        out, err = run.communicate(timeout=180)
    assert run.returncode == 0, err
    findings = json.loads(out)["findings"]
    assert findings["rounds"] == 20
    assert findings["aborted"] == 0
    assert findings["included"] == 5
    assert findings["largest_difference"] <= findings["allowed_difference"]
    assert set(findings["server_bytes"]) == {"connected", "10 %", "end"}
    assert all(10**7 < size < 10**9 for size in findings["server_bytes"].values())
    assert findings["interrupted"] is False


def test_progress_is_told_while_clients_connect_and_with_the_rounds() -> None:
    lines: list[str] = []
    progress = Progress(Plan(clients=1000, rounds=2), lines.append)
    memory: dict[str, int] = {}
    for connected in (0, 99, 100, 150, 1000):
        progress(connected, 0, memory)
    memory["connected"] = 300_000_000
    progress(1000, 0, memory)
    memory["end"] = 492_000_000
    progress(1000, 1, memory)
    assert lines == [
        "0 connected, 0 of 2 rounds",
        "100 connected, 0 of 2 rounds",
        "1000 connected, 0 of 2 rounds",
        "1000 connected, 1 of 2 rounds, server 492.0 MB",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_R40_an_interrupted_soak_reports_and_leaves_no_process(number: signal.Signals) -> None:
    with start("--rounds", "100000", "--dim", "50", "--timeout", "120") as run:
        assert run.stderr is not None
        line = run.stderr.readline()
        while line and " connected" not in line:
            line = run.stderr.readline()
        assert line
        os.kill(run.pid, number)
        out, err = run.communicate(timeout=60)
        assert run.returncode == 130, err
        assert "rounds, 0 aborted" in out
        assert "interrupted" in err
        assert nobody_is_left(run.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_R40_an_interrupted_bench_leaves_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    size = ("--clients", "8", "--privacy", "1", "--dropouts", "2", "--lost", "0")
    with start(*size, "--dim", "5000000", bench="federation") as run:
        while not list(tmp_path.glob("*/server.log")):
            assert run.poll() is None
            time.sleep(0.05)
        os.kill(run.pid, number)
        _, err = run.communicate(timeout=120)
        assert run.returncode == (-number if number == signal.SIGKILL else 130), err
        assert "Traceback" not in err
        assert nobody_is_left(run.pid)
        assert number == signal.SIGKILL or not list(tmp_path.iterdir())
