"""`lightsecagg run --statistics`: statistics of a table whose rows are divided among clients."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import typer

from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.output import phase_bar, print_json, warn
from lightsecagg.drivers.columns import Columns, read_csv
from lightsecagg.errors import Aborted, InputRefused, ParameterError
from lightsecagg.foreign import shown
from lightsecagg.statistics import BOUND, Present, Statistics, StatisticsPlan

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo_config import DemoConfig

OPTIONS: Final = "Options of --statistics"
"""Their panel in the help."""
BESIDE: Final = ("clients", "privacy", "dropouts", "survivors", "protocol", "threat_model")
_HIDDEN: Final = "-"
_MOST_CATEGORIES: Final = 12
"""A column with more different texts is none of categories."""


def refuse_others(ctx: typer.Context, *, wanted: bool) -> None:
    """Refuse options that do nothing: of training beside --statistics, or its own without it."""
    for each in ctx.command.params:
        source = ctx.get_parameter_source(each.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        own = getattr(each, "rich_help_panel", None) == OPTIONS
        if own and not wanted:
            raise ParameterError(f"{each.opts[0]} belongs to --statistics; name a table with it")
        if wanted and not own and each.name not in (*BESIDE, "timeout", "as_json"):
            raise ParameterError(f"{each.opts[0]} is of training; leave it out with --statistics")


def run_statistics(
    config: DemoConfig,
    path: Path,
    ranges: Sequence[str],
    categories: Sequence[str],
    tables: Sequence[str],
    minimum_cell: int,
    *,
    as_json: bool,
) -> None:
    """Divide the rows, run one round, print the statistics; `Aborted` if they are wrong."""
    from lightsecagg.drivers.federation.demo import check_sizes
    from lightsecagg.drivers.federation.demo_vectors import sum_vectors

    columns, _ = read_csv(path)
    declared = (
        {name: _numbers(given) for name, given in map(_pair, ranges)},
        {name: given.split(",") for name, given in map(_pair, categories)},
    )
    pairs = [table.split(",") for table in tables]
    if not any(declared):
        declared = _guess(columns)
    plan = StatisticsPlan(*declared, pairs, minimum_cell=minimum_cell)
    plan.encode(path)  # refuses by the line of this file, not of a client's part
    parts = [
        {name: values[client :: config.clients] for name, values in columns.items()}
        for client in range(config.clients)
    ]
    vectors = [plan.encode(part) for part in parts]
    config = replace(config, vectors=plan.dimension, bound=BOUND, rounds=1, dropout=0)
    check_sizes(config)
    with (
        deferred_signals() as ask,
        tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder,
        phase_bar(wanted=True) as watch,
    ):
        total, record = sum_vectors(config, vectors, Path(folder), watch, ask)
    found = plan.decode(total)
    equal = found == plan.decode(np.sum([vectors[client] for client in record["included"]], axis=0))
    if as_json:
        document = {"plan": plan.to_dict(), "equals_plain_statistics": equal}
        print_json({**found.to_dict(), **document, "included": record["included"]})
    else:
        _print(found)
        verdict = "equal" if equal else "DIFFER FROM"
        typer.echo(
            f"{found.clients} of {config.clients} clients, {found.rows} rows, one vector each"
        )
        typer.echo(f"the secure statistics {verdict} those of the same rows in the clear")
    if not equal:
        raise Aborted("the secure statistics differ from those of the same rows in the clear")


def _pair(given: str) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not sign or not name:
        raise ParameterError(f"{given!r} must have the form column=..., such as age=0:120")
    return name, value


def _numbers(given: str) -> tuple[float, float]:
    try:
        low, high = map(float, given.split(":"))
    except ValueError as error:
        raise ParameterError(f"{given!r} is no range; write low:high, such as 0:120") from error
    return low, high


def _guess(
    columns: dict[str, list[str]],
) -> tuple[dict[str, tuple[float, float]], dict[str, list[str]]]:
    """Ranges and categories from the data, as nobody may do in earnest."""
    ranges: dict[str, tuple[float, float]] = {}
    categories: dict[str, list[str]] = {}
    for name, cells in columns.items():
        texts = sorted({cell.strip() for cell in cells} - {""})
        try:
            numbers = Columns(columns, [name]).numbers(name)
        except InputRefused:
            numbers = np.empty(0)
        numbers = numbers[np.isfinite(numbers)]
        if len(texts) > 2 and numbers.size and numbers.min() < numbers.max():
            ranges[name] = float(numbers.min()), float(numbers.max())
        elif 2 <= len(texts) <= _MOST_CATEGORIES:
            categories[name] = texts
        else:
            warn(f"column {shown(name)!r} is left out: neither numbers nor a few categories")
    warn(
        "ranges and categories are taken from the data, which in real use would reveal them: "
        "declare them beforehand, with --range and --category"
    )
    return ranges, categories


def _print(found: Statistics) -> None:
    rows, quantiles = [], [""]
    for name, column in found.numbers.items():
        quantiles = [f"{q:g}" for q in column.quantiles]
        figures = [column.mean, column.std, *column.quantiles.values()]
        shown_ones = [_HIDDEN if each is None else f"{each.value:.4g}" for each in figures]
        errors = [f"{each.error:.1g}" for each in column.quantiles.values() if each is not None]
        rows.append((*_present(name, column), *shown_ones, *errors[:1]))
    rows += [_present(name, column) for name, column in found.categories.items()]
    head = ("column", "values", "missing", "outside", "mean", "std", *quantiles, "\u00b1")
    _table(head if found.numbers else head[:4], rows)
    for name, column in found.numbers.items():
        edges = [f"{edge:.4g}" for edge in column.edges]
        bins = [f"{low} to {high}" for low, high in pairwise(edges)]
        _table((name, "rows"), zip(bins, map(_count, column.histogram), strict=True))
    for table in found.tables:
        alone = len(table.columns) == 1
        others = ("rows",) if alone else table.labels[1]
        counts = [(count,) for count in table.counts[0]] if alone else table.counts
        body = zip(table.labels[0], counts, strict=True)
        _table((" by ".join(table.columns), *others), [(n, *map(_count, row)) for n, row in body])
    least = found.minimum_cell
    if found.numbers:
        typer.echo("\u00b1: the error of the quantiles")
    typer.echo(f"{_HIDDEN}: hidden; fewer than {least} rows, or what would give such a count away")


def _present(name: str, column: Present) -> tuple[str, ...]:
    return (name, *map(str, (column.count, column.missing, column.outside)))


def _count(count: int | None) -> str:
    return _HIDDEN if count is None else str(count)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(header):
        table.add_column(Text(shown(name)), justify="right" if index else "left")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    Console().print(table)
