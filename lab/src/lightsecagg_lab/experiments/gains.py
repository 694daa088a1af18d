"""Tables 2 and 3: how many times faster a round is than with SecAgg and SecAgg+."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightsecagg.params import ShareMode
from lightsecagg_lab.experiments import paper_values
from lightsecagg_lab.experiments.cells import Cell, Results
from lightsecagg_lab.experiments.report import Report, Table
from lightsecagg_lab.experiments.rounds import (
    LIGHT,
    SECAGG,
    SECAGG_PLUS,
    TABLE_RATE,
    Measured,
    round_cells,
)
from lightsecagg_lab.experiments.setups import (
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
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.experiments.timing import Figure, total
from lightsecagg_lab.planning import Network, Topology
from lightsecagg_lab.planning.transport_costs import FREE
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

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
        "with and without the upload, and the server's recovery alone, which the protocol speeds "
        "up. It stands next to the paper's aggregation-only gain.",
        *method(profile),
    ]
    return report


def _gain(gain: Spread) -> str:
    digits = 0 if gain.median >= 100 else 1 if gain.median >= 10 else 2
    return f"{gain:.{digits}f}×"


_PICTURED = Network(server_bandwidth=UNLIMITED, topology=Topology.DIRECT, transport=FREE)
"""As the paper draws it: clients send shares to each other, and nothing but their links is slow."""

_SERVERS = {
    720.0: "0.72 Gbit/s",
    1_000.0: "1 Gbit/s",
    SERVER_BANDWIDTH: f"{SERVER_BANDWIDTH / 1e3:g} Gbit/s",
    25_000.0: "25 Gbit/s",
    UNLIMITED: "unlimited",
}
"""The server's link. The first is the paper's, by its Table 4: 200 updates of 4.83 MB in 10.7 s."""

_MODES = {"": ShareMode.SEEDED, "short keys": ShareMode.SHORT_KEY}


def table3_cells(profile: Profile) -> list[Cell]:
    """The CNN at the largest N; bandwidth is applied afterwards."""
    return round_cells(profile, [TASKS["femnist"]], [TABLE_RATE])


def table3_report(profile: Profile, results: Results) -> Report:
    """Gain at three bandwidths of the clients, and at as many of the server as matter."""
    measured, N = Measured(profile, results), profile.largest
    report = Report("table3", f"Table 3: gain in different bandwidth settings, CNN, N = {N}")
    header = [f"{bandwidth:g} Mbit/s" for bandwidth in paper_values.TABLE3]
    papers = {
        other: _bandwidth_gains(measured, other, _PICTURED, ShareMode.SEEDED, overlap=True)
        for other in (SECAGG, SECAGG_PLUS)
    }
    report.figures["as the paper draws it"] = {other.value: g for other, g in papers.items()}
    report.tables.append(
        Table(
            "Gain of LightSecAgg in total round time, overlapped, as the paper draws it: shares "
            "sent directly, no limit at the server, no charge for the transport (in square "
            f"brackets the paper's, N = {PAPER_CLIENTS})",
            ["over", *header],
            [
                [LABELS[other]]
                + [
                    f"{_gain(gain)} [{paper[column]}×]"
                    for gain, paper in zip(
                        papers[other].values(), paper_values.TABLE3.values(), strict=True
                    )
                ]
                for column, other in enumerate(papers)
            ],
        )
    )
    for topology in Topology:
        for overlap in (True, False):
            report.tables.append(_server_links(measured, topology, overlap, report.figures))
    report.paragraphs = [
        f"N = {N}, T = {privacy(N)}, D = {dropouts(N, TABLE_RATE)}; columns are a client's "
        "bandwidth, rows the server's, each way. The server's link carries what all clients send "
        f"at once: of 10 Gbit/s each of {N} clients has {SERVER_BANDWIDTH / N:.0f} Mbit/s, "
        "whatever its own link could do. A gain below 1 is a loss.",
        *method(profile),
    ]
    return report


def _bandwidth_gains(
    measured: Measured, other: ProtocolName, on: Network, mode: ShareMode, overlap: bool
) -> dict[str, Spread]:
    """Over the other protocol, by bandwidth of the clients."""
    task, found = TASKS["femnist"], {}
    for bandwidth in paper_values.TABLE3:
        links = replace(on, bandwidth=bandwidth)
        ours = measured.times(LIGHT, task, TABLE_RATE, links, mode=mode)
        theirs = measured.times(other, task, TABLE_RATE, links)
        found[f"{bandwidth:g}"] = theirs.over(ours, total(overlap))
    return found


def _server_links(
    measured: Measured, topology: Topology, overlap: bool, figures: dict[str, Any]
) -> Table:
    """One row per link of the server, baseline and mode."""
    title = f"{topology}, {'' if overlap else 'not '}overlapped"
    rows = []
    for server, link in _SERVERS.items():
        on = Network(server_bandwidth=server, topology=topology)
        for other in (SECAGG, SECAGG_PLUS):
            for suffix, mode in _MODES.items():
                found = _bandwidth_gains(measured, other, on, mode, overlap)
                name = f"{LABELS[other]}, server {link}" + (f"; {suffix}" if suffix else "")
                figures.setdefault(title, {})[name] = found
                rows.append([name, *map(_gain, found.values())])
    return Table(
        f"Gain of LightSecAgg in total round time ({title}), N = {measured.profile.largest}",
        ["over", *(f"{bandwidth:g} Mbit/s" for bandwidth in paper_values.TABLE3)],
        rows,
    )
