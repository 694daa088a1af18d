"""The hot loops in NumPy and BLAS: the fallback without a compiler, and the oracle with one.

Every function here has a twin of the same name and contract in the native library. Arrays are
C-contiguous uint32 with elements below q unless said otherwise; callers have checked that. q is a
prime below 2^32; `add`, `subtract`, `quantise_mask` and `unmask_dequantise` take 2^32 as well.
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


def accumulate_words(totals: Elements, vectors: Sequence[Elements]) -> None:
    """totals += sum of vectors, modulo 2^32."""
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
    """a @ b mod q for a of shape (m, k) and b of shape (k, n), exactly, by BLAS.

    Operands are cut into two 16-bit limbs. By Karatsuba's trick three products of limbs are
    enough; their entries are sums of k numbers below 2^34, which float64 holds exactly up to
    k = 2^16 with room for Horner's scheme; longer inner dimensions are cut.
    """
    out = np.zeros((a.shape[0], b.shape[1]), dtype=np.uint32)
    for start in range(0, a.shape[1], 1 << 16):
        part = _matmul_limbs(a[:, start : start + (1 << 16)], b[start : start + (1 << 16)], q)
        out = part if start == 0 else add(out, part, q)
    return out


_COLUMNS = 256  # per block: the temporaries of one block stay in the second-level cache


def _matmul_limbs(a: Elements, b: Elements, q: int) -> Elements:
    a_high, a_low = _limbs(a)
    a_both = a_high + a_low
    rows, columns = a.shape[0], b.shape[1]
    out = np.empty((rows, columns), dtype=np.uint32)
    buffers = np.empty((4, rows * min(columns, _COLUMNS)))
    for start in range(0, columns, _COLUMNS):
        block = b[:, start : start + _COLUMNS]
        high, middle, low, scratch = (
            buffer[: rows * block.shape[1]].reshape(rows, block.shape[1]) for buffer in buffers
        )
        b_high, b_low = _limbs(block)
        np.matmul(a_high, b_high, out=high)
        np.matmul(a_low, b_low, out=low)
        b_high += b_low
        np.matmul(a_both, b_high, out=middle)
        middle -= high
        middle -= low
        # Horner's scheme in base 2^16.
        for limb in (middle, low):
            _reduce_floats(high, q, scratch)
            high *= 65536.0
            high += limb
        _reduce_floats(high, q, scratch)
        np.greater_equal(high, q, out=scratch)
        scratch *= q
        high -= scratch
        out[:, start : start + _COLUMNS] = high
    return out


def _limbs(a: Elements) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return (a >> np.uint32(16)).astype(np.float64), (a & np.uint32(0xFFFF)).astype(np.float64)


def _reduce_floats(x: NDArray[np.float64], q: int, scratch: NDArray[np.float64]) -> None:
    """x mod q up to one q too much: integers in [0, 2^53) with x / q < 2^48 become [0, 2q)."""
    # A slightly small reciprocal: the quotient may be one too small but never too large.
    np.multiply(x, (1.0 - 2.0**-50) / q, out=scratch)
    np.floor(scratch, out=scratch)
    scratch *= q
    x -= scratch


def quantise_mask(
    x: Floats,
    scale: float,
    limit: int,
    uniforms: Elements,
    mask: Elements,
    q: int,
    out: Elements,
) -> None:
    """out = phi(stochastic rounding of scale * x) + mask mod q.

    `uniforms` are uniform 32-bit words: y is rounded up where its fraction exceeds word / 2^32.
    The caller has checked that |scale * x| <= limit, an integer; products that float rounding
    pushed over the limit are clamped to it.
    """
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


def unmask_dequantise(masked: Elements, mask: Elements, scale: float, q: int, out: Floats) -> None:
    """out = phi^-1(masked - mask) * scale, where phi^-1 gives the signed integer of least size."""
    for start in range(0, masked.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        value = masked[part].astype(np.int64) - mask[part]
        value[value < 0] += q
        value[value >= q // 2] -= q
        out[part] = value * scale


def find_out_of_range(values: Elements, q: int) -> int:
    """Position of the first element >= q, or -1."""
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        if block.size and int(block.max()) >= q:
            return start + int(np.argmax(block >= q))
    return -1


def cut_and_find(words: Elements, q: int) -> Positions:
    """Cut any 32-bit `words` in place to the bits of q - 1; return the positions not below q."""
    bits = (q - 1).bit_length()
    if bits < 32:
        np.bitwise_and(words, np.uint32((1 << bits) - 1), out=words)
    flags = words >= np.uint32(q)
    # flatnonzero is slower than any(), and at 2^32 - 5 hardly a block has a hit.
    found = np.flatnonzero(flags) if flags.any() else np.empty(0)
    return found.astype(np.int64, copy=False)


def find_beyond(x: Floats, bound: float) -> int:
    """Position of the first element that is NaN, infinite or larger than `bound`, or -1."""
    for start in range(0, x.size, _BLOCK):
        # In float64: a bound that float32 cannot hold must not be rounded.
        beyond = ~(np.abs(x[start : start + _BLOCK].astype(np.float64)) <= bound)
        if beyond.any():
            return start + int(np.argmax(beyond))
    return -1


def ntt_forward(
    rows: Elements,
    scales: Elements | None,
    positions: Positions,
    multipliers: Elements | None,
    roots: Elements,
    q: int,
) -> Elements:
    """Reduce column polynomials down the product tree of `ntt`; return some of the leaves.

    The coefficient of x^k is rows[k], times scales[k] if there are any. Row r of the result is
    the leaf of number positions[r] (distinct), times multipliers[r] if there are any. `roots`
    holds all M leaves, M >= len(rows).
    """
    size, columns = len(roots), rows.shape[1]
    out = np.empty((len(positions), columns), dtype=np.uint32)
    modulus = np.uint64(q)
    leaves = int(positions.max()) + 1
    width = max(_BLOCK // size, 1)
    for start in range(0, columns, width):
        block = np.zeros((size, min(width, columns - start)), dtype=np.uint64)
        block[: len(rows)] = rows[:, start : start + width]
        if scales is not None:
            block[: len(rows)] = block[: len(rows)] * scales[:, None] % modulus
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
        wanted = block[positions]
        if multipliers is not None:
            wanted = wanted * multipliers[:, None] % modulus
        out[:, start : start + width] = wanted
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


def add_popcount_noise(words: Elements, z: Elements, step: int, q: int) -> None:
    """z += step * (the ones among 256 bits - 128) mod q, in place; eight 32-bit words per element.

    Uniform words make that a centred binomial of 256 coins. `step` is in [1, q).
    """
    values = np.array([step * (ones - 128) % q for ones in range(257)], dtype=np.uint32)
    for start in range(0, z.size, _BLOCK):
        part = slice(start, min(start + _BLOCK, z.size))
        bits = words[8 * part.start : 8 * part.stop].reshape(-1, 8)
        ones = np.bitwise_count(bits).sum(axis=1, dtype=np.uint16)
        z[part] = add(z[part], values[ones], q)
