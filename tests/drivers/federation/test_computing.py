"""Jobs of the server's party: run in threads, while everybody else is served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import Federation

from laboratory import baseline
from lightsecagg.drivers.federation import computing, stored_upload
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.computing import compute
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.server import _Tick
from lightsecagg.drivers.federation.stored_upload import StoredUpload
from lightsecagg.errors import JournalError, NotEnoughAnswers
from lightsecagg.field.prime import DEFAULT_FIELD, Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.jobs import SumUploads, Unmask, UploadInMemory
from lightsecagg.protocol.messages import MaskedUpload, Tag
from lightsecagg.protocol.one_sum import OneSum
from lightsecagg.protocol.schemes.coded_masks import CodedMasksServer
from lightsecagg.session.envelope import name_of
from lightsecagg.session.interface import Effect
from lightsecagg.session.round_server import RoundServerSession

PROTOCOLS = [
    ("lightsecagg", ThreatModel.MALICIOUS_SERVER),
    baseline("secagg", ThreatModel.MALICIOUS_SERVER),
    baseline("secagg+", ThreatModel.HONEST_BUT_CURIOUS),
    baseline("plain", ThreatModel.HONEST_BUT_CURIOUS),
]


def before(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, act: Callable[[], None]
) -> None:
    """Do something more where a job does its work."""
    original = getattr(kind, method)

    def wrapped(self: Any, *arguments: Any) -> Any:
        act()
        return original(self, *arguments)

    monkeypatch.setattr(kind, method, wrapped)


@pytest.mark.parametrize(("protocol", "threat_model"), PROTOCOLS)
def test_the_loop_serves_others_while_the_server_computes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    threat_model: ThreatModel,
) -> None:
    """Each step of each job waits for the loop; on the loop's own thread it would wait for ever."""
    loops: list[asyncio.AbstractEventLoop] = []
    served: list[bool] = []

    def wait_for_the_loop() -> None:
        seen = threading.Event()
        loops[0].call_soon_threadsafe(seen.set)
        served.append(seen.wait(30))

    for kind in (SumUploads, Unmask):
        for method in ("open", "run", "result"):
            before(monkeypatch, kind, method, wait_for_the_loop)
    federation = Federation(tmp_path, protocol=protocol, threat_model=threat_model)

    async def scenario() -> None:
        loops.append(asyncio.get_running_loop())
        (record,) = await federation.run()
        federation.check(record)

    asyncio.run(scenario())
    assert served == [True] * 6


class Lost(FederationClient):
    """Vanishes in place of its upload."""

    async def _post(self, data: bytes) -> None:
        if name_of(data) == "MaskedUpload":
            await self._communicator.close()
            await asyncio.Event().wait()
        await super()._post(data)


@pytest.mark.parametrize("last", [FederationClient, Lost])
def test_the_loop_serves_others_while_reports_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: type[FederationClient]
) -> None:
    """The last upload ends its phase, or the patience with whoever does not come back."""
    loops: list[asyncio.AbstractEventLoop] = []
    served: list[bool] = []

    def wait_for_the_loop() -> None:
        seen = threading.Event()
        loops[0].call_soon_threadsafe(seen.set)
        served.append(seen.wait(30))

    before(monkeypatch, CodedMasksServer, "examine", wait_for_the_loop)
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)

    async def scenario() -> None:
        loops.append(asyncio.get_running_loop())
        kinds = [FederationClient] * 3 + [last]
        clients = [federation.client(i, kind) for i, kind in enumerate(kinds)]
        async with federation.connected(clients):
            (record,) = await asyncio.wait_for(federation.server(upload=60).run(), 60)
        assert len(record.included) == (3 if last is Lost else 4)
        federation.check(record)

    asyncio.run(scenario())
    assert served == [True]


def test_R35_a_deadline_that_fires_while_only_a_result_is_awaited_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is pending: there is nothing to go on without, and no reason to abort."""
    loops: list[asyncio.AbstractEventLoop] = []
    sessions: list[RoundServerSession] = []
    turns = threading.Semaphore(0)
    tick = RoundServerSession.tick

    def counted(self: RoundServerSession, now: float) -> list[Effect]:
        sessions[:] = [self]
        effects = tick(self, now)
        turns.release()
        return effects

    def let_the_deadline_pass() -> None:
        round_ = sessions[0]._round
        assert round_ is not None
        for _ in range(3):
            while turns.acquire(blocking=False):
                pass
            round_._deadline = round_._next_look = 0.0
            loops[0].call_soon_threadsafe(federation.transport.notify, _Tick())
            assert turns.acquire(timeout=30)

    monkeypatch.setattr(RoundServerSession, "tick", counted)
    before(monkeypatch, Unmask, "open", let_the_deadline_pass)
    federation = Federation(tmp_path)

    async def scenario() -> None:
        loops.append(asyncio.get_running_loop())
        (record,) = await federation.run()
        federation.check(record)
        assert record.included == list(range(8))
        assert record.dropped == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("step", ["_close_share", "_close_upload"])
def test_no_phase_of_long_work_ends_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """At its end all shares are bundled for everybody, or all reports examined."""
    threads: list[threading.Thread] = []
    before(monkeypatch, OneSum, step, lambda: threads.append(threading.current_thread()))
    federation = Federation(tmp_path)
    (record,) = asyncio.run(federation.run())
    federation.check(record)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_a_failing_job_ends_its_round_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is blamed for it: the client whose answer came last least of all."""
    failures = iter([RuntimeError("out of memory")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    before(monkeypatch, Unmask, "run", fail_once)
    federation = Federation(tmp_path)
    first, second = asyncio.run(federation.run(retries=1))
    assert first.aborted is not None
    assert "unforeseen RuntimeError" in first.aborted
    assert first.dropped == {}
    assert first.refusals == {}
    federation.check(second)


def test_a_round_that_ends_otherwise_gives_its_job_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges that were not begun are never run."""
    monkeypatch.setattr(computing, "_COLUMNS", 1)
    began, go_on, ranges = threading.Event(), threading.Event(), []

    class Slow(SumUploads):
        def run(self, start: int, stop: int) -> Elements:
            ranges.append(start)
            began.set()
            assert go_on.wait(30)
            return super().run(start, stop)

    async def scenario() -> None:
        uploads = [UploadInMemory(np.ones(5, dtype=np.uint32))]
        task = asyncio.create_task(compute(Slow(DEFAULT_FIELD, 5, uploads)))
        await asyncio.to_thread(began.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()

    asyncio.run(scenario())
    assert ranges == [0]


def test_a_job_is_cut_into_ranges_and_its_recovery_error_is_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing, "_COLUMNS", 2)
    ranges = []

    class Watched(SumUploads):
        def run(self, start: int, stop: int) -> Elements:
            ranges.append((start, stop))
            return super().run(start, stop)

    vector = np.arange(5, dtype=np.uint32)
    result = asyncio.run(compute(Watched(DEFAULT_FIELD, 5, [UploadInMemory(vector)] * 3)))
    assert isinstance(result, np.ndarray)
    assert result.tolist() == [0, 3, 6, 9, 12]
    assert ranges == [(0, 2), (2, 4), (4, 5)]

    class Failing(SumUploads):
        def open(self) -> None:
            raise NotEnoughAnswers("too few")

    result = asyncio.run(compute(Failing(DEFAULT_FIELD, 5, [])))
    assert isinstance(result, NotEnoughAnswers)


# -- uploads on disk -----------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Eleven elements on disk, in blocks of four; and the vector."""
    monkeypatch.setattr(stored_upload, "_BLOCK", 4)
    journal = Journal(tmp_path, bytes(32).hex())
    vector = np.arange(100, 111, dtype=np.uint32)
    upload = journal.store(1, Promised((), MaskedUpload(Tag(0), vector), one_sum=True))
    journal.close()
    return upload, vector


def test_a_stored_upload_is_read_by_any_range(stored: tuple[StoredUpload, Elements]) -> None:
    upload, vector = stored
    for start in range(11):
        for stop in range(start + 1, 12):
            np.testing.assert_array_equal(upload.read(start, stop), vector[start:stop])


@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 43])
def test_R36_a_flipped_bit_is_seen_by_every_range_that_reads_it(
    stored: tuple[StoredUpload, Elements], position: int
) -> None:
    upload, vector = stored
    data = bytearray(upload.path.read_bytes())
    data[position] ^= 1
    upload.path.write_bytes(data)
    for block in range(3):
        start, stop = 4 * block, min(11, 4 * block + 4)
        if block == position // 16:
            with pytest.raises(JournalError, match="is damaged"):
                upload.read(start, stop)
        else:
            np.testing.assert_array_equal(upload.read(start, stop), vector[start:stop])


@pytest.mark.parametrize("change", [-4, -1, 1, 4, 16])
def test_R36_another_length_is_seen(stored: tuple[StoredUpload, Elements], change: int) -> None:
    upload, _ = stored
    data = upload.path.read_bytes()
    upload.path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(JournalError, match="is damaged"):
        upload.read(0, 11)
