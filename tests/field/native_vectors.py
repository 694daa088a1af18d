"""Cases of every native loop, with the oracle's results, for `native_driver.cpp`.

The file is a row of cases, every word of 64 bits little-endian: the loop's name, its arguments in
the order of the C ABI, and the word it returns (0 if nothing). An argument is a kind and a value:

    0   a null pointer
    i   an integer                      f   a float of 64 bits
    a   an array that is read           t   several of them
    o   an array that is written: what it holds before the call, and what it must hold afterwards
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.field import ntt, reference
from lightsecagg.field.packing import Packing
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.rotation import Rotation
from lightsecagg.field.words import WORDS

MODULI = (3, 257, 2**31 - 2**19 + 1, 2**31 - 1, 2**32 - 2**20 + 1, 2**32 - 5)
SIZES = (0, 1, 7, 8, 9, 33, 130, 4097)
LONG = 2 * 2**16 + 5  # elements that two threads share
SHAPES = ((1, 1, 1), (3, 9, 4), (5, 300, 33), (4, 8, 64), (9, 17, 600))
TRANSFORMS = ((1, 1, 5), (2, 2, 70), (5, 7, 64), (12, 30, 200), (40, 64, 2100))

Array = NDArray[Any]


@dataclass(frozen=True)
class Written:
    """An array that a loop writes."""

    before: Array
    after: Array

    @classmethod
    def anew(cls, after: Array) -> Written:
        """Nothing of what it held before the call is left."""
        return cls(np.zeros_like(after), after)


Argument = int | float | None | Array | Sequence[Array] | Written


@dataclass(frozen=True)
class Case:
    """One call of a loop."""

    loop: str
    arguments: tuple[Argument, ...]
    result: int = 0

    def encoded(self) -> bytes:
        parts = [_bytes(self.loop.encode()), _word(len(self.arguments))]
        return b"".join([*parts, *map(_argument, self.arguments), _word(self.result)])


def _word(value: int) -> bytes:
    return struct.pack("<Q", value)


def _bytes(data: bytes) -> bytes:
    return _word(len(data)) + data


def _argument(value: Argument) -> bytes:
    match value:
        case None:
            return b"0"
        case bool() | int():
            return b"i" + _word(value)
        case float():
            return b"f" + struct.pack("<d", value)
        case Written(before, after):
            return b"o" + _bytes(before.tobytes()) + _bytes(after.tobytes())
        case np.ndarray():
            return b"a" + _bytes(value.tobytes())
    return b"t" + _word(len(value)) + b"".join(_bytes(array.tobytes()) for array in value)


def write(path: Path, cases: Iterator[Case]) -> set[str]:
    """Write the cases to a file; return the loops that they call."""
    loops = set()
    with path.open("wb") as file:
        for case in cases:
            file.write(case.encoded())
            loops.add(case.loop)
    return loops


def all_cases() -> Iterator[Case]:
    """Every loop on odd sizes and extreme values, and long enough for several threads."""
    rng = np.random.default_rng(20260)
    for q in MODULI:
        for size in SIZES:
            yield from vector_cases(rng, q, size)
        for m, k, n in SHAPES:
            yield matmul_case(rng, q, m, k, n)
        for rows, leaves, columns in TRANSFORMS:
            if ntt.supports(PrimeField(q), leaves):
                yield from transform_cases(rng, q, rows, leaves, columns)
    default = 2**31 - 2**19 + 1
    for size in (*SIZES, LONG):
        yield from word_cases(rng, size)
        for q in (default, 2**32 - 5, 2**32):
            yield from packed_cases(rng, q, 3 * size)
        yield from rotation_cases(rng, size + 1)
    yield from vector_cases(rng, default, LONG)
    yield matmul_case(rng, default, 70, 40, 3)
    yield from transform_cases(rng, default, 90, 128, 70)


def cases_to_count() -> dict[str, Case]:
    """One case of every loop, of the default field, of a size that is worth counting."""
    rng, q = np.random.default_rng(7), 2**31 - 2**19 + 1
    cases = [
        *word_cases(rng, 4096),
        *vector_cases(rng, q, 4096),
        *packed_cases(rng, q, 4096),
        *rotation_cases(rng, 4096),
        *transform_cases(rng, q, 24, 32, 256),
    ]
    return {case.loop: case for case in [*cases, matmul_case(rng, q, 16, 32, 256)]}


def elements(rng: np.random.Generator, q: int, shape: int | tuple[int, ...]) -> Array:
    """Elements of [0, q), about half of them extreme."""
    values = rng.integers(0, q, shape, dtype=np.uint32)
    extremes = np.array([0, 1, q // 2, q // 2 + 1, q - 2, q - 1], dtype=np.uint32)
    return np.where(rng.random(shape) < 0.5, rng.choice(extremes, shape), values)


def word_cases(rng: np.random.Generator, n: int) -> Iterator[Case]:
    """Sums modulo 2^32, and the loops that take 0 for it."""
    q = 2**32
    vectors = [elements(rng, q, n) for _ in range(7)]
    total = vectors[0].copy()
    reference.accumulate_words(total, vectors)
    yield Case("accumulate_words", (Written(vectors[0], total), vectors, 7, n))
    a, b = vectors[:2]
    yield Case("add", (a, b, Written.anew(reference.add(a, b, q)), n, 0))
    yield Case("subtract", (a, b, Written.anew(reference.subtract(a, b, q)), n, 0))
    for kind in (np.float32, np.float64):
        case = quantise_case(rng, q, n, np.dtype(kind))
        yield Case(case.loop, (*case.arguments[:-1], 0))
        restored = np.empty(n, dtype=kind)
        reference.unmask_dequantise(a, b, 0.37, q, restored)
        name = f"unmask_dequantise{8 * restored.itemsize}"
        yield Case(name, (a, b, 0.37, 0, Written.anew(restored), n))


def vector_cases(rng: np.random.Generator, q: int, n: int) -> Iterator[Case]:
    """The loops that walk along vectors of n elements."""
    a, b = elements(rng, q, n), elements(rng, q, n)
    yield Case("add", (a, b, Written.anew(reference.add(a, b, q)), n, q))
    yield Case("subtract", (a, b, Written.anew(reference.subtract(a, b, q)), n, q))
    yield from total_cases(rng, q, n)
    yield from search_cases(rng, q, n)
    for kind in (np.float32, np.float64):
        yield quantise_case(rng, q, n, np.dtype(kind))
        restored = np.empty(n, dtype=kind)
        reference.unmask_dequantise(a, b, 0.37, q, restored)
        name = f"unmask_dequantise{8 * restored.itemsize}"
        yield Case(name, (a, b, 0.37, q, Written.anew(restored), n))
    words, step = rng.integers(0, 2**32, 8 * n, dtype=np.uint32), q - 2
    noisy = a.copy()
    reference.add_popcount_noise(words, noisy, step, q)
    yield Case("add_popcount_noise", (words, Written(a, noisy), n, step, q))


def packed_cases(rng: np.random.Generator, q: int, n: int) -> Iterator[Case]:
    """Several integers in one element and back, with entries beyond the range among them."""
    v = rng.standard_t(2, n).astype(np.float32)
    v[::7] = -1e-42  # subnormal
    coins = rng.integers(0, 2**16, n, dtype=np.uint16)
    for slots in (2, 3):
        packing = Packing(PrimeField(q) if q < 2**32 else WORDS, 2, slots)
        scale, length = float(np.float32(packing.levels / 2.5)), packing.length(n)
        mask = elements(rng, q, length)
        packed, back = np.empty_like(mask), np.empty(n, dtype=np.float32)
        places = np.array(packing.places, dtype=np.int32)
        cut = reference.quantise_pack(
            v, scale, coins, packing.levels, packing.places, mask, q, packed
        )
        given = (v, n, scale, coins, packing.levels, places, slots, mask)
        yield Case("quantise_pack", (*given, Written.anew(packed), length, q % 2**32), cut)
        factors = [0.1 + slot for slot in range(slots)]
        reference.unpack(mask, packing.bases, factors, q, back)
        tables = (np.array(packing.bases, dtype=np.int32), np.array(factors))
        restored = Written.anew(back)
        yield Case("unpack", (mask, *tables, slots, length, restored, n, q % 2**32))


def rotation_cases(rng: np.random.Generator, n: int) -> Iterator[Case]:
    """Both passes over n entries and their padding, some entries huge and some subnormal."""
    rotation = Rotation(n)
    block, length = rotation.block, rotation.length
    before, after = rng.integers(0, 2**32, rotation.signs_shape, dtype=np.uint32)
    for kind in (np.float32, np.float64):
        x = rng.standard_t(2, n).astype(kind)
        x[::7], x[::11] = -1e-42, 3e38
        out = np.empty(length, dtype=np.float32)
        reference.rotate_blocks(x, 3.0, before, after, block, out)
        given = (x, n, 3.0, before, after, block)
        bits = 8 * x.itemsize
        yield Case(f"rotate_blocks{bits}", (*given, Written.anew(out), length))
        total = Written.anew(np.array([reference.sum_of_squares(x)]))
        yield Case(f"sum_of_squares{bits}", (x, n, total))
    turned = out.copy()
    reference.rotate_strided(turned, block, 1 / block)
    yield Case("rotate_strided", (Written(out, turned), block, 1 / block, length))


def total_cases(rng: np.random.Generator, q: int, n: int) -> Iterator[Case]:
    """Sums that are reduced only at the end."""
    vectors = [elements(rng, q, n) for _ in range(7)]
    weights = [int(weight) for weight in rng.integers(0, 2**28, 7)]
    before = np.full(n, 2**40, dtype=np.uint64)
    total, weighted = before.copy(), before.copy()
    reference.accumulate(total, vectors)
    reference.weighted_accumulate(weighted, vectors, weights)
    yield Case("accumulate", (Written(before, total), vectors, 7, n))
    factors = np.array(weights, dtype=np.uint32)
    yield Case("weighted_accumulate", (Written(before, weighted), vectors, factors, 7, n))
    words = rng.integers(0, 2**64, n, dtype=np.uint64)
    yield Case("reduce", (words, Written.anew(reference.reduce(words, q)), n, q))


def search_cases(rng: np.random.Generator, q: int, n: int) -> Iterator[Case]:
    """The loops that look for an element; the last one is found, or none."""
    for last in (q - 1, q):
        values = elements(rng, q, n)
        values[-1:] = last
        found = reference.find_out_of_range(values, q)
        yield Case("find_out_of_range", (values, n, q), n if found < 0 else found)
    words = rng.integers(0, 2**32, n, dtype=np.uint32)
    cut = words.copy()
    positions = np.zeros(n, dtype=np.int64)
    found_words = reference.cut_and_find(cut, q)
    positions[: len(found_words)] = found_words
    mask = (1 << (q - 1).bit_length()) - 1
    arguments = (Written(words, cut), n, mask, q, Written.anew(positions), n)
    yield Case("cut_and_find", arguments, len(found_words))
    for kind in (np.float32, np.float64):
        for last_float in (1.0, np.nan):
            x = rng.uniform(-1, 1, n).astype(kind)
            x[-1:] = last_float
            found = reference.find_beyond(x, 1.0)
            yield Case(f"find_beyond{8 * x.itemsize}", (x, n, 1.0), n if found < 0 else found)


def quantise_case(rng: np.random.Generator, q: int, n: int, kind: np.dtype[Any]) -> Case:
    """Stochastic rounding, with products beyond the limit and integers among them."""
    limit, scale = max((q - 3) // 2, 0), 2.0**5
    x = (rng.uniform(-1.1, 1.1, n) * limit / scale).astype(kind)
    x[::5] = min(3, limit) / scale
    words, mask = rng.integers(0, 2**32, n, dtype=np.uint32), elements(rng, q, n)
    masked = np.empty_like(mask)
    reference.quantise_mask(x, scale, limit, words, mask, q, masked)
    arguments = (x, scale, float(limit), words, mask, Written.anew(masked), n, q)
    return Case(f"quantise_mask{8 * x.itemsize}", arguments)


def matmul_case(rng: np.random.Generator, q: int, m: int, k: int, n: int) -> Case:
    """A product of an m x k with a k x n matrix."""
    a, b = elements(rng, q, (m, k)), elements(rng, q, (k, n))
    return Case("matmul", (a, b, Written.anew(reference.matmul(a, b, q)), m, k, n, q))


def transform_cases(
    rng: np.random.Generator, q: int, rows: int, leaves: int, columns: int
) -> Iterator[Case]:
    """Both directions between `rows` coefficients and leaves, with factors and without."""
    field, size = PrimeField(q), ntt.transform_size(leaves)
    roots, inverse_roots = ntt.all_leaves(field, size), ntt.inverse_leaves(field, size)
    positions = rng.permutation(size)[:leaves].astype(np.int64)
    low = elements(rng, q, (rows, columns))
    scales, multipliers = elements(rng, q, rows), elements(rng, q, leaves)
    for s, m in ((None, None), (scales, multipliers)):
        out = reference.ntt_forward(low, s, positions, m, roots, q)
        sizes = (leaves, roots, size, columns, q)
        yield Case("ntt_forward", (low, s, rows, Written.anew(out), positions, m, *sizes))
    values = elements(rng, q, (leaves, columns))
    out = reference.ntt_inverse(values, positions, multipliers, rows, inverse_roots, q)
    arguments = (values, positions, multipliers, leaves, Written.anew(out), rows)
    yield Case("ntt_inverse", (*arguments, inverse_roots, size, columns, q))
