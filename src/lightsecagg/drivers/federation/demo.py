"""A throw-away federation on this machine: real processes, real sockets, real dropouts.

The main job of the README. It provisions a federation in a temporary folder, starts the server
and every client as a process of its own over loopback TLS, and kills up to D clients per round
with SIGKILL in the middle of a phase; a killed client is restarted and joins the next round.

To prove that the secure average is the plain average, the demo's clients ALSO write their plain
updates into a local folder. No real client does that.

Processes are forked from a server that has imported torch once: nine imports would take most of
the time. It is a new program, so nothing of this one, keys least of all, is in it.

Whatever a user can get wrong is found by `check_demo` before the first process starts.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.jobs import VectorServer, check_task
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.provisioning import Provisioned, provision
from lightsecagg.drivers.federation.server import make_settings
from lightsecagg.drivers.federation.tables import AggregationTable
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import (
    Aborted,
    ConfigurationError,
    InputRefused,
    LightSecAggError,
    ParameterError,
)
from lightsecagg.foreign import explain
from lightsecagg.params import Decoding, ShareMode, ThreatModel, check_integer
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.schemes.traits import ProtocolName, traits_of
from lightsecagg.session.envelope import name_of
from lightsecagg.training.config import LocalConfig, TaskConfig

_PRELOAD = ["lightsecagg.training.warm_up", "sklearn.datasets"]

# Phase -> the message before which a doomed client is killed.
_LAST_WORDS = {
    "share": ("ShareBundle",),
    "upload": ("MaskedUpload",),
    "agree": ("Consent",),
    "recover": ("AggregatedShare", "UnmaskingShares"),
}

_MOST_CLIENTS = 256
_SWEEPS = 30
_MAX_SAMPLES = 10_000
_USAGE = 2
"""Exit code of a process that found something for the user to mend."""

Watch = Callable[[str, int, int], None]
"""Told (phase, done, expected)."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What to demonstrate."""

    clients: int = 8
    privacy: int = 3
    dropouts: int = 2
    survivors: int = 0
    protocol: str = ProtocolName.LIGHTSECAGG
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    share_mode: ShareMode = ShareMode.SEEDED
    decoding: Decoding | None = None
    rounds: int = 4
    dropout: int = 2
    """How many clients are killed per round, at most."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """Its clients and seed are those of the demonstration."""
    local: LocalConfig = field(default_factory=LocalConfig)
    bound: float = 4.0
    overlap: str = "thread"
    """Where clients train while they share masks; `process` doubles the processes."""
    seed: int = 0
    """Steers data, training and who is killed when; never a mask."""
    dashboard_port: int | None = None
    """Where the server shows its rounds to browsers."""
    timeout: float = 600.0

    @property
    def own_task(self) -> TaskConfig:
        """The task, for these clients and this seed."""
        return replace(self.task, clients=self.clients, seed=self.seed)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What happened."""

    records: list[dict[str, Any]]
    spans: dict[tuple[int, int], list[dict[str, Any]]]
    """(round, client) -> what that client did, and when."""
    killed: list[dict[str, Any]]
    complaints: list[str]
    """What clients have logged as errors."""
    max_abs_difference: float
    quantisation_bound: float
    matches: bool
    model: NDArray[np.float32] = field(repr=False)
    """The global model after the last round."""
    state: Path
    """The server's state folder."""
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
    phases = [phase for phase in phases if phase in traits_of(config.protocol).phases]
    deaths: dict[int, dict[int, str]] = {}
    for number in range(1, config.rounds + 1):
        for client in rng.sample(range(config.clients), rng.randint(0, config.dropout)):
            deaths.setdefault(client, {})[number] = rng.choice(phases)
    return deaths


def check_demo(config: DemoConfig) -> None:
    """Refuse, in the words of the command line, what would fail in a process later on."""
    check_integer("--rounds", config.rounds, 1)
    check_integer("--seed", config.seed, 0)
    if not 0 < config.timeout < math.inf:
        raise ParameterError(f"--timeout {config.timeout:g} must be a positive number of seconds")
    check_integer("clients N", config.clients, 3)
    if config.clients > _MOST_CLIENTS:
        raise ParameterError(
            f"--clients {config.clients}: each is a process here, and {_MOST_CLIENTS} are the "
            "most; `lightsecagg simulate` holds many more"
        )
    try:
        table = aggregation_of(config)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ParameterError(f"--{wrong['loc'][0]} {wrong['input']}: {wrong['msg']}") from error
    any_job = VectorServer(VectorsTable(dimension=1, weighted=True))
    any_list = AllowList({i: IdentityKey.generate().public for i in range(config.clients)})
    make_settings(table, any_job, bytes(32), any_list)
    plan_deaths(config)
    check_task(config.own_task, client=0)


def run_demo(
    config: DemoConfig, folder: Path, watch: Watch, ask: Callable[[], None] = lambda: None
) -> DemoResult:
    """The whole demonstration; `folder` receives keys, state and traces.

    `ask` is called wherever it may stop; what it raises ends the demonstration and its processes.
    """
    started = time.monotonic()
    deaths = plan_deaths(config)
    trace = folder / "trace"
    trace.mkdir(mode=0o700, parents=True)
    processes = Processes(config, trace, deaths)
    try:
        made = provision(
            folder / "federation", config.clients, bound=config.bound, port=free_port()
        )
        processes.start(made, ask)
        _wait(processes, config, watch, ask)
    finally:
        processes.stop()
    state = made.server.parent / "state"
    records = json.loads((state / "rounds.json").read_text())
    compared = [compare(record, trace) for record in records if record["aborted"] is None]
    return DemoResult(
        records=records,
        spans=_read_spans(trace),
        killed=processes.killed,
        complaints=processes.complaints(),
        max_abs_difference=max((each.difference for each in compared), default=0.0),
        quantisation_bound=max((each.bound for each in compared), default=0.0),
        matches=all(each.exact for each in compared),
        model=read_model(state)[1],
        state=state,
        seconds=time.monotonic() - started,
    )


class Processes:
    """The server and the clients, each a process; all are gone after `stop`."""

    def __init__(
        self,
        config: DemoConfig,
        trace: Path,
        deaths: dict[int, dict[int, str]],
    ) -> None:
        """Starts none but the one that removes the folder if this program cannot."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._config, self._trace, self._deaths = config, trace, deaths
        self._context.set_forkserver_preload(self._preloaded())
        self.progress, self._report = self._context.Pipe(duplex=False)
        self._janitor = self._process(_janitor_main, (trace.parent,), daemon=True)
        self.server: ForkServerProcess | None = None
        self.clients: dict[int, ForkServerProcess] = {}
        self.killed: list[dict[str, Any]] = []

    def start(self, made: Provisioned, ask: Callable[[], None]) -> None:
        self._made = made
        ask()
        self.start_server()
        for client in made.clients:
            ask()
            self.start_client(client)

    def start_server(self) -> None:
        """The server, or the next one after it."""
        arguments = (self._made.server, self._overrides(), self._trace.parent, self._report)
        self.server = self._process(server_main, arguments, daemon=True)

    def start_client(self, client: int) -> None:
        """A client, or one in its place."""
        overrides = self._client_overrides()
        folder, doom = self._trace.parent, self._doom(client)
        arguments = (self._made.clients[client], overrides, folder, *doom)
        # A daemon may have no children, and in `process` mode a client trains in one.
        daemon = self._config.overlap != "process"
        self.clients[client] = self._process(self._client_program, arguments, daemon=daemon)

    @property
    def _client_program(self) -> Callable[..., None]:
        return _client_main

    def _preloaded(self) -> list[str]:
        return _PRELOAD

    def _doom(self, client: int) -> tuple[Any, ...]:
        """What else its program is told: in which rounds it is to die."""
        return (self._deaths.get(client, {}),)

    def _process(
        self, target: Callable[..., None], arguments: tuple[Any, ...], *, daemon: bool
    ) -> ForkServerProcess:
        """A terminal sends Ctrl-C to all processes; these inherit that it is none of theirs."""
        process = self._context.Process(target=target, args=arguments, daemon=daemon)
        resource_tracker.ensure_running()  # or it would be started below, and unblock the signal
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return process

    def restart_the_dead(self) -> None:
        """A killed client comes back, without memory; any other end is an error."""
        for client, process in list(self.clients.items()):
            if process.exitcode in (None, 0):
                continue
            if process.exitcode != -signal.SIGKILL:
                raise self.failure(f"client-{client}", process.exitcode)
            planned = self._deaths.get(client, {})
            if not planned:
                raise Aborted(f"client {client} was killed by somebody else")
            number = min(planned)
            self.killed.append({"client": client, "round": number, "phase": planned.pop(number)})
            self.start_client(client)

    def failure(self, name: str, exit_code: int | None) -> LightSecAggError:
        """Why a process has ended, in its own words: its folder is gone when the demo is."""
        path = self._trace.parent / f"{name}.error"
        words = path.read_text(encoding="utf-8") if path.exists() else f"exit code {exit_code}"
        if exit_code == _USAGE:
            return ConfigurationError(words)
        reasons = [words, *self.complaints()[:1]]
        return Aborted(f"the {name.replace('-', ' ')} failed: {'; '.join(reasons)}")

    def complaints(self) -> list[str]:
        """What clients have logged as errors."""
        return [
            str(json.loads(line)["message"])
            for path in sorted(self._trace.parent.glob("client-*.log"))
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("{") and '"level": "error"' in line
        ]

    def stop(self) -> None:
        """End every process that this demo started; nothing of them is needed any more."""
        everything = [*self.clients.values(), *filter(None, (self.server,)), self._janitor]
        for process in everything:
            process.kill()
        for process in everything:
            process.join()
        self.progress.close()
        self._report.close()

    def _overrides(self) -> list[str]:
        config, port = self._config, self._config.dashboard_port
        aggregation = aggregation_of(config).model_dump(mode="json", exclude_defaults=True)
        return [
            *(f"aggregation.{name}={json.dumps(value)}" for name, value in aggregation.items()),
            f"rounds.number={config.rounds}",
            "rounds.settle=5.0",
            "rounds.grace=0.5",
            "rounds.upload=300.0",
            "rounds.wait_for_clients=300.0",
            "server.state=state",
            f'server.trace="{self._trace}"',
            *([] if port is None else [f"server.dashboard_port={port}"]),
            *self._shared(),
        ]

    def _client_overrides(self) -> list[str]:
        config = self._config
        return [
            f'client.protocols=["{config.protocol}"]',
            f'client.threat_model="{config.threat_model}"',
            f"client.privacy={config.privacy}",
            f'client.share_mode="{config.share_mode}"',
            f'client.overlap="{config.overlap}"',
            f'client.trace="{self._trace}"',
            *self._shared(),
        ]

    def _shared(self) -> list[str]:
        config = self._config
        return [
            f"training.seed={config.seed}",
            *_toml("training.task", asdict(config.own_task)),
            *_toml("training.local", asdict(config.local)),
        ]


def aggregation_of(config: DemoConfig) -> AggregationTable:
    return AggregationTable(
        protocol=config.protocol,
        threat_model=config.threat_model,
        clients=config.clients,
        privacy=config.privacy,
        dropouts=config.dropouts,
        survivors=config.survivors,
        share_mode=config.share_mode,
        decoding=config.decoding,
        bound=config.bound,
        max_samples=_MAX_SAMPLES,
    )


def _toml(table: str, values: Mapping[str, Any]) -> list[str]:
    """Overrides for all that is set; TOML writes what is left like JSON."""
    return [
        f"{table}.{name}={json.dumps(value, default=str)}"
        for name, value in values.items()
        if value is not None
    ]


def _wait(processes: Processes, config: DemoConfig, watch: Watch, ask: Callable[[], None]) -> None:
    """Until the server ends; restarts killed clients meanwhile."""
    deadline = time.monotonic() + config.timeout
    server = processes.server
    assert server is not None  # noqa: S101 - started
    while server.exitcode is None:
        ask()
        if time.monotonic() > deadline:
            raise Aborted(f"the demonstration did not finish within --timeout {config.timeout:g} s")
        processes.restart_the_dead()
        while processes.progress.poll():
            watch(*processes.progress.recv())
        server.join(0.1)
    ask()
    if server.exitcode != 0:
        raise processes.failure("server", server.exitcode)


def server_main(path: Path, overrides: list[str], folder: Path, progress: Connection) -> None:
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    last = ("", -1)

    def report(phase: str, done: int, expected: int) -> None:
        nonlocal last
        if (phase, done) != last:
            last = (phase, done)
            progress.send((phase, done, expected))

    with last_words(folder, "server"):
        from lightsecagg.drivers.federation.programs import run_server

        run_server(load_config(ServerConfig, path, overrides, environment={}), report)


def _client_main(path: Path, overrides: list[str], folder: Path, deaths: dict[int, str]) -> None:
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    with last_words(folder, path.stem):
        import asyncio

        from lightsecagg.drivers.federation.programs import build_client
        from lightsecagg.training import use_one_thread

        use_one_thread()
        config = load_config(ClientConfig, path, overrides, environment={})
        asyncio.run(build_client(config, DoomedClient, deaths=deaths).run())


def _janitor_main(folder: Path) -> None:
    """A parent that is killed cannot remove the keys and the plain updates; this does."""
    from lightsecagg.training.parent import wait_for_parents_end

    wait_for_parents_end()
    for _ in range(_SWEEPS):  # the others end too, but may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


@contextmanager
def last_words(folder: Path, name: str) -> Iterator[None]:
    """Inside, a process logs to a file; if it fails, its parent can read why in another."""
    from lightsecagg.drivers.federation.observer import set_up_logging

    sys.stdout = sys.stderr = (folder / f"{name}.log").open("a", encoding="utf-8", buffering=1)
    set_up_logging("info")
    try:
        yield
    except Exception as error:
        (folder / f"{name}.error").write_text(explain(error), encoding="utf-8")
        usage = isinstance(error, ParameterError | ConfigurationError | InputRefused)
        sys.exit(_USAGE if usage else 1)


class DoomedClient(FederationClient):
    """A client that is killed in the middle of chosen phases."""

    def __init__(self, *arguments: Any, deaths: Mapping[int, str]) -> None:
        super().__init__(*arguments)
        self._deaths = deaths

    async def _post(self, data: bytes) -> None:
        number = self._session.round
        phase = self._deaths.get(number)
        if phase is not None and name_of(data) in _LAST_WORDS[phase]:
            self._trace_spans(number)  # what it has done belongs into the timeline
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._post(data)


# -- checking ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A secure average beside the plain one."""

    difference: float
    """The largest, of any entry."""
    bound: float
    """What rounding may do to an entry."""
    exact: bool
    """Whether it is the average of the same samples, but for rounding."""


def versions_of(record: dict[str, Any]) -> list[int]:
    """Of the model that each update was trained from; in a round all from the same."""
    return record["versions"] or [record["round"]] * len(record["included"])


def compare(record: dict[str, Any], trace: Path) -> Comparison:
    """A round, or a buffer with the staleness of its updates, and what its clients have written."""
    number, included = record["round"], record["included"]
    with np.load(trace / f"average-{number}.npz") as secure:
        average = secure["average"]
    weights = record["weights"] or [1] * len(included)
    total, samples = np.zeros(average.size), 0
    for client, version, weight in zip(included, versions_of(record), weights, strict=True):
        with np.load(trace / f"update-{version}-{client}.npz") as plain:
            counted = weight * int(plain["samples"])
            total += counted * plain["vector"].astype(np.float64)
        samples += counted
    difference = float(np.abs(average - total / samples).max())
    # Each client's rounding moves an entry by less than one step per weight, noise by its bound.
    bound = (sum(weights) + record["noise"]) * record["quantisation_step"] / samples
    return Comparison(difference, bound, difference <= bound and samples == record["samples"])


def _read_spans(trace: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    spans = {}
    for path in trace.glob("spans-*.json"):
        _, number, client = path.stem.split("-")
        spans[int(number), int(client)] = json.loads(path.read_text())
    return spans


def free_port() -> int:
    """On which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
