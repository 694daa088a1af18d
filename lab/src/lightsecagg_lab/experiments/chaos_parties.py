"""The processes of a federation that is to be harmed: a server, and clients behind proxies."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.demo_processes import Processes
from lightsecagg.drivers.federation.provisioning import Provisioned
from lightsecagg.errors import Aborted
from lightsecagg_lab.experiments.fault_proxy import FaultyNetwork
from lightsecagg_lab.experiments.round_audit import RoundWatch

ENDLESS = 10**6
_DEADLINES = {"advertise": 5, "share": 5, "upload": 10, "agree": 10, "recover": 10}


class Parties(Processes):
    """The server and the clients, whose connections go through the proxies."""

    def __init__(self, config: DemoConfig, folder: Path, network: FaultyNetwork) -> None:
        self._network = network
        self._changes: tuple[str, ...] = ()
        self._address = ""
        super().__init__(config, folder)

    @property
    def made(self) -> Provisioned:
        """Where the files of the federation are."""
        return self._made

    @property
    def serving(self) -> BaseProcess:
        """The server, or the latest one."""
        if self.server is None:
            raise Aborted("there is no server yet")
        return self.server

    def start_server(self, *changes: str) -> None:
        """With other settings than before, if any are given, for this one only."""
        self._changes = changes
        super().start_server()

    def start_client(self, client: int) -> None:
        """Behind its proxy."""
        self._address = self._network.address(client)
        super().start_client(client)

    def phases(self) -> Iterator[str]:
        """Where the server has been since it was last asked; unheard, it would come to a halt."""
        while self._progress.poll():
            yield self._progress.recv()[0]

    def rest(self, seconds: float) -> None:
        """For so long, or until the server says where it is."""
        self._progress.poll(seconds)

    def last_words_of(self, name: str) -> str:
        """Why it has ended, once."""
        path = self._folder / f"{name}.error"
        words = path.read_text(encoding="utf-8") if path.exists() else ""
        path.unlink(missing_ok=True)
        return words

    def _watch(self, client: int) -> RoundWatch:
        return RoundWatch(self.notes)

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
        proxy = [f'server.address="{self._address}"', 'server.name="localhost"']
        return [*super()._client_overrides(), f"client.reconnect={ENDLESS}", *proxy]


def send(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None and process.exitcode is None:
        os.kill(process.pid, number)


def limit_files(process: BaseProcess, size: int | None) -> None:
    """No file of the process may grow beyond this; None: as far as the system lets it."""
    if process.pid is None or process.exitcode is not None:
        return
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        soft = most if size is None else size
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, most))
