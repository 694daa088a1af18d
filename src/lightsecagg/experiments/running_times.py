"""Tables 2, 3 and 4, Figures 5, 6, 8, 9 and 10, the overheads and the impact of U.

All of them are views of the same cells: rounds and trainings, see `cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightsecagg.drivers.simulation.links import Links, Span, Topology, timeline
from lightsecagg.experiments import paper_values
from lightsecagg.experiments.cells import Cell, Results, RoundCell
from lightsecagg.experiments.report import Plot, Report, Table
from lightsecagg.experiments.setups import (
    LABELS,
    RATES,
    SECURE,
    SERVER_BANDWIDTH,
    TASKS,
    UNLIMITED,
    LearningTask,
    Profile,
    dropouts,
    links,
    method,
    planned_survivors,
    privacy,
)
from lightsecagg.experiments.timing import (
    RoundTimes,
    client_download,
    client_upload,
    round_times,
)
from lightsecagg.params import ShareMode
from lightsecagg.planning import Federation, Network
from lightsecagg.planning.planner import recommend_survivors
from lightsecagg.protocol.settings import ProtocolName

LIGHT, SECAGG, SECAGG_PLUS, PLAIN = ProtocolName
_TABLE_RATE = 0.3
"""Tables 2 and 3 of the paper are for p = 30 %, see `paper_values`."""
_COLOURS = {LIGHT: "#0b6e4f", SECAGG: "#b3261e", SECAGG_PLUS: "#d98324", PLAIN: "#555555"}
_MARKERS = {0.1: "o", 0.3: "s", 0.5: "^"}

Times = Callable[[ProtocolName, LearningTask, float, int, Links], RoundTimes]


@dataclass(frozen=True, slots=True)
class _Measured:
    """Looks up rounds and trainings among the results."""

    profile: Profile
    results: Results

    def training(self, task: LearningTask) -> float:
        return float(self.results[self.profile.training(task).key]["seconds"])

    def round(self, cell: RoundCell) -> dict[str, Any]:
        return self.results[cell.key]

    def times(
        self,
        protocol: ProtocolName,
        task: LearningTask,
        rate: float,
        on: Links,
        clients: int | None = None,
    ) -> RoundTimes:
        N = clients or self.profile.largest
        cell = self.profile.round(protocol, N, rate, task.dimension)
        return round_times(self.round(cell), on, self.training(task))


def _cells(
    profile: Profile,
    tasks: Sequence[LearningTask],
    rates: Sequence[float],
    clients: Sequence[int] = (),
    protocols: Sequence[ProtocolName] = SECURE,
) -> list[Cell]:
    found: list[Cell] = [profile.training(task) for task in tasks]
    for task in tasks:
        for N in clients or (profile.largest,):
            for rate in rates:
                found += [profile.round(p, N, rate, task.dimension) for p in protocols]
    return found


# -- Table 2 -------------------------------------------------------------------------------------

_GAINS: dict[str, tuple[str, Callable[[RoundTimes], float], str | None]] = {
    "non-overlapped": ("round, non-overlapped", lambda t: t.total(overlap=False), "non-overlapped"),
    "overlapped": ("round, overlapped", lambda t: t.total(overlap=True), "overlapped"),
    "aggregation": ("round without training", lambda t: t.aggregation, "aggregation"),
    "upload_recovery": ("upload + recovery", lambda t: t.uploading + t.recovery, None),
    "recovery": ("recovery phase", lambda t: t.recovery, None),
    "server_recovery": ("server's recovery", lambda t: t.server_recovery, "aggregation"),
}


def table2_cells(profile: Profile) -> list[Cell]:
    """Four tasks at the largest N."""
    return _cells(profile, list(TASKS.values()), [_TABLE_RATE])


def table2_report(profile: Profile, results: Results) -> Report:
    """Gains over SecAgg and SecAgg+."""
    measured = _Measured(profile, results)
    N = profile.largest
    report = Report("table2", f"Table 2: gain of LightSecAgg, four tasks, N = {N}")
    for topology in Topology:
        rows, figures = [], {}
        for task in TASKS.values():
            times = {
                p: measured.times(p, task, _TABLE_RATE, links(topology=topology)) for p in SECURE
            }
            gains = {
                name: [of(times[other]) / of(times[LIGHT]) for other in (SECAGG, SECAGG_PLUS)]
                for name, (_, of, _) in _GAINS.items()
            }
            figures[task.key] = gains | {"seconds": {p.value: _breakdown(times[p]) for p in SECURE}}
            paper = paper_values.TABLE2[task.key]
            rows.append(
                [task.title, f"{task.dimension:,}"]
                + [
                    _gain(*gains[name])
                    + (
                        f" ({paper[stated].secagg}×, {paper[stated].secagg_plus}×)"
                        if stated
                        else ""
                    )
                    for name, (_, _, stated) in _GAINS.items()
                ]
            )
        report.figures[topology.value] = figures
        report.tables.append(
            Table(
                f"Gain over SecAgg, SecAgg+ ({topology}; in brackets the paper's)",
                ["task", "d", *(title for title, _, _ in _GAINS.values())],
                rows,
            )
        )
    D = dropouts(N, _TABLE_RATE)
    report.paragraphs = [
        f"N = {N}, T = {privacy(N)}, D = {D} (30 %, the paper's rate for this table), U = "
        f"{planned_survivors(N, _TABLE_RATE, TASKS['femnist'].dimension)}. The paper's "
        '"aggregation-only" is the round without training; we also give the phases after training '
        "with and without the upload, and the server's recovery alone, which is what the protocol "
        "speeds up. It stands beside the paper's aggregation-only gain.",
        *method(profile),
    ]
    return report


def _gain(secagg: float, secagg_plus: float) -> str:
    return f"{_short(secagg)}×, {_short(secagg_plus)}×"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _breakdown(times: RoundTimes) -> dict[str, float]:
    return {
        "offline": times.offline,
        "training": times.training,
        "uploading": times.uploading,
        "recovery": times.recovery,
        "server_recovery": times.server_recovery,
        "total": times.total(overlap=False),
        "overlapped": times.total(overlap=True),
    }


# -- Table 3 -------------------------------------------------------------------------------------

_SETTINGS = {
    "relay, server 10 Gbit/s": (Topology.RELAY, SERVER_BANDWIDTH),
    "direct, server 10 Gbit/s": (Topology.DIRECT, SERVER_BANDWIDTH),
    "direct, server unlimited": (Topology.DIRECT, UNLIMITED),
}


def table3_cells(profile: Profile) -> list[Cell]:
    """The CNN at the largest N; bandwidth is applied afterwards."""
    return _cells(profile, [TASKS["femnist"]], [_TABLE_RATE])


def table3_report(profile: Profile, results: Results) -> Report:
    """Gain at three bandwidths."""
    measured, task, N = _Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("table3", f"Table 3: gain in different bandwidth settings, CNN, N = {N}")
    rows, figures = [], {}
    for setting, (topology, server) in _SETTINGS.items():
        for overlap in (True, False):
            for column, other in enumerate((SECAGG, SECAGG_PLUS)):
                row = [f"{LABELS[other]}, {'' if overlap else 'not '}overlapped, {setting}"]
                for bandwidth, paper in paper_values.TABLE3.items():
                    on = links(bandwidth, topology, server)
                    times = {p: measured.times(p, task, _TABLE_RATE, on) for p in (LIGHT, other)}
                    gain = times[other].total(overlap) / times[LIGHT].total(overlap)
                    figures[f"{other}/{setting}/{overlap}/{bandwidth:g}"] = gain
                    stated = f" ({paper[column]}×)" if overlap else ""
                    row.append(f"{gain:.2f}×{stated}")
                rows.append(row)
    report.figures = figures
    report.tables.append(
        Table(
            "Gain of LightSecAgg in total round time (in brackets the paper's, overlapped)",
            ["over", *(f"{bandwidth:g} Mbit/s" for bandwidth in paper_values.TABLE3)],
            rows,
        )
    )
    report.paragraphs = [
        f"N = {N}, T = {privacy(N)}, D = {dropouts(N, _TABLE_RATE)}; bandwidth is a client's, each "
        "way.",
        *method(profile),
    ]
    return report


# -- Table 4 -------------------------------------------------------------------------------------


def table4_cells(profile: Profile) -> list[Cell]:
    """The CNN at three dropout rates."""
    return _cells(profile, [TASKS["femnist"]], RATES)


def table4_report(profile: Profile, results: Results) -> Report:
    """Breakdown by phase."""
    measured, task, N = _Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("table4", f"Table 4: breakdown of a round by phase, CNN, N = {N}")
    for topology in Topology:
        rows = []
        figures: dict[str, Any] = {}
        for protocol in SECURE:
            times = [
                measured.times(protocol, task, rate, links(topology=topology)) for rate in RATES
            ]
            parts = [_breakdown(each) for each in times]
            figures[protocol.value] = {f"{r:g}": p for r, p in zip(RATES, parts, strict=True)}
            paper = paper_values.TABLE4[protocol.value]
            for phase in ("offline", "training", "uploading", "recovery", "total", "overlapped"):
                ours = [f"{part[phase]:.2f}" for part in parts]
                theirs = [f"{value:g}" for value in paper[phase]]
                title = "total, overlapped" if phase == "overlapped" else phase
                rows.append([f"{LABELS[protocol]}: {title}", *ours, *theirs])
        report.figures[topology.value] = figures
        report.tables.append(
            Table(
                f"Seconds ({topology}); right: the paper's, on other hardware",
                ["phase", *(f"p = {rate:.0%}" for rate in RATES)]
                + [f"paper {rate:.0%}" for rate in RATES],
                rows,
            )
        )
    graphs = {
        rate: measured.round(profile.round(SECAGG_PLUS, N, rate, task.dimension)) for rate in RATES
    }
    report.paragraphs = [
        f"N = {N}, T = {privacy(N)}, D = {', '.join(str(dropouts(N, rate)) for rate in RATES)}; "
        f"U = {', '.join(str(planned_survivors(N, rate, task.dimension)) for rate in RATES)}; "
        "SecAgg+'s degree k = "
        f"{', '.join(str(graph['neighbours']) for graph in graphs.values())}. Offline is advertise "
        "+ share, recovery is agree + recover; without overlap, the total is the sum of the rows.",
        *method(profile),
    ]
    return report


# -- Figures 6, 8, 9, 10 ---------------------------------------------------------------------------

FIGURES = {"figure6": "femnist", "figure8": "mnist", "figure9": "cifar10", "figure10": "gld23k"}


def growth_cells(name: str, profile: Profile) -> list[Cell]:
    """One task, all N and all dropout rates."""
    return _cells(profile, [TASKS[FIGURES[name]]], RATES, profile.clients)


def growth_report(name: str, profile: Profile, results: Results) -> Report:
    """Total time against N."""
    measured, task = _Measured(profile, results), TASKS[FIGURES[name]]
    number = name.removeprefix("figure")
    report = Report(name, f"Figure {number}: total running time against N, {task.title}")
    series = {
        (overlap, protocol, rate): [
            measured.times(protocol, task, rate, links(), N).total(overlap) for N in profile.clients
        ]
        for overlap in (False, True)
        for protocol in SECURE
        for rate in RATES
    }
    report.figures = {
        "clients": list(profile.clients),
        "seconds": {f"{p}/{rate:g}/{o}": values for (o, p, rate), values in series.items()},
    }
    stated = name == "figure6" and profile.largest == 200

    def draw(figure: Any) -> None:
        for index, overlap in enumerate((False, True)):
            axes = figure.add_subplot(1, 2, index + 1)
            for (o, protocol, rate), values in series.items():
                if o is overlap:
                    axes.plot(
                        profile.clients,
                        values,
                        marker=_MARKERS[rate],
                        color=_COLOURS[protocol],
                        linestyle={0.1: "-", 0.3: "--", 0.5: ":"}[rate],
                        label=f"{LABELS[protocol]}, p = {rate:.0%}",
                    )
            if stated:
                _paper_totals(axes, overlap)
            _log_scale(axes)
            axes.set_xlabel("number of clients N")
            axes.set_ylabel("seconds per round (log scale)")
            axes.set_title("overlapped" if overlap else "non-overlapped")
            axes.set_xticks(list(profile.clients))
            axes.grid(visible=True, which="both", alpha=0.25)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            fontsize=8,
        )

    report.plots.append(
        Plot(
            name,
            f"Total time of a round, {task.title}, shares relayed"
            + ("; hollow grey marks: the paper's totals at N = 200" if stated else ""),
            draw,
            (10, 5.4),
        )
    )
    report.tables.append(
        Table(
            "Seconds per round, relayed: non-overlapped / overlapped",
            ["protocol, dropout rate", *(f"N = {N}" for N in profile.clients)],
            [
                [f"{LABELS[p]}, {rate:.0%}"]
                + [
                    f"{apart:.2f} / {beside:.2f}"
                    for apart, beside in zip(
                        series[False, p, rate], series[True, p, rate], strict=True
                    )
                ]
                for p in SECURE
                for rate in RATES
            ],
        )
    )
    absent = "" if stated else " The paper's text gives no numbers for this figure."
    report.paragraphs = [f"Client links of 320 Mbit/s.{absent}", *method(profile)]
    return report


def _paper_totals(axes: Any, overlap: bool) -> None:
    for protocol in SECURE:
        values = paper_values.TABLE4[protocol.value]["overlapped" if overlap else "total"]
        for rate, value in zip(RATES, values, strict=True):
            axes.plot(
                [200],
                [value],
                marker=_MARKERS[rate],
                markerfacecolor="none",
                color="#bbbbbb",
                linestyle="",
            )
    axes.text(
        0.03, 0.97, "hollow: the paper, N = 200", transform=axes.transAxes, va="top", fontsize=8
    )


def _log_scale(axes: Any) -> None:
    """A logarithmic axis of seconds in plain numbers."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
    axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


# -- Figure 5 ------------------------------------------------------------------------------------


def figure5_cells(profile: Profile) -> list[Cell]:
    """MobileNetV3, as in the paper."""
    return _cells(
        profile, [TASKS["cifar10"]], [_TABLE_RATE], protocols=(LIGHT, SECAGG_PLUS, SECAGG)
    )


def figure5_report(profile: Profile, results: Results) -> Report:
    """The timing diagram of one round."""
    measured, task, N = _Measured(profile, results), TASKS["cifar10"], profile.largest
    protocols = (LIGHT, SECAGG_PLUS)
    report = Report("figure5", f"Figure 5: timing diagram of one round, MobileNetV3, N = {N}")
    spans = {
        (overlap, protocol): timeline(
            measured.times(protocol, task, _TABLE_RATE, links()).phases,
            measured.training(task),
            overlap,
        )
        for overlap in (False, True)
        for protocol in protocols
    }
    report.figures = {
        f"{protocol}/{'overlapped' if overlap else 'non-overlapped'}": [
            {"party": s.party, "phase": s.phase, "start": s.start, "end": s.end} for s in found
        ]
        for (overlap, protocol), found in spans.items()
    }

    def draw(figure: Any) -> None:
        last = max(span.end for found in spans.values() for span in found)
        for index, overlap in enumerate((False, True)):
            axes = figure.add_subplot(2, 1, index + 1)
            lanes = [(p, party) for p in protocols for party in ("client", "link", "server")]
            for row, (protocol, party) in enumerate(lanes):
                for span in spans[overlap, protocol]:
                    if span.party == party:
                        _bar(axes, row, span)
            axes.set_yticks(range(len(lanes)), [f"{LABELS[p]}: {party}" for p, party in lanes])
            axes.invert_yaxis()
            axes.set_xlim(0, last * 1.02)
            axes.set_title("overlapped" if overlap else "non-overlapped")
            axes.grid(visible=True, axis="x", alpha=0.3)
        figure.axes[-1].set_xlabel("seconds since the round began")
        _phase_legend(figure)

    report.plots.append(
        Plot(
            "figure5",
            "Who is busy when: the slowest client, the links and the server "
            "(training on a core of its own when overlapped)",
            draw,
            (10, 6.2),
        )
    )
    report.paragraphs = [
        f"{task.title}, N = {N}, T = {privacy(N)}, D = {dropouts(N, _TABLE_RATE)}, shares relayed. "
        "SecAgg is left out of the diagram, as in the paper; its rounds take "
        f"{measured.times(SECAGG, task, _TABLE_RATE, links()).total(overlap=True):.1f} s "
        "overlapped.",
        *method(profile),
    ]
    return report


_PHASE_COLOURS = {
    "advertise": "#9ecae1",
    "share": "#3182bd",
    "training": "#bdbdbd",
    "upload": "#74c476",
    "agree": "#fdd0a2",
    "recover": "#e6550d",
}


def _bar(axes: Any, row: int, span: Span) -> None:
    # Training beside the offline phase has its own half of the client's lane.
    height, shift = (0.36, 0.22) if span.phase == "training" else (0.36, -0.18)
    axes.barh(
        row + shift,
        span.end - span.start,
        left=span.start,
        height=height,
        color=_PHASE_COLOURS[span.phase],
        edgecolor="white",
        linewidth=0.4,
    )


def _phase_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label=phase)
        for phase, colour in _PHASE_COLOURS.items()
        if phase != "agree"
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)


# -- overhead ------------------------------------------------------------------------------------

OVERHEAD_RATE = 0.1
TIME_GOAL, BYTES_GOAL = 1.15, 1.35


def overhead_cells(profile: Profile) -> list[Cell]:
    """All four protocols at 10 % dropouts."""
    return _cells(profile, [TASKS["femnist"]], [OVERHEAD_RATE], protocols=(*SECURE, PLAIN))


def overhead_report(profile: Profile, results: Results) -> Report:
    """Round time and bytes relative to unprotected FedAvg."""
    measured, task, N = _Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("overhead", f"Overhead over unprotected FedAvg, CNN, N = {N}, 10 % dropouts")
    for topology in Topology:
        on = links(topology=topology)
        plain_cell = measured.round(profile.round(PLAIN, N, OVERHEAD_RATE, task.dimension))
        plain = measured.times(PLAIN, task, OVERHEAD_RATE, on)
        rows = []
        for protocol in (PLAIN, *SECURE):
            cell = measured.round(profile.round(protocol, N, OVERHEAD_RATE, task.dimension))
            times = measured.times(protocol, task, OVERHEAD_RATE, on)
            beside, apart = times.total(overlap=True), times.total(overlap=False)
            figures = {
                "round_seconds": beside,
                "time_ratio": beside / plain.total(overlap=True),
                "time_ratio_non_overlapped": apart / plain.total(overlap=False),
                "client_upload_bytes": client_upload(cell),
                "upload_ratio": client_upload(cell) / client_upload(plain_cell),
                "client_download_bytes": client_download(cell),
            }
            report.figures[f"{protocol}/{topology}"] = figures
            rows.append(
                [
                    LABELS[protocol],
                    f"{beside:.2f}",
                    f"{figures['time_ratio']:.3f}",
                    f"{apart:.2f}",
                    f"{figures['time_ratio_non_overlapped']:.3f}",
                    f"{figures['client_upload_bytes'] / 1e6:.3f}",
                    f"{figures['upload_ratio']:.3f}",
                    f"{figures['client_download_bytes'] / 1e3:.1f}",
                ]
            )
        report.tables.append(
            Table(
                "Shares relayed" if topology is Topology.RELAY else "Shares sent directly",
                [
                    "protocol",
                    "round, overlapped (s)",
                    "over plain",
                    "non-overlapped (s)",
                    "over plain",
                    "client sends (MB)",
                    "over plain",
                    "client receives (kB)",
                ],
                rows,
            )
        )
    light = report.figures[f"{LIGHT}/{Topology.RELAY}"]
    met = light["time_ratio"] <= TIME_GOAL and light["upload_ratio"] <= BYTES_GOAL
    report.figures["goal_met"] = met
    report.paragraphs = [
        f"Goal for LightSecAgg (relayed, overlapped): at most {TIME_GOAL} times the round time and "
        f"{BYTES_GOAL} times the upload of plain FedAvg. Measured: {light['time_ratio']:.3f} and "
        f"{light['upload_ratio']:.3f}: {'met' if met else 'NOT met'}. The download of the global "
        "model, the same for all protocols, is not counted.",
        *method(profile),
    ]
    return report


# -- impact of U ---------------------------------------------------------------------------------

BANDWIDTHS = tuple(paper_values.TABLE3)
_SERVERS = {SERVER_BANDWIDTH: "server 10 Gbit/s", UNLIMITED: "server link unlimited"}
WITHIN = 1.05


def sweep_of_survivors(profile: Profile) -> list[int]:
    """U from just above T to N - D."""
    N = profile.largest
    T, largest = privacy(N), N - dropouts(N, OVERHEAD_RATE)
    steps = 9 if N >= 100 else 6
    spaced = {round(T + (largest - T) * k / steps) for k in range(1, steps + 1)}
    return sorted({T + max(2, (largest - T) // 16), *spaced})


def impact_cells(profile: Profile) -> list[Cell]:
    """LightSecAgg in seeded mode for many U, and in the paper's mode for a few."""
    task, N = TASKS["femnist"], profile.largest
    found: list[Cell] = [profile.training(task)]
    found += [
        profile.round(LIGHT, N, OVERHEAD_RATE, task.dimension, U)
        for U in sweep_of_survivors(profile)
    ]
    return found + [_paper_mode(profile, U) for U in _paper_survivors(profile)]


def _paper_survivors(profile: Profile) -> list[int]:
    """The paper's U = 0.7 N, and the largest."""
    N = profile.largest
    return [int(0.7 * N), N - dropouts(N, OVERHEAD_RATE)]


def _paper_mode(profile: Profile, survivors: int) -> RoundCell:
    task = TASKS["femnist"]
    return profile.round(
        LIGHT, profile.largest, OVERHEAD_RATE, task.dimension, survivors, ShareMode.PAPER
    )


def _name(bandwidth: float, server: float, overlap: bool) -> str:
    return f"{bandwidth:g}/{server:g}/{'overlapped' if overlap else 'non-overlapped'}"


def impact_report(profile: Profile, results: Results) -> Report:
    """Round time against U, and how good the planner's U is."""
    measured, task, N = _Measured(profile, results), TASKS["femnist"], profile.largest
    T, D = privacy(N), dropouts(N, OVERHEAD_RATE)
    sweep = sweep_of_survivors(profile)
    report = Report("impact-of-u", f"Impact of U: round time of LightSecAgg, CNN, N = {N}")
    training = measured.training(task)

    def seconds(cell: RoundCell, bandwidth: float, server: float, overlap: bool) -> float:
        on = links(bandwidth, server_bandwidth=server)
        return round_times(measured.round(cell), on, training).total(overlap)

    def seeded(U: int) -> RoundCell:
        return profile.round(LIGHT, N, OVERHEAD_RATE, task.dimension, U)

    settings = [(b, s, o) for s in _SERVERS for b in BANDWIDTHS for o in (False, True)]
    curves = {setting: [seconds(seeded(U), *setting) for U in sweep] for setting in settings}
    planned = {
        (bandwidth, server): recommend_survivors(
            Federation(
                N,
                T,
                D,
                task.dimension,
                Network(bandwidth, server),
                training_seconds=training,
            )
        )[0]
        for server in _SERVERS
        for bandwidth in BANDWIDTHS
    }
    ratios = {
        (b, s, o): seconds(seeded(planned[b, s]), b, s, o) / min(curves[b, s, o])
        for b, s, o in settings
        if planned[b, s] in sweep
    }
    report.figures = {
        "survivors": sweep,
        "seconds": {_name(*setting): values for setting, values in curves.items()},
        "planned": {f"{b:g}/{s:g}": U for (b, s), U in planned.items()},
        "planned_over_best": {_name(*setting): ratio for setting, ratio in ratios.items()},
    }

    def draw(figure: Any) -> None:
        colours = dict(zip(BANDWIDTHS, ("#b3261e", "#0b6e4f", "#2b5dab"), strict=True))
        for index, (server, title) in enumerate(_SERVERS.items()):
            axes = figure.add_subplot(1, 2, index + 1)
            for b in BANDWIDTHS:
                width = {98.0: 6.0, 320.0: 3.5, 802.0: 1.5}[b]  # curves may coincide
                for overlap, style in ((False, "-"), (True, ":")):
                    label = f"{b:g} Mbit/s" + (", overlapped" if overlap else "")
                    values = curves[b, server, overlap]
                    axes.plot(sweep, values, style, color=colours[b], linewidth=width, label=label)
                    axes.plot(
                        [planned[b, server]],
                        [seconds(seeded(planned[b, server]), b, server, overlap)],
                        marker="*",
                        markersize=13,
                        color="black",
                        linestyle="",
                        label="planner's U" if (b, overlap) == (802.0, True) else "_nolegend_",
                    )
            axes.axvline(0.7 * N, color="#bbbbbb", linestyle="--", label="the paper's U = 0.7 N")
            _log_scale(axes)
            axes.set_xlabel("U, answers needed to recover")
            axes.set_ylabel("seconds per round (log scale)")
            axes.set_title(title)
            axes.grid(visible=True, which="both", alpha=0.25)
        figure.axes[0].legend(fontsize=8)

    report.plots.append(
        Plot("impact-of-u", "Round time against U, seeded mode, shares relayed", draw, (11, 5))
    )
    cells = {f"seeded, U = {U}": seeded(U) for U in sweep}
    cells |= {f"paper's mode, U = {U}": _paper_mode(profile, U) for U in _paper_survivors(profile)}
    for server, title in _SERVERS.items():
        rows = [
            [name]
            + [
                " / ".join(f"{seconds(cell, b, server, o):.2f}" for o in (False, True))
                for b in BANDWIDTHS
            ]
            for name, cell in cells.items()
        ]
        report.tables.append(
            Table(
                f"Seconds per round, relayed, {title}: non-overlapped / overlapped",
                ["shares", *(f"{bandwidth:g} Mbit/s" for bandwidth in BANDWIDTHS)],
                rows,
            )
        )
    worst = max(ratios.values(), default=float("nan"))
    report.figures["worst_planned_over_best"] = worst
    report.paragraphs = [
        f"N = {N}, T = {T}, D = {D}. The planner's U is "
        f"{', '.join(map(str, sorted(set(planned.values()))))} at all bandwidths; its round takes "
        f"at most {worst:.3f} times the best of the sweep (goal: {WITHIN}): "
        f"{'met' if worst <= WITHIN else 'NOT met'}. In seeded mode a larger U makes shares "
        "shorter and fewer of them explicit, so the optimum lies at N - D; the paper's optimum of "
        "0.7 N was one of slow encoding and decoding.",
        *method(profile),
    ]
    return report
