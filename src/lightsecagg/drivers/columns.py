"""The columns of a client's table, from a CSV file or a mapping: numbers, or categories.

What cannot be read is named by its row and column, and never quoted: it may be of a patient.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import InputRefused, ParameterError
from lightsecagg.foreign import reading, shown

Table = Mapping[str, Any] | str | os.PathLike[str]
"""Named columns (arrays, lists, a DataFrame), or the path of a CSV file with a header."""

MISSING: Final = -1
OUTSIDE: Final = -2
"""In place of a category's position: none given, or none that is listed."""
_NARROWEST: Final = 2.0**-29
"""Of a range, relative to its ends: float64 has 2^23 numbers in it then."""


class Columns:
    """Some columns of a table, all of one length."""

    def __init__(self, table: Table, names: Iterable[str]) -> None:
        self._lines: Sequence[int] | None = None
        """Of a file: where each row ends."""
        self._file = ""
        if isinstance(table, str | os.PathLike):
            path = Path(table)
            table, self._lines = read_csv(path)
            self._file = f" of {path.name}"
        if not hasattr(table, "__getitem__") or not hasattr(table, "__contains__"):
            raise InputRefused(
                f"a table is {type(table).__name__}; give a dict of columns, a DataFrame or the "
                "path of a CSV file"
            )
        self._columns: dict[str, NDArray[Any]] = {}
        for name in names:
            if name not in table:
                known = ", ".join(map(repr, list(table)[:10])) if hasattr(table, "__iter__") else ""
                raise InputRefused(
                    f"the table{self._file} has no column {shown(name)!r}; it has {shown(known)}"
                )
            self._columns[name] = _as_array(name, table[name])
        sizes = {name: values.size for name, values in self._columns.items()}
        first = next(iter(sizes))
        for name, size in sizes.items():
            if size != sizes[first]:
                raise InputRefused(
                    f"column {name!r} has {size} rows and column {first!r} {sizes[first]}; all "
                    "columns of a table need as many"
                )
        self.rows: int = sizes[first]

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column of numbers; NaN for what is missing."""
        values = self._columns[name]
        if values.dtype.kind in "biuf":
            return values.astype(np.float64)
        found = np.empty(values.size)
        for row, value in enumerate(values.tolist()):
            found[row] = number = math.nan if _is_missing(value) else _as_number(value)
            if number is None:
                raise InputRefused(
                    f"column {name!r}, {self._place(row)}: this is no number; leave it empty if it "
                    "is missing"
                )
        return found

    def categories(self, name: str, known: Sequence[str]) -> NDArray[np.int64]:
        """A column of categories: the position of each among the known, MISSING or OUTSIDE."""
        position = {text: index for index, text in enumerate(known)}
        return np.array(
            [
                MISSING if _is_missing(value) else position.get(as_text(value), OUTSIDE)
                for value in self._columns[name].tolist()
            ],
            dtype=np.int64,
        )

    def _place(self, row: int) -> str:
        return f"row {row}" if self._lines is None else f"line {self._lines[row]}{self._file}"


def read_csv(path: Path) -> tuple[dict[str, list[str]], list[int]]:
    """The columns of a file as text, and the line in which each row ends."""
    rows, lines = [], []
    with (
        reading(path, "a CSV file: text in UTF-8, commas, one header"),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.reader(file, strict=True, skipinitialspace=True)
        header = [name.strip() for name in next(reader, [])]
        for cells in reader:
            if cells:  # an empty line is no row
                rows.append(cells)
                lines.append(reader.line_num)
                if len(cells) != len(header):
                    raise InputRefused(
                        f"line {reader.line_num} of {path.name} has {len(cells)} cells, and the "
                        f"header {len(header)}"
                    )
    if twice := {name for name in header if header.count(name) > 1}:
        raise InputRefused(f"the header of {path.name} has {shown(min(twice))!r} twice")
    if not header:
        raise InputRefused(f"{path.name} is empty; the first line names its columns")
    return {name: [cells[i] for cells in rows] for i, name in enumerate(header)}, lines


def as_text(value: Any) -> str:
    """A category: numbers like 1.0, which is what a column of 1 with gaps becomes, are whole."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def _as_array(name: str, values: Any) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray):
        values = values.tolist()  # None where it is masked
    try:
        if isinstance(values, list | tuple):  # mixed with text, numbers would become text
            array = np.empty(len(values), dtype=object)
            array[:] = values
        else:
            array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "biufOUT":
        raise InputRefused(
            f"column {name!r} is {type(values).__name__} of {array.dtype} with {array.ndim} "
            "dimensions; give one of numbers or text, with one value per row"
        )
    return array


def _is_missing(value: Any) -> bool:
    """None, NaN in any form, or a cell that is empty or reads NaN."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas has its own
        return True
    if isinstance(value, str):
        return value.strip().lower() in ("", "nan")
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _as_number(value: Any) -> float | None:
    if isinstance(value, str) and "_" in value:  # Python would take 1_000
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# -- what a plan declares of a column ------------------------------------------------------------


def as_range(name: str, given: Any) -> tuple[float, float]:
    """Two numbers, the first less than the second."""
    _check_name(name)
    try:
        low, high = map(float, given)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"the range of {name!r} is {given!r}; give (low, high)") from error
    if not (low < high and 1e-100 <= high - low <= 1e100):  # NaN and infinities too
        raise ParameterError(
            f"the range of {name!r} is {low:g} to {high:g}; the first must be less than the second"
        )
    if high - low < _NARROWEST * max(abs(low), abs(high)):
        raise ParameterError(
            f"the range of {name!r}, {low!r} to {high!r}, is too narrow for numbers as large; "
            "subtract a constant from the column"
        )
    return low, high


def as_categories(name: str, given: Any) -> tuple[str, ...]:
    """Two or more different texts."""
    _check_name(name)
    texts = () if isinstance(given, str) else tuple(map(as_text, given))
    if len(texts) < 2 or len({*texts}) < len(texts) or "" in texts:
        raise ParameterError(
            f"the categories of {name!r} are {given!r}; give a list of two or more different texts"
        )
    return texts


def as_quantile(q: Any) -> float:
    """A number between 0 and 1."""
    if not isinstance(q, int | float) or not 0 < q < 1:
        raise ParameterError(f"quantile {q!r} must be a number between 0 and 1, such as 0.5")
    return float(q)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ParameterError(f"a column is named {name!r}; names are texts")
