"""Uploads on their way into the journal: those that come while others are stored wait together.

To store one takes longer than to receive it, most of it spent on the disk's answers; so the loop
goes on meanwhile, and what has come since is one change of the journal (`Journal.store_all`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.errors import JournalError
from lightsecagg.foreign import explain
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.jobs import Upload
from lightsecagg.session.interface import Stored, StoreFailed

_MOST: Final = 1 << 24
"""Bytes of uploads whose outcome is not yet known to the session before the next has to wait: they
are in memory until then (R53)."""


class UploadStore:
    """Takes uploads of one round after the other, and says what came of them."""

    def __init__(self, journal: Journal, wake: Callable[[], None]) -> None:
        """`wake` is called in the loop's thread when there is something to `take`."""
        self._journal, self._wake = journal, wake
        self._waiting: list[Promised] = []
        self._done: list[Stored | StoreFailed] = []
        self._round = 0
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()

    async def put(self, number: int, record: Promised) -> None:
        """Store an upload of this round; waits, if there are too many, until one can be taken."""
        if number != self._round:
            await self.settle()
        self._round = number
        self._waiting.append(record)
        self._bytes += _size(record)
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        while self._bytes > _MOST and not self._done:
            self._progress.clear()
            await self._progress.wait()

    def take(self) -> list[Stored | StoreFailed]:
        """What has become of uploads since the last time."""
        done, self._done = self._done, []
        self._bytes -= sum(_size(_record(result)) for result in done)
        return done

    async def settle(self) -> None:
        """Until nothing is being stored, or waits for it."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _work(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            results = await asyncio.to_thread(self._store, self._round, group)
            self._done += results
            del group, results  # nothing of them is kept here once they are taken
            self._progress.set()
            self._wake()
        self._task = None

    def _store(self, number: int, group: list[Promised]) -> list[Stored | StoreFailed]:
        try:
            results = self._journal.store_all(number, group)
        except Exception as error:  # what nobody foresaw: none of them counts, the server lives
            return [StoreFailed(record, explain(error)) for record in group]
        return [_outcome(record, result) for record, result in zip(group, results, strict=True)]


def _size(record: Promised) -> int:
    """Bytes of its upload."""
    return 0 if record.upload is None else record.upload.vector.nbytes


def _record(result: Stored | StoreFailed) -> Promised:
    if not isinstance(result.record, Promised):
        raise AssertionError("nothing but uploads is stored here")
    return result.record


def _outcome(record: Promised, result: Upload | JournalError | None) -> Stored | StoreFailed:
    if isinstance(result, JournalError):
        return StoreFailed(record, str(result))
    return Stored(record, result)
