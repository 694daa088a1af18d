"""Convergence of the asynchronous mode: Section 7.4 and Appendix F.5 of the paper.

FedBuff and LightSecAgg on the same seeds, schedule and batches; and a sweep over c_l, which has two
error sources: rounding at the lower end, wrap-around in the field at the upper end.

The unit of work is a *cell*: one training run. Every finished cell is a JSON file, and a file that
is there is not computed again, so a run that was interrupted goes on where it stopped.

The protected runs are the real thing: every party, every byte, every sum compared with what it must
be. The sweep runs the same quantised arithmetic over F_q without masks, because masking is exact,
and without the range check, because a real client refuses a scale that could wrap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.field.quantization import quantizer_of_scale
from lightsecagg.field.staleness import Staleness, StalenessTable
from lightsecagg.foreign import reading
from lightsecagg.params import PAPER_MODULUS, Parameters
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.training import LocalConfig, ServerConfig, TaskConfig, load_task, training_pool
from lightsecagg_lab.experiments.competition import watched
from lightsecagg_lab.schemes.fedbuff import FedBuffServer, PlainUpload
from lightsecagg_lab.simulation.async_fedbuff import PlainFederation
from lightsecagg_lab.simulation.async_federation import Federation, Flush
from lightsecagg_lab.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg_lab.simulation.async_training import TrainingWorkload
from lightsecagg_lab.simulation.asynchronous import simulate_async
from lightsecagg_lab.simulation.schedule import UniformStaleness

FEDBUFF, LIGHTSECAGG, UNMASKED = "fedbuff", "lightsecagg", "unmasked"

LAST_ROUNDS = 10
"""Accuracies are compared by their mean over so many last rounds."""

SCALE_BITS = 16
"""log2 of c_l in the protected runs, the paper's."""

ANNEALING: dict[str, Callable[[float], float]] = {
    "constant": lambda part: 1.0,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
}
"""What multiplies eta_g when so great a part of the rounds is over."""

# Random streams that must not meet; the task and its batches have their own.
_SCHEDULE, _ROUNDING = 1, 2


@dataclass(frozen=True, slots=True)
class Setup:
    """What all cells of an experiment share; the defaults are the paper's, on MNIST."""

    task: str = "mnist"
    model: str | None = "lenet5"
    clients: int = 100
    privacy: int = 8
    survivors: int = 70
    buffer: int = 10
    max_staleness: int = 10
    staleness_scale: int = 2**6
    """c_g"""
    modulus: int = PAPER_MODULUS
    rounds: int = 100
    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.0
    """Of a client's steps; it starts afresh with every update."""
    server_rate: float = 0.3
    """eta_g"""
    annealing: str = "constant"
    """How eta_g goes on over the rounds: `constant`, or `cosine`, down to 0."""
    evaluate_every: int = 5
    """The last ten rounds are always evaluated."""

    def __post_init__(self) -> None:
        if self.annealing not in ANNEALING:
            raise ParameterError(
                f"annealing is {self.annealing!r}; choose one of {', '.join(ANNEALING)}"
            )

    def rate_at(self, version: int) -> float:
        """By what eta_g is multiplied in the step from this version of the model."""
        return ANNEALING[self.annealing](version / self.rounds)


PAPER_MNIST = Setup()
QUICK = Setup(
    task="digits",
    model=None,
    clients=20,
    privacy=3,
    survivors=14,
    buffer=5,
    rounds=60,
    batch_size=16,
    learning_rate=0.3,
)
TUNED_CIFAR10 = replace(
    PAPER_MNIST,
    task="cifar10",
    rounds=300,
    momentum=0.9,
    server_rate=0.4,
    annealing="cosine",
    evaluate_every=10,
)
"""At MNIST's rates a LeNet-5 learns CIFAR-10 too slowly to say where it ends: 39 % after 100
buffers, where this momentum gave 48 %. Where stale updates are not discounted the steps cannot be
longer: a constant eta_g of 0.5 swings between 31 and 47 %, twice the learning rate or half the
batch is slower than this. A constant 0.3 ends at 53 % (constant) and 57 % (poly) but still rises by
three points per 100 buffers; annealed, runs end flat, one and two points lower."""


def setup_of(task: str) -> Setup:
    """The experiment on a task, at rates that suit it."""
    if task == TUNED_CIFAR10.task:
        return TUNED_CIFAR10
    return replace(PAPER_MNIST, task=task, model=None if task == "digits" else PAPER_MNIST.model)


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run."""

    scheme: str
    """`fedbuff`, `lightsecagg`, or `unmasked`: quantised over F_q, neither masked nor checked."""
    staleness: str
    """`constant`, `poly` (alpha = 1) or `hinge` (a = 1, b = 3)."""
    seed: int
    scale_bits: int = SCALE_BITS
    """log2 of c_l; means nothing for FedBuff."""

    @property
    def name(self) -> str:
        """Of its file."""
        scale = "" if self.scheme == FEDBUFF else f"-c{self.scale_bits:02d}"
        return f"{self.scheme}-{self.staleness}{scale}-seed{self.seed}"

    def path(self, out: Path) -> Path:
        """Where its document is kept."""
        return out / "cells" / f"{self.name}.json"


class UncheckedFieldServer(FedBuffServer):
    """Eq. (34)-(37) over F_q without masks and WITHOUT the range check, for the sweep alone."""

    def __init__(
        self,
        dimension: int,
        buffer_size: int,
        table: StalenessTable,
        modulus: int,
        scale: float,
        rounding: np.random.Generator,
    ) -> None:
        super().__init__(dimension, buffer_size, table.weight, table.max_staleness)
        self._modulus = modulus
        self._scale = scale
        self._rounding = rounding
        self.wrapped: list[float] = []
        """By buffer: which part of the entries wrapped around."""
        self.noise: list[float] = []
        """By buffer: the error of the other entries of the mean, relative to the mean; r.m.s."""

    def _mean(
        self, weights: Sequence[float], uploads: Sequence[PlainUpload]
    ) -> NDArray[np.float64]:
        exact = np.zeros(self._dimension)
        total = np.zeros(self._dimension, dtype=np.int64)
        for weight, upload in zip(weights, uploads, strict=True):
            scaled = self._scale * upload.vector.astype(np.float64)
            rounded = np.floor(scaled + self._rounding.random(scaled.size)).astype(np.int64)
            exact += weight * scaled
            total = (total + int(weight) * (rounded % self._modulus)) % self._modulus
        signed = np.where(total >= (self._modulus - 1) // 2, total - self._modulus, total)
        wrapped = np.abs(signed - exact) > self._modulus / 2
        self.wrapped.append(float(wrapped.mean()))
        self.noise.append(_rms(np.where(wrapped, 0, signed - exact)) / _rms(exact))
        return signed / (self._scale * sum(weights))


def _rms(vector: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(vector**2)))


def run_cell(setup: Setup, cell: Cell, data_dir: Path | None = None) -> dict[str, Any]:
    """Train once; what becomes a JSON file."""
    task = load_task(
        TaskConfig(setup.task, clients=setup.clients, model=setup.model, data_dir=data_dir)
    )
    workload = TrainingWorkload(
        task,
        LocalConfig(
            setup.epochs,
            setup.batch_size,
            learning_rate=setup.learning_rate,
            momentum=setup.momentum,
        ),
        ServerConfig(learning_rate=setup.server_rate),
        max_staleness=setup.max_staleness,
        seed=cell.seed,
        annealing=setup.rate_at,
    )
    federation = _federation(setup, cell, workload.dimension)
    schedule = UniformStaleness(
        setup.clients, setup.max_staleness, np.random.default_rng((cell.seed, _SCHEDULE))
    )
    accuracy: dict[int, float] = {}

    def note(flush: Flush) -> None:
        done = flush.time + 1
        if done % setup.evaluate_every == 0 or done > setup.rounds - LAST_ROUNDS:
            accuracy[done] = workload.evaluate()["accuracy"]

    report = simulate_async(
        federation,
        workload,
        schedule,
        setup.rounds,
        max_staleness=setup.max_staleness,
        on_flush=note,
    )
    document = {
        "setup": asdict(setup),
        "cell": asdict(cell),
        "parameters": workload.dimension,
        "accuracy": accuracy,
        "final_accuracy": fmean([accuracy[done] for done in sorted(accuracy)[-LAST_ROUNDS:]]),
        "exact": report.exact,
        "flushes": report.recovered,
        "uploads": report.uploads,
        "too_stale": report.too_stale,
        "training_seconds": workload.seconds,
        "phases": federation.meter.costs(),
    }
    if isinstance(federation, ProtectedFederation):
        document |= federation.protection
    if isinstance(federation, PlainFederation) and isinstance(
        federation.server, UncheckedFieldServer
    ):
        server = federation.server
        document |= {"wrapped": fmean(server.wrapped), "noise": fmean(server.noise)}
    return document


def _federation(setup: Setup, cell: Cell, dimension: int) -> Federation:
    rounding = np.random.default_rng((cell.seed, _ROUNDING))
    function, scale = Staleness(cell.staleness).function(), 2.0**cell.scale_bits
    table = StalenessTable.from_function(function, setup.staleness_scale, setup.max_staleness)
    if cell.scheme == FEDBUFF:
        plain = FedBuffServer(dimension, setup.buffer, function, setup.max_staleness)
        return PlainFederation(setup.clients, plain)
    if cell.scheme == UNMASKED:
        server = UncheckedFieldServer(
            dimension, setup.buffer, table, setup.modulus, scale, rounding
        )
        return PlainFederation(setup.clients, server)
    parameters = Parameters(
        clients=setup.clients,
        privacy=setup.privacy,
        dropouts=setup.clients - setup.survivors,
        survivors=setup.survivors,
        modulus=setup.modulus,
    )
    config = AsyncConfig(
        parameters=parameters,
        buffering=Buffering(table, max_updates=setup.buffer),
        quantizer=quantizer_of_scale(setup.modulus, setup.buffer, table.max_weight, scale),
        dimension=dimension,
        buffer_size=setup.buffer,
    )
    return ProtectedFederation(config, rounding)


def convergence_cells(seeds: int, staleness: Iterable[str] = ("constant", "poly")) -> list[Cell]:
    """FedBuff and LightSecAgg side by side."""
    return [
        Cell(scheme, function, seed)
        for seed in range(seeds)
        for function in staleness
        for scheme in (FEDBUFF, LIGHTSECAGG)
    ]


def sweep_cells(bits: Iterable[int], staleness: str = "poly", seeds: int = 1) -> list[Cell]:
    """The sweep over c_l = 2^bits."""
    scales = list(bits)
    return [
        Cell(UNMASKED, staleness, seed, scale_bits)
        for seed in range(seeds)
        for scale_bits in scales
    ]


def run_cells(
    setup: Setup,
    cells: Iterable[Cell],
    out: Path,
    data_dir: Path | None = None,
    progress: Callable[[Cell, bool], None] | None = None,
    jobs: int = 1,
) -> list[dict[str, Any]]:
    """Run what is not there yet; the documents of all cells.

    * `progress`: called with a cell and whether it must be computed, when its turn comes.
    * `jobs`: how many cells are computed at a time, in processes of their own if more than one.
    """
    (out / "cells").mkdir(parents=True, exist_ok=True)
    wanted = list(cells)
    missing = [cell for cell in wanted if read_cell(cell.path(out), setup, cell) is None]
    if progress is not None:
        for cell in wanted:
            if cell not in missing:
                progress(cell, False)
    if jobs == 1:
        for cell in missing:
            if progress is not None:
                progress(cell, True)
            keep_cell(setup, cell, out, data_dir)
    else:
        _run_in_parallel(setup, missing, out, data_dir, progress, jobs)
    return [_read(cell.path(out)) for cell in wanted]


def _run_in_parallel(
    setup: Setup,
    cells: Iterable[Cell],
    out: Path,
    data_dir: Path | None,
    progress: Callable[[Cell, bool], None] | None,
    jobs: int,
) -> None:
    waiting = iter(cells)
    running: set[Future[None]] = set()
    with training_pool(jobs) as pool:
        while True:
            # No more than can run: a cell is reported when it starts, and Ctrl-C leaves no queue.
            for cell in islice(waiting, jobs - len(running)):
                if progress is not None:
                    progress(cell, True)
                running.add(pool.submit(keep_cell, setup, cell, out, data_dir))
            if not running:
                return
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()


def keep_cell(setup: Setup, cell: Cell, out: Path, data_dir: Path | None = None) -> None:
    """Run a cell and write its file, all of it or nothing."""
    path = cell.path(out)
    written = path.with_suffix(".part")
    document = watched(partial(run_cell, setup, cell, data_dir))
    written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    written.replace(path)


def read_cell(path: Path, setup: Setup, cell: Cell) -> dict[str, Any] | None:
    """A finished cell, or None; refuses one that another setup has left here."""
    if not path.exists():
        return None
    document = _read(path)
    if document["setup"] != asdict(setup) or document["cell"] != asdict(cell):
        raise ConfigurationError(
            f"{path} was made with another setup; remove it or choose another folder with --out"
        )
    return document


def _read(path: Path) -> dict[str, Any]:
    with reading(path, "a finished cell"):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # A cell from before a setting existed was made with what is now its default.
        document["setup"] = asdict(PAPER_MNIST) | document["setup"]
        if not isinstance(document["cell"], dict):
            raise TypeError("a cell is named by its parts")
        return document
