"""Which protocol to take, and why: the fastest protected one of a plan, and the phase that decides.

The plan's model is that of the regime map (`experiments regimes`): bytes over links, CPU seconds of
the parties, training beside the offline phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning.planner import SEEDED, SHORT_KEY, Costs, Federation, Plan
from lightsecagg_lab.planning.timeline import OFFLINE
from lightsecagg_lab.planning.traffic import in_units

_ALIKE = 1.2
"""Round times within this factor are no reason to prefer one protocol."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The protocol to take, and the best that rests on another idea."""

    protocol: str
    """As the plan names it."""
    seconds: float
    client_upload: int
    over_plain: float | None
    """Its time over that of unprotected FedAvg, if the plan has that."""
    rival: str | None
    """None if there is no other protocol against this threat."""
    rival_seconds: float
    rival_upload: int
    decisive: str
    """The phase in which the faster of the two gains most on the other."""
    decisive_seconds: float
    short_key: float | None
    """Seconds of a round with short keys, where they are faster; never chosen: they are
    experimental."""
    short_key_upload: int

    @property
    def alike(self) -> bool:
        """Whether either will do."""
        times = sorted((self.seconds, self.rival_seconds))
        return self.rival is not None and times[1] <= _ALIKE * times[0]

    @property
    def because(self) -> str:
        """The reason, a half sentence."""
        said = f"its round takes {in_seconds(self.seconds)}"
        if self.over_plain is not None:
            said += f", {self.over_plain:.2f} times unprotected"
        said += f", and a client sends {in_units(self.client_upload)}"
        if self.rival is None:
            return f"{said}; no other protocol here stands up to this threat"
        said += f"; {self.rival} takes {in_seconds(self.rival_seconds)} and sends "
        said += in_units(self.rival_upload)
        if self.alike:
            return f"{said}, so either will do"
        return f"{said}, {in_seconds(self.decisive_seconds)} longer in the {self.decisive} phase"

    def __str__(self) -> str:
        said = f"choose {self.protocol}, because {self.because}"
        if self.short_key is not None:
            said += (
                f"; short keys, which are experimental, would take {in_seconds(self.short_key)} "
                f"and send {in_units(self.short_key_upload)}"
            )
        return said

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "protocol": self.protocol,
            "because": self.because,
            "over_plain": self.over_plain,
            "rival": self.rival,
            "rival_over_choice": self.rival_seconds / self.seconds if self.rival else None,
            "decisive": self.decisive,
            "either_will_do": self.alike,
            "short_key_seconds": self.short_key,
        }


def choose(plan: Plan) -> Choice:
    """The fastest protected protocol; LightSecAgg, if it is about as fast as any."""
    protected = {
        name: costs for name, costs in plan.protocols.items() if costs.settings.traits.protected
    }
    short = protected.pop(SHORT_KEY, None)  # for whoever asks for it by name
    seconds = {name: costs.round_seconds for name, costs in protected.items()}
    best = min(seconds, key=lambda name: seconds[name])
    taken = SEEDED if seconds[SEEDED] <= _ALIKE * seconds[best] else best
    plain = [c.round_seconds for c in plan.protocols.values() if not c.settings.traits.protected]
    kinds = {name: type(costs.settings.traits) for name, costs in protected.items()}
    rivals = [name for name in protected if kinds[name] is not kinds[taken]]
    rival = min(rivals, key=lambda name: seconds[name], default=taken)
    visible = {name: _visible(protected[name], plan.federation) for name in (taken, rival)}
    phase, lost = decisive_phase(visible[taken], visible[rival])
    margin = _ALIKE if taken == SEEDED else 1  # where ours is slower, any gain is worth a word
    wins = short is not None and short.round_seconds * margin < seconds[taken]
    return Choice(
        protocol=taken,
        seconds=seconds[taken],
        client_upload=protected[taken].client_upload,
        over_plain=seconds[taken] / plain[0] if plain else None,
        rival=rival if rivals else None,
        rival_seconds=seconds[rival],
        rival_upload=protected[rival].client_upload,
        decisive=phase,
        decisive_seconds=lost,
        short_key=short.round_seconds if short is not None and wins else None,
        short_key_upload=short.client_upload if short is not None else 0,
    )


def decisive_phase(fast: Mapping[str, float], slow: Mapping[str, float]) -> tuple[str, float]:
    """Where the fast one gains most on the slow one, and how many seconds."""
    gained = {phase: slow[phase] - fast[phase] for phase in fast}
    phase = max(gained, key=lambda name: gained[name])
    return phase, gained[phase]


def _visible(costs: Costs, federation: Federation) -> dict[str, float]:
    """Seconds by phase; of an offline phase beside training, what outlasts it."""
    times = {phase: cost.times.total for phase, cost in costs.phases.items()}
    hidden = federation.training_seconds if federation.overlap else 0.0
    return {
        "offline": max(0.0, sum(times.get(phase, 0.0) for phase in OFFLINE) - hidden),
        "uploading": times.get(Phase.UPLOAD, 0.0),
        "recovery": sum(times.get(phase, 0.0) for phase in (Phase.AGREE, Phase.RECOVER)),
    }


def in_seconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
