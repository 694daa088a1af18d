"""What the parties of a server have promised, in the journal's database and in files beside it.

* facts, which are appended (`journal_facts`);
* each masked upload, in a file of its own, with the fact that counts it;
* the sealed shares of each mask of an epoch, with the fact that counts it, until the mask is past.

A record is stored whole or not at all; several that come together are one change of the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec

from lightsecagg.drivers.federation.durable import checksummed, verified, write_synced
from lightsecagg.drivers.federation.marked_database import MarkedDatabase
from lightsecagg.drivers.federation.stored_upload import StoredUpload, bytes_of, checksums_of
from lightsecagg.errors import DecodeError, JournalError
from lightsecagg.field.prime import PrimeField
from lightsecagg.foreign import decode
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import encode_fact
from lightsecagg.protocol.messages import MaskedUpload, SealedShare, ShareBundle, Tag
from lightsecagg.protocol.wire import Codec

SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (
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
TABLES = {
    "uploads": ("number", "owner", "serial", "content"),
    "facts": ("number", "place", "content"),
    "relayed": ("number", "owner", "serial", "content"),
}


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A row of `uploads`."""

    length: int
    """Elements of the vector, which is in a file."""
    checksums: tuple[bytes, ...]
    """Of the blocks of that file."""


_rows = msgspec.msgpack.Decoder(_Row)
_codec = Codec(PrimeField(3))
"""For sealed shares, which hold no element of any field in the clear."""


class PromiseStore:
    """The promises of all rounds and epochs; see the module."""

    def __init__(self, database: MarkedDatabase, uploads: Path) -> None:
        """`uploads`: the folder of their files."""
        self._db, self._uploads = database, uploads

    # -- storing -----------------------------------------------------------------------------

    def write(self, number: int, upload: MaskedUpload) -> StoredUpload:
        """The file of an upload; it counts when its record is `put`."""
        data = bytes_of(upload.vector)
        stored = self._stored(number, upload.tag, _Row(upload.vector.size, checksums_of(data)))
        with self._db.reporting("write"):
            write_synced(stored.path, data)
        return stored

    def put(self, number: int, record: Promised, stored: StoredUpload | None) -> None:
        """A record, and where its upload is; part of a change."""
        if record.is_over:
            self.forget(number)
            return
        self._append(number, [encode_fact(fact) for fact in record.facts])
        if record.upload is not None and stored is not None:
            tag = record.upload.tag
            row = msgspec.msgpack.encode(_Row(stored.length, stored.checksums))
            self._db.execute(
                "INSERT INTO uploads VALUES (?, ?, ?, ?)",
                (number, tag.owner, tag.serial, checksummed(_place(number, tag), row)),
            )
        self._put_shares(number, record.shares)
        for (owner, serial), table in product(record.past, ("uploads", "relayed")):
            self._db.execute(
                f"DELETE FROM {table} WHERE number = ? AND owner = ? AND serial = ?",  # noqa: S608
                (number, owner, serial),
            )

    def _append(self, number: int, facts: Sequence[bytes]) -> None:
        (first,) = self._db.execute(
            "SELECT coalesce(max(place) + 1, 0) FROM facts WHERE number = ?", (number,)
        ).fetchone()
        for place, fact in enumerate(facts, first):
            content = checksummed(fact_of(number, place), fact)
            self._db.execute("INSERT INTO facts VALUES (?, ?, ?)", (number, place, content))

    def _put_shares(self, number: int, shares: Iterable[SealedShare]) -> None:
        masks: dict[tuple[int, int], list[SealedShare]] = {}
        for share in shares:
            masks.setdefault((share.owner, share.serial), []).append(share)
        for (owner, serial), mine in masks.items():
            bundle = _codec.encode(ShareBundle(tuple(mine)))
            content = checksummed(_shares_of(number, owner, serial), bundle)
            self._db.execute(
                "INSERT INTO relayed VALUES (?, ?, ?, ?)", (number, owner, serial, content)
            )

    def forget(self, number: int) -> None:
        """A round or epoch is over; part of a change."""
        for table in TABLES:
            self._db.execute(f"DELETE FROM {table} WHERE number = ?", (number,))  # noqa: S608

    def delete_uploads_of(self, number: int, past: Iterable[tuple[int, int]]) -> None:
        """Their rows are gone; a file that stays goes when the journal is opened."""
        for owner, serial in past:
            with suppress(OSError):
                self._path(number, owner, serial).unlink(missing_ok=True)

    # -- what is stored ----------------------------------------------------------------------

    @property
    def files(self) -> set[Path]:
        """Those of all uploads."""
        rows = self._db.execute("SELECT number, owner, serial FROM uploads")
        return {self._path(*key) for key in rows}

    def uploaders(self, number: int) -> list[int]:
        """Whose uploads of a round or epoch are here."""
        with self._db.reporting("read"):
            rows = self._db.execute(
                "SELECT DISTINCT owner FROM uploads WHERE number = ? ORDER BY owner", (number,)
            ).fetchall()
        return [int(owner) for (owner,) in rows]

    def facts(self, number: int) -> list[bytes]:
        """What a round or epoch has promised, in order."""
        with self._db.reporting("read"):
            rows = self._db.execute(
                "SELECT place, content FROM facts WHERE number = ? ORDER BY place", (number,)
            ).fetchall()
        if [place for place, _ in rows] != list(range(len(rows))):
            raise JournalError(f"a fact of round {number} is missing in the journal")
        return [verified(fact_of(number, place), content) for place, content in rows]

    def recall(self, number: int) -> Callable[[Tag], Upload]:
        """Where the uploads of a round or epoch are."""

        def stored(tag: Tag) -> Upload:
            with self._db.reporting("read"):
                row = self._db.execute(
                    "SELECT content FROM uploads WHERE number = ? AND owner = ? AND serial = ?",
                    (number, tag.owner, tag.serial),
                ).fetchone()
            if row is None:
                raise JournalError(
                    f"no upload {tag.serial} of client {tag.owner} in round {number} is stored"
                )
            place = _place(number, tag)
            try:
                found = decode(_rows.decode, verified(place, row[0]), f"entry {place}")
            except DecodeError as error:
                raise JournalError(str(error)) from error
            upload = self._stored(number, tag, found)
            upload.read(0, upload.length)  # verified before anything is made of it
            return upload

        return stored

    def recall_shares(self, number: int) -> Callable[[int, int], tuple[SealedShare, ...]]:
        """Where the shares of an epoch are."""

        def stored(owner: int, serial: int) -> tuple[SealedShare, ...]:
            with self._db.reporting("read"):
                row = self._db.execute(
                    "SELECT content FROM relayed WHERE number = ? AND owner = ? AND serial = ?",
                    (number, owner, serial),
                ).fetchone()
            place = _shares_of(number, owner, serial)
            if row is None:
                raise JournalError(f"entry {place} is missing in the journal")
            bundle = _codec.decode(verified(place, row[0]))
            if not isinstance(bundle, ShareBundle):
                raise JournalError(f"entry {place} holds no shares")
            return bundle.shares

        return stored

    def _stored(self, number: int, tag: Tag, row: _Row) -> StoredUpload:
        return StoredUpload(
            f"the stored upload {tag.serial} of client {tag.owner} in round {number}",
            self._path(number, tag.owner, tag.serial),
            row.length,
            row.checksums,
        )

    def _path(self, *key: int) -> Path:
        """Round or epoch, owner and serial."""
        return self._uploads / f"{'-'.join(map(str, key))}.u32"


def _place(number: int, tag: Tag) -> str:
    return f"{number}/upload/{tag.owner}/{tag.serial}"


def _shares_of(number: int, owner: int, serial: int) -> str:
    return f"{number}/shares/{owner}/{serial}"


def fact_of(number: int, place: int) -> str:
    """What the checksum of a fact names."""
    return f"{number}/fact/{place}"
