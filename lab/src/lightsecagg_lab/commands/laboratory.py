"""The measured tables and figures, as sub-commands of `lightsecagg experiments`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import print_json, warn

if TYPE_CHECKING:
    from lightsecagg_lab.experiments.cells import Cell, Progress, Results
    from lightsecagg_lab.experiments.report import Report
    from lightsecagg_lab.experiments.setups import Profile

# name -> the line that `lightsecagg experiments --help` shows
EXPERIMENTS = {
    "table1": "Counted elements and operations as N doubles, and their growth.",
    "table2": "Gain over SecAgg and SecAgg+ for the four tasks.",
    "table3": "Gain at 98, 320 and 802 Mbit/s.",
    "table4": "Breakdown of a round by phase, for three dropout rates.",
    "table5": "Table 1 in detail, with storage.",
    "table6": "Randomness and storage against the scheme of Zhao and Sun (a closed form).",
    "figure5": "Timing diagram of a round.",
    "figure6": "Total time against N: the CNN.",
    "figure8": "Total time against N: logistic regression.",
    "figure9": "Total time against N: MobileNetV3.",
    "figure10": "Total time against N: EfficientNet-B0.",
    "impact-of-u": "Round time against U, and how good the planner's U is.",
    "overhead": "Round time and bytes relative to unprotected FedAvg.",
    "regimes": "Which protocol is the fastest, by server, link, dropouts, training and N.",
    "ablations": "The gain from seeded shares, native loops, transforms, bundles and overlap.",
    "planner": "The planner's forecasts compared with simulated rounds.",
    "links": "Real rounds over shaped links in network namespaces, and the forecast; as root.",
    "transport": "PyTorch RPC against gRPC: 200 messages of 120 KiB.",
}

# Other names for `async`, which measures all three on the task that it is given.
ASYNCHRONOUS = {
    "figure7": "Asynchronous convergence: async with --task cifar10.",
    "figure11": "Asynchronous convergence: async with --task mnist, and with --task cifar10.",
    "figure12": "Asynchronous accuracy against c_l: the sweep of async.",
}

RECORDED = (
    "overhead",
    "table4",
    "table2",
    "table3",
    "figure5",
    "figure6",
    "figure8",
    "regimes",
    "ablations",
    "impact-of-u",
    "planner",
    "transport",
    "table1",
    "table5",
    "table6",
    "figure9",
    "figure10",
)
"""What `record` measures, the most important first, in case it is interrupted. Not `links`, which
takes root."""

CELLS = "cells"
"""The folder of finished cells, in that of the reports."""

Out = Annotated[
    Path, typer.Option(help="Folder for reports; finished cells are kept in OUT/cells.")
]
Quick = Annotated[bool, typer.Option("--quick", help="N = 20 and 50, fewer repetitions: minutes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
BusyAnyway = Annotated[
    bool,
    typer.Option("--busy-anyway", help="Measure even if other processes use the cores."),
]


def register(app: typer.Typer) -> None:
    """Add one command per experiment, and one for all of them."""
    for name, summary in EXPERIMENTS.items():
        app.command(name, help=summary)(_command(name))
    app.command("record")(record)


def _command(name: str) -> Callable[..., None]:
    def command(
        out: Out = Path("results"),
        quick: Quick = False,
        busy_anyway: BusyAnyway = False,
        as_json: AsJson = False,
    ) -> None:
        from lightsecagg_lab.experiments.setups import FULL, QUICK

        laboratory = Laboratory(QUICK if quick else FULL, out, busy_anyway)
        laboratory.prepare([name])
        report, results = laboratory.run(name)
        show(report, results, laboratory.command(name), out, as_json=as_json)
        if as_json:
            print_json(report.document())

    return command


def record(
    out: Out = Path("results"), quick: Quick = False, busy_anyway: BusyAnyway = False
) -> None:
    """Measure all tables and figures of synchronous rounds, the most important first.

    Run it again to resume. Each report is written as soon as its cells are done. Figures 9 and 10
    are measured at N = 200 only where Table 2 has the cells; their own commands measure all.
    """
    from lightsecagg.errors import LightSecAggError
    from lightsecagg_lab.experiments.setups import QUICK, RECORD

    laboratory = Laboratory(QUICK if quick else RECORD, out, busy_anyway)
    laboratory.prepare(RECORDED)
    failed = []
    for name in RECORDED:
        try:
            laboratory.write(name)
        except LightSecAggError as error:  # the others are worth having all the same
            warn(f"{name}: {error}")
            failed.append(name)
    if failed:
        warn(f"not recorded: {', '.join(failed)}; run it again, finished cells are kept")
        raise typer.Exit(1)


class Laboratory:
    """Experiments of one profile, and the folder that they are written to."""

    def __init__(self, profile: Profile, out: Path, busy_anyway: bool) -> None:
        self._profile, self._out, self._busy_anyway = profile, out, busy_anyway

    def prepare(self, names: Sequence[str]) -> None:
        """Refuse what cannot be measured here, and say how long it will take."""
        from lightsecagg.field import kernels
        from lightsecagg_lab.experiments.catalogue import experiment

        for name in names:
            require(f"experiments {name}", *sorted(experiment(name).extras(self._profile)))
        if kernels.backend() != "native":
            warn("the native kernels are not in use: these figures are those of the NumPy fallback")
        _announce({name: experiment(name).cells(self._profile) for name in names}, self._out)

    def run(self, name: str) -> tuple[Report, Results]:
        """Measure what is missing."""
        from lightsecagg_lab.experiments.catalogue import experiment

        cells = experiment(name).cells(self._profile)
        results = measure(name, cells, self._out, busy_anyway=self._busy_anyway)
        return experiment(name).report(self._profile, results), results

    def write(self, name: str) -> None:
        """Measure, and write the report."""
        from lightsecagg_lab.experiments.report import write_report

        paths = write_report(*self.run(name), self.command(name), self._out)
        typer.echo("wrote " + ", ".join(map(str, paths)), err=True)

    def command(self, name: str) -> str:
        """What measures it again."""
        return f"lightsecagg experiments {name}" + (
            " --quick" if self._profile.name == "quick" else ""
        )


def _announce(cells: Mapping[str, Sequence[Cell]], out: Path) -> None:
    """Say how long each experiment will take, beside those before it."""
    from lightsecagg_lab.experiments.cells import missing_cells

    missing = missing_cells([cell for listed in cells.values() for cell in listed], out / CELLS)
    left = {cell.key for cell in missing}
    for name, listed in cells.items():
        own = [cell for cell in missing if cell.key in left & {each.key for each in listed}]
        left -= {cell.key for cell in own}
        if own and len(cells) > 1:
            typer.echo(f"{name:>12}: {_forecast(own)}", err=True)
    if missing:
        typer.echo(_forecast(missing), err=True)


def _forecast(missing: Sequence[Cell]) -> str:
    known = [cell.expected_seconds for cell in missing if cell.expected_seconds]
    said = f"{len(missing)} cells to measure"
    if known:
        said += f", about {sum(known) / 60:.0f} min on an idle machine"
    if len(known) < len(missing):
        said += f", not counting {len(missing) - len(known)} that are not timed"
    return said


def measure(name: str, cells: list[Cell], out: Path, *, busy_anyway: bool = False) -> Results:
    """Measure what is not in OUT/cells yet, with a bar, while nobody else uses the machine."""
    from lightsecagg_lab.experiments.cells import measure_cells
    from lightsecagg_lab.experiments.competition import observe, wait_until_quiet
    from lightsecagg_lab.experiments.processes import terminable

    if any(cell.timed for cell in cells) and observe() is None:
        warn("this system does not report who uses its cores: make sure it is idle")
    with progress_bar(name, len({cell.key for cell in cells})) as (progress, tell):
        quiet = None if busy_anyway else partial(wait_until_quiet, tell)
        with terminable():
            return measure_cells(cells, out / CELLS, progress, quiet)


def show(report: Report, results: Results, command: str, out: Path, *, as_json: bool) -> None:
    """Write the report's files, and print it unless its figures are printed instead."""
    from lightsecagg_lab.experiments.report import write_report

    paths = write_report(report, results, command, out)
    if not as_json:
        typer.echo((out / f"{report.name}.md").read_text("utf-8"))
        typer.echo("wrote " + ", ".join(map(str, paths)), err=True)


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """A bar on stderr that counts cells, and what tells why it does not move."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        seen: set[str] = set()

        def advance(cell: Cell, needed: bool) -> None:
            done = len(seen - {cell.key})
            bar.update(task, completed=done, description=f"{name}: {cell.key}")
            if needed and not bar.console.is_terminal:
                typer.echo(f"{name}: cell {done + 1} of {total}, {cell.key}", err=True)
            seen.add(cell.key)

        def tell(reason: str) -> None:
            bar.update(task, description=f"{name}: {reason}")
            if not bar.console.is_terminal:
                typer.echo(f"{name}: {reason}", err=True)

        yield advance, tell
