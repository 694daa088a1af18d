"""The report of a federation: a timeline of one round, as in the paper's Figure 5, and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightsecagg.errors import MissingExtra

PHASES = ("advertise", "share", "training", "upload", "agree", "recover")
_COLOURS = {
    "advertise": "#8c8c8c",
    "share": "#4c72b0",
    "training": "#dd8452",
    "upload": "#55a868",
    "agree": "#8172b3",
    "recover": "#c44e52",
}


def phase_table(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean seconds and bytes per phase over the completed rounds, at the server."""
    table: dict[str, dict[str, float]] = {}
    done = [record for record in records if record["aborted"] is None]
    for phase in ("advertise", "share", "upload", "agree", "recover"):
        entries = [record["phases"][phase] for record in done if phase in record["phases"]]
        if entries:
            count = len(entries)
            table[phase] = {
                "seconds": sum(entry["seconds"] for entry in entries) / count,
                "client_upload_bytes": sum(e["bytes_in"] for e in entries) / count,
                "client_download_bytes": sum(e["bytes_out"] for e in entries) / count,
            }
    return table


def drawing(what: str) -> Any:
    """pyplot without a screen, for `what`."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{what} needs matplotlib", "report") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_timeline(
    record: dict[str, Any],
    spans: dict[tuple[int, int], list[dict[str, Any]]],
    killed: list[dict[str, Any]],
    path: Path,
) -> None:
    """One row per party, phases in colour."""
    pyplot = drawing("the timeline")
    from matplotlib.patches import Patch

    number = record["round"]
    origin = min(entry["start"] for entry in record["phases"].values())
    rows = [("server", [{"phase": p, **entry} for p, entry in record["phases"].items()])]
    rows += [(f"client {client}", spans.get((number, client), [])) for client in record["invited"]]
    deaths = {item["client"]: item["phase"] for item in killed if item["round"] == number}
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(rows) + 1.6))
    end = max(entry["end"] for entry in record["phases"].values()) - origin
    for row, (name, entries) in enumerate(rows):
        # Training first: what overlaps it is drawn on top.
        for entry in sorted(entries, key=lambda item: item["phase"] != "training"):
            left, width = entry["start"] - origin, entry["end"] - entry["start"]
            tall = name == "server" or entry["phase"] == "training"
            axes.barh(
                row,
                max(width, end / 400),
                left=left,
                height=0.8 if tall else 0.45,
                color=_COLOURS[entry["phase"]],
                alpha=0.55 if entry["phase"] == "training" else 1.0,
            )
        client = int(name.split()[1]) if name != "server" else -1
        if client in deaths:
            # Behind what it had done until then.
            died = max((entry["end"] - origin for entry in entries), default=0.0)
            text = f" killed in {deaths[client]}"
            axes.text(died, row, text, va="center", color="#a00000")
        elif client >= 0 and client not in record["included"]:
            axes.text(end * 0.01, row, "not included", va="center", color="#555555")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1.02)
    axes.set_xlabel("seconds since the round began")
    axes.set_title(f"Round {number}, {record['protocol']}: {len(record['included'])} included")
    axes.legend(
        handles=[Patch(color=_COLOURS[phase], label=phase) for phase in PHASES],
        ncols=len(PHASES),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.9 / (0.45 * len(rows) + 0.5)),
        frameon=False,
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def write_json(document: dict[str, Any], path: Path) -> None:
    """For machines."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
