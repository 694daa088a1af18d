"""Figures 6, 8, 9 and 10: total time of a round against N, one task each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightsecagg.params import ShareMode
from lightsecagg_lab.experiments import paper_values
from lightsecagg_lab.experiments.cells import Cell, Results, RoundCell
from lightsecagg_lab.experiments.report import Plot, Report, Table, log_scale
from lightsecagg_lab.experiments.rounds import (
    LIGHT,
    SECAGG,
    SECAGG_PLUS,
    SHORT_KEYS,
    TABLE_RATE,
    Measured,
)
from lightsecagg_lab.experiments.setups import (
    FEWEST,
    LABELS,
    PAPER_CLIENTS,
    RATES,
    SECURE,
    TASKS,
    Profile,
    method,
)
from lightsecagg_lab.experiments.statistics import error_bars
from lightsecagg_lab.experiments.timing import timed_rounds
from lightsecagg_lab.planning import Network
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

_COLOURS = {
    LIGHT.value: "#0b6e4f",
    SECAGG.value: "#b3261e",
    SECAGG_PLUS.value: "#d98324",
    "short-key": "#3b5b92",
}

FIGURES = {"figure6": "femnist", "figure8": "mnist", "figure9": "cifar10", "figure10": "gld23k"}


_LEFT_OUT = {"figure9": 1, "figure10": 2}
"""So many of the largest N a recording has only at the rate of Table 2, and smaller ones FEWEST
times: they take too long."""


def sizes(name: str, profile: Profile, rate: float) -> tuple[int, ...]:
    """N of the points at this dropout rate."""
    if profile.name != "record" or rate == TABLE_RATE:
        return profile.clients
    return profile.clients[: len(profile.clients) - _LEFT_OUT.get(name, 0)]


def growth_cells(name: str, profile: Profile) -> list[Cell]:
    """One task, all N and all dropout rates."""
    task = TASKS[FIGURES[name]]
    return [
        profile.training(task),
        *(
            _cell(name, profile, shown, N, rate)
            for rate in RATES
            for N in sizes(name, profile, rate)
            for shown in _SHOWN.values()
        ),
    ]


_SHOWN = {p.value: (p, ShareMode.SEEDED) for p in SECURE} | {
    "short-key": (LIGHT, ShareMode.SHORT_KEY)
}


def _cell(
    name: str, profile: Profile, shown: tuple[ProtocolName, ShareMode], N: int, rate: float
) -> RoundCell:
    protocol, mode = shown
    if profile.name == "record" and name in _LEFT_OUT and profile.largest > N:
        profile = replace(profile, repeats=FEWEST)
    return profile.round(protocol, N, rate, TASKS[FIGURES[name]].dimension, mode=mode)


def growth_report(name: str, profile: Profile, results: Results) -> Report:
    """Total time against N, for each N that was measured."""
    measured, task = Measured(profile, results), TASKS[FIGURES[name]]
    number, trainings = name.removeprefix("figure"), measured.trainings(task)
    report = Report(name, f"Figure {number}: total running time against N, {task.title}")
    labels = {p.value: LABELS[p] for p in SECURE} | {"short-key": SHORT_KEYS}
    series = {
        (overlap, who, rate): {
            N: timed_rounds(
                measured.round(_cell(name, profile, shown, N, rate)), Network(), trainings
            ).total(overlap)
            for N in sizes(name, profile, rate)
        }
        for overlap in (False, True)
        for who, shown in _SHOWN.items()
        for rate in RATES
    }
    report.figures = {
        "clients": list(profile.clients),
        "seconds": {f"{p}/{rate:g}/{o}": found for (o, p, rate), found in series.items()},
    }
    stated = name == "figure6"

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, len(RATES), sharex=True, sharey="row")
        for axes_row, overlap in zip(panels, (False, True), strict=True):
            for axes, rate in zip(axes_row, RATES, strict=True):
                for who, label in labels.items():
                    found = series[overlap, who, rate]
                    axes.errorbar(
                        list(found),
                        [each.median for each in found.values()],
                        yerr=error_bars(list(found.values())),
                        capsize=3,
                        marker="o",
                        markersize=4,
                        color=_COLOURS[who],
                        linestyle="--" if who == "short-key" else "-",  # curves may coincide
                        label=label,
                    )
                log_scale(axes)
                axes.set_xticks(list(profile.clients))
                axes.grid(visible=True, which="both", alpha=0.25)
                axes.set_title(f"p = {rate:.0%}, {'' if overlap else 'non-'}overlapped")
            axes_row[0].set_ylabel("seconds per round (log scale)")
        for axes in panels[-1]:
            axes.set_xlabel("number of clients N")
        figure.legend(
            *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4
        )

    report.plots.append(
        Plot(
            name,
            f"Total time of a round, {task.title}, shares relayed; bars: interquartile range",
            draw,
            (11, 7),
        )
    )
    report.tables.append(
        Table(
            "Seconds per round, relayed: non-overlapped / overlapped",
            ["protocol, dropout rate", *(f"N = {N}" for N in profile.clients)]
            + [f"paper, N = {PAPER_CLIENTS}"] * stated,
            [
                [f"{labels[p]}, {rate:.0%}"]
                + [
                    f"{series[False, p, rate][N]:.2f} / {series[True, p, rate][N]:.2f}"
                    if N in series[True, p, rate]
                    else "-"
                    for N in profile.clients
                ]
                + [_papers(protocol, rate, mode)] * stated
                for p, (protocol, mode) in _SHOWN.items()
                for rate in RATES
            ],
        )
    )
    absent = "" if stated else " The paper's text gives no numbers for this figure."
    shortest = min((sizes(name, profile, rate) for rate in RATES), key=len)
    missing = profile.clients[len(shortest) :]
    fewer = ""
    if missing:
        fewer = (
            f" N = {', '.join(map(str, missing))} is recorded at p = {TABLE_RATE:.0%} only; "
            f"`lightsecagg experiments {name}` measures the rest."
        )
    report.paragraphs = [f"Client links of 320 Mbit/s.{absent}{fewer}", *method(profile)]
    return report


def _papers(protocol: ProtocolName, rate: float, mode: ShareMode) -> str:
    """The paper's two totals, or nothing where it gives none."""
    if mode is not ShareMode.SEEDED:
        return ""
    stated, at = paper_values.TABLE4[protocol.value], RATES.index(rate)
    return f"{stated['total'][at]:g} / {stated['overlapped'][at]:g}"
