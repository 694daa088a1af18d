"""What goes wrong in a simulated round: clients that vanish, are late, or are heard twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from lightsecagg.errors import ParameterError
from lightsecagg.params import ThreatModel, check_integer
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning.traffic import PHASES


class Moment(StrEnum):
    """When, within a phase, a client vanishes."""

    BEFORE = "before"
    """It has taken part in every phase before, and does nothing in this one."""
    DURING = "during"
    """It does its work, but half of what it sends is lost; a single message is cut in two."""
    AFTER = "after"
    """Everything that it sends in this phase arrives; then it is gone."""


@dataclass(frozen=True, slots=True)
class Drop:
    """`count` clients, chosen at random, vanish at one moment of one phase."""

    phase: Phase
    count: int
    moment: Moment = Moment.BEFORE

    def __post_init__(self) -> None:
        check_integer("dropped clients", self.count, 0)
        if self.phase not in PHASES:
            raise ParameterError(f"clients can drop in {', '.join(PHASES)}, not in {self.phase}")

    @classmethod
    def parse(cls, text: str) -> Drop:
        """`PHASE[:MOMENT]=COUNT`, such as `upload=3` or `share:during=1`."""
        place, equals, count = text.partition("=")
        phase, colon, moment = place.partition(":")
        usage = (
            f"{text!r} is not PHASE[:MOMENT]=COUNT; PHASE is one of {', '.join(PHASES)}, "
            f"MOMENT one of {', '.join(Moment)}, COUNT a number of clients; e.g. upload=3"
        )
        if not equals or not (count.isascii() and count.isdigit()) or phase not in tuple(PHASES):
            raise ParameterError(usage)
        if colon and moment not in tuple(Moment):
            raise ParameterError(usage)
        return cls(Phase(phase), int(count), Moment(moment) if colon else Moment.BEFORE)

    def __str__(self) -> str:
        return f"{self.phase}:{self.moment}={self.count}"


@dataclass(frozen=True, slots=True)
class Faults:
    """Who misbehaves when, client by client; `Faults()` is a round without any fault."""

    drops: Mapping[int, tuple[Phase, Moment]] = field(default_factory=dict)
    """Client -> where it vanishes."""
    late: Mapping[int, Phase] = field(default_factory=dict)
    """Client -> the phase from which on its messages come after the phase has closed."""
    duplicates: frozenset[int] = frozenset()
    """Clients whose link delivers every message twice, in both directions."""
    silent: bool = False
    """Nobody notices a vanished client: the deadline of the phase must fire.

    Otherwise its connection breaks, and the server is told.
    """


def choose_faults(
    clients: Iterable[int],
    drops: Iterable[Drop],
    threat_model: ThreatModel,
    generator: np.random.Generator,
) -> Faults:
    """Choose at random who drops; every client drops at most once."""
    wanted = list(drops)
    pool = list(clients)
    total = sum(drop.count for drop in wanted)
    if total > len(pool):
        raise ParameterError(f"{total} clients should drop, but there are only {len(pool)}")
    for drop in wanted:
        if drop.phase is Phase.AGREE and threat_model is not ThreatModel.MALICIOUS_SERVER:
            raise ParameterError(
                f"nobody can drop at {drop}: the agree phase exists in malicious-server mode only"
            )
    chosen = iter(generator.permutation(pool).tolist())
    return Faults(
        drops={
            next(chosen): (drop.phase, drop.moment) for drop in wanted for _ in range(drop.count)
        }
    )
