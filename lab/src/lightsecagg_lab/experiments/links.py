"""Real rounds over shaped links beside the forecast: whether the model of the network is right.

A federation of real programs, each in a network namespace, sends over links of stated rates and
latency (`shaped_links`, `link_rounds`). What its rounds take is compared with what `planning`
forecasts for parties that share this machine's cores. The terms of the transport are fitted to
the cells of one N (`link_fit`) and checked on those of the others.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final

from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg_lab.experiments.cells import VERSION, Cell, Document
from lightsecagg_lab.experiments.link_rounds import LinkFederation, run_rounds
from lightsecagg_lab.experiments.namespaces import check_namespaces
from lightsecagg_lab.experiments.processes import terminable
from lightsecagg_lab.experiments.setups import Profile
from lightsecagg_lab.experiments.shaped_links import raw_transfer, shaped_links
from lightsecagg_lab.planning.unit_costs import describe
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.calibration import calibrate

DIMENSION: Final = 1_206_590
"""d of the paper's CNN."""
LATENCY: Final = 20.0
"""One way, in ms."""
PAUSE: Final = 1.75
"""Seconds in place of training: connections fall silent, and TCP forgets how fast they were."""
FITTED: Final = 8
"""N of the cells that the terms of the transport are fitted to."""
PROTOCOLS: Final = (
    (ProtocolName.PLAIN, ShareMode.SEEDED),
    (ProtocolName.LIGHTSECAGG, ShareMode.SEEDED),
    (ProtocolName.LIGHTSECAGG, ShareMode.SHORT_KEY),
    (ProtocolName.SECAGG, ShareMode.SEEDED),
)
_REPEATS: Final = 3
_SHORT: Final = 1_000
"""d of the cells by which the cost of a message is told from that of a byte."""
_SHORT_OF: Final = (ProtocolName.PLAIN, ProtocolName.SECAGG)
_TRANSFERS: Final = 5


@dataclass(frozen=True, slots=True)
class LinkCell(Cell):
    """Rounds of one federation over links of one rate."""

    timed: ClassVar[bool] = True
    extras: ClassVar[tuple[str, ...]] = ("grpc",)
    protocol: ProtocolName
    share_mode: ShareMode
    clients: int
    bandwidth: float
    """Of each client, in Mbit/s each way."""
    latency: float = LATENCY
    dimension: int = DIMENSION
    pause: float = PAUSE
    repeats: int = _REPEATS
    """Rounds after the cold one."""

    @property
    def key(self) -> str:
        name = self.protocol.value.replace("+", "plus")
        if traits_of(self.protocol).share_modes:
            name += f"-{self.share_mode}"
        return (
            f"links-{name}-N{self.clients}-d{self.dimension}-{self.bandwidth:g}mbit"
            f"-{self.latency:g}ms-p{self.pause:g}-r{self.repeats}-{VERSION}"
        )

    @property
    def expected_seconds(self) -> float:
        return 4.0 + 0.4 * self.clients + (self.repeats + 1) * (self.pause + 0.9)

    @property
    def parameters(self) -> Parameters:
        """T just below N / 2, D = N / 4, U = N - D."""
        return Parameters(
            self.clients, self.clients // 2 - 1, self.clients // 4, share_mode=self.share_mode
        )

    def check(self) -> None:
        check_namespaces()

    def measure(self) -> Document:
        federation = LinkFederation(
            self.protocol, self.parameters, self.dimension, self.repeats + 1, self.pause
        )
        with terminable(), shaped_links(self.clients, self.bandwidth, self.latency) as links:
            cold, *warm = run_rounds(federation, links)
        return {
            "cell": asdict(self),
            "cold": cold,
            "rounds": {name: [each[name] for each in warm] for name in cold},
        }


@dataclass(frozen=True, slots=True)
class RawLinkCell(Cell):
    """What TCP alone does on such a link: the bytes of one update, on fresh connections."""

    timed: ClassVar[bool] = True
    bandwidth: float
    latency: float = LATENCY
    size: int = 4 * DIMENSION
    repeats: int = _TRANSFERS

    @property
    def key(self) -> str:
        return f"links-raw-{self.size}-{self.bandwidth:g}mbit-{self.latency:g}ms-{VERSION}"

    @property
    def expected_seconds(self) -> float:
        return 4.0 + self.repeats

    def check(self) -> None:
        check_namespaces()

    def measure(self) -> Document:
        with terminable(), shaped_links(1, self.bandwidth, self.latency) as links:
            raw_transfer(links, 0, self.size)  # finds its peer's address, and is not counted
            measured = [raw_transfer(links, 0, self.size) for _ in range(self.repeats)]
        return {
            "cell": asdict(self),
            "round_trips": [round_trip for round_trip, _ in measured],
            "seconds": [seconds for _, seconds in measured],
        }


@dataclass(frozen=True, slots=True)
class UnitCostCell(Cell):
    """The planner's unit costs on this machine, and how many cores the parties share."""

    timed: ClassVar[bool] = True

    @property
    def key(self) -> str:
        return f"links-unit-costs-{VERSION}"

    @property
    def expected_seconds(self) -> float:
        return 8.0

    def measure(self) -> Document:
        return {"unit_costs": describe(calibrate()), "cores": os.cpu_count() or 1}


def links_cells(profile: Profile) -> list[Cell]:
    """Each N, rate and protocol; quick: the fewest that can be fitted and checked."""
    return [
        UnitCostCell(),
        *(RawLinkCell(bandwidth) for bandwidth in bandwidths(profile)),
        *federation_cells(profile),
        *(cell for cell in fitted_cells(profile) if cell.dimension == _SHORT),
    ]


def bandwidths(profile: Profile) -> tuple[float, ...]:
    """The paper's three, in Mbit/s."""
    return (98.0, 802.0) if profile.name == "quick" else (98.0, 320.0, 802.0)


def federation_cells(profile: Profile) -> list[LinkCell]:
    """Those with parties."""
    sizes, repeats = ((4, FITTED), 2) if profile.name == "quick" else ((4, FITTED, 12), _REPEATS)
    return [
        LinkCell(protocol, mode, clients, bandwidth, repeats=repeats)
        for clients in sizes
        for bandwidth in bandwidths(profile)
        for protocol, mode in PROTOCOLS
    ]


def fitted_cells(profile: Profile) -> list[LinkCell]:
    """Those that the terms of the transport are fitted to: of one N, and of short vectors."""
    fitted = [cell for cell in federation_cells(profile) if cell.clients == FITTED]
    fastest = [cell for cell in fitted if cell.bandwidth == bandwidths(profile)[-1]]
    short = [cell for cell in fastest if cell.protocol in _SHORT_OF]
    return [*fitted, *(replace(cell, dimension=_SHORT) for cell in short)]


def title(cell: LinkCell) -> str:
    """For a row."""
    label: Any = traits_of(cell.protocol).label
    short = cell.share_mode is ShareMode.SHORT_KEY
    return f"{label} (short keys)" if short else str(label)
