"""Which protocol is the fastest, by how much, and which phase decides: computed, never typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightsecagg_lab.experiments.statistics import Spread
from lightsecagg_lab.planning import choice

Breakdown = Mapping[str, Spread]
"""Seconds of a round by phase, as `timing.TimedRounds.breakdown` gives them."""


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest of several protocols in one setting."""

    name: str
    runner_up: str
    ahead: Spread
    """The runner-up's time over the winner's."""
    decisive: str
    """The phase in which it gains most on the runner-up."""
    decisive_seconds: float
    """By the medians; what training hides is not counted."""

    @property
    def clear(self) -> bool:
        """Whether the two are further apart than their quartiles."""
        return self.ahead.low > 1

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ahead": self.ahead, "clear": self.clear}


def winner(rounds: Mapping[str, Breakdown], overlap: bool) -> Winner:
    """The fastest of at least two protocols, all beside the same training."""
    total = "overlapped" if overlap else "total"
    first, second = sorted(rounds, key=lambda name: rounds[name][total].median)[:2]
    phase, saved = decisive_phase(rounds[first], rounds[second], overlap)
    ahead = rounds[second][total] / rounds[first][total]
    return Winner(first, second, ahead, phase, saved)


def decisive_phase(fast: Breakdown, slow: Breakdown, overlap: bool) -> tuple[str, float]:
    """Where the fast one gains most on the slow one, and how many seconds."""
    return choice.decisive_phase(_visible(fast, overlap), _visible(slow, overlap))


def _visible(parts: Breakdown, overlap: bool) -> dict[str, float]:
    """Medians by phase; of an offline phase beside training, what outlasts it."""
    hidden = parts["training"].median if overlap else 0.0
    return {
        "offline": max(0.0, parts["offline"].median - hidden),
        "uploading": parts["uploading"].median,
        "recovery": parts["recovery"].median,
    }
