"""What a server has promised: kept whole, once, and noticed if it is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.errors import JournalError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.journal_facts import TimeSkipped, encode_fact
from lightsecagg.protocol.messages import MaskedUpload, SealedShare, Tag
from lightsecagg.protocol.settings import Settings

SESSION = "ab" * 32
SETTINGS = Settings(
    "lightsecagg",
    Parameters(5, 1, 1),
    Quantizer(DEFAULT_FIELD, bound=1.0, summands=5),
    7,
    bytes(32),
    1,
    bytes(32),
)


def upload(owner: int, serial: int) -> MaskedUpload:
    vector = np.random.default_rng([owner, serial]).integers(0, 2**31, 7, dtype=np.uint32)
    return MaskedUpload(Tag(owner, serial, bytes(32), 0, bytes(32), bytes(32), bytes(64)), vector)


def opened(folder: Path) -> Journal:
    journal = Journal(folder, SESSION)
    if not journal.unfinished():
        journal.open_round(SETTINGS)
    return journal


def skipped(*times: int) -> tuple[TimeSkipped, ...]:
    return tuple(map(TimeSkipped, times))


def facts(*times: int) -> list[bytes]:
    return [encode_fact(fact) for fact in skipped(*times)]


def with_two_uploads(folder: Path) -> Journal:
    journal = opened(folder)
    journal.store(1, Promised(skipped(1), upload(2, 0)))
    journal.store(1, Promised(skipped(2, 3), upload(3, 5)))
    return journal


def test_R31_promises_and_uploads_outlive_the_process(tmp_path: Path) -> None:
    with_two_uploads(tmp_path).close()
    journal = opened(tmp_path)
    assert journal.unfinished() == [1]
    assert journal.left(1, None).facts == facts(1, 2, 3)
    assert journal.settings(1) == SETTINGS
    for owner, serial in ((2, 0), (3, 5)):
        sent = upload(owner, serial)
        assert journal.left(1, None).recall(sent.tag).read(0, 7).tolist() == sent.vector.tolist()
    with pytest.raises(JournalError, match="no upload 1 of client 2 in round 1 is stored"):
        journal.left(1, None).recall(upload(2, 1).tag)
    journal.close()


def test_R31_a_model_is_stored_with_what_is_left_to_do_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the file of the model and the change, nothing has happened."""
    journal = with_two_uploads(tmp_path)
    landed = Promised(skipped(4), past=((2, 0),))

    class Killed(Exception):  # noqa: N818 - not an error
        pass

    def die(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(journal, "_put", die)
        with pytest.raises(JournalError):
            journal.advance(1, 1, 1, b"model", landed, {1: bytes(32)})
    journal.close()
    journal = opened(tmp_path)
    assert journal.load_model() is None
    assert (journal.left(1, None).facts, journal.buffers()) == (facts(1, 2, 3), 0)
    journal.advance(1, 1, 1, b"model", landed, {1: bytes(32)})
    journal.close()
    journal = opened(tmp_path)
    assert journal.load_model() == (1, b"model")
    assert (journal.left(1, None).facts, journal.buffers()) == (facts(1, 2, 3, 4), 1)
    assert journal.hashes() == {1: bytes(32)}
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == ["1-3-5.u32"]
    journal.abandon(1, "over")
    assert (journal.left(1, None).facts, journal.unfinished()) == ([], [])
    assert not list((tmp_path / "uploads").iterdir())
    journal.close()


def test_R31_a_file_that_cannot_be_deleted_does_not_undo_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the party would give up, in memory, an upload that its facts bring back."""
    journal, unlink = with_two_uploads(tmp_path), Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix != ".u32":
            unlink(path, missing_ok)
        else:
            raise OSError("read-only")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        journal.store(1, Promised(skipped(4), past=((2, 0),)))
    assert journal.left(1, None).facts == facts(1, 2, 3, 4)
    journal.close()
    opened(tmp_path).close()
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == ["1-3-5.u32"]


def sealed(owner: int, serial: int, recipient: int) -> SealedShare:
    content = bytes([owner, serial, recipient]) * 7
    return SealedShare(owner, recipient, ShareKind.EXPLICIT, 5, bytes(16), content, serial)


def mask(owner: int, serial: int) -> tuple[SealedShare, ...]:
    return tuple(sealed(owner, serial, recipient) for recipient in (0, 1))


def test_R31_the_shares_of_a_mask_outlive_the_process_until_nobody_lacks_one(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path)
    journal.store(1, Promised(skipped(1), shares=mask(3, 0)))
    both = (*mask(3, 1), *mask(3, 2))
    journal.store(1, Promised(skipped(2), shares=both))
    journal.close()
    journal = opened(tmp_path)
    recall = journal.left(1, None).recall_shares
    assert [recall(3, serial) for serial in range(3)] == [mask(3, serial) for serial in range(3)]
    journal.store(1, Promised(skipped(3), past=((3, 0), (9, 9))))
    journal.advance(1, 1, 1, b"model", Promised(skipped(4), past=((3, 2),)), {})
    assert recall(3, 1) == mask(3, 1)
    for serial in (0, 2):
        with pytest.raises(JournalError, match=f"entry 1/shares/3/{serial} is missing"):
            recall(3, serial)
    journal.abandon(1, "over")
    with pytest.raises(JournalError, match="is missing"):
        recall(3, 1)
    journal.close()


def test_R36_a_fact_that_is_missing_is_noticed(tmp_path: Path) -> None:
    journal = with_two_uploads(tmp_path)
    with journal._db.change():
        journal._db.execute("DELETE FROM facts WHERE place = 1")
    with pytest.raises(JournalError, match="a fact of round 1 is missing"):
        journal.left(1, None)
    journal.close()


def test_what_a_change_writes_does_not_grow_with_what_waits(tmp_path: Path) -> None:
    """Rows and their bytes; the vectors are in files of their own."""
    journal = opened(tmp_path)
    sizes = []
    for number in range(40):
        before = journal_bytes(journal)
        journal.store(1, Promised(skipped(number), upload(number, 0)))
        sizes.append(journal_bytes(journal) - before)
    assert max(sizes[5:]) <= min(sizes[5:]) + 8, "a number has another digit"
    journal.close()


def journal_bytes(journal: Journal) -> int:
    total = 0
    for table in ("meta", "facts", "uploads"):
        for row in journal._db.execute(f"SELECT * FROM {table}"):  # noqa: S608
            total += sum(len(value) for value in row if isinstance(value, bytes))
    return total


@pytest.mark.parametrize("damage", ["altered", "cut", "gone"])
def test_R36_an_upload_that_is_damaged_is_noticed_before_it_is_summed(
    tmp_path: Path, damage: str
) -> None:
    with_two_uploads(tmp_path).close()
    path = tmp_path / "uploads" / "1-2-0.u32"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "altered" else data[:-1])
    journal = opened(tmp_path)
    with pytest.raises(JournalError, match="stored upload 0 of client 2 in round 1 is"):
        journal.left(1, None).recall(upload(2, 0).tag)
    journal.close()
