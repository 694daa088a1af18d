"""What a server of the asynchronous mode must not forget.

Durable before they are acknowledged or announced:

* whatever the party of the epoch has promised, as facts that are appended (`journal_facts`): its
  roster, the masks that are ready, the tags of the uploads, the buffer in flight, the agreement;
* each masked upload, in a file of its own, with the fact that counts it;
* the sealed shares of each mask, with the fact that counts it, until the mask is past;
* the model of a version, with the fact that its buffer is past: a sum is applied once.

The folder is that of `journal`: an epoch has the row of a round, a version the file of a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product

import msgspec

from lightsecagg.drivers.federation.durable import checksummed, verified, write_synced
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.stored_upload import StoredUpload, bytes_of, checksums_of
from lightsecagg.errors import DecodeError, JournalError, LightSecAggError
from lightsecagg.field.prime import PrimeField
from lightsecagg.foreign import decode
from lightsecagg.protocol.interface import EpochChanged
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import encode_fact
from lightsecagg.protocol.messages import BufferedUpload, SealedShare, ShareBundle, Tag
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.interface import AnyRecord


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A row of `buffered`."""

    length: int
    """Elements of the vector, which is in a file."""
    checksums: tuple[bytes, ...]
    """Of the blocks of that file."""


_rows = msgspec.msgpack.Decoder(_Row)
_hashes = msgspec.msgpack.Decoder(dict[int, bytes])
_codec = Codec(PrimeField(3))
"""For sealed shares, which hold no element of any field in the clear."""


class EpochJournal(Journal):
    """The durable memory of one server; one process at a time."""

    def store(self, number: int, record: AnyRecord) -> StoredUpload | None:
        """Make a record of a session durable; of an upload, where it is."""
        if not isinstance(record, EpochChanged):
            return super().store(number, record)
        return self.change(number, record)

    def change(self, number: int, record: EpochChanged) -> StoredUpload | None:
        """What the epoch has promised, and the upload that has just come."""
        upload = record.upload
        stored = None if upload is None else self._write_upload(number, upload)
        with self._db.change():
            self._put(number, record, stored)
        self._delete_uploads_of(number, record.past)
        return stored

    def advance(
        self,
        number: int,
        version: int,
        buffers: int,
        model: bytes | memoryview,
        record: EpochChanged,
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
        self._delete_uploads_of(number, record.past)

    def buffers(self) -> int:
        """How many buffers were recovered."""
        return int(self._meta("buffers") or 0)

    def hashes(self) -> dict[int, bytes]:
        """Version -> hash of its model, of the latest versions."""
        content = self._meta("hashes")
        if content is None:
            return {}
        try:
            return decode(_hashes.decode, content, "entry meta/hashes")
        except DecodeError as error:
            raise JournalError(str(error)) from error

    def facts(self, number: int) -> list[bytes]:
        """What an epoch has promised, in order."""
        with self._db.reporting("read"):
            rows = self._db.execute(
                "SELECT place, content FROM facts WHERE number = ? ORDER BY place", (number,)
            ).fetchall()
        if [place for place, _ in rows] != list(range(len(rows))):
            raise JournalError(f"a fact of epoch {number} is missing in the journal")
        return [verified(_fact_of(number, place), content) for place, content in rows]

    def settings(self, number: int) -> Settings:
        """Those of an epoch, or round."""
        with self._db.reporting("read"):
            (stored,) = self._db.execute(
                "SELECT settings FROM rounds WHERE number = ?", (number,)
            ).fetchone()
        try:
            return Settings.from_bytes(verified(f"{number}/settings", stored))
        except LightSecAggError as error:
            raise JournalError(f"epoch {number} of the journal is damaged: {error}") from error

    def recall(self, number: int) -> Callable[[Tag], Upload]:
        """Where the uploads of an epoch are."""

        def stored(tag: Tag) -> Upload:
            with self._db.reporting("read"):
                row = self._db.execute(
                    "SELECT content FROM buffered WHERE number = ? AND owner = ? AND serial = ?",
                    (number, tag.owner, tag.serial),
                ).fetchone()
            if row is None:
                raise JournalError(
                    f"no upload {tag.serial} of client {tag.owner} in epoch {number} is stored"
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

    def abandon(self, number: int, reason: str, *, renews: bool = False) -> None:
        """The epoch is over; a model that `renews` is a version of its own (`advance`)."""
        with self._db.change():
            self._end(number, reason)
            self._forget(number)
        with self._db.reporting("write"):
            self._delete_uploads(number)

    def _put(self, number: int, record: EpochChanged, stored: StoredUpload | None) -> None:
        if record.is_over:
            self._forget(number)
            return
        self._append(number, [encode_fact(fact) for fact in record.facts])
        if record.upload is not None and stored is not None:
            tag = record.upload.tag
            row = msgspec.msgpack.encode(_Row(stored.length, stored.checksums))
            self._db.execute(
                "INSERT INTO buffered VALUES (?, ?, ?, ?)",
                (number, tag.owner, tag.serial, checksummed(_place(number, tag), row)),
            )
        self._put_shares(number, record.shares)
        for (owner, serial), table in product(record.past, ("buffered", "relayed")):
            self._db.execute(
                f"DELETE FROM {table} WHERE number = ? AND owner = ? AND serial = ?",  # noqa: S608
                (number, owner, serial),
            )

    def _append(self, number: int, facts: Sequence[bytes]) -> None:
        (first,) = self._db.execute(
            "SELECT coalesce(max(place) + 1, 0) FROM facts WHERE number = ?", (number,)
        ).fetchone()
        for place, fact in enumerate(facts, first):
            content = checksummed(_fact_of(number, place), fact)
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

    def _forget(self, number: int) -> None:
        for table in ("facts", "buffered", "relayed"):
            self._db.execute(f"DELETE FROM {table} WHERE number = ?", (number,))  # noqa: S608

    def _write_upload(self, number: int, upload: BufferedUpload) -> StoredUpload:
        data = bytes_of(upload.vector)
        stored = self._stored(number, upload.tag, _Row(upload.vector.size, checksums_of(data)))
        with self._db.reporting("write"):
            write_synced(stored.path, data)
        return stored

    def _stored(self, number: int, tag: Tag, row: _Row) -> StoredUpload:
        return StoredUpload(
            f"the stored upload {tag.serial} of client {tag.owner} in epoch {number}",
            self._upload_path(number, tag.owner, tag.serial),
            row.length,
            row.checksums,
        )

    def _delete_uploads_of(self, number: int, past: Iterable[tuple[int, int]]) -> None:
        """Their rows are gone; a file that stays goes when the journal is opened."""
        for owner, serial in past:
            with suppress(OSError):
                self._upload_path(number, owner, serial).unlink(missing_ok=True)


def _place(number: int, tag: Tag) -> str:
    return f"{number}/upload/{tag.owner}/{tag.serial}"


def _shares_of(number: int, owner: int, serial: int) -> str:
    return f"{number}/shares/{owner}/{serial}"


def _fact_of(number: int, place: int) -> str:
    return f"{number}/fact/{place}"
