"""The report of a federation in the asynchronous mode: who trained when, and how stale it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.report import drawing

_TRAINING, _STORED, _SUM, _KILLED = "#dd8452", "#55a868", "#4c72b0", "#c00000"


def staleness_of(record: dict[str, Any]) -> list[int]:
    """By how many versions each update of a buffer was behind, in the order of its owners."""
    return [record["round"] - 1 - version for version in record["versions"]]


def histogram(records: list[dict[str, Any]]) -> dict[int, int]:
    """Staleness -> how many updates had it, without gaps."""
    counts = Counter(tau for record in records for tau in staleness_of(record))
    return {tau: counts[tau] for tau in range(max(counts, default=-1) + 1)}


def draw_epochs(
    clients: int,
    records: list[dict[str, Any]],
    notes: list[dict[str, Any]],
    killed: list[dict[str, Any]],
    title: str,
    path: Path,
) -> None:
    """One row per party over the whole time, and the histogram of staleness below."""
    pyplot = drawing("the timeline")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    height = 0.4 * (clients + 1)
    figure, (axes, below) = pyplot.subplots(
        2, 1, figsize=(11, height + 3.4), height_ratios=[height, 1.6], layout="constrained"
    )
    origin = min(note["time"] for note in notes)
    end = max(record["time"] for record in records) - origin
    for record in records:
        axes.axvline(record["time"] - origin, color=_SUM, linewidth=0.8, alpha=0.35, zorder=0)
        axes.plot(record["time"] - origin, 0, marker="|", markersize=14, color=_SUM)
    for note in notes:
        row, when = note["client"] + 1, note["time"] - origin
        if note["what"] == "trained":
            left = note["start"] - origin
            axes.barh(row, when - left, left=left, height=0.6, color=_TRAINING, edgecolor="white")
        elif note["what"] == "stored":
            axes.plot(when, row, marker=".", color=_STORED, markersize=6)
    for kill in killed:
        row, when = 0 if kill["who"] == "server" else kill["who"] + 1, kill["time"] - origin
        axes.plot(when, row, marker="X", color=_KILLED, markersize=10, linestyle="")
        left = _training_since(kill, notes) - origin
        axes.barh(row, when - left, left=left, height=0.6, color=_TRAINING, alpha=0.3)
    axes.set_yticks(range(clients + 1), ["server", *(f"client {i}" for i in range(clients))])
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1.02)
    axes.set_xlabel("seconds since the first client started")
    axes.set_title(title)
    marks = [(_SUM, "|", "a sum is known"), (_STORED, ".", "upload acknowledged")]
    marks.append((_KILLED, "X", "SIGKILL"))
    handles: list[Any] = [Patch(color=_TRAINING, label="training")]
    handles += [Line2D([], [], color=c, marker=m, linestyle="", label=text) for c, m, text in marks]
    figure.legend(handles=handles, ncols=4, loc="outside lower center", frameon=False)
    counts = histogram(records)
    below.bar(list(counts), list(counts.values()), color=_SUM, width=0.7)
    below.set_xticks(list(counts))
    below.set_xlabel("staleness: versions by which an update was behind")
    below.set_ylabel("updates")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _training_since(kill: dict[str, Any], notes: list[dict[str, Any]]) -> float:
    """When the training began that this kill has cut short; the kill's own time if none was."""
    mine = [n for n in notes if n["client"] == kill["who"] and n["time"] < kill["time"]]
    marks = [note for note in mine if note["what"] in ("trains", "trained")]
    began = bool(marks) and marks[-1]["what"] == "trains"
    return float(marks[-1]["time"] if began else kill["time"])
