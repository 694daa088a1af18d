"""Every reader of a local file, with every kind of damage: refused, and the file is named."""

from __future__ import annotations

import numpy as np
import pytest

from sound_files import RUBBISH, Reader, refuses, sound_files


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
    *("idx", "idx.gz", "cifar", "image"),
]
READERS = [*PARTY_FILES, *DATA_FILES]

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
