"""Which T and D? Three answers for those who know N only.

T is how many clients may collude with the server, D how many may vanish, refuse or lie. They
compete: N - D >= T + 2 always, T + 2D < N against a malicious server. docs/how-to-choose.md tells
how to think about them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightsecagg.params import ThreatModel, check_integer


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
