"""Seconds of a round in a deployment: a SuperLink, SuperNodes, and a process per message.

One deployment, with TLS and node authentication, on loopback or over shaped links; the contestants
run in it one after the other, again and again. LightSecAgg's enrolment, which a run has once, is
told apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg_lab.experiments.namespaces import visiting
from lightsecagg_lab.experiments.shaped_links import SERVER_ADDRESS, ShapedLinks

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "flower-digits"
PROGRAMS = Path(sys.executable).parent

PATIENCE = 240.0
"""Seconds for one run. On a busy machine Flower's apps miss the deadlines of their tokens, and the
messages that they worked on are never answered: then there is nothing to measure."""
LOOPBACK = "127.0.0.1"
POLITE = 20.0
"""Seconds that Flower's programs have to end by themselves."""

_PR_SET_CHILD_SUBREAPER = 36

CONTESTANTS = {
    "plain": ("message_server", "plain_client"),
    "secagg+": ("legacy_server", "legacy_client"),
    "lightsecagg": ("message_server", "masked_client"),
}


def measure(
    nodes: int, repeat: int, rounds: int, only: list[str] | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    chosen = only or list(CONTESTANTS)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder), nodes, tell) as deployed:
        for turn in range(repeat):
            for name in chosen:
                run = deployed.run(name, rounds)
                runs[name].append(run)
                tell(f"turn {turn + 1}, {name}: rounds of {run['rounds']} s")
    figures = {name: _figures(found) for name, found in runs.items()}
    for name, others in (("lightsecagg", ("plain", "secagg+")), ("secagg+", ("plain",))):
        for other in set(others) & figures.keys():
            if name in figures:
                ratio = figures[name]["seconds_per_round"] / figures[other]["seconds_per_round"]
                figures[name][f"times_{other}"] = round(ratio, 2)
    return figures


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [second for run in runs for second in run["rounds"]]
    return {
        "seconds_per_round": round(statistics.median(seconds), 2),
        "best": round(min(seconds), 2),
        "enrolment": round(statistics.median(run["enrolment"] for run in runs), 2),
        "seconds_of_all_rounds": round(statistics.median(run["total"] for run in runs), 2),
        "runs": [{k: v for k, v in run.items() if k != "models"} for run in runs],
    }


class Deployment:
    """The processes, all ended with the block.

    With `links`, the SuperLink and who runs apps are in the server's namespace, each SuperNode is
    in one of the clients'. `task` is the source of the apps' module of that name; `environment` is
    for all programs.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        tell: Callable[[str], None],
        patience: float = PATIENCE,
        links: ShapedLinks | None = None,
        task: str | None = None,
        **environment: str,
    ) -> None:
        self._folder, self._nodes, self._tell, self._patience = folder, nodes, tell, patience
        self._links = links
        self._host = LOOPBACK if links is None else SERVER_ADDRESS
        self._task = task or (EXAMPLE / "digits" / "task.py").read_text("utf-8")
        with self._at(None):
            self._port = free_port(nodes)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            **environment,
        }

    def __enter__(self) -> Deployment:
        _adopt_orphans()
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whoever is interrupted may be killed soon, and then could end nobody any more.
        self._stop(POLITE if kind is None else 0.0)

    def _at(self, node: int | None) -> contextlib.AbstractContextManager[None]:
        """In a node's namespace, or in the server's, if there are any."""
        if self._links is None:
            return contextlib.nullcontext()
        return visiting(self._links.server if node is None else self._links.clients[node])

    def run(self, name: str, rounds: int) -> dict[str, Any]:
        """One run of an app of `rounds` rounds; `models` are those before and after each."""
        report = self._folder / "report.json"
        for left in (report, _models_of(report)):
            left.unlink(missing_ok=True)
        config = f"nodes={self._nodes} rounds={rounds} report='{report}'"
        config += f" secure={str(name == 'lightsecagg').lower()}"
        app = self._app(name)
        done = self._call("flwr", "run", str(app), "bench", "--stream", "--run-config", config)
        if not report.exists():
            logs = "".join(log.read_text()[-2000:] for log in sorted(self._folder.glob("*.log")))
            raise RuntimeError(f"{name} has reported nothing:\n{done[-3000:]}\n{logs}")
        found: dict[str, Any] = json.loads(report.read_text())
        with np.load(_models_of(report)) as stacked:
            columns = {array: stacked[array] for array in stacked.files}
        found["models"] = [
            {array: column[number] for array, column in columns.items()}
            for number in range(rounds + 1)
        ]
        return found

    def _app(self, name: str) -> Path:
        """The app's folder, made on first use."""
        app = self._folder / f"app-{name.strip('+')}"
        if not app.exists():
            server, client = CONTESTANTS[name]
            shutil.copytree(HERE / "app", app / "bench", ignore=shutil.ignore_patterns("__*"))
            (app / "bench" / "task.py").write_text(self._task, "utf-8")
            (app / "bench" / "__init__.py").write_text("")
            (app / "pyproject.toml").write_text(
                PYPROJECT.format(name=app.name, server=server, client=client)
            )
        return app

    def _start(self) -> None:
        (self._folder / "flwr").mkdir()
        address, folder = f"{self._host}:{self._port}", self._folder
        self._call(
            sys.executable,
            *(str(EXAMPLE / "make_keys.py"), str(folder), str(self._nodes), self._host),
        )
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{address}"\n'
            f'root-certificates = "{folder}/ca.crt"\n'
        )
        self._spawn(
            "superlink",
            *("flower-superlink", "--ssl-certfile", f"{folder}/server.pem"),
            *("--ssl-keyfile", f"{folder}/server.key", "--ssl-ca-certfile", f"{folder}/ca.crt"),
            *("--enable-supernode-auth", "--host", self._host, "--port", str(self._port)),
            "--disable-runtime-dependency-installation",
        )
        self._wait_for_superlink()
        for node in range(self._nodes):
            self._call("flwr", "supernode", "register", f"{folder}/node{node}.pub", "bench")
            (folder / f"memory{node}").mkdir()
            self.start_node(node)
        self._tell(f"a SuperLink and {self._nodes} SuperNodes are started")

    def start_node(self, node: int) -> None:
        """A SuperNode, with what is in its folder."""
        folder = self._folder
        config = f"partition-id={node} num-partitions={self._nodes} "
        config += f'lightsecagg-dir="{folder}/memory{node}"'
        self._spawn(
            f"node{node}",
            *("flower-supernode", "--root-certificates", f"{folder}/ca.crt"),
            *("--superlink", f"{self._host}:{self._port}"),
            *("--auth-supernode-private-key", f"{folder}/node{node}"),
            *("--host", LOOPBACK, "--port", str(self._port + 10 + node)),
            *("--node-config", config),
            node=node,
        )

    def kill_node(self, node: int) -> None:
        """SIGKILL for a SuperNode and for all that it has started."""
        process = self._processes[f"node{node}"]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log_of(self, node: int) -> str:
        """What a SuperNode has said so far, before it was killed too."""
        return (self._folder / f"node{node}.log").read_text()

    def _wait_for_superlink(self) -> None:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and self._processes["superlink"].poll() is None:
            with (
                contextlib.suppress(OSError),
                self._at(None),
                socket.create_connection((self._host, self._port)),
            ):
                return
            time.sleep(0.2)
        said = (self._folder / "superlink.log").read_text()[-3000:]
        raise RuntimeError(f"the SuperLink did not start:\n{said}")

    def _spawn(self, name: str, *command: str, node: int | None = None) -> None:
        with self._at(node), (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def _call(self, *command: str) -> str:
        with self._at(None):
            done = subprocess.run(
                command,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=self._patience,
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def _stop(self, polite: float = 0.0) -> None:
        """Ask them to end, if there is time for it; then kill who is left of them."""
        ours = set(self._left())
        try:
            self._ask_to_end(polite)
        finally:  # who is interrupted while they end by themselves must end them too
            self._kill(ours)

    def _ask_to_end(self, seconds: float) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self, ours: set[int]) -> None:
        while left := self._left():
            ours |= set(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self._processes.values():
            process.wait()
        for pid in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _left(self) -> list[int]:
        """Processes of this deployment that live.

        Flower starts some in sessions of their own: what tells them all is the folder that they
        have inherited, which is nobody else's.
        """
        mark = f"FLWR_HOME={self._environment['FLWR_HOME']}".encode()
        return [
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if mark in _environment_of(process)
        ]


def _adopt_orphans() -> None:
    """Whom Flower's programs leave behind is this process's child then, and its CPU time is ours:
    it would count as that of others, beside whom nothing can be measured."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _environment_of(process: Path) -> list[bytes]:
    """Empty for one that has ended, or is somebody else's."""
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _models_of(report: Path) -> Path:
    return report.with_suffix(".npz")


def free_port(nodes: int) -> int:
    """A port for the SuperLink, such that those of the SuperNodes behind it are free too."""
    for first in _ports():
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            for number in (0, *range(10, 10 + nodes)):
                probes.enter_context(socket.create_server((LOOPBACK, first + number)))
            return first
    raise AssertionError("ports do not end")


def _ports() -> Iterator[int]:
    while True:
        with socket.create_server((LOOPBACK, 0)) as probe:
            port = probe.getsockname()[1]
        yield int(port)


PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "lightsecagg"

[tool.flwr.app.components]
serverapp = "bench.{server}:app"
clientapp = "bench.{client}:app"

[tool.flwr.app.config]
rounds = 2
nodes = 4
secure = true
report = ""
"""
