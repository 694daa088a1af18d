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

from functools import lru_cache

import numpy as np

from lightsecagg.errors import FieldError, ParameterError
from lightsecagg.field import kernels
from lightsecagg.field.prime import Elements, PrimeField

# Points outside a transform lie in cosets of a subgroup of at most this order: evaluating a
# polynomial of U coefficients on a coset of order n takes U + n^2 products instead of n * U.
_LARGEST_COSET = 16


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
        return _leaves(field, transform_size(count))[:count].copy()
    order = coset_order(field)
    cosets = -(-count // order)
    generator = primitive_root(field.modulus)
    subgroup = powers(field, pow(generator, (field.modulus - 1) // order, field.modulus), order)
    representatives = powers(field, generator, cosets)
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
def _leaves(field: PrimeField, size: int) -> Elements:
    """a_0, ..., a_(M-1), by doubling."""
    generator = primitive_root(field.modulus)
    leaves = np.ones(1, dtype=np.uint32)
    while len(leaves) < size:
        root = pow(generator, (field.modulus - 1) // (2 * len(leaves)), field.modulus)
        leaves = np.concatenate([leaves, field.multiply(leaves, np.array([root], dtype=np.uint32))])
    leaves.flags.writeable = False
    return leaves


@lru_cache(maxsize=64)
def _inverse_leaves(field: PrimeField, size: int) -> Elements:
    inverses = field.inverses(_leaves(field, size))
    inverses.flags.writeable = False
    return inverses


def forward(field: PrimeField, coefficients: Elements, leaves: int) -> Elements:
    """Evaluate column polynomials at the first `leaves` points.

    `coefficients` has shape (rows, L), row k belonging to x^k; returns shape (leaves, L).
    """
    size = _checked_size(field, coefficients, leaves)
    return kernels.active().ntt_forward(coefficients, leaves, _leaves(field, size), field.modulus)


def inverse(field: PrimeField, values: Elements, coefficients: int) -> Elements:
    """The low coefficients of the column polynomials that take `values` at the first leaves.

    `values` has shape (rows, L), row j belonging to a_j. The polynomials have degree < M and are
    zero at the leaves beyond, where M is the smallest power of two >= rows and coefficients;
    returns shape (coefficients, L).
    """
    size = _checked_size(field, values, coefficients)
    scale = np.full(len(values), field.inverse(size), dtype=np.uint32)
    return kernels.active().ntt_inverse(
        values,
        np.arange(len(values), dtype=np.int64),
        scale,
        coefficients,
        _inverse_leaves(field, size),
        field.modulus,
    )


def _checked_size(field: PrimeField, rows: Elements, others: int) -> int:
    field.check_type(rows)
    if rows.ndim != 2 or len(rows) < 1 or others < 1:
        raise FieldError(
            f"a transform maps at least one row of a matrix to at least one row, "
            f"not shape {rows.shape} to {others} rows"
        )
    count = max(len(rows), others)
    if not supports(field, count):
        raise FieldError(
            f"F_q with q = {field.modulus} has no transform of size {transform_size(count)}"
        )
    return transform_size(count)
