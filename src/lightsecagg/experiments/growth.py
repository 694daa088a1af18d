"""Figures 6, 8, 9 and 10: total time of a round against N, one task each."""

from __future__ import annotations

from typing import Any

from lightsecagg.experiments import paper_values
from lightsecagg.experiments.cells import Cell, Results
from lightsecagg.experiments.report import Plot, Report, Table, log_scale
from lightsecagg.experiments.rounds import (
    LIGHT,
    SECAGG,
    SECAGG_PLUS,
    SHORT_KEYS,
    Measured,
    round_cells,
)
from lightsecagg.experiments.setups import LABELS, RATES, SECURE, TASKS, Profile, method
from lightsecagg.experiments.statistics import error_bars
from lightsecagg.params import ShareMode
from lightsecagg.planning import Network

_COLOURS = {
    LIGHT.value: "#0b6e4f",
    SECAGG.value: "#b3261e",
    SECAGG_PLUS.value: "#d98324",
    "short-key": "#3b5b92",
}
_MARKERS = {0.1: "o", 0.3: "s", 0.5: "^"}

FIGURES = {"figure6": "femnist", "figure8": "mnist", "figure9": "cifar10", "figure10": "gld23k"}


def growth_cells(name: str, profile: Profile) -> list[Cell]:
    """One task, all N and all dropout rates."""
    return round_cells(profile, [TASKS[FIGURES[name]]], RATES, profile.clients)


def growth_report(name: str, profile: Profile, results: Results) -> Report:
    """Total time against N."""
    measured, task = Measured(profile, results), TASKS[FIGURES[name]]
    number = name.removeprefix("figure")
    report = Report(name, f"Figure {number}: total running time against N, {task.title}")
    shown = {p.value: (p, ShareMode.SEEDED) for p in SECURE}
    shown["short-key"] = (LIGHT, ShareMode.SHORT_KEY)
    labels = {p.value: LABELS[p] for p in SECURE} | {"short-key": SHORT_KEYS}
    series = {
        (overlap, name, rate): [
            measured.times(protocol, task, rate, Network(), N, mode).total(overlap)
            for N in profile.clients
        ]
        for overlap in (False, True)
        for name, (protocol, mode) in shown.items()
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
            for (o, who, rate), values in series.items():
                if o is overlap:
                    axes.errorbar(
                        profile.clients,
                        [each.median for each in values],
                        yerr=error_bars(values),
                        capsize=3,
                        marker=_MARKERS[rate],
                        color=_COLOURS[who],
                        linestyle={0.1: "-", 0.3: "--", 0.5: ":"}[rate],
                        label=f"{labels[who]}, p = {rate:.0%}",
                    )
            if stated:
                _paper_totals(axes, overlap)
            log_scale(axes)
            axes.set_xlabel("number of clients N")
            axes.set_ylabel("seconds per round (log scale)")
            axes.set_title("overlapped" if overlap else "non-overlapped")
            axes.set_xticks(list(profile.clients))
            axes.grid(visible=True, which="both", alpha=0.25)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            fontsize=8,
        )

    report.plots.append(
        Plot(
            name,
            f"Total time of a round, {task.title}, shares relayed; bars: interquartile range"
            + ("; hollow marks: the paper's totals at N = 200" if stated else ""),
            draw,
            (10, 5.4),
        )
    )
    report.tables.append(
        Table(
            "Seconds per round, relayed: non-overlapped / overlapped",
            ["protocol, dropout rate", *(f"N = {N}" for N in profile.clients)],
            [
                [f"{labels[p]}, {rate:.0%}"]
                + [
                    f"{apart:.2f} / {beside:.2f}"
                    for apart, beside in zip(
                        series[False, p, rate], series[True, p, rate], strict=True
                    )
                ]
                for p in shown
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
                color=_COLOURS[protocol.value],
                alpha=0.4,
                linestyle="",
            )
    axes.text(
        0.03, 0.97, "hollow: the paper, N = 200", transform=axes.transAxes, va="top", fontsize=8
    )
