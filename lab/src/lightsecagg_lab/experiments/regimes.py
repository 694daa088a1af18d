"""The regime map: which protocol is the fastest where, by how much, and what protection costs.

The rounds of Figure 6 (the CNN, T = N/2) and plain rounds beside them, put on servers with several
numbers of cores and several links, beside trainings of several lengths. Nothing is measured for the
map but those rounds: cores, links and training are the model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from lightsecagg.params import ShareMode
from lightsecagg_lab.experiments.cells import Cell, Results
from lightsecagg_lab.experiments.report import Plot, Report, Table
from lightsecagg_lab.experiments.rounds import (
    LIGHT,
    PLAIN,
    SECAGG,
    SECAGG_PLUS,
    SHORT_KEYS,
    Measured,
    round_cells,
)
from lightsecagg_lab.experiments.setups import LABELS, RATES, SECURE, TASKS, Profile, method
from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.experiments.timing import TimedRounds, timed_rounds, total
from lightsecagg_lab.experiments.winners import Winner, winner
from lightsecagg_lab.planning import Network
from lightsecagg_lab.planning.transport_costs import FREE, STATED, TransportCosts
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

CORES = (1, 8, 32)
"""Of the server."""
LINKS = (1_000.0, 10_000.0, 100_000.0)
"""The server's, in Mbit/s."""
TRAININGS = (0.0, 5.0, 60.0)
"""Seconds of local training."""


_COLOURS = {LABELS[LIGHT]: "#0b6e4f", LABELS[SECAGG]: "#b3261e", LABELS[SECAGG_PLUS]: "#d98324"}
_SHORT_NAMES = {LABELS[LIGHT]: "L", LABELS[SECAGG]: "S", LABELS[SECAGG_PLUS]: "S+"}
_CLOSE = 1.02
"""Rounds this close to each other decide nothing."""
_ALIKE = 1.05
"""Short keys are marked where a round with them is this much shorter."""


@dataclass(frozen=True, slots=True)
class Regime:
    """One setting."""

    clients: int
    rate: float
    training: float
    cores: int
    link: float

    @property
    def title(self) -> str:
        """In words."""
        return (
            f"N = {self.clients}, p = {self.rate:.0%}, training {self.training:g} s, "
            f"{_cores(self.cores)}, {_gigabits(self.link)}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Who wins in a regime, of the protected protocols that rest on no further assumption."""

    best: Winner
    seconds: float
    gain: Spread
    """The best baseline's time over LightSecAgg's: below 1 it loses."""
    overhead: Spread
    """The winner's time over that of unprotected FedAvg."""
    short_keys: Spread
    """The winner's time over LightSecAgg's with short keys, which are experimental."""

    @property
    def alike(self) -> bool:
        """Whether LightSecAgg and the best baseline are too close to prefer one."""
        return 1 in self.gain or 1 / _CLOSE < self.gain.median < _CLOSE

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "fastest": self.best.document(),
            "seconds": self.seconds,
            "gain_over_best_baseline": self.gain,
            "alike": self.alike,
            "overhead_over_plain": self.overhead,
            "winner_over_short_keys": self.short_keys,
        }


def regime_cells(profile: Profile) -> list[Cell]:
    """Those of Figure 6, and plain rounds."""
    return round_cells(
        profile, [TASKS["femnist"]], RATES, profile.clients, protocols=(*SECURE, PLAIN)
    )


def regime_report(profile: Profile, results: Results) -> Report:
    """The map, as a picture and as a table."""
    measured = Measured(profile, results)
    regimes = [Regime(*each) for each in product(profile.clients, RATES, TRAININGS, CORES, LINKS)]
    found = {regime: _outcome(measured, regime, STATED) for regime in regimes}
    free = {regime: _outcome(measured, regime, FREE) for regime in regimes}
    report = Report("regimes", "Which protocol where: servers, links, dropouts, training and N")
    report.figures = {regime.title: outcome.document() for regime, outcome in found.items()}
    won = Counter(outcome.best.name for outcome in found.values())
    report.figures["won"] = dict(won)
    report.figures["free transport"] = {
        regime.title: outcome.document() for regime, outcome in free.items()
    }
    report.plots += [
        Plot(
            name,
            f"{transport}. "
            "Colour and letter: the fastest protected protocol (pale: LightSecAgg and the best "
            f"baseline are alike, within {_CLOSE - 1:.0%} or the quartiles). Large number: the "
            "best baseline's time over LightSecAgg's, below 1 it loses. Small number: the winner's "
            "time over that of unprotected FedAvg. Ring: LightSecAgg with short keys "
            f"(experimental) is at least {_ALIKE - 1:.0%} faster still.",
            partial(_draw, profile=profile, found=outcomes),
            (17, 8.2),
        )
        for name, transport, outcomes in (
            ("regimes", "With the cost of this package's transport", found),
            ("regimes-free", "With a transport that costs nothing, as in the paper's model", free),
        )
    ]
    report.tables = [_by_axis(found)]
    report.tables += [_table(profile, found, clients) for clients in profile.clients]
    report.paragraphs = [
        f"Of {len(found)} settings the fastest protected protocol is "
        + ", ".join(f"{name} in {often}" for name, often in won.most_common())
        + "; with a transport that costs nothing it is "
        + ", ".join(
            f"{name} in {often}"
            for name, often in Counter(each.best.name for each in free.values()).most_common()
        )
        + ".",
        "The CNN (d = 1,206,590), T = N/2, client links of 320 Mbit/s, shares relayed, training "
        "beside the offline phase. The server's cores share its work on vectors, which is cut "
        "into columns: summing uploads and recovering. Relaying and bookkeeping stay on one core. "
        "The model of docs/planning.md applies links and cores to the measured rounds; "
        "`lightsecagg plan` applies it to your own setting.",
        *method(profile),
    ]
    return report


def _outcome(measured: Measured, regime: Regime, transport: TransportCosts) -> Outcome:
    times = partial(_times, measured, regime, transport)
    rounds = {LABELS[p]: times(p) for p in SECURE}
    plain, short = times(PLAIN), times(LIGHT, ShareMode.SHORT_KEY)
    best = winner({name: found.breakdown() for name, found in rounds.items()}, overlap=True)
    light, beside = rounds.pop(LABELS[LIGHT]), total(overlap=True)
    baseline = min(rounds.values(), key=lambda found: found.total(overlap=True).median)
    fastest = light if best.name == LABELS[LIGHT] else rounds[best.name]
    return Outcome(
        best=best,
        seconds=fastest.total(overlap=True).median,
        gain=baseline.over(light, beside),
        overhead=fastest.over(plain, beside),
        short_keys=fastest.over(short, beside),
    )


def _times(
    measured: Measured,
    regime: Regime,
    transport: TransportCosts,
    protocol: ProtocolName,
    mode: ShareMode = ShareMode.SEEDED,
) -> TimedRounds:
    cell = measured.profile.round(
        protocol, regime.clients, regime.rate, TASKS["femnist"].dimension, mode=mode
    )
    network = Network(server_bandwidth=regime.link, transport=transport)
    return timed_rounds(measured.round(cell), network, [regime.training], regime.cores)


def _by_axis(found: Mapping[Regime, Outcome]) -> Table:
    """How often each protocol wins, by one axis at a time: which of them decide."""
    rows = []
    for name, title in _AXES.items():
        for value in dict.fromkeys(getattr(regime, name) for regime in found):
            here = [each for regime, each in found.items() if getattr(regime, name) == value]
            won = Counter(outcome.best.name for outcome in here)
            rows.append([title(value), *(f"{won[LABELS[p]]} of {len(here)}" for p in SECURE)])
    return Table("Settings won, by one axis at a time", ["", *(LABELS[p] for p in SECURE)], rows)


_AXES: dict[str, Callable[[Any], str]] = {
    "clients": lambda clients: f"N = {clients}",
    "rate": lambda rate: f"p = {rate:.0%}",
    "training": lambda seconds: f"training {seconds:g} s",
    "cores": lambda cores: f"server: {_cores(cores)}",
    "link": lambda link: f"server: {_gigabits(link)}",
}


def _table(profile: Profile, found: Mapping[Regime, Outcome], clients: int) -> Table:
    columns = list(product(CORES, LINKS))
    rows = []
    for rate, training in product(RATES, TRAININGS):
        outcomes = [found[Regime(clients, rate, training, cores, link)] for cores, link in columns]
        rows.append(
            [f"p = {rate:.0%}, training {training:g} s"]
            + [
                f"{outcome.best.name}, {outcome.gain.median:.2f}, {outcome.overhead.median:.2f}"
                for outcome in outcomes
            ]
        )
    return Table(
        f"N = {clients}: the fastest; the best baseline's time over LightSecAgg's; the fastest's "
        "over unprotected FedAvg's",
        ["", *(f"{_cores(cores)}, {_gigabits(link)}" for cores, link in columns)],
        rows,
    )


def _draw(figure: Any, profile: Profile, found: Mapping[Regime, Outcome]) -> None:
    """Blocks by N, in them columns by dropout rate and rows by training."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = list(product(profile.clients, RATES))
    panels = figure.subplots(len(TRAININGS), len(columns), squeeze=False)
    for row, training in enumerate(TRAININGS):
        for column, (clients, rate) in enumerate(columns):
            axes = panels[row][column]
            for (y, cores), (x, link) in product(enumerate(CORES), enumerate(LINKS)):
                _tile(axes, x, y, found[Regime(clients, rate, training, cores, link)])
            axes.set_xlim(-0.5, len(LINKS) - 0.5)
            axes.set_ylim(-0.5, len(CORES) - 0.5)
            axes.tick_params(length=0)
            last, first = row == len(TRAININGS) - 1, column == 0
            axes.set_xticks(
                range(len(LINKS)), [f"{link / 1e3:g}" for link in LINKS] if last else []
            )
            axes.set_yticks(range(len(CORES)), CORES if first else [])
            if row == 0:
                axes.set_title(f"N = {clients}, p = {rate:.0%}", fontsize=10)
            if first:
                axes.set_ylabel(f"training {training:g} s\nserver cores", fontsize=9)
            if last:
                axes.set_xlabel("server Gbit/s", fontsize=9)
    handles: list[Any] = [
        Patch(color=colour, label=f"{_SHORT_NAMES[name]}: {name}")
        for name, colour in _COLOURS.items()
    ]
    handles.append(
        Line2D(
            [],
            [],
            marker="o",
            markerfacecolor="none",
            linestyle="",
            color="black",
            label=f"{SHORT_KEYS}: faster still",
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _tile(axes: Any, x: int, y: int, outcome: Outcome) -> None:
    from matplotlib.patches import Rectangle

    best = outcome.best
    axes.add_patch(
        Rectangle(
            (x - 0.5, y - 0.5),
            1,
            1,
            facecolor=_COLOURS[best.name],
            alpha=0.55 if outcome.alike else 1.0,
            edgecolor="white",
        )
    )
    ink = "black" if outcome.alike else "white"  # on pale ground, on full colour
    plain = {"color": ink, "ha": "center", "va": "center"}
    name = _SHORT_NAMES[best.name]
    axes.text(x, y + 0.16, f"{name} {_number(outcome.gain)}", fontsize=8.5, weight="bold", **plain)
    axes.text(x, y - 0.24, _number(outcome.overhead), fontsize=6.5, **plain)
    if outcome.short_keys.median >= _ALIKE:
        axes.plot([x + 0.36], [y - 0.32], "o", mfc="none", color=ink, markersize=4)


def _number(ratio: Spread) -> str:
    return f"{ratio.median:.1f}" if ratio.median >= 1.995 else f"{ratio.median:.2f}"


def _cores(cores: int) -> str:
    return f"{cores} core" + "s" * (cores > 1)


def _gigabits(link: float) -> str:
    return f"{link / 1e3:g} Gbit/s"
