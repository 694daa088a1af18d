"""A throw-away federation on this machine that sums one vector of each client, in one round.

As in `demo`, the server and every client are processes over loopback TLS. Nobody is killed, and no
client writes down more than a real one: its vector, in the file that `[vectors] input` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.demo_notes import read_sums
from lightsecagg.drivers.federation.demo_processes import Ask, Processes, Watch
from lightsecagg.drivers.federation.jobs import ClientJob, VectorClient
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.federation.watch import ClientWatch
from lightsecagg.errors import Aborted

Reals = NDArray[np.float64]


def sum_vectors(
    config: DemoConfig, vectors: Sequence[Reals], folder: Path, watch: Watch, ask: Ask
) -> tuple[Reals, dict[str, Any]]:
    """The sum, as the server has written it, and the record of its round."""
    processes = _Processes(config, folder, vectors)
    with processes.running(ask):
        for _ in processes.looks(watch, ask):
            processes.mind_the_dead()
    records = read_sums(processes.notes)
    if not records:
        raise Aborted("; ".join(["the round had no sum", *processes.complaints()[:1]]))
    with np.load(processes.state.parent / "result.npz", allow_pickle=False) as stored:
        return stored["result"], records[-1]


class _Processes(Processes):
    def __init__(self, config: DemoConfig, folder: Path, vectors: Sequence[Reals]) -> None:
        for client, vector in enumerate(vectors):
            np.save(folder / f"vector-{client}.npy", vector)
        super().__init__(config, folder)

    def _job(self, client: int) -> ClientJob:
        return VectorClient(VectorsTable(input=self._folder / f"vector-{client}.npy"))

    def _watch(self, client: int) -> ClientWatch:
        return ClientWatch()

    def _overrides(self) -> list[str]:
        return [*super()._overrides(), f"rounds.min_clients={self.config.clients}"]
