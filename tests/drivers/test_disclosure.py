"""Hidden cells: small ones, and as many others as it takes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.drivers.disclosure import hide_small_cells

Shown = tuple[tuple[int | None, ...], ...]


def follows(shown: Shown) -> set[tuple[int, int]]:
    """Hidden cells that all totals determine, by elimination over the rational numbers."""
    cells = [(r, c) for r, row in enumerate(shown) for c, n in enumerate(row) if n is None]
    sums = [[Fraction(cell[0] == r) for cell in cells] for r in range(len(shown))]
    if len(shown) > 1:
        sums += [[Fraction(cell[1] == c) for cell in cells] for c in range(len(shown[0]))]
    done = 0
    for column in range(len(cells)):
        pivot = next((i for i in range(done, len(sums)) if sums[i][column]), None)
        if pivot is None:
            continue
        sums[done], sums[pivot] = sums[pivot], sums[done]
        sums[done] = [x / sums[done][column] for x in sums[done]]
        for i, other in enumerate(sums):
            if i != done and other[column]:
                sums[i] = [a - other[column] * b for a, b in zip(other, sums[done], strict=True)]
        done += 1
    return {
        cells[next(i for i, x in enumerate(row) if x)]
        for row in sums
        if sum(bool(x) for x in row) == 1
    }


@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 12), st.data())
def test_nothing_hidden_is_small_alone_or_follows_from_the_totals(
    rows: int, columns: int, least: int, data: st.DataObject
) -> None:
    cell = st.one_of(st.integers(0, 15), st.integers(least, 1000))
    counts = np.array(
        data.draw(
            st.lists(
                st.lists(cell, min_size=columns, max_size=columns), min_size=rows, max_size=rows
            )
        )
    )
    shown = hide_small_cells(counts, least)
    for row, given_ in zip(shown, counts.tolist(), strict=True):
        for count, true in zip(row, given_, strict=True):
            assert count is None or count == true >= least
    assert not follows(shown)
    hidden = np.array([[count is None for count in row] for row in shown])
    lines = [(counts[r], hidden[r]) for r in range(rows)]
    if rows > 1:
        lines += [(counts[:, c], hidden[:, c]) for c in range(columns)]
    for line, secret in lines:
        assert secret.all() or not secret.any() or line[secret].sum() >= least
    if (counts >= least).all():
        assert not hidden.any(), "nothing to hide"


def test_the_oracle_finds_what_follows() -> None:
    assert follows(((None, 20),)) == {(0, 0)}
    assert follows(((None, None),)) == set()
    assert follows(((None, None, 20), (None, None, None), (20, 20, None))) == {(1, 2), (2, 2)}


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([[20, 30]], ((20, 30),)),
        ([[3, 30, 20]], ((None, 30, None),)),  # the next smallest goes with it
        ([[3, 4, 20, 30]], ((None, None, None, 30),)),  # seven together are too few
        ([[6, 7, 20, 30]], ((None, None, 20, 30),)),
        ([[3, 4]], ((None, None),)),
        (
            [[3, 50, 60], [50, 11, 60], [70, 80, 90]],
            ((None, None, 60), (None, None, 60), (70, 80, 90)),
        ),
    ],
)
def test_small_cells_take_others_with_them(counts: list[list[int]], shown: Shown) -> None:
    assert hide_small_cells(np.array(counts), 10) == shown


def test_a_least_of_zero_hides_nothing() -> None:
    assert hide_small_cells(np.array([[0, 1], [0, 0]]), 0) == ((0, 1), (0, 0))
