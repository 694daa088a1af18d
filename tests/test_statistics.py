"""Statistics of tables, beside the same statistics of all rows in the clear."""

from __future__ import annotations

import json
import math
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightsecagg
import lightsecagg.statistics as module
from laboratory import baseline
from lightsecagg import StatisticsPlan, summarise
from lightsecagg.errors import Aborted, InputRefused, ParameterError, RecoveryError
from lightsecagg.protocol.schemes.traits import protocols
from lightsecagg.statistics import BOUND, MAX_CLIENTS, CrossTable, Figure, Present

SEXES, WARDS = ("f", "m"), ("a", "b", "c")
PLAN = StatisticsPlan(
    ranges={"age": (0, 120), "weight": (30, 200)},
    categories={"sex": SEXES, "ward": WARDS, "smokes": ("no", "yes")},
    tables=[("sex", "ward"), ("smokes", "sex")],
)


def hospitals(clients: int = 5, rows: int = 80) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [
        {
            "age": rng.integers(0, 100, rows),
            "weight": rng.normal(75, 12, rows),
            "sex": rng.choice(SEXES, rows),
            "ward": rng.choice(WARDS, rows),
            "smokes": rng.choice(["no", "yes"], rows, p=[0.7, 0.3]),
        }
        for _ in range(clients)
    ]


def column(tables: list[dict[str, Any]], name: str) -> Any:
    return np.concatenate([table[name] for table in tables])


# -- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", protocols())
def test_every_figure_is_that_of_all_rows_together(protocol: str) -> None:
    tables = hospitals()
    found = summarise(tables, PLAN, privacy=2, protocol=protocol)
    assert (found.clients, found.rows, found.minimum_cell) == (5, 400, 10)
    ages = [int(age) for age in column(tables, "age")]
    age = found.numbers["age"]
    assert (age.count, age.missing, age.outside) == (400, 0, 0)
    assert age.sum is not None
    assert age.mean is not None
    assert age.variance is not None
    assert age.std is not None
    # Whole numbers in a range between whole numbers are exact.
    assert age.sum.value == sum(ages)
    assert age.mean.value == float(statistics.mean(map(Fraction, ages)))
    assert age.variance.value == float(statistics.variance(map(Fraction, ages)))
    assert age.std.value == math.sqrt(age.variance.value)
    counts, edges = np.histogram(ages, 10, (0, 120))
    assert age.edges == tuple(edges)
    assert [a for a in age.histogram if a is not None] == [c for c in counts if c >= 10][:8]
    assert age.histogram[8:] == (None, None), "the last is empty, and the other goes with it"
    for q, middle in age.quantiles.items():
        assert middle is not None
        true = sorted(ages)[math.ceil(q * 400) - 1]
        assert abs(middle.value - true) <= middle.error == pytest.approx(0.6)
    weights = column(tables, "weight")
    weight = found.numbers["weight"]
    for figure, true in (
        (weight.sum, math.fsum(weights)),
        (weight.mean, statistics.fmean(weights)),
        (weight.variance, weights.var(ddof=1)),
        (weight.std, weights.std(ddof=1)),
    ):
        assert figure is not None
        assert abs(figure.value - true) <= figure.error < 0.01
    wards, smokers = found.tables
    assert wards.columns == ("sex", "ward")
    assert wards.labels == (SEXES, WARDS)
    pairs = [*zip(column(tables, "sex"), column(tables, "ward"), strict=True)]
    expected = tuple(tuple(pairs.count((sex, ward)) for ward in WARDS) for sex in SEXES)
    assert wards.counts == expected
    assert sum(sum(c or 0 for c in row) for row in smokers.counts) == 400
    assert found.categories == {name: Present(400, 0, 0) for name in ("sex", "ward", "smokes")}


def test_a_file_a_list_and_a_client_that_vanishes(tmp_path: Path) -> None:
    tables: list[Any] = hospitals()
    rows = zip(*(tables[0][name] for name in tables[0]), strict=True)
    text = "\n".join([",".join(tables[0]), *(",".join(map(str, row)) for row in rows)])
    (tmp_path / "0.csv").write_text(text)
    lists = {name: values.tolist() for name, values in tables[1].items()}
    received = [tmp_path / "0.csv", lists, tables[2], None, tables[4]]
    found = summarise(received, PLAN, privacy=1, dropouts=1)
    included = [*tables[:3], tables[4]]
    assert (found.clients, found.rows) == (4, 320)
    assert found == summarise(included, PLAN, privacy=1)
    age = found.numbers["age"]
    assert age.sum is not None
    assert age.sum.value == column(included, "age").sum()
    with pytest.raises(Aborted, match="only 3 clients uploaded"):
        summarise([*received[:3], None, None], PLAN, privacy=1, dropouts=1)


def test_malicious_server_mode() -> None:
    found = summarise(hospitals(), PLAN, privacy=1, dropouts=1, threat_model="malicious-server")
    assert found.rows == 400


def test_what_is_missing_outside_or_unlisted_is_counted_apart() -> None:
    plan = StatisticsPlan(
        {"age": (0, 100)}, {"sex": SEXES, "ward": ("a", "b")}, [("sex", "ward")], minimum_cell=0
    )
    table = {
        "age": [-5, 50, None, 130, float("inf"), float("nan")],
        "sex": ["f", "m", "", "x", None, "f"],
        "ward": ["a", "b", "a", "a", "b", "c"],
    }
    empty: dict[str, Any] = {"age": [], "sex": [], "ward": []}
    found = summarise([table, empty, table], plan, privacy=1)
    assert found.rows == 12
    age = found.numbers["age"]
    assert (age.count, age.missing, age.outside) == (8, 4, 6)
    assert age.sum is not None
    assert age.sum.value == 2 * (0 + 50 + 100 + 100)
    assert age.histogram == (2, 0, 0, 0, 0, 2, 0, 0, 0, 4)
    assert found.categories == {"sex": Present(6, 4, 2), "ward": Present(10, 0, 2)}
    assert found.tables[0].counts == ((2, 0), (0, 2))


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-2, 1e6),
    st.lists(st.lists(st.floats(0, 1), max_size=12), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_the_stated_error_holds(low: float, width: float, parts: list[list[float]]) -> None:
    high = low + width
    values = [[min(high, low + part * (high - low)) for part in row] for row in parts]
    plan = StatisticsPlan({"x": (low, high)}, minimum_cell=0, bins=3, quantiles=(0.1, 0.5, 0.999))
    total = np.sum([plan.encode({"x": row}) for row in values], axis=0)
    found = plan.decode(total).numbers["x"]
    exact = [Fraction(value) for row in values for value in row]
    assert (found.count, found.outside) == (len(exact), 0)

    def holds(figure: Figure | None, true: Fraction, scale: float) -> None:
        assert figure is not None
        slack = 1e-12 * scale  # of float64
        assert abs(Fraction(figure.value) - true) <= figure.error * (1 + 1e-6) + slack

    reach = max(abs(low), abs(high))
    if exact:
        holds(found.sum, sum(exact, Fraction(0)), reach * len(exact))
        holds(found.mean, statistics.mean(exact), reach)
        for q, figure in found.quantiles.items():
            holds(figure, sorted(exact)[math.ceil(Fraction(str(q)) * len(exact)) - 1], reach)
    else:
        assert (found.sum, found.mean) == (None, None)
        assert set(found.quantiles.values()) == {None}
    if len(exact) > 1:
        holds(found.variance, statistics.variance(exact), width**2)
        assert found.std is not None
        assert found.variance is not None
        assert found.std.value == math.sqrt(found.variance.value)
    else:
        assert (found.variance, found.std) == (None, None)


def test_variance_is_stable_where_textbook_formulas_are_not() -> None:
    plan = StatisticsPlan({"x": (1e9, 1e9 + 8)}, minimum_cell=2)
    rows = [[1e9 + 1, 1e9 + 2], [1e9 + 3], [1e9 + 4]]
    found = summarise([{"x": row} for row in rows], plan, privacy=1).numbers["x"]
    assert found.variance is not None
    assert found.variance.value == float(Fraction(5, 3))
    assert found.variance.error < 1e-5


def test_the_stated_error_is_nearly_reached_by_the_worst_values() -> None:
    plan = StatisticsPlan({"x": (0, 1)}, minimum_cell=0)
    step = 2.0**-23
    for rows in ([0.501 * step, 9.499 * step], [0.499 * step, 9.501 * step]):
        found = plan.decode(plan.encode({"x": rows})).numbers["x"]
        exact = [Fraction(value) for value in rows]
        for figure, true in (
            (found.variance, float(statistics.variance(exact))),
            (found.std, math.sqrt(statistics.variance(exact))),
        ):
            assert figure is not None
            assert 0.9 * figure.error < abs(figure.value - true) <= figure.error
    found = plan.decode(plan.encode({"x": [0.499 * step] * 7})).numbers["x"]
    for figure, true in ((found.mean, 0.499 * step), (found.sum, 7 * 0.499 * step)):
        assert figure is not None
        assert 0.99 * figure.error < abs(figure.value - true) <= figure.error


def test_every_sum_fits_in_its_bytes() -> None:
    steps, rows = 2**module._STEP_BITS, module._MAX_ROWS
    assert rows < 256**module._COUNT
    assert steps * rows < 256**module._SUM
    assert 256 ** (module._SQUARES - 1) < steps**2 * rows < 256**module._SQUARES


def test_sums_of_squares_beyond_64_bits_are_exact() -> None:
    rows = 70_000  # squares of up to 2^48
    plan = StatisticsPlan({"x": (0, 2**24 - 1)})
    values = np.full(rows, 2**24 - 1)
    values[::2] -= 1
    found = plan.decode(plan.encode({"x": values}) + plan.encode({"x": values})).numbers["x"]
    assert found.variance is not None
    assert found.variance.value == float(Fraction(rows * 2, 4 * (2 * rows - 1)))


def test_numbers_are_whole_for_as_many_clients_as_may_be_summed() -> None:
    """c_l leaves every rounding below a quantum, and so many quanta are less than a quarter."""
    most = lightsecagg.Quantizer(lightsecagg.DEFAULT_FIELD, BOUND, MAX_CLIENTS)
    assert MAX_CLIENTS / most.scale < 0.25
    with pytest.raises(ParameterError, match="1001 tables: sums are exact for 1000 at most"):
        summarise([None] * 1001, PLAN, privacy=1)


# -- what is hidden ------------------------------------------------------------------------------


def test_figures_of_few_values_are_hidden() -> None:
    plan = StatisticsPlan({"x": (0, 10), "y": (0, 10)}, minimum_cell=6)
    table = {"x": [5, 5, 5, None], "y": [1, 2, 3, 4]}
    found = plan.decode(plan.encode(table) + plan.encode({"x": [1, 2], "y": [3, 4]}))
    x, y = found.numbers["x"], found.numbers["y"]
    assert (x.count, x.missing) == (5, 1)
    assert [x.sum, x.mean, x.variance, x.std, *x.quantiles.values()] == [None] * 7
    assert set(x.histogram) == {None}
    assert y.mean is not None
    assert y.mean.value == pytest.approx(17 / 6)
    assert set(y.quantiles.values()) == {None}, "fewer than six lie on one side of each"
    ends = StatisticsPlan({"x": (0, 10)}, quantiles=(0.3, 0.7, 0.95), minimum_cell=6)
    tenths = ends.decode(ends.encode({"x": range(20)})).numbers["x"].quantiles
    assert [figure is None for figure in tenths.values()] == [False, False, True]
    ends = StatisticsPlan({"x": (0, 10)}, quantiles=(0.05, 0.25, 0.75, 0.8), minimum_cell=6)
    tenths = ends.decode(ends.encode({"x": range(20)})).numbers["x"].quantiles
    assert [figure is None for figure in tenths.values()] == [True, True, False, True]


def test_small_cells_and_what_would_give_them_away_are_hidden() -> None:
    plan = StatisticsPlan(
        categories={"sex": SEXES, "ward": WARDS}, tables=[("sex", "ward")], minimum_cell=5
    )
    counts = {("f", "a"): 1, ("f", "b"): 30, ("f", "c"): 20, ("m", "a"): 40, ("m", "b"): 50}
    rows = [pair for pair, count in {**counts, ("m", "c"): 60}.items() for _ in range(count)]
    table = {"sex": [sex for sex, _ in rows], "ward": [ward for _, ward in rows]}
    found = plan.decode(plan.encode(table))
    assert found.tables[0].counts == ((None, 30, None), (None, 50, None))
    document = json.dumps(found.to_dict())
    assert ": 1," not in document.replace('"clients": 1,', "")
    assert '"counts": [[null, 30, null], [null, 50, null]]' in document


# -- documents -----------------------------------------------------------------------------------


def test_results_are_short_to_read_and_whole_as_json() -> None:
    found = summarise(hospitals(), PLAN, privacy=1)
    assert repr(found) == (
        "Statistics(clients=5, rows=400, columns: age, weight, sex, ward, smokes)"
    )
    assert repr(found.tables[0]) == "CrossTable(sex x ward, 6 cells)"
    assert repr(Figure(1.5, 0.25)) == "1.5 \u00b1 0.25"
    assert repr(found.numbers["age"]).startswith("Numbers(count=400, missing=0, mean=")
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["clients"] == 5
    assert document["numbers"]["age"]["quantiles"]["0.5"]["error"] == pytest.approx(0.6)
    assert document["tables"][0]["labels"] == [[*SEXES], [*WARDS]]
    with pytest.raises(AttributeError):
        found.rows = 3  # type: ignore[misc]
    assert isinstance(found.tables[0], CrossTable)


def test_a_plan_can_be_handed_out_as_json() -> None:
    copy = StatisticsPlan(**json.loads(json.dumps(PLAN.to_dict())))
    assert copy == PLAN
    table = hospitals(1)[0]
    np.testing.assert_array_equal(copy.encode(table), PLAN.encode(table))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "the plan has no column"),
        ({"ranges": {"x": (1, 1)}}, "the range of 'x' is 1 to 1; the first must be less"),
        ({"ranges": {"x": (0, float("inf"))}}, "the range of 'x' is 0 to inf"),
        ({"ranges": {"x": (float("nan"), 1)}}, "the range of 'x' is nan to 1"),
        ({"ranges": {"x": (1e9, 1e9 + 0.5)}}, "is too narrow for numbers as large; subtract a"),
        ({"ranges": {"x": 5}}, r"the range of 'x' is 5; give \(low, high\)"),
        ({"ranges": {"x": ("a", "b")}}, "the range of 'x' is"),
        ({"ranges": {5: (0, 1)}}, "a column is named 5; names are texts"),
        ({"categories": {"s": ["f"]}}, r"the categories of 's' are \['f'\]; give a list of two"),
        ({"categories": {"s": "fm"}}, "the categories of 's' are 'fm'; give a list"),
        ({"categories": {"s": [1, 1.0]}}, "two or more different texts"),
        ({"ranges": {"s": (0, 1)}, "categories": {"s": SEXES}}, "has a range and categories"),
        ({"ranges": {"x": (0, 1)}, "bins": 0}, "bins = 0 must be at least 1"),
        ({"ranges": {"x": (0, 1)}, "resolution": 1.5}, "resolution = 1.5 must be an integer"),
        ({"ranges": {"x": (0, 1)}, "minimum_cell": -1}, "minimum_cell = -1 must be at least 0"),
        ({"ranges": {"x": (0, 1)}, "quantiles": [1]}, "quantile 1 must be a number between 0 and"),
        ({"categories": {"s": SEXES}, "tables": [("s", "t")]}, "needs categories of 't'"),
        ({"categories": {"s": SEXES}, "tables": [("s", "s")]}, "one or two columns, not"),
        (
            {"categories": {"s": SEXES, "w": WARDS}, "tables": [("s", "w"), ("w", "s")]},
            "is there twice",
        ),
        (
            {"categories": {"s": SEXES, "w": WARDS}, "tables": [("s", "w"), ("w",)]},
            "a table of 'w' alone has the totals of another table",
        ),
        (
            {"categories": {"s": range(100), "w": range(50)}, "tables": [("s", "w")]},
            "has 5000 cells; 4096 fit",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        StatisticsPlan(**arguments)


@pytest.mark.parametrize(
    ("tables", "options", "error", "reason"),
    [
        ({"age": [1]}, {}, InputRefused, "tables is dict; give a list with one table, or None"),
        ("table.csv", {}, InputRefused, "tables is str; give a list"),
        ([None] * 4, {}, ParameterError, "every client is None"),
        ([{"age": [1]}] * 3 + [{"aeg": [1]}], {}, InputRefused, "client 3: .* no column 'age'"),
        ([{"age": [1]}] * 3 + [{"age": ["x"]}], {}, InputRefused, "client 3: column 'age', row 0"),
        ([{"age": [1]}] * 4, {"privacy": 3}, ParameterError, r"lower privacy \(T\)"),
        baseline([{"age": [1]}] * 4, {"protocol": "rot13"}, ParameterError, "choose one of"),
    ],
)
def test_what_cannot_be_summarised_is_refused(
    tables: Any, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    plan = StatisticsPlan({"age": (0, 120)})
    with pytest.raises(error, match=reason):
        summarise(tables, plan, **{"privacy": 1, **options})


# -- sums that are none --------------------------------------------------------------------------


def test_S47_a_sum_that_no_tables_add_up_to_is_refused() -> None:
    plan = StatisticsPlan({"x": (0, 10)}, {"s": SEXES})
    table = {"x": [1, 2, 3], "s": ["f", "m", ""]}
    whole = plan.encode(table) + plan.encode(table)
    assert plan.decode(whole).rows == 6
    with pytest.raises(ParameterError, match="by this plan it has"):
        plan.decode(whole[1:])
    with pytest.raises(RecoveryError, match="not of whole numbers: aggregate with the bound 255"):
        plan.decode(whole / 3)
    for broken in (np.nan, np.inf):
        with pytest.raises(RecoveryError, match="not of whole numbers"):
            plan.decode(np.where(whole == 0, broken, whole))
    with pytest.raises(RecoveryError, match="not of vectors of this plan alone"):
        plan.decode(0 * whole)
    other = StatisticsPlan({"x": (0, 11)}, {"s": SEXES})
    with pytest.raises(RecoveryError, match="not of vectors of this plan alone"):
        plan.decode(plan.encode(table) + other.encode(table))
    with pytest.raises(RecoveryError, match="or the bound is not 255"):
        plan.decode(np.minimum(plan.encode(table), 5) + plan.encode(table).clip(0, 5))
    with pytest.raises(RecoveryError, match="or the bound is not 255"):
        plan.decode(np.minimum(plan.encode(table), 254))
    contradictions = 0
    for entry in range(6, whole.size):  # one client that lies about one number
        for change in (1.0, -1.0, 600.0):
            lie = whole.copy()
            lie[entry] += change
            contradictions += contradicts(plan, lie)
    assert contradictions > 2 * (whole.size - 6), "a sum that fits the rest cannot be found out"


def contradicts(plan: StatisticsPlan, total: Any) -> bool:
    try:
        plan.decode(total)
    except RecoveryError as error:
        return "the sums contradict each other" in str(error)
    return False
