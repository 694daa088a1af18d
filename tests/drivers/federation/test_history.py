"""`rounds.json`: every round, over restarts, whatever happens to the file."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import pytest
from small_federation import Federation, FreshVectors

from lightsecagg.drivers.federation import history as history_module
from lightsecagg.drivers.federation import server as server_module
from lightsecagg.drivers.federation.history import History
from lightsecagg.errors import Aborted
from lightsecagg.session.record import PhaseRecord, RoundRecord
from memory_transport import MemoryServer


def record_of(number: int, *invited: int) -> RoundRecord:
    return RoundRecord(number, "lightsecagg", list(invited), included=list(invited))


def stored(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "rounds.json").read_text())
    return found


def restarted(federation: Federation, **rounds: Any) -> list[RoundRecord]:
    """What another server on the same state does."""
    federation.transport = MemoryServer(range(8))
    return asyncio.run(federation.run(**rounds))


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(history_module, "write_synced", write)


def test_the_history_survives_restarts(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    first = History(path)
    first.put(record_of(1, 0, 1))
    first.put(record_of(2, 1, 2))
    second = History(path)
    assert (1 in second, 3 in second) == (True, False)
    assert second.invited == {0: 1, 1: 2, 2: 2}
    second.put(record_of(3, 0))
    second.put(RoundRecord(2, "lightsecagg", [1, 2], aborted="resumed, and lost"))
    assert [(each["round"], each["aborted"]) for each in stored(tmp_path)] == [
        (1, None),
        (2, "resumed, and lost"),
        (3, None),
    ]


@pytest.mark.parametrize("content", ["", '[{"round": 1', '{"round": 1}', "[[1]]", "\x00"])
def test_a_damaged_history_is_put_aside_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = tmp_path / "rounds.json"
    path.write_text(content)
    history = History(path)
    assert "it is kept as rounds.damaged and a new history begins" in caplog.text
    assert (tmp_path / "rounds.damaged").read_text() == content
    history.put(record_of(4, 0))
    assert [each["round"] for each in stored(tmp_path)] == [4]


def test_rounds_are_in_the_file_when_they_end_and_stay_there(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    seen: list[list[int]] = []
    original = History.put

    def put(self: History, *records: RoundRecord) -> None:
        original(self, *records)
        seen.append([each["round"] for each in stored(tmp_path)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "put", put)
        asyncio.run(federation.run(number=2))
        assert seen == [[1], [1, 2]]
        restarted(federation, number=3)
    assert seen == [[1], [1, 2], [1, 2, 3]]
    assert all(each["included"] == list(range(8)) for each in stored(tmp_path))


def test_R36_a_full_disk_in_the_history_ends_no_round_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk(monkeypatch)
    federation = Federation(tmp_path)
    records = asyncio.run(federation.run(number=2))
    assert [record.aborted for record in records] == [None, None]
    assert caplog.text.count("rounds.json cannot be written: No space left on device") == 2
    federation.jobs = {i: FreshVectors(i, fail_in=3) for i in range(8)}
    with pytest.raises(Aborted, match="attempts at round 3: only 0 clients"):
        restarted(federation, number=3, upload=60)
    # Room again: what could not be written is told from the journal.
    monkeypatch.undo()
    federation.jobs = {i: FreshVectors(i) for i in range(8)}
    restarted(federation, number=3)
    history = stored(tmp_path)
    assert [each["round"] for each in history] == [1, 2, 3, 4]
    assert [each["recalled"] for each in history] == [True, True, True, False]
    assert [each["included"] for each in history] == [list(range(8))] * 2 + [[], list(range(8))]
    assert "only 0 clients" in history[2]["aborted"]


def test_a_clock_that_is_set_back_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamps jump with the machine's clock; seconds do not."""

    class Clock:
        """`time`, but the time of day goes back by an hour whenever somebody asks for it."""

        now = 1e9

        def time(self) -> float:
            self.now -= 3600
            return self.now

        def __getattr__(self, name: str) -> Any:
            import time

            return getattr(time, name)

    monkeypatch.setattr(server_module, "time", Clock())
    (record,) = asyncio.run(Federation(tmp_path).run())
    starts = [phase.start for phase in record.phases.values()]
    assert starts == sorted(starts, reverse=True)
    assert all(0 < phase.seconds < 600 for phase in record.phases.values())
    assert record.seconds == pytest.approx(sum(p.seconds for p in record.phases.values()))


def test_a_phase_ends_where_its_seconds_say() -> None:
    assert PhaseRecord(1000.0, 2.5).to_json()["end"] == 1002.5
