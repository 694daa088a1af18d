"""Vectors over F_q as their users see them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, ParameterError
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Accumulator, PrimeField

FIELDS = [DEFAULT_FIELD, PAPER_FIELD, PrimeField(5), PrimeField(7), PrimeField(11)]


@pytest.mark.parametrize("modulus", [0, 1, 2, 4, 2**31 - 2**19, 2**32 - 4, 2**32 + 15])
def test_a_modulus_that_is_no_odd_prime_below_2_32_is_refused(modulus: int) -> None:
    with pytest.raises(ParameterError, match=str(modulus)):
        PrimeField(modulus)


def test_vector_reduces_integers_of_every_size_and_sign() -> None:
    q = PAPER_FIELD.modulus
    values = [0, 1, -1, q, q - 1, -q, 2**63 - 1, -(2**63)]
    assert PAPER_FIELD.vector(values).tolist() == [value % q for value in values]
    large = [2**100, -(2**100)]
    assert PAPER_FIELD.vector(large).tolist() == [value % q for value in large]
    words = np.array([2**64 - 1], dtype=np.uint64)
    assert PAPER_FIELD.vector(words).tolist() == [(2**64 - 1) % q]
    with pytest.raises(FieldError, match="float64"):
        PAPER_FIELD.vector([1.0])


@given(st.sampled_from(FIELDS), st.sampled_from([0, 1, 2, 127, 128, 129, 300]), st.data())
def test_S12_bytes_are_checked_as_they_are_read(
    backend: str, field: PrimeField, size: int, data: st.DataObject
) -> None:
    """Few elements are checked in another way than many."""
    words = np.full(size, field.modulus - 1, dtype="<u4")
    content = words.tobytes()
    field.check_bytes(content)
    with pytest.raises(FieldError, match="take"):
        field.check_bytes(content + b"\0")
    if size:
        position = data.draw(st.integers(0, size - 1))
        words[position] = data.draw(st.integers(field.modulus, 2**32 - 1))
        with pytest.raises(FieldError, match=f"element {position} is not below"):
            field.check_bytes(words.tobytes())


@given(
    st.sampled_from(FIELDS),
    st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(0, 2**32)), min_size=1),
    st.integers(0, 40),
)
def test_weighted_sum(
    backend: str, field: PrimeField, terms: list[tuple[int, int]], size: int
) -> None:
    vectors = [field.vector([start + i for i in range(size)]) for _, start in terms]
    weights = [weight for weight, _ in terms]
    expected = [sum(w * (start + i) for w, start in terms) % field.modulus for i in range(size)]
    assert field.weighted_sum(weights, vectors).tolist() == expected


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("weight", [1, 2, 2**16, 2**31, -1, -2])
def test_a_long_sum_of_the_largest_terms_does_not_overflow(
    backend: str, field: PrimeField, weight: int
) -> None:
    accumulator = Accumulator(field, (3,))
    vector = np.full(3, field.modulus - 1, dtype=np.uint32)
    for _ in range(100):
        accumulator.add(vector, weight)
    assert accumulator.count == 100
    expected = [-100 * weight % field.modulus] * 3
    assert accumulator.total().tolist() == expected
    assert accumulator.total().tolist() == expected, "asking twice must not change the total"
    accumulator.add(vector)
    assert accumulator.total().tolist() == [(-100 * weight - 1) % field.modulus] * 3


def test_sums_keep_the_shape_and_refuse_others(backend: str) -> None:
    ones = np.ones((2, 3), dtype=np.uint32)
    assert DEFAULT_FIELD.sum([ones, ones]).tolist() == [[2, 2, 2], [2, 2, 2]]
    with pytest.raises(FieldError, match=r"\(2, 3\) and \(6,\)"):
        DEFAULT_FIELD.sum([ones, ones.reshape(-1)])
    with pytest.raises(FieldError, match="no vectors"):
        DEFAULT_FIELD.sum([])
    with pytest.raises(FieldError, match="2 weights for 1 vectors"):
        DEFAULT_FIELD.weighted_sum([1, 2], [ones])
    with pytest.raises(FieldError, match="shapes differ"):
        DEFAULT_FIELD.add(ones, ones[:1])


@pytest.mark.parametrize("field", FIELDS)
def test_S12_bytes_round_trip_and_nothing_else_is_accepted(backend: str, field: PrimeField) -> None:
    q = field.modulus
    vector = field.vector([0, 1, q - 1, 2])
    data = field.to_bytes(vector)
    assert data == b"".join(int(value).to_bytes(4, "little") for value in vector)
    assert np.array_equal(field.from_bytes(data, 4), vector)
    for wrong in (data[:-1], data + b"\0", data[:-4], data + bytes(4), b""):
        with pytest.raises(FieldError, match="4 field elements take 16 bytes"):
            field.from_bytes(wrong, 4)
    for element in (q, q + 1, 2**32 - 1):
        with pytest.raises(FieldError, match=f"element 1 is not below the modulus q = {q}"):
            field.from_bytes(bytes(4) + element.to_bytes(4, "little") + bytes(4), 3)


def test_S12_wrong_types_are_refused(backend: str) -> None:
    field = DEFAULT_FIELD
    good = np.zeros((4, 4), dtype=np.uint32)
    for bad, reason in (
        (good.astype(np.int64), "int64"),
        (good.astype(np.float32), "float32"),
        (good.astype(">u4"), ">u4"),
        (good[:, ::2], "contiguous"),
        ([1, 2], "list"),
    ):
        with pytest.raises(FieldError, match=reason):
            field.check(bad)
        with pytest.raises(FieldError, match=reason):
            field.to_bytes(bad)
        with pytest.raises(FieldError, match=reason):
            field.add(bad, bad)
        with pytest.raises(FieldError, match=reason):
            field.matmul(bad, good)
    with pytest.raises(FieldError, match=r"expected shape \(2, 4\), got \(4, 4\)"):
        field.check(good, (2, 4))
    with pytest.raises(FieldError, match="cannot multiply"):
        field.matmul(good, good[:3])


@pytest.mark.parametrize("field", FIELDS)
def test_inverses(field: PrimeField) -> None:
    vector = field.vector([1, 2, 3, field.modulus - 1])
    product = field.multiply(vector, field.inverses(vector))
    assert product.tolist() == [1, 1, 1, 1]
    assert field.inverse(2) * 2 % field.modulus == 1
    for zero in (0, field.modulus):
        with pytest.raises(FieldError, match="zero has no inverse"):
            field.inverse(zero)
    with pytest.raises(FieldError, match="zero has no inverse"):
        field.inverses(field.vector([1, 0]))


def test_multiply_of_the_largest_elements() -> None:
    q = PAPER_FIELD.modulus
    largest = PAPER_FIELD.vector([q - 1, q - 2])
    assert PAPER_FIELD.multiply(largest, largest).tolist() == [1, 4]
