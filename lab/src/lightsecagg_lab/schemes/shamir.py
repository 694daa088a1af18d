"""Shamir's threshold sharing of short secrets, many at once: what SecAgg does with b_i and sk_i.

A secret s becomes the constant term of a random polynomial of degree t - 1; the share of client j
is its value at the client's point a_j. Any t shares give s back, t - 1 tell nothing about it:

    shares = V (s; noise),  V[j, k] = a_j^k          s = sum_j l_j(0) share_j

All secrets ride in one matrix product, and the Lagrange coefficients l_j(0) are computed once per
set of responders. A secret of 32 bytes is cut into sixteen 16-bit limbs, each an element of F_q;
whoever rebuilds a limb that does not fit 16 bits holds a wrong share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import FieldError, InconsistentAnswers, NotEnoughAnswers, ParameterError
from lightsecagg.field.prime import Elements, PrimeField

Bytes = NDArray[np.uint8]

SECRET_BYTES = 32
"""Bytes in a secret."""

LIMBS = 16
"""Field elements that stand for one secret."""

_LIMB_LIMIT = 1 << 16
_LIMB = np.dtype("<u2")


def noise_shape(secrets: int, threshold: int) -> tuple[int, int]:
    """The shape of the uniform noise that `share` needs for that many secrets."""
    return threshold - 1, secrets * LIMBS


def share(field: PrimeField, secrets: Bytes, points: Sequence[int], noise: Elements) -> Elements:
    """Shares of all `secrets`, of shape (points, secrets, 16), any t of which rebuild them.

    - `secrets` is a uint8 array of shape (m, 32).
    - `points` are distinct and non-zero, one per recipient, at least t of them.
    - `noise` holds (t - 1, 16 m) fresh uniform elements (`noise_shape`): its rows set t.
    - The modulus exceeds 2^16.
    """
    elements = _to_limbs(field, secrets)
    shares = share_elements(field, elements, points, noise)
    return shares.reshape(len(points), len(secrets), LIMBS)


def reconstruct(
    field: PrimeField, shares: Elements, points: Sequence[int], threshold: int
) -> Bytes:
    """The secrets, of shape (m, 32), from exactly t shares of each, of shape (t, m, 16)."""
    _check_large(field)
    if shares.ndim != 3 or shares.shape[2] != LIMBS:
        raise FieldError(f"shares have shape (t, secrets, {LIMBS}), not {shares.shape}")
    rows = shares.reshape(len(shares), shares.shape[1] * LIMBS)
    limbs = reconstruct_elements(field, rows, points, threshold)
    wrong = np.flatnonzero(limbs >= _LIMB_LIMIT)
    if wrong.size:
        raise InconsistentAnswers(
            f"secret {wrong[0] // LIMBS} does not rebuild: at least one of its {threshold} shares "
            "is wrong"
        )
    return limbs.astype(_LIMB).view(np.uint8).reshape(-1, SECRET_BYTES)


def share_elements(
    field: PrimeField, secrets: Elements, points: Sequence[int], noise: Elements
) -> Elements:
    """Shares, as rows, of a vector of field elements; t - 1 is the number of rows of `noise`."""
    field.check(secrets)
    field.check(noise)
    if secrets.ndim != 1 or noise.ndim != 2 or noise.shape[1] != secrets.size:
        raise FieldError(
            f"{secrets.shape} secrets need noise of shape (t - 1, {secrets.size}), "
            f"not {noise.shape}"
        )
    threshold = noise.shape[0] + 1
    if len(points) < threshold:
        raise ParameterError(f"threshold {threshold} is out of reach of {len(points)} shares")
    coefficients = np.concatenate([secrets[np.newaxis], noise])
    return field.matmul(_powers(field, points, threshold), coefficients)


def reconstruct_elements(
    field: PrimeField, shares: Elements, points: Sequence[int], threshold: int
) -> Elements:
    """The vector of secrets from exactly t rows of shares."""
    field.check(shares)
    if shares.ndim != 2 or len(shares) != len(points):
        raise FieldError(f"{len(points)} points for shares of shape {shares.shape}")
    if threshold < 1:
        raise ParameterError(f"threshold {threshold} must be at least 1")
    if len(points) < threshold:
        raise NotEnoughAnswers(f"{len(points)} shares cannot reach the threshold {threshold}")
    if len(points) > threshold:
        raise ParameterError(
            f"rebuilding takes exactly {threshold} shares, not {len(points)}: choose some"
        )
    secrets: Elements = field.matmul(lagrange_at_zero(field, points)[np.newaxis], shares)[0]
    return secrets


def lagrange_at_zero(field: PrimeField, points: Sequence[int]) -> Elements:
    """l_j(0) = prod over m != j of a_m / (a_m - a_j), for all j, in O(t^2)."""
    a = _check_points(field, points)
    q = np.uint64(field.modulus)
    factors = (a[np.newaxis, :] + (q - a[:, np.newaxis])) % q
    np.fill_diagonal(factors, a)  # so that row j is a_j * prod (a_m - a_j)
    denominators = field.inverses(_row_products(factors, q).astype(np.uint32))
    numerator = _row_products(a[np.newaxis, :], q)
    return (denominators * numerator % q).astype(np.uint32)


def _row_products(matrix: NDArray[np.uint64], q: np.uint64) -> NDArray[np.uint64]:
    """The product of each row mod q, by halving."""
    while matrix.shape[1] > 1:
        half = matrix.shape[1] // 2
        folded = matrix[:, :half] * matrix[:, half : 2 * half] % q
        matrix = np.concatenate([folded, matrix[:, 2 * half :]], axis=1)
    return matrix[:, 0]


def _powers(field: PrimeField, points: Sequence[int], threshold: int) -> Elements:
    """V[j, k] = a_j^k for k < t."""
    a = _check_points(field, points)
    powers = np.ones((len(a), threshold), dtype=np.uint64)
    for k in range(1, threshold):
        powers[:, k] = powers[:, k - 1] * a % np.uint64(field.modulus)
    return powers.astype(np.uint32)


def _check_points(field: PrimeField, points: Sequence[int]) -> NDArray[np.uint64]:
    # A share at point 0 would be the secret itself.
    if not all(0 < point < field.modulus for point in points):
        raise ParameterError(f"points must be in [1, q) for q = {field.modulus}")
    if len(set(points)) != len(points):
        raise ParameterError("two shares have the same point")
    return np.array(points, dtype=np.uint64)


def _to_limbs(field: PrimeField, secrets: NDArray[Any]) -> Elements:
    _check_large(field)
    if secrets.dtype != np.uint8 or secrets.ndim != 2 or secrets.shape[1] != SECRET_BYTES:
        raise FieldError(
            f"secrets are bytes of shape (m, {SECRET_BYTES}), "
            f"not {secrets.dtype} of shape {secrets.shape}"
        )
    return np.ascontiguousarray(secrets).view(_LIMB).astype(np.uint32).reshape(-1)


def _check_large(field: PrimeField) -> None:
    if field.modulus < _LIMB_LIMIT:
        raise ParameterError(
            f"sharing byte strings needs a modulus above 2^16, not q = {field.modulus}"
        )
