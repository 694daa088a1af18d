"""Pairwise keys: X25519 agreement, then HKDF bound to the round context.

A pair of clients agrees on one secret and derives from it

* directed keys, which seal shares: the key from i to j is not the key from j to i;
* symmetric seeds, which make SecAgg's pairwise masks: a_ij is the same on both sides.

Public keys are *refused* unless they are canonical, rather than brought into canonical form: the
top bit must be clear and the coordinate below 2^255 - 19. RFC 7748 lets X25519 ignore the top bit,
so a key and its high-bit twin would agree on the same secret; refusing twins makes equality of
bytes equality of keys, and comparing rosters safe. No honest key is lost: a public key that X25519
computes is always canonical.
"""

from __future__ import annotations

import struct
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.transcript import (
    KEY_LENGTH,
    derive_key,
    derive_key_for,
    transcript_head,
    uint,
)
from lightsecagg.errors import CryptoError, LocalProtocolError, ParameterError

AGREEMENT_KEY_LENGTH: Final = 32
"""Bytes in a public key, and in a private one."""

_P: Final = 2**255 - 19

_DIRECTION: Final = struct.Struct(">IQIQIQI")
"""Sender, recipient and mask id, each behind its length, and the length of the salt."""

# The u-coordinates of all points whose order divides 8, on the curve and on its twist: whoever
# agrees with one of them gets a secret that everybody knows.
_LOW_ORDER: Final = frozenset(
    {
        0,
        1,
        _P - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)


def check_public_key(raw: bytes, owner: int) -> bytes:
    """Return `raw` if it is a canonical X25519 key of full order; refuse it otherwise (S18).

    `owner` is the client that claims the key; the refusal names it.
    """
    if len(raw) != AGREEMENT_KEY_LENGTH:
        raise CryptoError(
            f"client {owner}'s public key has {len(raw)} bytes instead of {AGREEMENT_KEY_LENGTH}"
        )
    coordinate = int.from_bytes(raw, "little")
    if coordinate >= _P:
        raise CryptoError(
            f"client {owner}'s public key is not canonical: another encoding of the same key exists"
        )
    if coordinate in _LOW_ORDER:
        raise CryptoError(f"client {owner}'s public key has low order: what it agrees on is public")
    return raw


class PairwiseSecret:
    """What two clients agreed on; the source of their keys, never used as one itself."""

    __slots__ = ("_shared",)

    def __init__(self, shared: bytes) -> None:
        self._shared = shared

    def directed_key(
        self,
        context: bytes,
        label: str,
        sender: int,
        recipient: int,
        mask_id: int = 0,
        salt: bytes = b"",
        length: int = KEY_LENGTH,
    ) -> bytes:
        """The key for one purpose, one mask, one direction and one salt; or several, in a row.

        `context` is C1, which binds the keys of both parties.
        """
        if sender == recipient:
            raise LocalProtocolError(f"client {sender} cannot share a key with itself")
        head = transcript_head("directed key", 5, label.encode())
        try:
            direction = _DIRECTION.pack(8, sender, 8, recipient, 8, mask_id, len(salt))
        except struct.error as error:
            raise ParameterError(
                f"the ids {sender} and {recipient} and mask {mask_id} must be in [0, 2^64)"
            ) from error
        return derive_key_for(self._shared, context, head + direction + salt, length)

    def symmetric_seed(self, context: bytes, label: str, one: int, other: int) -> bytes:
        """SecAgg's a_ij: 32 bytes, the same whichever of the two clients comes first."""
        if one == other:
            raise LocalProtocolError(f"client {one} cannot share a seed with itself")
        parts = (uint(min(one, other)), uint(max(one, other)))
        return derive_key(self._shared, context, "symmetric seed", label.encode(), *parts)

    def __repr__(self) -> str:
        return "PairwiseSecret(...)"


class AgreementKey:
    """An X25519 key pair, fresh in every round.

    `public` holds the 32 bytes to advertise. A pair of clients seals shares in both directions,
    and in the asynchronous mode for many masks, all under keys of one secret: so it is remembered
    for as long as the key lives.
    """

    __slots__ = ("_private", "_secrets", "public")

    def __init__(self, private: bytes) -> None:
        """`private` is 32 uniform bytes: freshly drawn, or rebuilt from SecAgg's shares."""
        if len(private) != AGREEMENT_KEY_LENGTH:
            raise CryptoError(f"a private key has {AGREEMENT_KEY_LENGTH} bytes, not {len(private)}")
        self._private = X25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()
        self._secrets: dict[bytes, PairwiseSecret] = {}

    @classmethod
    def generate(cls, entropy: Entropy = system_entropy) -> AgreementKey:
        """Draw a fresh key pair."""
        return cls(draw(entropy, AGREEMENT_KEY_LENGTH))

    def private_bytes(self) -> bytes:
        """The secret itself, for SecAgg's threshold sharing of the mask key."""
        return self._private.private_bytes_raw()

    def derive(self, context: bytes, label: str, *parts: bytes) -> bytes:
        """A key of this party alone, for one purpose."""
        return derive_key(self._private.private_bytes_raw(), context, label, *parts)

    def agree(self, peer_public: bytes, peer: int) -> PairwiseSecret:
        """Agree with the client `peer`, whose advertised key is `peer_public` (S18)."""
        known = self._secrets.get(peer_public)
        if known is not None:
            return known
        check_public_key(peer_public, peer)
        if peer_public == self.public:
            raise CryptoError(f"client {peer} advertised our own public key as its own")
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError as error:  # the library's own check for the all-zero secret
            raise CryptoError(f"agreement with client {peer} failed: a key of low order") from error
        self._secrets[peer_public] = PairwiseSecret(shared)
        return self._secrets[peer_public]

    def __repr__(self) -> str:
        return f"AgreementKey(public={self.public.hex()})"
