"""Cells: the single measurements that tables and figures are made of, kept as small JSON files.

A cell is measured once; an experiment that is started again, or another one that needs the same
cell, reads the file. That is what makes a run resumable, and what makes Tables 2, 3 and 4, Figure 6
and the overheads share their rounds: a cell holds CPU seconds and bytes per party and phase, and
bandwidth, topology and overlap are applied to them afterwards (`timing`).

What is timed is repeated, in a process of its own, so that no cell depends on what ran before it.
The first round of a process is cold (pages, caches and tables are made at first use): it is kept
apart from the others, of which every one is kept.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import reading
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg_lab.experiments.competition import watched
from lightsecagg_lab.experiments.processes import alone
from lightsecagg_lab.planning.planner import Federation, round_settings
from lightsecagg_lab.planning.traffic import share_counts
from lightsecagg_lab.planning.unit_costs import STATED
from lightsecagg_lab.planning.work import forecast_work
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.faults import Drop
from lightsecagg_lab.simulation.scenario import Scenario, run
from lightsecagg_lab.simulation.synchronous import RoundReport

Document = dict[str, Any]
Results = dict[str, Document]
"""Key of a cell -> what was measured."""

VERSION = "v3"
"""Of what the files of timed cells hold. It is part of their keys: older ones are not misread."""

REPEATS = 7
"""How often something is measured that is neither cheap nor long."""

_DIGITS = 6
"""Microseconds."""
_PER_CLIENT, _PER_ELEMENT, _PER_BYTE = 1e-3, 2e-9, 6e-10
"""Seconds of the simulator itself: per client, per element of its update, per byte that is relayed;
fitted to cells of N = 100 and 200."""
_START, _START_TORCH = 2.5, 6.0
"""Seconds that the process of a cell takes to start, and to look at the machine before."""


class Cell(ABC):
    """One measurement."""

    extras: ClassVar[tuple[str, ...]] = ()
    """The extras of this package that it takes."""
    timed: ClassVar[bool] = False
    """Whether it needs an idle machine, and a process of its own."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Names the cell and its file."""

    @abstractmethod
    def measure(self) -> Document:
        """Do it."""

    @property
    def expected_seconds(self) -> float:
        """About how long that takes on an idle machine; 0 where nobody knows."""
        return 0.0

    def check(self) -> None:  # noqa: B027 - most cells can be measured anywhere
        """Refuse a machine on which it cannot be measured."""


@dataclass(frozen=True, slots=True)
class RoundCell(Cell):
    """Simulated rounds of real parties, in which D clients vanish before their upload."""

    timed: ClassVar[bool] = True
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
    """Rounds after the cold one."""
    seed: int = 0
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    graph: tuple[int, int] = (0, 0)
    """SecAgg+: k and t, if they are not the finder's; real clients may refuse them as insecure."""

    @property
    def key(self) -> str:
        name = self.protocol.value.replace("+", "plus")
        if traits_of(self.protocol).share_modes:
            name += f"-{self.share_mode}-U{self.survivors or self.clients - self.dropouts}"
        if any(self.graph):
            name += "-k{}-t{}".format(*self.graph)
        if self.threat_model is not ThreatModel.HONEST_BUT_CURIOUS:
            name += f"-{self.threat_model}"
        return (
            f"{name}-N{self.clients}-T{self.privacy}-D{self.dropouts}-d{self.dimension}"
            f"-n{self.sample or self.clients}-r{self.repeats}-s{self.seed}-{VERSION}"
        )

    @property
    def expected_seconds(self) -> float:
        return _START + (self.repeats + 1) * self.expected_round_seconds

    @property
    def expected_round_seconds(self) -> float:
        """The planner's forecast of what the parties do, and what the simulator does besides."""
        return _forecast(replace(self, repeats=1))

    def scenario(self) -> Scenario:
        """What the simulator runs."""
        return Scenario(
            protocol=self.protocol,
            parameters=Parameters(
                self.clients,
                self.privacy,
                self.dropouts,
                self.survivors,
                threat_model=self.threat_model,
                share_mode=self.share_mode,
            ),
            neighbours=self.graph[0],
            threshold=self.graph[1],
            dimension=self.dimension,
            drops=(Drop(Phase.UPLOAD, self.dropouts),),
            seed=self.seed,
            sample_clients=self.sample or None,
        )

    def measure(self) -> Document:
        scenario = self.scenario()
        rounds = []
        for outcome in run(scenario, self.repeats + 1):
            if outcome.report.aborted or outcome.report.exact is False:
                raise ConfigurationError(
                    f"{self.key} gave no sum to measure: {outcome.report.aborted or 'wrong sum'}"
                )
            rounds.append(_loads(outcome.report))
        cold, *warm = rounds
        parameters, neighbours, threshold = scenario.resolved()
        return {
            "cell": asdict(self),
            "warnings": scenario.warnings(),
            "neighbours": neighbours,
            "threshold": threshold or parameters.survivors,
            "cold": cold,
            "rounds": {
                phase: {name: [loads[phase][name] for loads in warm] for name in cold[phase]}
                for phase in cold
            },
        }


@cache
def _forecast(cell: RoundCell) -> float:
    federation = Federation(
        cell.clients,
        cell.privacy,
        cell.dropouts,
        cell.dimension,
        threat_model=cell.threat_model,
    )
    settings = round_settings(
        federation, cell.protocol, cell.survivors, cell.share_mode, cell.graph
    )
    work = forecast_work(settings, cell.dropouts, STATED).values()
    real = cell.sample or cell.clients
    idle = cell.clients * (_PER_CLIENT + _PER_ELEMENT * cell.dimension)
    relayed = cell.clients * share_counts(settings).bytes
    return sum(each.server + real * each.client for each in work) + idle + _PER_BYTE * relayed


Loads = dict[str, dict[str, float]]
"""Phase -> what -> seconds or bytes of one round."""


def warm_rounds(document: Document) -> list[Loads]:
    """Each round of a cell but the cold one."""
    rounds: dict[str, dict[str, list[float]]] = document["rounds"]
    return [
        {
            phase: {name: each[index] for name, each in loads.items()}
            for phase, loads in rounds.items()
        }
        for index in range(document["cell"]["repeats"])
    ]


def _loads(report: RoundReport) -> Loads:
    """The slowest client's seconds, the busiest client's bytes, and the server's."""
    return {
        phase.value: {
            "client_seconds": round(loads.work.client, _DIGITS),
            "client_seconds_median": round(
                statistics.median(
                    [c.seconds for c in loads.clients.values() if c.seconds] or [0.0]
                ),
                _DIGITS,
            ),
            "server_seconds": round(loads.work.server, _DIGITS),
            "server_relay_seconds": round(loads.work.server_relaying, _DIGITS),
            "server_spread_seconds": round(loads.work.server_spread, _DIGITS),
            **asdict(loads.traffic),
        }
        for phase, loads in report.meter.phases.items()
    }


@dataclass(frozen=True, slots=True)
class TrainingCell(Cell):
    """Local training of one client, in CPU seconds of one thread, on tensors of random pixels.

    Each repetition trains one epoch, which counts E times.
    """

    extras: ClassVar[tuple[str, ...]] = ("torch",)
    timed: ClassVar[bool] = True
    task: str
    """A key of `PAPER_MODELS`."""
    samples: int
    epochs: int = 5
    """E"""
    repeats: int = 1
    """Epochs after the cold one."""
    epoch_seconds: float = 0.0
    """About how long one takes."""

    @property
    def key(self) -> str:
        name = f"training-{self.task}-s{self.samples}-e{self.epochs}"
        return f"{name}-r{self.repeats}-{VERSION}"

    @property
    def expected_seconds(self) -> float:
        return _START_TORCH + (self.repeats + 1) * self.epoch_seconds

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
        local = LocalConfig(epochs=1, learning_rate=1e-3)
        # What torch prepares at first use is not charged.
        local_update(replace(config, samples_per_client=4), 0, model, LocalConfig())
        seconds = []
        for _ in range(self.repeats + 1):
            started = time.process_time()
            local_update(task, 0, model, local)
            seconds.append(round(self.epochs * (time.process_time() - started), _DIGITS))
        return {"cell": asdict(self), "cold_seconds": seconds[0], "seconds": seconds[1:]}


Progress = Callable[[Cell, bool], None]
"""Called before each cell; the flag says whether it has to be measured."""


Quiet = Callable[[], None]
"""Called before a cell that is timed: returns when the machine is idle enough."""


def measure_cells(
    cells: Iterable[Cell], folder: Path, progress: Progress, quiet: Quiet | None = None
) -> Results:
    """Measure what is not there yet; each finished cell is on disk before the next begins."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = list(cells)
    for cell in missing_cells(cells, folder):
        cell.check()
    results: Results = {}
    for cell in cells:
        path = _path(cell, folder)
        needed = cell.key not in results and not path.exists()
        progress(cell, needed)
        if needed:
            if cell.timed and quiet is not None:
                quiet()
            measure = partial(alone, cell.measure) if cell.timed else cell.measure
            _write(path, watched(measure))
        if cell.key not in results:
            with reading(path, "a finished cell"):
                results[cell.key] = json.loads(path.read_text("utf-8"))
    return results


def missing_cells(cells: Iterable[Cell], folder: Path) -> list[Cell]:
    """Each cell that has to be measured, once."""
    wanted = {cell.key: cell for cell in cells}
    return [cell for cell in wanted.values() if not _path(cell, folder).exists()]


def _path(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.key}.json"


def _write(path: Path, document: Document) -> None:
    """Whole or not at all, so that an interrupted run leaves no half cell."""
    written = path.with_suffix(".partial")
    written.write_text(to_json(document), encoding="utf-8")
    written.replace(path)


def to_json(document: Document) -> str:
    """Indented, but for lists of numbers: each stands on one line."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[-+.\w,\s]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"
