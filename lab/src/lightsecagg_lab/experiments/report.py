"""A report as Markdown, as one self-contained HTML page, and as JSON."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightsecagg.errors import MissingExtra
from lightsecagg_lab.experiments.cells import REPEATS, Results, to_json
from lightsecagg_lab.experiments.competition import MOST_OTHERS, MOST_STOLEN, Competition
from lightsecagg_lab.experiments.machine import describe_machine
from lightsecagg_lab.experiments.statistics import as_document


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a caption."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture; `draw` gets a matplotlib figure of `size` inches."""

    name: str
    caption: str
    draw: Any
    size: tuple[float, float] = (9.0, 4.2)


@dataclass(slots=True)
class Report:
    """What an experiment has to say."""

    name: str
    title: str
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """The numbers behind tables and plots."""
    timed: bool = True
    """Whether any of them depends on how busy the machine was."""

    def document(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        found: dict[str, Any] = as_document(self.figures)
        return found


def write_report(report: Report, results: Results, command: str, out: Path) -> list[Path]:
    """Write NAME.md, NAME.html, NAME.json and the pictures; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    notes = [*report.paragraphs, *_provenance(results, command, machine, report.timed)]
    pictures = {plot.name: _draw(plot, out / f"{plot.name}.png") for plot in report.plots}
    document = {
        "name": report.name,
        "title": report.title,
        "command": command,
        "machine": machine,
        "figures": report.document(),
        "cells": results,
    }
    texts = {
        "md": _markdown(report, notes),
        "html": _html(report, notes, pictures),
        "json": to_json(document),
    }
    paths = [*pictures.values()]
    for suffix, text in texts.items():
        path = out / f"{report.name}.{suffix}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _provenance(results: Results, command: str, machine: dict[str, Any], timed: bool) -> list[str]:
    said = [
        f"Measured with `{command}` on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}, Python {machine['python']}, {machine['kernels']} kernels, "
        f"lightsecagg {machine['lightsecagg']}; report written {machine['date']}."
    ]
    measured = [cell["machine"] for cell in results.values() if "machine" in cell]
    if measured:
        dates = sorted(each["date"] for each in measured)
        said.append(f"{len(measured)} cells were measured from {dates[0]} to {dates[-1]}.")
    if timed:
        said += [*_repetitions(results), *_competition(results)]
    return said


def _repetitions(results: Results) -> list[str]:
    """How often cells were measured; those that were measured less than usual are named."""
    keys: dict[int, list[str]] = {}
    for key, cell in results.items():
        if "repeats" in cell.get("cell", {}):
            keys.setdefault(cell["cell"]["repeats"], []).append(key)
    parts = [
        f"{often} in {len(found)} cells"
        + (f" ({', '.join(f'`{key}`' for key in found)})" if often < REPEATS else "")
        for often, found in sorted(keys.items(), reverse=True)
    ]
    return [f"Repetitions after the cold one: {', '.join(parts)}."] if parts else []


def _competition(results: Results) -> list[str]:
    """Beside which cells others worked."""
    beside = {
        key: Competition(**found)
        for key, cell in results.items()
        if (found := cell.get("machine", {}).get("competition"))
    }
    busy = [key for key, each in beside.items() if each.too_much]
    if not busy:
        return []
    return [
        f"**{len(busy)} of {len(beside)} cells were measured while others used more than "
        f"{MOST_OTHERS} cores or {MOST_STOLEN} were stolen. The figures are CPU seconds "
        "(elapsed time in `transport`, `links` and `peers-links`), but shared caches and memory "
        "make them longer too: trust ratios more than absolute values.** Those cells: "
        f"{', '.join(f'`{key}`' for key in busy)}."
    ]


def _markdown(report: Report, notes: list[str]) -> str:
    parts = [f"# {report.title}"]
    for table in report.tables:
        parts += [f"**{table.caption}**", _markdown_table(table)]
    parts += [f"![{plot.caption}]({plot.name}.png)\n\n{plot.caption}" for plot in report.plots]
    return "\n\n".join([*parts, *notes]) + "\n"


def _markdown_table(table: Table) -> str:
    lines = ["| " + " | ".join(table.header) + " |"]
    lines.append(
        "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.header))) + "|"
    )
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines)


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th { background: #f3f3f3; } img { max-width: 100%; } figure { margin: 1.5rem 0; }
"""


def _html(report: Report, notes: list[str], pictures: dict[str, Path]) -> str:
    body = [f"<h1>{html.escape(report.title)}</h1>"]
    body += [_html_table(table) for table in report.tables]
    for plot in report.plots:
        data = base64.b64encode(pictures[plot.name].read_bytes()).decode("ascii")
        caption = html.escape(plot.caption)
        body.append(
            f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    body += [f"<p>{_inline(note)}</p>" for note in notes]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(report.title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _inline(text: str) -> str:
    """The two marks that notes use: code and emphasis."""
    escaped = html.escape(text)
    for mark, tag in (("**", "strong"), ("`", "code")):
        pieces = escaped.split(mark)
        escaped = "".join(
            f"<{tag}>{piece}</{tag}>" if index % 2 else piece for index, piece in enumerate(pieces)
        )
    return escaped


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f"<table><caption>{html.escape(table.caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
    )


def _draw(plot: Plot, path: Path) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtra("plots need matplotlib", "report") from error
    figure = Figure(figsize=plot.size, layout="constrained")
    FigureCanvasAgg(figure)
    plot.draw(figure)
    figure.savefig(path, dpi=120)
    return path


def log_scale(axes: Any) -> None:
    """A logarithmic axis of seconds in plain numbers: 0.6, not 6e-01."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, position: f"{value:g}")
    if high / low < _DECADES:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter())


_DECADES = 100.0
"""An axis that spans less than this is labelled at 1, 2 and 5 of each decade."""
