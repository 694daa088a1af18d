"""Targets on files: every reader of a file, fed with files that it did not write."""

from __future__ import annotations

import json
import logging
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from fuzz_decoders import durable_round, film, memory_folder
from fuzz_target import Target

from lightsecagg.drivers.federation.dashboard.folder import FolderBoard
from lightsecagg.drivers.federation.durable import checksummed
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.promise_store import fact_of
from lightsecagg.errors import ConfigurationError, JournalError, TransportError
from lightsecagg.training.datasets.cifar import _png_parts
from sound_files import Reader, sound_files


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Made on first use: `scripts/fuzz` forks, and every target writes files of its own."""
    return tempfile.TemporaryDirectory(dir=memory_folder())


FEDERATION = "drivers/federation"
DATASETS = "training/datasets"
COVERS = {
    "server.toml": (f"{FEDERATION}/config.py:load_config",),
    "client.toml": (f"{FEDERATION}/config.py:load_config",),
    "allow-list": (
        f"{FEDERATION}/membership.py:load_membership",
        f"{FEDERATION}/membership.py:read_membership",
    ),
    "register": (f"{FEDERATION}/register.py:load_register",),
    "identity": (f"{FEDERATION}/provisioning.py:load_identity",),
    "authority": ("drivers/transport/tls.py:_read", "drivers/transport/tls.py:_parse"),
    "certificate": ("drivers/transport/tls.py:_parse",),
    "key": ("drivers/transport/tls.py:Credentials.load",),
    "ledger": (f"{FEDERATION}/client_ledger.py:ClientLedger._load",),
    "journal": (f"{FEDERATION}/marked_database.py:MarkedDatabase._mark_in",),
    "mark": (f"{FEDERATION}/marked_database.py:MarkedDatabase._mark_in",),
    "authority key": (f"{FEDERATION}/administration.py:Administration.__init__",),
    "best": (f"{FEDERATION}/checkpoints.py:load_best",),
    "model": (f"{FEDERATION}/models.py:read_model",),
    "rounds": (f"{FEDERATION}/dashboard/folder.py:FolderBoard.look",),
    "token": (f"{FEDERATION}/dashboard/web.py:read_token",),
    "keys of nodes": ("drivers/flower/node.py:load_keys",),
    "vector.npy": (f"{FEDERATION}/jobs.py:_read_vector",),
    "vectors.npz": (f"{FEDERATION}/jobs.py:_read_vector",),
    "data.npz": (f"{DATASETS}/tables.py:load_arrays",),
    "writers.npz": (f"{DATASETS}/tables.py:load_arrays",),
    "train.csv": (f"{DATASETS}/tables.py:_read_table",),
    "leaf": (f"{DATASETS}/leaf.py:_read_part",),
    "idx": (f"{DATASETS}/idx.py:read_idx",),
    "idx.gz": (f"{DATASETS}/idx.py:read_idx",),
    "cifar": (f"{DATASETS}/cifar.py:read_batch",),
    "image": (f"{DATASETS}/images.py:open_image",),
}
SLOW = {"journal", "mark", "ledger", "authority key", "server.toml", "client.toml"}


@cache
def sound() -> dict[str, Reader]:
    return sound_files(Path(_folder().name) / "sound")


@cache
def content_of(name: str) -> bytes:
    return sound()[name][0].read_bytes()


def reader(name: str) -> Callable[[bytes], None]:
    """Reads the bytes in the place of the sound file."""

    def read(data: bytes) -> None:
        path, parse = sound()[name]
        original = content_of(name)
        path.write_bytes(data)
        try:
            parse()
        finally:
            path.write_bytes(original)
            for end in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    path.with_name(path.name + end).unlink()

    return read


def of_sound_file(name: str) -> Target:
    return Target(
        "file:" + name.replace(" ", "-"),
        reader(name),
        lambda: [content_of(name)],
        (ConfigurationError, JournalError, TransportError),
        COVERS[name],
        slow=name in SLOW,
    )


# -- files that need a folder of their own --------------------------------------------------------


def read_history(data: bytes) -> None:
    """A server's own report is put aside if it is damaged; nothing may end by it."""
    logging.getLogger("lightsecagg").setLevel(logging.CRITICAL)
    path = Path(_folder().name) / "rounds.json"
    path.write_bytes(data)
    history = History(path)
    history.records()
    assert all(isinstance(client, int) for client in history.invited)


@cache
def board() -> tuple[FolderBoard, sqlite3.Connection]:
    """A state folder whose newest round is open, and the way to change its row."""
    folder = Path(_folder().name) / "board"
    folder.mkdir()
    database = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode=DELETE")
    database.execute("PRAGMA synchronous=OFF")
    database.execute(
        "CREATE TABLE rounds (number INTEGER PRIMARY KEY, settings BLOB, survivors BLOB, "
        "outcome TEXT)"
    )
    database.execute("CREATE TABLE uploads (number INTEGER, owner INTEGER)")
    database.execute("CREATE TABLE facts (number INTEGER, place INTEGER, content BLOB)")
    settings = checksummed("1/settings", film().federation.settings().to_bytes())
    database.execute("INSERT INTO rounds VALUES (1, ?, NULL, NULL)", (settings,))
    database.execute("INSERT INTO facts VALUES (1, 0, NULL)")
    return FolderBoard(folder), database


def read_board(data: bytes) -> None:
    looked, database = board()
    database.execute("UPDATE facts SET content = ?", (checksummed(fact_of(1, 0), data),))
    looked._stamps = ()
    looked.look()


@cache
def png_folder() -> Path:
    """CIFAR-10 as images, of one picture each."""
    from PIL import Image

    folder = Path(_folder().name) / "png"
    folder.mkdir()
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        Image.fromarray(np.zeros((1, 1024, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    (folder / "test_labels.json").write_text("[1]")
    return folder


def read_png_labels(data: bytes) -> None:
    (png_folder() / "train_labels.json").write_bytes(data)
    _png_parts(png_folder())


def read_member_certificate(data: bytes) -> None:
    """Whose end `members list` looks up."""
    from lightsecagg.drivers.transport.tls import end_of

    path = Path(_folder().name) / "member.pem"
    path.write_bytes(data)
    end_of(path)


FILES = [
    *map(of_sound_file, COVERS),
    Target(
        "file:history",
        read_history,
        lambda: [content_of("rounds"), b'[{"round": 1, "invited": [2]}]'],
        (),
        (f"{FEDERATION}/history.py:History._read",),
    ),
    Target(
        "file:board",
        read_board,
        lambda: [durable_round().disk.facts[0]],  # type: ignore[union-attr]
        (ConfigurationError,),
        (),
        slow=True,
    ),
    Target(
        "file:png-labels",
        read_png_labels,
        lambda: [json.dumps([0, 1, 2, 3, 4]).encode()],
        (ConfigurationError,),
        (f"{DATASETS}/cifar.py:_png_parts.labels",),
        slow=True,
    ),
    Target(
        "file:member-certificate",
        read_member_certificate,
        lambda: [content_of("certificate")],
        (ConfigurationError,),
        ("drivers/transport/tls.py:end_of",),
    ),
]
