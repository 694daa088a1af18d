"""What a server must not forget: SQLite for the facts, files beside it for the vectors.

Durable before they are acknowledged or announced, in this order:

* the roster and the owners, when sharing is closed;
* each masked upload (its file is synced before its row);
* U1, before it is announced;
* the global model, when a round is done.

After a crash `pending` tells what was promised. A round without an upload is simply dropped; one
with uploads is resumed. Files carry a checksum: a truncated or altered one is an error, never a
partial sum (R36).
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from lightsecagg.errors import ConfigurationError, JournalError, LightSecAggError
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.messages import Roster
from lightsecagg.protocol.settings import Settings

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
    number INTEGER PRIMARY KEY, settings BLOB NOT NULL, roster BLOB, owners BLOB,
    survivors BLOB, outcome TEXT
);
CREATE TABLE IF NOT EXISTS uploads (
    number INTEGER NOT NULL, client INTEGER NOT NULL, held BLOB NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (number, client)
);
"""
_VERSION = b"1"


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A round that a crashed server left behind after sharing was closed."""

    settings: Settings
    roster: Roster
    owners: tuple[int, ...]
    held: dict[int, bytes]
    """Client -> the bitmap of its upload, for every acknowledged upload."""
    survivors: tuple[int, ...] | None
    """U1 if it was announced."""


class Journal:
    """The durable memory of one server; one process at a time."""

    def __init__(self, folder: Path, session: str) -> None:
        self._uploads = folder / "uploads"
        self._models = folder / "models"
        try:
            for path in (folder, self._uploads, self._models):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "journal.sqlite", isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"cannot keep a journal in {folder}: {error}") from error
        self._check_owner(session)

    def _check_owner(self, session: str) -> None:
        for key, expected in (("version", _VERSION), ("session", session.encode())):
            found = self._meta(key)
            if found is None:
                self._set_meta(key, expected)
            elif found != expected:
                raise JournalError(
                    f"the journal's {key} is not this federation's; use another state folder"
                )

    def close(self) -> None:
        """Release the files."""
        self._db.close()

    # -- rounds ------------------------------------------------------------------------------

    def next_round(self) -> int:
        """A round number that was never used."""
        (latest,) = self._db.execute("SELECT coalesce(max(number), 0) FROM rounds").fetchone()
        return int(latest) + 1

    def open_round(self, settings: Settings) -> None:
        """The round is about to be opened."""
        self._db.execute(
            "INSERT INTO rounds (number, settings) VALUES (?, ?)",
            (settings.round, settings.to_bytes()),
        )

    def close_sharing(self, number: int, roster: Roster, owners: tuple[int, ...]) -> None:
        """Sharing is closed with these owners."""
        self._db.execute(
            "UPDATE rounds SET roster = ?, owners = ? WHERE number = ?",
            (msgspec.msgpack.encode(roster), msgspec.msgpack.encode(owners), number),
        )

    def store_upload(self, number: int, client: int, held: bytes, vector: Elements) -> None:
        """A masked upload; on disk when this returns."""
        data = vector.tobytes()
        _write_synced(self._upload_path(number, client), data)
        self._db.execute(
            "INSERT OR IGNORE INTO uploads VALUES (?, ?, ?, ?)",
            (number, client, held, hashlib.sha256(data).digest()),
        )

    def announce(self, number: int, survivors: tuple[int, ...]) -> None:
        """U1, before anybody hears of it."""
        self._db.execute(
            "UPDATE rounds SET survivors = ? WHERE number = ?",
            (msgspec.msgpack.encode(survivors), number),
        )

    def complete(self, number: int, completed: int, model: bytes) -> None:
        """The round is done and this is the model after it: both or neither.

        Were they two steps, a crash between them would apply the same update twice.
        """
        _write_synced(self._models / f"{completed}.npz", model)
        with self._transaction():
            self._set_meta("completed", str(completed).encode())
            self._set_meta("model", hashlib.sha256(model).digest())
            self._end(number, "done")
        self._delete_uploads(number)
        for path in self._models.glob("*.npz"):
            if path.stem.isdigit() and int(path.stem) < completed - 1:
                path.unlink(missing_ok=True)

    def abandon(self, number: int, reason: str) -> None:
        """The round is over without a result."""
        with self._transaction():
            self._end(number, reason)
        self._delete_uploads(number)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _end(self, number: int, outcome: str) -> None:
        self._db.execute("UPDATE rounds SET outcome = ? WHERE number = ?", (outcome, number))
        self._db.execute("DELETE FROM uploads WHERE number = ?", (number,))

    def _delete_uploads(self, number: int) -> None:
        for path in self._uploads.glob(f"{number}-*.u32"):
            path.unlink(missing_ok=True)

    def unfinished(self) -> list[int]:
        """Rounds that a crash cut short."""
        rows = self._db.execute("SELECT number FROM rounds WHERE outcome IS NULL").fetchall()
        return [int(number) for (number,) in rows]

    def pending(self, number: int) -> PendingRound | None:
        """What was promised in an unfinished round; None if it may simply be dropped."""
        row = self._db.execute(
            "SELECT settings, roster, owners, survivors FROM rounds WHERE number = ?", (number,)
        ).fetchone()
        settings, roster, owners, survivors = row
        uploads = self._db.execute(
            "SELECT client, held, checksum FROM uploads WHERE number = ?", (number,)
        ).fetchall()
        if roster is None or not uploads:
            return None
        for client, _, checksum in uploads:
            self._verify(number, client, checksum)
        try:
            return PendingRound(
                settings=Settings.from_bytes(settings),
                roster=msgspec.msgpack.decode(roster, type=Roster),
                owners=msgspec.msgpack.decode(owners, type=tuple[int, ...]),
                held={client: held for client, held, _ in uploads},
                survivors=(
                    None
                    if survivors is None
                    else msgspec.msgpack.decode(survivors, type=tuple[int, ...])
                ),
            )
        except (msgspec.MsgspecError, LightSecAggError) as error:
            raise JournalError(f"round {number} of the journal is damaged: {error}") from error

    def load_upload(self, number: int, client: int) -> Elements:
        """A stored upload."""
        return np.fromfile(self._upload_path(number, client), dtype=np.uint32)

    def uploads(self, number: int) -> DiskUploads:
        """The mapping for `RoundServer`: keys in memory, vectors on disk."""
        return DiskUploads(self, number)

    def _verify(self, number: int, client: int, checksum: bytes) -> None:
        try:
            data = self._upload_path(number, client).read_bytes()
        except OSError as error:
            raise JournalError(
                f"the stored upload of client {client} in round {number} is gone: {error}"
            ) from error
        if hashlib.sha256(data).digest() != checksum:
            raise JournalError(f"the stored upload of client {client} in round {number} is damaged")

    def _upload_path(self, number: int, client: int) -> Path:
        return self._uploads / f"{number}-{client}.u32"

    # -- models ------------------------------------------------------------------------------

    def load_model(self) -> tuple[int, bytes] | None:
        """How many rounds are done, and the model after them."""
        completed = self._meta("completed")
        if completed is None:
            return None
        path = self._models / f"{int(completed)}.npz"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise JournalError(f"the checkpoint {path.name} is gone: {error}") from error
        if hashlib.sha256(data).digest() != self._meta("model"):
            raise JournalError(f"the checkpoint {path.name} is damaged")
        return int(completed), data

    def _meta(self, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def _set_meta(self, key: str, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


class DiskUploads(MutableMapping[int, Elements]):
    """Uploads that the journal has stored: read when they are summed, never all at once."""

    def __init__(self, journal: Journal, number: int) -> None:
        self._journal, self._number = journal, number
        self._clients: dict[int, None] = {}

    def __getitem__(self, client: int) -> Elements:
        if client not in self._clients:
            raise KeyError(client)
        return self._journal.load_upload(self._number, client)

    def __setitem__(self, client: int, vector: Elements) -> None:
        self._clients[client] = None  # `store_upload` came first

    def __delitem__(self, client: int) -> None:
        del self._clients[client]  # the file stays until the round is finished

    def __iter__(self) -> Iterator[int]:
        return iter(dict(self._clients))

    def __len__(self) -> int:
        return len(self._clients)


def _write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it is whole or absent, whatever happens."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
