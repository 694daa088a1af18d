"""The processes of a federation that is to be harmed: a server, and clients behind proxies."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.demo import DemoConfig, Processes, last_words, server_main
from lightsecagg.errors import Aborted
from lightsecagg.experiments.fault_proxy import FaultyNetwork
from lightsecagg.experiments.round_audit import NotedClient, RepeatingVectors

ENDLESS = 10**6
_DEADLINES = {"advertise": 5, "share": 5, "upload": 10, "agree": 10, "recover": 10}


class Parties(Processes):
    """The server and the clients, whose connections go through the proxies."""

    def __init__(
        self, config: DemoConfig, dimension: int, trace: Path, network: FaultyNetwork
    ) -> None:
        self._dimension, self._network = dimension, network
        self._changes: tuple[str, ...] = ()
        super().__init__(config, trace, {})

    @property
    def serving(self) -> ForkServerProcess:
        """The server, or the latest one."""
        if self.server is None:
            raise Aborted("there is no server yet")
        return self.server

    def start_server(self, *changes: str) -> None:
        """With other settings than before, if any are given, for this one only."""
        self._changes = changes
        arguments = (self._made.server, self._overrides(), self._trace.parent, self._report)
        self.server = self._process(_server_main, arguments, daemon=True)

    def last_words_of(self, name: str) -> str:
        """Why it has ended, once."""
        path = self._trace.parent / f"{name}.error"
        words = path.read_text(encoding="utf-8") if path.exists() else ""
        path.unlink(missing_ok=True)
        return words

    @property
    def _client_program(self) -> Callable[..., None]:
        return _client_main

    def _preloaded(self) -> list[str]:
        transport = "lightsecagg.drivers.transport.grpc"
        return ["lightsecagg.drivers.federation.programs", transport, RepeatingVectors.__module__]

    def _doom(self, client: int) -> tuple[Any, ...]:
        job = RepeatingVectors(client, self._dimension, self._config.clients)
        return (self._network.address(client), job, self._trace)

    def _overrides(self) -> list[str]:
        return [
            *super()._overrides(),
            *(f"rounds.{phase}={seconds}" for phase, seconds in _DEADLINES.items()),
            "rounds.settle=0.3",
            "rounds.grace=1.0",
            f"rounds.retries={ENDLESS}",
            f"rounds.wait_for_clients={ENDLESS}",
            *self._changes,
        ]

    def _client_overrides(self) -> list[str]:
        untraced = [each for each in super()._client_overrides() if "trace" not in each]
        return [*untraced, f"client.reconnect={ENDLESS}", 'server.name="localhost"']

    def _shared(self) -> list[str]:
        return []


def _server_main(path: Path, overrides: list[str], folder: Path, progress: Connection) -> None:
    with (folder / "server.log").open("ab") as log:
        os.dup2(log.fileno(), 2)  # what Python says of a log that cannot be written, too
    server_main(path, overrides, folder, progress)


def _client_main(
    path: Path,
    overrides: list[str],
    folder: Path,
    address: str,
    job: RepeatingVectors,
    notes: Path,
) -> None:
    from lightsecagg.training.parent import end_with_parent

    end_with_parent()
    with last_words(folder, path.stem):
        from lightsecagg.drivers.federation.programs import build_client

        overrides = [*overrides, f'server.address="{address}"']
        config = load_config(ClientConfig, path, overrides, environment={})
        asyncio.run(build_client(config, partial(NotedClient, notes=notes), job=job).run())


def send(process: ForkServerProcess, number: signal.Signals) -> None:
    if process.pid is not None and process.exitcode is None:
        os.kill(process.pid, number)


def limit_files(process: ForkServerProcess, size: int | None) -> None:
    """No file of the process may grow beyond this; None: as far as the system lets it."""
    if process.pid is None or process.exitcode is not None:
        return
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        soft = most if size is None else size
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, most))
