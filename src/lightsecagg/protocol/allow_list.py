"""Who may take part in a federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from lightsecagg.crypto.identity import check_identity_key
from lightsecagg.crypto.transcript import context_hash, uint
from lightsecagg.errors import CryptoError, ParameterError


class AllowList:
    """Who may take part: client id -> Ed25519 identity key.

    In malicious-server mode this list must not be the server's to write.
    """

    def __init__(self, identities: Mapping[int, bytes]) -> None:
        for client, key in identities.items():
            if not 0 <= client < 2**64 - 1:
                raise ParameterError(f"client id {client} must be in [0, 2^64 - 1)")
            try:
                check_identity_key(key, f"client {client}")
            except CryptoError as error:
                raise ParameterError(str(error)) from error
        if len(set(identities.values())) != len(identities):
            raise ParameterError("two clients of the allow-list share an identity key")
        self._identities = dict(sorted(identities.items()))

    def __contains__(self, client: int) -> bool:
        return client in self._identities

    def __len__(self) -> int:
        return len(self._identities)

    def __getitem__(self, client: int) -> bytes:
        return self._identities[client]

    @property
    def clients(self) -> tuple[int, ...]:
        """All ids, ascending."""
        return tuple(self._identities)

    @cached_property
    def digest(self) -> bytes:
        """What C0 binds."""
        parts: Iterable[bytes] = (
            part for client, key in self._identities.items() for part in (uint(client), key)
        )
        return context_hash("allow-list", *parts)
