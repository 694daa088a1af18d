"""Two recordings of the same experiments: do they say the same?

They agree on a figure if each median lies in the other's interquartile range. That is strict: of
two recordings of the very same distribution, about half would not with seven rounds each, and three
in ten with fourteen. How far apart the medians are is given beside the verdict.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import reading
from lightsecagg_lab.experiments.report import Report, Table
from lightsecagg_lab.experiments.statistics import Spread, spreads_in

_NAME = "stability"


def stability_report(first: Path, second: Path) -> Report:
    """All figures that both folders have."""
    report = Report(_NAME, "Two recordings compared", timed=False)
    stable, unstable, farthest = 0, 0, 0.0
    for name, (ours, theirs) in _shared(first, second).items():
        found: dict[str, Any] = {}
        rows = []
        for figure in (figure for figure in ours if figure in theirs):
            a, b = ours[figure], theirs[figure]
            found[figure] = {"first": a, "second": b, "stable": a.agrees_with(b)}
            verdict = "stable" if a.agrees_with(b) else "not stable"
            ratio = f"{b.median / a.median:.3f}" if a.median else "-"
            farthest = max(farthest, abs(b.median / a.median - 1) if a.median else 0)
            rows.append([figure, f"{a:.4g}", f"{b:.4g}", ratio, verdict])
        agreed = sum(each["stable"] for each in found.values())
        stable, unstable = stable + agreed, unstable + len(found) - agreed
        report.figures[name] = found
        report.tables.append(
            Table(
                f"{name}: {agreed} of {len(found)} are stable",
                ["figure", str(first), str(second), "second / first", "verdict"],
                rows,
            )
        )
    report.figures |= {"stable": stable, "not_stable": unstable, "farthest": farthest}
    report.paragraphs.append(
        f"{stable} of {stable + unstable} figures are stable: the median of each recording lies in "
        f"the interquartile range of the other. {unstable} are not stable. With seven rounds each, "
        "about half of the figures would not be, even if nothing changed. No two medians "
        f"differ by more than {100 * farthest:.1f} %."
    )
    return report


def _shared(first: Path, second: Path) -> dict[str, tuple[dict[str, Spread], dict[str, Spread]]]:
    """By experiment, the repeated measurements of both."""
    names = sorted(path.name for path in first.glob("*.json") if (second / path.name).exists())
    found = {
        Path(name).stem: (_spreads(first / name), _spreads(second / name))
        for name in names
        if Path(name).stem != _NAME
    }
    repeated = {name: pair for name, pair in found.items() if pair[0].keys() & pair[1].keys()}
    if not repeated:
        raise ConfigurationError(
            f"{first} and {second} have no repeated measurement in common: record the same "
            "experiment into both with --out"
        )
    return repeated


def _spreads(path: Path) -> dict[str, Spread]:
    with reading(path, "the report of an experiment"):
        return spreads_in(json.loads(path.read_text("utf-8"))["figures"])
