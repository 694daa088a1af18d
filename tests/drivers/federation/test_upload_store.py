"""Uploads are stored together while the loop goes on, and each is told of once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import Federation

from lightsecagg.drivers.federation import upload_store
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.upload_store import UploadStore
from lightsecagg.errors import JournalError
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.messages import MaskedUpload, Tag
from lightsecagg.session.interface import Stored, StoreFailed

UPLOADS = {
    c: Promised((), MaskedUpload(Tag(c), np.full(4, c, np.uint32)), one_sum=True) for c in range(6)
}


class SlowJournal:
    """Stores what it is given once it may."""

    def __init__(self) -> None:
        self.may_store = threading.Semaphore(0)
        self.groups: list[tuple[int, list[int]]] = []
        self.error: Exception | None = None

    def store_all(self, number: int, records: Sequence[Promised]) -> list[Any]:
        clients = [record.sender for record in records]
        self.groups.append((number, clients))
        assert self.may_store.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        return [JournalError("full") if c == 3 else f"stored {c}" for c in clients]


class Scene:
    def __init__(self) -> None:
        self.journal: Any = SlowJournal()
        self.woken = asyncio.Event()
        self.store = UploadStore(self.journal, self.woken.set)

    async def begin(self) -> None:
        """One upload is being stored from now on."""
        await self.store.put(1, UPLOADS[0])
        while not self.journal.groups:
            await asyncio.sleep(0)

    async def end(self) -> None:
        for _ in range(4):
            self.journal.may_store.release()
        await self.store.settle()


def test_what_comes_while_one_is_stored_is_stored_together_and_told_once() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.begin()
        assert scene.store.take() == [], "nothing is told before it is durable"
        await scene.store.put(1, UPLOADS[1])
        await scene.store.put(1, UPLOADS[3])
        scene.journal.may_store.release()
        await asyncio.wait_for(scene.woken.wait(), 60)
        assert scene.store.take() == [Stored(UPLOADS[0], "stored 0")]  # type: ignore[arg-type]
        await scene.end()
        assert scene.journal.groups == [(1, [0]), (1, [1, 3])]
        told = scene.store.take()
        assert told == [Stored(UPLOADS[1], "stored 1"), StoreFailed(UPLOADS[3], "full")]  # type: ignore[arg-type]
        assert scene.store.take() == []

    asyncio.run(scenario())


def test_R53_the_next_upload_waits_while_too_many_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_store, "_MOST", 40)

    async def scenario() -> None:
        scene = Scene()
        await scene.begin()
        await scene.store.put(1, UPLOADS[1])
        third = asyncio.create_task(scene.store.put(1, UPLOADS[2]))
        await asyncio.sleep(0)
        assert not third.done()
        scene.journal.may_store.release()
        await asyncio.wait_for(third, 60)
        fourth = asyncio.create_task(scene.store.put(1, UPLOADS[4]))
        await asyncio.sleep(0)
        assert fourth.done(), "the first one can be taken: whoever puts has to take it first"
        assert len(scene.store.take()) == 1
        await scene.end()
        assert len(scene.store.take()) == 3
        await scene.store.put(1, UPLOADS[5])  # there is room again
        await scene.end()

    asyncio.run(scenario())


def test_a_round_begins_when_the_uploads_of_the_one_before_are_stored() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.begin()
        await scene.store.put(1, UPLOADS[1])
        newer = asyncio.create_task(scene.store.put(2, UPLOADS[2]))
        await asyncio.sleep(0)
        assert not newer.done()
        await scene.end()
        await newer
        await scene.end()
        assert scene.journal.groups == [(1, [0]), (1, [1]), (2, [2])]

    asyncio.run(scenario())


def test_S41_what_nobody_foresaw_costs_these_uploads_and_no_others() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.journal.error = ZeroDivisionError("a secret")
        await scene.begin()
        await scene.end()
        (failed,) = scene.store.take()
        assert isinstance(failed, StoreFailed)
        assert failed.record is UPLOADS[0]
        assert "ZeroDivisionError" in failed.reason
        assert "secret" not in failed.reason
        scene.journal.error = None
        await scene.store.put(1, UPLOADS[1])
        await scene.end()
        assert scene.store.take() == [Stored(UPLOADS[1], "stored 1")]  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_R31_nothing_is_acknowledged_before_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All uploads wait in the journal's thread; meanwhile the server listens, and says nothing."""
    original, release = Journal.store_all, threading.Event()
    groups: list[int] = []

    def store(self: Journal, number: int, records: Sequence[Promised]) -> list[Any]:
        if any(record.upload is not None for record in records):
            groups.append(len(records))
            assert release.wait(60)
        return original(self, number, records)

    monkeypatch.setattr(Journal, "store_all", store)
    federation = Federation(tmp_path)
    server = federation.server(upload=600)

    async def scenario() -> None:
        async with federation.connected([federation.client(i) for i in federation.jobs]):
            running = asyncio.create_task(server.run())
            while sum(groups) + len(server._uploads._waiting) < 8:
                await asyncio.sleep(0.001)
            assert server._session._round.stored == set()  # type: ignore[attr-defined]
            assert list(tmp_path.glob("uploads/*.u32")) == []
            release.set()
            await asyncio.wait_for(running, 60)

    asyncio.run(scenario())
    assert len(groups) == 2, "the first one, and all that came meanwhile"
    (record,) = server.records
    assert record.included == list(range(8))
    federation.check(record)
