"""Ctrl-C and SIGTERM as a question, for commands that must clean up wherever they are.

A signal that raises in the middle of starting a process, or of removing a folder with keys, leaves
the process or the folder behind. Inside `deferred_signals` it is only noted; the command asks,
where it can stop, whether one has come.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lightsecagg import system

_EXIT_BY_SIGNAL = 128
"""A shell's exit code for a program that a signal ended is this plus the signal's number."""


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Yields the question; it raises `SystemExit` (130 or 143) if a signal has come."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    def ask() -> None:
        if received:
            raise SystemExit(_EXIT_BY_SIGNAL + received[0])

    before = {number: signal.signal(number, note) for number in system.STOP}
    try:
        yield ask
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ask()
