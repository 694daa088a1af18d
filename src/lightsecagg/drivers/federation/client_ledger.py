"""A client's ledger on disk, so that a restart does not forget what was spent (S06).

A client's masks and keys die with its process. What it has uploaded and signed for must not: the
same vector in two sums, or the same round run again without one client, reveals single updates.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from lightsecagg.drivers.federation.durable import ProcessLock, checksummed, verified, write_synced
from lightsecagg.errors import ConfigurationError, DecodeError, JournalError
from lightsecagg.foreign import decode, read_private
from lightsecagg.protocol.ledger import Ledger

_PLACE = "client ledger, version 1"


class _Stored(msgspec.Struct, frozen=True):
    session: bytes
    client: int
    entries: bytes
    membership: tuple[int, bytes] = (0, b"")
    """Number and digest of the newest allow-list that this client has used."""


_decoder = msgspec.msgpack.Decoder(_Stored)


class ClientLedger(Ledger):
    """A ledger and its file; at most one process uses it."""

    def __init__(self, path: Path, session: bytes, client: int) -> None:
        """Go on from the file, or begin it if there is none."""
        super().__init__()
        self._path, self._session, self._client = path, session, client
        self._writing, self._closed = threading.Lock(), False
        self.membership: tuple[int, bytes] = (0, b"")
        """Number and digest of the newest allow-list that was used; no older one is any more."""
        try:
            self._lock = ProcessLock(
                path.with_suffix(".lock"),
                f"another process runs as client {client} with the ledger {path}; stop it, or "
                "check [client] ledger",
            )
            self.new = not path.exists()
            if self.new:
                self._write(self.to_bytes())
            else:
                self._entries = self._load()._entries
        except OSError as error:
            raise ConfigurationError(
                f"[client] ledger {path} cannot be kept: {error.strerror or error}"
            ) from error

    def store(self, entries: bytes) -> None:
        """What `LedgerChanged` names; on disk when this returns. `JournalError` if it cannot be."""
        try:
            self._write(entries)
        except OSError as error:
            raise JournalError(
                f"the ledger {self._path} cannot be written: {error.strerror or error}; nothing "
                "was sent that it does not account for"
            ) from error

    def remember_membership(self, number: int, digest: bytes) -> None:
        """This allow-list is in use from now on."""
        if self.membership != (number, digest):
            self.membership = (number, digest)
            self.store(self.to_bytes())

    def close(self) -> None:
        """Let another process have it.

        What is being written in a thread is waited for, and nothing is written afterwards: it would
        take the place of what the next holder has written.
        """
        with self._writing:
            self._closed = True
            self._lock.release()

    def _load(self) -> Ledger:
        try:
            content = verified(_PLACE, read_private(self._path))
            stored = decode(_decoder.decode, content, "entry")
            entries = Ledger.from_bytes(stored.entries)
        except (JournalError, DecodeError) as error:
            raise JournalError(
                f"{self._path} is damaged: {error}; restore it. Without it this client does not "
                "know which updates it has spent: remove it only if none of them can come again"
            ) from error
        if (stored.session, stored.client) != (self._session, self._client):
            raise ConfigurationError(
                f"{self._path} is the ledger of client {stored.client} in session "
                f"{stored.session.hex()[:8]}..., this is client {self._client} in session "
                f"{self._session.hex()[:8]}...; check [client] ledger"
            )
        self.membership = stored.membership
        return entries

    def _write(self, entries: bytes) -> None:
        stored = _Stored(self._session, self._client, entries, self.membership)
        with self._writing:
            if self._closed:
                raise JournalError(f"the ledger {self._path} is closed; nothing is written to it")
            write_synced(self._path, checksummed(_PLACE, msgspec.msgpack.encode(stored)))
