"""Ed25519 identities: long-lived keys that sign round contexts, rosters and survivor sets.

A signature covers `transcript(label, *fields)`, so one made for one purpose says nothing about
another, and no two lists of fields share one.

Libraries disagree about signatures that only the owner of a key can make, and only on purpose: with
a part of small order, with a scalar that is not reduced, under keys of more than one encoding. What
one client takes and another does not splits a round, so each of these is refused (S45): S is below
the group's order, R and the key A are canonical and not of small order, and S B = R + h A holds
exactly, not only after a multiplication by the cofactor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.transcript import transcript
from lightsecagg.errors import CryptoError

IDENTITY_KEY_LENGTH: Final = 32
"""Bytes in a public key, and in a private one."""

SIGNATURE_LENGTH: Final = 64
"""Bytes in a signature."""

_P: Final = 2**255 - 19

# The y-coordinates of the eight points whose order divides 8. Under such a key anybody can forge.
_Y8: Final = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_LOW_ORDER: Final = frozenset({0, 1, _P - 1, _Y8, _P - _Y8})


def check_identity_key(raw: bytes, owner: int | str) -> bytes:
    """Return `raw` if it is a canonical Ed25519 key of full order; refuse it otherwise.

    `owner` is the identity that claims the key; the refusal names it.
    """
    if len(raw) != IDENTITY_KEY_LENGTH:
        raise CryptoError(
            f"the identity key of {owner} has {len(raw)} bytes instead of {IDENTITY_KEY_LENGTH}"
        )
    y = int.from_bytes(raw, "little") % 2**255
    if y >= _P:
        raise CryptoError(f"the identity key of {owner} is not canonical")
    if y in _LOW_ORDER:
        raise CryptoError(f"the identity key of {owner} has low order: anybody can sign for it")
    return raw


class IdentityKey:
    """The signing key of one identity.

    `public` holds the 32 bytes that the allow-list names.
    """

    __slots__ = ("_private", "public")

    def __init__(self, private: bytes) -> None:
        """`private` is 32 uniform bytes: freshly drawn, or read from the key file."""
        if len(private) != IDENTITY_KEY_LENGTH:
            raise CryptoError(f"a private key has {IDENTITY_KEY_LENGTH} bytes, not {len(private)}")
        self._private = Ed25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, entropy: Entropy = system_entropy) -> IdentityKey:
        """Draw a fresh identity."""
        return cls(draw(entropy, IDENTITY_KEY_LENGTH))

    def private_bytes(self) -> bytes:
        """The secret itself, to be written to the key file and nowhere else."""
        return self._private.private_bytes_raw()

    def sign(self, label: str, *fields: bytes) -> bytes:
        """Sign `fields` for the purpose `label`: 64 bytes, the same on every call."""
        return self._private.sign(transcript(label, *fields))

    def __repr__(self) -> str:
        return f"IdentityKey(public={self.public.hex()})"


def verify(signer: int | str, public: bytes, signature: bytes, label: str, *fields: bytes) -> None:
    """Raise `CryptoError`, naming `signer`, unless it signed `fields` for the purpose `label`."""
    verify_encoded(signer, public, signature, label, transcript(label, *fields))


def verify_encoded(
    signer: int | str, public: bytes, signature: bytes, label: str, encoded: bytes
) -> None:
    """`verify` for a transcript with this label that many have signed, and that is encoded once."""
    check_identity_key(public, signer)
    try:
        _parsed(public).verify(signature, encoded)
    except InvalidSignature as error:
        raise CryptoError(f"the signature of {signer} on {label!r} does not verify") from error
    except ValueError as error:
        raise CryptoError(f"the identity key of {signer} is not a key") from error
    if int.from_bytes(signature[:32], "little") % 2**255 in _LOW_ORDER:
        raise CryptoError(f"the signature of {signer} on {label!r} begins with a low order point")


@lru_cache(maxsize=4096)
def _parsed(public: bytes) -> Ed25519PublicKey:
    """Remembered: the same few keys verify in every round, and more than once in each."""
    return Ed25519PublicKey.from_public_bytes(public)
