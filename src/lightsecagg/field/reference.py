"""The hot loops in NumPy and BLAS: the fallback without a compiler, and the oracle with one.

Every function here has a twin of the same name and contract in the native library. Arrays are
C-contiguous uint32 with elements below q unless said otherwise; callers have checked that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.uint32]
Totals = NDArray[np.uint64]
Positions = NDArray[np.int64]
Floats = NDArray[np.float32] | NDArray[np.float64]

_BLOCK = 1 << 15  # elements per block: the temporaries of one block stay in the second-level cache


def add(a: Elements, b: Elements, q: int) -> Elements:
    """a + b mod q."""
    total = a.astype(np.uint64) + b
    return np.where(total >= q, total - np.uint64(q), total).astype(np.uint32)


def subtract(a: Elements, b: Elements, q: int) -> Elements:
    """a - b mod q."""
    difference = a.astype(np.int64) - b
    return np.where(difference < 0, difference + q, difference).astype(np.uint32)


def accumulate(totals: Totals, vectors: Sequence[Elements]) -> None:
    """totals += sum of vectors, without reduction; the caller bounds the number of vectors."""
    for start in range(0, totals.size, _BLOCK):
        block = totals[start : start + _BLOCK]
        for vector in vectors:
            np.add(block, vector[start : start + _BLOCK], out=block)


def weighted_accumulate(
    totals: Totals, vectors: Sequence[Elements], weights: Sequence[int]
) -> None:
    """totals += sum of weight * vector, without reduction; weights below 2^32.

    The caller makes sure that no total can exceed a 64-bit word.
    """
    for start in range(0, totals.size, _BLOCK):
        block = totals[start : start + _BLOCK]
        for weight, vector in zip(weights, vectors, strict=True):
            np.add(block, vector[start : start + _BLOCK] * np.uint64(weight), out=block)


def reduce(totals: Totals, q: int) -> Elements:
    """totals mod q."""
    return (totals % np.uint64(q)).astype(np.uint32)


def matmul(a: Elements, b: Elements, q: int) -> Elements:
    """a @ b mod q for a of shape (m, k) and b of shape (k, n), exactly.

    Two 16-bit limbs per operand make every partial product less than 2^32, so a float64 holds
    sums of up to 2^21 of them; longer inner dimensions are cut.
    """
    out = np.zeros((a.shape[0], b.shape[1]), dtype=np.uint32)
    for start in range(0, a.shape[1], 1 << 20):
        part = _matmul_limbs(a[:, start : start + (1 << 20)], b[start : start + (1 << 20)], q)
        out = part if start == 0 else add(out, part, q)
    return out


def _matmul_limbs(a: Elements, b: Elements, q: int) -> Elements:
    a_high, a_low = (a >> np.uint32(16)).astype(np.float64), (a & np.uint32(0xFFFF)).astype(float)
    out = np.empty((a.shape[0], b.shape[1]), dtype=np.uint32)
    modulus, limb = np.uint64(q), np.uint64(16)
    for start in range(0, b.shape[1], 4096):
        block = b[:, start : start + 4096]
        b_high = (block >> np.uint32(16)).astype(np.float64)
        b_low = (block & np.uint32(0xFFFF)).astype(np.float64)
        high = (a_high @ b_high).astype(np.uint64) % modulus
        middle = a_high @ b_low
        middle += a_low @ b_high
        low = a_low @ b_low
        # Horner in base 2^16; every intermediate value stays below 2^64.
        high = ((high << limb) + middle.astype(np.uint64)) % modulus
        out[:, start : start + 4096] = ((high << limb) + low.astype(np.uint64)) % modulus
    return out


def quantise_mask(
    x: Floats, scale: float, limit: int, uniforms: Elements, mask: Elements, q: int
) -> Elements:
    """phi(stochastic rounding of scale * x) + mask mod q.

    `uniforms` are uniform 32-bit words: y is rounded up where its fraction exceeds word / 2^32.
    The caller has checked that |scale * x| <= limit, an integer; products that float rounding
    pushed over the limit are clamped to it.
    """
    out = np.empty(x.size, dtype=np.uint32)
    for start in range(0, x.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        y = np.clip(x[part].astype(np.float64) * scale, -limit, limit)
        down = np.floor(y)
        up = (y - down) * 2.0**32 > uniforms[part]
        rounded = down.astype(np.int64) + up
        rounded += mask[part]
        rounded[rounded < 0] += q
        rounded[rounded >= q] -= q
        out[part] = rounded
    return out


def unmask_dequantise(masked: Elements, mask: Elements, scale: float, q: int, out: Floats) -> None:
    """out = phi^-1(masked - mask) * scale, where phi^-1 gives the signed integer of least size."""
    for start in range(0, masked.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        value = masked[part].astype(np.int64) - mask[part]
        value[value < 0] += q
        value[value >= (q - 1) // 2] -= q
        out[part] = value * scale


def find_out_of_range(values: Elements, q: int) -> int:
    """Position of the first element >= q, or -1."""
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        if block.size and int(block.max()) >= q:
            return start + int(np.argmax(block >= q))
    return -1


def find_beyond(x: Floats, bound: float) -> int:
    """Position of the first element that is NaN, infinite or larger than `bound`, or -1."""
    for start in range(0, x.size, _BLOCK):
        # In float64: a bound that float32 cannot hold must not be rounded.
        beyond = ~(np.abs(x[start : start + _BLOCK].astype(np.float64)) <= bound)
        if beyond.any():
            return start + int(np.argmax(beyond))
    return -1


def ntt_forward(rows: Elements, leaves: int, roots: Elements, q: int) -> Elements:
    """Reduce the column polynomials `rows` down the product tree; return the first leaves.

    `roots` holds all M leaves, M >= len(rows) and >= leaves; see `ntt`.
    """
    size, columns = len(roots), rows.shape[1]
    out = np.empty((leaves, columns), dtype=np.uint32)
    modulus = np.uint64(q)
    width = max(_BLOCK // size, 1)
    for start in range(0, columns, width):
        block = np.zeros((size, min(width, columns - start)), dtype=np.uint64)
        block[: len(rows)] = rows[:, start : start + width]
        half = size // 2
        while half:
            nodes = -(-leaves // (2 * half))
            tree = block[: 2 * half * nodes].reshape(nodes, 2, half, -1)
            low = tree[:, 0]
            high = tree[:, 1] * roots[: 2 * nodes : 2, None, None] % modulus
            # low + (q - high) as well as low + high stay below 2q.
            split = np.stack([low + high, low + (modulus - high)], axis=1)
            block = (split % modulus).reshape(2 * half * nodes, -1)
            half //= 2
        out[:, start : start + width] = block[:leaves]
    return out


def ntt_inverse(
    rows: Elements,
    positions: Positions,
    multipliers: Elements,
    coefficients: int,
    inverse_roots: Elements,
    q: int,
) -> Elements:
    """Climb the product tree; return the low coefficients, times M (the caller divides).

    Row r, times multipliers[r], is the leaf of number positions[r] (distinct); all other leaves
    are zero. `inverse_roots` holds the inverses of all M leaves.
    """
    size, columns = len(inverse_roots), rows.shape[1]
    out = np.empty((coefficients, columns), dtype=np.uint32)
    modulus = np.uint64(q)
    width = max(_BLOCK // size, 1)
    for start in range(0, columns, width):
        block = np.zeros((size, min(width, columns - start)), dtype=np.uint64)
        part = rows[:, start : start + width].astype(np.uint64)
        block[positions] = part * multipliers[:, None] % modulus
        half = 1
        while half < size:
            nodes = size // (2 * half)
            tree = block.reshape(nodes, 2, half, -1)
            left, right = tree[:, 0], tree[:, 1]
            high = (left + (modulus - right)) % modulus * inverse_roots[::2][:nodes, None, None]
            block = np.stack([(left + right) % modulus, high % modulus], axis=1).reshape(size, -1)
            half *= 2
        out[:, start : start + width] = block[:coefficients]
    return out
