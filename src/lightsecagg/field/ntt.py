"""Number-theoretic transform over F_q, and the evaluation points of the code that it serves.

The transform walks down a product tree. Its root is x^M - 1, M a power of two that divides q - 1;
a node x^m - c has the children x^(m/2) - s and x^(m/2) + s with s^2 = c; the leaf of number j is
x - a_j. Reducing a polynomial down to the leaves evaluates it at all points, so the input is in
natural order, the output in leaf order, and node i of *every* level splits with s = a_(2i):

    a_0 = 1,  a_1 = -1,  a_2 = i,  a_3 = -i,  ...   a_(2^k + j) = a_j * (a root of order 2^(k+1))

The sequence does not depend on M. Both directions are pruned: rows that are zero and leaves that
nobody asked for cost little, so that N clients need no padding to a power of two.

Transforms run along the first axis of a (size, L) array: the L columns are what is vectorised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from lightsecagg.errors import FieldError, ParameterError
from lightsecagg.field import kernels
from lightsecagg.field.polynomials import vanishing
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.reference import Positions

# Points outside a transform lie in cosets of a subgroup of at most this order: evaluating a
# polynomial of U coefficients on a coset of order n takes U + n^2 products instead of n * U.
_LARGEST_COSET = 16

# Measured on one core with AVX2. BLAS beats transforms written in NumPy at every size.
_FEWEST_FOR_COSETS = 64
_FEWEST_FOR_INTERPOLATION = 128


def transform_size(count: int) -> int:
    """M: the smallest power of two >= count."""
    return 1 << max(count - 1, 0).bit_length()


def supports(field: PrimeField, count: int) -> bool:
    """Whether `count` points fit into a transform over this field."""
    return count >= 1 and (field.modulus - 1) % transform_size(count) == 0


def points(field: PrimeField, count: int) -> Elements:
    """The first `count` evaluation points, distinct and non-zero; part of the wire format.

    - Where `supports(field, count)`: leaves 0, 1, ... of the product tree above.
    - Elsewhere, such as over 2^32 - 5: cosets of the subgroup of order n, the largest divisor of
      q - 1 up to 16. Point c * n + i is g^c * h^i, with g the least primitive root and h of
      order n.
    """
    if not 1 <= count < field.modulus:
        raise ParameterError(
            f"F_q has q - 1 = {field.modulus - 1} non-zero points; cannot take {count}"
        )
    if supports(field, count):
        return all_leaves(field, transform_size(count))[:count].copy()
    return coset_points(field, count)


def coset_points(field: PrimeField, count: int) -> Elements:
    """The first `count` points of the cosets g^c H, H the subgroup of order `coset_order`."""
    order, generator = coset_order(field), primitive_root(field.modulus)
    subgroup = powers(field, pow(generator, (field.modulus - 1) // order, field.modulus), order)
    representatives = powers(field, generator, -(-count // order))
    return field.multiply(representatives[:, None], subgroup).reshape(-1)[:count].copy()


def coset_order(field: PrimeField) -> int:
    """n: the largest divisor of q - 1 up to 16."""
    return max(n for n in range(1, _LARGEST_COSET + 1) if (field.modulus - 1) % n == 0)


def powers(field: PrimeField, base: int, count: int) -> Elements:
    """base^0, ..., base^(count - 1)."""
    out = [1] * count
    for k in range(1, count):
        out[k] = out[k - 1] * base % field.modulus
    return np.array(out, dtype=np.uint32)


@lru_cache(maxsize=64)
def primitive_root(modulus: int) -> int:
    """The least generator of the multiplicative group of F_q."""
    factors = _prime_factors(modulus - 1)
    for candidate in range(2, modulus):
        if all(pow(candidate, (modulus - 1) // p, modulus) != 1 for p in factors):
            return candidate
    raise FieldError(f"{modulus} is not an odd prime")


def _prime_factors(number: int) -> list[int]:
    factors, p = [], 2
    while p * p <= number:
        if number % p == 0:
            factors.append(p)
            while number % p == 0:
                number //= p
        p += 1
    return [*factors, number] if number > 1 else factors


@lru_cache(maxsize=64)
def all_leaves(field: PrimeField, size: int) -> Elements:
    """a_0, ..., a_(M-1), by doubling."""
    generator = primitive_root(field.modulus)
    leaves = np.ones(1, dtype=np.uint32)
    while len(leaves) < size:
        root = pow(generator, (field.modulus - 1) // (2 * len(leaves)), field.modulus)
        leaves = np.concatenate([leaves, field.multiply(leaves, np.array([root], dtype=np.uint32))])
    leaves.flags.writeable = False
    return leaves


@lru_cache(maxsize=64)
def inverse_leaves(field: PrimeField, size: int) -> Elements:
    """1 / a_0, ..., 1 / a_(M-1)."""
    inverses = field.inverses(all_leaves(field, size))
    inverses.flags.writeable = False
    return inverses


def evaluate(field: PrimeField, coefficients: Elements, count: int) -> Elements:
    """The column polynomials' values at the `points` of the rule above; degree below `count`."""
    if len(coefficients) > count:
        raise FieldError(f"{len(coefficients)} coefficients for only {count} points")
    if supports(field, count):
        return forward(field, coefficients, count)
    return evaluate_on_cosets(field, coefficients, count)


def evaluation_pays(field: PrimeField, count: int) -> bool:
    """Whether `evaluate` beats a matrix product here; measured, never a matter of correctness."""
    if kernels.backend() != "native":
        return False
    return supports(field, count) or count >= _FEWEST_FOR_COSETS


def interpolation_pays(field: PrimeField, count: int) -> bool:
    """Whether `Interpolation` beats a matrix product here."""
    return (
        kernels.backend() == "native"
        and supports(field, count)
        and count >= _FEWEST_FOR_INTERPOLATION
    )


def forward(field: PrimeField, coefficients: Elements, leaves: int) -> Elements:
    """Evaluate column polynomials at the first `leaves` points.

    `coefficients` has shape (rows, L), row k belonging to x^k; returns shape (leaves, L).
    """
    size = _checked_size(field, coefficients, leaves)
    return kernels.active().ntt_forward(
        coefficients, None, _positions(range(leaves)), None, all_leaves(field, size), field.modulus
    )


def inverse(field: PrimeField, values: Elements, coefficients: int) -> Elements:
    """The low coefficients of the column polynomials that take `values` at the first leaves.

    `values` has shape (rows, L), row j belonging to a_j. The polynomials have degree < M and are
    zero at the leaves beyond, where M is the smallest power of two >= rows and coefficients;
    returns shape (coefficients, L).
    """
    size = _checked_size(field, values, coefficients)
    return kernels.active().ntt_inverse(
        values,
        _positions(range(len(values))),
        np.full(len(values), field.inverse(size), dtype=np.uint32),
        coefficients,
        inverse_leaves(field, size),
        field.modulus,
    )


def _checked_size(field: PrimeField, rows: Elements, others: int) -> int:
    field.check_type(rows)
    if rows.ndim != 2 or len(rows) < 1 or others < 1:
        raise FieldError(
            f"a transform maps at least one row of a matrix to at least one row, "
            f"not shape {rows.shape} to {others} rows"
        )
    return _size(field, max(len(rows), others))


def _size(field: PrimeField, count: int) -> int:
    if not supports(field, count):
        raise FieldError(
            f"F_q with q = {field.modulus} has no transform of size {transform_size(count)}"
        )
    return transform_size(count)


def _positions(numbers: Iterable[int]) -> Positions:
    return np.fromiter(numbers, dtype=np.int64)


_COLUMNS = 2**11
"""Columns that are completed together: their transform, a row for each leaf, is larger than what it
is made from and what is made of it, and the system clears new memory more slowly than it is filled.
"""


class Interpolation:
    """Column polynomials f of degree below U from their values at any U leaves.

    Let s(x) be the product of x - a_p over the U known leaves p, and e(x) = (x^M - 1) / s(x) that
    over all others. Then f * e has degree below M, vanishes at the unknown leaves, and takes
    f(a_p) * e(a_p) at the known ones: one inverse transform finds its coefficients F. From these

    * the low coefficients of f are those of -s * F, because 1 / e = s / (x^M - 1) = -s mod x^M;
    * f at an unknown leaf m is (f * e)'(a_m) / e'(a_m), with F' by one forward transform.

    By the rule for derivatives, e(a_p) = M / (a_p s'(a_p)) and e'(a_m) = M / (a_m s(a_m)).
    """

    def __init__(self, field: PrimeField, positions: Sequence[int], clients: int) -> None:
        """`positions`: the U distinct known leaves, among the first `clients` leaves."""
        self._field = field
        self._size = _size(field, clients)
        self._positions = _positions(positions)
        known = all_leaves(field, self._size)[self._positions]
        s = vanishing(field.modulus, tuple(known.tolist()))
        self._s = s.astype(np.uint32)
        derivative = s[1:] * np.arange(1, len(s), dtype=np.uint64) % np.uint64(field.modulus)
        values = forward(field, derivative.astype(np.uint32)[:, None], self._size)[:, 0]
        self._weights = field.inverses(field.multiply(known, values[self._positions]))

    def low_coefficients(self, values: Elements, count: int) -> Elements:
        """The coefficients of x^0, ..., x^(count - 1) as rows, for count <= U."""
        return self._divide_by_e(self._times_e(values, count), self._toeplitz(count))

    def complete(
        self, values: Elements, count: int, targets: Sequence[int]
    ) -> tuple[Elements, Elements]:
        """The low coefficients, and the values at some of the unknown leaves."""
        if not set(targets).isdisjoint(self._positions.tolist()):
            raise FieldError("the targets must not be among the known leaves")
        if not targets:
            return self.low_coefficients(values, count), values[:0]
        field, size = self._field, self._size
        self._check_values(values)
        leaves, at = all_leaves(field, size), _positions(targets)
        s_at = forward(field, self._s[:, None], size)[list(targets), 0]
        scale = field.multiply(s_at, np.array([field.inverse(size)], dtype=np.uint32))
        derivative = np.arange(size, dtype=np.uint32)
        toeplitz, columns = self._toeplitz(count), values.shape[1]
        low = np.empty((count, columns), dtype=np.uint32)
        others = np.empty((len(targets), columns), dtype=np.uint32)
        for start in range(0, columns, _COLUMNS):
            part = slice(start, start + _COLUMNS)
            F = self._times_e(np.ascontiguousarray(values[:, part]), size)
            low[:, part] = self._divide_by_e(F[:count], toeplitz)
            others[:, part] = kernels.active().ntt_forward(
                F, derivative, at, scale, leaves, field.modulus
            )
        return low, others

    def _check_values(self, values: Elements) -> None:
        self._field.check_type(values)
        if values.ndim != 2 or len(values) != len(self._positions):
            raise FieldError(f"{len(self._positions)} leaves for values of shape {values.shape}")

    def _times_e(self, values: Elements, coefficients: int) -> Elements:
        """The low coefficients of f * e."""
        self._check_values(values)
        return kernels.active().ntt_inverse(
            values,
            self._positions,
            self._weights,
            coefficients,
            inverse_leaves(self._field, self._size),
            self._field.modulus,
        )

    def _toeplitz(self, count: int) -> list[Elements]:
        """The triangular matrix of -s mod x^count, in bands of rows that skip half the zeros."""
        shifted = np.zeros(2 * count, dtype=np.uint32)  # -s_0, -s_1, ... behind zeros
        low = self._s[:count]
        shifted[count : count + len(low)] = self._field.subtract(np.zeros_like(low), low)
        row, column = np.ogrid[:count, :count]
        whole = shifted[count + row - column]
        band = max(-(-count // 4), 8)
        return [
            np.ascontiguousarray(whole[start : start + band, : start + band])
            for start in range(0, count, band)
        ]

    def _divide_by_e(self, F: Elements, toeplitz: list[Elements]) -> Elements:
        """-s * F mod x^count."""
        out, start = np.empty_like(F), 0
        for band in toeplitz:
            rows, columns = band.shape
            out[start : start + rows] = self._field.matmul(band, F[:columns])
            start += rows
        return out


def evaluate_on_cosets(field: PrimeField, coefficients: Elements, count: int) -> Elements:
    """Evaluate column polynomials at the first `count` points where these lie in cosets.

    On the coset b H of order n, x^n is the constant c = b^n, so first fold the polynomial to
    degree below n (one product with a Vandermonde matrix in c for all cosets and powers at once),
    then transform the n remaining coefficients (one n x n product per coset).
    """
    field.check_type(coefficients)
    order, L = coset_order(field), coefficients.shape[1]
    folds = -(-len(coefficients) // order)
    if len(coefficients) < folds * order:
        padding = np.zeros((folds * order - len(coefficients), L), dtype=np.uint32)
        coefficients = np.concatenate([coefficients, padding])
    cosets = coset_points(field, -(-count // order) * order).reshape(-1, order)
    constants = _vandermonde(field, np.ascontiguousarray(cosets[:, 0]), order + 1)[:, order]
    folded = field.matmul(
        _vandermonde(field, constants, folds), coefficients.reshape(folds, order * L)
    )
    out = np.empty((count, L), dtype=np.uint32)
    for number, rows in enumerate(folded.reshape(len(cosets), order, L)):
        part = slice(number * order, min((number + 1) * order, count))
        coset = cosets[number, : part.stop - part.start]
        out[part] = field.matmul(_vandermonde(field, coset, order), rows)
    return out


def _vandermonde(field: PrimeField, bases: Elements, count: int) -> Elements:
    """Row j holds base_j^0, ..., base_j^(count - 1)."""
    matrix = np.ones((len(bases), count), dtype=np.uint32)
    for k in range(1, count):
        matrix[:, k] = field.multiply(matrix[:, k - 1], bases)
    return matrix
