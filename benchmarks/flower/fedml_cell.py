"""FedML's LightSecAgg over the same links: its own server and clients, by a Python that has it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.experiments.cells import VERSION, Cell, Document
from lightsecagg_lab.experiments.links import LATENCY, PAUSE
from lightsecagg_lab.experiments.namespaces import check_namespaces, visiting
from lightsecagg_lab.experiments.processes import terminable
from lightsecagg_lab.experiments.shaped_links import (
    SERVER_ADDRESS,
    ShapedLinks,
    client_address,
    shaped_links,
)

PARTY = Path(__file__).parents[1] / "fedml" / "party.py"
PORT = 8890
EXACT = 2**-10
"""How far an average may be from the plain mean: FedML's examples round to ten bits."""


@dataclass(frozen=True, slots=True)
class FedMLCell(Cell):
    """Rounds of FedML's LightSecAgg over links of one rate."""

    timed: ClassVar[bool] = True
    python: str
    """A Python that has `fedml`."""
    clients: int
    bandwidth: float
    """Of each client, in Mbit/s each way."""
    dimension: int
    repeats: int
    """Rounds after the cold one."""
    latency: float = LATENCY
    pause: float = PAUSE

    @property
    def key(self) -> str:
        return (
            f"fedml-lightsecagg-N{self.clients}-d{self.dimension}-{self.bandwidth:g}mbit"
            f"-{self.latency:g}ms-p{self.pause:g}-r{self.repeats}-{VERSION}"
        )

    @property
    def expected_seconds(self) -> float:
        return 15.0 + 3.0 * self.clients + (self.repeats + 1) * (self.pause + 2.0 * self.clients)

    def check(self) -> None:
        check_namespaces()
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('fedml') is None)"
        try:
            lacking = subprocess.run([self.python, "-c", look], timeout=60, check=False).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigurationError(f"{self.python} is no Python to be used: {error}") from error
        if lacking:
            raise ConfigurationError(f"{self.python} has no fedml; pip install 'fedml[grpc]' there")

    def measure(self) -> Document:
        with (
            terminable(),
            shaped_links(self.clients, self.bandwidth, self.latency) as links,
            tempfile.TemporaryDirectory(prefix="lightsecagg-") as name,
        ):
            folder = Path(name)
            with self._parties(links, folder) as parties:
                self._wait(parties, folder)
            with np.load(folder / "report.npz") as report:
                looks, models, version = report["looks"], report["models"], str(report["fedml"])
        cold, *warm = (round(end - begin - self.pause, 3) for begin, end in pairwise(looks))
        cell = {key: value for key, value in asdict(self).items() if key != "python"}
        return {
            "cell": cell,
            "fedml": version,
            "cold": cold,
            "rounds": warm,
            "error": self._error(models),
        }

    @contextmanager
    def _parties(self, links: ShapedLinks, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
        """The server and its clients, killed with the block."""
        addresses = folder / "addresses.csv"
        hosts = [SERVER_ADDRESS, *(client_address(number) for number in range(self.clients))]
        lines = [f"{rank},{rank},{host},{PORT}" for rank, host in enumerate(hosts)]
        addresses.write_text("\n".join(["eid,rank,grpc_server_ip,grpc_server_port", *lines, ""]))
        rounds = self.repeats + 1
        words = [self.clients, self.dimension, rounds, self.pause, addresses, folder / "report.npz"]
        parties: list[subprocess.Popen[bytes]] = []
        try:
            for rank, place in enumerate((links.server, *links.clients)):
                with visiting(place), (folder / f"{rank}.log").open("wb") as log:
                    parties.append(
                        subprocess.Popen(
                            [self.python, str(PARTY), str(rank), *map(str, words)],
                            cwd=folder,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
            yield parties
        finally:
            for party in parties:
                party.kill()
            for party in parties:
                party.wait()

    def _wait(self, parties: list[subprocess.Popen[bytes]], folder: Path) -> None:
        """For the server; a client that has failed will never be heard of."""
        deadline = time.monotonic() + 60.0 + 8 * self.expected_seconds
        while parties[0].poll() is None:
            failed = [rank for rank, party in enumerate(parties) if party.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                rank = failed[0] if failed else 0
                said = (folder / f"{rank}.log").read_text("utf-8", "replace")[-2000:]
                why = "failed" if failed else "was not done in time"
                raise ConfigurationError(f"{self.key}: party {rank} {why}:\n{said}")
            time.sleep(0.2)
        if parties[0].returncode:
            said = (folder / "0.log").read_text("utf-8", "replace")[-2000:]
            raise ConfigurationError(f"{self.key}: the server failed:\n{said}")

    def _error(self, models: Any) -> float:
        """How far the models are at most from those of plain averaging."""
        ramp = np.linspace(-0.05, 0.05, self.dimension) + np.mean(np.arange(self.clients)) / 256
        error = max(float(np.abs(b - a - ramp).max()) for a, b in pairwise(models))
        if not error <= EXACT:
            raise ConfigurationError(
                f"{self.key} is {error:.1e} from the plain mean: a wrong average is no measurement"
            )
        return error
