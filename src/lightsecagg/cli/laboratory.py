"""The measured tables and figures, as sub-commands of `lightsecagg experiments`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import print_json, warn

if TYPE_CHECKING:
    from lightsecagg.experiments.cells import Cell, Progress, Results
    from lightsecagg.experiments.report import Report

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
    "planner": "The planner's forecasts beside simulated rounds.",
    "transport": "PyTorch RPC against gRPC: 200 messages of 120 KiB.",
    "peers": "Our kernels beside plain NumPy and, if installed, Flower's SecAgg+ library.",
}

# Other names for `async`, which measures all three on the task that it is given.
ASYNCHRONOUS = {
    "figure7": "Asynchronous convergence: async with --task cifar10.",
    "figure11": "Asynchronous convergence: async with --task mnist, and with --task cifar10.",
    "figure12": "Asynchronous accuracy against c_l: the sweep of async.",
}

ALL = "all"

CELLS = "cells"
"""The folder of finished cells, in that of the reports."""

Out = Annotated[
    Path, typer.Option(help="Folder for reports; finished cells are kept in OUT/cells.")
]
Quick = Annotated[bool, typer.Option("--quick", help="N = 20 and 50, fewer repetitions: minutes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
BusyAnyway = Annotated[
    bool,
    typer.Option("--busy-anyway", help="Measure even while others use this machine's cores."),
]


def register(app: typer.Typer) -> None:
    """Add one command per experiment, and one for all of them."""
    for name, summary in EXPERIMENTS.items():
        app.command(name, help=summary)(_command(name))
    app.command(ALL, help="All measured tables and figures of synchronous rounds.")(_command(ALL))


def _command(name: str) -> Callable[..., None]:
    def command(
        out: Out = Path("results"),
        quick: Quick = False,
        busy_anyway: BusyAnyway = False,
        as_json: AsJson = False,
    ) -> None:
        _run(list(EXPERIMENTS) if name == ALL else [name], out, quick, busy_anyway, as_json)

    return command


def _run(names: list[str], out: Path, quick: bool, busy_anyway: bool, as_json: bool) -> None:
    from lightsecagg.experiments.catalogue import experiment
    from lightsecagg.experiments.setups import FULL, QUICK
    from lightsecagg.field import kernels

    profile = QUICK if quick else FULL
    for name in names:
        require(f"experiments {name}", *sorted(experiment(name).extras(profile)))
    if kernels.backend() != "native":
        warn("the native kernels are not in use: these figures are those of the NumPy fallback")
    cells = {name: experiment(name).cells(profile) for name in names}
    _announce([cell for listed in cells.values() for cell in listed], out)
    documents = {}
    for name in names:
        results = measure(name, cells[name], out, busy_anyway=busy_anyway)
        report = experiment(name).report(profile, results)
        command = f"lightsecagg experiments {name}" + (" --quick" if quick else "")
        show(report, results, command, out, as_json=as_json)
        documents[name] = report.document()
    if as_json:
        print_json(documents[names[0]] if len(names) == 1 else documents)


def _announce(cells: list[Cell], out: Path) -> None:
    """Say how long it will take."""
    from lightsecagg.experiments.cells import missing_cells

    missing = missing_cells(cells, out / CELLS)
    known = [cell.expected_seconds for cell in missing if cell.expected_seconds]
    if not missing:
        return
    said = f"{len(missing)} cells to measure"
    if known:
        said += f", about {sum(known) / 60:.0f} min on an idle machine"
    if len(known) < len(missing):
        said += f" and what the {len(missing) - len(known)} take that are not timed"
    typer.echo(said, err=True)


def measure(name: str, cells: list[Cell], out: Path, *, busy_anyway: bool = False) -> Results:
    """Measure what is not in OUT/cells yet, with a bar, while nobody else uses the machine."""
    from lightsecagg.experiments.cells import measure_cells
    from lightsecagg.experiments.competition import observe, wait_until_quiet

    if any(cell.timed for cell in cells) and observe() is None:
        warn("this system does not tell who uses its cores: whether it is idle is yours to see")
    with progress_bar(name, len({cell.key for cell in cells})) as (progress, tell):
        quiet = None if busy_anyway else partial(wait_until_quiet, tell)
        return measure_cells(cells, out / CELLS, progress, quiet)


def show(report: Report, results: Results, command: str, out: Path, *, as_json: bool) -> None:
    """Write the report's files, and print it unless its figures are printed instead."""
    from lightsecagg.experiments.report import write_report

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
            bar.update(task, completed=len(seen - {cell.key}), description=f"{name}: {cell.key}")
            seen.add(cell.key)

        def tell(reason: str) -> None:
            bar.update(task, description=f"{name}: {reason}")
            if not bar.console.is_terminal:
                typer.echo(f"{name}: {reason}", err=True)

        yield advance, tell
