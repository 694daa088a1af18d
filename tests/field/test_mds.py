"""The T-private MDS code: exact against Python integers and FLINT (S11), strict (S12, S01), and
able to name wrong answers (S14)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import flint
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.errors import FieldError, InconsistentAnswers, NotEnoughAnswers, ParameterError
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, Elements, PrimeField

BOTH_FIELDS = pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD], ids=["2^31", "2^32"])


def draw_elements(field: PrimeField, shape: tuple[int, ...], seed: int) -> Elements:
    """Uniform, but for extreme values in some places: where lazy sums would overflow first."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, field.modulus, shape, dtype=np.uint32)
    return np.where(generator.random(shape) < 0.2, np.uint32(field.modulus - 1), values)


def encode_with_integers(code: MdsCode, rows: Elements) -> list[list[int]]:
    """Eq. (5) with Python integers: Horner's rule, share by share."""
    q = code.field.modulus
    columns = [[int(value) for value in column] for column in rows.T]
    assert code.points is not None
    shares = []
    for point in code.points:
        share = []
        for column in columns:
            value = 0
            for coefficient in reversed(column):
                value = (value * point + coefficient) % q
            share.append(value)
        shares.append(share)
    return shares


def decode_with_flint(code: MdsCode, positions: list[int], shares: Elements) -> list[list[int]]:
    """Solve for all U rows with FLINT and keep the mask's."""
    q, U, L = code.field.modulus, code.survivors, shares.shape[1]
    columns = [int(code.matrix[k, j]) for j in positions for k in range(U)]
    system = flint.nmod_mat(U, U, columns, q)
    rows = system.solve(flint.nmod_mat(U, L, [int(v) for v in shares.reshape(-1)], q))
    return [[int(rows[k, c]) for c in range(L)] for k in range(code.pieces)]


@st.composite
def codes(draw: st.DrawFn, largest: int = 256) -> MdsCode:
    field = draw(st.sampled_from([DEFAULT_FIELD, PAPER_FIELD]))
    N = draw(st.one_of(st.integers(2, 12), st.integers(2, largest)))
    U = draw(st.integers(1, N))
    T = draw(st.integers(0, U - 1))
    if draw(st.booleans()):
        points = ntt.points(field, N)
    else:
        generator = np.random.default_rng(draw(st.integers(0, 2**32)))
        points = 1 + generator.choice(field.modulus - 1, N, replace=False)
    return MdsCode(field, U, T, [int(point) for point in points])


# -- exactness (S11) -----------------------------------------------------------------------------


@given(code=codes(), length=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_S11_encode_and_decode_equal_python_integers(
    backend: str, code: MdsCode, length: int, seed: int
) -> None:
    rows = draw_elements(code.field, (code.survivors, length), seed)
    mask, noise = np.split(rows, [code.pieces])
    shares = code.encode(mask, noise)
    assert shares.tolist() == encode_with_integers(code, rows)

    chosen = np.random.default_rng(seed).permutation(code.clients)[: code.survivors].tolist()
    assert code.decode(chosen, shares[chosen]).tolist() == mask.tolist()


@given(code=codes(largest=40), seed=st.integers(0, 2**32))
def test_S11_decoding_arbitrary_values_equals_flint(backend: str, code: MdsCode, seed: int) -> None:
    """Any U values are shares of something: no codeword is needed to compare the solvers."""
    chosen = np.random.default_rng(seed).permutation(code.clients)[: code.survivors].tolist()
    shares = draw_elements(code.field, (code.survivors, 2), seed)
    assert code.decode(chosen, shares).tolist() == decode_with_flint(code, chosen, shares)


@BOTH_FIELDS
@pytest.mark.parametrize(("N", "U", "T"), [(256, 256, 255), (256, 180, 128), (200, 140, 100)])
def test_S11_large_codes_are_exact(backend: str, field: PrimeField, N: int, U: int, T: int) -> None:
    code = MdsCode(field, U, T, ntt.points(field, N))
    rows = draw_elements(field, (U, 2), seed=N)
    shares = code.encode(*np.split(rows, [U - T]))
    assert shares.tolist() == encode_with_integers(code, rows)
    for chosen in (list(range(U)), list(range(N - U, N))[::-1]):
        assert code.decode(chosen, shares[chosen]).tolist() == rows[: U - T].tolist()


@BOTH_FIELDS
def test_S11_long_shares_are_exact_in_every_column(backend: str, field: PrimeField) -> None:
    """Long enough for every block, tile and tail of the loops."""
    code = MdsCode(field, 11, 4, ntt.points(field, 17))
    rows = draw_elements(field, (11, 33_333), seed=8)
    shares = code.encode(*np.split(rows, [7]))
    for column in (0, 31, 32, 4095, 4096, 32_768, 33_332):
        assert shares[:, column : column + 1].tolist() == encode_with_integers(
            code, rows[:, column : column + 1]
        )
    chosen = [16, 0, 9, 3, 12, 5, 7, 1, 14, 2, 10]
    np.testing.assert_array_equal(code.decode(chosen, shares[chosen]), rows[:7])


@given(code=codes(largest=40), seed=st.integers(0, 2**32))
def test_S11_any_U_shares_complete_to_the_same_codeword(
    backend: str, code: MdsCode, seed: int
) -> None:
    """The bijection of seeded mode: completing U shares gives back mask and all other shares."""
    rows = draw_elements(code.field, (code.survivors, 2), seed)
    mask, noise = np.split(rows, [code.pieces])
    shares = code.encode(mask, noise)
    order = np.random.default_rng(seed).permutation(code.clients).tolist()
    chosen, others = order[: code.survivors], order[code.survivors :]
    pieces, rest = code.complete(chosen, shares[chosen], others)
    assert pieces.tolist() == mask.tolist()
    assert rest.tolist() == shares[others].tolist()


# -- the code is MDS and T-private ---------------------------------------------------------------


@pytest.mark.parametrize("q", [7, 11])
def test_S10_every_square_submatrix_that_must_be_invertible_is(q: int) -> None:
    """W is MDS and so are its bottom T rows: every U x U, and every T x T minor of these."""
    field = PrimeField(q)
    N = 5
    for points in itertools.combinations(range(1, q), N):
        for U, T in [(3, 1), (3, 2), (4, 2)]:
            W = MdsCode(field, U, T, points).matrix
            for rows, size in ((W, U), (W[U - T :], T)):
                for columns in itertools.combinations(range(N), size):
                    minor = [int(v) for v in rows[:, list(columns)].reshape(-1)]
                    assert int(flint.nmod_mat(size, size, minor, q).det()) != 0


def test_matrix_from_points_is_the_vandermonde_matrix() -> None:
    code = MdsCode(PrimeField(101), 4, 2, [3, 7, 50, 100, 2])
    expected = [[pow(a, k, 101) for a in (3, 7, 50, 100, 2)] for k in range(4)]
    assert code.matrix.tolist() == expected
    assert (code.clients, code.survivors, code.privacy, code.pieces) == (5, 4, 2, 2)


@pytest.mark.parametrize(
    ("U", "T", "points", "words"),
    [
        (2, 1, [1, 0, 2], "a client at point 0 would receive the first piece of every mask"),
        (2, 1, [1, 101, 2], "must be non-zero and below q"),
        (2, 1, [1, -5, 2], "must be non-zero and below q"),
        (2, 1, [1, 2, 2], "must be distinct"),
        (2, 2, [1, 2, 3], "U = 2 must exceed privacy T = 2"),
        (2, -1, [1, 2, 3], "T = -1 >= 0"),
        (4, 1, [1, 2, 3], "U = 4 exceeds the N = 3 points"),
    ],
)
def test_S01_points_and_sizes_that_break_privacy_or_decoding_are_refused(
    U: int, T: int, points: list[int], words: str
) -> None:
    with pytest.raises(ParameterError) as refusal:
        MdsCode(PrimeField(101), U, T, points)
    assert words in str(refusal.value)


def test_explicit_matrix_decodes_and_refuses_what_is_singular() -> None:
    field = PrimeField(101)
    matrix = field.vector([[1, 2, 3, 1], [4, 5, 6, 4]])  # columns 0 and 3 are equal
    code = MdsCode.from_matrix(field, matrix, privacy=1)
    shares = code.encode(field.vector([[42]]), field.vector([[7]]))
    assert shares.tolist() == [[(42 * a + 7 * b) % 101] for a, b in matrix.T.tolist()]
    assert code.decode([2, 1], shares[[2, 1]]).tolist() == [[42]]
    with pytest.raises(ParameterError, match="not MDS"):
        code.decode([0, 3], shares[[0, 3]])


def test_explicit_matrix_of_size_five_equals_flint() -> None:
    """Elimination with row exchanges: zeros on the diagonal force them."""
    field = DEFAULT_FIELD
    matrix = draw_elements(field, (5, 8), seed=11)
    matrix[0, 0] = matrix[1, 1] = matrix[0, 1] = 0
    code = MdsCode.from_matrix(field, matrix, privacy=2)
    shares = draw_elements(field, (5, 3), seed=12)
    for chosen in ([0, 1, 2, 3, 4], [7, 1, 0, 5, 2]):
        assert code.decode(chosen, shares).tolist() == decode_with_flint(code, chosen, shares)


def test_explicit_matrix_is_copied() -> None:
    matrix = PrimeField(101).vector([[1, 2, 3], [4, 5, 6]])
    code = MdsCode.from_matrix(PrimeField(101), matrix, privacy=1)
    matrix[0, 0] = 99
    assert int(code.matrix[0, 0]) == 1


# -- refusals (S12) ------------------------------------------------------------------------------


@pytest.fixture
def code() -> MdsCode:
    return MdsCode(DEFAULT_FIELD, 4, 2, [1, 2, 3, 4, 5, 6, 7])


GOOD = np.zeros((4, 3), dtype=np.uint32)
TOO_LARGE = np.full((4, 3), DEFAULT_FIELD.modulus, dtype=np.uint32)


@pytest.mark.parametrize(
    ("positions", "shares"),
    [
        ([0, 1, 2, 3], TOO_LARGE),
        ([0, 1, 2, 3], GOOD.astype(np.int64)),
        ([0, 1, 2, 3], GOOD.astype(np.float64)),
        ([0, 1, 2, 3], GOOD.tolist()),
        ([0, 1, 2, 3], GOOD[:3]),
        ([0, 1, 2, 3], GOOD.reshape(-1)),
        ([0, 1, 2, 3], np.asfortranarray(np.ones((4, 3), dtype=np.uint32))),
        ([0, 1, 2, 2], GOOD),
        ([0, 1, 2, 7], GOOD),
        ([0, 1, 2, -1], GOOD),
    ],
)
def test_S12_malformed_shares_are_refused(
    backend: str, code: MdsCode, positions: list[int], shares: Any
) -> None:
    code.decode([0, 1, 2, 3], GOOD)
    with pytest.raises(FieldError):
        code.decode(positions, shares)
    with pytest.raises(FieldError):
        code.complete(positions, shares, [6])
    with pytest.raises(FieldError):
        code.find_inconsistent(positions, shares, np.ones((3, code.check_columns), np.uint32))


@pytest.mark.parametrize("targets", [[7], [-1], [5, 5]])
def test_S12_impossible_targets_are_refused(code: MdsCode, targets: list[int]) -> None:
    with pytest.raises(FieldError, match="positions must"):
        code.complete([0, 1, 2, 3], GOOD, targets)


@pytest.mark.parametrize(
    ("mask", "noise"),
    [
        (GOOD[:3], GOOD[:2]),
        (GOOD[:2], GOOD[:1]),
        (GOOD[:2], GOOD[:2, :2].copy()),
        (TOO_LARGE[:2], GOOD[:2]),
        (GOOD[:2], TOO_LARGE[:2]),
        (GOOD[:2].astype(np.uint64), GOOD[:2]),
        (GOOD[0], GOOD[:2]),
    ],
)
def test_S12_malformed_masks_are_refused(
    backend: str, code: MdsCode, mask: Any, noise: Any
) -> None:
    code.encode(GOOD[:2], GOOD[:2])
    with pytest.raises(FieldError):
        code.encode(mask, noise)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_decoding_takes_exactly_U_shares(code: MdsCode, count: int) -> None:
    shares = np.zeros((count, 3), dtype=np.uint32)
    with pytest.raises(NotEnoughAnswers, match="exactly U = 4 shares"):
        code.decode(list(range(count)), shares)
    with pytest.raises(NotEnoughAnswers, match="exactly U = 4 shares"):
        code.complete(list(range(count)), shares, [])


# -- wrong answers (S14) -------------------------------------------------------------------------


def answered(
    code: MdsCode, count: int, wrong: list[int], seed: int, length: int = 20
) -> tuple[list[int], Elements, Elements]:
    """Positions, answers of which some are wrong in one place, and the server's coefficients."""
    field = code.field
    rows = draw_elements(field, (code.survivors, length), seed)
    shares = code.encode(*np.split(rows, [code.pieces]))
    generator = np.random.default_rng(seed)
    positions = generator.permutation(code.clients)[:count].tolist()
    answers = shares[positions]
    for k in wrong:
        place = int(generator.integers(length))
        error = int(generator.integers(1, field.modulus))
        answers[k, place] = (int(answers[k, place]) + error) % field.modulus
    coefficients = generator.integers(
        0, field.modulus, (length, code.check_columns), dtype=np.uint32
    )
    return positions, answers, coefficients


@BOTH_FIELDS
@pytest.mark.parametrize("liars", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_S14_up_to_half_the_spare_answers_are_named(
    backend: str, field: PrimeField, liars: int, seed: int
) -> None:
    code = MdsCode(field, 9, 4, ntt.points(field, 20))
    for count in range(9 + 2 * liars, 21):
        wrong = np.random.default_rng(seed).permutation(count)[:liars].tolist()
        positions, answers, coefficients = answered(code, count, wrong, seed)
        suspects = code.find_inconsistent(positions, answers, coefficients)
        assert suspects == tuple(sorted(positions[k] for k in wrong))


@BOTH_FIELDS
@pytest.mark.parametrize("wrong", [[0], [9], [4]])
def test_S14_one_spare_answer_detects_but_names_nobody(
    backend: str, field: PrimeField, wrong: list[int]
) -> None:
    code = MdsCode(field, 9, 4, ntt.points(field, 20))
    with pytest.raises(InconsistentAnswers, match="cannot be told apart") as refusal:
        code.find_inconsistent(*answered(code, 10, wrong, seed=3))
    assert refusal.value.suspects == ()


@BOTH_FIELDS
@pytest.mark.parametrize("liars", [3, 4, 6, 13])
def test_S14_too_many_liars_are_detected_and_nobody_is_misnamed(
    backend: str, field: PrimeField, liars: int
) -> None:
    """Uncoordinated lies: see test_reed_solomon for the probability of a wrong name."""
    code = MdsCode(field, 9, 4, ntt.points(field, 20))
    for seed in range(5):
        with pytest.raises(InconsistentAnswers) as refusal:
            code.find_inconsistent(*answered(code, 13, list(range(liars)), seed))
        assert refusal.value.suspects == ()


def test_S14_liars_in_different_columns_are_counted_together(backend: str) -> None:
    """Each digest alone would name one suspect; two suspects exceed what five answers can name."""
    code = MdsCode(PrimeField(101), 3, 1, [1, 2, 3, 4, 5])
    shares = code.encode(*np.split(draw_elements(code.field, (3, 2), 4), [2]))
    shares[0, 0] = (int(shares[0, 0]) + 1) % 101
    shares[1, 1] = (int(shares[1, 1]) + 1) % 101
    coefficients = np.zeros((2, code.check_columns), dtype=np.uint32)
    coefficients[0, ::2] = coefficients[1, 1::2] = 1  # digests look at one column each
    with pytest.raises(InconsistentAnswers):
        code.find_inconsistent([0, 1, 2, 3, 4], shares, coefficients)


def test_S14_exactly_U_answers_prove_nothing(backend: str) -> None:
    code = MdsCode(DEFAULT_FIELD, 9, 4, ntt.points(DEFAULT_FIELD, 20))
    assert code.find_inconsistent(*answered(code, 9, [2], seed=1)) == ()


def test_S14_explicit_matrices_detect_but_cannot_name(backend: str) -> None:
    vandermonde = MdsCode(DEFAULT_FIELD, 3, 1, [1, 2, 3, 4, 5, 6, 7])
    code = MdsCode.from_matrix(DEFAULT_FIELD, vandermonde.matrix, privacy=1)
    positions, answers, coefficients = answered(vandermonde, 7, [], seed=1)
    assert code.find_inconsistent(positions, answers, coefficients) == ()
    positions, answers, coefficients = answered(vandermonde, 7, [2], seed=1)
    with pytest.raises(InconsistentAnswers, match="contradict"):
        code.find_inconsistent(positions, answers, coefficients)


@pytest.mark.parametrize("q", [5, 101, 65537, 2**31 - 2**19 + 1, 2**32 - 5])
def test_S14_enough_random_combinations_are_demanded(q: int) -> None:
    code = MdsCode(PrimeField(q), 2, 1, [1, 2, 3])
    assert code.check_columns >= math.ceil(64 / math.log2(q))
    if q > 2**31:
        assert code.check_columns == 3
    answers = np.zeros((3, 4), dtype=np.uint32)
    for columns in (0, code.check_columns - 1):
        with pytest.raises(ParameterError, match="a lie would pass too easily"):
            code.find_inconsistent([0, 1, 2], answers, np.zeros((4, columns), np.uint32))
