"""What a server must not forget: SQLite for the facts, files beside it for the vectors.

Durable before they are acknowledged or announced:

* whatever a party has promised (`promise_store`): in a round whose shares are complete, each masked
  upload with its owner's reports, U1 and the agreement; in an epoch its roster, the masks that are
  ready, the uploads, the buffer in flight and the agreement;
* the model that a sum leads to, in one step with the end of its round or buffer: a sum is applied
  once.

A round without an upload is simply dropped after a crash; what else was `left` is resumed.
Everything carries a checksum that also names what it belongs to: a truncated, altered or misplaced
piece is a `JournalError`, never a partial sum (R36). What is gone altogether is noticed too:
`marked_database`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from lightsecagg.drivers.federation import promise_store
from lightsecagg.drivers.federation.durable import (
    ProcessLock,
    checksummed,
    patiently,
    verified,
    write_synced,
)
from lightsecagg.drivers.federation.marked_database import MarkedDatabase
from lightsecagg.drivers.federation.promise_store import PromiseStore
from lightsecagg.drivers.federation.stored_upload import StoredUpload
from lightsecagg.errors import ConfigurationError, DecodeError, JournalError, LightSecAggError
from lightsecagg.foreign import decode
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import LedgerChanged, Promised
from lightsecagg.protocol.journal_facts import SumAnnounced
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.interface import AnyRecord, RoundAbandoned, RoundOpened
from lightsecagg.session.past import Unfinished

T = TypeVar("T")

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
    number INTEGER PRIMARY KEY, settings BLOB NOT NULL, survivors BLOB, outcome TEXT
);
{promise_store.SCHEMA}
"""
_TABLES = {
    "meta": ("key", "value"),
    "rounds": ("number", "settings", "survivors", "outcome"),
    **promise_store.TABLES,
}
_VERSION = b"5"
_DONE = "done"

_id_lists = msgspec.msgpack.Decoder(tuple[int, ...])
_id_maps = msgspec.msgpack.Decoder(dict[int, int])
_hashes = msgspec.msgpack.Decoder(dict[int, bytes])


class Journal:
    """The durable memory of one server; one process at a time."""

    def __init__(self, folder: Path, session: str) -> None:
        self.folder = folder
        self._uploads = folder / "uploads"
        self._models = folder / "models"
        try:
            for path in (folder, self._uploads, self._models):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Two servers on one journal would both resume its round and announce different U1.
            self._lock = ProcessLock(
                folder / "lock",
                f"another server uses the state folder {folder}; stop it, or set [server] state "
                "to another folder",
            )
        except OSError as error:
            raise ConfigurationError(f"cannot keep a journal in {folder}: {error}") from error
        try:
            self._db = MarkedDatabase(folder, _TABLES, _SCHEMA)
            self._promised = PromiseStore(self._db, self._uploads)
            self._check_owner(session)
            self._sweep()
        except BaseException:
            self.close()
            raise

    def _check_owner(self, session: str) -> None:
        for key, expected in (("version", _VERSION), ("session", session.encode())):
            found = self._meta(key)
            if found is None:
                with self._db.change():
                    self._set_meta(key, expected)
            elif found != expected:
                raise JournalError(
                    f"the journal's {key} is not this federation's; use another state folder"
                )

    def _sweep(self) -> None:
        """Remove files that a crash left behind and no row names; refuse what rows cannot explain.

        An upload's round is stored before the upload, and a model's file is at most one ahead.
        """
        with self._db.reporting("read"):
            rounds = {number for (number,) in self._db.execute("SELECT number FROM rounds")}
            newest = 1 + int(self._meta("completed") or 0)
            kept = self._promised.files
            left = [path for path in self._uploads.iterdir() if path not in kept]
            strange = [path for path in left if _number(path) not in rounds]
            strange += [path for path in self._models.glob("*.npz") if _number(path) > newest]
            if strange:
                raise self._db.forgetful(f"nothing in it explains {strange[0].name}")
            for path in (*left, *self._models.glob("*.tmp")):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the files."""
        if hasattr(self, "_db"):
            self._db.close()
        self._lock.release()

    # -- rounds ------------------------------------------------------------------------------

    def next_round(self) -> int:
        """A round number that was never used."""
        with self._db.reporting("read"):
            (latest,) = self._db.execute("SELECT coalesce(max(number), 0) FROM rounds").fetchone()
            return int(latest) + 1

    def store(self, number: int, record: AnyRecord) -> StoredUpload | None:
        """Make a record of a session durable; of an upload, where it is."""
        match record:
            case RoundOpened(settings):
                self.open_round(settings)
            case Promised():
                return _stored(self.store_all(number, [record])[0])
            case RoundAbandoned(reason, renews):
                self.abandon(number, reason, renews=renews)
            case LedgerChanged():
                raise AssertionError("a server has no ledger")
        return None

    def store_all(
        self, number: int, records: Sequence[Promised]
    ) -> list[StoredUpload | JournalError | None]:
        """Records of a round or epoch; on disk when this returns, but for those with an error.

        Together, because a change of the database waits for the disk half a dozen times, however
        many rows it has.
        """
        results = [self._write(number, record) for record in records]
        good = [
            (record, stored)
            for record, stored in zip(records, results, strict=True)
            if not isinstance(stored, JournalError)
        ]
        try:
            if good:
                with self._db.change():
                    for record, stored in good:
                        self._put(number, record, stored)
        except JournalError as error:
            return [each if isinstance(each, JournalError) else error for each in results]
        for record, _ in good:
            self._promised.delete_uploads_of(number, record.past)
        return results

    def _write(self, number: int, record: Promised) -> StoredUpload | JournalError | None:
        try:
            return None if record.upload is None else self._promised.write(number, record.upload)
        except JournalError as error:
            return error

    def _put(self, number: int, record: Promised, stored: StoredUpload | None) -> None:
        self._promised.put(number, record, stored)
        for fact in record.facts if record.one_sum else ():
            if isinstance(fact, SumAnnounced):
                survivors = msgspec.msgpack.encode(fact.request.survivors)
                content = checksummed(f"{number}/survivors", survivors)
                self._db.execute(
                    "UPDATE rounds SET survivors = ? WHERE number = ?", (content, number)
                )

    @property
    def unheard_change(self) -> bool:
        """Whether its last change was found stored, but not marked: nobody has heard of it."""
        return self._db.unheard_change

    def open_round(self, settings: Settings) -> None:
        """The round is about to be opened."""
        content = checksummed(f"{settings.round}/settings", settings.to_bytes())
        with self._db.change():
            self._db.execute(
                "INSERT INTO rounds (number, settings) VALUES (?, ?)", (settings.round, content)
            )

    def announced(self, number: int) -> tuple[int, ...] | None:
        """U1 of a round, if it was announced."""
        with self._db.reporting("read"):
            row = self._db.execute(
                "SELECT survivors FROM rounds WHERE number = ?", (number,)
            ).fetchone()
        if row is None or row[0] is None:
            return None
        return _unpack(_id_lists, f"{number}/survivors", row[0])

    def announced_for(self, model: bytes) -> tuple[int, ...] | None:
        """The latest U1, if it was for this global model: clients sum no other from it (S42)."""
        with self._db.reporting("read"):
            row = self._db.execute(
                "SELECT number, settings FROM rounds WHERE survivors IS NOT NULL "
                "ORDER BY number DESC LIMIT 1"
            ).fetchone()
        if row is None:
            return None
        number, _ = row
        return self.announced(number) if self.settings(number).model == model else None

    def complete(self, number: int, completed: int, model: bytes | memoryview) -> None:
        """The round is done and this is the model after it: both or neither.

        Were they two steps, a crash between them would apply the same update twice.
        """
        with self._db.reporting("write"):
            write_synced(self._models / f"{completed}.npz", model)
        with self._db.change():
            self._set_meta("completed", str(completed).encode())
            self._set_meta("model", hashlib.sha256(model).digest())
            self._set_meta("renewals", b"0")
            self._end(number, _DONE)
        with self._db.reporting("write"):
            self._delete_uploads(number)

    def advance(
        self,
        number: int,
        version: int,
        buffers: int,
        model: bytes | memoryview,
        record: Promised,
        hashes: Mapping[int, bytes],
    ) -> None:
        """This is the model of the version after `buffers` buffers, and what is left to do.

        * `hashes`: version -> hash of its model, of those that updates may still come from.

        Were they two steps, a crash between them would apply a sum twice, or never.
        """
        with self._db.reporting("write"):
            write_synced(self._models / f"{version}.npz", model)
        with self._db.change():
            self._set_meta("completed", str(version).encode())
            self._set_meta("model", hashlib.sha256(model).digest())
            self._set_meta("buffers", str(buffers).encode())
            self._set_meta("hashes", msgspec.msgpack.encode(dict(hashes)))
            self._put(number, record, None)
        self._promised.delete_uploads_of(number, record.past)

    def buffers(self) -> int:
        """How many buffers were recovered."""
        return int(self._meta("buffers") or 0)

    def hashes(self) -> dict[int, bytes]:
        """Version -> hash of its model, of the latest versions."""
        content = self._meta("hashes")
        return {} if content is None else _decoded(_hashes, "meta/hashes", content)

    def keep_models(self, kept: Collection[int]) -> None:
        """Delete all models but those after so many rounds; the newest is never deleted."""
        newest = int(self._meta("completed") or 0)
        with self._db.reporting("write"):
            for path in patiently(lambda: [*self._models.glob("*.npz")]):
                if -1 < _number(path) < newest and _number(path) not in kept:
                    path.unlink(missing_ok=True)

    def abandon(self, number: int, reason: str, *, renews: bool = False) -> None:
        """The round is over without a result; the model `renews` if others are to train again."""
        with self._db.change():
            self._end(number, reason)
            if renews:
                self._set_meta("renewals", str(self.renewals() + 1).encode())
        with self._db.reporting("write"):
            self._delete_uploads(number)

    def uploaders(self) -> dict[int, int]:
        """Client -> the latest round that is over and in which its upload was stored."""
        content = self._meta("uploaders")
        return {} if content is None else _decoded(_id_maps, "meta/uploaders", content)

    def summed(self) -> dict[int, int]:
        """Of the uploaders, those whose upload is in that round's sum."""
        ended, uploaders = self.ended(), self.uploaders()
        done = {number for number in uploaders.values() if ended.get(number, "") is None}
        sums = {number: frozenset(self.announced(number) or ()) for number in done}
        return {
            client: number
            for client, number in uploaders.items()
            if client in sums.get(number, frozenset())
        }

    def _end(self, number: int, outcome: str) -> None:
        uploaders = self.uploaders() | dict.fromkeys(self._promised.uploaders(number), number)
        self._set_meta("uploaders", msgspec.msgpack.encode(uploaders))
        self._db.execute("UPDATE rounds SET outcome = ? WHERE number = ?", (outcome, number))
        self._promised.forget(number)

    def _delete_uploads(self, number: int) -> None:
        # Not glob: Python remembers every pattern, and there is a new one in every round.
        for path in patiently(lambda: [*self._uploads.iterdir()]):
            if path.name.startswith(f"{number}-"):
                path.unlink(missing_ok=True)

    def unfinished(self) -> list[int]:
        """Rounds that a crash cut short."""
        with self._db.reporting("read"):
            rows = self._db.execute("SELECT number FROM rounds WHERE outcome IS NULL").fetchall()
            return [int(number) for (number,) in rows]

    def ended(self) -> dict[int, str | None]:
        """Round that is over -> why it was abandoned; None if it is done."""
        with self._db.reporting("read"):
            rows = self._db.execute(
                "SELECT number, outcome FROM rounds WHERE outcome IS NOT NULL ORDER BY number"
            ).fetchall()
            return {
                int(number): None if outcome == _DONE else str(outcome) for number, outcome in rows
            }

    def left(self, number: int, allow_list: AllowList | None) -> Unfinished:
        """What is left of an unfinished round or epoch, which began with this allow-list."""
        return Unfinished(
            self.settings(number),
            self._promised.facts(number),
            self._promised.recall(number),
            self._promised.recall_shares(number),
            allow_list,
            bool(self._promised.uploaders(number)),
        )

    def settings(self, number: int) -> Settings:
        """Those of a round or epoch."""
        with self._db.reporting("read"):
            (stored,) = self._db.execute(
                "SELECT settings FROM rounds WHERE number = ?", (number,)
            ).fetchone()
        try:
            return Settings.from_bytes(verified(f"{number}/settings", stored))
        except LightSecAggError as error:
            raise JournalError(f"round {number} of the journal is damaged: {error}") from error

    def uploads(self, number: int) -> list[int]:
        """Whose uploads of an unfinished round or epoch are stored."""
        return self._promised.uploaders(number)

    # -- models ------------------------------------------------------------------------------

    def renewals(self) -> int:
        """How often the stored model, or the first, was renewed since: rounds from it failed."""
        return int(self._meta("renewals") or 0)

    def load_model(self) -> tuple[int, bytes] | None:
        """How many rounds are done, and the model after them."""
        completed = self._meta("completed")
        if completed is None:
            return None
        path = self._models / f"{int(completed)}.npz"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise JournalError(f"the checkpoint {path} is gone: {error}") from error
        if hashlib.sha256(data).digest() != self._meta("model"):
            raise JournalError(f"the checkpoint {path} is damaged; restore it from a backup")
        return int(completed), data

    # -- members -----------------------------------------------------------------------------

    def membership(self) -> bytes | None:
        """The signed allow-list of the latest rounds."""
        return self._meta("membership")

    def keep_membership(self, content: bytes) -> None:
        """All rounds from now on use this signed allow-list."""
        if self.membership() != content:
            with self._db.change():
                self._set_meta("membership", content)

    def _meta(self, key: str) -> bytes | None:
        with self._db.reporting("read"):
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else verified(f"meta/{key}", row[0])

    def _set_meta(self, key: str, value: bytes) -> None:
        stored = checksummed(f"meta/{key}", value)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, stored))


def _stored(result: StoredUpload | JournalError | None) -> StoredUpload | None:
    if isinstance(result, JournalError):
        raise result
    return result


def _number(path: Path) -> int:
    """The round of an upload's file, the version of a model's; -1 for any other file."""
    number = path.stem.partition("-")[0]
    return int(number) if number.isdecimal() and number.isascii() else -1


def _unpack(decoder: msgspec.msgpack.Decoder[T], place: str, stored: bytes) -> T:
    return _decoded(decoder, place, verified(place, stored))


def _decoded(decoder: msgspec.msgpack.Decoder[T], place: str, content: bytes) -> T:
    try:
        return decode(decoder.decode, content, f"entry {place}")
    except DecodeError as error:
        raise JournalError(str(error)) from error
