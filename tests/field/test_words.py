"""Z_{2^32} against Python integers: what enters, what leaves, sums that wrap around."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError
from lightsecagg.field.words import WORDS

Q = 2**32
words = st.integers(0, Q - 1)


def test_every_word_is_an_element_and_lengths_are_not_optional() -> None:
    data = bytes(range(248, 256)) + b"\xff" * 4
    vector = WORDS.from_bytes(data, 3)
    assert WORDS.to_bytes(vector) == data
    assert vector[2] == Q - 1
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(FieldError, match="3 field elements take 12 bytes"):
            WORDS.from_bytes(wrong, 3)
    with pytest.raises(FieldError, match="expected shape"):
        WORDS.check(vector, (4,))


def test_S12_wrong_types_are_refused() -> None:
    for wrong in (np.zeros(3, dtype=np.uint64), np.zeros(6, dtype=np.uint32)[::2], [1, 2]):
        for call in (WORDS.check, WORDS.to_bytes, lambda x: WORDS.add(x, x)):
            with pytest.raises(FieldError):
                call(wrong)  # type: ignore[operator]
    short, long = np.zeros(2, dtype=np.uint32), np.zeros(3, dtype=np.uint32)
    with pytest.raises(FieldError, match="shapes differ"):
        WORDS.sum([long, short])
    with pytest.raises(FieldError, match="no vectors"):
        WORDS.sum([])


def test_integers_of_every_size_and_sign_are_reduced() -> None:
    values = [0, -1, Q, -Q - 3, 10**30, Q - 1]
    assert WORDS.vector(np.array(values, dtype=object)).tolist() == [v % Q for v in values]
    assert WORDS.vector([-1, 5]).tolist() == [Q - 1, 5]


@given(st.lists(st.tuples(words, words), min_size=1, max_size=20))
def test_sums_and_differences_wrap_around(backend: str, pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(column, dtype=np.uint32) for column in zip(*pairs, strict=True))
    assert WORDS.add(a, b).tolist() == [(x + y) % Q for x, y in pairs]
    assert WORDS.subtract(a, b).tolist() == [(x - y) % Q for x, y in pairs]


@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), words, words), min_size=1, max_size=20))
def test_weighted_sums(backend: str, terms: list[tuple[int, int, int]]) -> None:
    """More terms than are added at once, and weights of any sign."""
    weights = [weight for weight, _, _ in terms]
    vectors = [np.array(pair, dtype=np.uint32) for _, *pair in terms]
    expected = [sum(t[0] * t[k] for t in terms) % Q for k in (1, 2)]
    assert WORDS.weighted_sum(weights, vectors).tolist() == expected
    assert WORDS.sum(vectors).tolist() == [sum(t[k] for t in terms) % Q for k in (1, 2)]


def test_a_running_sum_goes_on_after_a_total() -> None:
    running = WORDS.accumulator((2,))
    running.add(np.array([Q - 1, 1], dtype=np.uint32))
    assert running.total().tolist() == [Q - 1, 1]
    running.add(np.array([2, 3], dtype=np.uint32), 5)
    assert running.total().tolist() == [9, 16]
