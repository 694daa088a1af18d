"""Polynomial arithmetic against FLINT."""

from __future__ import annotations

import flint
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError
from lightsecagg.field import polynomials
from lightsecagg.field.polynomials import Polynomial
from lightsecagg.field.prime import PrimeField

MODULI = st.sampled_from([3, 5, 101, 2**31 - 2**19 + 1, 2**32 - 5])


def ours(coefficients: list[int]) -> Polynomial:
    return polynomials.trim(np.array(coefficients, dtype=np.uint64))


def theirs(polynomial: Polynomial, q: int) -> flint.nmod_poly:
    return flint.nmod_poly([int(c) for c in polynomial], q)


@st.composite
def field_and_polynomials(draw: st.DrawFn, count: int) -> tuple[int, list[Polynomial]]:
    q = draw(MODULI)
    # The extremes are where 64-bit products would overflow first.
    element = st.one_of(st.integers(0, q - 1), st.just(q - 1), st.just(0))
    lists = st.lists(element, max_size=12)
    return q, [ours(draw(lists)) for _ in range(count)]


@given(field_and_polynomials(2))
def test_products_and_differences_equal_flint(case: tuple[int, list[Polynomial]]) -> None:
    q, (a, b) = case
    assert theirs(polynomials.multiply(a, b, q), q) == theirs(a, q) * theirs(b, q)
    assert theirs(polynomials.subtract(a, b, q), q) == theirs(a, q) - theirs(b, q)


@pytest.mark.parametrize("q", [2**31 - 2**19 + 1, 2**32 - 5])
def test_long_products_are_exact_at_the_extremes(q: int) -> None:
    a = ours([q - 1] * 3000)
    b = ours([*range(q - 1000, q)])
    assert theirs(polynomials.multiply(a, b, q), q) == theirs(a, q) * theirs(b, q)


@given(field_and_polynomials(2))
def test_division_equals_flint_and_leaves_no_leading_zeros(
    case: tuple[int, list[Polynomial]],
) -> None:
    q, (a, b) = case
    if not b.size:
        b = ours([1])
    kept = a.copy()
    quotient, rest = polynomials.divide(PrimeField(q), a, b)
    expected_quotient, expected_rest = divmod(theirs(a, q), theirs(b, q))
    assert (theirs(quotient, q), theirs(rest, q)) == (expected_quotient, expected_rest)
    assert all(part.size == 0 or part[-1] != 0 for part in (quotient, rest))
    np.testing.assert_array_equal(a, kept)


@given(field_and_polynomials(1), st.lists(st.integers(0, 2**32), max_size=6))
def test_values_equal_flint(case: tuple[int, list[Polynomial]], at: list[int]) -> None:
    q, (a,) = case
    points = np.array([point % q for point in at], dtype=np.uint64)
    values = polynomials.evaluate(a, points, q)
    assert [int(v) for v in values] == [int(theirs(a, q)(int(point))) for point in points]


@st.composite
def field_and_points(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    q = draw(MODULI)
    points = draw(st.lists(st.integers(1, q - 1), min_size=1, max_size=20, unique=True))
    return q, tuple(points)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 560])
def test_a_long_vanishing_polynomial_equals_flint(count: int) -> None:
    q = 2**32 - 5
    points = tuple(np.random.default_rng(count).integers(1, q, count).tolist())
    expected = flint.nmod_poly([1], q)
    for point in points:
        expected *= flint.nmod_poly([-point, 1], q)
    assert theirs(polynomials.vanishing(q, points), q) == expected


@given(field_and_points())
def test_vanishing_polynomial_equals_flint(case: tuple[int, tuple[int, ...]]) -> None:
    q, points = case
    expected = flint.nmod_poly([1], q)
    for point in points:
        expected *= flint.nmod_poly([-point, 1], q)
    assert theirs(polynomials.vanishing(q, points), q) == expected


@given(field_and_points())
def test_lagrange_coefficients_invert_the_vandermonde_matrix(
    case: tuple[int, tuple[int, ...]],
) -> None:
    q, points = case
    n = len(points)
    vandermonde = flint.nmod_mat(n, n, [pow(a, k, q) for a in points for k in range(n)], q)
    coefficients = polynomials.lagrange_coefficients(q, points)
    result = flint.nmod_mat(n, n, [int(c) for c in coefficients.reshape(-1)], q)
    assert result == vandermonde.inv()


@given(case=field_and_points(), seed=st.integers(0, 2**32))
def test_interpolation_passes_through_the_points(
    backend: str, case: tuple[int, tuple[int, ...]], seed: int
) -> None:
    q, points = case
    field = PrimeField(q)
    values = np.random.default_rng(seed).integers(0, q, len(points), dtype=np.uint32)
    polynomial = polynomials.interpolate(field, points, values)
    assert polynomial.size <= len(points)
    assert [int(theirs(polynomial, q)(point)) for point in points] == values.tolist()


def test_cached_coefficients_cannot_be_changed() -> None:
    coefficients = polynomials.lagrange_coefficients(101, (1, 2, 3))
    with pytest.raises(ValueError, match="read-only"):
        coefficients[0, 0] = 5


def test_equal_points_have_no_interpolation() -> None:
    with pytest.raises(FieldError, match="zero has no inverse"):
        polynomials.lagrange_coefficients(101, (1, 2, 2))
