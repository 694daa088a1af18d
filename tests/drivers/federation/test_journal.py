"""The server's durable memory: whole or refused, private, and one server at a time."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import SESSION, Federation

from lightsecagg.drivers.federation import durable, marked_database, promise_store
from lightsecagg.drivers.federation import journal as journal_module
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.errors import Aborted, ConfigurationError, JournalError
from lightsecagg.protocol.interface import Phase, Promised
from lightsecagg.protocol.journal_facts import (
    VERSION,
    RosterFixed,
    SharingClosed,
    SumAnnounced,
    UploadWaits,
    encode_fact,
)
from lightsecagg.protocol.messages import MaskedUpload, Member, Roster, SumRequest, Tag
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.record import RoundRecord
from memory_transport import MemoryServer

UPLOADS = {
    client: MaskedUpload(Tag(client), np.arange(5, dtype=np.uint32) + np.uint32(client))
    for client in range(8)
}


def taken(client: int) -> Promised:
    """The record of this client's upload."""
    upload = UPLOADS[client]
    return Promised((UploadWaits(upload.tag, 0),), upload, one_sum=True)


def announced(*survivors: int) -> Promised:
    """The record of U1."""
    request = SumRequest(0, tuple(map(Tag, survivors)))
    return Promised((SumAnnounced(request, survivors, survivors),), one_sum=True)


def uploads_of(journal: Journal, number: int) -> dict[int, list[int]]:
    """What is stored of a round."""
    recall = journal.left(number, None).recall
    return {c: recall(Tag(c)).read(0, 5).tolist() for c in journal.uploads(number)}


EXPECTED = {client: upload.vector.tolist() for client, upload in UPLOADS.items()}
ROSTER = Roster(tuple(Member(i, (bytes([i]) * 32,), bytes(64)) for i in range(8)))
MADE: dict[Path, Federation] = {}
"""Whose the states are."""


def closing(settings: Settings) -> Promised:
    """The record of closed sharing."""
    everybody = tuple(range(8))
    roster = RosterFixed(VERSION, settings.to_bytes(), everybody, 0, 0, ROSTER)
    closed = SharingClosed(tuple((client, b"") for client in everybody))
    return Promised((roster, closed), one_sum=True)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A journal as a crash leaves it: two rounds done, a third one with all its uploads."""
    MADE[tmp_path / "state"] = federation = Federation(tmp_path / "state")
    server = federation.server()
    journal = server._journal
    for number in (1, 2, 3):
        settings = replace(server._settings, round=number)
        journal.open_round(settings)
        for record in (closing(settings), *map(taken, range(8))):
            journal.store(number, record)
        if number < 3:
            journal.store(number, announced(*range(8)))
            journal.complete(number, number, b"the model after %d rounds" % number)
    journal.store(3, announced(*range(8)))
    journal.close()
    return tmp_path / "state"


@contextmanager
def no_descriptor_left(until: str | None) -> Iterator[None]:
    """No file can be opened, until a message with these words is logged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def relent(record: logging.LogRecord) -> bool:
        if until is not None and until in record.getMessage():
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return True

    log = logging.getLogger(durable.__name__)
    log.addFilter(relent)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        log.removeFilter(relent)


def opened(state: Path) -> Journal:
    return Journal(state, SESSION.hex())


def test_everything_comes_back_as_it_was_stored(state: Path) -> None:
    journal = opened(state)
    assert journal.unfinished() == [3]
    left = journal.left(3, None)
    assert left.number == left.settings.round == 3
    records = (closing(left.settings), *map(taken, range(8)), announced(*range(8)))
    assert left.facts == [encode_fact(fact) for record in records for fact in record.facts]
    assert left.has_uploads
    assert uploads_of(journal, 3) == EXPECTED
    assert journal.announced(3) == tuple(range(8))
    assert journal.load_model() == (2, b"the model after 2 rounds")
    assert journal.next_round() == 4
    journal.close()


def test_S06_it_knows_whose_latest_upload_is_in_a_sum(state: Path) -> None:
    """What a server says to a client that was away, also after a restart."""
    journal = opened(state)
    assert journal.summed() == dict.fromkeys(range(8), 2), "the third round is not over"
    settings = journal.settings(3)
    journal.abandon(3, "too few")
    assert (journal.uploaders(), journal.summed()) == (dict.fromkeys(range(8), 3), {})
    journal.open_round(replace(settings, round=4))
    for record in (closing(settings), *map(taken, range(6)), announced(0, 1, 2, 3, 4)):
        journal.store(4, record)
    journal.complete(4, 3, b"the model after 3 rounds")
    journal.close()
    journal = opened(state)
    assert journal.summed() == dict.fromkeys(range(5), 4)
    journal.close()


def test_uploads_that_are_stored_together_are_one_change(state: Path) -> None:
    journal = opened(state)
    journal.open_round(replace(journal.settings(3), round=4))
    before = journal._db._mark.changes
    results = journal.store_all(4, [taken(client) for client in range(8)])
    assert journal._db._mark.changes == before + 1
    assert uploads_of(journal, 4) == EXPECTED
    recall = journal.left(4, None).recall
    assert results == [recall(Tag(client)) for client in range(8)]
    assert journal.store_all(4, []) == []
    assert journal._db._mark.changes == before + 1
    journal.close()


def test_R36_of_uploads_stored_together_each_is_durable_or_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(state)
    journal.open_round(replace(journal.settings(3), round=4))
    full_disk_for(monkeypatch, lambda path: path.name == "4-3-0.u32")
    results = journal.store_all(4, [taken(client) for client in range(8)])
    assert [c for c, result in enumerate(results) if isinstance(result, JournalError)] == [3]
    assert uploads_of(journal, 4) == {c: v for c, v in EXPECTED.items() if c != 3}
    with pytest.raises(JournalError, match="no upload 0 of client 3"):
        journal.left(4, None).recall(Tag(3))
    with pytest.raises(JournalError, match="No space left"):
        journal.store(4, taken(3))
    monkeypatch.undo()
    journal._db._db.execute("DROP TABLE uploads")
    results = journal.store_all(5, [taken(client) for client in range(8)])
    assert all(isinstance(result, JournalError) for result in results)
    journal.close()


def test_uploads_of_a_finished_round_are_gone(state: Path) -> None:
    journal = opened(state)
    journal.abandon(3, "enough")
    assert journal.unfinished() == []
    assert list((state / "uploads").iterdir()) == []
    journal.close()


def test_files_that_a_crash_left_are_swept(state: Path) -> None:
    for name in ("uploads/2-1-0.u32", "uploads/3-9-0.u32", "uploads/3-1-0.tmp", "models/9.tmp"):
        (state / name).write_bytes(b"left behind")
    opened(state).close()
    assert len(list((state / "uploads").iterdir())) == 8
    assert sorted(path.name for path in (state / "models").iterdir()) == ["1.npz", "2.npz"]


def test_two_servers_cannot_share_a_state_folder(state: Path) -> None:
    first = opened(state)
    with pytest.raises(ConfigurationError, match="another server uses the state folder"):
        opened(state)
    first.close()
    opened(state).close()


def test_a_journal_belongs_to_one_federation(state: Path) -> None:
    with pytest.raises(JournalError, match="session is not this federation's"):
        Journal(state, bytes(32).hex())
    opened(state).close()  # and the failed attempt holds no lock


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        journal = Journal(tmp_path / "state", SESSION.hex())
        journal.store(1, taken(0))
        modes = {
            path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777
            for path in (tmp_path / "state", *(tmp_path / "state").rglob("*"))
        }
        journal.close()
    finally:
        os.umask(before)
    assert {mode for path, mode in modes.items() if (tmp_path / path).is_dir()} <= {0o700}
    files = {path: mode for path, mode in modes.items() if not (tmp_path / path).is_dir()}
    assert set(files.values()) == {0o600}, files


# -- damage (R36) --------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "longer", "gone", "swapped"])
def test_R36_a_damaged_upload_is_refused(state: Path, damage: str) -> None:
    path = state / "uploads" / "3-5-0.u32"
    match damage:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-4])
        case "flipped":
            flip(path, 7)
        case "longer":
            path.write_bytes(path.read_bytes() + bytes(4))
        case "gone":
            path.unlink()
        case "swapped":
            path.write_bytes((state / "uploads" / "3-4-0.u32").read_bytes())
    journal = opened(state)
    with pytest.raises(JournalError, match="the stored upload 0 of client 5 in round 3 is"):
        journal.left(3, None).recall(Tag(5))
    journal.close()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_R36_a_damaged_checkpoint_is_refused(state: Path, damage: str) -> None:
    path = state / "models" / "2.npz"
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        flip(path, 3)
    else:
        path.write_bytes(path.read_bytes()[:5])
    journal = opened(state)
    with pytest.raises(JournalError, match=r"2\.npz is (damaged|gone)"):
        journal.load_model()
    journal.close()


@pytest.mark.parametrize("column", ["settings", "survivors"])
def test_R36_an_altered_row_is_refused(state: Path, column: str) -> None:
    journal = opened(state)
    with sqlite3.connect(state / "journal.sqlite") as database:
        query = f"SELECT {column} FROM rounds WHERE number = 3"  # noqa: S608
        (blob,) = database.execute(query).fetchone()
        altered = blob[:-1] + bytes([blob[-1] ^ 1])
        database.execute(f"UPDATE rounds SET {column} = ? WHERE number = 3", (altered,))  # noqa: S608
    database.close()
    read = journal.settings if column == "settings" else journal.announced
    with pytest.raises(JournalError, match=f"entry 3/{column} is damaged"):
        read(3)
    journal.close()
    with pytest.raises(JournalError, match="its rows are not those that were stored"):
        opened(state)


def test_R36_an_entry_of_another_round_does_not_pass(state: Path) -> None:
    """U1 of one round in the place of another's: each entry is bound to its place."""
    journal = opened(state)
    with sqlite3.connect(state / "journal.sqlite") as database:
        database.execute(
            "UPDATE rounds SET survivors = (SELECT survivors FROM rounds WHERE number = 2) "
            "WHERE number = 3"
        )
    database.close()
    with pytest.raises(JournalError, match="entry 3/survivors is damaged"):
        journal.announced(3)
    journal.close()


@pytest.mark.parametrize("damage", ["header", "truncated", "not a database"])
def test_R36_a_damaged_database_is_refused(state: Path, damage: str) -> None:
    path = state / "journal.sqlite"
    data = path.read_bytes()
    assert len(data) > 4096
    match damage:
        case "header":
            path.write_bytes(b"SQLite format 4\0" + data[16:])
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case _:
            path.write_bytes(b"something else entirely" * 400)
    with pytest.raises(JournalError, match=r"cannot open the journal|is damaged"):
        opened(state)


def test_R36_a_lost_tail_of_the_log_is_noticed(state: Path) -> None:
    """The whole of the last change in the write-ahead log, and SQLite drops it at a bad frame."""
    before = (state / "journal.sqlite").read_bytes()
    journal = opened(state)
    reader = sqlite3.connect(state / "journal.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM meta").fetchall()  # while somebody reads, nothing leaves the log
    journal.abandon(3, "a promise that stays in the log")
    log = (state / "journal.sqlite-wal").read_bytes()
    mark = (state / "journal.mark").read_bytes()
    assert len(log) > 4096
    assert (state / "journal.sqlite").read_bytes() == before
    reader.close()
    journal.close()

    def restart(log: bytes) -> str:
        for name in ("journal.sqlite-wal", "journal.sqlite-shm"):
            (state / name).unlink(missing_ok=True)
        (state / "journal.sqlite").write_bytes(before)
        (state / "journal.mark").write_bytes(mark)
        if log:
            (state / "journal.sqlite-wal").write_bytes(log)
        try:
            journal = opened(state)
        except JournalError as error:
            return str(error)
        ended = journal.ended()[3]
        journal.close()
        return str(ended)

    assert restart(log) == "a promise that stays in the log"
    for damaged in (b"", log[: len(log) // 2], log[:-1]):
        assert "has lost what it had promised" in restart(damaged)
    flips = range(0, len(log), 101)
    verdicts = [restart(log[:i] + bytes([log[i] ^ 4]) + log[i + 1 :]) for i in flips]
    assert all(
        "has lost what it had promised" in verdict or verdict == "a promise that stays in the log"
        for verdict in verdicts
    )
    assert sum("has lost" in verdict for verdict in verdicts) > len(verdicts) // 2


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.mark", "both"])
def test_R36_a_missing_file_of_the_journal_is_noticed_and_no_upload_deleted(
    state: Path, name: str
) -> None:
    for missing in ("journal.sqlite", "journal.mark") if name == "both" else (name,):
        (state / missing).unlink()
    uploads = sorted(path.name for path in (state / "uploads").iterdir())
    with pytest.raises(JournalError, match="has lost what it had promised"):
        opened(state)
    assert sorted(path.name for path in (state / "uploads").iterdir()) == uploads
    assert len(uploads) == 8


def test_R36_no_flipped_bit_of_the_database_makes_it_forget(state: Path) -> None:
    """Every byte in turn would take minutes: a prime stride meets headers, keys and contents."""
    path = state / "journal.sqlite"
    data, mark = path.read_bytes(), (state / "journal.mark").read_bytes()

    def content(journal: Journal) -> object:
        left = journal.left(3, None).facts
        sets = journal.announced(3)
        return journal.ended(), journal.load_model(), uploads_of(journal, 3), left, sets

    journal = opened(state)
    whole = content(journal)
    journal.close()
    refused = 0
    for place in range(0, len(data), 197):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        (state / "journal.mark").write_bytes(mark)
        try:
            journal = opened(state)
        except JournalError:
            refused += 1
            continue
        assert content(journal) == whole
        journal.close()
    assert refused > 10


def test_R36_a_change_that_was_not_marked_yet_is_kept(state: Path) -> None:
    """A crash between the database and the mark: stored, and nobody has heard of it."""
    mark = (state / "journal.mark").read_bytes()
    journal = opened(state)
    journal.abandon(3, "unheard of")
    journal.close()
    (state / "journal.mark").write_bytes(mark)
    journal = opened(state)
    assert journal.ended()[3] == "unheard of"
    journal.close()
    assert (state / "journal.mark").read_bytes() != mark


def test_R36_a_mark_that_finds_the_disk_full_is_written_with_the_next_change(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(state)
    with monkeypatch.context() as patched:
        full_disk_for(patched, lambda path: path.name == "journal.mark")
        for _ in range(2):
            with pytest.raises(JournalError, match="No space left"):
                journal.store(3, Promised((), past=((0, 0),), one_sum=True))
    journal.abandon(3, "room again")
    journal.close()
    journal = opened(state)
    assert journal.ended()[3] == "room again"
    journal.close()


# -- damage and full disks under a running server ------------------------------------------------


def attempt(federation: Federation, **rounds: Any) -> list[RoundRecord]:
    """Run; the records also if the federation gave up."""
    server = federation.server(**rounds)

    async def scenario() -> None:
        async with federation.connected([federation.client(i) for i in federation.jobs]):
            with suppress(Aborted):
                await asyncio.wait_for(server.run(), 30)

    asyncio.run(scenario())
    return server.records


def full_disk_for(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    original = durable.write_synced

    def write(path: Path, data: bytes) -> None:
        if refused(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, data)

    for module in (journal_module, promise_store, marked_database):
        monkeypatch.setattr(module, "write_synced", write)


def test_R36_an_upload_that_finds_the_disk_full_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk_for(monkeypatch, lambda path: path.name == "1-3-0.u32")
    federation = Federation(tmp_path)
    records = attempt(federation, number=2, upload=600)
    assert records[0].included == [0, 1, 2, 4, 5, 6, 7]
    assert records[0].dropped == {"upload": [3]}
    assert records[1].included == list(range(8))
    federation.check(records[1])
    assert "No space left on device" in caplog.text


def test_R36_a_full_disk_aborts_the_round_and_the_server_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk_for(monkeypatch, lambda path: path.name.startswith("1-"))
    federation = Federation(tmp_path)
    records = attempt(federation, number=1, retries=1, upload=600)
    assert records[0].aborted is not None
    assert records[0].included == []
    federation.check(records[1])


def test_R36_damage_between_upload_and_sum_gives_no_partial_aggregate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Journal.store_all

    def store(self: Journal, number: int, records: list[Promised]) -> list[Any]:
        results = original(self, number, records)
        if number == 1 and any(each.upload and each.sender == 6 for each in records):
            flip(tmp_path / "uploads" / "1-6-0.u32", 9)
        return results

    monkeypatch.setattr(Journal, "store_all", store)
    federation = Federation(tmp_path)
    records = attempt(federation, retries=1)
    assert records[0].aborted == "the stored upload 0 of client 6 in round 1 is damaged"
    assert records[0].included == []
    federation.check(records[1])


def test_R36_U1_that_cannot_be_stored_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Journal.store

    def store(self: Journal, number: int, record: Any) -> Any:
        facts = record.facts if isinstance(record, Promised) else ()
        if number == 1 and any(isinstance(fact, SumAnnounced) for fact in facts):
            raise JournalError("cannot write the journal")
        return original(self, number, record)

    monkeypatch.setattr(Journal, "store", store)
    federation = Federation(tmp_path)
    records = attempt(federation, retries=1)
    assert records[0].aborted == "cannot write the journal"
    assert Phase.AGREE not in records[0].phases
    federation.check(records[1])


def test_R36_a_server_refuses_to_resume_a_damaged_round_until_told_to_give_it_up(
    state: Path,
) -> None:
    (state / "uploads" / "3-5-0.u32").unlink()
    federation = Federation(state)
    federation.identities, federation.allow_list = MADE[state].identities, MADE[state].allow_list
    federation.job.load = lambda data: None  # the fixture's checkpoint is no vector
    with pytest.raises(JournalError, match=r"client 5 in round 3 is gone.*--abandon-round"):
        asyncio.run(federation.server(number=3).run())

    federation.transport = MemoryServer(range(8))
    clients = [federation.client(i) for i in range(8)]
    for ledger in federation.ledgers.values():
        ledger.accept_loss(3)  # the clients of the fixture had others

    async def again() -> list[RoundRecord]:
        async with federation.connected(clients):
            server = federation.server(number=3)
            return await asyncio.wait_for(server.run(abandon=True), 30)

    (record,) = asyncio.run(again())
    assert record.round == 4
    federation.check(record)


@pytest.mark.parametrize("announces", [True, False])
def test_R59_S42_a_round_that_is_given_up_renews_the_model_unless_its_set_was_announced(
    state: Path, announces: bool
) -> None:
    server = Federation(state).server(number=3)
    server._job.load = lambda data: None
    renewed = count()
    server._job.renew = lambda: next(renewed)
    if not announces:
        with server._journal._db.change():
            server._journal._db.execute("UPDATE rounds SET survivors = NULL WHERE number = 3", ())
    server._begin(abandon=True)
    assert server._journal.renewals() == next(renewed) == (0 if announces else 1)


def test_R59_the_model_of_a_sum_is_not_renewed_for_what_failed_before_it(state: Path) -> None:
    journal = opened(state)
    settings = journal.settings(3)
    journal.abandon(3, "no set", renews=True)
    journal.open_round(replace(settings, round=4))
    journal.complete(4, 3, b"the model after 3 rounds")
    journal.close()
    journal = opened(state)
    assert journal.renewals() == 0
    journal.close()


def test_R36_a_checkpoint_of_another_kind_of_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a folder that summed vectors is given to a server that trains."""
    federation = Federation(tmp_path)
    asyncio.run(federation.run())

    def load(data: bytes) -> None:
        with np.load(BytesIO(data), allow_pickle=False) as arrays:
            raise AssertionError(f"a sum is no archive, but has {arrays.files}")

    monkeypatch.setattr(federation.job, "load", load)
    with pytest.raises(JournalError, match="the checkpoint is of another kind of job") as caught:
        asyncio.run(federation.server(number=2).run())
    assert "state folder" in str(caught.value)


def test_R36_the_backup_recipe_works_and_a_mixture_is_refused(state: Path) -> None:
    backup = state.with_name("backup")
    shutil.copytree(state, backup)
    journal = opened(state)
    journal.abandon(3, "after the backup")
    journal.close()
    shutil.copy(backup / "journal.sqlite", state / "journal.sqlite")
    with pytest.raises(JournalError, match="restore the whole folder from one backup"):
        opened(state)
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    journal = opened(state)
    assert journal.unfinished() == [3]
    assert journal.left(3, None).has_uploads
    journal.close()


# -- descriptors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda journal: journal.store(2, taken(0)),
        lambda journal: journal.store(3, announced(0, 1)),
        lambda journal: journal.complete(3, 3, b"the model after 3 rounds"),
        lambda journal: journal.abandon(3, "nobody came"),
        lambda journal: journal.keep_models({1}),
        lambda journal: uploads_of(journal, 3),
    ],
)
def test_R60_a_journal_waits_for_a_descriptor_and_goes_on(
    state: Path, write: Callable[[Journal], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers had them all: that is no broken disk, and it passes."""
    journal = opened(state)
    with no_descriptor_left(until="waits for a descriptor"):
        write(journal)
    journal.close()
    opened(state).close()
    assert caplog.text.count("waits for a descriptor") == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_R60_whoever_has_taken_the_descriptors_a_file_waits(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has too many open files, or the whole system."""
    tries = iter([OSError(number, "no"), OSError(number, "no"), None])

    def opening() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "opened"

    monkeypatch.setattr(durable, "_PAUSE", 0.0)
    assert durable.patiently(opening) == "opened"


def test_R60_a_journal_does_not_wait_for_ever(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_PATIENCE", 0.0)
    journal = opened(state)
    with no_descriptor_left(until=None), pytest.raises(JournalError, match="Too many open files"):
        journal.store(3, announced(0, 1))
    journal.close()
