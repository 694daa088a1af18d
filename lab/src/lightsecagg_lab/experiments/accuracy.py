"""Accuracy of a model that is trained through the masks, beside the same training in the clear.

Every way of averaging sees the same seeds, so the same batches for as long as the models agree:
what differs is what quantisation, and the noise of short keys, do to the average.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from lightsecagg.drivers.aggregation import aggregate
from lightsecagg.params import Decoding, ShareMode
from lightsecagg.training import (
    AverageUpdate,
    LocalConfig,
    LocalUpdate,
    TaskConfig,
    federated_averaging,
    use_one_thread,
)
from lightsecagg_lab.experiments.cells import Cell, Document, Results
from lightsecagg_lab.experiments.report import Report, Table

PLAIN = "in the clear"

WAYS: dict[str, tuple[ShareMode, Decoding | None] | None] = {
    PLAIN: None,
    "seeded": (ShareMode.SEEDED, None),
    "short keys, exact": (ShareMode.SHORT_KEY, Decoding.EXACT),
    "short keys, dithered": (ShareMode.SHORT_KEY, Decoding.DITHERED),
}
"""How updates are averaged, by the label that reports use."""


@dataclass(frozen=True, slots=True)
class AccuracyCell(Cell):
    """One training run."""

    extras: ClassVar[tuple[str, ...]] = ("torch",)
    way: str
    """A key of `WAYS`."""
    task: TaskConfig
    seed: int
    rounds: int = 20
    privacy: int = 5
    dropouts: int = 5
    bound: float = 0.5
    """Larger entries of an update are clipped, in the clear as well."""

    @property
    def key(self) -> str:
        name = self.way.replace(",", "").replace(" ", "-")
        return (
            f"accuracy-{self.task.task}-{name}-N{self.task.clients}-T{self.privacy}"
            f"-D{self.dropouts}-b{self.bound:g}-r{self.rounds}-s{self.seed}"
        )

    def measure(self) -> Document:
        use_one_thread()
        average = partial(_average, self)
        local = LocalConfig(learning_rate=0.1, batch_size=16)
        rounds = federated_averaging(self.task, self.rounds, local, seed=self.seed, average=average)
        curve = [each.metrics["accuracy"] for each in rounds]
        task = {name: value for name, value in asdict(self.task).items() if name != "data_dir"}
        return {"cell": asdict(self) | {"task": task}, "accuracy": curve}


def _average(cell: AccuracyCell, updates: Sequence[LocalUpdate]) -> AverageUpdate:
    """Every client counts alike: the partition deals all of them the same number of examples."""
    deltas = [np.clip(update.delta, -cell.bound, cell.bound) for update in updates]
    way = WAYS[cell.way]
    if way is None:
        return AverageUpdate(np.asarray(np.mean(deltas, axis=0), dtype=np.float32))
    mode, decoding = way
    result = aggregate(
        deltas,
        privacy=cell.privacy,
        dropouts=cell.dropouts,
        bound=cell.bound,
        share_mode=mode,
        decoding=decoding,
    )
    return AverageUpdate(result.mean)


def accuracy_cells(
    task: str, data_dir: Path | None, seeds: int, rounds: int | None = None
) -> list[Cell]:
    """Every way of averaging, with each seed."""
    config = TaskConfig(task, clients=20, data_dir=data_dir)
    if task == "mnist":
        config = replace(config, model="lenet5", samples_per_client=600)
    cells = [AccuracyCell(way, config, seed) for seed in range(seeds) for way in WAYS]
    return [replace(cell, rounds=rounds or cell.rounds) for cell in cells]


def accuracy_report(task: str, results: Results) -> Report:
    """Mean and spread over the seeds, and the difference to the clear with the same seed."""
    report = Report(f"accuracy-{task}", f"Accuracy through the masks: {task}", timed=False)
    last = {
        (each["cell"]["way"], each["cell"]["seed"]): each["accuracy"][-1]
        for each in results.values()
    }
    seeds = sorted({seed for _, seed in last})
    rows = []
    for way in WAYS:
        found = [last[way, seed] for seed in seeds]
        differences = [last[way, seed] - last[PLAIN, seed] for seed in seeds]
        report.figures[way] = {
            "accuracy": found,
            "mean": statistics.fmean(found),
            "spread": statistics.stdev(found) if len(found) > 1 else 0.0,
            "differences": differences,
        }
        rows.append(
            [
                way,
                f"{100 * statistics.fmean(found):.2f}",
                f"{100 * report.figures[way]['spread']:.2f}",
                ", ".join(f"{100 * value:+.2f}" for value in differences),
            ]
        )
    noise = report.figures[PLAIN]["spread"]
    worst = max(abs(statistics.fmean(f["differences"])) for f in report.figures.values())
    verdict = "one seed gives no spread to compare with"
    if len(seeds) > 1:
        report.figures["within_noise"] = within = worst <= noise
        verdict = "within noise" if within else "NOT within noise"
    header = ["average", "accuracy (%)", "spread over seeds", "minus the clear, by seed (points)"]
    report.tables.append(Table("After the last round", header, rows))
    one = next(iter(results.values()))["cell"]
    report.paragraphs.append(
        f"{one['rounds']} rounds of N = {one['task']['clients']} clients, T = {one['privacy']}, "
        f"D = {one['dropouts']}, {len(seeds)} seeds; one local epoch, updates clipped to "
        f"{one['bound']:g}. The largest mean difference to the clear is {100 * worst:.2f} points, "
        f"the spread of the clear over seeds {100 * noise:.2f}: {verdict}."
    )
    return report
