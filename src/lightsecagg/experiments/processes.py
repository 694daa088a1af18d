"""Processes of a measurement: however it ends, they end with it (R40)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path

from lightsecagg.drivers.federation.observer import set_up_logging
from lightsecagg.training.parent import end_with_parent


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: what `finally` clears away is cleared away."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running(processes: Sequence[SpawnProcess]) -> Iterator[None]:
    """Start them; at the end, those that live are given a moment, asked, and killed."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                process.join(2)  # the clients have been told
                process.terminate()
        for process in processes:
            if process.pid is not None:
                process.join(10)
                if process.exitcode is None:
                    os.kill(process.pid, signal.SIGKILL)
                    process.join()


def begin(log: Path, level: str) -> None:
    """In such a process: Ctrl-C is the parent's to handle; who is left behind by it ends."""
    os.setpgrp()
    end_with_parent()
    sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    set_up_logging(level)
