"""The columns of a client's table: files and mappings, whole and broken."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.drivers.columns import MISSING, OUTSIDE, Columns
from lightsecagg.errors import ConfigurationError, InputRefused, LightSecAggError


@pytest.fixture
def csv(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "table.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_file_as_spreadsheets_write_it(csv: Any) -> None:
    path = csv(
        '\ufeffage , "sex",note\r\n 41 ,f,"a, b"\r\n,m,"two\nlines"\r\n\r\nNaN, ,\r\n1e1,x,\r\n'
    )
    for table in (path, str(path)):
        columns = Columns(table, ["age", "sex"])
        assert columns.rows == 4
        np.testing.assert_array_equal(columns.numbers("age"), [41, np.nan, np.nan, 10])
        assert columns.categories("sex", ["m", "f"]).tolist() == [1, 0, MISSING, OUTSIDE]


@pytest.mark.parametrize(
    "values",
    [
        [1, None, 3.5, float("nan")],
        (1, "", "3.5", " nan "),
        np.array([1, np.nan, 3.5, np.nan], dtype=np.float32),
        np.array(["1", "", "3.5", "nan"]),
        np.ma.masked_array([1, 9, 3.5, np.nan], mask=[0, 1, 0, 0]),
        [np.float32(1), np.float64("nan"), Fraction(7, 2), None],
    ],
)
def test_numbers_of_every_kind(values: Any) -> None:
    expected = [1, np.nan, 3.5, np.nan]
    np.testing.assert_array_equal(Columns({"x": values}, ["x"]).numbers("x"), expected)


def test_integers_and_truth_values_are_numbers() -> None:
    table = {"i": np.array([2, -3], dtype=np.int8), "b": [True, False]}
    columns = Columns(table, ["i", "b"])
    assert columns.numbers("i").tolist() == [2, -3]
    assert columns.numbers("b").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1, 2, None, 5], [0, 1, MISSING, OUTSIDE]),
        (np.array([1.0, 2.0, np.nan, 1.5]), [0, 1, MISSING, OUTSIDE]),
        (np.array(["1", " 2 ", "", "1.0"]), [0, 1, MISSING, OUTSIDE]),
        ([np.int64(1), "2", float("nan"), "one"], [0, 1, MISSING, OUTSIDE]),
    ],
)
def test_categories_are_compared_as_text(values: Any, found: list[int]) -> None:
    assert Columns({"x": values}, ["x"]).categories("x", ["1", "2"]).tolist() == found


class Frame:
    """What a DataFrame has, without pandas: columns by name, each of its own type."""

    class Series:
        def __init__(self, values: list[Any]) -> None:
            self._values = values

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array(self._values, dtype=object)

    class NAType:
        """pandas.NA: neither true nor false, and equal to nothing."""

        def __bool__(self) -> bool:
            raise TypeError("boolean value of NA is ambiguous")

    def __init__(self) -> None:
        self._columns = {"age": [40, self.NAType()], "sex": ["f", self.NAType()]}

    def __iter__(self) -> Any:
        return iter(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return self.Series(self._columns[name])


def test_a_data_frame_needs_no_pandas_here() -> None:
    frame: Any = Frame()
    columns = Columns(frame, ["age", "sex"])
    np.testing.assert_array_equal(columns.numbers("age"), [40, np.nan])
    assert columns.categories("sex", ["f", "m"]).tolist() == [0, MISSING]
    with pytest.raises(InputRefused, match="no column 'height'; it has 'age', 'sex'"):
        Columns(frame, ["height"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sex\nf\n", "the table of table.csv has no column 'age'; it has 'sex'"),
        ("age,age\n1,2\n", "the header of table.csv has 'age' twice"),
        ("", "table.csv is empty; the first line names its columns"),
        ("age\n1\n\nforty\n", "column 'age', line 4 of table.csv: this is no number"),
        ('age,note\n1,"a\nb"\nx,\n', "column 'age', line 4 of table.csv: this is no number"),
        ("age\n63,2\n", "line 2 of table.csv has 2 cells, and the header 1"),
        ("age;sex\n40;f\n", "no column 'age'; it has 'age;sex'"),
        ("age\n1_000\n", "line 2 of table.csv: this is no number"),
    ],
)
def test_a_broken_file_is_refused_by_line_and_column(csv: Any, text: str, reason: str) -> None:
    with pytest.raises(InputRefused) as refusal:
        Columns(csv(text), ["age"]).numbers("age")
    assert reason in str(refusal.value)


def test_a_cell_is_never_quoted(csv: Any) -> None:
    for text in ("age\nJane Doe\n", 'age\n"Jane Doe\n', b"age\nJane Doe\xff\n", "age\nJane,Doe\n"):
        with pytest.raises(LightSecAggError) as refusal:
            Columns(csv(text), ["age"]).numbers("age")
        assert "Jane" not in str(refusal.value)


@given(st.one_of(st.binary(max_size=60), st.text('age,",;\r\n 01.nae_-', max_size=60)))
def test_whatever_a_file_holds_it_is_read_or_refused(text: bytes | str) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    with tempfile.TemporaryDirectory() as folder, suppress(LightSecAggError):
        path = Path(folder) / "table.csv"
        path.write_bytes(content)
        columns = Columns(path, ["age"])
        assert columns.categories("age", ["0", "1"]).shape == (columns.rows,)
        assert columns.numbers("age").shape == (columns.rows,)


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", 'age\n"1\n', 'age\n"1"2\n'])
def test_what_is_no_csv_file_is_refused_as_a_whole(csv: Any, text: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"table\.csv is not a CSV file: text in UTF-8"):
        Columns(csv(text), ["age"])


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        Columns(tmp_path / "none.csv", ["age"])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (5, "a table is int; give a dict of columns, a DataFrame or the path of a CSV file"),
        ({"x": [1, 2], "y": [1]}, "column 'y' has 1 rows and column 'x' 2"),
        ({"x": 5, "y": [1]}, "column 'x' is int of int64 with 0 dimensions"),
        ({"x": "text", "y": [1]}, "column 'x' is str of <U4 with 0 dimensions"),
        ({"x": np.zeros((2, 2)), "y": [1]}, "with 2 dimensions"),
        ({"x": np.array([1j]), "y": [1]}, "of complex128"),
        ({"x": np.array(["2020-01-01"], "M8[D]"), "y": [1]}, r"of datetime64\[D\]"),
        ({"x": [{}], "y": [1]}, "column 'x', row 0: this is no number"),
        ({"x": [10**400], "y": [1]}, "column 'x', row 0: this is no number"),
    ],
)
def test_a_broken_table_is_refused_by_column(table: Any, reason: str) -> None:
    with pytest.raises(InputRefused, match=reason):
        Columns(table, ["x", "y"]).numbers("x")
