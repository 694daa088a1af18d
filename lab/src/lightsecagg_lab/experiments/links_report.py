"""The report of `experiments links`: measured rounds beside forecasts, and what the terms are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.experiments.cells import Results
from lightsecagg_lab.experiments.link_fit import TERMS, Observed, fit
from lightsecagg_lab.experiments.links import (
    FITTED,
    LATENCY,
    PAUSE,
    LinkCell,
    RawLinkCell,
    UnitCostCell,
    bandwidths,
    federation_cells,
    fitted_cells,
    title,
)
from lightsecagg_lab.experiments.report import Plot, Report, Table
from lightsecagg_lab.experiments.setups import Profile
from lightsecagg_lab.experiments.statistics import Spread, error_bars
from lightsecagg_lab.planning import Federation, Network
from lightsecagg_lab.planning.planner import round_settings
from lightsecagg_lab.planning.traffic import forecast_traffic
from lightsecagg_lab.planning.transport_costs import FRAME, FREE, TransportCosts, slow_start
from lightsecagg_lab.planning.unit_costs import UnitCosts
from lightsecagg_lab.planning.work import forecast_work

FACTOR: Final = 1.3
"""How far a forecast may be from the median."""
GOAL: Final = 0.9
"""Of the cells."""
_SERVER_LINK: Final = 100_000.0
"""Mbit/s: the server's link has no bucket."""
_WORDS: Final = {
    "server_message": ("the server, for a message to or from a client", 1e3, "ms"),
    "server_byte": ("the server, for a byte to or from a client", 1e9, "ns"),
    "client_message": ("a client, for a message", 1e3, "ms"),
    "client_byte": ("a client, for a byte", 1e9, "ns"),
    "stored_upload": ("storing a short upload, one after the other", 1e3, "ms"),
    "stored_byte": ("more of it for each byte of an upload", 1e9, "ns"),
    "result_byte": ("average made and stored, per byte of an update", 1e9, "ns"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A cell beside its forecasts."""

    cell: LinkCell
    seconds: Spread
    """Of a round, without the pause; measured."""
    forecast: float
    fluid: float
    """The forecast with links that are full from the first byte, and messages that cost nothing."""
    phases: dict[Phase, tuple[float, float]]
    """Measured (the median) and forecast."""

    @property
    def ratio(self) -> float:
        """Forecast over measured."""
        return self.forecast / self.seconds.median

    @property
    def within(self) -> bool:
        """Whether the forecast is good enough."""
        return 1 / FACTOR <= self.ratio <= FACTOR


def links_report(profile: Profile, results: Results) -> Report:
    """Measured beside forecast; the terms of the transport come from the cells of one N."""
    cells = federation_cells(profile)
    source = f"fitted to the cells of N = {FITTED}"
    costs = fit([_observed(cell, results) for cell in fitted_cells(profile)], source)
    rows = [_row(cell, results, costs) for cell in cells]
    report = Report("links", "Real rounds over shaped links beside the forecast")
    report.tables = [
        *_round_tables(rows),
        _phase_table(rows),
        _terms(costs),
        _raw(profile, results),
    ]
    report.plots = [_plot(profile, rows)]
    report.figures = _figures(rows, costs)
    report.paragraphs = [_verdict(rows), *_method()]
    return report


def _observed(cell: LinkCell, results: Results) -> Observed:
    """The median round of a cell, and what its forecast is made from."""
    measured = results[cell.key]["rounds"]
    machine = results[UnitCostCell().key]
    parameters = cell.parameters
    federation = Federation(
        parameters.clients, parameters.privacy, parameters.dropouts, cell.dimension
    )
    settings = round_settings(
        federation, cell.protocol, parameters.survivors, parameters.share_mode
    )
    return Observed(
        Network(cell.bandwidth, _SERVER_LINK, cell.latency, cores=machine["cores"]),
        forecast_traffic(settings),
        forecast_work(settings, 0, UnitCosts(**machine["unit_costs"])),
        {
            Phase(name): Spread.of(values).median
            for name, values in measured.items()
            if name in _NAMES
        },
        *(Spread.of(measured[name]).median for name in ("client_cpu", "server_cpu")),
    )


_NAMES: Final = {phase.value for phase in Phase}


def _row(cell: LinkCell, results: Results, costs: TransportCosts) -> Row:
    measured, observed = results[cell.key]["rounds"], _observed(cell, results)
    rounds = [
        sum(measured[phase.value][number] for phase in observed.seconds)
        for number in range(cell.repeats)
    ]
    times = observed.times(costs)
    return Row(
        cell,
        Spread.of(rounds),
        observed.total(costs),
        observed.total(FREE),
        {phase: (seconds, times[phase].total) for phase, seconds in observed.seconds.items()},
    )


def _round_tables(rows: Sequence[Row]) -> list[Table]:
    """One for each N."""
    return [
        Table(
            f"N = {clients}: seconds of a round without training"
            + (" (the terms are fitted to these)" if clients == FITTED else ""),
            [
                "protocol, client's link",
                "measured",
                "forecast",
                "forecast / measured",
                "fluid links",
            ],
            [
                [
                    f"{title(row.cell)}, {row.cell.bandwidth:g} Mbit/s",
                    f"{row.seconds:.2f}",
                    f"{row.forecast:.2f}",
                    f"{row.ratio:.2f}",
                    f"{row.fluid:.2f}",
                ]
                for row in rows
                if row.cell.clients == clients
            ],
        )
        for clients in sorted({row.cell.clients for row in rows})
    ]


def _phase_table(rows: Sequence[Row]) -> Table:
    shown = [phase for phase in Phase if any(phase in row.phases for row in rows)]
    return Table(
        "Seconds of each phase: measured / forecast",
        ["N, protocol, client's link", *(phase.value for phase in shown)],
        [
            [
                f"{row.cell.clients}, {title(row.cell)}, {row.cell.bandwidth:g} Mbit/s",
                *(
                    "{:.2f} / {:.2f}".format(*row.phases[phase]) if phase in row.phases else ""
                    for phase in shown
                ),
            ]
            for row in rows
        ],
    )


def _terms(costs: TransportCosts) -> Table:
    return Table(
        f"The terms of the transport, {costs.source}",
        ["term", "seconds of a core, or elapsed"],
        [
            [words, f"{getattr(costs, name) * scale:.3g} {unit}"]
            for name, (words, scale, unit) in _WORDS.items()
        ],
    )


def _raw(profile: Profile, results: Results) -> Table:
    rows = []
    for bandwidth in bandwidths(profile):
        cell = RawLinkCell(bandwidth)
        found = results[cell.key]
        rate, round_trip = bandwidth * 1e6 / 8 / FRAME, 2 * cell.latency / 1e3
        expected = round_trip + slow_start(cell.size, rate, round_trip) + cell.size / rate
        rows.append(
            [
                f"{bandwidth:g} Mbit/s",
                f"{Spread.of(found['round_trips']).scaled(1e3):.1f} ms",
                f"{Spread.of(found['seconds']):.3f} s",
                f"{expected:.3f} s",
                f"{round_trip + cell.size / rate:.3f} s",
            ]
        )
    return Table(
        f"TCP alone: {4 * federation_cells(profile)[0].dimension:,} bytes on a fresh connection, "
        "and the answer",
        ["link", "round trip", "measured", "with slow start", "without"],
        rows,
    )


def _verdict(rows: Sequence[Row]) -> str:
    checked = [row for row in rows if row.cell.clients != FITTED]
    parts = []
    for name, some in (("all", rows), (f"those with N other than {FITTED}", checked)):
        good = sum(row.within for row in some)
        parts.append(f"of {name}, {good} of {len(some)} ({good / len(some):.0%})")
    met = all(sum(row.within for row in some) >= GOAL * len(some) for some in (rows, checked))
    worst = max(rows, key=lambda row: max(row.ratio, 1 / row.ratio))
    below = sum(row.fluid * FACTOR < row.seconds.median for row in rows)
    return (
        f"Forecast within {FACTOR} times of the measured median round: {'; '.join(parts)}. The "
        f"goal ({GOAL:.0%}) is {'met' if met else 'missed'}. The worst is {title(worst.cell)}, "
        f"N = {worst.cell.clients}, {worst.cell.bandwidth:g} Mbit/s: {worst.ratio:.2f}. With fluid "
        f"links and a free transport, {below} of {len(rows)} rounds take more than {FACTOR} times "
        "their forecast."
    )


def _method() -> list[str]:
    return [
        "Method. Server and clients are the programs of this package, one process each, with "
        "mutual TLS over gRPC, each in its own network namespace. Each client's link has a token "
        f"bucket in both directions. A delay line adds {LATENCY:g} ms one way before the server, "
        "whose own link has no bucket. TCP is cubic, queues drop nothing. All clients upload and "
        "answer: nobody drops. T = N/2 - 1, D = N/4, U = N - D, honest-but-curious.",
        f"An update is ready {PAUSE:g} s after the model has come, without computing, so the "
        "connections are as silent as in training. No figure includes the pause: uploads count "
        "from the moment that the last update is ready. The first round of a federation (fresh "
        "connections, cold caches) is kept apart and in no figure.",
        "All parties share this machine's cores, and the forecast allows for it: what clients "
        "compute and carry together takes no less than its sum over the cores. So these are not "
        "the seconds of N machines; they check the terms of a forecast for N machines.",
        f"The seven terms of the transport are fitted to the cells of N = {FITTED} and two more "
        "of short vectors: to the seconds of phases and the CPU time of both sides. Every forecast "
        "uses the same terms. The parties' work comes from the planner's calibration in the same "
        "run. *Fluid links* have neither slow start, headers, flow control nor transport.",
    ]


def _figures(rows: Sequence[Row], costs: TransportCosts) -> dict[str, Any]:
    return {
        "transport_costs": {name: getattr(costs, name) for name in TERMS},
        "within": sum(row.within for row in rows),
        "of": len(rows),
        "rounds": {
            row.cell.key: {
                "seconds": row.seconds,
                "forecast": row.forecast,
                "fluid": row.fluid,
                "ratio": row.ratio,
                "phases": {
                    phase.value: {"measured": measured, "forecast": forecast}
                    for phase, (measured, forecast) in row.phases.items()
                },
            }
            for row in rows
        },
    }


def _plot(profile: Profile, rows: Sequence[Row]) -> Plot:
    sizes = sorted({row.cell.clients for row in rows})
    rates = bandwidths(profile)

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(rates), sharey=True)
        for axes, rate in zip(panels, rates, strict=True):
            for index, name in enumerate(dict.fromkeys(title(row.cell) for row in rows)):
                shown = [
                    row for row in rows if title(row.cell) == name and row.cell.bandwidth == rate
                ]
                axes.errorbar(
                    sizes,
                    [row.seconds.median for row in shown],
                    yerr=error_bars([row.seconds for row in shown]),
                    color=f"C{index}",
                    marker="o",
                    capsize=3,
                    label=name,
                )
                axes.plot(sizes, [row.forecast for row in shown], color=f"C{index}", ls="--")
                axes.plot(sizes, [row.fluid for row in shown], color=f"C{index}", ls=":")
            axes.set_title(f"{rate:g} Mbit/s")
            axes.set_xticks(sizes)
            axes.set_xlabel("number of clients N")
            axes.grid(visible=True, alpha=0.25)
        panels[0].set_ylabel("seconds of a round, without training")
        panels[0].set_ylim(bottom=0)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

    return Plot(
        "links",
        "Measured (points, with quartiles), forecast (dashed) and with fluid links (dotted)",
        draw,
        (11, 4.5),
    )
