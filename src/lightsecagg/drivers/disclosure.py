"""Small counts and what would give them away: which cells of a table must not be shown.

A hidden cell can follow from others. Whoever has the total of a row and all its cells but one has
the last cell too. So more cells are hidden, and the totals are taken as known: they are rarely a
secret, and other figures may have them. Two rules, for every table by itself:

* In a row or column with hidden cells, these have at least `least` rows together.
* No hidden cell follows by adding and subtracting. Hidden cells with given totals of rows and
  columns are unknowns of linear equations; a cell is determined just if its unit vector is a
  combination of the equations, that is, if the projection on their span has a 1 on its diagonal.

Somebody may still narrow a hidden cell down, for example because no count is negative.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int64]
Mask = NDArray[np.bool_]


def hide_small_cells(counts: Cells, least: int) -> tuple[tuple[int | None, ...], ...]:
    """The table with None for every count below `least`, and for what would give it away.

    A single row is a table of one column: only its sum is taken as known.
    """
    hidden = counts < least
    while True:
        before = int(hidden.sum())
        for line in _lines(counts.shape):
            _fill(counts, hidden, line, least)
        for row, column in np.argwhere(_determined(hidden))[:1]:
            _hide_rectangle(counts, hidden, row, column)
        if int(hidden.sum()) == before:
            break
    return tuple(
        tuple(None if secret else int(count) for count, secret in zip(*row, strict=True))
        for row in zip(counts, hidden, strict=True)
    )


def _lines(shape: tuple[int, ...]) -> Iterator[Mask]:
    """Every row, and every column of more than one cell."""
    for axis in range(2 if shape[0] > 1 else 1):
        for index in range(shape[axis]):
            line = np.zeros(shape, dtype=np.bool_)
            line[(slice(None),) * axis + (index,)] = True
            yield line


def _fill(counts: Cells, hidden: Mask, line: Mask, least: int) -> None:
    """Hide more of a line until its hidden cells have enough rows together."""
    while (hidden & line).any() and counts[hidden & line].sum() < least:
        if not _hide_one_more(counts, hidden, line):
            return


def _hide_one_more(counts: Cells, hidden: Mask, among: Mask) -> bool:
    """The smallest that is shown, if there is one."""
    candidates = np.flatnonzero(among & ~hidden)
    if not candidates.size:
        return False
    hidden.flat[candidates[counts.reshape(-1)[candidates].argmin()]] = True
    return True


def _hide_rectangle(counts: Cells, hidden: Mask, row: int, column: int) -> None:
    """The other corners of the cheapest rectangle around a cell: these four allow several values.

    In a single row, one more cell does.
    """
    cost = np.where(hidden, 0, counts + 1)
    corners = cost[row, :] + cost[:, [column]] * (counts.shape[0] > 1) + cost
    dear = np.iinfo(np.int64).max
    corners[:, column] = dear
    if counts.shape[0] > 1:
        corners[row, :] = dear
    other_row, other_column = np.unravel_index(corners.argmin(), corners.shape)
    hidden[[row, other_row, other_row], [other_column, column, other_column]] = True


def _determined(hidden: Mask) -> Mask:
    """Which hidden cells follow from the totals."""
    rows, columns = np.nonzero(hidden)
    found = np.zeros_like(hidden)
    if rows.size:
        parts = [np.equal.outer(np.arange(hidden.shape[0]), rows)]
        if hidden.shape[0] > 1:
            parts.append(np.equal.outer(np.arange(hidden.shape[1]), columns))
        equations = np.concatenate(parts).astype(np.float64)
        # A cell on a cycle of k cells has 1 - 1/k there at most, and no cycle is longer than the
        # table has rows and columns.
        diagonal = np.einsum("ij,ji->i", np.linalg.pinv(equations), equations)
        found[rows, columns] = diagonal > 1 - 1e-6
    return found
