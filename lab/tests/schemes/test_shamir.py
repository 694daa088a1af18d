"""Threshold sharing against Python integers, and its privacy by enumeration over tiny fields."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, InconsistentAnswers, NotEnoughAnswers, ParameterError
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, PrimeField
from lightsecagg_lab.schemes.shamir import (
    lagrange_at_zero,
    noise_shape,
    reconstruct,
    share,
    share_elements,
)

FIELDS = [PrimeField(65537), DEFAULT_FIELD, PAPER_FIELD]


def random_elements(rng: np.random.Generator, field: PrimeField, shape: tuple[int, ...]):
    return rng.integers(0, field.modulus, shape, dtype=np.uint32)


def evaluate(coefficients: list[int], point: int, modulus: int) -> int:
    return sum(c * point**k for k, c in enumerate(coefficients)) % modulus


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: str(field.modulus))
@pytest.mark.parametrize(("clients", "threshold"), [(1, 1), (3, 2), (5, 5), (12, 7)])
def test_shares_equal_the_polynomial(field: PrimeField, clients: int, threshold: int) -> None:
    rng = np.random.default_rng(1)
    points = [field.modulus - 1 - 3 * j for j in range(clients)]
    secrets = random_elements(rng, field, (9,))
    noise = random_elements(rng, field, (threshold - 1, 9))
    shares = share_elements(field, secrets, points, noise)
    for column in range(9):
        coefficients = [int(secrets[column]), *map(int, noise[:, column])]
        assert shares[:, column].tolist() == [
            evaluate(coefficients, point, field.modulus) for point in points
        ]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(FIELDS))
def test_any_t_shares_rebuild_all_secrets(data: st.DataObject, field: PrimeField) -> None:
    clients = data.draw(st.integers(1, 20))
    threshold = data.draw(st.integers(1, clients))
    count = data.draw(st.integers(0, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    secrets = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    points = data.draw(
        st.lists(st.integers(1, field.modulus - 1), min_size=clients, max_size=clients, unique=True)
    )
    noise = random_elements(rng, field, noise_shape(count, threshold))
    shares = share(field, secrets, points, noise)
    assert shares.shape == (clients, count, 16)
    chosen = data.draw(st.permutations(range(clients)))[:threshold]
    rebuilt = reconstruct(
        field, np.ascontiguousarray(shares[chosen]), [points[j] for j in chosen], threshold
    )
    assert rebuilt.tolist() == secrets.tolist()


def test_the_size_of_the_papers_experiments() -> None:
    """200 clients, threshold 101, both secrets of everybody."""
    rng = np.random.default_rng(2)
    secrets = rng.integers(0, 256, (400, 32), dtype=np.uint8)
    points = list(range(1, 201))
    noise = random_elements(rng, DEFAULT_FIELD, noise_shape(400, 101))
    shares = share(DEFAULT_FIELD, secrets, points, noise)
    rebuilt = reconstruct(DEFAULT_FIELD, shares[99:], points[99:], 101)
    assert rebuilt.tolist() == secrets.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_lagrange_coefficients_against_integers(size: int) -> None:
    q = PAPER_FIELD.modulus
    points = [q - 1, 1, 7, 2**31, 5, 6, 99, 2**16, 3, 11, 12, 13, q - 2][:size]
    expected = []
    for j, a in enumerate(points):
        value = 1
        for m, b in enumerate(points):
            if m != j:
                value = value * b * pow(b - a, -1, q) % q
        expected.append(value)
    assert lagrange_at_zero(PAPER_FIELD, points).tolist() == expected


# -- privacy, exactly ------------------------------------------------------------------------------


def views(field: PrimeField, secret: int, threshold: int, seen: list[int]) -> Counter[bytes]:
    """How often each view of the shares at points `seen` occurs, over all noise."""
    # All noise at once: each column shares the same secret with other noise.
    noise = np.array(list(product(range(field.modulus), repeat=threshold - 1)), dtype=np.uint32).T
    noise = np.ascontiguousarray(noise.reshape(threshold - 1, -1))
    secrets = np.full(noise.shape[1], secret, dtype=np.uint32)
    shares = share_elements(field, secrets, range(1, field.modulus), noise)
    view = shares[[point - 1 for point in seen]].T
    return Counter(row.tobytes() for row in view)


@pytest.mark.parametrize(("modulus", "threshold"), [(5, 2), (5, 3), (5, 4), (7, 3), (11, 2)])
def test_S10_fewer_than_t_shares_tell_nothing(modulus: int, threshold: int) -> None:
    field = PrimeField(modulus)
    for seen in combinations(range(1, modulus), threshold - 1):
        distributions = [views(field, secret, threshold, list(seen)) for secret in range(modulus)]
        assert all(distribution == distributions[0] for distribution in distributions)


@pytest.mark.parametrize(("modulus", "threshold"), [(5, 2), (5, 3), (7, 3)])
def test_S10_control_t_shares_tell_the_secret(modulus: int, threshold: int) -> None:
    field = PrimeField(modulus)
    seen = list(range(1, threshold + 1))
    distributions = [views(field, secret, threshold, seen) for secret in range(modulus)]
    for one, other in combinations(distributions, 2):
        assert not set(one) & set(other)


def test_S10_control_zero_noise_gives_the_secret_away() -> None:
    field = PrimeField(5)
    shares = share_elements(
        field, np.array([3], dtype=np.uint32), [1, 2], np.zeros((1, 1), dtype=np.uint32)
    )
    assert shares.tolist() == [[3], [3]]


# -- refusals --------------------------------------------------------------------------------------


def make_shares(threshold: int = 3):
    rng = np.random.default_rng(3)
    secrets = rng.integers(0, 256, (2, 32), dtype=np.uint8)
    noise = random_elements(rng, DEFAULT_FIELD, noise_shape(2, threshold))
    return share(DEFAULT_FIELD, secrets, [1, 2, 3, 4], noise)


def test_S15_a_wrong_share_is_noticed() -> None:
    """A random error hits one of 2^16 values of q in each limb it touches."""
    shares = make_shares()[:3].copy()
    shares[1, 1] = (shares[1, 1].astype(np.uint64) + 12345) % DEFAULT_FIELD.modulus
    with pytest.raises(InconsistentAnswers, match="secret 1 "):
        reconstruct(DEFAULT_FIELD, shares, [1, 2, 3], 3)


def test_too_few_shares_are_refused() -> None:
    with pytest.raises(NotEnoughAnswers, match=r"2 shares .* 3"):
        reconstruct(DEFAULT_FIELD, make_shares()[:2], [1, 2], 3)


def test_more_shares_than_needed_are_refused() -> None:
    with pytest.raises(ParameterError, match="exactly 3 shares, not 4"):
        reconstruct(DEFAULT_FIELD, make_shares(), [1, 2, 3, 4], 3)


@pytest.mark.parametrize("points", [[0, 1, 2], [1, 1, 2], [1, 2, DEFAULT_FIELD.modulus]])
def test_S01_bad_points_are_refused(points: list[int]) -> None:
    with pytest.raises(ParameterError, match="point"):
        reconstruct(DEFAULT_FIELD, make_shares()[:3], points, 3)
    with pytest.raises(ParameterError, match="point"):
        share_elements(
            DEFAULT_FIELD, np.zeros(1, dtype=np.uint32), points, np.zeros((2, 1), dtype=np.uint32)
        )


def test_a_threshold_beyond_the_shares_is_refused() -> None:
    with pytest.raises(ParameterError, match="threshold 3"):
        share_elements(
            DEFAULT_FIELD, np.zeros(1, dtype=np.uint32), [1, 2], np.zeros((2, 1), dtype=np.uint32)
        )
    with pytest.raises(ParameterError, match="threshold 0"):
        reconstruct(DEFAULT_FIELD, make_shares()[:0], [], 0)


@pytest.mark.parametrize("shape", [(2, 31), (2, 33), (32,), (1, 2, 16)])
def test_S12_noise_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    secrets = np.zeros((2, 32), dtype=np.uint8)
    with pytest.raises(FieldError, match="noise"):
        share(DEFAULT_FIELD, secrets, [1, 2, 3], np.zeros(shape, dtype=np.uint32))


@pytest.mark.parametrize(
    "secrets",
    [np.zeros((2, 31), dtype=np.uint8), np.zeros(32, dtype=np.uint8), np.zeros((2, 32), np.int64)],
)
def test_S12_secrets_of_another_shape_are_refused(secrets: np.ndarray) -> None:
    with pytest.raises(FieldError, match="secrets are bytes"):
        share(DEFAULT_FIELD, secrets, [1, 2], np.zeros((1, 32), dtype=np.uint32))


def test_S12_shares_that_are_not_elements_are_refused() -> None:
    shares = make_shares()[:3].copy()
    shares[0, 0, 0] = DEFAULT_FIELD.modulus
    with pytest.raises(FieldError, match="not below"):
        reconstruct(DEFAULT_FIELD, shares, [1, 2, 3], 3)
    with pytest.raises(FieldError, match="shape"):
        reconstruct(DEFAULT_FIELD, shares[:, :, :15], [1, 2, 3], 3)
    with pytest.raises(FieldError, match="points"):
        reconstruct(DEFAULT_FIELD, make_shares()[:3], [1, 2], 3)


def test_byte_strings_need_a_field_of_more_than_16_bits() -> None:
    field = PrimeField(65521)
    with pytest.raises(ParameterError, match="65521"):
        share(field, np.zeros((1, 32), dtype=np.uint8), [1], np.zeros((0, 16), dtype=np.uint32))
    with pytest.raises(ParameterError, match="65521"):
        reconstruct(field, np.zeros((1, 1, 16), dtype=np.uint32), [1], 1)
