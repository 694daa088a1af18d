"""Flower's own engines: its simulation, and a deployment of real processes with TLS and keys."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "flower-digits"
PROGRAMS = Path(sys.executable).parent
NODES = 4

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
    pytest.importorskip("ray", reason="needs the extra flower-simulation")
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_R30_a_deployment_with_tls_and_keys_gives_fedavgs_model(tmp_path: Path) -> None:
    """A SuperLink, four SuperNodes and their apps, all of them processes, on loopback.

    One SuperNode is killed when its last upload has left: the average has it all the same, and
    the answers of the others suffice.
    """
    if not (PROGRAMS / "flower-superlink").exists():
        pytest.skip("Flower's programs are not beside this Python")
    report = tmp_path / "report.npz"
    output = tmp_path / "output"
    with output.open("w") as file:
        running = subprocess.Popen(
            [str(EXAMPLE / "deploy.sh"), f"report='{report}'"],
            env={
                **environment(tmp_path),
                "KEEP": str(tmp_path),
                "NODES": str(NODES),
                "ROUNDS": "2",
                "PORT": str(free_port()),
            },
            stdout=file,
            stderr=file,
        )
        # hello, open, roster; update and answer of the first round; update of the second
        killed = kill_after(6, tmp_path, running)
        running.wait()
    logs = "".join(f"{log}:\n{log.read_text()[-1500:]}" for log in sorted(tmp_path.glob("*.log")))
    assert running.returncode == 0, output.read_text()[-4000:] + logs
    assert report.exists(), output.read_text()[-3000:] + logs
    assert killed, logs
    found = np.load(report)
    task = load_task()
    for server_round in (1, 2):
        before = {name: found[name][server_round - 1] for name in ("weight", "bias")}
        data = [task.load(position, NODES) for position in range(NODES)]
        trained = [task.train(before, *mine) for mine in data]
        weights = [len(labels) for _, labels in data]
        for name in before:
            wanted = np.average([t[name] for t in trained], axis=0, weights=weights)
            assert np.abs(found[name][server_round] - wanted).max() < 1e-6


def kill_after(replies: int, folder: Path, running: subprocess.Popen[Any]) -> bool:
    """Kill the last SuperNode when so many of its replies have left; False if the run ended."""
    log, pid = folder / f"node{NODES - 1}.log", folder / f"node{NODES - 1}.pid"
    while running.poll() is None:
        if log.exists() and log.read_text().count("Sent successfully") >= replies:
            os.kill(int(pid.read_text()), signal.SIGKILL)
            return True
        time.sleep(0.1)
    return False


def free_port() -> int:
    """A port for the SuperLink, so that those of the SuperNodes behind it are free too."""
    while True:
        with contextlib.ExitStack() as probes:
            first = probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for number in range(10, 10 + NODES):
                    probes.enter_context(socket.create_server(("127.0.0.1", first + number)))
            except (OSError, OverflowError):
                continue
            return int(first)


def load_task() -> Any:
    """The example's module, which is not installed."""
    spec = importlib.util.spec_from_file_location("digits_task", EXAMPLE / "digits" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
