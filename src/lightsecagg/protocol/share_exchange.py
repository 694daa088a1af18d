"""Sealing and opening the shares that travel through the server.

One way there and one back, for the synchronous and the asynchronous mode and for every protocol: a
share is sealed under the pair's key of this roster, mask and direction (see `crypto.sealing`).

The *header* of a mask is a hash of C1, its owner and serial, its salt and all its sealed shares.
The owner binds each share to it, and the server passes on what the recipient needs to see that: so
a share counts under one header alone, and whoever holds shares of a mask agrees on the header.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.sealing import (
    ShareHeader,
    ShareKeys,
    ShareKind,
    open_sealed,
    seal,
    share_salt,
)
from lightsecagg.crypto.transcript import context_hash, uint
from lightsecagg.protocol.messages import SealedShare, ShareBundle
from lightsecagg.protocol.roster import Round

Share = tuple[int, bytes]
"""A share at its recipient: the value of its `ShareKind`, and its bytes."""


BUNDLE_BYTES: Final = 254 * 1024
"""A bundle is sent before it takes more: a message costs both ends as much as tens of kilobytes of
it. With its envelope it still fits a chunk of 256 KiB, so a server keeps none in a file."""

HEADER: Final = 112
"""More bytes than a share travels with, beside its sealed ones."""


class OutgoingShare(NamedTuple):
    """A share at its owner."""

    recipient: int
    kind: ShareKind
    plaintext: bytes

    def __repr__(self) -> str:
        return f"OutgoingShare(recipient={self.recipient}, kind={self.kind.name})"


class SealedMask(NamedTuple):
    """The shares of a mask on their way."""

    header: bytes
    """Under which they count; empty without checks."""
    shares: list[SealedShare]


def seal_shares(
    round_: Round, key: AgreementKey, owner: int, shares: Sequence[OutgoingShare], serial: int = 0
) -> SealedMask:
    """Seal the shares of a mask, each for its recipient, and bind them to its header.

    There is nothing random here: the same shares are the same bytes again.
    """
    own = key.derive(round_.context, "share salt", uint(owner), uint(serial))
    salt = share_salt(own, shares)
    keys: list[ShareKeys] = []
    sealed: list[SealedShare] = []
    for share in shares:
        header = ShareHeader(
            context=round_.context,
            kind=share.kind,
            sender=owner,
            recipient=share.recipient,
            mask_id=serial,
            length=len(share.plaintext),
            salt=salt,
        )
        mine = keys_with(round_, key, share.recipient, header)
        keys.append(mine)
        body = seal(mine, header, share.plaintext)
        sealed.append(
            SealedShare(owner, share.recipient, share.kind, header.length, salt, body, serial)
        )
    if not round_.settings.traits.checked:
        return SealedMask(b"", sealed)
    bound = mask_header(round_.context, owner, serial, salt, root_of(sealed))
    pairs = zip(sealed, keys, strict=True)
    return SealedMask(bound, [replace(share, mac=mine.bind(bound)) for share, mine in pairs])


def open_share(round_: Round, key: AgreementKey, recipient: int, message: SealedShare) -> bytes:
    """The share, or `CryptoError` if it is not exactly what its owner sealed for us."""
    header = ShareHeader(
        context=round_.context,
        kind=message.kind,
        sender=message.owner,
        recipient=recipient,
        mask_id=message.serial,
        length=message.length,
        salt=message.salt,
    )
    keys = keys_with(round_, key, message.owner, header)
    if round_.settings.traits.checked:
        keys.check_binding(header_of(round_, message), message.mac)
    return open_sealed(keys, header, message.sealed)


def root_of(shares: Iterable[SealedShare]) -> bytes:
    """One hash of all sealed shares of a mask, by recipient."""
    ordered = sorted(shares, key=lambda share: share.recipient)
    return context_hash("sealed shares", *map(_digest, ordered))


def _digest(share: SealedShare) -> bytes:
    numbers = (share.recipient, share.kind.value, share.length)
    return context_hash("sealed share", *map(uint, numbers), share.sealed)


def mask_header(context: bytes, owner: int, serial: int, salt: bytes, root: bytes) -> bytes:
    """What a mask's shares count under: its check follows from it, and uploads name it (S46)."""
    return context_hash("mask header", context, uint(owner), uint(serial), salt, root)


def header_of(round_: Round, share: SealedShare) -> bytes:
    """The header under which a relayed share came; empty without checks."""
    if not round_.settings.traits.checked:
        return b""
    return mask_header(round_.context, share.owner, share.serial, share.salt, share.root)


def keys_with(round_: Round, key: AgreementKey, peer: int, header: ShareHeader) -> ShareKeys:
    """The keys of a share that is exchanged with this peer."""
    secret = key.agree(round_.keys[round_.positions[peer]][0], peer)
    return ShareKeys(secret, header)


class Filling:
    """A bundle that takes shares until the next one has no room in it."""

    def __init__(self) -> None:
        self.shares: list[SealedShare] = []
        self._bytes = 0

    def put(self, share: SealedShare) -> ShareBundle | None:
        """Add a share; the bundle of those before it, if it has no room there."""
        size = len(share.sealed) + HEADER
        full = None
        if self.shares and self._bytes + size > BUNDLE_BYTES:
            full = ShareBundle(tuple(self.shares))
            self.shares, self._bytes = [], 0
        self.shares.append(share)
        self._bytes += size
        return full


def bundles(shares: Iterable[SealedShare]) -> Iterator[ShareBundle]:
    """The shares in as few messages as `BUNDLE_BYTES` allows, in their order."""
    filling = Filling()
    for share in shares:
        if (full := filling.put(share)) is not None:
            yield full
    if filling.shares:
        yield ShareBundle(tuple(filling.shares))
