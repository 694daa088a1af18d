"""What a server must not forget: SQLite for the facts, files beside it for the vectors.

Durable before they are acknowledged or announced, in this order:

* the roster, the owners and the secret of the check, when sharing is closed;
* each masked upload (its file is synced before its row) with its reports;
* U1, before it is announced;
* the global model, when a round is done.

After a crash `pending` tells what was promised. A round without an upload is simply dropped; one
with uploads is resumed. Everything carries a checksum that also names what it belongs to: a
truncated, altered or misplaced piece is a `JournalError`, never a partial sum (R36).
What is gone altogether is noticed too: `marked_database`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from lightsecagg.drivers.federation.durable import (
    ProcessLock,
    checksummed,
    patiently,
    verified,
    write_synced,
)
from lightsecagg.drivers.federation.marked_database import MarkedDatabase
from lightsecagg.drivers.federation.stored_upload import StoredUpload, bytes_of, checksums_of
from lightsecagg.errors import ConfigurationError, DecodeError, JournalError, LightSecAggError
from lightsecagg.foreign import decode
from lightsecagg.protocol.interface import (
    EpochChanged,
    LedgerChanged,
    SharingClosed,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.messages import MaskedUpload, Roster, SharesClosed
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.interface import (
    AnyRecord,
    RoundAbandoned,
    RoundOpened,
    UploadDiscarded,
)
from lightsecagg.session.past import PromisedRound

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (
    number INTEGER PRIMARY KEY, settings BLOB NOT NULL, roster BLOB, closed BLOB,
    survivors BLOB, outcome TEXT
);
CREATE TABLE IF NOT EXISTS uploads (
    number INTEGER NOT NULL, client INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (number, client)
);
CREATE TABLE IF NOT EXISTS buffered (
    number INTEGER NOT NULL, owner INTEGER NOT NULL, serial INTEGER NOT NULL,
    content BLOB NOT NULL, PRIMARY KEY (number, owner, serial)
);
CREATE TABLE IF NOT EXISTS facts (
    number INTEGER NOT NULL, place INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (number, place)
);
CREATE TABLE IF NOT EXISTS relayed (
    number INTEGER NOT NULL, owner INTEGER NOT NULL, serial INTEGER NOT NULL,
    content BLOB NOT NULL, PRIMARY KEY (number, owner, serial)
);
"""
_TABLES = {
    "meta": ("key", "value"),
    "rounds": ("number", "settings", "roster", "closed", "survivors", "outcome"),
    "uploads": ("number", "client", "content"),
    "buffered": ("number", "owner", "serial", "content"),
    "facts": ("number", "place", "content"),
    "relayed": ("number", "owner", "serial", "content"),
}
_VERSION = b"4"
_DONE = "done"


class _Upload(msgspec.Struct, frozen=True, array_like=True):
    """A row of `uploads`."""

    held: bytes
    reports: bytes
    length: int
    """Elements of the vector, which is in a file."""
    checksums: tuple[bytes, ...]
    """Of the blocks of that file."""


_rosters = msgspec.msgpack.Decoder(Roster)
_uploads = msgspec.msgpack.Decoder(_Upload)
_closings = msgspec.msgpack.Decoder(SharesClosed)
_id_lists = msgspec.msgpack.Decoder(tuple[int, ...])
_id_maps = msgspec.msgpack.Decoder(dict[int, int])


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
            stored = [*self._db.execute("SELECT number, client FROM uploads")]
            stored += self._db.execute("SELECT number, owner, serial FROM buffered")
            rounds = {number for (number,) in self._db.execute("SELECT number FROM rounds")}
            newest = 1 + int(self._meta("completed") or 0)
            kept = {self._upload_path(*key) for key in stored}
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
            case SharingClosed(roster, closed):
                self.close_sharing(number, roster, closed)
            case UploadTaken(client, upload):
                return self.store_upload(number, client, upload)
            case SurvivorsChosen(survivors):
                self.announce(number, survivors)
            case UploadDiscarded(client):
                self.discard_upload(number, client)
            case RoundAbandoned(reason, renews):
                self.abandon(number, reason, renews=renews)
            case LedgerChanged():
                raise AssertionError("a server has no ledger")
            case EpochChanged():
                raise AssertionError("rounds have no epochs; see `EpochJournal`")
        return None

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

    def close_sharing(self, number: int, roster: Roster, closed: SharesClosed) -> None:
        """Sharing is closed, as everybody is about to hear."""
        roster_content = checksummed(f"{number}/roster", msgspec.msgpack.encode(roster))
        closed_content = checksummed(f"{number}/closed", msgspec.msgpack.encode(closed))
        with self._db.change():
            self._db.execute(
                "UPDATE rounds SET roster = ?, closed = ? WHERE number = ?",
                (roster_content, closed_content, number),
            )

    def store_upload(self, number: int, client: int, upload: MaskedUpload) -> StoredUpload:
        """A masked upload; on disk when this returns."""
        return _stored(self.store_uploads(number, {client: upload})[client])

    def store_uploads(
        self, number: int, uploads: Mapping[int, MaskedUpload]
    ) -> dict[int, StoredUpload | JournalError]:
        """Masked uploads, by client; on disk when this returns, but for those with an error.

        Together, because a change of the database waits for the disk half a dozen times, however
        many rows it has.
        """
        written: dict[int, bytes] = {}
        results: dict[int, StoredUpload | JournalError] = {}
        for client, upload in uploads.items():
            data = bytes_of(upload.vector)
            reports, checksums = upload.reports.tobytes(), checksums_of(data)
            row = _Upload(upload.held, reports, upload.vector.size, checksums)
            try:
                with self._db.reporting("write"):
                    write_synced(self._upload_path(number, client), data)
            except JournalError as error:
                results[client] = error
                continue
            written[client] = checksummed(f"{number}/upload/{client}", msgspec.msgpack.encode(row))
            results[client] = self._stored_upload(number, client, row)
        try:
            self._insert_uploads(number, written)
        except JournalError as error:
            results |= dict.fromkeys(written, error)
        return results

    def _insert_uploads(self, number: int, rows: Mapping[int, bytes]) -> None:
        if not rows:
            return
        with self._db.change():
            for client, content in rows.items():
                self._db.execute(
                    "INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (number, client, content)
                )

    def discard_upload(self, number: int, client: int) -> None:
        """Forget an upload that the party refused; it was never acknowledged."""
        with self._db.change():
            self._db.execute(
                "DELETE FROM uploads WHERE number = ? AND client = ?", (number, client)
            )
        with self._db.reporting("write"):
            self._upload_path(number, client).unlink(missing_ok=True)

    def announce(self, number: int, survivors: tuple[int, ...]) -> None:
        """U1, before anybody hears of it."""
        content = checksummed(f"{number}/survivors", msgspec.msgpack.encode(survivors))
        with self._db.change():
            self._db.execute("UPDATE rounds SET survivors = ? WHERE number = ?", (content, number))

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
        number, stored = row
        try:
            settings = Settings.from_bytes(verified(f"{number}/settings", stored))
        except LightSecAggError as error:
            raise JournalError(f"round {number} of the journal is damaged: {error}") from error
        return self.announced(number) if settings.model == model else None

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
        rows = self._db.execute("SELECT client FROM uploads WHERE number = ?", (number,)).fetchall()
        uploaders = self.uploaders() | {int(client): number for (client,) in rows}
        self._set_meta("uploaders", msgspec.msgpack.encode(uploaders))
        self._db.execute("UPDATE rounds SET outcome = ? WHERE number = ?", (outcome, number))
        self._db.execute("DELETE FROM uploads WHERE number = ?", (number,))

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

    def pending(self, number: int) -> PromisedRound | None:
        """What was promised in an unfinished round; None if it may simply be dropped."""
        with self._db.reporting("read"):
            settings, roster, closed = self._db.execute(
                "SELECT settings, roster, closed FROM rounds WHERE number = ?", (number,)
            ).fetchone()
            clients = self._db.execute(
                "SELECT client FROM uploads WHERE number = ?", (number,)
            ).fetchall()
        if roster is None or not clients:
            return None
        for (client,) in clients:
            self.load_upload(number, client)  # verified before anything is made of it
        try:
            return PromisedRound(
                settings=Settings.from_bytes(verified(f"{number}/settings", settings)),
                roster=_unpack(_rosters, f"{number}/roster", roster),
                closed=_unpack(_closings, f"{number}/closed", closed),
                uploads=_Uploads(self, number, sorted(client for (client,) in clients)),
                survivors=self.announced(number),
            )
        except LightSecAggError as error:
            raise JournalError(f"round {number} of the journal is damaged: {error}") from error

    def load_upload(self, number: int, client: int) -> MaskedUpload:
        """A stored upload, exactly as it was stored."""
        row, upload = self._upload_row(number, client), self.upload(number, client)
        reports = np.frombuffer(row.reports, dtype=np.uint32)
        return MaskedUpload(row.held, upload.read(0, upload.length), reports)

    def upload(self, number: int, client: int) -> StoredUpload:
        """A stored upload, to be read when it is summed."""
        return self._stored_upload(number, client, self._upload_row(number, client))

    def _stored_upload(self, number: int, client: int, row: _Upload) -> StoredUpload:
        return StoredUpload(
            f"the stored upload of client {client} in round {number}",
            self._upload_path(number, client),
            row.length,
            row.checksums,
        )

    def _upload_row(self, number: int, client: int) -> _Upload:
        with self._db.reporting("read"):
            row = self._db.execute(
                "SELECT content FROM uploads WHERE number = ? AND client = ?", (number, client)
            ).fetchone()
        if row is None:
            raise JournalError(f"no upload of client {client} in round {number} is stored")
        return _unpack(_uploads, f"{number}/upload/{client}", row[0])

    def _upload_path(self, *key: int) -> Path:
        """Round and client; in the asynchronous mode epoch, owner and serial."""
        return self._uploads / f"{'-'.join(map(str, key))}.u32"

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


def _stored(result: StoredUpload | JournalError) -> StoredUpload:
    if isinstance(result, JournalError):
        raise result
    return result


def _number(path: Path) -> int:
    """The round of an upload's file, the version of a model's; -1 for any other file."""
    number = path.stem.partition("-")[0]
    return int(number) if number.isdecimal() and number.isascii() else -1


@dataclass(frozen=True, slots=True)
class _Uploads:
    """The uploads of a round, read one after the other."""

    journal: Journal
    number: int
    clients: Sequence[int]

    def __iter__(self) -> Iterator[tuple[int, MaskedUpload, StoredUpload]]:
        for client in self.clients:
            upload = self.journal.load_upload(self.number, client)
            yield client, upload, self.journal.upload(self.number, client)


def _unpack(decoder: msgspec.msgpack.Decoder[T], place: str, stored: bytes) -> T:
    return _decoded(decoder, place, verified(place, stored))


def _decoded(decoder: msgspec.msgpack.Decoder[T], place: str, content: bytes) -> T:
    try:
        return decode(decoder.decode, content, f"entry {place}")
    except DecodeError as error:
        raise JournalError(str(error)) from error
