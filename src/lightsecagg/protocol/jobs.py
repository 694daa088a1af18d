"""Slow work as objects: what a party asks its driver to compute.

Whoever serves a party serves its peers too, so a party does no arithmetic on whole vectors. It
returns `Compute(job)`, goes on taking messages, and is given the result with `computed`. A job
knows nothing of the party; the driver owes it

    open()              once and first: what concerns all columns, such as finding liars
    run(start, stop)    for ranges that make up 0..columns, in any order, on any thread or machine
    put(start, part)    for what each of them returned, in any order, one after the other
    result()            once and last

and hands over, instead of a result, the `RecoveryError` that any of them raised. `at_once` does
all of it on the spot, for drivers that serve nobody else meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightsecagg.errors import RecoveryError
from lightsecagg.field.group import Elements, Group
from lightsecagg.field.quantization import with_room


class Job(ABC):
    """Arithmetic on vectors, cut by columns; see the module."""

    columns: int
    """How many columns the ranges make up."""

    def open(self) -> None:
        """Do what concerns all columns."""
        return

    @abstractmethod
    def run(self, start: int, stop: int) -> Elements:
        """The result in the columns from `start` up to `stop`; changes nothing."""

    @abstractmethod
    def put(self, start: int, part: Elements) -> None:
        """Take what `run` returned for the columns from `start` on, so that nobody need keep it."""

    @abstractmethod
    def result(self) -> Elements:
        """The whole result."""


Result = Elements | RecoveryError
"""What a job found, or why it cannot be found."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `job` where it holds up nobody, and give the result to the party's `computed`."""

    job: Job


class Computing(Protocol):
    """A party that asks for jobs."""

    def computed(self, job: Job, result: Result) -> Sequence[object]:
        """Take the result of a job that it asked for."""


def complete(job: Job) -> Result:
    """The result of a job, in one range."""
    try:
        job.open()
        job.put(0, job.run(0, job.columns))
        return job.result()
    except RecoveryError as error:
        return error


def at_once(
    party: Computing, outputs: Sequence[object], run: Callable[[Job], Result] = complete
) -> list[object]:
    """The outputs of a call, each job among them run and replaced by what came of it."""
    done: list[object] = []
    for output in outputs:
        if isinstance(output, Compute):
            done += at_once(party, party.computed(output.job, run(output.job)), run)
        else:
            done.append(output)
    return done


class Upload(Protocol):
    """A masked update that waits to be summed, wherever it is kept."""

    def read(self, start: int, stop: int) -> Elements:
        """Its columns from `start` up to `stop`."""


@dataclass(frozen=True, slots=True, repr=False)
class UploadInMemory:
    """A masked update as it came."""

    vector: Elements

    def read(self, start: int, stop: int) -> Elements:
        """A view."""
        return self.vector[start:stop]


class SumUploads(Job):
    """The sum, or integer-weighted sum, of masked updates."""

    def __init__(
        self,
        group: Group,
        length: int,
        uploads: Sequence[Upload],
        weights: Sequence[int] | None = None,
    ) -> None:
        self.columns = length
        self._group, self._uploads = group, uploads
        self._weights = [1] * len(uploads) if weights is None else weights
        self._total = with_room(length)

    def run(self, start: int, stop: int) -> Elements:
        """Reads one upload after the other: they need not fit into memory together."""
        total = self._group.accumulator((stop - start,))
        for upload, weight in zip(self._uploads, self._weights, strict=True):
            total.add(upload.read(start, stop), weight)
        return total.total()

    def put(self, start: int, part: Elements) -> None:
        """These columns of the sum."""
        self._total[start : start + part.size] = part

    def result(self) -> Elements:
        """The sum."""
        return self._total


class RecoverMasks(ABC):
    """The sum of the masks, from the answers; schemes say how. Part of a job: see `Unmask`."""

    columns: int
    """How many columns the ranges make up."""
    suspects: tuple[int, ...] = ()
    """Clients whose answers contradict the others; known once it is open."""

    @abstractmethod
    def open(self) -> None:
        """Do what concerns all columns."""

    @abstractmethod
    def run(self, start: int, stop: int) -> Elements:
        """What these columns of the answers tell of the masks."""

    @abstractmethod
    def take_away(self, total: Elements, start: int, part: Elements) -> None:
        """Subtract what `run` returned for the columns from `start` on, in place."""

    def finish(self, total: Elements) -> Elements:
        """The sum of the updates, from what is left when the masks are taken away."""
        return total


class Unmask(Job):
    """The sum of the updates: that of the masked ones less the masks.

    The masked sum becomes the sum of the updates as the masks are found, range by range: there is
    no vector of masks.
    """

    def __init__(self, masked_sum: Elements, masks: RecoverMasks) -> None:
        self.columns = masks.columns
        self._total, self._masks = masked_sum, masks

    @property
    def suspects(self) -> tuple[int, ...]:
        """See `RecoverMasks.suspects`."""
        return self._masks.suspects

    def open(self) -> None:
        """Prepare the recovery of the masks."""
        self._masks.open()

    def run(self, start: int, stop: int) -> Elements:
        """These columns of the masks."""
        return self._masks.run(start, stop)

    def put(self, start: int, part: Elements) -> None:
        """Take these columns of the masks away."""
        self._masks.take_away(self._total, start, part)

    def result(self) -> Elements:
        """What is left."""
        return self._masks.finish(self._total)
