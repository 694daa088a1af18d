"""Sealing and opening the shares that travel through the server.

One way there and one back, for the synchronous and the asynchronous mode and for every protocol: a
share is sealed under the pair's key of this roster, mask and direction (see `crypto.sealing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.sealing import (
    SALT_LENGTH,
    SealingKey,
    ShareHeader,
    ShareKind,
    open_sealed,
    seal,
)
from lightsecagg.protocol.messages import SealedShare, ShareBundle
from lightsecagg.protocol.roster import Round

Share = tuple[int, bytes]
"""A share at its recipient: the value of its `ShareKind`, and its bytes."""


BUNDLE_BYTES: Final = 254 * 1024
"""A bundle is sent before it takes more: a message costs both ends as much as tens of kilobytes of
it. With its envelope it still fits a chunk of 256 KiB, so a server keeps none in a file."""

_HEADER: Final = 64
"""More bytes than a share travels with, beside its sealed ones."""


class OutgoingShare(NamedTuple):
    """A share at its owner."""

    recipient: int
    kind: ShareKind
    plaintext: bytes

    def __repr__(self) -> str:
        return f"OutgoingShare(recipient={self.recipient}, kind={self.kind.name})"


def seal_share(
    round_: Round,
    key: AgreementKey,
    owner: int,
    share: OutgoingShare,
    serial: int = 0,
    entropy: Entropy = system_entropy,
) -> SealedShare:
    """Seal a share for its recipient; call once per share and keep the result for resends."""
    header = ShareHeader(
        context=round_.context,
        kind=share.kind,
        sender=owner,
        recipient=share.recipient,
        mask_id=serial,
        length=len(share.plaintext),
        salt=draw(entropy, SALT_LENGTH),
    )
    secret = key.agree(_sealing_key(round_, share.recipient), share.recipient)
    sealed = seal(SealingKey(secret, header), header, share.plaintext)
    return SealedShare(
        owner, share.recipient, share.kind, header.length, header.salt, sealed, serial
    )


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
    secret = key.agree(_sealing_key(round_, message.owner), message.owner)
    return open_sealed(SealingKey(secret, header), header, message.sealed)


class Filling:
    """A bundle that takes shares until the next one has no room in it."""

    def __init__(self) -> None:
        self.shares: list[SealedShare] = []
        self._bytes = 0

    def put(self, share: SealedShare) -> ShareBundle | None:
        """Add a share; the bundle of those before it, if it has no room there."""
        size = len(share.sealed) + _HEADER
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


def _sealing_key(round_: Round, client: int) -> bytes:
    return round_.keys[round_.positions[client]][0]
