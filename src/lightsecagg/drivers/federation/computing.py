"""A party's jobs, in threads, one after the other: the loop stays free for everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lightsecagg.drivers.spreading import Range, put, ranges, run
from lightsecagg.errors import RecoveryError
from lightsecagg.foreign import explain
from lightsecagg.protocol.jobs import Job, Result
from lightsecagg.session.interface import Computed, ComputeFailed

_COLUMNS = 2**18
"""How many columns of a job are computed before it can be given up."""


class Computer:
    """Takes jobs, and hands in what came of them."""

    def __init__(self, report: Callable[[Computed | ComputeFailed], None], cores: int = 1) -> None:
        """`report` is called in the loop's thread; a job runs in as many threads as `cores`."""
        self._report, self._cores = report, cores
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def put(self, job: Job) -> None:
        """Run this job after those before it."""
        self._jobs.put_nowait(job)
        if self._task is None:
            self._task = asyncio.create_task(self._work())

    async def clear(self) -> None:
        """Nobody waits for the results any more: give up the jobs, those under way too."""
        task, self._task = self._task, None
        self._jobs = asyncio.Queue()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            await self._run(await self._jobs.get())

    async def _run(self, job: Job) -> None:
        try:
            self._report(Computed(job, await compute(job, self._cores)))
        except Exception as error:  # a file is gone, say: the round ends, the server does not
            self._report(ComputeFailed(job, explain(error)))


async def compute(job: Job, cores: int = 1) -> Result:
    """The result of a job, computed in threads, so many ranges at once."""
    try:
        await asyncio.to_thread(job.open)
        cuts = ranges(job.columns, cores, _COLUMNS)
        for first in range(0, len(cuts), cores):
            await asyncio.to_thread(_advance, job, cuts[first : first + cores])
        return await asyncio.to_thread(job.result)
    except RecoveryError as error:
        return error


def _advance(job: Job, cuts: Sequence[Range]) -> None:
    put(job, cuts, run(job, cuts))
