"""Table 4 and Figure 5: where the time of a round goes, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightsecagg.params import ShareMode
from lightsecagg_lab.experiments import paper_values
from lightsecagg_lab.experiments.cells import Cell, Results
from lightsecagg_lab.experiments.report import Plot, Report, Table
from lightsecagg_lab.experiments.rounds import (
    LIGHT,
    SECAGG,
    SECAGG_PLUS,
    SHORT_KEYS,
    TABLE_RATE,
    Measured,
    round_cells,
)
from lightsecagg_lab.experiments.setups import (
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
from lightsecagg_lab.experiments.statistics import Spread, error_bars
from lightsecagg_lab.experiments.timing import TimedRounds, total
from lightsecagg_lab.experiments.winners import Breakdown, Winner, decisive_phase, winner
from lightsecagg_lab.planning import Network, Topology
from lightsecagg_lab.planning.timeline import Span, timeline


def table4_cells(profile: Profile) -> list[Cell]:
    """The CNN at three dropout rates."""
    return round_cells(profile, [TASKS["femnist"]], RATES)


def table4_report(profile: Profile, results: Results) -> Report:
    """Breakdown by phase."""
    measured, task, N = Measured(profile, results), TASKS["femnist"], profile.largest
    report = Report("table4", f"Table 4: breakdown of a round by phase, CNN, N = {N}")
    columns: list[Column] = []
    for topology in Topology:
        on = Network(topology=topology)
        rounds: dict[str, dict[float, TimedRounds]] = {}
        figures: dict[str, Any] = {}
        rows = []
        for label, (protocol, mode) in _SHOWN.items():
            times = {rate: measured.times(protocol, task, rate, on, mode=mode) for rate in RATES}
            rounds[label] = times
            parts = {rate: found.breakdown() for rate, found in times.items()}
            cold = {rate: found.cold.total(overlap=True) for rate, found in times.items()}
            figures[label] = {
                f"{rate:g}": {**parts[rate], "overlapped_cold": cold[rate]} for rate in RATES
            }
            paper = paper_values.TABLE4[protocol.value] if mode is ShareMode.SEEDED else {}
            rows += [_row(label, phase, parts, paper) for phase in _PHASES]
            rows.append([f"{label}: total, overlapped, cold"])
            rows[-1] += [f"{seconds:.2f}" for seconds in cold.values()] + ["" for _ in RATES]
        report.figures[topology.value] = figures
        report.tables.append(
            Table(
                f"Seconds ({topology}); right: the paper's, N = {PAPER_CLIENTS}, other hardware",
                ["phase", *(f"p = {rate:.0%}" for rate in RATES)]
                + [f"paper {rate:.0%}, N = {PAPER_CLIENTS}" for rate in RATES],
                rows,
            )
        )
        columns += [
            Column(topology, rate, overlap, {label: rounds[label][rate] for label in rounds})
            for rate in RATES
            for overlap in (True, False)
        ]
    report.figures["fastest"] = {column.title: column.fastest.document() for column in columns}
    report.tables.append(
        Table(
            f"The fastest protected protocol of each column, N = {N}",
            ["setting", "fastest", "seconds", "the next", "its time over the fastest's", "decides"],
            [column.verdict() for column in columns],
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
        _summary(columns),
        *method(profile),
    ]
    return report


_PHASES = {
    "offline": "offline",
    "training": "training",
    "uploading": "uploading",
    "recovery": "recovery",
    "total": "total",
    "overlapped": "total, overlapped",
}

_SHOWN = {LABELS[protocol]: (protocol, ShareMode.SEEDED) for protocol in SECURE} | {
    SHORT_KEYS: (LIGHT, ShareMode.SHORT_KEY)
}


def _row(
    label: str,
    phase: str,
    parts: Mapping[float, Breakdown],
    paper: Mapping[str, Sequence[float]],
) -> list[str]:
    theirs = [f"{value:g}" for value in paper[phase]] if phase in paper else ["" for _ in RATES]
    return [f"{label}: {_PHASES[phase]}", *(f"{parts[rate][phase]:.2f}" for rate in RATES), *theirs]


@dataclass(frozen=True, slots=True)
class Column:
    """One setting in which the protocols are compared."""

    topology: Topology
    rate: float
    overlap: bool
    rounds: Mapping[str, TimedRounds]

    @property
    def title(self) -> str:
        """In words."""
        overlapped = "overlapped" if self.overlap else "not overlapped"
        return f"{self.topology}, p = {self.rate:.0%}, {overlapped}"

    @property
    def fastest(self) -> Winner:
        """Of all protected protocols."""
        return winner(self._breakdowns(self.rounds), self.overlap)

    def verdict(self) -> list[str]:
        """Its row of the table of winners."""
        best = self.fastest
        return [
            self.title,
            best.name,
            f"{self.rounds[best.name].total(self.overlap):.2f}",
            best.runner_up,
            f"{best.ahead:.2f}" + ("" if best.clear else ", within the quartiles"),
            f"{best.decisive}: {best.decisive_seconds:.2f} s less",
        ]

    def loss(self) -> str:
        """Where LightSecAgg in seeded mode loses to a baseline, and in which phase; or nothing."""
        light = LABELS[LIGHT]
        parts = self._breakdowns(LABELS[protocol] for protocol in SECURE)
        best = winner(parts, self.overlap)
        if best.name == light:
            return ""
        phase, lost = decisive_phase(parts[best.name], parts[light], self.overlap)
        ratio = self.rounds[light].over(self.rounds[best.name], total(self.overlap))
        return (
            f"{self.title}: {light} takes {ratio:.2f} times as long as {best.name}, and loses "
            f"{lost:.2f} s in the {phase} phase."
        )

    def _breakdowns(self, names: Iterable[str]) -> dict[str, Breakdown]:
        return {name: self.rounds[name].steady().breakdown() for name in names}


def _summary(columns: Sequence[Column]) -> str:
    """Who wins how often, and where LightSecAgg in seeded mode does not beat the baselines."""
    won = Counter(column.fastest.name for column in columns)
    said = [
        f"Of {len(columns)} settings the fastest is "
        + ", ".join(f"{name} in {often}" for name, often in won.most_common())
        + "."
    ]
    losses = [loss for column in columns if (loss := column.loss())]
    if losses:
        said.append(f"Without short keys, a baseline wins in {len(losses)}.")
    return " ".join([*said, *losses])


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
        LABELS[SECAGG]: (SECAGG, ShareMode.SEEDED),
    }
    report = Report("figure5", f"Figure 5: timing diagram of one round, MobileNetV3, N = {N}")
    times = {
        label: measured.times(protocol, task, TABLE_RATE, Network(), mode=mode)
        for label, (protocol, mode) in shown.items()
    }
    spans = {
        (overlap, label): timeline(found.median_phases(), found.training, overlap)
        for overlap in (False, True)
        for label, found in times.items()
    }
    report.figures = {
        f"{label}/{'overlapped' if overlap else 'non-overlapped'}": {
            "seconds": times[label].total(overlap),
            "spans": [
                {"party": s.party, "phase": s.phase, "start": s.start, "end": s.end} for s in found
            ],
        }
        for (overlap, label), found in spans.items()
    }

    def draw(figure: Any) -> None:
        last = max(found.total(overlap=False).high for found in times.values())
        for index, overlap in enumerate((False, True)):
            axes = figure.add_subplot(2, 1, index + 1)
            lanes = [(who, party) for who in shown for party in ("client", "link", "server")]
            for row, (label, party) in enumerate(lanes):
                for span in spans[overlap, label]:
                    if span.party == party:
                        _bar(axes, row, span)
                if party == "server":
                    _end_of_round(axes, row, times[label].total(overlap))
            axes.set_yticks(range(len(lanes)), [f"{label}: {party}" for label, party in lanes])
            axes.invert_yaxis()
            axes.set_xlim(0, last * 1.16)  # room for the totals
            axes.set_title("overlapped" if overlap else "non-overlapped")
            axes.grid(visible=True, axis="x", alpha=0.3)
        figure.axes[-1].set_xlabel("seconds since the round began")
        _phase_legend(figure)

    report.plots.append(
        Plot(
            "figure5",
            "Who is busy when: the slowest client, the links and the server, each part by its "
            "median (training on a core of its own when overlapped); black: the end of the round, "
            "median and interquartile range, with its seconds",
            draw,
            (10, 9.2),
        )
    )
    report.paragraphs = [
        f"{task.title}, N = {N}, T = {privacy(N)}, D = {dropouts(N, TABLE_RATE)}, shares relayed. "
        "SecAgg, which the paper's diagram leaves out, is shown too.",
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


def _end_of_round(axes: Any, row: int, total: Spread) -> None:
    axes.errorbar(
        [total.median], [row], xerr=error_bars([total]), fmt="|", color="black", capsize=3
    )
    axes.annotate(
        f"{total.median:.1f} s",
        (total.high, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold",
    )


def _phase_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label=phase)
        for phase, colour in _PHASE_COLOURS.items()
        if phase != "agree"
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
