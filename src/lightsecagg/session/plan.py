"""For how long the server waits for what, and how often it tries (seconds)."""

from __future__ import annotations

from dataclasses import dataclass

COMEBACK = 15.0
"""Seconds in which clients find a server that was restarted: they pause for up to 4.5 s between
attempts, and an attempt that nobody answers takes 10 s."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds there are, and for how long the server waits for what."""

    number: int = 10
    min_clients: int = 0
    """Fewest connected clients that start a round; 0 for N - D."""
    wait_for_clients: float = 120.0
    settle: float = 1.0
    advertise: float = 30.0
    share: float = 120.0
    upload: float = 900.0
    agree: float = 30.0
    recover: float = 120.0
    grace: float = 5.0
    retries: int = 2


@dataclass(frozen=True, slots=True)
class Flushing:
    """Asynchronous: when buffers are formed, and epochs ended."""

    flush_after: float = 60.0
    """From the last buffer to one with fewer than K updates."""
    reports: float = 10.0
    """For how long an upload waits for reports on its mask."""
    renew: int = 5
    """Buffers of an epoch after which those who wait outside are let in, by the next."""
