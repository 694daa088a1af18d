"""A throw-away federation on this machine: real processes, real sockets, real dropouts.

The main job of the README. It provisions a federation in a temporary folder, starts the server
and every client as a process of its own over loopback TLS, and kills up to D clients per round
with SIGKILL in the middle of a phase; a killed client is restarted and joins the next round.

To prove that the secure average is the plain average, the demo's clients ALSO write their plain
updates into a local folder. No real client does that.

Processes are forked from a server that has imported torch once: nine imports would take most of
the time. It is forked before any key exists.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.provisioning import Provisioned, provision
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.settings import ProtocolName

_PRELOAD = ["lightsecagg.training.warm_up", "sklearn.datasets"]

# Phase -> the message before which a doomed client is killed.
_LAST_WORDS = {
    "share": ("SealedShare",),
    "upload": ("MaskedUpload",),
    "agree": ("SurvivorSignature",),
    "recover": ("AggregatedShare", "UnmaskingShares"),
}

Watch = Callable[[str, int, int, int], None]
"""Told (phase, done, expected, completed rounds)."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What to demonstrate."""

    clients: int = 8
    privacy: int = 3
    dropouts: int = 2
    survivors: int = 0
    protocol: ProtocolName = ProtocolName.LIGHTSECAGG
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    rounds: int = 4
    dropout: int = 2
    """How many clients are killed per round, at most."""
    task: Mapping[str, Any] = field(default_factory=lambda: {"task": "digits"})
    local: Mapping[str, Any] = field(default_factory=dict)
    bound: float = 4.0
    overlap: str = "thread"
    """Where clients train while they share masks; `process` doubles the processes."""
    seed: int = 0
    """Steers data, training and who is killed when; never a mask."""
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What happened."""

    records: list[dict[str, Any]]
    spans: dict[tuple[int, int], list[dict[str, Any]]]
    """(round, client) -> what that client did, and when."""
    killed: list[dict[str, Any]]
    max_abs_difference: float
    quantisation_bound: float
    matches: bool
    seconds: float


def plan_deaths(config: DemoConfig) -> dict[int, dict[int, str]]:
    """Client -> round -> phase in which it is killed; at most `dropout` clients per round."""
    if not 0 <= config.dropout <= config.dropouts:
        raise ConfigurationError(
            f"--dropout {config.dropout} must be 0 to D = {config.dropouts}: more dropouts than "
            "the parameters allow would abort every round"
        )
    rng = random.Random(config.seed)  # noqa: S311 - who is killed is no secret
    phases = ["share", "upload", "recover"]
    if config.threat_model is ThreatModel.MALICIOUS_SERVER:
        phases.append("agree")
    if config.protocol is ProtocolName.PLAIN:
        phases = ["upload"]
    deaths: dict[int, dict[int, str]] = {}
    for number in range(1, config.rounds + 1):
        for client in rng.sample(range(config.clients), rng.randint(0, config.dropout)):
            deaths.setdefault(client, {})[number] = rng.choice(phases)
    return deaths


def run_demo(config: DemoConfig, folder: Path, watch: Watch) -> DemoResult:
    """The whole demonstration; `folder` receives keys, state and traces."""
    started = time.monotonic()
    deaths = plan_deaths(config)
    trace = folder / "trace"
    trace.mkdir(mode=0o700, parents=True)
    made = provision(
        folder / "federation",
        config.clients,
        privacy=config.privacy,
        dropouts=config.dropouts,
        bound=config.bound,
        port=_free_port(),
    )
    processes = _Processes(config, made, trace, deaths)
    try:
        processes.start()
        _wait(processes, config, watch)
    finally:
        processes.stop()
    records = json.loads((made.server.parent / "state" / "rounds.json").read_text())
    difference, bound, matches = _compare(records, trace)
    return DemoResult(
        records=records,
        spans=_read_spans(trace),
        killed=processes.killed,
        max_abs_difference=difference,
        quantisation_bound=bound,
        matches=matches,
        seconds=time.monotonic() - started,
    )


class _Processes:
    """The server and the clients, each a process; all are gone after `stop`."""

    def __init__(
        self,
        config: DemoConfig,
        made: Provisioned,
        trace: Path,
        deaths: dict[int, dict[int, str]],
    ) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._config, self._made, self._trace, self._deaths = config, made, trace, deaths
        self.progress: SimpleQueue[tuple[str, int, int, int]] = self._context.SimpleQueue()
        self.server: ForkServerProcess | None = None
        self.clients: dict[int, ForkServerProcess] = {}
        self.killed: list[dict[str, Any]] = []

    def start(self) -> None:
        arguments = (self._made.server, self._overrides(), self._trace.parent, self.progress)
        self.server = self._context.Process(target=_server_main, args=arguments, daemon=True)
        self.server.start()
        for client in self._made.clients:
            self._start_client(client, self._deaths.get(client, {}))

    def _start_client(self, client: int, deaths: dict[int, str]) -> None:
        arguments = (
            self._made.clients[client],
            self._client_overrides(),
            deaths,
            self._trace.parent,
        )
        # A daemon may have no children, and in `process` mode a client trains in one.
        daemon = self._config.overlap != "process"
        process = self._context.Process(target=_client_main, args=arguments, daemon=daemon)
        process.start()
        self.clients[client] = process

    def restart_the_dead(self) -> None:
        """A killed client comes back, without memory; any other end is an error."""
        for client, process in list(self.clients.items()):
            if process.exitcode in (None, 0):
                continue
            if process.exitcode != -signal.SIGKILL:
                raise Aborted(
                    f"client {client} ended with exit code {process.exitcode}: "
                    + self.last_words(f"client-{client}")
                )
            planned = self._deaths.get(client, {})
            if not planned:
                raise Aborted(f"client {client} was killed by somebody else")
            number = min(planned)
            self.killed.append({"client": client, "round": number, "phase": planned.pop(number)})
            self._start_client(client, planned)

    def last_words(self, name: str = "server") -> str:
        """The end of a process's log: the folder is gone when the demo has ended."""
        path = self._trace.parent / f"{name}.log"
        return path.read_text(encoding="utf-8")[-2000:] if path.exists() else "no log"

    def stop(self) -> None:
        """End every process that this demo started."""
        everything = [*self.clients.values(), *([self.server] if self.server else [])]
        for process in everything:
            if process.exitcode is None:
                process.terminate()
        for process in everything:
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _overrides(self) -> list[str]:
        config = self._config
        return [
            f'aggregation.protocol="{config.protocol}"',
            f'aggregation.threat_model="{config.threat_model}"',
            f"aggregation.survivors={config.survivors}",
            "aggregation.max_samples=10000",
            f"rounds.number={config.rounds}",
            "rounds.settle=5.0",
            "rounds.grace=0.5",
            "rounds.upload=300.0",
            "rounds.wait_for_clients=300.0",
            "server.state=state",
            f'server.trace="{self._trace}"',
            *self._shared(),
        ]

    def _client_overrides(self) -> list[str]:
        config = self._config
        return [
            f'client.protocols=["{config.protocol}"]',
            f'client.threat_model="{config.threat_model}"',
            f"client.privacy={config.privacy}",
            f'client.overlap="{config.overlap}"',
            f'client.trace="{self._trace}"',
            *self._shared(),
        ]

    def _shared(self) -> list[str]:
        config = self._config
        task = {**config.task, "clients": config.clients, "seed": config.seed}
        return [
            f"training.seed={config.seed}",
            *(f"training.task.{name}={json.dumps(value)}" for name, value in task.items()),
            *(f"training.local.{name}={json.dumps(value)}" for name, value in config.local.items()),
        ]


def _wait(processes: _Processes, config: DemoConfig, watch: Watch) -> None:
    """Until the server ends; restarts killed clients meanwhile."""
    deadline = time.monotonic() + config.timeout
    server = processes.server
    assert server is not None  # noqa: S101 - started
    while server.exitcode is None:
        if time.monotonic() > deadline:
            raise Aborted(f"the demonstration did not finish within {config.timeout:g} s")
        processes.restart_the_dead()
        while not processes.progress.empty():
            watch(*processes.progress.get())
        server.join(0.1)
    if server.exitcode != 0:
        raise Aborted(
            f"the server ended with exit code {server.exitcode}: {processes.last_words()}"
        )


def _server_main(
    path: Path, overrides: list[str], folder: Path, progress: SimpleQueue[tuple[str, int, int, int]]
) -> None:
    _log_to(folder / "server.log")
    from lightsecagg.drivers.federation.programs import run_server
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    last = ("", -1)

    def report(phase: str, done: int, expected: int) -> None:
        nonlocal last
        if (phase, done) != last:
            last = (phase, done)
            progress.put((phase, done, expected, 0))

    run_server(load_config(ServerConfig, path, overrides), report)


def _client_main(path: Path, overrides: list[str], deaths: dict[int, str], folder: Path) -> None:
    config = load_config(ClientConfig, path, overrides)
    _log_to(folder / f"client-{config.client.id}.log")
    import asyncio

    from lightsecagg.drivers.federation.programs import build_client
    from lightsecagg.training import use_one_thread
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    use_one_thread()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(build_client(config, DoomedClient, deaths=deaths).run())


def _log_to(path: Path) -> None:
    from lightsecagg.drivers.federation.observer import set_up_logging

    sys.stdout = sys.stderr = path.open("a", encoding="utf-8", buffering=1)
    set_up_logging("info")


class DoomedClient(FederationClient):
    """A client that is killed in the middle of chosen phases."""

    def __init__(self, *arguments: Any, deaths: Mapping[int, str]) -> None:
        super().__init__(*arguments)
        self._deaths = deaths

    async def _send(self, round_: Any, message: Any) -> None:
        phase = self._deaths.get(round_.number)
        if phase is not None and type(message).__name__ in _LAST_WORDS[phase]:
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._send(round_, message)


# -- checking ------------------------------------------------------------------------------------


def _compare(records: list[dict[str, Any]], trace: Path) -> tuple[float, float, bool]:
    """The secure averages beside the plain ones: largest difference, its bound, the verdict."""
    worst, bound, matches = 0.0, 0.0, True
    for record in records:
        if record["aborted"] is not None:
            continue
        number, included = record["round"], record["included"]
        with np.load(trace / f"average-{number}.npz") as secure:
            average = secure["average"]
        total, samples = np.zeros(average.size), 0
        for client in included:
            with np.load(trace / f"update-{number}-{client}.npz") as plain:
                total += float(plain["samples"]) * plain["vector"].astype(np.float64)
                samples += int(plain["samples"])
        difference = float(np.abs(average - total / samples).max())
        # Each client's rounding moves a weighted entry by less than one step.
        allowed = len(included) * record["quantisation_step"] / samples
        worst, bound = max(worst, difference), max(bound, allowed)
        matches = matches and difference <= allowed and samples == record["samples"]
    return worst, bound, matches


def _read_spans(trace: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    spans = {}
    for path in trace.glob("spans-*.json"):
        _, number, client = path.stem.split("-")
        spans[int(number), int(client)] = json.loads(path.read_text())
    return spans


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
