"""Impact of U (Section 7.2): round time against U, and how good the planner's choice is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lightsecagg.params import ShareMode
from lightsecagg_lab.experiments import paper_values
from lightsecagg_lab.experiments.cells import Cell, Results, RoundCell
from lightsecagg_lab.experiments.report import Plot, Report, Table, log_scale
from lightsecagg_lab.experiments.rounds import LIGHT, Measured
from lightsecagg_lab.experiments.setups import (
    SERVER_BANDWIDTH,
    TASKS,
    UNLIMITED,
    Profile,
    dropouts,
    method,
    privacy,
)
from lightsecagg_lab.experiments.statistics import Spread, error_bars
from lightsecagg_lab.experiments.timing import TimedRounds, timed_rounds, total
from lightsecagg_lab.planning import Federation, Network
from lightsecagg_lab.planning.planner import recommend_survivors

RATE = 0.1
BANDWIDTHS = tuple(paper_values.TABLE3)
_SERVERS = {SERVER_BANDWIDTH: "server 10 Gbit/s", UNLIMITED: "server link unlimited"}
WITHIN = 1.05
_STEPS = 6
_MARKS = dict(zip(BANDWIDTHS, ("o", "s", "x"), strict=True))


def sweep_of_survivors(profile: Profile) -> list[int]:
    """U from just above T to N - D."""
    N = profile.largest
    T, largest = privacy(N), N - dropouts(N, RATE)
    spaced = {round(T + (largest - T) * k / _STEPS) for k in range(1, _STEPS + 1)}
    return sorted({T + max(2, (largest - T) // 16), *spaced})


def impact_cells(profile: Profile) -> list[Cell]:
    """LightSecAgg in seeded mode for many U, and in the paper's mode for a few."""
    task, N = TASKS["femnist"], profile.largest
    found: list[Cell] = [profile.training(task)]
    found += [profile.round(LIGHT, N, RATE, task.dimension, U) for U in sweep_of_survivors(profile)]
    return found + [_paper_mode(profile, U) for U in _paper_survivors(profile)]


def _paper_survivors(profile: Profile) -> list[int]:
    """The paper's U = 0.7 N, and the largest."""
    N = profile.largest
    return [int(0.7 * N), N - dropouts(N, RATE)]


def _paper_mode(profile: Profile, survivors: int) -> RoundCell:
    task = TASKS["femnist"]
    return profile.round(LIGHT, profile.largest, RATE, task.dimension, survivors, ShareMode.PAPER)


def _name(bandwidth: float, server: float, overlap: bool) -> str:
    return f"{bandwidth:g}/{server:g}/{'overlapped' if overlap else 'non-overlapped'}"


def _fastest(curve: Sequence[Spread]) -> int:
    """Where the curve is lowest."""
    return min(range(len(curve)), key=lambda index: curve[index].median)


def impact_report(profile: Profile, results: Results) -> Report:
    """Round time against U, and how good the planner's U is."""
    measured, task, N = Measured(profile, results), TASKS["femnist"], profile.largest
    T, D = privacy(N), dropouts(N, RATE)
    sweep = sweep_of_survivors(profile)
    report = Report("impact-of-u", f"Impact of U: round time of LightSecAgg, CNN, N = {N}")
    trainings = measured.trainings(task)

    def rounds(cell: RoundCell, bandwidth: float, server: float) -> TimedRounds:
        return timed_rounds(measured.round(cell), Network(bandwidth, server), trainings)

    def seconds(cell: RoundCell, bandwidth: float, server: float, overlap: bool) -> Spread:
        return rounds(cell, bandwidth, server).total(overlap)

    def seeded(U: int) -> RoundCell:
        return profile.round(LIGHT, N, RATE, task.dimension, U)

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
                training_seconds=statistics.median(trainings),
            )
        )[0]
        for server in _SERVERS
        for bandwidth in BANDWIDTHS
    }
    ratios = {
        (b, s, o): rounds(seeded(planned[b, s]), b, s).over(
            rounds(seeded(sweep[_fastest(curves[b, s, o])]), b, s), total(o)
        )
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
        panels = figure.subplots(1, len(_SERVERS), sharey=True)
        for axes, (server, title) in zip(panels, _SERVERS.items(), strict=True):
            for b in BANDWIDTHS:
                for overlap, style in ((False, "-"), (True, ":")):
                    label = f"{b:g} Mbit/s" + (", overlapped" if overlap else "")
                    values = curves[b, server, overlap]
                    axes.errorbar(
                        sweep,
                        [each.median for each in values],
                        yerr=error_bars(values),
                        fmt=style,
                        elinewidth=1,
                        capsize=2,
                        color=colours[b],
                        marker=_MARKS[b],
                        markersize=5,
                        markerfacecolor="none",  # curves may coincide
                        label=label,
                    )
                    axes.plot(
                        [planned[b, server]],
                        [seconds(seeded(planned[b, server]), b, server, overlap).median],
                        marker="*",
                        markersize=13,
                        color="black",
                        linestyle="",
                        label="planner's U" if (b, overlap) == (802.0, True) else "_nolegend_",
                    )
            axes.axvline(0.7 * N, color="#bbbbbb", linestyle="--", label="the paper's U = 0.7 N")
            log_scale(axes)
            axes.set_xlabel("U, answers needed to recover")
            axes.set_ylabel("seconds per round (log scale)")
            axes.set_title(title)
            axes.grid(visible=True, which="both", alpha=0.25)
        figure.axes[0].legend(fontsize=8)

    report.plots.append(
        Plot(
            "impact-of-u",
            "Round time against U, seeded mode, shares relayed; bars: interquartile range",
            draw,
            (11, 5),
        )
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
    worst = max(ratios.values(), key=lambda ratio: ratio.median)
    best = sorted({sweep[_fastest(values)] for values in curves.values()})
    report.figures |= {"worst_planned_over_best": worst, "best": best}
    report.paragraphs = [
        f"N = {N}, T = {T}, D = {D}. The planner's U is "
        f"{', '.join(map(str, sorted(set(planned.values()))))} at all bandwidths; its round takes "
        f"at most {worst:.3f} times the best of the sweep (goal: {WITHIN}): "
        f"{'met' if worst.median <= WITHIN else 'NOT met'}. By the medians the best U of the sweep "
        f"is {', '.join(map(str, best))} (N - D = {N - D}; the paper's is 0.7 N = {0.7 * N:g}).",
        *method(profile),
    ]
    return report
