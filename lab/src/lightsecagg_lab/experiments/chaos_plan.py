"""What is to happen to a federation, and what was found."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from lightsecagg.drivers.federation.demo_config import SERVER, Kill
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg_lab.experiments.round_audit import RoundAudit

KINDS = ("server_kills", "client_kills", "stops", "partitions", "disks", "flips", "changes")
"""Of faults; see `chaos`."""

_MUST_NOT = ("unnoticed", "accepted", "hangs", "orphans")
"""Of the outcomes."""


@dataclass(frozen=True, slots=True)
class RoundChaos:
    """What to try; numbers of faults, or, if `seconds` are given, how often one comes beside the
    others."""

    server_kills: int = 240
    client_kills: int = 80
    stops: int = 30
    partitions: int = 20
    disks: int = 15
    flips: int = 20
    changes: int = 10
    seconds: float | None = None
    clients: int = 6
    privacy: int = 1
    dropouts: int = 2
    dimension: int = 100
    share_mode: ShareMode = ShareMode.SEEDED
    pause: float = 1.0
    """Seconds between two faults, at most, beside the wait for a phase to begin."""
    patience: float = 120.0
    """Seconds without a sum that are a hang."""
    seed: int = 0
    """Steers what happens, to whom and when; never a mask."""


@dataclass(frozen=True, slots=True)
class BufferChaos:
    """What to try in the asynchronous mode: kills alone."""

    server_kills: int = 200
    client_kills: int = 100
    clients: int = 8
    privacy: int = 2
    dropouts: int = 2
    buffer: int = 4
    dimension: int = 1000
    share_mode: ShareMode = ShareMode.SEEDED
    threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER
    """With a malicious server, T + 2 owners share a model: fewer are dropped (S56)."""
    pause: float = 3.0
    """Seconds between two kills, at most; half of it on average."""
    patience: float = 120.0
    timeout: float = 3600.0
    seed: int = 0
    """Steers vectors, and who is killed when."""


def plan_kills(chaos: BufferChaos) -> tuple[Kill, ...]:
    """Who is killed, in which order, how long after the kill before."""
    rng = random.Random(chaos.seed)  # noqa: S311 - who is killed is no secret
    victims = [SERVER] * chaos.server_kills
    victims += [rng.randrange(chaos.clients) for _ in range(chaos.client_kills)]
    rng.shuffle(victims)
    # Before the first sum there is nothing to lose.
    return tuple(Kill(victim, 1, rng.uniform(0, chaos.pause)) for victim in victims)


@dataclass(slots=True)
class Findings:
    """What was done, and what came of it."""

    done: Counter[str] = field(default_factory=Counter)
    """Faults, by kind."""
    killed_in: Counter[str] = field(default_factory=Counter)
    """The phases in which the server was killed."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """What was noticed, refused or borne, by kind."""
    audits: list[RoundAudit] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    """What nobody has foreseen; there must be none."""

    @property
    def faults_found(self) -> int:
        """How often something came of it that must not, beside what the audits tell."""
        return len(self.surprises) + sum(self.outcomes[name] for name in _MUST_NOT)

    def to_json(self, chaos: RoundChaos, seconds: float, *, interrupted: bool) -> dict[str, Any]:
        """As one document."""
        total: dict[str, Any] = {}
        for each in self.audits:
            for name, value in asdict(each).items():
                if isinstance(value, dict):
                    total[name] = dict(Counter(total.get(name, {})) + Counter(value))
                else:
                    total[name] = total.get(name, 0) + value
        bad = {name: self.outcomes[name] for name in _MUST_NOT}
        return {
            "clean": all(each.clean for each in self.audits) and not self.faults_found,
            **{name: self.done[name] for name in KINDS},
            "killed_in": dict(self.killed_in),
            "campaigns": len(self.audits),
            **total,
            **bad,
            **{name: count for name, count in self.outcomes.items() if name not in _MUST_NOT},
            "surprises": self.surprises,
            "seconds": seconds,
            "interrupted": interrupted,
            "plan": asdict(chaos),
        }


class Schedule:
    """Which fault comes next."""

    def __init__(self, chaos: RoundChaos, rng: random.Random) -> None:
        self._rng = rng
        self._counts = {kind: getattr(chaos, kind) for kind in KINDS}
        self._left = [kind for kind, count in self._counts.items() for _ in range(count)]
        rng.shuffle(self._left)
        self._until = None if chaos.seconds is None else time.monotonic() + chaos.seconds
        self.taken = 0

    @property
    def over(self) -> bool:
        if self._until is not None:
            return time.monotonic() >= self._until
        return not self._left

    def take(self) -> str:
        self.taken += 1
        if self._until is None:
            return self._left.pop()
        (kind,) = self._rng.choices(list(self._counts), list(self._counts.values()))
        return kind
