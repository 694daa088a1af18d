"""Who else uses this machine: a measurement beside other work is none.

The load average says little here: it remembers our own last cell for minutes. What is looked at is
the CPU time that others took within a short window, and what the hypervisor stole.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.experiments.machine import describe_machine, load_average

MOST_OTHERS = 0.25
"""Cores that others may use."""
MOST_STOLEN = 0.05
"""Cores that the hypervisor may give to somebody else."""
WINDOW, PAUSE = 1.0, 9.0
"""Seconds of one look, and between two."""
PATIENCE = 300.0
"""Seconds after which one gives up to wait."""

_STAT = Path("/proc/stat")
_BUSY, _STOLEN = (0, 1, 2, 5, 6), 7
"""Columns of `cpu` in /proc/stat: user, nice, system, irq, softirq; and steal."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the system's clocks showed, in seconds."""

    at: float
    busy: float
    """CPU time of everybody."""
    stolen: float
    own: float
    """CPU time of this process and of its children that have ended."""


@dataclass(frozen=True, slots=True)
class Competition:
    """What others had of the machine between two moments, in cores."""

    others: float
    stolen: float

    @property
    def too_much(self) -> bool:
        """Whether a figure measured beside it would mislead."""
        return self.others > MOST_OTHERS or self.stolen > MOST_STOLEN

    def __str__(self) -> str:
        return (
            f"other processes use {self.others:.2f} cores and {self.stolen:.2f} are stolen (at "
            f"most {MOST_OTHERS} and {MOST_STOLEN})"
        )


def read_stat(text: str, ticks: int) -> tuple[float, float]:
    """Busy and stolen seconds, from the first line of /proc/stat."""
    columns = [int(column) / ticks for column in text.splitlines()[0].split()[1:]]
    return sum(columns[index] for index in _BUSY), columns[_STOLEN]


def observe() -> Moment | None:
    """Now; None where the system does not tell."""
    try:
        text = _STAT.read_text("ascii")
    except OSError:
        return None
    busy, stolen = read_stat(text, os.sysconf("SC_CLK_TCK"))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(each.ru_utime + each.ru_stime for each in used)
    return Moment(time.monotonic(), busy, stolen, own)


def compare(before: Moment | None, after: Moment | None) -> Competition | None:
    """What others had between the two; None where nobody knows."""
    if before is None or after is None:
        return None
    elapsed = after.at - before.at
    others = (after.busy - before.busy) - (after.own - before.own)
    # Ticks are coarse: of a short time, more may be ours than has been counted.
    return Competition(
        round(max(0.0, others) / elapsed, 3), round((after.stolen - before.stolen) / elapsed, 3)
    )


def watched(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The document that `work` makes, with the machine that it ran on and who else used that."""
    before, load = observe(), load_average()
    document = work()
    competition = compare(before, observe())
    return document | {
        "machine": describe_machine()
        | {"load_average_before": load, "competition": competition and asdict(competition)}
    }


def wait_until_quiet(
    tell: Callable[[str], None],
    patience: float = PATIENCE,
    observe: Callable[[], Moment | None] = observe,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when nobody competes for the cores; give up after `patience` seconds.

    Where the system does not tell, it is the user who knows.
    """
    waited = 0.0
    while True:
        before = observe()
        sleep(WINDOW)
        waited += WINDOW
        competition = compare(before, observe())
        if competition is None or not competition.too_much:
            return
        if waited >= patience:
            raise ConfigurationError(
                f"the machine was busy for {waited:.0f} s: {competition}; end the other work and "
                "run it again (finished cells are kept), or measure anyway with --busy-anyway"
            )
        tell(
            f"waiting for an idle machine, {waited:.0f} of {patience:.0f} s (--busy-anyway does "
            f"not wait): {competition}"
        )
        sleep(PAUSE)
        waited += PAUSE
