"""An SQLite database that notices what it has lost.

SQLite drops the tail of a damaged write-ahead log without a word, and a damaged page may lose a
row; a checksum in every row says nothing about rows that are gone. So every change counts up and
folds the rows that come and go into a fingerprint of the whole. Both are the *mark*: it is stored
with the change, and in a file beside the database once the change is on disk. Whoever opens the
database compares the three: rows, mark and file.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from lightsecagg import system
from lightsecagg.drivers.federation.durable import checksummed, verified, write_synced
from lightsecagg.errors import DecodeError, JournalError, LightSecAggError
from lightsecagg.foreign import decode, shown


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """How far the database has come, and the fingerprint of its rows now and one change before."""

    changes: int = 0
    fingerprint: bytes = bytes(32)
    previous: bytes = bytes(32)


_marks = msgspec.msgpack.Decoder(_Mark)


class MarkedDatabase:
    """The database `journal.sqlite` in a folder, and its mark; one process at a time."""

    def __init__(self, folder: Path, tables: Mapping[str, tuple[str, ...]], schema: str) -> None:
        """`tables` names the columns of each table that `schema` makes, all of them."""
        self._folder = folder
        self._tables = dict(tables)
        self._fingerprint = 0
        self._mark = _Mark()
        self._marked = True
        self.unheard_change = False
        """Whether it was opened after a crash between a change and its mark; it is marked now."""
        path = folder / "journal.sqlite"
        with self.reporting("open"):
            # SQLite gives the files beside the database the permissions of the database.
            os.close(system.open_private(path))
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open(schema)
            except BaseException:
                self._db.close()
                raise

    def _open(self, schema: str) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise JournalError(f"the journal in {self._folder} is damaged: {shown(verdict)}")
        self._db.executescript(schema + "CREATE TABLE IF NOT EXISTS mark (content BLOB NOT NULL);")
        self._check_mark()
        self._fold_what_changes()

    def close(self) -> None:
        """Release the files."""
        self._db.close()

    @contextmanager
    def reporting(self, action: str) -> Iterator[None]:
        """Disk full, damaged database and the like, as our own error."""
        try:
            yield
        except LightSecAggError:
            raise
        except Exception as error:  # SQLite's on a damaged page: not all of them are its own
            raise JournalError(
                f"cannot {action} the journal in {self._folder}: {shown(error)}; nothing was "
                "announced or acknowledged that is not stored"
            ) from error

    def execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        """Ask for rows, or change them: the latter only within `change`."""
        return self._db.execute(statement, values)

    @contextmanager
    def change(self) -> Iterator[None]:
        """One change: on disk as a whole, and marked, when it is over; or it never was."""
        if not self._marked:  # the disk was full when the change before was to be marked
            self._write_mark()
        before = self._fingerprint
        with self.reporting("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                fingerprint = self._fingerprint.to_bytes(32, "big")
                mark = _Mark(self._mark.changes + 1, fingerprint, self._mark.fingerprint)
                self._db.execute("DELETE FROM mark")
                self._db.execute("INSERT INTO mark VALUES (?)", (_sealed(mark),))
                self._db.execute("COMMIT")
            except BaseException:
                self._fingerprint = before
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._mark = mark
            # What was promised must not hang on the log, which SQLite cuts at a bad frame.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._write_mark()

    # -- the mark ----------------------------------------------------------------------------

    def _fold(self, *row: object) -> None:
        # Exclusive or: the order of rows does not matter, and to fold twice is to remove.
        digest = hashlib.sha256(msgspec.msgpack.encode(row)).digest()
        self._fingerprint ^= int.from_bytes(digest, "big")

    def _fold_what_changes(self) -> None:
        """Let every row that comes enter the fingerprint, and every row that goes leave it."""
        # Without it, what INSERT OR REPLACE replaces would go unnoticed.
        self._db.execute("PRAGMA recursive_triggers=ON")
        self._db.create_function("fold", -1, self._fold)
        for table, columns in self._tables.items():
            old, new = (
                f"SELECT fold('{table}', {', '.join(f'{row}.{name}' for name in columns)});"
                for row in ("OLD", "NEW")
            )
            for event, folds in (("INSERT", new), ("DELETE", old), ("UPDATE", old + new)):
                self._db.execute(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON {table} "
                    f"BEGIN {folds} END"
                )

    def _check_mark(self) -> None:
        """Refuse a database that has forgotten something."""
        for table, columns in self._tables.items():
            for row in self._db.execute(f"SELECT {', '.join(columns)} FROM {table}"):  # noqa: S608
                self._fold(table, *row)
        kept = self._db.execute("SELECT content FROM mark").fetchall()
        if kept:
            self._mark = self._mark_in(kept[0][0])
        if self._mark.fingerprint != self._fingerprint.to_bytes(32, "big"):
            raise self.forgetful("its rows are not those that were stored")
        beside = self._mark_in(self._path.read_bytes()) if self._path.exists() else _Mark()
        if (beside.changes, beside.fingerprint) == (self._mark.changes, self._mark.fingerprint):
            return
        # A crash between the two: the change is stored, and nobody has heard of it yet.
        if (beside.changes + 1, beside.fingerprint) != (self._mark.changes, self._mark.previous):
            raise self.forgetful(
                f"{self._path.name} speaks of {beside.changes} changes, the database of "
                f"{self._mark.changes}"
            )
        self.unheard_change = True
        self._write_mark()

    def _mark_in(self, stored: bytes) -> _Mark:
        try:
            return decode(_marks.decode, verified("mark", stored), "entry mark")
        except (DecodeError, JournalError) as error:
            raise self.forgetful(str(error)) from error

    def forgetful(self, why: str) -> JournalError:
        """The error for a state folder of which a part is gone."""
        return JournalError(
            f"the journal in {self._folder} has lost what it had promised: {why}. A file there is "
            "damaged, missing or of another time; restore the whole folder from one backup. "
            "Nothing was deleted"
        )

    @property
    def _path(self) -> Path:
        return self._folder / "journal.mark"

    def _write_mark(self) -> None:
        self._marked = False
        with self.reporting("write"):
            write_synced(self._path, _sealed(self._mark))
        self._marked = True


def _sealed(mark: _Mark) -> bytes:
    return checksummed("mark", msgspec.msgpack.encode(mark))
