"""The transform against plain evaluation in Python integers and against python-flint."""

from __future__ import annotations

import flint
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, ParameterError
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, PrimeField

FIELDS = [DEFAULT_FIELD, PrimeField(2**32 - 2**20 + 1), PrimeField(257), PrimeField(17)]


def random_rows(field: PrimeField, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random elements with many extreme ones among them."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, field.modulus, (rows, columns), dtype=np.uint32)
    extreme = rng.random((rows, columns)) < 0.3
    values[extreme] = rng.choice([0, 1, field.modulus - 1], extreme.sum()).astype(np.uint32)
    return values


def evaluate(field: PrimeField, column: np.ndarray, point: int) -> int:
    value = 0
    for coefficient in reversed(column.tolist()):
        value = (value * point + coefficient) % field.modulus
    return value


@pytest.mark.parametrize("field", [*FIELDS, PAPER_FIELD, PrimeField(5), PrimeField(7)])
def test_points_are_distinct_and_not_zero(field: PrimeField) -> None:
    for count in {1, 2, 3, min(200, field.modulus - 1)}:
        points = ntt.points(field, count)
        assert points.dtype == np.uint32
        assert points.shape == (count,)
        assert len(set(points.tolist())) == count
        assert 0 not in points
        assert int(points.max()) < field.modulus


def test_points_of_the_default_field_do_not_depend_on_the_count() -> None:
    many = ntt.points(DEFAULT_FIELD, 1000)
    for count in (1, 2, 3, 64, 65, 999):
        assert np.array_equal(ntt.points(DEFAULT_FIELD, count), many[:count])


def test_points_are_pinned() -> None:
    """Two versions that disagree about the points would decode nonsense."""
    assert ntt.points(DEFAULT_FIELD, 8).tolist() == [
        *(1, 2146959360, 591805755, 1555153606),
        *(1118720762, 1028238599, 1945455005, 201504356),
    ]
    assert ntt.points(PAPER_FIELD, 12).tolist() == [
        *(1, 1304151046, 149005400, 2296456278, 3451601923),
        *(4294967290, 2990816245, 4145961891, 1998511013, 843365368),
        *(2, 2608302092),
    ]


def test_paper_points_fill_cosets() -> None:
    field = PAPER_FIELD
    assert ntt.coset_order(field) == 10
    points = ntt.points(field, 200).reshape(20, 10)
    for coset in points.tolist():
        assert len({pow(x, 10, field.modulus) for x in coset}) == 1


def test_too_many_points_are_refused() -> None:
    assert sorted(ntt.points(PrimeField(7), 6).tolist()) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ParameterError, match="cannot take 7"):
        ntt.points(PrimeField(7), 7)
    with pytest.raises(ParameterError, match="cannot take 0"):
        ntt.points(PrimeField(7), 0)


def test_supports() -> None:
    assert ntt.supports(DEFAULT_FIELD, 2**19)
    assert not ntt.supports(DEFAULT_FIELD, 2**19 + 1)
    assert not ntt.supports(PAPER_FIELD, 3)
    assert not ntt.supports(DEFAULT_FIELD, 0)


@pytest.mark.parametrize("modulus", [5, 7, 257, DEFAULT_FIELD.modulus, PAPER_FIELD.modulus])
def test_primitive_root_generates_everything(modulus: int) -> None:
    root = ntt.primitive_root(modulus)
    order = flint.fmpz_mod_ctx(modulus)(root)
    for p, _ in flint.fmpz(modulus - 1).factor():
        assert order ** int((modulus - 1) // p) != 1


@given(
    st.sampled_from(FIELDS),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([0, 1, 7, 8, 9, 31, 33, 70]),
    st.integers(0, 2**32 - 1),
)
def test_forward_is_evaluation(
    backend: str, field: PrimeField, rows: int, leaves: int, columns: int, seed: int
) -> None:
    top = 16 if field.modulus == 17 else 40
    rows, leaves = min(rows, top), min(leaves, top)
    coefficients = random_rows(field, rows, columns, seed)
    values = ntt.forward(field, coefficients, leaves)
    assert values.shape == (leaves, columns)
    points = ntt.points(field, max(rows, leaves))[:leaves].tolist()
    for column in {0, columns // 2, columns - 1} if columns else set():
        expected = [evaluate(field, coefficients[:, column], p) for p in points]
        assert values[:, column].tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_forward_agrees_with_flint(backend: str, size: int) -> None:
    field = DEFAULT_FIELD
    coefficients = random_rows(field, size, 3, size)
    values = ntt.forward(field, coefficients, size)
    for column in range(3):
        polynomial = flint.nmod_poly(coefficients[:, column].tolist(), field.modulus)
        expected = [int(polynomial(p)) for p in ntt.points(field, size).tolist()]
        assert values[:, column].tolist() == expected


@given(
    st.sampled_from(FIELDS),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([0, 1, 8, 33, 65]),
    st.integers(0, 2**32 - 1),
)
def test_inverse_undoes_forward(
    backend: str, field: PrimeField, rows: int, low: int, columns: int, seed: int
) -> None:
    top = 16 if field.modulus == 17 else 70
    rows, low = min(rows, top), min(low, top)
    size = ntt.transform_size(max(rows, low))
    leaves = random_rows(field, rows, columns, seed)
    coefficients = ntt.inverse(field, leaves, low)
    assert coefficients.shape == (low, columns)
    everything = ntt.inverse(field, leaves, size)
    assert np.array_equal(everything[:low], coefficients)
    back = ntt.forward(field, everything, size)
    assert np.array_equal(back[:rows], leaves)
    assert not back[rows:].any()


@given(
    st.sampled_from([DEFAULT_FIELD, PrimeField(2**32 - 2**20 + 1), PrimeField(257)]),
    st.integers(1, 70),
    st.data(),
    st.sampled_from([1, 9, 64, 131]),
    st.integers(0, 2**32 - 1),
)
def test_interpolation_from_any_leaves(
    backend: str, field: PrimeField, clients: int, data: st.DataObject, columns: int, seed: int
) -> None:
    positions = data.draw(st.permutations(range(clients)))
    survivors = data.draw(st.integers(1, clients))
    known, others = positions[:survivors], positions[survivors:]
    count = data.draw(st.integers(1, survivors))
    coefficients = random_rows(field, survivors, columns, seed)
    values = ntt.forward(field, coefficients, clients)
    interpolation = ntt.Interpolation(field, known, clients)
    low = interpolation.low_coefficients(np.ascontiguousarray(values[known]), count)
    assert np.array_equal(low, coefficients[:count])
    low, rest = interpolation.complete(np.ascontiguousarray(values[known]), count, others)
    assert np.array_equal(low, coefficients[:count])
    assert np.array_equal(rest, values[others])


def test_interpolation_of_the_main_case(backend: str) -> None:
    """N = 200, U = 140, T = 100, with the rotated set of client 150."""
    field, known = DEFAULT_FIELD, [(151 + k) % 200 for k in range(140)]
    others = [p for p in range(200) if p not in known]
    coefficients = random_rows(field, 140, 67, 1)
    values = ntt.forward(field, coefficients, 200)
    low, rest = ntt.Interpolation(field, known, 200).complete(values[known], 40, others)
    assert np.array_equal(low, coefficients[:40])
    assert np.array_equal(rest, values[others])


@given(
    st.sampled_from([PAPER_FIELD, PrimeField(11), PrimeField(101), PrimeField(2**31 - 1)]),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([0, 1, 33]),
    st.integers(0, 2**32 - 1),
)
def test_evaluation_on_cosets(
    backend: str, field: PrimeField, rows: int, count: int, columns: int, seed: int
) -> None:
    count = min(count, field.modulus - 1)
    coefficients = random_rows(field, rows, columns, seed)
    values = ntt.evaluate_on_cosets(field, coefficients, count)
    assert values.shape == (count, columns)
    points = ntt.coset_points(field, count).tolist()
    for column in {0, columns - 1} if columns else set():
        assert values[:, column].tolist() == [
            evaluate(field, coefficients[:, column], p) for p in points
        ]


@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD, PrimeField(11)])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_evaluate_uses_the_points_of_the_rule(backend: str, field: PrimeField, count: int) -> None:
    for rows in {1, count}:
        coefficients = random_rows(field, rows, 2, count)
        expected = [
            evaluate(field, coefficients[:, 1], p) for p in ntt.points(field, count).tolist()
        ]
        assert ntt.evaluate(field, coefficients, count)[:, 1].tolist() == expected


def test_evaluate_refuses_more_coefficients_than_points() -> None:
    with pytest.raises(FieldError, match="3 coefficients for only 2 points"):
        ntt.evaluate(DEFAULT_FIELD, np.zeros((3, 1), dtype=np.uint32), 2)


def test_interpolation_refuses_wrong_values_and_known_targets() -> None:
    interpolation = ntt.Interpolation(DEFAULT_FIELD, [0, 2], 4)
    with pytest.raises(FieldError, match="2 leaves for values of shape"):
        interpolation.low_coefficients(np.zeros((3, 5), dtype=np.uint32), 1)
    with pytest.raises(FieldError, match="must not be among the known"):
        interpolation.complete(np.zeros((2, 5), dtype=np.uint32), 1, [1, 2])


def test_refusals() -> None:
    rows = np.zeros((3, 4), dtype=np.uint32)
    with pytest.raises(FieldError, match="no transform of size 4"):
        ntt.forward(PAPER_FIELD, rows, 3)
    with pytest.raises(FieldError, match="uint32"):
        ntt.forward(DEFAULT_FIELD, rows.astype(np.int64), 3)
    with pytest.raises(FieldError, match="at least one row"):
        ntt.inverse(DEFAULT_FIELD, rows, 0)
    with pytest.raises(FieldError, match="at least one row"):
        ntt.forward(DEFAULT_FIELD, rows[:0], 3)


@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD])
@pytest.mark.parametrize("clients", [7, 64, 130, 200])
def test_S11_the_code_gives_the_same_shares_by_transform_and_by_matrix(
    backend: str, field: PrimeField, clients: int
) -> None:
    survivors, privacy = clients * 7 // 10, clients // 2
    code = MdsCode(field, survivors, privacy, ntt.points(field, clients))
    rows = random_rows(field, survivors, 65, clients)
    pieces, noise = rows[: code.pieces], rows[code.pieces :]
    shares = code.encode(pieces, noise)
    assert np.array_equal(shares, field.matmul(np.ascontiguousarray(code.matrix.T), rows))
    positions = [(k * 3 + 1) % clients for k in range(survivors)]
    if len(set(positions)) < survivors:
        positions = list(range(clients - survivors, clients))
    targets = [p for p in range(clients) if p not in positions]
    assert np.array_equal(code.decode(positions, shares[positions]), pieces)
    mask, others = code.complete(positions, shares[positions], targets)
    assert np.array_equal(mask, pieces)
    assert np.array_equal(others, shares[targets])
    none, alone = code.complete(positions, shares[positions], targets, with_pieces=False)
    assert none.shape == (0, 65)
    assert np.array_equal(alone, others)
