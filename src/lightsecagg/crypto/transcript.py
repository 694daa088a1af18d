"""One unambiguous encoding for everything that is hashed, signed, derived or authenticated.

Signatures, HKDF infos, associated data and context hashes all run over `transcript(label, ...)`:
no two different lists of parts share an encoding, and no label can be mistaken for another.

    transcript = count || for each of (DOMAIN, label, part 1, part 2, ...): length || bytes

Count and lengths are four bytes, big-endian. The leading count makes the encoding prefix-free, so
even a concatenation of transcripts can be read in one way only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lightsecagg.errors import ParameterError

DOMAIN: Final = b"lightsecagg/1"
"""Separates our signatures and keys from those of any other program, and of any other version."""

HASH_LENGTH: Final = 32
"""Bytes in a context hash."""

KEY_LENGTH: Final = 32
"""Bytes in a derived key or seed."""

_LENGTH = struct.Struct(">I")
_MAX_PART = 2**32 - 1
_MAX_UINT = 2**64 - 1
_SHA256: Final = hashes.SHA256()


def transcript(label: str, *parts: bytes) -> bytes:
    """Encode `label` and `parts` so that different arguments never give equal bytes."""
    return transcript_head(label, len(parts)) + _framed(parts)


@lru_cache(maxsize=256)
def transcript_head(label: str, count: int, *first: bytes) -> bytes:
    """How a transcript of `count` parts begins, of which these are the first.

    For whoever encodes the others in one step: a share has several transcripts, and a client
    hundreds of shares. Remembered, so no part of it may be secret.
    """
    if not label.isascii() or not label:
        raise ParameterError(f"a transcript label must be non-empty ASCII, not {label!r}")
    return _LENGTH.pack(2 + count) + _framed((DOMAIN, label.encode("ascii"), *first))


def _framed(parts: Sequence[bytes]) -> bytes:
    encoded: list[bytes] = []
    for part in parts:
        encoded += (_length(part), part)
    return b"".join(encoded)


def _length(part: bytes | memoryview) -> bytes:
    try:
        return _LENGTH.pack(len(part))
    except struct.error as error:
        raise ParameterError(
            f"a part of {len(part)} bytes does not fit a transcript (limit {_MAX_PART}); "
            "hash it first"
        ) from error


def uint(value: int) -> bytes:
    """Encode an id, serial, count or size as a transcript part: eight bytes, big-endian."""
    if not 0 <= value <= _MAX_UINT:
        raise ParameterError(f"{value} does not fit a transcript; it must be in [0, 2^64)")
    return value.to_bytes(8, "big")


def context_hash(label: str, *parts: bytes | memoryview) -> bytes:
    """SHA-256 of a transcript: how the round contexts C0 and C1 are made."""
    digest = hashes.Hash(_SHA256)
    digest.update(transcript_head(label, len(parts)))
    for part in parts:  # one by one: a copy of a long part costs as much as its hash
        digest.update(_length(part))
        digest.update(part)
    return digest.finalize()


def derive_key(secret: bytes, context: bytes, label: str, *parts: bytes) -> bytes:
    """HKDF-SHA256 with salt `context` and info `transcript(label, *parts)`: a 32-byte key.

    - `secret` has full entropy (a seed) or is a Diffie-Hellman output.
    - A different context, label or part gives an independent key.
    """
    return derive_key_for(secret, context, transcript(label, *parts))


def derive_key_for(secret: bytes, context: bytes, info: bytes, length: int = KEY_LENGTH) -> bytes:
    """`derive_key` for a transcript that is encoded already; of more keys than one, in a row."""
    return HKDF(algorithm=_SHA256, length=length, salt=context, info=info).derive(secret)
