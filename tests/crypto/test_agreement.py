"""Pairwise keys: what they depend on, and which public keys are refused (S18, S22)."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lightsecagg.crypto import agreement
from lightsecagg.crypto.agreement import AgreementKey, check_public_key
from lightsecagg.crypto.transcript import derive_key, uint
from lightsecagg.errors import CryptoError, LocalProtocolError, ParameterError

P = 2**255 - 19
ALICE = AgreementKey(bytes.fromhex("77076d0a7318a57d3c16c17251b26645" * 2))
BOB = AgreementKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee6" * 2))
CONTEXT = b"C" * 32


def encode(coordinate: int) -> bytes:
    return coordinate.to_bytes(32, "little")


def test_both_sides_agree_on_the_key_of_each_direction() -> None:
    ours, theirs = ALICE.agree(BOB.public, 2), BOB.agree(ALICE.public, 1)
    forth = ours.directed_key(CONTEXT, "seal", 1, 2)
    back = ours.directed_key(CONTEXT, "seal", 2, 1)
    assert forth == theirs.directed_key(CONTEXT, "seal", 1, 2)
    assert back == theirs.directed_key(CONTEXT, "seal", 2, 1)
    assert forth != back


def test_mask_seeds_are_the_same_on_both_sides() -> None:
    ours, theirs = ALICE.agree(BOB.public, 2), BOB.agree(ALICE.public, 1)
    seed = ours.symmetric_seed(CONTEXT, "mask", 1, 2)
    assert seed == theirs.symmetric_seed(CONTEXT, "mask", 2, 1)


def test_S19_keys_follow_every_input() -> None:
    secret = ALICE.agree(BOB.public, 2)
    other = AgreementKey.generate().agree(BOB.public, 2)
    keys = {
        secret.directed_key(CONTEXT, "seal", 1, 2, 0),
        secret.directed_key(b"D" * 32, "seal", 1, 2, 0),
        secret.directed_key(CONTEXT, "other", 1, 2, 0),
        secret.directed_key(CONTEXT, "seal", 3, 2, 0),
        secret.directed_key(CONTEXT, "seal", 1, 3, 0),
        secret.directed_key(CONTEXT, "seal", 1, 2, 1),
        secret.directed_key(CONTEXT, "seal", 1, 2, 0, b"salt"),
        secret.symmetric_seed(CONTEXT, "seal", 1, 2),
        secret.symmetric_seed(b"D" * 32, "seal", 1, 2),
        secret.symmetric_seed(CONTEXT, "other", 1, 2),
        secret.symmetric_seed(CONTEXT, "seal", 1, 3),
        other.directed_key(CONTEXT, "seal", 1, 2, 0),
        other.symmetric_seed(CONTEXT, "seal", 1, 2),
    }
    assert len(keys) == 13


def test_a_key_with_oneself_is_refused() -> None:
    secret = ALICE.agree(BOB.public, 2)
    with pytest.raises(LocalProtocolError, match="client 1 "):
        secret.directed_key(CONTEXT, "seal", 1, 1)
    with pytest.raises(LocalProtocolError, match="client 1 "):
        secret.symmetric_seed(CONTEXT, "mask", 1, 1)


@pytest.mark.parametrize("numbers", [(1, 2**64, 0), (-1, 2, 0), (1, 2, -1)])
def test_ids_that_fit_no_transcript_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ParameterError, match="2\\^64"):
        ALICE.agree(BOB.public, 2).directed_key(CONTEXT, "seal", *numbers)


def test_S19_a_directed_key_is_that_of_the_transcript() -> None:
    """Which is encoded in one step there, and part by part here."""
    shared = AgreementKey(ALICE.private_bytes())._private.exchange(
        X25519PublicKey.from_public_bytes(BOB.public)
    )
    parts = (b"seal", uint(1), uint(2), uint(3), b"s" * 16)
    expected = derive_key(shared, CONTEXT, "directed key", *parts)
    assert ALICE.agree(BOB.public, 2).directed_key(CONTEXT, "seal", 1, 2, 3, b"s" * 16) == expected


def test_a_rebuilt_key_is_the_advertised_one() -> None:
    rebuilt = AgreementKey(ALICE.private_bytes())
    assert rebuilt.public == ALICE.public
    assert rebuilt.agree(BOB.public, 2).symmetric_seed(CONTEXT, "mask", 1, 2) == BOB.agree(
        ALICE.public, 1
    ).symmetric_seed(CONTEXT, "mask", 1, 2)


def test_S17_keys_come_from_the_given_entropy() -> None:
    assert AgreementKey.generate(lambda count: b"k" * count).private_bytes() == b"k" * 32
    assert AgreementKey.generate().public != AgreementKey.generate().public


@pytest.mark.parametrize("coordinate", sorted(agreement._LOW_ORDER))
def test_S18_low_order_points_are_refused(coordinate: int) -> None:
    with pytest.raises(CryptoError, match=r"client 7.*low order"):
        ALICE.agree(encode(coordinate), 7)
    # The library agrees that these have low order: the shared secret would be zero.
    with pytest.raises(ValueError, match="shared key"):
        X25519PrivateKey.from_private_bytes(ALICE.private_bytes()).exchange(
            X25519PublicKey.from_public_bytes(encode(coordinate))
        )


def test_S18_the_list_of_low_order_points_is_complete() -> None:
    """The curve has 8 points of order dividing 8, its twist 4: five u-coordinates besides infinity.

    Doubling maps u to (u^2 - 1)^2 / 4u(u^2 + Au + 1). Order 2 is u = 0; u = 1 (on the curve) and
    u = -1 (on the twist) double to it; the roots of "double = 1" have order 8.
    """

    def doubles_to(u: int, target: int) -> bool:
        numerator = pow(u * u - 1, 2, P)
        return numerator == target * 4 * u * (u * u + 486662 * u + 1) % P

    order_eight = agreement._LOW_ORDER - {0, 1, P - 1}
    assert len(order_eight) == 2
    assert all(doubles_to(u, 1) for u in order_eight)
    assert doubles_to(1, 0)
    assert doubles_to(P - 1, 0)


def test_S18_the_high_bit_twin_of_a_key_is_refused() -> None:
    twin = BOB.public[:31] + bytes([BOB.public[31] | 0x80])
    library = X25519PrivateKey.from_private_bytes(ALICE.private_bytes())
    agreed = {
        library.exchange(X25519PublicKey.from_public_bytes(public)) for public in (BOB.public, twin)
    }
    assert len(agreed) == 1, "the twin agrees on the same secret, so it must not pass as another"
    with pytest.raises(CryptoError, match=r"client 7.*not canonical"):
        ALICE.agree(twin, 7)


@pytest.mark.parametrize("coordinate", [P, P + 1, P + 18, 2**255 - 1, 2**255 + 9, 2**256 - 1])
def test_S18_non_canonical_keys_are_refused(coordinate: int) -> None:
    with pytest.raises(CryptoError, match=r"client 7.*not canonical"):
        check_public_key(encode(coordinate), 7)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_S18_keys_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(CryptoError, match=f"client 7.*{length} bytes"):
        ALICE.agree(b"\x09" * length, 7)
    with pytest.raises(CryptoError, match=f"not {length}"):
        AgreementKey(b"\x09" * length)


def test_S18_own_key_is_refused() -> None:
    with pytest.raises(CryptoError, match=r"client 7.*our own"):
        ALICE.agree(ALICE.public, 7)


def test_S18_honest_keys_are_accepted() -> None:
    for _ in range(50):
        public = AgreementKey.generate().public
        assert check_public_key(public, 7) == public


def test_S22_reprs_hide_secrets() -> None:
    secret = ALICE.agree(BOB.public, 2)
    shown = repr(ALICE) + repr(secret)
    assert ALICE.public.hex() in shown
    for hidden in (ALICE.private_bytes(), secret._shared):
        assert hidden.hex()[:8] not in shown
        assert repr(hidden)[2:10] not in shown
