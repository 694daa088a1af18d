"""`lightsecagg server` and `lightsecagg client` as processes, for tests."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.drivers.federation.provisioning import Provisioned, free_port, provision

COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()"]
CLIENTS, DIMENSION = 5, 11


class Programs:
    """A provisioned federation without training, and the programs that were started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.made: Provisioned = provision(
            folder / "federation",
            CLIENTS,
            privacy=1,
            dropouts=1,
            vectors=DIMENSION,
            port=self.port,
        )
        for client in self.made.clients:
            self.write_vector(client)
        self.processes: list[subprocess.Popen[str]] = []
        self.logs: dict[int, Path] = {}

    def vector(self, client: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(client).uniform(-1, 1, DIMENSION)

    def write_vector(self, client: int) -> None:
        np.save(self.made.clients[client].parent / "vector.npy", self.vector(client))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        log = self.folder / f"{len(self.processes)}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.processes.append(process)
        self.logs[process.pid] = log
        return process

    def log(self, process: subprocess.Popen[str]) -> str:
        return self.logs[process.pid].read_text()

    def finish(self, process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, _ = process.communicate(timeout=timeout)
        return process.returncode, out, self.log(process)

    def server(self, *settings: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        options = [option for setting in settings for option in ("--set", setting)]
        return self.start("server", "--config", str(self.made.server), *options, *flags)

    def clients(self, *ids: int, settings: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        configs = [option for i in ids for option in ("--config", str(self.made.clients[i]))]
        options = [option for setting in settings for option in ("--set", setting)]
        return self.start("client", *configs, *options)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def poll(look: Callable[[], Any], timeout: float = 60) -> Any:
    """What `look` returns, once it returns something."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def fetch(port: int, page: str) -> bytes | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}") as answer:
            return bytes(answer.read())
    except urllib.error.URLError:
        return None
