"""Identities: signatures bind their label and every field, and name the signer when they fail."""

from __future__ import annotations

import pytest

from lightsecagg.crypto import identity
from lightsecagg.crypto.identity import IdentityKey, check_identity_key, verify
from lightsecagg.errors import CryptoError

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
KEY = IdentityKey(bytes(range(32)))
FIELDS = (b"context", b"7", b"keys")


def test_a_signature_verifies() -> None:
    signature = KEY.sign("advertise", *FIELDS)
    assert len(signature) == 64
    verify(3, KEY.public, signature, "advertise", *FIELDS)


@pytest.mark.parametrize(
    ("label", "fields"),
    [
        ("advertis", FIELDS),
        ("survivors", FIELDS),
        ("advertise", (b"context", b"7")),
        ("advertise", (b"context", b"7", b"keyS")),
        ("advertise", (b"context7", b"", b"keys")),
        ("advertise", (b"7", b"context", b"keys")),
        ("advertise", (*FIELDS, b"")),
    ],
)
def test_S02_a_signature_binds_label_and_fields(label: str, fields: tuple[bytes, ...]) -> None:
    signature = KEY.sign("advertise", *FIELDS)
    with pytest.raises(CryptoError, match="hospital-4"):
        verify("hospital-4", KEY.public, signature, label, *fields)


def test_S02_any_flipped_bit_is_refused() -> None:
    signature = KEY.sign("advertise", *FIELDS)
    for position in range(8 * 64):
        flipped = bytearray(signature)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CryptoError):
            verify(3, KEY.public, bytes(flipped), "advertise", *FIELDS)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_S02_signatures_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(CryptoError):
        verify(3, KEY.public, (KEY.sign("advertise") + b"\0")[:length], "advertise")


def test_S02_another_identity_does_not_verify() -> None:
    other = IdentityKey.generate()
    with pytest.raises(CryptoError, match="the signature of 3"):
        verify(3, other.public, KEY.sign("advertise"), "advertise")


def test_a_second_spelling_of_a_signature_is_refused() -> None:
    """Adding the group order to the scalar would give another valid-looking signature."""
    signature = KEY.sign("advertise")
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(CryptoError):
        verify(3, KEY.public, signature[:32] + scalar.to_bytes(32, "little"), "advertise")


def test_S17_identities_come_from_the_given_entropy() -> None:
    assert IdentityKey.generate(lambda count: b"k" * count).private_bytes() == b"k" * 32
    assert IdentityKey.generate().public != IdentityKey.generate().public


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(CryptoError, match="hospital-4"):
        verify("hospital-4", b"\x01" * length, bytes(64), "advertise")
    with pytest.raises(CryptoError):
        IdentityKey(b"\x01" * length)


@pytest.mark.parametrize("sign", [0, 2**255])
@pytest.mark.parametrize("y", sorted(identity._LOW_ORDER))
def test_low_order_identities_are_refused(y: int, sign: int) -> None:
    with pytest.raises(CryptoError, match=r"hospital-4.*low order"):
        check_identity_key((y + sign).to_bytes(32, "little"), "hospital-4")


def test_the_list_of_low_order_points_is_complete() -> None:
    """Three doublings take each listed point to the neutral element, and there are eight points."""

    def double_y(y: int) -> int:
        x_squared = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        return (y * y + x_squared) * pow(2 + x_squared - y * y, -1, P) % P

    points = 0
    for y in identity._LOW_ORDER:
        assert double_y(double_y(double_y(y))) == 1
        x_squared = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        points += 1 if x_squared == 0 else 2
    assert points == 8


@pytest.mark.parametrize("y", [P, P + 1, 2**255 - 1])
def test_non_canonical_identities_are_refused(y: int) -> None:
    with pytest.raises(CryptoError, match=r"hospital-4.*canonical"):
        check_identity_key(y.to_bytes(32, "little"), "hospital-4")


def test_bytes_that_are_no_point_are_refused() -> None:
    """Half of all coordinates are not on the curve; the signer is named, nothing else is raised."""
    for y in range(2, 40):
        with pytest.raises(CryptoError, match="hospital-4"):
            verify("hospital-4", y.to_bytes(32, "little"), bytes(64), "advertise")


def test_S22_repr_hides_the_secret() -> None:
    assert KEY.public.hex() in repr(KEY)
    assert KEY.private_bytes().hex()[:8] not in repr(KEY)
