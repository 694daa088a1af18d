"""A job on several cores: its column ranges in threads.

Jobs are cut by columns for this: the loops and the cipher release the interpreter's lock, so as
many ranges run at once as there are threads. What concerns all columns (`open`, `result`), and
taking the parts one after the other (`put`), stays on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from lightsecagg.errors import RecoveryError
from lightsecagg.field.group import Elements
from lightsecagg.protocol.jobs import Job, Result

LEAST_COLUMNS = 2**10
"""A shorter range is not worth a thread."""

Range = tuple[int, int]
"""Columns from the first number up to the second."""


def spread(
    job: Job, cores: int = 1, observe: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Result:
    """The result of a job, its columns on so many threads.

    * `observe`: entered while the ranges run, for those who tell this work from the rest.
    """
    try:
        job.open()
        cuts = ranges(job.columns, cores)
        with observe():
            parts = run(job, cuts)
        put(job, cuts, parts)
        return job.result()
    except RecoveryError as error:
        return error


def ranges(columns: int, cores: int, most: int | None = None) -> list[Range]:
    """The columns in ranges of about one length, one for each core; more if they exceed `most`."""
    length = max(-(-columns // cores), LEAST_COLUMNS)
    length = length if most is None else min(length, most)
    return [(start, min(start + length, columns)) for start in range(0, columns, length)]


def run(job: Job, cuts: Sequence[Range]) -> list[Elements]:
    """These ranges of a job at once, each in a thread of its own."""
    if len(cuts) == 1:
        return [job.run(*cuts[0])]
    with ThreadPoolExecutor(len(cuts)) as threads:
        return list(threads.map(lambda cut: job.run(*cut), cuts))


def put(job: Job, cuts: Sequence[Range], parts: Sequence[Elements]) -> None:
    """Hand over what the ranges gave."""
    for (start, _), part in zip(cuts, parts, strict=True):
        job.put(start, part)
