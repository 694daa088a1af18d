"""Table 4 and Figure 5: where the time of a round goes, phase by phase."""

from __future__ import annotations

from typing import Any

from lightsecagg.experiments import paper_values
from lightsecagg.experiments.cells import Cell, Results
from lightsecagg.experiments.report import Plot, Report, Table
from lightsecagg.experiments.rounds import (
    LIGHT,
    SECAGG,
    SECAGG_PLUS,
    SHORT_KEYS,
    TABLE_RATE,
    Measured,
    round_cells,
)
from lightsecagg.experiments.setups import (
    LABELS,
    PAPER_CLIENTS,
    RATES,
    SECURE,
    TASKS,
    Profile,
    dropouts,
    method,
    planned_survivors,
    privacy,
)
from lightsecagg.params import ShareMode
from lightsecagg.planning import Network, Topology
from lightsecagg.planning.timeline import Span, timeline


def table4_cells(profile: Profile) -> list[Cell]:
    """The CNN at three dropout rates."""
    return round_cells(profile, [TASKS["femnist"]], RATES)


def table4_report(profile: Profile, results: Results) -> Report:
    """Breakdown by phase."""
    measured, task, N = Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("table4", f"Table 4: breakdown of a round by phase, CNN, N = {N}")
    for topology in Topology:
        rows = []
        figures: dict[str, Any] = {}
        for protocol in SECURE:
            times = [
                measured.times(protocol, task, rate, Network(topology=topology)) for rate in RATES
            ]
            parts = [each.breakdown() for each in times]
            figures[protocol.value] = {f"{r:g}": p for r, p in zip(RATES, parts, strict=True)}
            paper = paper_values.TABLE4[protocol.value]
            for phase in _PHASES:
                theirs = [f"{value:g}" for value in paper[phase]]
                rows.append([*_row(LABELS[protocol], phase, parts), *theirs])
        short = [
            measured.times(
                LIGHT, task, rate, Network(topology=topology), mode=ShareMode.SHORT_KEY
            ).breakdown()
            for rate in RATES
        ]
        figures["short-key"] = {f"{r:g}": p for r, p in zip(RATES, short, strict=True)}
        rows += [[*_row(SHORT_KEYS, phase, short), *("" for _ in RATES)] for phase in _PHASES]
        report.figures[topology.value] = figures
        report.tables.append(
            Table(
                f"Seconds ({topology}); right: the paper's, N = {PAPER_CLIENTS}, other hardware",
                ["phase", *(f"p = {rate:.0%}" for rate in RATES)]
                + [f"paper {rate:.0%}, N = {PAPER_CLIENTS}" for rate in RATES],
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
        "At 50 % the parameters leave U - T = 2 pieces, so that every explicit share is half as "
        "long as the model; then the offline phase of LightSecAgg costs more than its recovery "
        "saves when shares are relayed. The paper sees the same growth of its offline phase, on a "
        "smaller scale.",
        *method(profile),
    ]
    return report


_PHASES = ("offline", "training", "uploading", "recovery", "total", "overlapped")


def _row(label: str, phase: str, parts: list[dict[str, float]]) -> list[str]:
    title = "total, overlapped" if phase == "overlapped" else phase
    return [f"{label}: {title}", *(f"{part[phase]:.2f}" for part in parts)]


def figure5_cells(profile: Profile) -> list[Cell]:
    """MobileNetV3, as in the paper."""
    return round_cells(
        profile, [TASKS["cifar10"]], [TABLE_RATE], protocols=(LIGHT, SECAGG_PLUS, SECAGG)
    )


def figure5_report(profile: Profile, results: Results) -> Report:
    """The timing diagram of one round."""
    measured, task, N = Measured(profile, results), TASKS["cifar10"], profile.largest
    shown = {
        LABELS[LIGHT]: (LIGHT, ShareMode.SEEDED),
        SHORT_KEYS: (LIGHT, ShareMode.SHORT_KEY),
        LABELS[SECAGG_PLUS]: (SECAGG_PLUS, ShareMode.SEEDED),
    }
    report = Report("figure5", f"Figure 5: timing diagram of one round, MobileNetV3, N = {N}")
    spans = {
        (overlap, label): timeline(
            measured.times(protocol, task, TABLE_RATE, Network(), mode=mode).phases,
            measured.training(task),
            overlap,
        )
        for overlap in (False, True)
        for label, (protocol, mode) in shown.items()
    }
    report.figures = {
        f"{label}/{'overlapped' if overlap else 'non-overlapped'}": [
            {"party": s.party, "phase": s.phase, "start": s.start, "end": s.end} for s in found
        ]
        for (overlap, label), found in spans.items()
    }

    def draw(figure: Any) -> None:
        last = max(span.end for found in spans.values() for span in found)
        for index, overlap in enumerate((False, True)):
            axes = figure.add_subplot(2, 1, index + 1)
            lanes = [(who, party) for who in shown for party in ("client", "link", "server")]
            for row, (label, party) in enumerate(lanes):
                for span in spans[overlap, label]:
                    if span.party == party:
                        _bar(axes, row, span)
            axes.set_yticks(range(len(lanes)), [f"{label}: {party}" for label, party in lanes])
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
            (10, 7.6),
        )
    )
    report.paragraphs = [
        f"{task.title}, N = {N}, T = {privacy(N)}, D = {dropouts(N, TABLE_RATE)}, shares relayed. "
        "SecAgg is left out of the diagram, as in the paper; its rounds take "
        f"{measured.times(SECAGG, task, TABLE_RATE, Network()).total(overlap=True):.1f} s "
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
