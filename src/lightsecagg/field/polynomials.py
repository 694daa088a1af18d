"""Polynomials over F_q: coefficients in uint64 arrays, lowest power first, no leading zeros.

For code coefficients (hundreds of entries), not for models: every step is one NumPy operation on
a whole row. Values below 2^32 make each product and sum fit 64 bits.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from lightsecagg.field.prime import Elements, PrimeField

Polynomial = NDArray[np.uint64]


def zero() -> Polynomial:
    """The polynomial without coefficients."""
    return np.zeros(0, dtype=np.uint64)


def vanishing(modulus: int, points: tuple[int, ...]) -> Polynomial:
    """prod (x - a_j): blocks of points side by side, then a tree of products."""
    q, count = np.uint64(modulus), len(points)
    width = max(1, isqrt(count))
    blocks = max(1, -(-count // width))
    roots = np.zeros((blocks, width), dtype=np.uint64)
    roots.reshape(-1)[:count] = points
    factors = np.zeros((blocks, width + 1), dtype=np.uint64)
    factors[:, 0] = 1
    for k in range(width):
        scaled = factors[:, : k + 2] * ((q - roots[:, k : k + 1]) % q) % q
        scaled[:, 1:] += factors[:, : k + 1]  # x * product - point * product
        factors[:, : k + 2] = scaled % q
    products = list(factors)
    while len(products) > 1:
        pairs = zip(products[::2], products[1::2], strict=False)
        odd = products[len(products) // 2 * 2 :]
        products = [multiply(a, b, modulus) for a, b in pairs] + odd
    padding = blocks * width - count  # points at zero: each of them is a factor x
    return products[0][padding:]


@lru_cache(maxsize=16)
def lagrange_coefficients(modulus: int, points: tuple[int, ...]) -> Elements:
    """The matrix that turns values at `points` into coefficients, in O(U^2).

    Column j holds the Lagrange polynomial of point j: the quotient P(x) / (x - a_j), by synthetic
    division for all j at once, over P'(a_j). It is the inverse of the Vandermonde matrix.
    """
    q, size = np.uint64(modulus), len(points)
    a = np.array(points, dtype=np.uint64)
    product = vanishing(modulus, points)
    quotient = np.empty((size, size), dtype=np.uint64)
    quotient[size - 1] = 1
    for k in range(size - 1, 0, -1):
        quotient[k - 1] = (product[k] + a * quotient[k] % q) % q
    derivative = np.zeros(size, dtype=np.uint64)  # P'(a_j) is the quotient of j at a_j
    for k in range(size - 1, -1, -1):
        derivative = (derivative * a % q + quotient[k]) % q
    scale = PrimeField(modulus).inverses(derivative.astype(np.uint32)).astype(np.uint64)
    result = (quotient * scale % q).astype(np.uint32)
    result.setflags(write=False)  # cached: every caller sees the same array
    return result


def interpolate(field: PrimeField, points: tuple[int, ...], values: Elements) -> Polynomial:
    """The polynomial of degree below n through n points."""
    matrix = lagrange_coefficients(field.modulus, points)
    return trim(field.matmul(matrix, values.reshape(-1, 1))[:, 0].astype(np.uint64))


def trim(polynomial: Polynomial) -> Polynomial:
    """Without leading zeros."""
    nonzero = np.flatnonzero(polynomial)
    return polynomial[: int(nonzero[-1]) + 1] if nonzero.size else zero()


def evaluate(polynomial: Polynomial, points: Polynomial, modulus: int) -> Polynomial:
    """The values at all points, by Horner's rule."""
    result = np.zeros(points.size, dtype=np.uint64)
    for coefficient in polynomial[::-1]:
        result = (result * points + coefficient) % modulus
    return result


def multiply(a: Polynomial, b: Polynomial, modulus: int) -> Polynomial:
    """a * b, by Karatsuba over 16-bit limbs: below 2^19 coefficients the floats are exact."""
    if not a.size or not b.size:
        return zero()
    q = np.uint64(modulus)
    a0, a1 = (a & 0xFFFF).astype(np.float64), (a >> 16).astype(np.float64)
    b0, b1 = (b & 0xFFFF).astype(np.float64), (b >> 16).astype(np.float64)
    lows, highs = np.convolve(a0, b0), np.convolve(a1, b1)
    middle = np.convolve(a0 + a1, b0 + b1) - lows - highs
    out = lows.astype(np.uint64) % q
    for limb, shift in ((middle, 16), (highs, 32)):
        out += limb.astype(np.uint64) % q * np.uint64((1 << shift) % modulus) % q
    return trim(out % q)


def subtract(a: Polynomial, b: Polynomial, modulus: int) -> Polynomial:
    """a - b."""
    out = np.zeros(max(a.size, b.size), dtype=np.uint64)
    out[: a.size] = a
    out[: b.size] += np.uint64(modulus) - b
    return trim(out % modulus)


def divide(
    field: PrimeField, numerator: Polynomial, denominator: Polynomial
) -> tuple[Polynomial, Polynomial]:
    """Quotient and remainder."""
    q = field.modulus
    rest = numerator.copy()
    steps = numerator.size - denominator.size + 1
    if steps <= 0:
        return zero(), trim(rest)
    lead = np.uint64(field.inverse(int(denominator[-1])))
    quotient = np.zeros(steps, dtype=np.uint64)
    for k in range(steps - 1, -1, -1):
        quotient[k] = rest[k + denominator.size - 1] * lead % q
        part = rest[k : k + denominator.size]
        part[:] = (part + (np.uint64(q) - quotient[k]) * denominator % q) % q
    return trim(quotient), trim(rest)
