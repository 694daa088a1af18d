"""Products in F_q[X] / (X^n + 1) against the schoolbook, on both backends."""

from __future__ import annotations

import flint
import numpy as np
import pytest

from lightsecagg.errors import FieldError
from lightsecagg.field import ntt
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.field.ring import times_key

Q = DEFAULT_FIELD.modulus


def uniform(shape: int | tuple[int, ...], seed: int, q: int = Q) -> Elements:
    return np.random.default_rng(seed).integers(0, q, shape, dtype=np.uint32)


def values_of(field: PrimeField, coefficients: Elements) -> Elements:
    """Column polynomials at the roots of X^n + 1, the leaves n..2n-1."""
    n = len(coefficients)
    return np.ascontiguousarray(ntt.forward(field, coefficients, 2 * n)[n:])


def schoolbook(a: Elements, s: Elements, q: int) -> list[int]:
    """a * s mod X^n + 1, by Python's integers."""
    n, out = len(a), [0] * len(a)
    for i, x in enumerate(map(int, a)):
        for j, y in enumerate(map(int, s)):
            sign = 1 if i + j < n else -1
            out[(i + j) % n] += sign * x * y
    return [value % q for value in out]


def by_flint(a: Elements, s: Elements, q: int) -> list[int]:
    """The same by python-flint, for rings that are too large for the schoolbook."""
    n = len(a)
    product = flint.nmod_poly(a.tolist(), q) * flint.nmod_poly(s.tolist(), q)
    coefficients = [int(product[k]) for k in range(2 * n)]
    return [(low - high) % q for low, high in zip(coefficients[:n], coefficients[n:], strict=True)]


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_the_product_is_the_schoolbook_product(backend: str, n: int) -> None:
    blocks, key = uniform((n, 3), n), uniform(n, n + 1)
    product = times_key(DEFAULT_FIELD, values_of(DEFAULT_FIELD, blocks), key)
    for column in range(3):
        assert product[:, column].tolist() == schoolbook(blocks[:, column], key, Q)


@pytest.mark.parametrize("n", [256, 1024, 2048, 4096])
@pytest.mark.parametrize("columns", [1, 33])
def test_large_rings_and_many_columns(backend: str, n: int, columns: int) -> None:
    blocks, key = uniform((n, columns), n), uniform(n, n + 1)
    product = times_key(DEFAULT_FIELD, values_of(DEFAULT_FIELD, blocks), key)
    assert product.shape == (n, columns)
    for column in (0, columns - 1):
        assert product[:, column].tolist() == by_flint(blocks[:, column], key, Q)


def test_another_field_with_roots(backend: str) -> None:
    field = PrimeField(257)
    blocks, key = uniform((16, 2), 1, 257), uniform(16, 2, 257)
    product = times_key(field, values_of(field, blocks), key)
    assert product[:, 1].tolist() == schoolbook(blocks[:, 1], key, 257)


def test_extreme_elements(backend: str) -> None:
    n = 64
    for x, y in ((Q - 1, Q - 1), (Q - 1, 1), (0, Q - 1)):
        blocks, key = np.full((n, 1), x, dtype=np.uint32), np.full(n, y, dtype=np.uint32)
        product = times_key(DEFAULT_FIELD, values_of(DEFAULT_FIELD, blocks), key)
        assert product[:, 0].tolist() == schoolbook(blocks[:, 0], key, Q)


def test_the_product_is_linear_in_the_key(backend: str) -> None:
    field = DEFAULT_FIELD
    blocks, keys = uniform((2048, 5), 3), [uniform(2048, k) for k in range(3)]
    one_by_one = field.weighted_sum([1, 7, 1], [times_key(field, blocks, key) for key in keys])
    assert np.array_equal(one_by_one, times_key(field, blocks, field.weighted_sum([1, 7, 1], keys)))


@pytest.mark.parametrize(
    ("field", "blocks", "key"),
    [
        (DEFAULT_FIELD, (16, 2), 8),
        (DEFAULT_FIELD, (15, 2), 15),
        (DEFAULT_FIELD, (16,), 16),
        (PAPER_FIELD, (16, 2), 16),
        (PrimeField(257), (256, 2), 256),
    ],
)
def test_what_is_no_product_is_refused(
    field: PrimeField, blocks: tuple[int, ...], key: int
) -> None:
    with pytest.raises(FieldError):
        times_key(field, np.zeros(blocks, dtype=np.uint32), np.zeros(key, dtype=np.uint32))
