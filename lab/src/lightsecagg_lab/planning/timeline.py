"""The timeline of a round: who is busy when, from its first message to the recovered sum.

A phase is: the server's messages, the slowest client's work, the clients' messages, the server's
work, and what it stores; the next phase begins when all of it is done. Training comes between the
offline phase (advertise, share) and the upload; with overlap it runs beside the offline phase, on a
core of its own. What the server waits for clients that will never answer (its deadlines) is not
modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightsecagg.protocol.interface import Phase

OFFLINE = (Phase.ADVERTISE, Phase.SHARE)
"""The phases that may overlap training."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long the parts of one phase take, in seconds."""

    down: float
    """The server's messages on their way."""
    client: float
    """The slowest client's work."""
    up: float
    """The clients' messages on their way, shares included."""
    server: float
    """The server's work."""
    storing: float = 0.0
    """Until what the server has taken in, or made, is on its disk."""

    @property
    def link(self) -> float:
        """All the time on the links."""
        return self.down + self.up

    @property
    def total(self) -> float:
        """From the phase's first message to its end."""
        return self.down + self.client + self.up + self.server + self.storing


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a party was busy with."""

    party: str
    """`client` (the slowest one), `link` or `server`."""
    phase: str
    """A phase of the protocol, or `training`."""
    start: float
    end: float


def timeline(
    times: Mapping[Phase, PhaseTimes], training: float = 0.0, overlap: bool = True
) -> list[Span]:
    """Who was busy when, from the first message of the round to the recovered sum."""
    spans: list[Span] = []
    now = 0.0
    trained = False
    for phase, parts in times.items():
        if phase not in OFFLINE and not trained:
            trained = True
            start = 0.0 if overlap else now
            now = max(now, start + training)
            if training:
                spans.append(Span("client", "training", start, start + training))
        for party, seconds in (
            ("link", parts.down),
            ("client", parts.client),
            ("link", parts.up),
            ("server", parts.server + parts.storing),
        ):
            if seconds:
                spans.append(Span(party, phase.value, now, now + seconds))
                now += seconds
    return spans


def round_seconds(times: Mapping[Phase, PhaseTimes], training: float, overlap: bool) -> float:
    """The length of the round, training included."""
    return max((span.end for span in timeline(times, training, overlap)), default=0.0)
