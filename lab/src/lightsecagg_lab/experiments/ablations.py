"""What each idea of this implementation is worth: rounds with it and without, in one process.

A block of rounds with it, one without, and so on by turns, so that whatever else happens to the
machine happens to both. Overlap is no switch of a round: it is computed from the overhead's rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from lightsecagg.field import kernels, ntt
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol import share_exchange
from lightsecagg_lab.experiments.cells import (
    VERSION,
    Cell,
    Document,
    Results,
    RoundCell,
    warm_rounds,
)
from lightsecagg_lab.experiments.overhead import RATE, overhead_cells
from lightsecagg_lab.experiments.report import Report, Table
from lightsecagg_lab.experiments.rounds import LIGHT, PLAIN, Measured
from lightsecagg_lab.experiments.setups import TASKS, Profile, method
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.experiments.timing import RoundTimes, client_upload, timed_rounds
from lightsecagg_lab.planning import Network
from lightsecagg_lab.planning.timeline import OFFLINE

_BLOCKS, _ROUNDS = 3, 2
"""Blocks of each kind, and warm rounds in each."""


@contextmanager
def _replaced(*places: tuple[Any, str], by: Any) -> Iterator[None]:
    """Inside, these names of modules stand for something else."""
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, by)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


def _never(*arguments: Any) -> bool:
    return False


def _matrix() -> AbstractContextManager[None]:
    return _replaced((ntt, "interpolation_pays"), (ntt, "evaluation_pays"), by=_never)


def _one_by_one() -> AbstractContextManager[None]:
    return _replaced((share_exchange, "BUNDLE_BYTES"), by=1)


def _same(cell: RoundCell) -> RoundCell:
    return cell


@dataclass(frozen=True, slots=True)
class Ablation:
    """An idea, and what takes its place."""

    title: str
    instead: str
    cell: Callable[[RoundCell], RoundCell] = _same
    """The rounds without it, from those with it."""
    switched: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, it is switched off."""
    shorter: int = 1
    """By how much the vector is shorter: without it, rounds may take too long."""


def _malicious(cell: RoundCell) -> RoundCell:
    return replace(cell, threat_model=ThreatModel.MALICIOUS_SERVER)


ABLATIONS = {
    "seeded": Ablation(
        "seeded shares", "the paper's", lambda cell: replace(cell, share_mode=ShareMode.PAPER)
    ),
    "short-key": Ablation(
        "seeded shares",
        "short keys (experimental)",
        lambda cell: replace(cell, share_mode=ShareMode.SHORT_KEY),
    ),
    "native": Ablation(
        "native loops", "NumPy", switched=partial(kernels.using, "numpy"), shorter=10
    ),
    "transform": Ablation("transforms", "matrix products", switched=_matrix),
    "bundles": Ablation("bundled shares", "a message per share", switched=_one_by_one),
    "malicious": Ablation("honest-but-curious", "malicious-server mode", _malicious),
}


@dataclass(frozen=True, slots=True)
class AblationCell(Cell):
    """Rounds with an idea and without it, by turns."""

    timed: ClassVar[bool] = True
    name: str
    """A key of `ABLATIONS`."""
    round: RoundCell
    """With it."""

    @property
    def key(self) -> str:
        size = f"N{self.round.clients}-d{self.round.dimension}"
        return f"ablation-{self.name}-{size}-r{_BLOCKS}x{_ROUNDS}-{VERSION}"

    @property
    def expected_seconds(self) -> float:
        without = ABLATIONS[self.name].cell(self.round)
        slower = 3.0 if self.name == "native" else 1.0
        each = self.round.expected_round_seconds + slower * without.expected_round_seconds
        return _BLOCKS * (_ROUNDS + 1) * each

    def measure(self) -> Document:
        idea, with_it = ABLATIONS[self.name], replace(self.round, repeats=_ROUNDS)
        without = idea.cell(with_it)
        found: dict[str, list[Document]] = {"with": [], "without": []}
        for _ in range(_BLOCKS):
            found["with"].append(with_it.measure())
            with idea.switched():
                found["without"].append(without.measure())
        return {"cell": asdict(self), **found}


def _cells(profile: Profile) -> dict[str, AblationCell]:
    dimension = TASKS["femnist"].dimension
    base = profile.round(LIGHT, profile.largest, RATE, dimension)
    return {
        name: AblationCell(name, replace(base, dimension=dimension // idea.shorter, repeats=1))
        for name, idea in ABLATIONS.items()
    }


def ablation_cells(profile: Profile) -> list[Cell]:
    """One per idea; the overhead's, for overlap."""
    return [*_cells(profile).values(), *overhead_cells(profile)]


_FIGURES: dict[str, Callable[[Document], list[float]]] = {
    "round without training": lambda document: [
        RoundTimes(phases, 0.0).aggregation
        for phases in timed_rounds(document, Network(), [0.0]).warm
    ],
    "client's CPU": lambda document: _sums(document, "client_seconds"),
    "server's CPU": lambda document: _sums(document, "server_seconds"),
    "client sends": lambda document: [client_upload(document).median],
}


def _sums(document: Document, name: str) -> list[float]:
    return [sum(loads[name] for loads in each.values()) for each in warm_rounds(document)]


def ablation_report(profile: Profile, results: Results) -> Report:
    """Without over with."""
    report = Report("ablations", f"What each idea is worth, CNN, N = {profile.largest}")
    rows = []
    for name, cell in _cells(profile).items():
        idea, found = ABLATIONS[name], results[cell.key]
        figures = {
            title: {
                kind: Spread.of(value for document in found[kind] for value in of(document))
                for kind in ("with", "without")
            }
            for title, of in _FIGURES.items()
        }
        ratios = {title: each["without"] / each["with"] for title, each in figures.items()}
        report.figures[name] = {"ratios": ratios, **figures}
        title = f"{idea.title} -> {idea.instead}"
        seconds = f"{figures[_FIRST]['with']:.2f}"
        factors = [f"{ratio:.2f}" for ratio in ratios.values()]
        rows.append([title, f"{cell.round.dimension:,}", seconds, *factors])
    report.tables = [
        Table(
            f"Ratios: without the idea over with it; N = {profile.largest}, 10 % dropouts",
            ["", "d", f"with it: {_FIRST} (s)", *_FIGURES],
            rows,
        ),
        _overlap(profile, results, report),
    ]
    report.paragraphs = [
        f"Each row is measured in one process: {_BLOCKS} blocks of {_ROUNDS} warm rounds with the "
        f"idea and {_BLOCKS} without it, by turns. It has ratios of the medians, and the widest "
        "range that the quartiles allow. A ratio above 1 is what the idea saves; in the last row, "
        "what the stronger promise costs. Native loops are compared with NumPy on vectors of a "
        "tenth, because rounds on NumPy would take minutes. Short keys also depend on ring-LWE.",
        *method(profile),
    ]
    return report


_FIRST = next(iter(_FIGURES))


def _overlap(profile: Profile, results: Results, report: Report) -> Table:
    """Training after the offline phase, beside it on a core of its own, and on the same core."""
    measured, task = Measured(profile, results), TASKS["femnist"]
    rows = []
    for protocol in (LIGHT, PLAIN):
        times = measured.times(protocol, task, RATE, Network()).steady()
        figures = {
            "none": times.spread(lambda each: each.total(overlap=False)),
            "own core": times.spread(lambda each: each.total(overlap=True)),
            "shared core": times.spread(on_one_core),
        }
        report.figures[f"overlap/{protocol}"] = figures
        rows.append([str(protocol), *(f"{spread:.2f}" for spread in figures.values())])
    training = statistics.median(measured.trainings(task))
    return Table(
        f"Overlap: seconds of a round with {training:.1f} s of training, relayed",
        ["protocol", "none", "training on a core of its own", "on the client's only core"],
        rows,
    )


def on_one_core(times: RoundTimes) -> float:
    """A round whose training shares the client's core with the offline phase; links go on."""
    offline = [times.phases[phase] for phase in OFFLINE if phase in times.phases]
    working = times.training + sum(parts.client for parts in offline)
    return max(times.offline, working) + times.uploading + times.recovery
