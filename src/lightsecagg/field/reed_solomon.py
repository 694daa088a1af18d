"""Which values of a Reed-Solomon codeword are wrong (Gao's decoder).

The answers of the recovery phase, combined by one random vector, are the values of a polynomial
of degree below U at the responders' points, except where somebody lied. With n values and at
most floor((n - U) / 2) lies there is exactly one such polynomial, and it is found by stopping
Euclid's algorithm half-way. Only run after a cheap check has found a contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightsecagg.field.polynomials import (
    Polynomial,
    divide,
    evaluate,
    interpolate,
    multiply,
    subtract,
    vanishing,
    zero,
)
from lightsecagg.field.prime import Elements, PrimeField


def locate_errors(
    field: PrimeField, points: Sequence[int], values: Elements, dimension: int
) -> list[int] | None:
    """Indices of the wrong values, or None when there are too many to tell.

    * `points` are distinct; `dimension` (U) bounds the degree of the true polynomial from above.
    """
    at = tuple(points)
    stop = (len(at) + dimension + 1) // 2
    everything = vanishing(field.modulus, at)
    message = _half_euclid(field, everything, interpolate(field, at, values), stop)
    if message.size > dimension:
        return None
    true_values = evaluate(message, np.array(at, dtype=np.uint64), field.modulus)
    wrong = np.flatnonzero(true_values != values)
    # Whatever the division left over: a codeword as near as this is the only one.
    if len(wrong) > (len(at) - dimension) // 2:
        return None
    return [int(k) for k in wrong]


def _half_euclid(field: PrimeField, high: Polynomial, low: Polynomial, degree: int) -> Polynomial:
    """Euclid on (high, low) until the degree falls below `degree`; then over the cofactor."""
    cofactor_high, cofactor_low = zero(), np.ones(1, dtype=np.uint64)
    while low.size - 1 >= degree:
        quotient, rest = divide(field, high, low)
        product = multiply(quotient, cofactor_low, field.modulus)
        high, low = low, rest
        cofactor_high, cofactor_low = (
            cofactor_low,
            subtract(cofactor_high, product, field.modulus),
        )
    quotient, _ = divide(field, low, cofactor_low)
    return quotient
