"""Every loop on both backends against Python integers; the product also against python-flint."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import flint
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError
from lightsecagg.field import kernels, ntt, reference
from lightsecagg.field.prime import DEFAULT_FIELD, PrimeField
from lightsecagg.field.words import WORDS

MODULI = [
    *(3, 5, 7, 11, 257, 65537, 2**30 - 35, 2**31 - 1),
    *(2**31 - 2**19 + 1, 2**31 + 11, 2**32 - 2**20 + 1, 2**32 - 5),
]
SIZES = [0, 1, 3, 7, 8, 9, 31, 32, 33, 64, 65, 4095, 4097, 40000]

moduli = st.sampled_from(MODULI)
groups = st.sampled_from([*MODULI, 2**32])
seeds = st.integers(0, 2**32 - 1)


def elements(q: int, shape: int | tuple[int, ...], seed: int) -> NDArray[np.uint32]:
    """Random elements of [0, q), about half of them extreme."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, q, shape, dtype=np.uint32)
    extremes = np.array([0, 1, q // 2, q // 2 + 1, q - 2, q - 1], dtype=np.uint32)
    return np.where(rng.random(shape) < 0.5, rng.choice(extremes, shape), values)


def integers(array: NDArray[np.uint32]) -> list[int]:
    return [int(value) for value in array]


@given(groups, st.sampled_from(SIZES), seeds)
def test_add_and_subtract(backend: str, q: int, size: int, seed: int) -> None:
    a, b = elements(q, size, seed), elements(q, size, seed + 1)
    loops = kernels.active()
    assert loops.add(a, b, q).tolist() == [
        (x + y) % q for x, y in zip(integers(a), integers(b), strict=True)
    ]
    assert loops.subtract(a, b, q).tolist() == [
        (x - y) % q for x, y in zip(integers(a), integers(b), strict=True)
    ]


@given(moduli, st.sampled_from(SIZES), st.integers(0, 11), seeds)
def test_accumulate_and_reduce(backend: str, q: int, size: int, count: int, seed: int) -> None:
    vectors = [elements(q, size, seed + i) for i in range(count)]
    totals = np.full(size, 2**40, dtype=np.uint64)
    kernels.active().accumulate(totals, vectors)
    expected = [2**40 + sum(column) for column in zip(*map(integers, vectors), strict=True)] or [
        2**40
    ] * size
    assert totals.tolist() == expected
    assert kernels.active().reduce(totals, q).tolist() == [total % q for total in expected]


@given(st.sampled_from(SIZES), st.integers(0, 11), seeds)
def test_accumulate_words(backend: str, size: int, count: int, seed: int) -> None:
    vectors = [elements(2**32, size, seed + i) for i in range(count)]
    totals = np.full(size, 2**32 - 3, dtype=np.uint32)
    kernels.active().accumulate_words(totals, vectors)
    columns = zip(*map(integers, vectors), strict=True)
    expected = [(2**32 - 3 + sum(column)) % 2**32 for column in columns] or [2**32 - 3] * size
    assert totals.tolist() == expected


@given(moduli, st.sampled_from(SIZES), st.lists(st.integers(0, 2**28), max_size=5), seeds)
def test_weighted_accumulate(
    backend: str, q: int, size: int, weights: list[int], seed: int
) -> None:
    vectors = [elements(q, size, seed + i) for i in range(len(weights))]
    totals = np.full(size, 5, dtype=np.uint64)
    kernels.active().weighted_accumulate(totals, vectors, weights)
    expected = [5] * size
    for weight, vector in zip(weights, vectors, strict=True):
        expected = [
            total + weight * value for total, value in zip(expected, integers(vector), strict=True)
        ]
    assert totals.tolist() == expected


@given(moduli, st.lists(st.integers(0, 2**64 - 1), max_size=70))
def test_reduce_takes_every_word(backend: str, q: int, words: list[int]) -> None:
    words += [2**64 - 1, 2**64 - q, q * (2**32 - 1), q - 1, q, 0]
    totals = np.array(words, dtype=np.uint64)
    assert kernels.active().reduce(totals, q).tolist() == [word % q for word in words]


@given(
    moduli,
    st.sampled_from([0, 1, 2, 3, 4, 5, 9]),
    st.sampled_from([0, 1, 2, 7, 8, 9, 15, 140, 255, 256, 257, 520]),
    st.sampled_from([0, 1, 7, 8, 9, 31, 32, 33, 70]),
    seeds,
)
def test_matmul_agrees_with_flint(backend: str, q: int, m: int, k: int, n: int, seed: int) -> None:
    a, b = elements(q, (m, k), seed), elements(q, (k, n), seed + 1)
    product = kernels.active().matmul(a, b, q)
    assert product.shape == (m, n)
    if m and k and n:
        expected = flint.nmod_mat(m, k, a.reshape(-1).tolist(), q) * flint.nmod_mat(
            k, n, b.reshape(-1).tolist(), q
        )
        assert product.tolist() == [[int(x) for x in row] for row in expected.tolist()]
    else:
        assert not product.any()


@pytest.mark.parametrize("q", MODULI)
@pytest.mark.parametrize("left", ["half", "half+1", "largest"])
@pytest.mark.parametrize("right", ["half", "half+1", "largest"])
def test_matmul_of_extremes(backend: str, q: int, left: str, right: str) -> None:
    """Sums that are as large, in either sign, as centred or plain products can make them."""
    values = {"half": q // 2, "half+1": q // 2 + 1, "largest": q - 1}
    # The matrix operand is scaled inside; 1 and its scaled extremes are met by some factor here.
    for factor in (1, pow(2, -64, q)):
        a = np.full((3, 300), values[left] * factor % q, dtype=np.uint32)
        b = np.full((300, 11), values[right], dtype=np.uint32)
        expected = 300 * int(a[0, 0]) * values[right] % q
        assert (kernels.active().matmul(a, b, q) == expected).all()


@pytest.mark.parametrize("q", [2**31 - 2**19 + 1, 2**32 - 5])
def test_matmul_of_a_very_long_inner_dimension(backend: str, q: int) -> None:
    a = np.full((1, 2**21 + 3), q - 1, dtype=np.uint32)
    b = np.full((2**21 + 3, 1), q - 2, dtype=np.uint32)
    assert kernels.active().matmul(a, b, q).tolist() == [[2 * (2**21 + 3) % q]]


def rounded(y: Fraction, word: int) -> int:
    """Stochastic rounding in exact arithmetic."""
    down = math.floor(y)
    return down + (1 if (y - down) * 2**32 > word else 0)


@given(
    st.sampled_from([2**31 - 2**19 + 1, 2**32 - 5, 65537, 2**32]),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from(SIZES[:-1]),
    seeds,
)
def test_quantise_mask(backend: str, q: int, kind: type, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    limit = (q - 3) // 2 // int(rng.integers(1, 100))
    scale = 2.0 ** int(rng.integers(-3, 12))
    x = (rng.uniform(-1.1, 1.1, size) * limit / scale).astype(kind)
    x[rng.random(size) < 0.2] = 0
    x[rng.random(size) < 0.2] = 3 / scale  # an integer: never rounded up
    words = rng.integers(0, 2**32, size, dtype=np.uint32)
    words[rng.random(size) < 0.2] = 0
    words[rng.random(size) < 0.2] = 2**32 - 1
    mask = elements(q, size, seed)
    masked = np.empty_like(mask)
    kernels.active().quantise_mask(x, scale, limit, words, mask, q, masked)
    # The scale is a power of two, so y is exact and so is the expectation.
    for value, word, m, result in zip(
        x.tolist(), integers(words), integers(mask), integers(masked), strict=True
    ):
        y = min(max(Fraction(value) * Fraction(scale), Fraction(-limit)), Fraction(limit))
        assert result == (rounded(y, word) + m) % q


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_quantise_mask_of_a_large_model(kind: type, offset: int) -> None:
    """Long enough for the path past the caches, from aligned and unaligned addresses."""
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    q, size = 2**31 - 2**19 + 1, 2**18 + 13
    x = np.sin(np.arange(size + offset)).astype(kind)[offset:]
    words, mask = elements(2**32 - 5, size, 1), elements(q, size, 2)
    native, expected = np.empty_like(mask), np.empty_like(mask)
    with kernels.using("native"):
        kernels.active().quantise_mask(x, 1e6, 10**6, words, mask, q, native)
    reference.quantise_mask(x, 1e6, 10**6, words, mask, q, expected)
    assert np.array_equal(native, expected)


def test_quantise_clamps_at_the_limit(backend: str) -> None:
    q, limit = 11, 4
    x = np.array([4.0, 4.5, 1e30, -4.0, -4.5, -1e30])
    zeros = np.zeros(6, dtype=np.uint32)
    masked = np.empty(6, dtype=np.uint32)
    kernels.active().quantise_mask(x, 1.0, limit, zeros, zeros, q, masked)
    assert masked.tolist() == [4, 4, 4, 7, 7, 7]


@given(groups, st.sampled_from([np.float32, np.float64]), st.sampled_from(SIZES[:-1]), seeds)
def test_unmask_dequantise(backend: str, q: int, kind: type, size: int, seed: int) -> None:
    masked, mask = elements(q, size, seed), elements(q, size, seed + 1)
    out = np.empty(size, dtype=kind)
    kernels.active().unmask_dequantise(masked, mask, 0.37, q, out)
    for x, y, result in zip(integers(masked), integers(mask), out.tolist(), strict=True):
        value = (x - y) % q
        signed = value if value < q // 2 else value - q
        assert result == kind(signed * 0.37)


@pytest.mark.parametrize("q", MODULI)
@pytest.mark.parametrize("size", SIZES)
def test_find_out_of_range(backend: str, q: int, size: int) -> None:
    values = elements(q, size, 1)
    assert kernels.active().find_out_of_range(values, q) == -1
    for position in {0, size // 2, size - 1} if size else set():
        spoilt = values.copy()
        spoilt[position:] = q
        assert kernels.active().find_out_of_range(spoilt, q) == position


@given(moduli, st.sampled_from(SIZES), seeds)
def test_cut_and_find(backend: str, q: int, size: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    words[::7] = 2**32 - 1
    cut = [word % 2 ** (q - 1).bit_length() for word in integers(words)]
    positions = kernels.active().cut_and_find(words, q)
    assert words.tolist() == cut
    assert positions.dtype == np.int64
    assert positions.tolist() == [i for i, word in enumerate(cut) if word >= q]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_find_beyond(backend: str, kind: type, size: int) -> None:
    values = np.linspace(-1, 1, size).astype(kind)
    assert kernels.active().find_beyond(values, 1.0) == -1
    for position in {0, size // 2, size - 1} if size else set():
        for bad in (np.nan, np.inf, -np.inf, 1.0000002, -1.0000002):
            spoilt = values.copy()
            spoilt[position] = bad
            assert kernels.active().find_beyond(spoilt, 1.0) == position


def test_find_beyond_compares_in_double_precision(backend: str) -> None:
    """0.1 in float32 is larger than 0.1 in float64."""
    assert kernels.active().find_beyond(np.float32([0.0, 0.1]), 0.1) == 1


@given(moduli, st.sampled_from(SIZES), st.data(), seeds)
def test_add_popcount_noise(
    backend: str, q: int, size: int, data: st.DataObject, seed: int
) -> None:
    step = data.draw(st.one_of(st.just(1), st.just(q - 1), st.integers(1, q - 1)))
    z, words = elements(q, size, seed), elements(2**32 - 5, 8 * size, seed + 1)
    words[:8], words[-8:] = 0, 2**32 - 1  # no ones at all, and nothing else
    ones = [sum(word.bit_count() for word in integers(row)) for row in words.reshape(-1, 8)]
    expected = [(x + step * (k - 128)) % q for x, k in zip(integers(z), ones, strict=True)]
    kernels.active().add_popcount_noise(words, z, step, q)
    assert z.tolist() == expected


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(threads: int) -> None:
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    q, size = 2**31 - 2**19 + 1, 300_001
    a, b = elements(q, size, 1), elements(q, size, 2)
    left, right = elements(q, (5, 40), 3), elements(q, (40, 5_003), 4)

    words = elements(2**32 - 5, 8 * size, 5)

    def results() -> list[NDArray[np.uint32]]:
        field, noisy = PrimeField(q), a.copy()
        kernels.active().add_popcount_noise(words, noisy, 12345, q)
        return [
            noisy,
            field.add(a, b),
            field.sum([a, b, a]),
            field.weighted_sum([3, 5], [a, b]),
            WORDS.sum([a, b, a]),
            field.matmul(left, right),
            ntt.forward(DEFAULT_FIELD, right, 60),
            ntt.inverse(DEFAULT_FIELD, right, 60),
        ]

    with kernels.using("native"):
        alone = results()
        kernels.set_threads(threads)
        try:
            together = results()
        finally:
            kernels.set_threads(1)
    for one, many in zip(alone, together, strict=True):
        assert np.array_equal(one, many)


@pytest.fixture
def plain_loops() -> Iterator[kernels.Loops]:
    """The native loops as a machine without AVX2 runs them."""
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    from lightsecagg.field.native import loops

    loops.allow_avx2(False)
    try:
        assert not loops.has_avx2()
        yield loops
    finally:
        loops.allow_avx2(True)


@pytest.mark.parametrize("q", MODULI)
@pytest.mark.parametrize("size", [0, 1, 7, 33, 70, 4097])
def test_without_avx2_the_loops_agree_with_the_reference(
    plain_loops: kernels.Loops, q: int, size: int
) -> None:
    a, b = elements(q, size, 1), elements(q, size, 2)
    left, right = elements(q, (5, 19), 3), elements(q, (19, size), 4)
    x, words = np.linspace(-1, 1, size), elements(2**32 - 5, size, 5)
    limit = max((q - 3) // 2, 0)

    def results(loops: kernels.Loops) -> Iterator[object]:
        totals = np.zeros(size, dtype=np.uint64)
        loops.accumulate(totals, [a, b, a, b, a])
        wrapped = words.copy()
        loops.accumulate_words(wrapped, [a, b, words, b, a])
        yield wrapped.tolist()
        loops.weighted_accumulate(totals, [a, b, a], [1, 2, 3])
        yield totals.tolist()
        yield loops.reduce(totals, q).tolist()
        yield loops.add(a, b, q).tolist()
        yield loops.subtract(a, b, q).tolist()
        yield loops.matmul(left, right, q).tolist()
        for kind in (np.float32, np.float64):
            vector, out = x.astype(kind), np.empty(size, dtype=kind)
            masked = np.empty_like(a)
            loops.quantise_mask(vector, float(limit), limit, words, a, q, masked)
            yield masked.tolist()
            loops.unmask_dequantise(a, b, 0.1, q, out)
            yield out.tolist()
            yield loops.find_beyond(vector, 0.5)
        noisy, coins = a.copy(), elements(2**32 - 5, 8 * size, 6)
        loops.add_popcount_noise(coins, noisy, q - 2, q)
        yield noisy.tolist()
        yield loops.find_out_of_range(words, q)
        cut = words.copy()
        yield loops.cut_and_find(cut, q).tolist()
        yield cut.tolist()

    assert list(results(plain_loops)) == list(results(reference))


@pytest.mark.parametrize("q", [2**31 - 2**19 + 1, 2**32 - 2**20 + 1, 257])
@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_without_avx2_the_transforms_agree_with_the_reference(
    plain_loops: kernels.Loops, q: int, size: int
) -> None:
    field = PrimeField(q)
    roots = ntt.points(field, size)
    rows = elements(q, (max(size - 1, 1), 70), size)
    some = np.arange(len(rows), dtype=np.int64)[::-1].copy()
    factors = elements(q, len(rows), 7)

    def results(loops: kernels.Loops) -> Iterator[object]:
        yield loops.ntt_forward(rows, None, some, None, roots, q).tolist()
        yield loops.ntt_forward(rows, factors, some[:1], factors[:1], roots, q).tolist()
        yield loops.ntt_inverse(rows, some, factors, size, field.inverses(roots), q).tolist()

    assert list(results(plain_loops)) == list(results(reference))


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


NAME_BACKEND = "from lightsecagg.field import kernels; print(kernels.backend())"


def test_the_environment_chooses_the_backend() -> None:
    assert run(NAME_BACKEND, LIGHTSECAGG_KERNELS="numpy").stdout == "numpy\n"
    expected = "native\n" if kernels.native_available() else "numpy\n"
    assert run(NAME_BACKEND, LIGHTSECAGG_KERNELS="auto").stdout == expected


def test_without_a_library_the_fallback_runs_and_native_is_an_error() -> None:
    missing = {"LIGHTSECAGG_NATIVE": "/nonexistent/kernels.so"}
    assert run(NAME_BACKEND, LIGHTSECAGG_KERNELS="auto", **missing).stdout == "numpy\n"
    failed = run(NAME_BACKEND, LIGHTSECAGG_KERNELS="native", **missing)
    assert failed.returncode != 0
    assert "was not built" in failed.stderr


def test_a_library_without_a_loop_serves_the_others() -> None:
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    from lightsecagg.field.native import loops

    class Old:
        _name = "kernels.so"
        lightsecagg_add = staticmethod(lambda *arguments: None)

    functions = loops._Functions(Old())  # type: ignore[arg-type]
    assert functions["add"] is Old.lightsecagg_add
    with pytest.raises(ConfigurationError, match=r"kernels\.so has no loop add_popcount_noise"):
        functions["add_popcount_noise"]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fortran"), kernels.using("fortran"):
        pass
    with pytest.raises(ConfigurationError, match="at least 1 thread"):
        kernels.set_threads(0)
    failed = run(NAME_BACKEND, LIGHTSECAGG_THREADS="many")
    assert "LIGHTSECAGG_THREADS='many'" in failed.stderr
