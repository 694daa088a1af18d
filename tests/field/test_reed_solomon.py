"""Locating wrong values of a codeword: exact up to half the distance, honest beyond (S14)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField
from lightsecagg.field.reed_solomon import locate_errors


def codeword(field: PrimeField, coefficients: list[int], points: list[int]) -> list[int]:
    q = field.modulus
    return [sum(c * pow(a, k, q) for k, c in enumerate(coefficients)) % q for a in points]


def corrupt(field: PrimeField, values: list[int], errors: dict[int, int]) -> Elements:
    return field.vector([v + errors.get(k, 0) for k, v in enumerate(values)])


@given(st.data())
def test_S14_up_to_half_the_distance_is_located_exactly(backend: str, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from([PrimeField(31), DEFAULT_FIELD, PAPER_FIELD]))
    q = field.modulus
    n = data.draw(st.integers(1, 24))
    dimension = data.draw(st.integers(1, n))
    points = data.draw(st.lists(st.integers(1, q - 1), min_size=n, max_size=n, unique=True))
    # Leading zeros too: the true degree may be far below the bound.
    message = data.draw(
        st.lists(st.one_of(st.just(0), st.integers(0, q - 1)), min_size=1, max_size=dimension)
    )
    wrong = data.draw(st.sets(st.integers(0, n - 1), max_size=(n - dimension) // 2))
    errors = {k: data.draw(st.integers(1, q - 1)) for k in wrong}
    values = corrupt(field, codeword(field, message, points), errors)
    assert locate_errors(field, points, values, dimension) == sorted(wrong)


def test_S14_every_pattern_of_a_small_code_is_decoded_as_by_exhaustive_search() -> None:
    """All 5^4 words over F_5 with U = 2, n = 4: named iff a codeword lies within distance one."""
    field, points = PrimeField(5), [1, 2, 3, 4]
    codewords = [codeword(field, [a, b], points) for a, b in itertools.product(range(5), repeat=2)]
    located = 0
    for word in itertools.product(range(5), repeat=4):
        differences = [[k for k in range(4) if word[k] != candidate[k]] for candidate in codewords]
        near = [difference for difference in differences if len(difference) <= 1]
        expected = near[0] if near else None
        located += expected is not None
        assert locate_errors(field, points, field.vector(word), 2) == expected
    assert located == 25 * (1 + 4 * 4)  # spheres of radius one around the codewords are disjoint


@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD])
@pytest.mark.parametrize("excess", [1, 2, 5])
def test_S14_more_errors_than_that_name_nobody(field: PrimeField, excess: int) -> None:
    """A random word lies within distance e of a codeword with probability < C(n, e) q^(e - n + U)

    that is, below 1e-20 for these sizes: too many random errors are never pinned on somebody.
    """
    n, dimension = 16, 7
    points = list(range(1, n + 1))
    generator = np.random.default_rng(7)
    for _ in range(20):
        values = codeword(field, [int(c) for c in generator.integers(0, 2**31, dimension)], points)
        wrong = generator.choice(n, (n - dimension) // 2 + excess, replace=False)
        errors = {int(k): int(generator.integers(1, field.modulus)) for k in wrong}
        assert locate_errors(field, points, corrupt(field, values, errors), dimension) is None
