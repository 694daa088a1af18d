"""The hot loops in NumPy and BLAS: the fallback without a compiler, and the oracle with one.

Every function here has a twin of the same name and contract in the native library. Arrays are
C-contiguous uint32 with elements below q unless said otherwise; callers have checked that. q is a
prime below 2^32; `add`, `subtract` and the loops that quantise and back take 2^32 as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.uint32]
Totals = NDArray[np.uint64]
Positions = NDArray[np.int64]
Singles = NDArray[np.float32]
Floats = Singles | NDArray[np.float64]
Coins = NDArray[np.uint16]

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


def quantise_pack(
    v: Singles,
    scale: float,
    coins: Coins,
    levels: int,
    places: Sequence[int],
    mask: Elements,
    q: int,
    out: Elements,
) -> int:
    """out = packed stochastic rounding of scale * v, + mask mod q; how many entries were clamped.

    Entry i becomes z_i = floor(scale * v_i + coins_i / 2^16), clamped to -levels..levels; product
    and sum are rounded apart, to float32. Element e is the sum over the slots j of
    places[j] * z_i, i = j * out.size + e, which the caller keeps within (q - 3) / 2. `scale` is a
    float32 number, every entry of v finite; `out` may be the mask. The native loop keeps subnormal
    numbers even where the processor was told to flush them, NumPy cannot.
    """
    factor, cut = np.float32(scale), 0
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        total = mask[start:stop].astype(np.int64)
        for slot, place in enumerate(places):
            part = slice(slot * out.size + start, slot * out.size + stop)
            with np.errstate(over="ignore"):
                y = v[part] * factor
            y += coins[part][: y.size] * np.float32(2.0**-16)
            z = np.floor(y)
            kept = np.clip(z, -levels, levels)
            cut += int(np.count_nonzero(kept != z))
            total[: kept.size] += kept.astype(np.int64) * place
        out[start:stop] = total % q
    return cut


def unpack(
    total: Elements, bases: Sequence[int], factors: Sequence[float], q: int, out: Singles
) -> None:
    """out[i] = factors[j] * the digit j of element e, i = j * total.size + e.

    An element stands for the signed integer of least size; its digits in odd bases b are in
    -(b - 1) / 2..(b - 1) / 2, the last digit is what is left. There is one base less than factors.
    """
    for start in range(0, total.size, _BLOCK):
        rest = total[start : start + _BLOCK].astype(np.int64)
        rest[rest >= q // 2] -= q
        for slot, factor in enumerate(factors):
            digit = rest
            if slot < len(bases):
                rest = (digit + bases[slot] // 2) // bases[slot]
                digit = digit - bases[slot] * rest
            part = out[slot * total.size + start :][: digit.size]
            part[:] = digit[: part.size] * factor


def rotate_blocks(
    x: Floats, factor: float, before: Elements, after: Elements, block: int, out: Singles
) -> None:
    """out = D_after P D_before (factor * x, 0, ...), P a Walsh-Hadamard transform of every block.

    `block` is a power of two from 16 on and divides out.size; x is no longer than out, finite, and
    may be out. Products are taken in float64, cut to +-2^90 and rounded to float32. Bit i % 32 of
    word i / 32 of the signs turns the sign of entry i. The native loop keeps subnormal numbers.
    """
    step = max(block, _BLOCK)
    for start in range(0, out.size, step):
        part = out[start : start + step]
        given = x[start : start + step]
        with np.errstate(over="ignore"):
            weighed = np.clip(given.astype(np.float64) * factor, -(2.0**90), 2.0**90)
        part[: weighed.size] = weighed
        part[weighed.size :] = 0
        part *= _signs(before, start, part.size)
        _butterflies(part.reshape(-1, block, 1))
        part *= _signs(after, start, part.size)


def rotate_strided(x: Singles, rows: int, factor: float) -> None:
    """x = factor * (a Walsh-Hadamard transform of every column of x, cut into `rows` rows)."""
    matrix = x.reshape(rows, -1)
    width = max(_BLOCK // rows, 16)
    for start in range(0, matrix.shape[1], width):
        part = matrix[:, start : start + width].copy()
        _butterflies(part[None])
        part *= np.float32(factor)
        matrix[:, start : start + width] = part


def _signs(words: Elements, start: int, count: int) -> Singles:
    some = words[start // 32 : -(-(start + count) // 32)]
    bits = np.unpackbits(some.view(np.uint8), count=count, bitorder="little")
    return np.float32(1) - np.float32(2) * bits


def _butterflies(x: Singles) -> None:
    """A Walsh-Hadamard transform along the middle axis: stages of distance 1, 2, 4, ..."""
    outer, rows, columns = x.shape
    half = 1
    while half < rows:
        pairs = x.reshape(outer, rows // (2 * half), 2, half, columns)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        difference = low - high
        low += high
        high[:] = difference
        half *= 2


def sum_of_squares(x: Floats) -> float:
    """The sum of x^2 in float64: eight running sums of every eighth entry, added in pairs."""
    lanes = np.zeros(8)
    for start in range(0, x.size, _BLOCK):
        squares = np.zeros((1 + -(-min(_BLOCK, x.size - start) // 8), 8))
        squares[0] = lanes
        block = x[start : start + _BLOCK].astype(np.float64)
        squares[1:].reshape(-1)[: block.size] = block * block
        lanes = np.add.accumulate(squares, axis=0)[-1]
    while lanes.size > 1:
        lanes = lanes[::2] + lanes[1::2]
    return float(lanes[0])


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
