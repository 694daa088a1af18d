"""Identities: signatures bind their label and every field, and name the signer when they fail."""

from __future__ import annotations

import hashlib

import pytest

from lightsecagg.crypto import identity
from lightsecagg.crypto.identity import IdentityKey, check_identity_key, verify
from lightsecagg.crypto.transcript import transcript
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


# -- signatures that only the key's owner can make, and on purpose ---------------------------------

Point = tuple[int, int]
L = 2**252 + 27742317777372353535851937790883648493


def add(p: Point, q: Point) -> Point:
    (x1, y1), (x2, y2) = p, q
    product = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, P)
    return x % P, (y1 * y2 + x1 * x2) * pow(1 - product, -1, P) % P


def times(scalar: int, point: Point) -> Point:
    total = (0, 1)
    for bit in f"{scalar:b}":
        total = add(total, total)
        total = add(total, point) if bit == "1" else total
    return total


def point_of(y: int) -> Point:
    """The one with an even x."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if x * x % P == square else x * pow(2, (P - 1) // 4, P) % P
    assert x * x % P == square
    return (x if x % 2 == 0 else P - x), y


def packed(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


B = point_of(4 * pow(5, -1, P) % P)
SMALL = [point_of(y) for y in sorted(identity._LOW_ORDER)]


def signed_with(r: int, beside: Point) -> tuple[bytes, int]:
    """KEY's signature on "advertise" with R = r B + `beside`, and h."""
    digest = hashlib.sha512(KEY.private_bytes()).digest()
    a = int.from_bytes(digest[:32], "little") & (1 << 254) - 8 | 1 << 254
    assert packed(times(a % L, B)) == KEY.public
    R = packed(add(times(r, B), beside))
    hashed = hashlib.sha512(R + KEY.public + transcript("advertise")).digest()
    h = int.from_bytes(hashed, "little") % L
    return R + ((r + h * a) % L).to_bytes(32, "little"), h


def test_an_ordinary_signature_can_be_made_by_hand() -> None:
    verify(3, KEY.public, signed_with(12345, (0, 1))[0], "advertise")


@pytest.mark.parametrize("small", [p for p in SMALL if p != (0, 1)])
def test_S45_a_part_of_small_order_is_refused_though_others_multiply_it_away(small: Point) -> None:
    signature, h = signed_with(12345, small)
    y = int.from_bytes(signature[:32], "little")
    even = point_of(y % 2**255)
    R = even if y < 2**255 else (P - even[0], even[1])
    A = point_of(int.from_bytes(KEY.public, "little") % 2**255)
    A = A if packed(A) == KEY.public else (P - A[0], A[1])
    left, right = times(int.from_bytes(signature[32:], "little"), B), add(R, times(h, A))
    assert times(8, left) == times(8, right), "a verifier with the cofactor accepts"
    assert left != right
    with pytest.raises(CryptoError, match="does not verify"):
        verify(3, KEY.public, signature, "advertise")


@pytest.mark.parametrize("small", SMALL)
def test_S45_a_signature_that_begins_with_a_point_of_small_order_is_refused(small: Point) -> None:
    """OpenSSL takes the neutral element, libsodium does not."""
    reason = "begins with a low order point" if small == (0, 1) else "does not verify"
    with pytest.raises(CryptoError, match=f"the signature of 3 on 'advertise' {reason}"):
        verify(3, KEY.public, signed_with(0, small)[0], "advertise")


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
