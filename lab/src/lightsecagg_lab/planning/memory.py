"""The most memory that a party holds in each phase, as a count of the vectors that it holds then.

Per client whose shares grow with the vector, as LightSecAgg's: its mask (d), the U x L matrix of
expanded shares and the codeword while it encodes, its explicit shares in plain and sealed form, and
the explicit shares that it holds for its peers until it has answered. Per client of SecAgg: its
masks, added up, and a few copies of the vector. At the server: the bundles of shares that are not
yet complete, at worst all of them; then one upload after the other, whatever their number, and what
its connections hold; then the sum with the answers; then the average, in 64 bits, which takes the
place of the sum. And once uploads have come, what the allocator keeps of their buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.planning.traffic import PHASES, PhaseTraffic, share_counts
from lightsecagg_lab.planning.transport_costs import window

PROGRAM = 95 * 10**6
"""Interpreter and libraries."""
KEPT = 110 * 10**6
"""What was measured beyond what is counted here, likely freed buffers that the allocator keeps."""
CHUNK = 2**18
"""A client at the server, beside what it may be ahead of the server's reading."""
WAITING = 2**25
"""Messages that wait in the server's memory (`Limits.memory`)."""
_CHECKS = 3
"""Random columns by which wrong answers are found."""


@dataclass(slots=True)
class PhaseMemory:
    """Bytes."""

    client: int = PROGRAM
    server: int = PROGRAM


def forecast_memory(
    settings: Settings, traffic: dict[Phase, PhaseTraffic], alive: int
) -> dict[Phase, PhaseMemory]:
    """The peak of each phase; `traffic` is the round's forecast."""
    phases = {phase: PhaseMemory() for phase in PHASES}
    vector, shares = 4 * settings.length, share_counts(settings)
    held = shares.explicit * shares.explicit_bytes
    answers = vector  # a scheme that recovers all masks at once
    if settings.traits.protected:  # the mask is expanded beside the training, and waits for it
        phases[Phase.SHARE].client += vector
        phases[Phase.UPLOAD].client += vector
    explicit = settings.traits.shares(settings).get(ShareKind.EXPLICIT)
    if explicit is not None:
        U, N = settings.parameters.survivors, settings.parameters.clients
        share = explicit.length
        # The rows that are expanded or drawn, the codeword, and plain and sealed shares.
        phases[Phase.SHARE].client += (U + N) * share + 2 * held + held
        phases[Phase.RECOVER].client += held + 2 * share
        answers = (alive + _CHECKS) * share
    connections = alive * (CHUNK + window(settings.parameters.clients))
    phases[Phase.SHARE].server += traffic[Phase.SHARE].server_shares_received
    # Input, its copy, coins, quantised vector, message.
    phases[Phase.UPLOAD].client += 5 * vector + held
    kept = min(KEPT, alive * vector)
    phases[Phase.UPLOAD].server += min(WAITING, alive * vector) + vector + connections + kept
    phases[Phase.RECOVER].server += max(vector + answers, 2 * vector) + kept
    return phases
