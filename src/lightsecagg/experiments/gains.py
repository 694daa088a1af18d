"""Tables 2 and 3: how many times faster a round is than with SecAgg and SecAgg+."""

from __future__ import annotations

from typing import Any

from lightsecagg.experiments import paper_values
from lightsecagg.experiments.cells import Cell, Results
from lightsecagg.experiments.report import Report, Table
from lightsecagg.experiments.rounds import (
    LIGHT,
    SECAGG,
    SECAGG_PLUS,
    TABLE_RATE,
    Measured,
    round_cells,
)
from lightsecagg.experiments.setups import (
    LABELS,
    PAPER_CLIENTS,
    SECURE,
    SERVER_BANDWIDTH,
    TASKS,
    UNLIMITED,
    Profile,
    dropouts,
    method,
    planned_survivors,
    privacy,
)
from lightsecagg.experiments.statistics import Spread
from lightsecagg.experiments.timing import Figure, total
from lightsecagg.params import ShareMode
from lightsecagg.planning import Network, Topology

_GAINS: dict[str, tuple[str, Figure, str | None]] = {
    "non-overlapped": ("round, non-overlapped", total(overlap=False), "non-overlapped"),
    "overlapped": ("round, overlapped", total(overlap=True), "overlapped"),
    "aggregation": ("round without training", lambda t: t.aggregation, "aggregation"),
    "upload_recovery": ("upload + recovery", lambda t: t.uploading + t.recovery, None),
    "recovery": ("recovery phase", lambda t: t.recovery, None),
    "server_recovery": ("server's recovery", lambda t: t.server_recovery, "aggregation"),
}


def table2_cells(profile: Profile) -> list[Cell]:
    """Four tasks at the largest N."""
    return round_cells(profile, list(TASKS.values()), [TABLE_RATE])


def table2_report(profile: Profile, results: Results) -> Report:
    """Gains over SecAgg and SecAgg+."""
    measured = Measured(profile, results)
    N = profile.largest
    report = Report("table2", f"Table 2: gain of LightSecAgg, four tasks, N = {N}")
    for topology in Topology:
        rows: list[list[str]] = []
        figures: dict[str, Any] = {}
        for task in TASKS.values():
            on = Network(topology=topology)
            times = {p: measured.times(p, task, TABLE_RATE, on) for p in SECURE}
            short = measured.times(LIGHT, task, TABLE_RATE, on, mode=ShareMode.SHORT_KEY)
            seconds = {p.value: times[p].breakdown() for p in SECURE}
            figures[task.key] = {"seconds": seconds}
            figures[f"{task.key}, short keys"] = {"seconds": short.breakdown()}
            for column, other in enumerate((SECAGG, SECAGG_PLUS)):
                for ours, suffix in ((times[LIGHT], ""), (short, ", short keys")):
                    gains = {
                        name: times[other].over(ours, of) for name, (_, of, _) in _GAINS.items()
                    }
                    figures[f"{task.key}{suffix}"][other.value] = gains
                    stated = paper_values.TABLE2[task.key] if ours is times[LIGHT] else {}
                    rows.append(
                        [f"{task.title}{suffix}, over {LABELS[other]}", f"{task.dimension:,}"]
                        + [
                            _gain(gains[name])
                            + (f" [{stated[paper][column]}×]" if paper in stated else "")
                            for name, (_, _, paper) in _GAINS.items()
                        ]
                    )
        report.figures[topology.value] = figures
        report.tables.append(
            Table(
                f"Gain over SecAgg and SecAgg+ ({topology}; in square brackets the paper's, "
                f"N = {PAPER_CLIENTS})",
                ["task", "d", *(title for title, _, _ in _GAINS.values())],
                rows,
            )
        )
    D = dropouts(N, TABLE_RATE)
    report.paragraphs = [
        f"N = {N}, T = {privacy(N)}, D = {D} (30 %, the paper's rate for this table), U = "
        f"{planned_survivors(N, TABLE_RATE, TASKS['femnist'].dimension)}. The paper's "
        '"aggregation-only" is the round without training; we also give the phases after training '
        "with and without the upload, and the server's recovery alone, which is what the protocol "
        "speeds up. It stands beside the paper's aggregation-only gain.",
        *method(profile),
    ]
    return report


def _gain(gain: Spread) -> str:
    digits = 0 if gain.median >= 100 else 1 if gain.median >= 10 else 2
    return f"{gain:.{digits}f}×"


_SETTINGS = {
    "relay, server 10 Gbit/s": (Topology.RELAY, SERVER_BANDWIDTH),
    "direct, server 10 Gbit/s": (Topology.DIRECT, SERVER_BANDWIDTH),
    "direct, server unlimited": (Topology.DIRECT, UNLIMITED),
}


def table3_cells(profile: Profile) -> list[Cell]:
    """The CNN at the largest N; bandwidth is applied afterwards."""
    return round_cells(profile, [TASKS["femnist"]], [TABLE_RATE])


def table3_report(profile: Profile, results: Results) -> Report:
    """Gain at three bandwidths."""
    measured, task, N = Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("table3", f"Table 3: gain in different bandwidth settings, CNN, N = {N}")
    rows, figures = [], {}
    for setting, (topology, server) in _SETTINGS.items():
        for overlap in (True, False):
            for column, other in enumerate((SECAGG, SECAGG_PLUS)):
                row = [f"{LABELS[other]}, {'' if overlap else 'not '}overlapped, {setting}"]
                short_row = [f"{row[0]}; short keys"]
                for bandwidth, paper in paper_values.TABLE3.items():
                    on = Network(bandwidth, server, topology=topology)
                    light, short, theirs = (
                        measured.times(p, task, TABLE_RATE, on, mode=mode)
                        for p, mode in (
                            (LIGHT, ShareMode.SEEDED),
                            (LIGHT, ShareMode.SHORT_KEY),
                            (other, ShareMode.SEEDED),
                        )
                    )
                    name = f"{other}/{setting}/{overlap}/{bandwidth:g}"
                    figures[name] = gain = theirs.over(light, total(overlap))
                    figures[f"{name}/short keys"] = theirs.over(short, total(overlap))
                    row.append(_gain(gain) + (f" [{paper[column]}×]" if overlap else ""))
                    short_row.append(_gain(figures[f"{name}/short keys"]))
                rows += [row, short_row]
    report.figures = figures
    report.tables.append(
        Table(
            "Gain of LightSecAgg in total round time (in square brackets the paper's, overlapped, "
            f"N = {PAPER_CLIENTS})",
            ["over", *(f"{bandwidth:g} Mbit/s" for bandwidth in paper_values.TABLE3)],
            rows,
        )
    )
    report.paragraphs = [
        f"N = {N}, T = {privacy(N)}, D = {dropouts(N, TABLE_RATE)}; bandwidth is a client's, each "
        "way.",
        *method(profile),
    ]
    return report
