"""Flower's rounds and ours over the same shaped links: the SuperLink and each SuperNode in one of
the network namespaces in which `lightsecagg experiments links` puts our server and our clients.

Every contestant is a cell, measured by itself and kept in `OUT/cells`: start it again to go on.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import vector_task
from deployment import CONTESTANTS, PROGRAMS, Deployment
from fedml_cell import FedMLCell

from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.experiments.cells import (
    VERSION,
    Cell,
    Document,
    Results,
    measure_cells,
    missing_cells,
)
from lightsecagg_lab.experiments.competition import wait_until_quiet
from lightsecagg_lab.experiments.links import (
    LATENCY,
    PAUSE,
    PROTOCOLS,
    LinkCell,
    RawLinkCell,
    title,
)
from lightsecagg_lab.experiments.namespaces import check_namespaces
from lightsecagg_lab.experiments.processes import terminable
from lightsecagg_lab.experiments.report import Report, Table, write_report
from lightsecagg_lab.experiments.shaped_links import shaped_links
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

EXCHANGES = {"plain": 1, "secagg+": 4, "lightsecagg": 2}
"""Messages to each node, and replies, of one round."""
TITLES = {"plain": "FedAvg", "secagg+": "SecAgg+", "lightsecagg": "LightSecAgg (our mod)"}
EXACT = {"plain": 1e-6, "secagg+": 1e-4, "lightsecagg": 1e-5}
"""How far an average may be from the plain mean: float32, and what the two round to."""
POLL = 0.25
"""Seconds between two looks of Flower's SuperExec for tasks, 1 by default: Flower at its best."""


@dataclass(frozen=True, slots=True)
class FlowerCell(Cell):
    """Rounds of one of Flower's contestants over links of one rate."""

    timed: ClassVar[bool] = True
    extras: ClassVar[tuple[str, ...]] = ("flower",)
    contestant: str
    clients: int
    bandwidth: float
    """Of each node, in Mbit/s each way."""
    dimension: int
    repeats: int
    """Rounds after the cold one."""
    latency: float = LATENCY
    pause: float = PAUSE

    @property
    def key(self) -> str:
        name = self.contestant.replace("+", "plus")
        return (
            f"flower-{name}-N{self.clients}-d{self.dimension}-{self.bandwidth:g}mbit"
            f"-{self.latency:g}ms-p{self.pause:g}-r{self.repeats}-{VERSION}"
        )

    @property
    def expected_seconds(self) -> float:
        exchange = 4.0 + 1.6 * self.clients
        enrolment = 3 * exchange if self.contestant == "lightsecagg" else 0.0
        rounds = (self.repeats + 1) * (self.pause + EXCHANGES[self.contestant] * exchange)
        return 12.0 + 4.0 * self.clients + enrolment + rounds

    def check(self) -> None:
        check_namespaces()
        check_flower()

    def measure(self) -> Document:
        patience = 60.0 + 8 * self.expected_seconds
        with (
            terminable(),
            shaped_links(self.clients, self.bandwidth, self.latency) as links,
            tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder,
            Deployment(
                Path(folder),
                self.clients,
                _say_nothing,
                patience,
                links,
                vector_task.source(self.dimension, self.pause),
                FLWR_SUPEREXEC_TASK_POLL_INTERVAL=str(POLL),
            ) as deployed,
        ):
            try:
                run = deployed.run(self.contestant, self.repeats + 1)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                raise ConfigurationError(
                    f"{self.key} gave no rounds to measure: {error}"
                ) from error
        cold, *warm = (round(seconds - self.pause, 3) for seconds in run["rounds"])
        return {
            "cell": asdict(self),
            "cold": cold,
            "rounds": warm,
            "enrolment": round(run["enrolment"], 3),
            "error": self.checked(vector_task.error(run["models"], self.clients)),
        }

    def checked(self, error: float) -> float:
        """Refuse rounds that gave another average than plain averaging does."""
        if not error <= EXACT[self.contestant]:
            raise ConfigurationError(
                f"{self.key} is {error:.1e} from the plain mean: a wrong average is no measurement"
            )
        return error


def _say_nothing(_: str) -> None:
    """A cell says how it ends; what is measured is said before it begins."""


def check_flower() -> None:
    """Refuse an environment without Flower and its programs."""
    lacking = [
        name
        for name in ("flwr", "flower-superlink", "flower-supernode")
        if not (PROGRAMS / name).exists()
    ]
    if lacking or importlib.util.find_spec("flwr") is None:
        raise ConfigurationError(
            f"Flower is not installed beside {sys.executable} ({', '.join(lacking) or 'flwr'} is "
            "missing); pip install 'lightsecagg[flower]'"
        )


def measure(
    nodes: list[int],
    rates: list[float],
    rounds: int,
    dim: int,
    only: list[str] | None,
    fedml: str | None,
    out: str,
    busy_anyway: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    cells = links_cells(nodes, rates, rounds, dim, only, fedml)
    out_folder = Path(out)
    folder = out_folder / "cells"
    left = missing_cells(cells, folder)
    minutes = sum(cell.expected_seconds for cell in left) / 60
    tell(f"{len(left)} of {len(cells)} cells to measure, about {minutes:.0f} minutes when idle")

    def progress(cell: Cell, needed: bool) -> None:
        about = f"measuring, about {cell.expected_seconds:.0f} s" if needed else "is there"
        tell(f"{cell.key}: {about}")

    quiet = None if busy_anyway else lambda: wait_until_quiet(tell)
    results = measure_cells(cells, folder, progress, quiet)
    report = links_report(cells, results)
    for path in write_report(report, results, _command(sys.argv[1:]), out_folder):
        tell(f"written: {path}")
    return report.document()


def _command(arguments: Sequence[str]) -> str:
    """As it was given, but for where its user keeps things."""
    given, words = ["python benchmarks/flower"], iter(arguments)
    for word in words:
        if word in ("--out", "--fedml"):
            next(words)
            given += [word, "PYTHON"] if word == "--fedml" else []
        elif word != "--json":
            given.append(word)
    return " ".join(given)


def links_cells(
    nodes: Sequence[int],
    rates: Sequence[float],
    rounds: int,
    dimension: int,
    only: Sequence[str] | None = None,
    fedml: str | None = None,
) -> list[Cell]:
    """Each N, rate and contestant: Flower's, FedML's if a Python has it, ours, and TCP alone."""
    unknown = set(only or ()) - CONTESTANTS.keys()
    if unknown:
        raise ConfigurationError(
            f"{', '.join(sorted(unknown))}: Flower's contestants are {', '.join(CONTESTANTS)}"
        )
    cells: list[Cell] = []
    for rate in rates:
        cells.append(RawLinkCell(rate, size=4 * dimension))
        for clients in nodes:
            cells += [
                FlowerCell(name, clients, rate, dimension, rounds) for name in only or CONTESTANTS
            ]
            if fedml is not None:
                cells.append(FedMLCell(fedml, clients, rate, dimension, rounds))
            cells += [
                LinkCell(protocol, mode, clients, rate, dimension=dimension, repeats=rounds)
                for protocol, mode in PROTOCOLS
            ]
    return cells


FLOWER, FEDML, OURS = "Flower", "FedML", "lightsecagg"


@dataclass(frozen=True, slots=True)
class Row:
    """What a contestant's rounds took."""

    system: str
    name: str
    plain: bool
    clients: int
    bandwidth: float
    seconds: Spread
    cold: float
    enrolment: float
    """Seconds, once per run."""
    error: float | None
    """The average's distance from the plain mean; ours is checked where it is measured."""

    @property
    def where(self) -> tuple[int, float]:
        """In which table it stands."""
        return self.clients, self.bandwidth


def links_report(cells: Sequence[Cell], results: Results) -> Report:
    """Tables by N and rate, and what they come to."""
    rows = [
        _row(cell, results[cell.key])
        for cell in cells
        if isinstance(cell, FlowerCell | FedMLCell | LinkCell)
    ]
    down = {
        cell.bandwidth: Spread.of(results[cell.key]["seconds"])
        for cell in cells
        if isinstance(cell, RawLinkCell)
    }
    report = Report("peers-links", "Flower's rounds and ours over the same shaped links")
    for where in dict.fromkeys(row.where for row in rows):
        report.tables.append(_table([row for row in rows if row.where == where]))
    report.figures = {
        "rounds": {
            f"N{clients}-{bandwidth:g}mbit": {
                f"{row.system}: {row.name}": {
                    "seconds": row.seconds,
                    "times_plain": _times_plain(row, rows),
                    "enrolment": row.enrolment,
                    "error": row.error,
                }
                for row in rows
                if row.where == (clients, bandwidth)
            }
            for clients, bandwidth in dict.fromkeys(row.where for row in rows)
        },
        "model_down": {f"{rate:g}mbit": seconds for rate, seconds in down.items()},
    }
    report.paragraphs = [*_reading(rows, down), *_method(cells, results)]
    return report


def _row(cell: FlowerCell | FedMLCell | LinkCell, document: Document) -> Row:
    cold, warm = document["cold"], document["rounds"]
    if isinstance(cell, FlowerCell):
        system, name, plain = FLOWER, TITLES[cell.contestant], cell.contestant == "plain"
    elif isinstance(cell, FedMLCell):
        system, name, plain = FEDML, "LightSecAgg", False
    else:
        system, name, plain = OURS, title(cell), cell.protocol is ProtocolName.PLAIN
        phases = [phase for phase in cold if not phase.endswith("_cpu")]
        cold = sum(cold[phase] for phase in phases)
        warm = [sum(each) for each in zip(*(warm[phase] for phase in phases), strict=True)]
    return Row(
        system,
        name,
        plain,
        cell.clients,
        cell.bandwidth,
        Spread.of(warm),
        cold,
        document.get("enrolment", 0.0),
        document.get("error"),
    )


def _plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The unprotected rounds of the same system at the same place."""
    same = (r for r in rows if r.plain and (r.system, r.where) == (row.system, row.where))
    return next(same, None)


def _times_plain(row: Row, rows: Sequence[Row]) -> Spread | None:
    plain = _plain_of(row, rows)
    return row.seconds / plain.seconds if plain is not None and not row.plain else None


def _table(rows: Sequence[Row]) -> Table:
    clients, bandwidth = rows[0].where
    fastest = min((row for row in rows if not row.plain), key=lambda row: row.seconds.median)
    return Table(
        f"N = {clients}, {bandwidth:g} Mbit/s: seconds of a round without the pause",
        [
            "system",
            "protocol",
            "seconds",
            "times its own plain",
            "times the fastest protected",
            "cold",
        ],
        [
            [
                row.system,
                row.name,
                f"{row.seconds:.2f}",
                "-" if (times := _times_plain(row, rows)) is None else f"{times:.2f}",
                f"{row.seconds.median / fastest.seconds.median:.1f}",
                f"{row.cold:.2f}",
            ]
            for row in rows
        ],
    )


def _reading(rows: Sequence[Row], down: dict[float, Spread]) -> list[str]:
    """What the tables say, and what they do not."""
    places = dict.fromkeys(row.where for row in rows)
    return [
        *(_reading_at([row for row in rows if row.where == where], down) for where in places),
        "Seconds compare systems, ratios to a system's own plain compare protocols in it. What is "
        "not the link's in Flower's plain rounds is Flower's: an idle SuperNode looks for messages "
        "every 3 s, and each message starts a process that loads Flower, N of them on this "
        "machine's cores. So exchanges count: one for FedAvg, two for LightSecAgg, four for "
        "SecAgg+. On machines of their own the nodes would start their processes side by side. "
        "Our clients are connected and wait, and start nothing.",
    ]


def _reading_at(rows: Sequence[Row], down: dict[float, Spread]) -> str:
    clients, bandwidth = rows[0].where
    said = f"N = {clients}, {bandwidth:g} Mbit/s."
    for system in dict.fromkeys(row.system for row in rows):
        said += f" {system}: {', '.join(_brief(r, rows) for r in rows if r.system == system)}."
    plain = {row.system: row.seconds.median for row in rows if row.plain}
    if plain.keys() == {FLOWER, OURS}:
        way = down[bandwidth].median
        said += (
            f" Without protection a round of Flower takes {plain[FLOWER] / plain[OURS]:.1f} times "
            f"as long as ours. Flower's sends the model down first, ours sums vectors and has "
            f"none: with the {way:.2f} s that TCP alone takes for it, "
            f"{plain[FLOWER] / (plain[OURS] + way):.1f} times. Of Flower's {plain[FLOWER]:.2f} s, "
            f"TCP alone takes {2 * way:.2f} s for the vector's way down and up."
        )
    return said


def _brief(row: Row, rows: Sequence[Row]) -> str:
    times = _times_plain(row, rows)
    ratio = "" if times is None else f" ({times.median:.2f} times its plain)"
    once = f" and {row.enrolment:.1f} s once per run" if row.enrolment else ""
    return f"{row.name} {row.seconds.median:.2f} s{ratio}{once}"


def _method(cells: Sequence[Cell], results: Results) -> list[str]:
    flower = next(cell for cell in cells if isinstance(cell, FlowerCell))
    versions = {results[cell.key]["fedml"] for cell in cells if isinstance(cell, FedMLCell)}
    return [
        f"Method. Every party is in its own network namespace, as in `lightsecagg experiments "
        f"links`: {LATENCY:g} ms one way, a token bucket for each direction of each client's link, "
        "none at the server's. Flower: SuperLink and ServerApp in the server's namespace, each "
        "SuperNode with its ClientApps in a client's, TLS and node keys. The programs are "
        f"unchanged, except a SuperExec that looks for tasks every {POLL:g} s instead of every "
        "second. Ours: server and clients of this package, mutual TLS.",
        f"d = {flower.dimension:,}, all weights equal, nobody drops, T = N/2 - 1, D = N/4, "
        "honest-but-curious; Flower's SecAgg+ over the complete graph, threshold N - D. An update "
        f"is ready {flower.pause:g} s after the model; nobody computes in that pause, and no "
        "figure includes it. Our phases are added up, though training could hide sharing. Every "
        "average (of ours, the last one) is compared with the plain mean; a wrong one would be "
        "no measurement. No round includes the enrolment of our mod, once per run.",
        *(
            f"FedML {version}: the classes of its cross-silo LightSecAgg over its gRPC, without "
            "its cloud; T = N/2 and U = N, as it sets them, so nobody may drop; a field of 15 "
            "bits; shares neither sealed nor under TLS. Its parties wait by asking without a "
            "pause, each on its own core if it has one; here all share the same cores. So these "
            "are not the seconds of its parties on separate machines."
            for version in sorted(versions)
        ),
    ]
