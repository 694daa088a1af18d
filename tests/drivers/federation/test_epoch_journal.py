"""What a server of the asynchronous mode keeps: whole, once, and noticed if it is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.drivers.federation.epoch_journal import EpochJournal
from lightsecagg.errors import JournalError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters
from lightsecagg.protocol.interface import EpochChanged
from lightsecagg.protocol.messages import BufferedUpload, SealedShare, Tag
from lightsecagg.protocol.settings import ProtocolName, Settings

SESSION = "ab" * 32
SETTINGS = Settings(
    ProtocolName.LIGHTSECAGG,
    Parameters(5, 1, 1),
    Quantizer(DEFAULT_FIELD, bound=1.0, summands=5),
    7,
    bytes(32),
    1,
    bytes(32),
)


def upload(owner: int, serial: int) -> BufferedUpload:
    vector = np.random.default_rng([owner, serial]).integers(0, 2**31, 7, dtype=np.uint32)
    return BufferedUpload(Tag(owner, serial, 0, bytes(32), bytes(32), bytes(64)), vector)


def opened(folder: Path) -> EpochJournal:
    journal = EpochJournal(folder, SESSION)
    if not journal.unfinished():
        journal.open_round(SETTINGS)
    return journal


def with_two_uploads(folder: Path) -> EpochJournal:
    journal = opened(folder)
    journal.change(1, EpochChanged(b"one", ((2, 0),), upload(2, 0)))
    journal.change(1, EpochChanged(b"two", ((2, 0), (3, 5)), upload(3, 5)))
    return journal


def test_R31_promises_and_uploads_outlive_the_process(tmp_path: Path) -> None:
    with_two_uploads(tmp_path).close()
    journal = opened(tmp_path)
    assert journal.unfinished() == [1]
    assert journal.memory(1) == b"two"
    assert journal.settings(1) == SETTINGS
    assert journal.uploaders() == {2: 1, 3: 1}
    for owner, serial in ((2, 0), (3, 5)):
        sent = upload(owner, serial)
        assert journal.recall(1)(sent.tag).equals(sent.vector)
    with pytest.raises(JournalError, match="no upload 1 of client 2 in epoch 1 is stored"):
        journal.recall(1)(upload(2, 1).tag)
    journal.close()


def test_R31_a_model_is_stored_with_what_is_left_to_do_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the file of the model and the change, nothing has happened."""
    journal = with_two_uploads(tmp_path)
    landed = EpochChanged(b"landed", ((3, 5),))

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
    assert (journal.memory(1), journal.buffers()) == (b"two", 0)
    journal.advance(1, 1, 1, b"model", landed, {1: bytes(32)})
    journal.close()
    journal = opened(tmp_path)
    assert journal.load_model() == (1, b"model")
    assert (journal.memory(1), journal.buffers(), journal.hashes()) == (
        b"landed",
        1,
        {1: bytes(32)},
    )
    assert [path.name for path in (tmp_path / "uploads").iterdir()] == ["1-3-5.u32"]
    journal.abandon(1, "over")
    assert (journal.memory(1), journal.unfinished()) == (b"", [])
    assert not list((tmp_path / "uploads").iterdir())
    journal.close()


def sealed(owner: int, serial: int, recipient: int) -> SealedShare:
    content = bytes([owner, serial, recipient]) * 7
    return SealedShare(owner, recipient, ShareKind.EXPLICIT, 5, bytes(16), content, serial)


def mask(owner: int, serial: int) -> tuple[SealedShare, ...]:
    return tuple(sealed(owner, serial, recipient) for recipient in (0, 1))


def test_R31_the_shares_of_a_mask_outlive_the_process_until_nobody_lacks_one(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path)
    journal.change(1, EpochChanged(b"one", (), None, ((3, 0),), mask(3, 0)))
    both = (*mask(3, 1), *mask(3, 2))
    journal.change(1, EpochChanged(b"two", (), None, ((3, 0), (3, 1), (3, 2)), both))
    journal.close()
    journal = opened(tmp_path)
    assert [*journal.shares(1)] == [*mask(3, 0), *both]
    journal.change(1, EpochChanged(b"three", (), None, ((3, 1),)))
    assert [*journal.shares(1)] == [*mask(3, 1)]
    journal.advance(1, 1, 1, b"model", EpochChanged(b"four", (), None, ((3, 1),)), {})
    assert [*journal.shares(1)] == [*mask(3, 1)]
    journal.abandon(1, "over")
    assert [*journal.shares(1)] == []
    journal.close()


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
    with pytest.raises(JournalError, match="stored upload 0 of client 2 in epoch 1 is"):
        journal.recall(1)(upload(2, 0).tag)
    journal.close()
