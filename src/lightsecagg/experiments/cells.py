"""Cells: the single measurements that tables and figures are made of, kept as small JSON files.

A cell is measured once; an experiment that is started again, or another one that needs the same
cell, reads the file. That is what makes a run resumable, and what makes Tables 2, 3 and 4, Figure 6
and the overheads share their rounds: a cell holds CPU seconds and bytes per party and phase, and
bandwidth, topology and overlap are applied to them afterwards (`timing`).
"""

from __future__ import annotations

import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lightsecagg.drivers.simulation.faults import Drop
from lightsecagg.drivers.simulation.scenario import Scenario, run
from lightsecagg.drivers.simulation.synchronous import RoundReport
from lightsecagg.errors import ConfigurationError
from lightsecagg.experiments.machine import describe_machine, load_average
from lightsecagg.foreign import reading
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.schemes.traits import ProtocolName, traits_of

Document = dict[str, Any]
Results = dict[str, Document]
"""Key of a cell -> what was measured."""


class Cell(ABC):
    """One measurement."""

    extras: ClassVar[tuple[str, ...]] = ()
    """The extras of this package that it takes."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Names the cell and its file."""

    @abstractmethod
    def measure(self) -> Document:
        """Do it."""


@dataclass(frozen=True, slots=True)
class RoundCell(Cell):
    """A simulated round of real parties, in which D clients vanish before their upload."""

    protocol: ProtocolName
    clients: int
    privacy: int
    dropouts: int
    dimension: int
    survivors: int = 0
    """LightSecAgg: U; 0 for N - D."""
    share_mode: ShareMode = ShareMode.SEEDED
    sample: int = 0
    """So many clients are real, the others stand-ins; 0: all are real."""
    repeats: int = 1
    """Rounds; the median of each figure is kept."""
    seed: int = 0

    @property
    def key(self) -> str:
        name = self.protocol.value.replace("+", "plus")
        if traits_of(self.protocol).share_modes:
            name += f"-{self.share_mode}-U{self.survivors or self.clients - self.dropouts}"
        return (
            f"{name}-N{self.clients}-T{self.privacy}-D{self.dropouts}-d{self.dimension}"
            f"-n{self.sample or self.clients}-r{self.repeats}-s{self.seed}"
        )

    def scenario(self) -> Scenario:
        """What the simulator runs."""
        return Scenario(
            protocol=self.protocol,
            parameters=Parameters(
                self.clients,
                self.privacy,
                self.dropouts,
                self.survivors,
                share_mode=self.share_mode,
            ),
            dimension=self.dimension,
            drops=(Drop(Phase.UPLOAD, self.dropouts),),
            seed=self.seed,
            sample_clients=self.sample or None,
        )

    def measure(self) -> Document:
        scenario = self.scenario()
        rounds = []
        for outcome in run(scenario, self.repeats):
            if outcome.report.aborted or outcome.report.exact is False:
                raise ConfigurationError(
                    f"{self.key} gave no sum to measure: {outcome.report.aborted or 'wrong sum'}"
                )
            rounds.append(_loads(outcome.report))
        parameters, neighbours, threshold = scenario.resolved()
        return {
            "cell": asdict(self),
            "neighbours": neighbours,
            "threshold": threshold or parameters.survivors,
            "phases": {
                phase.value: {
                    name: statistics.median(loads[phase][name] for loads in rounds)
                    for name in rounds[0][phase]
                }
                for phase in rounds[0]
            },
        }


def _loads(report: RoundReport) -> dict[Phase, dict[str, float]]:
    """The slowest client's seconds, the busiest client's bytes, and the server's."""
    return {
        phase: {
            "client_seconds": loads.work.client,
            "client_seconds_median": statistics.median(
                [c.seconds for c in loads.clients.values() if c.seconds] or [0.0]
            ),
            "server_seconds": loads.work.server,
            "server_relay_seconds": loads.work.server_relaying,
            **asdict(loads.traffic),
        }
        for phase, loads in report.meter.phases.items()
    }


@dataclass(frozen=True, slots=True)
class TrainingCell(Cell):
    """Local training of one client, in CPU seconds of one thread, on tensors of random pixels."""

    extras: ClassVar[tuple[str, ...]] = ("torch",)
    task: str
    """A key of `PAPER_MODELS`."""
    samples: int
    epochs: int = 5
    """E, of which `measured_epochs` are really run."""
    measured_epochs: int = 5

    @property
    def key(self) -> str:
        return f"training-{self.task}-s{self.samples}-e{self.measured_epochs}of{self.epochs}"

    def measure(self) -> Document:
        from lightsecagg.training import (
            LocalConfig,
            TaskConfig,
            initial_model,
            load_task,
            local_update,
            use_one_thread,
        )

        use_one_thread()
        config = TaskConfig(task=f"synthetic-{self.task}", clients=1)
        task = load_task(replace(config, samples_per_client=self.samples))
        model = initial_model(task)
        local = LocalConfig(epochs=self.measured_epochs, learning_rate=1e-3)
        # What torch prepares at first use is not charged.
        local_update(replace(config, samples_per_client=4), 0, model, LocalConfig())
        started = time.process_time()
        local_update(task, 0, model, local)
        seconds = time.process_time() - started
        return {
            "cell": asdict(self),
            "measured_seconds": seconds,
            "seconds": seconds * self.epochs / self.measured_epochs,
        }


Progress = Callable[[Cell, bool], None]
"""Called before each cell; the flag says whether it has to be measured."""


def measure_cells(cells: Iterable[Cell], folder: Path, progress: Progress) -> Results:
    """Measure what is not there yet; each finished cell is on disk before the next begins."""
    folder.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    for cell in cells:
        path = folder / f"{cell.key}.json"
        needed = cell.key not in results and not path.exists()
        progress(cell, needed)
        if needed:
            before = load_average()
            document = cell.measure()
            document["machine"] = describe_machine() | {"load_average_before": before}
            _write(path, document)
        if cell.key not in results:
            with reading(path, "a finished cell"):
                results[cell.key] = json.loads(path.read_text("utf-8"))
    return results


def _write(path: Path, document: Document) -> None:
    """Whole or not at all, so that an interrupted run leaves no half cell."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
