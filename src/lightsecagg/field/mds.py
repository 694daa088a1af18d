"""The T-private MDS code that shares a mask among N clients, Section 4.1, Eq. (5).

A mask is cut into U - T pieces; T pieces of noise are appended; share j is the combination of
these U rows by column j of W. Any U shares determine all rows (W is MDS); any T shares tell
nothing about the mask (the bottom T rows of W, which multiply the noise, are MDS too).

The paper's example, N = 3, T = 1, U = 2: one mask piece z, one noise piece n,

    W = [ -1  2  1 ]     share 1 = -z + n,  share 2 = 2z + n,  share 3 = z + n,
        [  1  1  1 ]     and z = share 2 - share 3.

In general W[k, j] = a_j^k over distinct non-zero points a_j: distinct makes W MDS, non-zero
makes its bottom rows MDS. (A point 0 would hand its owner the first mask piece in the clear.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import FieldError, InconsistentAnswers, NotEnoughAnswers, ParameterError
from lightsecagg.field import ntt
from lightsecagg.field.polynomials import lagrange_coefficients
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.reed_solomon import locate_errors

_BLOCK = 2**16
"""Columns of answers that are combined at once."""


class MdsCode:
    """An (N, U) MDS code over F_q whose last T rows carry noise.

    Build it from points (`MdsCode(field, U, T, points)`) or from an explicit matrix
    (`MdsCode.from_matrix`). Positions 0..N-1 name the columns, that is, the clients.
    """

    def __init__(
        self, field: PrimeField, survivors: int, privacy: int, points: Sequence[int] | Elements
    ) -> None:
        values = tuple(int(point) for point in points)
        _check_points(values, field.modulus)
        _check_shape(survivors, privacy, len(values))
        self.field = field
        self.survivors = survivors
        self.privacy = privacy
        self.points: tuple[int, ...] | None = values
        self._matrix = _vandermonde(field.modulus, values, survivors)
        self._at_standard_points = np.array_equal(values, ntt.points(field, len(values)))

    @classmethod
    def from_matrix(cls, field: PrimeField, matrix: Elements, privacy: int) -> MdsCode:
        """A code with an explicit U x N matrix, such as the paper's example.

        The caller answers for the matrix being MDS and T-private; decoding refuses a singular
        sub-matrix when it meets one.
        """
        field.check(matrix)
        if matrix.ndim != 2:
            raise ParameterError(f"an encoding matrix has two dimensions, not {matrix.ndim}")
        _check_shape(matrix.shape[0], privacy, matrix.shape[1])
        code = cls.__new__(cls)
        code.field, code.survivors, code.privacy = field, matrix.shape[0], privacy
        code.points, code._matrix = None, matrix.copy()
        code._at_standard_points = False
        return code

    @property
    def matrix(self) -> Elements:
        """W, of shape (U, N)."""
        return self._matrix

    @property
    def clients(self) -> int:
        """N: how many shares the code makes."""
        return int(self._matrix.shape[1])

    @property
    def pieces(self) -> int:
        """U - T: how many pieces a mask has."""
        return self.survivors - self.privacy

    def share_length(self, dimension: int) -> int:
        """L = ceil(d / (U - T))."""
        return -(-dimension // self.pieces)

    def encode(self, mask: Elements, noise: Elements) -> Elements:
        """All N shares, as rows, of mask pieces (U - T, L) and noise (T, L)."""
        for part, count in ((mask, self.pieces), (noise, self.privacy)):
            self.field.check_type(part)
            if part.shape != (count, mask.shape[-1]):
                raise FieldError(f"expected shape {(count, mask.shape[-1])}, got {part.shape}")
        return self.encode_rows(np.concatenate([mask, noise]))

    def encode_rows(self, rows: Elements) -> Elements:
        """All N shares, as rows, of the U rows (U, L): mask pieces, and noise below them."""
        self.field.check(rows, (self.survivors, rows.shape[-1]))
        if self._at_standard_points and ntt.evaluation_pays(self.field, self.clients):
            return ntt.evaluate(self.field, rows, self.clients)
        return self.field.matmul(np.ascontiguousarray(self._matrix.T), rows)

    def decode(self, positions: Sequence[int], shares: Elements) -> Elements:
        """The mask pieces (U - T, L) from exactly U shares of distinct positions."""
        self._check_answers(positions, shares)
        if len(positions) != self.survivors:
            raise NotEnoughAnswers(
                f"decoding takes exactly U = {self.survivors} shares, got {len(positions)}"
            )
        if self._at_standard_points and ntt.interpolation_pays(self.field, self.clients):
            known = ntt.Interpolation(self.field, positions, self.clients)
            return known.low_coefficients(shares, self.pieces)
        return self.field.matmul(self._solution(positions)[: self.pieces], shares)

    def complete(
        self,
        positions: Sequence[int],
        shares: Elements,
        targets: Sequence[int],
        with_pieces: bool = True,
    ) -> tuple[Elements, Elements]:
        """Mask pieces and the shares at `targets` that belong to U freely chosen shares.

        Any U shares determine a codeword, so they may be chosen first (as PRG outputs) and the
        mask derived from them: the bijection behind seeded sharing. Without `with_pieces` the
        mask is left for later.
        """
        self._check_answers(positions, shares)
        self._check_positions(targets)
        if len(positions) != self.survivors:
            raise NotEnoughAnswers(
                f"exactly U = {self.survivors} shares fix a codeword, got {len(positions)}"
            )
        count = self.pieces if with_pieces else 0
        if (
            self._at_standard_points
            and ntt.interpolation_pays(self.field, self.clients)
            and set(targets).isdisjoint(positions)
        ):
            known = ntt.Interpolation(self.field, positions, self.clients)
            return known.complete(shares, count, targets)
        solution = self._solution(positions)
        columns = np.ascontiguousarray(self._matrix[:, list(targets)].T)
        rows = np.concatenate([solution[:count], self.field.matmul(columns, solution)])
        derived = self.field.matmul(rows, shares)
        return derived[:count], derived[count:]

    def find_inconsistent(
        self, positions: Sequence[int], answers: Sequence[Elements], coefficients: Elements
    ) -> tuple[int, ...]:
        """Positions whose answers contradict the rest; empty when all n answers agree.

        * `answers`: n rows of L elements each, as a matrix or one by one.
        * `coefficients`: (L, c) uniform field elements drawn *after* the answers are in. A wrong
          answer passes with probability q^-c; c is at least `check_columns`.
        * Up to floor((n - U) / 2) wrong answers are named. More raise `InconsistentAnswers`
          without a name, unless the liars agreed on another codeword.
        * n = U + 1 answers detect one lie and cannot name it; n = U detect nothing.

        A named answer is a suspect, never proof: its sender lied, or a sharer lied to it.
        """
        self._check_positions(positions)
        self.field.check(coefficients)
        if coefficients.ndim != 2 or coefficients.shape[1] < self.check_columns:
            raise ParameterError(
                f"coefficients of shape {coefficients.shape}: a lie would pass too easily with "
                f"fewer than {self.check_columns} columns"
            )
        return self.find_errors(positions, self._combined(positions, answers, coefficients))

    def _combined(
        self, positions: Sequence[int], answers: Sequence[Elements], coefficients: Elements
    ) -> Elements:
        """The answers times the coefficients; by blocks, so that no matrix of them is made."""
        length = len(coefficients)
        for answer in answers:
            self.field.check_type(answer)
            if answer.shape != (length,):
                raise FieldError(f"an answer of shape {answer.shape}, coefficients for {length}")
        values = np.zeros((len(positions), coefficients.shape[1]), dtype=np.uint32)
        for start in range(0, length, _BLOCK):
            rows = np.stack([answer[start : start + _BLOCK] for answer in answers])
            self._check_answers(positions, rows)
            values = self.field.add(
                values, self.field.matmul(rows, coefficients[start : start + _BLOCK])
            )
        return values

    def find_errors(self, positions: Sequence[int], values: Elements) -> tuple[int, ...]:
        """Positions where the rows of `values` (n, c) are off the code; empty if none is.

        Up to floor((n - U) / 2) of them, or `InconsistentAnswers`: the codeword that all other
        rows belong to is then the only one.
        """
        suspects: set[int] = set()
        for column in np.flatnonzero(self.contradictions(positions, values)):
            suspects.update(self._locate(positions, np.ascontiguousarray(values[:, column])))
        if len(suspects) > (len(positions) - self.survivors) // 2:
            raise InconsistentAnswers(_unnamed(len(positions), self.survivors))
        return tuple(sorted(suspects))

    def contradictions(self, positions: Sequence[int], values: Elements) -> NDArray[np.bool_]:
        """Which columns of `values` (n, c) no codeword has; none if n <= U."""
        U = self.survivors
        first, rest = list(positions[:U]), list(positions[U:])
        if not rest:
            return np.zeros(values.shape[1], dtype=np.bool_)
        columns = np.ascontiguousarray(self._matrix[:, rest].T)
        weights = self.field.matmul(columns, self._solution(first))
        predicted = self.field.matmul(weights, np.ascontiguousarray(values[:U]))
        wrong: NDArray[np.bool_] = (predicted != values[U:]).any(axis=0)
        return wrong

    @property
    def check_columns(self) -> int:
        """ceil(64 / log2 q): random combinations that let a wrong answer pass with 2^-64."""
        return -(-64 // (self.field.modulus.bit_length() - 1))

    def _locate(self, positions: Sequence[int], values: Elements) -> list[int]:
        if self.points is None:
            raise InconsistentAnswers(_unnamed(len(positions), self.survivors))
        points = [self.points[position] for position in positions]
        wrong = locate_errors(self.field, points, values, self.survivors)
        if wrong is None:
            raise InconsistentAnswers(_unnamed(len(positions), self.survivors))
        return [positions[k] for k in wrong]

    def _solution(self, positions: Sequence[int]) -> Elements:
        """The (U, U) matrix that turns the shares at `positions` into the encoded rows."""
        if self.points is None:
            return _inverse(self.field, np.ascontiguousarray(self._matrix[:, list(positions)].T))
        points = tuple(self.points[position] for position in positions)
        return lagrange_coefficients(self.field.modulus, points)

    def _check_answers(self, positions: Sequence[int], shares: Elements) -> None:
        self._check_positions(positions)
        self.field.check(shares)
        if shares.ndim != 2 or shares.shape[0] != len(positions):
            raise FieldError(f"{len(positions)} positions for shares of shape {shares.shape}")

    def _check_positions(self, positions: Sequence[int]) -> None:
        if len(set(positions)) != len(positions):
            raise FieldError(f"positions must be distinct: {sorted(positions)}")
        if any(not 0 <= position < self.clients for position in positions):
            raise FieldError(f"positions must lie in 0..{self.clients - 1}: {sorted(positions)}")


def _check_shape(survivors: int, privacy: int, clients: int) -> None:
    if not 0 <= privacy < survivors:
        raise ParameterError(f"survivors U = {survivors} must exceed privacy T = {privacy} >= 0")
    if survivors > clients:
        raise ParameterError(f"survivors U = {survivors} exceeds the N = {clients} points")


def _check_points(points: tuple[int, ...], modulus: int) -> None:
    if any(not 0 < point < modulus for point in points):
        raise ParameterError(
            "evaluation points must be non-zero and below q: a client at point 0 would receive "
            "the first piece of every mask in the clear"
        )
    if len(set(points)) != len(points):
        raise ParameterError("evaluation points must be distinct")


def _unnamed(answers: int, survivors: int) -> str:
    return (
        f"the {answers} answers contradict each other and cannot be told apart "
        f"(naming e liars takes U + 2e answers, U = {survivors})"
    )


@lru_cache(maxsize=8)
def _vandermonde(modulus: int, points: tuple[int, ...], rows: int) -> Elements:
    """W[k, j] = a_j^k."""
    bases = np.array(points, dtype=np.uint64)
    matrix = np.ones((rows, len(points)), dtype=np.uint64)
    for k in range(1, rows):
        matrix[k] = matrix[k - 1] * bases % modulus
    result = matrix.astype(np.uint32)
    result.setflags(write=False)
    return result


def _inverse(field: PrimeField, matrix: Elements) -> Elements:
    """The inverse of a small square matrix by Gauss-Jordan elimination."""
    size, q = len(matrix), np.uint64(field.modulus)
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint32)], axis=1).astype(np.uint64)
    for column in range(size):
        candidates = np.flatnonzero(work[column:, column])
        if not candidates.size:
            raise ParameterError("the encoding matrix is not MDS: these shares do not decode")
        pivot = column + int(candidates[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = work[column] * np.uint64(field.inverse(int(work[column, column]))) % q
        factors = work[:, column].copy()
        factors[column] = 0
        work = (work + (q - factors)[:, None] * work[column] % q) % q
    return np.ascontiguousarray(work[:, size:]).astype(np.uint32)
