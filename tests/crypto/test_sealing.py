"""Sealed shares open for exactly one recipient, round, mask, kind and order of chunks (S19)."""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightsecagg.crypto.agreement import AgreementKey, PairwiseSecret
from lightsecagg.crypto.sealing import (
    CHUNK_LENGTH,
    MAC_LENGTH,
    SALT_LENGTH,
    ShareHeader,
    ShareKeys,
    ShareKind,
    open_sealed,
    seal,
    sealed_length,
    share_salt,
)
from lightsecagg.crypto.transcript import transcript
from lightsecagg.errors import CryptoError, LocalProtocolError, ParameterError

ALICE, BOB = AgreementKey(b"a" * 32), AgreementKey(b"b" * 32)
SECRET = ALICE.agree(BOB.public, 2)
SHARE = bytes(range(32))
HEADER = ShareHeader(
    b"C" * 32, ShareKind.SEED, sender=1, recipient=2, mask_id=0, length=32, salt=b"s" * SALT_LENGTH
)
SEALED = seal(ShareKeys(SECRET, HEADER), HEADER, SHARE)

# Three chunks, the last one short.
LONG = bytes(2 * CHUNK_LENGTH) + b"tail"
LONG_HEADER = replace(HEADER, kind=ShareKind.EXPLICIT, length=len(LONG))
LONG_SEALED = seal(ShareKeys(SECRET, LONG_HEADER), LONG_HEADER, LONG)


def open_as(header: ShareHeader, sealed: bytes, secret: PairwiseSecret = SECRET) -> bytes:
    return open_sealed(ShareKeys(secret, header), header, sealed)


def test_the_recipient_opens_a_share() -> None:
    assert open_as(HEADER, SEALED, secret=BOB.agree(ALICE.public, 1)) == SHARE
    assert open_as(LONG_HEADER, LONG_SEALED) == LONG


@pytest.mark.parametrize("length", [0, 1, CHUNK_LENGTH - 1, CHUNK_LENGTH, CHUNK_LENGTH + 1])
def test_shares_around_the_chunk_length(length: int) -> None:
    header = replace(HEADER, length=length)
    sealed = seal(ShareKeys(SECRET, header), header, b"s" * length)
    assert len(sealed) == sealed_length(length)
    assert open_as(header, sealed) == b"s" * length


def test_a_chunk_costs_one_tag_and_fits_a_mebibyte() -> None:
    assert sealed_length(32) == 48
    assert sealed_length(CHUNK_LENGTH) == 2**20
    assert sealed_length(CHUNK_LENGTH + 1) == CHUNK_LENGTH + 1 + 32


def test_S19_any_flipped_bit_is_refused() -> None:
    for position in range(8 * len(SEALED)):
        flipped = bytearray(SEALED)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CryptoError, match="from client 1 to client 2"):
            open_as(HEADER, bytes(flipped))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 8 * len(LONG_SEALED) - 1))
def test_S19_a_flipped_bit_in_any_chunk_is_refused(position: int) -> None:
    flipped = bytearray(LONG_SEALED)
    flipped[position // 8] ^= 1 << position % 8
    with pytest.raises(CryptoError):
        open_as(LONG_HEADER, bytes(flipped))


@pytest.mark.parametrize(
    "header",
    [
        replace(HEADER, context=b"D" * 32),
        replace(HEADER, kind=ShareKind.EXPLICIT),  # at L = 8 both kinds have 32 bytes
        replace(HEADER, kind=ShareKind.SHAMIR),
        replace(HEADER, sender=3),
        replace(HEADER, recipient=3),
        replace(HEADER, sender=2, recipient=1),
        replace(HEADER, mask_id=1),
        replace(HEADER, salt=b"t" * SALT_LENGTH),
    ],
    ids=[
        "cross-round",
        "kind",
        "kind",
        "cross-sender",
        "cross-recipient",
        "reflection",
        "mask",
        "salt",
    ],
)
def test_S19_a_share_opens_under_its_own_header_only(header: ShareHeader) -> None:
    with pytest.raises(CryptoError):
        open_as(header, SEALED)


@pytest.mark.parametrize(
    "header",
    [
        replace(HEADER, context=b"D" * 32),
        replace(HEADER, kind=ShareKind.EXPLICIT),
        replace(HEADER, sender=3),
        replace(HEADER, recipient=3),
        replace(HEADER, sender=2, recipient=1),
        replace(HEADER, mask_id=1),
        replace(HEADER, salt=b"t" * SALT_LENGTH),
    ],
)
def test_S19_the_header_is_authenticated_even_under_the_right_key(header: ShareHeader) -> None:
    """The second wall: associated data binds what the key derivation binds already."""
    with pytest.raises(CryptoError):
        open_sealed(ShareKeys(SECRET, HEADER), header, SEALED)


@pytest.mark.parametrize(
    "other",
    [
        {"context": b"D" * 32},
        {"sender": 2, "recipient": 1},
        {"mask_id": 1},
        {"salt": b"t" * SALT_LENGTH},
    ],
)
def test_S19_the_key_itself_binds_C1_direction_mask_and_salt(other: dict[str, Any]) -> None:
    """Beside the associated data, which binds them too: here that is the right one."""
    key = ShareKeys(SECRET, replace(HEADER, **other))
    with pytest.raises(CryptoError):
        open_sealed(key, HEADER, SEALED)


def test_S19_a_stranger_cannot_open() -> None:
    with pytest.raises(CryptoError):
        open_as(HEADER, SEALED, secret=AgreementKey.generate().agree(BOB.public, 2))


def test_S19_keys_differ_by_direction() -> None:
    back = replace(HEADER, sender=2, recipient=1)
    assert seal(ShareKeys(SECRET, back), back, SHARE)[:32] != SEALED[:32]


@pytest.mark.parametrize("length", [0, 1, 16, 32, 47])
def test_S19_truncation_is_refused(length: int) -> None:
    with pytest.raises(CryptoError, match=f"{length} bytes instead of 48"):
        open_as(HEADER, SEALED[:length])


def test_S19_trailing_bytes_are_refused() -> None:
    with pytest.raises(CryptoError, match="49 bytes instead of 48"):
        open_as(HEADER, SEALED + b"\0")


def test_S19_a_dropped_chunk_is_refused_though_the_header_agrees() -> None:
    shorter = replace(LONG_HEADER, length=CHUNK_LENGTH)
    with pytest.raises(CryptoError, match="does not open"):
        open_as(shorter, LONG_SEALED[: 2**20])
    without_tail = replace(LONG_HEADER, length=2 * CHUNK_LENGTH)
    with pytest.raises(CryptoError, match="does not open"):
        open_as(without_tail, LONG_SEALED[: 2 * 2**20])


def test_S19_reordered_and_repeated_chunks_are_refused() -> None:
    first, second, tail = LONG_SEALED[: 2**20], LONG_SEALED[2**20 : 2**21], LONG_SEALED[2**21 :]
    for order in ((second, first, tail), (first, first, tail), (second, second, tail)):
        with pytest.raises(CryptoError):
            open_as(LONG_HEADER, b"".join(order))


def test_S19_nothing_is_returned_before_the_last_chunk_verifies() -> None:
    with pytest.raises(CryptoError):
        open_as(LONG_HEADER, LONG_SEALED[:-1] + bytes([LONG_SEALED[-1] ^ 1]))


def test_S19_a_key_seals_once() -> None:
    key = ShareKeys(SECRET, HEADER)
    assert seal(key, HEADER, SHARE) == SEALED
    with pytest.raises(LocalProtocolError, match="resend the same bytes"):
        seal(key, HEADER, b"x" * 32)


def test_a_share_unlike_its_header_is_not_sealed() -> None:
    key = ShareKeys(SECRET, HEADER)
    with pytest.raises(LocalProtocolError, match=r"32 bytes .* 31"):
        seal(key, HEADER, SHARE[:31])
    assert seal(key, HEADER, SHARE) == SEALED


def test_S19_two_shares_of_one_header_reveal_nothing_of_each_other_under_other_salts() -> None:
    """A client that is restored twice from one snapshot may seal twice for the same recipient.

    Under one key and nonce, the difference of the ciphertexts is that of the shares.
    """

    def difference(one: bytes, other: bytes) -> bytes:
        return bytes(a ^ b for a, b in zip(one[:32], other[:32], strict=True))

    def sealed_twice(first: ShareHeader, second: ShareHeader) -> bytes:
        one = seal(ShareKeys(SECRET, first), first, SHARE)
        return difference(one, seal(ShareKeys(SECRET, second), second, b"x" * 32))

    stolen = difference(SHARE, b"x" * 32)
    assert sealed_twice(HEADER, HEADER) == stolen, "under one salt the attack works"
    assert sealed_twice(HEADER, replace(HEADER, salt=b"t" * SALT_LENGTH)) != stolen


def test_S19_a_salt_is_of_all_shares_of_a_mask_and_of_its_key() -> None:
    """Equal shares have equal salts, hence equal bytes; whatever differs gives another salt."""
    shares = [(2, ShareKind.SEED, b"a" * 32), (3, ShareKind.EXPLICIT, b"b" * 8)]
    salt = share_salt(b"k" * 32, shares)
    assert share_salt(b"k" * 32, list(shares)) == salt
    assert len(salt) == SALT_LENGTH
    others = [
        share_salt(b"l" * 32, shares),
        share_salt(b"k" * 32, shares[::-1]),
        share_salt(b"k" * 32, shares[:1]),
        share_salt(b"k" * 32, [(2, ShareKind.SEED, b"a" * 32), (3, ShareKind.EXPLICIT, b"c" * 8)]),
        share_salt(b"k" * 32, [(2, ShareKind.SEED, b"a" * 32), (4, ShareKind.EXPLICIT, b"b" * 8)]),
        share_salt(b"k" * 32, [(2, ShareKind.SEED, b"a" * 32), (3, ShareKind.SEED, b"b" * 8)]),
        share_salt(b"k" * 32, [(2, ShareKind.SEED, b"a" * 33), (3, ShareKind.EXPLICIT, b"b" * 7)]),
    ]
    assert len({salt, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    "other",
    [
        {"context": b"D" * 32},
        {"sender": 2, "recipient": 1},
        {"mask_id": 1},
        {"salt": b"t" * SALT_LENGTH},
    ],
)
def test_S46_a_binding_is_of_one_share_and_one_header(other: dict[str, Any]) -> None:
    mac = ShareKeys(SECRET, HEADER).bind(b"header of a mask")
    assert len(mac) == MAC_LENGTH
    theirs = ShareKeys(BOB.agree(ALICE.public, 1), HEADER)
    theirs.check_binding(b"header of a mask", mac)
    for header, wrong in ((b"another header", mac), (b"header of a mask", bytes(MAC_LENGTH))):
        with pytest.raises(CryptoError, match="not bound to the header"):
            theirs.check_binding(header, wrong)
    for cut in (mac[:-1], b"", mac + b"x"):
        with pytest.raises(CryptoError, match="not bound to the header"):
            theirs.check_binding(b"header of a mask", cut)
    with pytest.raises(CryptoError, match="not bound to the header"):
        ShareKeys(SECRET, replace(HEADER, **other)).check_binding(b"header of a mask", mac)


def test_S46_what_binds_a_share_is_not_what_seals_it() -> None:
    """The derived bytes are two keys, in this order."""
    parts = (HEADER.sender, HEADER.recipient, HEADER.mask_id, HEADER.salt)
    keys = SECRET.directed_key(HEADER.context, "sealed share", *parts, 64)
    said = transcript("share binding", b"header of a mask")
    expected = hmac.digest(keys[32:], said, "sha256")[:MAC_LENGTH]
    assert ShareKeys(SECRET, HEADER).bind(b"header of a mask") == expected


@pytest.mark.parametrize("length", [0, 15, 17])
def test_S19_a_salt_has_one_length(length: int) -> None:
    with pytest.raises(ParameterError, match=f"16 bytes, not {length}"):
        replace(HEADER, salt=bytes(length))


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ParameterError):
        replace(HEADER, length=-1)


def test_S22_repr_hides_the_key() -> None:
    assert repr(ShareKeys(SECRET, HEADER)) == "ShareKeys(used=False)"
