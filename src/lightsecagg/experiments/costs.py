"""What a round costs whoever pays for it: CPU of fleet and server, memory, bytes, and dollars.

Seconds of waiting are in the other tables. Here is what is used up: CPU seconds of all clients
together and of the server, what the server receives and sends, and its price in a cloud.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightsecagg.experiments.cells import Cell, Document, Loads, Results, RoundCell, warm_rounds
from lightsecagg.experiments.overhead import RATE, overhead_cells
from lightsecagg.experiments.report import Report, Table
from lightsecagg.experiments.rounds import LIGHT, PLAIN, SHORT_KEYS
from lightsecagg.experiments.setups import LABELS, SECURE, TASKS, Profile, dropouts, method
from lightsecagg.experiments.statistics import Spread
from lightsecagg.params import ShareMode
from lightsecagg.planning.planner import Federation, round_costs, round_settings
from lightsecagg.planning.timeline import OFFLINE
from lightsecagg.planning.unit_costs import STATED
from lightsecagg.protocol.interface import Phase


@dataclass(frozen=True, slots=True)
class Prices:
    """What a cloud asks, in dollars: assumptions, of the order of public list prices."""

    egress: float = 0.09
    """A gigabyte (10^9 bytes) that leaves the server; what it receives is free."""
    core_hour: float = 0.05
    """An hour of one core of the server."""


def cost_cells(profile: Profile) -> list[Cell]:
    """Those of the overhead."""
    return overhead_cells(profile)


def cost_report(profile: Profile, results: Results, prices: Prices | None = None) -> Report:
    """One row per protocol."""
    prices = prices or Prices()
    N, dimension = profile.largest, TASKS["femnist"].dimension
    report = Report("costs", f"What a round costs, CNN, N = {N}, 10 % dropouts")
    broadcast = N * 4 * dimension
    shown = {LABELS[p]: (p, ShareMode.SEEDED) for p in (PLAIN, *SECURE)}
    shown[SHORT_KEYS] = (LIGHT, ShareMode.SHORT_KEY)
    rows = []
    for label, (protocol, mode) in shown.items():
        cell = profile.round(protocol, N, RATE, dimension, mode=mode)
        found = _costs(results[cell.key], N, prices) | _memory(cell)
        report.figures[label] = found
        rows.append(
            [
                label,
                f"{found['fleet_seconds']:.1f}",
                f"{found['server_seconds']:.2f}",
                f"{found['received'].scaled(1e-6):.0f}",
                f"{found['sent'].scaled(1e-6):.0f}",
                f"{found['client_memory'] / 1e6:.0f}",
                f"{found['server_memory'] / 1e6:.0f}",
                f"{found['egress_dollars'].scaled(100):.3f}",
                f"{found['core_dollars'].scaled(100):.4f}",
            ]
        )
    model = broadcast / 1e9 * prices.egress
    report.figures |= {"model_broadcast_dollars": model, "prices": asdict(prices)}
    report.tables.append(
        Table(
            "Of one round; training and the model's own broadcast are not counted",
            [
                "protocol",
                "CPU of all clients (s)",
                "CPU of the server (s)",
                "server receives (MB)",
                "server sends (MB)",
                "memory of a client (MB)",
                "memory of the server (MB)",
                "egress (cents)",
                "server's core (cents)",
            ],
            rows,
        )
    )
    report.paragraphs = [
        f"Prices are assumptions, not looked up: ${prices.egress:g} a gigabyte that leaves the "
        f"server, nothing for what it receives, ${prices.core_hour:g} an hour of one of its cores "
        "(`--egress-price`, `--core-price`). Sending the model itself to all clients, the same "
        f"with every protocol, is {broadcast / 1e6:,.0f} MB or {100 * model:.2f} cents. "
        "CPU of all clients is the median client's, times those that take part in a phase; "
        "shares are relayed. Memory is the planner's forecast of the peak, program included "
        "(docs/planning.md).",
        *method(profile),
    ]
    return report


def _costs(document: Document, clients: int, prices: Prices) -> dict[str, Any]:
    rounds = warm_rounds(document)
    sent = Spread.of(_sum(each, "server_sent", "server_shares_sent") for each in rounds)
    server = Spread.of(_sum(each, "server_seconds") for each in rounds)
    return {
        "fleet_seconds": Spread.of(_fleet(each, clients) for each in rounds),
        "server_seconds": server,
        "received": Spread.of(
            _sum(each, "server_received", "server_shares_received") for each in rounds
        ),
        "sent": sent,
        "egress_dollars": sent.scaled(prices.egress / 1e9),
        "core_dollars": server.scaled(prices.core_hour / 3600),
    }


def _fleet(loads: Loads, clients: int) -> float:
    """CPU seconds of all clients: those that drop do so before their upload."""
    left = clients - dropouts(clients, RATE)
    return sum(
        figures["client_seconds_median"] * (clients if Phase(phase) in OFFLINE else left)
        for phase, figures in loads.items()
    )


def _sum(loads: Loads, *names: str) -> float:
    return sum(figures[name] for figures in loads.values() for name in names)


def _memory(cell: RoundCell) -> dict[str, int]:
    federation = Federation(cell.clients, cell.privacy, cell.dropouts, cell.dimension)
    settings = round_settings(federation, cell.protocol, cell.survivors, cell.share_mode)
    phases = round_costs(federation, settings, range(cell.dropouts), STATED).phases.values()
    return {
        "client_memory": max(phase.memory.client for phase in phases),
        "server_memory": max(phase.memory.server for phase in phases),
    }
