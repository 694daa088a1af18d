"""Every reader of a local file, with every kind of damage: refused, and the file is named."""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest

from lightsecagg.errors import ConfigurationError, JournalError
from sound_files import Reader, sound_files


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """One sound file of each kind; the tests put it back."""
    return sound_files(tmp_path_factory.mktemp("sound"))


PARTY_FILES = [
    *("server.toml", "client.toml", "allow-list", "register", "identity"),
    *("authority", "certificate", "key", "ledger", "journal"),
    *("mark", "authority key", "best", "model", "rounds", "token", "keys of nodes"),
]
DATA_FILES = [
    *("vector.npy", "vectors.npz", "data.npz", "writers.npz", "train.csv", "leaf"),
    *("idx", "idx.gz", "cifar", "image", "cell", "report", "run"),
]
READERS = [*PARTY_FILES, *DATA_FILES]

NOISE = bytes(np.random.default_rng(7).integers(0, 256, 4096, dtype=np.uint8))
RUBBISH = {
    "empty": b"",
    "binary": NOISE,
    "not UTF-8": b"\xff\xfe\xfd" * 100,
    "zeros": bytes(512),
    "arrays in arrays": b"[" * 5000,
    "a begun archive": b"PK\x03\x04" + NOISE,
    "a begun array": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'shape': (9999999999999,), }\n",
    "a begun certificate": b"-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n",
    "a begun key": b"-----BEGIN PRIVATE KEY-----\nMAo=\n-----END PRIVATE KEY-----\n",
    "a begun pickle": b"\x80\x02" + b"(" * 5000,
}

SOUND = {
    ("journal", "empty"),  # a new database
    ("token", "arrays in arrays"),  # long enough, and printable
}
"""What is no rubbish to a reader."""


def test_the_list_of_readers_is_whole(sources: dict[str, Reader]) -> None:
    assert list(sources) == READERS
    for path, read in sources.values():
        read()
        assert path.is_file()


def refuses(reader: Reader, content: bytes) -> bool:
    """Whether the reader refuses this content in our own words; it may take it, but not fail."""
    path, read = reader
    sound = path.read_bytes()
    beside = [path.with_name(path.name + end) for end in ("-wal", "-shm")]
    path.write_bytes(content)
    said = None
    try:
        read()
    except (ConfigurationError, JournalError) as error:
        said = str(error)
    finally:
        path.write_bytes(sound)
        for other in beside:
            with suppress(FileNotFoundError):
                other.unlink()
    if said is None:
        return False
    # SQLite's file is named by the folder that holds it.
    assert re.search(f"{re.escape(path.name)}|{re.escape(str(path.parent))}", said)
    assert len(said) < 1000
    assert said.isprintable()
    return True


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("name", READERS)
def test_rubbish_is_refused_and_the_file_is_named(
    sources: dict[str, Reader], name: str, rubbish: str
) -> None:
    assert refuses(sources[name], RUBBISH[rubbish]) or (name, rubbish) in SOUND


@pytest.mark.parametrize("name", READERS)
def test_a_file_cut_short_is_read_or_refused(sources: dict[str, Reader], name: str) -> None:
    sound = sources[name][0].read_bytes()
    cuts = sorted({len(sound) * k // 32 for k in range(32)} | {len(sound) - 1})
    refused = [refuses(sources[name], sound[:cut]) for cut in cuts]
    assert any(refused)


@pytest.mark.parametrize("name", READERS)
def test_a_file_with_altered_bytes_is_read_or_refused(
    sources: dict[str, Reader], name: str
) -> None:
    sound = sources[name][0].read_bytes()
    rng = np.random.default_rng(11)
    for _ in range(60):
        altered = bytearray(sound)
        for position in rng.integers(0, min(len(sound), 2000), 3):
            altered[position] = rng.integers(0, 256)
        refuses(sources[name], bytes(altered))
