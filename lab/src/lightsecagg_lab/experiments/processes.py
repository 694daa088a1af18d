"""Processes of a measurement: however it ends, they end with it (R40)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from lightsecagg.drivers.federation.observer import set_up_logging
from lightsecagg.errors import ConfigurationError, LightSecAggError
from lightsecagg.training.parent import end_with_parent

Result = TypeVar("Result")


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


def alone(work: Callable[[], Result]) -> Result:
    """Do it in a process that nothing has warmed up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(theirs, work))
    with running([process]):
        theirs.close()
        try:
            done, outcome = ours.recv()
        except EOFError:
            process.join()
            raise ConfigurationError(
                f"the process that measured ended with {process.exitcode} and no result: "
                "see what it wrote above; -9 often means too little memory"
            ) from None
    if not done:
        raise ConfigurationError(outcome)
    result: Result = outcome
    return result


def _do(pipe: Connection[Any, Any], work: Callable[[], object]) -> None:
    os.setpgrp()  # Ctrl-C is the parent's to handle
    end_with_parent()
    try:
        pipe.send((True, work()))
    except LightSecAggError as error:
        pipe.send((False, str(error)))
