"""Which T and D? Three answers for those who know N only, and a verdict on what they cost.

T is how many clients may collude with the server, D how many may vanish, refuse or lie. They
compete: N - D >= T + 2 always, T + 2D < N against a malicious server. docs/how-to-choose.md tells
how to think about them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightsecagg.params import ThreatModel, check_integer
from lightsecagg.planning.planner import SEEDED, SHORT_KEY, Plan
from lightsecagg.planning.traffic import in_units
from lightsecagg.protocol.schemes.traits import TRAITS

_ALIKE = 1.2
"""Round times within this factor are no reason to prefer one protocol."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A pair (T, D) and whom it is for."""

    name: str
    privacy: int
    """T"""
    dropouts: int
    """D"""
    buys: str
    """What one gets for it, in a sentence."""


def propose(clients: int, threat_model: ThreatModel) -> list[Proposal]:
    """Three pairs that N and the threat model allow: balanced, private, robust."""
    check_integer("clients N", clients, 4)
    chosen = [
        ("balanced", max(1, clients // 4), clients // 4),
        ("private", max(1, clients // 2), clients // 10),
        ("robust", max(1, clients // 10), clients // 2),
    ]
    made = []
    for name, T, wanted in chosen:
        D = min(wanted, most_dropouts(clients, T, threat_model))
        buys = f"any {T} may collude with the server ({T / clients:.0%}), " + (
            f"any {D} may vanish ({D / clients:.0%})" if D else "nobody may vanish"
        )
        made.append(Proposal(name, T, D, buys))
    return made


def most_dropouts(clients: int, privacy: int, threat_model: ThreatModel) -> int:
    """The largest D that N and T allow; 0 if they allow none at all."""
    most = clients - privacy - 2
    if threat_model is ThreatModel.MALICIOUS_SERVER:
        most = min(most, (clients - privacy - 1) // 2)
    return max(0, most)


def most_privacy(clients: int, dropouts: int, threat_model: ThreatModel) -> int:
    """The largest T that N and D allow; 0 if they allow none at all."""
    most = clients - dropouts - 2
    if threat_model is ThreatModel.MALICIOUS_SERVER:
        most = min(most, clients - 2 * dropouts - 1)
    return max(0, most)


def verdict(plan: Plan) -> str:
    """Which protocol to take here, in a sentence."""
    protected = {
        name: costs
        for name, costs in plan.protocols.items()
        if TRAITS[costs.settings.protocol].protected
    }
    short = protected.pop(SHORT_KEY, None)  # for whoever asks for it by name
    seconds = {name: costs.round_seconds for name, costs in protected.items()}
    best = min(seconds, key=lambda name: seconds[name])
    close = [name for name, value in seconds.items() if value <= _ALIKE * seconds[best]]
    taken = SEEDED if SEEDED in close else best
    said = f"{taken}: {in_seconds(seconds[taken])} a round, {_sends(plan, taken)}"
    plain = next((c for n, c in plan.protocols.items() if n not in protected), None)
    if plain is not None:
        said += f", {seconds[taken] / plain.round_seconds:.1f} times unprotected"
    protocol = protected[taken].settings.protocol
    rivals = [name for name, costs in protected.items() if costs.settings.protocol != protocol]
    if rivals:
        other = min(rivals, key=lambda name: seconds[name])
        said += f"; {other}: {in_seconds(seconds[other])}, {_sends(plan, other)}"
        if other in close and taken in close:
            said += "; either will do"
    if short is not None and short.round_seconds * _ALIKE < seconds[taken]:
        faster = f"{in_seconds(short.round_seconds)}, {_sends(plan, SHORT_KEY)}"
        said += f"; short keys, which are experimental: {faster}"
    return said


def _sends(plan: Plan, name: str) -> str:
    return f"a client sends {in_units(plan.protocols[name].client_upload)}"


def in_seconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
