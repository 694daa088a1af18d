"""The processes of a demonstration: a server and clients over loopback TLS, gone when it ends.

They are forked from a server that has imported torch once: nine imports would take most of the
time. It is a new program, so nothing of this one, keys least of all, is in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightsecagg import system
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.demo_config import SERVER, DemoConfig, Kill
from lightsecagg.drivers.federation.demo_notes import DemoWatch, write_sum
from lightsecagg.drivers.federation.jobs import ClientJob
from lightsecagg.drivers.federation.provisioning import Provisioned, free_port, provision
from lightsecagg.drivers.federation.watch import ClientWatch
from lightsecagg.errors import (
    Aborted,
    ConfigurationError,
    InputRefused,
    LightSecAggError,
    ParameterError,
)
from lightsecagg.foreign import explain
from lightsecagg.protocol.settings import MAX_LENGTH

_PRELOAD = ["lightsecagg.training.warm_up", "sklearn.datasets"]
_PROGRAMS = [
    "lightsecagg.drivers.federation.programs",
    "lightsecagg.drivers.transport.grpc",
]
_LOOK = 0.05
"""Seconds between two looks at the processes."""
_SWEEPS = 30
_SERVERS_OWN = {"flush_after", "reports", "renew"}
"""Of [buffering]."""
_USAGE = 2
"""Exit code of a process that found something for the user to fix."""

Watch = Callable[[str, int, int], None]
"""Told (phase, done, expected)."""
Ask = Callable[[], None]
"""Called wherever a demonstration may stop; what it raises ends it, and its processes."""


_WORDS = 12
"""Lines of the server's log that are shown when nothing goes on."""


class Processes:
    """The server and the clients of a demonstration, each a process; who is killed comes back."""

    _told = False

    def __init__(
        self, config: DemoConfig, folder: Path, deaths: Mapping[int, dict[int, str]] | None = None
    ) -> None:
        """Starts none but the one that removes the folder if this program cannot.

        `deaths`: client -> round -> phase in which it kills itself.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.config, self._folder, self._deaths = config, folder, deaths or {}
        self.notes = folder / "notes"
        self.notes.mkdir(mode=0o700, parents=True)
        self._context = system.processes(self._preloaded())
        self._progress, self._report = self._context.Pipe(duplex=False)
        self._janitor = self._process(_janitor_main, (folder,), daemon=True)
        self.server: BaseProcess | None = None
        self.clients: dict[int, BaseProcess] = {}
        self.killed: list[dict[str, Any]] = []

    @property
    def state(self) -> Path:
        """The server's state folder."""
        return self._made.server.parent / "state"

    @contextmanager
    def running(self, ask: Ask, **provisioned: Any) -> Iterator[None]:
        """Inside, all run; none does afterwards. `provisioned`: arguments of `provision`."""
        try:
            folder, clients = self._folder / "federation", self.config.clients
            usual = {"port": free_port(), "survivors": 0} | self.config.provisioned
            self._made: Provisioned = provision(folder, clients, **(usual | provisioned))
            ask()
            self.start_server()
            for client in self._made.clients:
                ask()
                self.start_client(client)
            yield
        finally:
            self._stop()

    def looks(self, watch: Watch, ask: Ask) -> Iterator[float]:
        """What time it is, every now and then until the server ends; `watch` hears what it says."""
        timeout = self.config.timeout
        deadline = time.monotonic() + timeout
        while True:
            ask()
            now = time.monotonic()
            if now > deadline:
                raise Aborted(f"the demonstration did not finish within --timeout {timeout:g} s")
            yield now
            while self._progress.poll():
                watch(*self._progress.recv())  # or the server would wait for us
            server = self.server  # of which there may be another by now
            assert server is not None  # noqa: S101 - started
            server.join(_LOOK)
            if server.exitcode is not None:
                ask()
                if server.exitcode not in (0, system.TERMINATED if self._told else 0):
                    raise self.failure("server", server.exitcode)
                return

    def start_server(self) -> None:
        """The server, or the next one after it."""
        arguments = (self._made.server, self._overrides(), self._folder, self.notes, self._report)
        self.server = self._process(_server_main, arguments, daemon=True)

    def start_client(self, client: int) -> None:
        """A client, or one in its place."""
        path, overrides = self._made.clients[client], self._client_overrides()
        arguments = (path, overrides, self._folder, self._watch(client), self._job(client))
        # A daemon may have no children, and in `process` mode a client trains in one.
        daemon = self.config.overlap != "process"
        self.clients[client] = self._process(_client_main, arguments, daemon=daemon)

    def failure(self, name: str, exit_code: int | None) -> LightSecAggError:
        """Why a process has ended, in its own words: its folder is gone when the demo is."""
        path = self._folder / f"{name}.error"
        words = path.read_text(encoding="utf-8") if path.exists() else f"exit code {exit_code}"
        if exit_code == _USAGE:
            return ConfigurationError(words)
        reasons = [words, *self.complaints()[:1]]
        return Aborted(f"the {name.replace('-', ' ')} failed: {'; '.join(reasons)}")

    def complaints(self) -> list[str]:
        """What clients have logged as errors."""
        logs = sorted(self._folder.glob("client-*.log"))
        return [line["message"] for log in logs for line in _lines(log) if line["level"] == "error"]

    def last_words(self) -> list[str]:
        """How every log ends, that of the server first: for a federation that hangs."""
        logs = [self._folder / "server.log", *sorted(self._folder.glob("client-*.log"))]
        return [
            f"{log.stem}: {line['message']}"
            for log in logs
            for line in _lines(log)[-_WORDS if log.stem == "server" else -3 :]
        ]

    # -- kills -------------------------------------------------------------------------------

    def sums(self) -> int:
        """How many are known."""
        return sum(
            name.startswith("average-") and name.endswith(".npz") for name in os.listdir(self.notes)
        )

    def kill(self, kill: Kill, after: int) -> None:
        """And start it again; whoever has taken its leave is left alone."""
        process = self.server if kill.victim == SERVER else self.clients[kill.victim]
        if process is None:
            return
        process.kill()
        process.join()
        if process.exitcode != system.KILLED:
            return
        who = "server" if kill.victim == SERVER else kill.victim
        self.killed.append({"who": who, "after": after, "time": time.time()})
        if kill.victim == SERVER:
            self.start_server()
        else:
            self.start_client(kill.victim)

    def mind_the_dead(self) -> None:
        """A client that has killed itself as planned comes back; any other end is an error."""
        for client, process in list(self.clients.items()):
            if process.exitcode in (None, 0):
                continue
            planned = self._deaths.get(client, {})
            if process.exitcode != system.KILLED or not planned:
                raise self.failure(f"client-{client}", process.exitcode)
            number = min(planned)
            self.killed.append({"client": client, "round": number, "phase": planned.pop(number)})
            self.start_client(client)

    def end(self) -> None:
        """Tell the server, once, to stop; it leaves an epoch as it is."""
        if self.server is not None and not self._told:
            self._told = True  # a second signal would end it at once
            self.server.terminate()

    def _stop(self) -> None:
        """Nothing of them is needed any more."""
        everything = [*self.clients.values(), *filter(None, (self.server,)), self._janitor]
        for process in everything:
            process.kill()
        for process in everything:
            process.join()
        self._progress.close()
        self._report.close()

    def _process(
        self, target: Callable[..., None], arguments: tuple[Any, ...], *, daemon: bool
    ) -> BaseProcess:
        """A terminal sends Ctrl-C to all processes; these inherit that it is none of theirs."""
        process = self._context.Process(target=target, args=arguments, daemon=daemon)
        with system.ctrl_c_blocked():
            process.start()
        return process

    # -- what a demonstration has of its own -------------------------------------------------

    def _preloaded(self) -> list[str]:
        """What all processes import."""
        if (job := self._job(0)) is None:
            return _PRELOAD
        return [*_PROGRAMS, type(job).__module__]

    def _job(self, client: int) -> ClientJob | None:
        """None: to train."""
        return None if self.config.job is None else self.config.job(client)

    def _watch(self, client: int) -> ClientWatch:
        """What is noted of a client."""
        slowdown = self.config.slowdown if client in self.config.stragglers else 1.0
        deaths = self._deaths.get(client)
        least = self.config.least_training
        return DemoWatch(self.notes, slowdown=slowdown, least=least, deaths=deaths)

    def _overrides(self) -> list[str]:
        """Of the server's configuration."""
        config, port = self.config, self.config.dashboard_port
        return [
            *_toml(
                "aggregation", config.aggregation.model_dump(mode="json", exclude_defaults=True)
            ),
            f"rounds.number={config.number}",
            "rounds.settle=5.0",
            "rounds.grace=0.5",
            "rounds.upload=300.0",
            "rounds.wait_for_clients=300.0",
            "server.state=state",
            *([] if port is None else [f"server.dashboard_port={port}"]),
            *self._of_the_mode(),
            *self._shared(),
        ]

    def _of_the_mode(self) -> list[str]:
        config = self.config
        rate = f"training.server.learning_rate={config.server_rate}"
        if config.buffering is not None:
            buffering = _toml("buffering", config.buffering.model_dump(mode="json"))
            return [*buffering, *([rate] if config.vectors is None else [])]
        if config.vectors is not None:
            return []
        # Large models and busy machines take their time, and whoever is killed is noticed without
        # a deadline. A round that began without one of them would have one dropout too many.
        waits = ("wait_for_clients", "advertise", "share", "upload", "agree", "recover")
        patient = [f"rounds.{wait}={config.timeout}" for wait in waits]
        return [f"rounds.min_clients={config.clients}", *patient, rate]

    def _client_overrides(self) -> list[str]:
        config = self.config
        table = config.buffering
        shared = {} if table is None else table.model_dump(mode="json", exclude=_SERVERS_OWN)
        return [
            f'client.protocols=["{config.protocol}"]',
            f'client.threat_model="{config.threat_model}"',
            f"client.privacy={config.privacy}",
            f'client.share_mode="{config.share_mode}"',
            f'client.overlap="{config.overlap}"',
            f"client.reconnect={config.timeout}",
            f"client.max_dimension={MAX_LENGTH}",  # their operator knows the task
            *_toml("buffering", shared),
            *self._shared(),
        ]

    def _shared(self) -> list[str]:
        """Of the configurations of all."""
        config = self.config
        if config.vectors is not None:
            return []
        return [
            f"training.seed={config.seed}",
            *_toml("training.task", asdict(config.own_task)),
            *_toml("training.local", asdict(config.local)),
        ]


def _lines(log: Path) -> list[dict[str, str]]:
    """The lines of a program's log; none of one that has not begun."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _toml(table: str, values: Mapping[str, Any]) -> list[str]:
    """Overrides for all that is set; TOML writes what is left like JSON."""
    return [
        f"{table}.{name}={json.dumps(value, default=str)}"
        for name, value in values.items()
        if value is not None
    ]


# -- in the processes ----------------------------------------------------------------------------


def _server_main(
    path: Path, overrides: list[str], folder: Path, notes: Path, progress: Connection
) -> None:
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    last = ("", -1)

    def report(phase: str, done: int, expected: int) -> None:
        nonlocal last
        if (phase, done) != last:
            last = (phase, done)
            progress.send((phase, done, expected))

    with _last_words(folder, "server"):
        from lightsecagg.drivers.federation.programs import run_server

        config = load_config(ServerConfig, path, overrides, environment={})
        run_server(config, report, learned=partial(write_sum, notes))


def _client_main(
    path: Path,
    overrides: list[str],
    folder: Path,
    watch: ClientWatch,
    job: ClientJob | None,
) -> None:
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    with _last_words(folder, path.stem):
        from lightsecagg.drivers.federation.programs import build_client

        if job is None:
            from lightsecagg.training import use_one_thread

            use_one_thread()
        config = load_config(ClientConfig, path, overrides, environment={})
        asyncio.run(build_client(config, job=job, watch=watch).run())


def _janitor_main(folder: Path) -> None:
    """A parent that is killed cannot remove the keys and the plain updates; this does."""
    from lightsecagg.training.parent import wait_for_parents_end

    wait_for_parents_end()
    for _ in range(_SWEEPS):  # the others end too, but may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


@contextmanager
def _last_words(folder: Path, name: str) -> Iterator[None]:
    """Inside, a process logs to a file; if it fails, its parent can read why in another."""
    from lightsecagg.drivers.federation.observer import set_up_logging

    sys.stdout = sys.stderr = (folder / f"{name}.log").open("a", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)  # what the interpreter says of itself goes there too
    set_up_logging("info")
    try:
        yield
    except Exception as error:
        (folder / f"{name}.error").write_text(explain(error), encoding="utf-8")
        usage = isinstance(error, ParameterError | ConfigurationError | InputRefused)
        sys.exit(_USAGE if usage else 1)
