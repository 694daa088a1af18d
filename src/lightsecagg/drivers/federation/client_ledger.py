"""A client's ledger on disk, so that a restart does not forget what was spent (S06).

A client's masks and keys die with its process. What it has uploaded and signed for must not: the
same vector in two sums, or the same round run again without one client, reveals single updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from lightsecagg.drivers.federation.durable import ProcessLock, seal, unseal, write_synced
from lightsecagg.errors import ConfigurationError, DecodeError, JournalError
from lightsecagg.foreign import decode
from lightsecagg.protocol.ledger import Ledger

_PLACE = "client ledger, version 1"


class _Stored(msgspec.Struct, frozen=True):
    session: bytes
    client: int
    entries: bytes


_decoder = msgspec.msgpack.Decoder(_Stored)


class ClientLedger(Ledger):
    """Stored before keys, an upload or a signature leave; at most one process uses it."""

    def __init__(self, path: Path, session: bytes, client: int) -> None:
        """Go on from the file, or begin it if there is none."""
        super().__init__()
        self._path, self._session, self._client = path, session, client
        try:
            self._lock = ProcessLock(
                path.with_suffix(".lock"),
                f"another process runs as client {client} with the ledger {path}; stop it, or "
                "check [client] ledger",
            )
            self.new = not path.exists()
            if self.new:
                self._store()
            else:
                self._entries = self._load()._entries
        except OSError as error:
            raise ConfigurationError(
                f"[client] ledger {path} cannot be kept: {error.strerror or error}"
            ) from error

    def count_opening(self, model: bytes, max_openings: int) -> None:
        """A round begins from `model`."""
        super().count_opening(model, max_openings)
        self._store_or_refuse()

    def count_upload(self, model: bytes, commitment: bytes = b"") -> None:
        """An update trained from `model` leaves this client."""
        super().count_upload(model, commitment)
        self._store_or_refuse()

    def consent(self, model: bytes, fingerprint: bytes, survivors: tuple[int, ...]) -> None:
        """The update is signed or answered for, in a sum over these clients."""
        super().consent(model, fingerprint, survivors)
        self._store_or_refuse()

    def consent_to_buffer(self, terms: Iterable[tuple[int, bytes]]) -> None:
        """These owners' updates from these models are answered for."""
        super().consent_to_buffer(terms)
        self._store_or_refuse()

    def spend(self, fingerprint: bytes) -> None:
        """The update may be summed without this client's doing."""
        super().spend(fingerprint)
        self._store_or_refuse()

    def forgive(self, model: str) -> None:
        """Forget what left this client for one global model."""
        super().forgive(model)
        self._store_or_refuse()

    def accept_loss(self, number: int) -> None:
        """Go on although an older ledger is lost that knew of rounds up to `number`."""
        super().accept_loss(number)
        self._store_or_refuse()

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()

    def _load(self) -> Ledger:
        try:
            content = unseal(_PLACE, self._path.read_bytes())
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
        return entries

    def _store(self) -> None:
        stored = _Stored(self._session, self._client, self.to_bytes())
        write_synced(self._path, seal(_PLACE, msgspec.msgpack.encode(stored)))

    def _store_or_refuse(self) -> None:
        """Nothing may leave that a restart would not remember."""
        try:
            self._store()
        except OSError as error:
            raise JournalError(
                f"the ledger {self._path} cannot be written: {error.strerror or error}; nothing "
                "was sent that it does not account for"
            ) from error
