"""Authenticated encryption of the shares that the server relays (protocol step "share", S19).

A share is sealed in chunks with AES-256-GCM; a sealed share is the concatenation of its sealed
chunks, each of them its plaintext plus a tag of 16 bytes. Nothing else is added: chunk sizes follow
from the length of the share.

    keys  = HKDF(X25519 secret, salt C1, info = sender | recipient | mask id | salt), 64 bytes
    nonce = chunk index
    AAD   = C1 | kind | sender | recipient | mask id | salt | chunk index | chunks in all | length

The first key seals; the second one authenticates the header of the mask (`bind`), so that a share
counts under one header alone.

The nonce repeats from share to share, so a key must seal one share once: `ShareKeys` enforces it in
one process. A client that is restored twice from one snapshot could still seal two shares under one
key; so each mask has a salt of 16 bytes, which travels beside its shares. It is a keyed hash of all
the shares of the mask: equal shares are equal bytes, and others have other keys (`share_salt`).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lightsecagg.crypto.agreement import PairwiseSecret
from lightsecagg.crypto.transcript import KEY_LENGTH, transcript, transcript_head
from lightsecagg.errors import CryptoError, LocalProtocolError, ParameterError

TAG_LENGTH: Final = 16
"""Bytes that sealing adds to each chunk."""

CHUNK_LENGTH: Final = 2**20 - TAG_LENGTH
"""Plaintext bytes per chunk, so that a sealed chunk is at most 1 MiB."""

SALT_LENGTH: Final = 16
"""Bytes that give the shares of each mask keys of their own."""

MAC_LENGTH: Final = 16
"""Bytes by which a sender binds a share to the header of its mask."""

_LABEL: Final = "sealed share"
_BOUND: Final = struct.Struct(f">IQIQIQIQI{SALT_LENGTH}sIQIQIQ")
"""What follows C1 in the associated data, each part behind its length, as in any transcript."""

_SHARE: Final = struct.Struct(">IQIQI")
"""Recipient and kind, each behind its length, and the length of the plaintext."""


class ShareKind(Enum):
    """How the recipient must read a share; authenticated, because lengths may coincide."""

    SEED = 1
    """32 bytes that expand to a share of a mask."""
    EXPLICIT = 2
    """A share of a mask, element by element."""
    SHAMIR = 3
    """SecAgg's threshold shares of a client's two secrets."""


@dataclass(frozen=True, slots=True)
class ShareHeader:
    """Everything that a sealed share is bound to."""

    context: bytes
    """C1, the hash of the round's parameters and ordered roster."""
    kind: ShareKind
    sender: int
    recipient: int
    mask_id: int
    """Serial of the sender's mask; 0 in synchronous rounds."""
    length: int
    """Plaintext bytes."""
    salt: bytes
    """Of the mask (`share_salt`); not secret."""

    def __post_init__(self) -> None:
        if len(self.salt) != SALT_LENGTH:
            raise ParameterError(f"a salt has {SALT_LENGTH} bytes, not {len(self.salt)}")
        if self.length < 0:
            raise ParameterError(f"a share cannot have {self.length} bytes")


class ShareKeys:
    """The keys of one share in one direction; they seal once, open and bind as often as needed."""

    __slots__ = ("_aead", "_binding", "_used")

    def __init__(self, secret: PairwiseSecret, header: ShareHeader) -> None:
        """Derive the keys of the share that `header` describes (of any kind and length)."""
        keys = secret.directed_key(
            header.context,
            _LABEL,
            header.sender,
            header.recipient,
            header.mask_id,
            header.salt,
            2 * KEY_LENGTH,
        )
        self._aead = AESGCM(keys[:KEY_LENGTH])
        self._binding = keys[KEY_LENGTH:]
        self._used = False

    def bind(self, header: bytes) -> bytes:
        """What shows the recipient that the share counts under this header of its mask (S46)."""
        return hmac.digest(self._binding, transcript("share binding", header), "sha256")[
            :MAC_LENGTH
        ]

    def check_binding(self, header: bytes, mac: bytes) -> None:
        """Raise `CryptoError` unless the sender has bound the share to this header."""
        if not hmac.compare_digest(self.bind(header), mac):
            raise CryptoError("the share is not bound to the header that it came with")

    def __repr__(self) -> str:
        return f"ShareKeys(used={self._used})"


def share_salt(key: bytes, shares: Iterable[tuple[int, ShareKind, bytes]]) -> bytes:
    """The salt of a mask, from all its shares: recipient, kind and plaintext of each.

    * `key` is secret, and of this owner and mask alone.

    Whoever draws the same shares again, after a restored snapshot or from entropy that repeats,
    sends the same bytes again; another share gives all of them other keys.
    """
    mac = hmac.new(key, digestmod="sha256")
    for recipient, kind, plaintext in shares:
        mac.update(transcript_head("share", 3))
        mac.update(_SHARE.pack(8, recipient, 8, kind.value, len(plaintext)))
        mac.update(plaintext)
    return mac.digest()[:SALT_LENGTH]


def sealed_length(length: int) -> int:
    """Bytes of a sealed share of `length` plaintext bytes."""
    return length + _chunk_count(length) * TAG_LENGTH


def seal(key: ShareKeys, header: ShareHeader, plaintext: bytes) -> bytes:
    """Seal a share, once; keep the result, because a resend must repeat these very bytes."""
    if len(plaintext) != header.length:
        raise LocalProtocolError(
            f"the header announces {header.length} bytes and the share has {len(plaintext)}"
        )
    if key._used:
        raise LocalProtocolError(
            f"the share from client {header.sender} to client {header.recipient} is sealed "
            "already: sealing under the same key again would reveal both; resend the same bytes"
        )
    key._used = True
    count = _chunk_count(header.length)
    view = memoryview(plaintext)
    return b"".join(
        [
            key._aead.encrypt(
                _nonce(index),
                view[index * CHUNK_LENGTH : (index + 1) * CHUNK_LENGTH],
                _associated_data(header, index, count),
            )
            for index in range(count)
        ]
    )


def open_sealed(key: ShareKeys, header: ShareHeader, sealed: bytes | memoryview) -> bytes:
    """The share, if every chunk of `sealed` is exactly what `header` says; else `CryptoError`."""
    if len(sealed) != sealed_length(header.length):
        raise CryptoError(
            f"{_name(header)} has {len(sealed)} bytes instead of {sealed_length(header.length)}"
        )
    count = _chunk_count(header.length)
    view = memoryview(sealed)
    step = CHUNK_LENGTH + TAG_LENGTH
    try:
        return b"".join(
            [
                key._aead.decrypt(
                    _nonce(index),
                    view[index * step : (index + 1) * step],
                    _associated_data(header, index, count),
                )
                for index in range(count)
            ]
        )
    except InvalidTag as error:
        raise CryptoError(
            f"{_name(header)} does not open: it was altered, or sealed for another round, "
            "recipient, mask or kind"
        ) from error


def _chunk_count(length: int) -> int:
    return max(1, -(-length // CHUNK_LENGTH))


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _associated_data(header: ShareHeader, index: int, count: int) -> bytes:
    """The transcript of C1 and of eight parts more, which are encoded in one step."""
    kind, salt, length = header.kind.value, header.salt, header.length
    return transcript_head(_LABEL, 9, header.context) + _BOUND.pack(
        *(8, kind, 8, header.sender, 8, header.recipient, 8, header.mask_id),
        *(SALT_LENGTH, salt, 8, index, 8, count, 8, length),
    )


def _name(header: ShareHeader) -> str:
    return f"the share from client {header.sender} to client {header.recipient}"
