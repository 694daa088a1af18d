"""Staleness functions and their integer tables, by hand-computed values and exact averages."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import ParameterError
from lightsecagg.field.staleness import (
    StalenessFunction,
    StalenessTable,
    constant,
    hinge,
    polynomial,
    stochastic_weights,
)

scales = st.integers(1, 2**16)
functions = st.one_of(
    st.builds(constant),
    st.builds(polynomial, st.floats(0, 8)),
    st.builds(hinge, st.floats(0, 100), st.integers(0, 20)),
)


def test_functions_by_hand() -> None:
    assert [constant()(tau) for tau in range(4)] == [1, 1, 1, 1]
    assert [polynomial(1.0)(tau) for tau in range(4)] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [polynomial(0.5)(tau) for tau in (0, 3, 8)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [hinge(10, 2)(tau) for tau in (0, 2, 3, 4)] == [1, 1, 1 / 11, 1 / 21]


def test_the_papers_table() -> None:
    """c_g = 2^6, alpha = 1, tau_max = 10 (Appendix F.5): 64 / (1 + tau), halves up."""
    table = StalenessTable.from_function(polynomial(1.0), 64, 10)
    assert table.weights == (64, 32, 21, 16, 13, 11, 9, 8, 7, 6, 6)
    assert table.max_staleness == 10
    assert table.max_weight == 64
    assert table.ratio == 64 / 6
    assert [table.weight(tau) for tau in range(11)] == list(table.weights)


def test_common_divisors_are_removed() -> None:
    assert StalenessTable.from_function(constant(), 64, 3).weights == (1, 1, 1, 1)
    assert StalenessTable.from_function(polynomial(1.0), 64, 1).weights == (2, 1)
    assert StalenessTable.from_function(hinge(1, 0), 12, 3).weights == (12, 6, 4, 3)


def test_no_weight_rounds_to_zero() -> None:
    assert StalenessTable.from_function(polynomial(3.0), 2, 5).weights == (2, 1, 1, 1, 1, 1)


@given(functions, scales, st.integers(0, 30))
def test_tables_follow_their_definition(
    function: StalenessFunction, scale: int, max_staleness: int
) -> None:
    table = StalenessTable.from_function(function, scale, max_staleness)
    expected = [
        max(1, math.floor(Fraction(scale * function(tau)) + Fraction(1, 2)))
        for tau in range(max_staleness + 1)
    ]
    assert math.gcd(*table.weights) == 1
    assert [weight * math.gcd(*expected) for weight in table.weights] == expected
    assert StalenessTable(table.weights, scale) == table


def test_tables_have_one_encoding() -> None:
    table = StalenessTable((3, 2, 1), 64)
    assert table.to_bytes() == struct.pack(">5I", 64, 3, 3, 2, 1)
    others = [
        StalenessTable((3, 2, 1), 65),
        StalenessTable((3, 2, 2), 64),
        StalenessTable((3, 1), 64),
    ]
    assert len({table.to_bytes(), *(other.to_bytes() for other in others)}) == 4


@pytest.mark.parametrize("tau", [-1, 3])
def test_S09_staleness_outside_the_table_is_refused(tau: int) -> None:
    with pytest.raises(ParameterError, match=f"tau = {tau}"):
        StalenessTable((3, 2, 1), 64).weight(tau)


@pytest.mark.parametrize(
    ("weights", "scale"),
    [
        ((), 64),
        ((1, 0), 64),
        ((1, -1), 64),
        ((1, 2), 64),
        ((4, 2), 64),
        ((2,), 64),
        ((2**31 + 1, 1), 64),
        ((1,), 0),
        ((1,), 2**31 + 1),
    ],
)
def test_S09_tables_that_make_no_sense_are_refused(weights: tuple[int, ...], scale: int) -> None:
    with pytest.raises(ParameterError):
        StalenessTable(weights, scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda tau: 0.5,
        lambda tau: 1.0 + tau,
        lambda tau: 1.0 - tau,
        lambda tau: math.nan,
        lambda tau: (1.0, 0.5, 0.75)[tau],
    ],
    ids=["s(0) is not 1", "grows", "negative", "nan", "not monotone"],
)
def test_functions_that_are_no_discount_are_refused(function: StalenessFunction) -> None:
    with pytest.raises(ParameterError):
        StalenessTable.from_function(function, 64, 2)


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_bad_exponents_are_refused(alpha: float) -> None:
    with pytest.raises(ParameterError, match="alpha"):
        polynomial(alpha)


@pytest.mark.parametrize(("a", "b"), [(-1.0, 2), (math.nan, 2), (1.0, -1)])
def test_bad_hinges_are_refused(a: float, b: int) -> None:
    with pytest.raises(ParameterError, match="hinge"):
        hinge(a, b)


def test_negative_tau_max_is_refused() -> None:
    with pytest.raises(ParameterError, match="-1"):
        StalenessTable.from_function(constant(), 64, -1)


# -- stochastic rounding -------------------------------------------------------------------------


def test_stochastic_weights_are_unbiased() -> None:
    """64 / 3 = 21.33: 22 for exactly the lowest third of all 2^32 coins, else 21."""
    edge = math.ceil(2**32 / 3)
    assert stochastic_weights(
        polynomial(1.0), 64, [2, 2, 2, 2], [0, edge - 2, edge + 1, 2**32 - 1]
    ) == (
        22,
        22,
        21,
        21,
    )


def test_whole_numbers_are_never_rounded() -> None:
    assert stochastic_weights(polynomial(1.0), 64, [0, 1, 3], [0, 0, 2**32 - 1]) == (64, 32, 16)


def test_stochastic_weights_are_at_least_one() -> None:
    assert stochastic_weights(polynomial(3.0), 1, [5], [2**32 - 1]) == (1,)


@given(functions, scales, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2**32 - 1))))
def test_stochastic_weights_are_neighbours_of_the_exact_value(
    function: StalenessFunction, scale: int, draws: list[tuple[int, int]]
) -> None:
    staleness, words = [tau for tau, _ in draws], [word for _, word in draws]
    weights = stochastic_weights(function, scale, staleness, words)
    for tau, weight in zip(staleness, weights, strict=True):
        exact = scale * function(tau)
        assert weight in {max(1, math.floor(exact)), max(1, math.ceil(exact))}


@pytest.mark.parametrize(
    ("staleness", "words"), [([1], []), ([-1], [0]), ([1], [-1]), ([1], [2**32])]
)
def test_bad_coins_are_refused(staleness: list[int], words: list[int]) -> None:
    with pytest.raises(ParameterError):
        stochastic_weights(constant(), 64, staleness, words)
