"""The Server Manager in the asynchronous mode: drives an `EpochServerSession`.

Peers, jobs, callbacks, reports and the loop are the synchronous manager's; what differs is what is
kept (`journal`), and what becomes of a sum: every buffer, and every buffer that was lost,
leads to another version of the model, stored together with the record of the epoch.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from functools import partial
from typing import Any

from lightsecagg.drivers.federation.callbacks import Overview
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.federation.server import FederationServer
from lightsecagg.drivers.federation.tables import ServerBufferingTable
from lightsecagg.errors import JournalError
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.settings import version_hash
from lightsecagg.session.epoch_server import EpochServerSession
from lightsecagg.session.interface import Announcement, Applied, ApplyBuffer, Renew, Spoilt, Store
from lightsecagg.session.past import Past, Unfinished
from lightsecagg.session.plan import Flushing
from lightsecagg.session.server import ServerSession

_OVER = Promised(is_over=True)
"""What is left of an epoch that is over."""


class EpochFederationServer(FederationServer):
    """Runs the epochs of one federation."""

    session_type = EpochServerSession

    def __init__(self, *arguments: Any, buffering: ServerBufferingTable, **options: Any) -> None:
        """As `FederationServer`; `buffering` says when buffers are formed."""
        super().__init__(*arguments, **options)
        names = [each.name for each in fields(Flushing)]
        self._flushing = Flushing(**{name: getattr(buffering, name) for name in names})
        self._version = 0
        self._hashes: dict[int, bytes] = {}

    def _begin(self, abandon: bool) -> ServerSession[Any]:
        """The session of what the journal knows."""
        self._version = self._learning.restore(self._journal)
        self._hashes = self._journal.hashes()
        self._note_hash()
        if abandon:
            self._abandon()
        return self._open(
            self._journal.buffers(),
            Past(),
            flushing=self._flushing,
            version=self._version,
            models=self._hashes,
            unfinished=self._left(),
        )

    def _abandon(self) -> None:
        """Give up what a crash left; its updates are lost, so the model changes by a bit (S42)."""
        for number in self._journal.unfinished():
            log.warning("epoch %d is abandoned as demanded", number)
            self._journal.abandon(number, "abandoned by the operator")
            self._job.renew()
            self._put_version(number, self._version + 1, self._journal.buffers(), _OVER)

    def _note_hash(self) -> None:
        """Updates from the current model are welcome for as long as they are not too stale."""
        self._hashes[self._version] = version_hash(self._job.model(), self._version)
        buffering = self._settings.buffering
        oldest = self._version - (0 if buffering is None else buffering.table.max_staleness)
        self._hashes = {v: model for v, model in self._hashes.items() if v >= oldest}

    def _put_version(self, epoch: int, version: int, buffers: int, change: Promised) -> None:
        """The job's model is of this version: store it with what the epoch still has to do."""
        self._version = version
        self._note_hash()
        model = self._job.save()
        self._journal.advance(epoch, version, buffers, model, change, self._hashes)

    def _left(self) -> Unfinished | None:
        unfinished = self._journal.unfinished()
        if not unfinished:
            return None
        if len(unfinished) > 1:
            raise JournalError(f"epochs {unfinished} are all unfinished; at most one can be")
        (number,) = unfinished
        return self._journal.left(number, self._allow_list_of(self._journal.settings(number)))

    def _overview(self) -> Overview:
        buffering = self._settings.buffering
        size = 0 if buffering is None else buffering.max_updates
        return replace(super()._overview(), mode="async", buffer=size)

    async def _store(self, effect: Store) -> bool:
        stored = await super()._store(effect)
        record = effect.record
        if stored and isinstance(record, Promised) and record.upload is not None:
            tag = record.upload.tag
            self._callbacks.tell("update_buffered", tag.owner, self._version - tag.version)
        return stored

    def _announcement(self, completed: int) -> Announcement:
        # All clients of an epoch train alike, so there is no schedule.
        return Announcement(self._job.model(), self._job.instructions(0))

    def _recall(self) -> None:
        """Nothing: a buffer whose record a crash has lost leaves no trace but its model."""

    # -- what becomes of a sum -----------------------------------------------------------------

    async def _advance(self, effect: ApplyBuffer | Renew) -> Applied | Spoilt:
        """The model of the next version, stored with what the epoch still has to do."""
        completed = self._session.completed
        if isinstance(effect, Renew):
            await asyncio.to_thread(self._job.renew)
            if effect.change is None:
                raise AssertionError("an epoch's model changes with its memory")
            put = partial(self._put_version, effect.epoch, effect.version, completed)
            await asyncio.to_thread(put, effect.change)
            return Applied(self._announcement(completed))
        aggregate, record = effect.aggregate, effect.record
        version, completed = aggregate.time + 1, completed + 1
        mean, weights = effect.settings.buffer_mean, aggregate.weights
        average = partial(mean, aggregate.total, weights, in_place=True)
        after = await self._learning.step(record, average, sum(aggregate.weights), version)
        if isinstance(after, Spoilt):
            return after
        put = partial(self._put_version, effect.settings.round, version, completed)
        await asyncio.to_thread(put, effect.change)
        await self._learning.note(record, version)
        self._learning.judge(record, completed)
        await self._look_for_members()
        return Applied(self._announcement(completed), record.stopped)
