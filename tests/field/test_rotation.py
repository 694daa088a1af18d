"""The rotation: orthonormal, linear, spreading, and the same to the bit wherever it runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightsecagg.errors import FieldError, InputRefused, ParameterError
from lightsecagg.field import kernels, reference
from lightsecagg.field.group import Elements
from lightsecagg.field.rotation import Rotation

SIZES = [
    *(1, 2, 15, 16, 17, 31, 33, 100, 255, 256, 257, 300, 1023, 1024, 1025),
    *(2047, 2049, 4095, 4096, 4097, 16_383, 16_385, 65_535, 65_537, 262_145, 300_000),
]


def signs_of(rotation: Rotation, seed: int = 1) -> Elements:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, rotation.signs_shape, dtype=np.uint32)


def heavy(size: int, seed: int, kind: type = np.float32) -> NDArray[Any]:
    """Entries of very different sizes."""
    return np.random.default_rng(seed).standard_t(2, size).astype(kind)


def sign(words: Elements, position: int) -> int:
    return -1 if int(words[position // 32]) >> position % 32 & 1 else 1


def rotated_by_definition(rotation: Rotation, x: NDArray[Any], signs: Elements) -> list[float]:
    """Every output as the sum of all inputs with their signs, in Python."""
    n, size = rotation.length, rotation.block
    columns = n // size
    y = [sign(signs[0], i) * float(value) for i, value in enumerate(x)] + [0.0] * (n - len(x))
    middle = [
        sign(signs[1], i)
        * math.fsum((-1) ** (i % size & j).bit_count() * y[i - i % size + j] for j in range(size))
        for i in range(n)
    ]
    return [
        math.fsum(
            (-1) ** (i // columns & j).bit_count() * middle[j * columns + i % columns]
            for j in range(size)
        )
        / size
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("dimension", "block", "length"),
    [
        *((1, 16, 16), (16, 16, 16), (17, 16, 32), (256, 16, 256), (257, 32, 288)),
        *((1024, 32, 1024), (1025, 64, 1088), (61_706, 256, 61_952)),
        (1_206_590, 2048, 1_208_320),
    ],
)
def test_lengths(dimension: int, block: int, length: int) -> None:
    rotation = Rotation(dimension)
    assert (rotation.block, rotation.length) == (block, length)
    assert rotation.signs_shape == (2, (length + 31) // 32)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 256, 257, 700])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_rotation_is_its_definition(backend: str, size: int, kind: type) -> None:
    rotation, x = Rotation(size), heavy(size, size, kind)
    signs = signs_of(rotation)
    expected = rotated_by_definition(rotation, x, signs)
    result = rotation.forward(x, signs)
    np.testing.assert_allclose(result, expected, atol=1e-6 * float(np.abs(x).max()) + 1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_it_keeps_lengths_and_is_undone(backend: str, size: int) -> None:
    rotation, x = Rotation(size), heavy(size, size)
    signs, norm = signs_of(rotation), float(np.linalg.norm(x.astype(np.float64)))
    v = rotation.forward(x, signs)
    assert v.shape == (rotation.length,)
    assert math.sqrt(kernels.active().sum_of_squares(v)) == pytest.approx(norm, rel=1e-6)
    back = rotation.inverse(v, signs)
    assert back.shape == x.shape
    assert float(np.linalg.norm(back.astype(np.float64) - x)) <= 1e-6 * norm


@given(st.sampled_from([3, 17, 300, 1025, 5000]), st.integers(0, 2**32 - 1))
def test_a_sum_of_rotated_vectors_is_undone_as_one(backend: str, size: int, seed: int) -> None:
    rotation, signs = Rotation(size), signs_of(Rotation(size), seed)
    x, y = heavy(size, seed), heavy(size, seed + 1)
    total = rotation.forward(x, signs, samples=3) + rotation.forward(y, signs)
    np.testing.assert_allclose(
        rotation.inverse(total, signs), 3 * x + y, atol=1e-5 * float(np.abs([x, y]).max())
    )


@pytest.mark.parametrize("size", [482, 1000, 4096, 4097, 16_385, 21_668, 65_537, 100_000])
def test_a_spike_is_spread(backend: str, size: int) -> None:
    """max |v| sqrt(n) is 1 at best; at most half of all entries stay zero."""
    rotation = Rotation(size)
    for position in (0, size // 3, size - 1):
        x = np.zeros(size, dtype=np.float32)
        x[position] = -5.0
        v = rotation.forward(x, signs_of(rotation, position)).astype(np.float64) / 5
        assert np.abs(v).max() * math.sqrt(rotation.length) <= 2.4
        assert np.count_nonzero(v) >= 0.5 * rotation.length


@pytest.mark.parametrize("size", [5000, 70_000])
def test_an_uneven_vector_becomes_even(backend: str, size: int) -> None:
    """A thousandth of the entries has nearly all of the length, and afterwards none stands out."""
    x = np.random.default_rng(2).normal(size=size).astype(np.float32)
    x[: size // 1000] *= 1000
    rotation = Rotation(size)
    v = rotation.forward(x, signs_of(rotation))

    def largest(values: NDArray[np.float32]) -> float:
        return float(np.abs(values).max() / np.sqrt((values.astype(np.float64) ** 2).mean()))

    assert largest(x) > 20
    assert largest(v) < 6


def test_signs_change_everything(backend: str) -> None:
    rotation, x = Rotation(1000), heavy(1000, 1)
    one, other = (rotation.forward(x, signs_of(rotation, seed)) for seed in (1, 2))
    assert np.count_nonzero(one == other) < 10


# -- to the bit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("avx2", [True, False])
def test_native_rotation_equals_numpy(size: int, kind: type, avx2: bool) -> None:
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    from lightsecagg.field.native import loops

    rotation = Rotation(size)
    x, signs = heavy(size, size, kind), signs_of(rotation, 3)
    x[::5] *= 1e-40  # subnormal
    x[::7] = -0.0

    def results() -> list[Any]:
        v = rotation.forward(x, signs, samples=77)
        total = kernels.active().sum_of_squares(v), kernels.active().sum_of_squares(x)
        return [v.tobytes(), total, rotation.inverse(v, signs).tobytes()]

    with kernels.using("numpy"):
        expected = results()
    loops.allow_avx2(avx2)
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            with kernels.using("native"):
                assert results() == expected
    finally:
        loops.allow_avx2(True)
        kernels.set_threads(1)


def test_additions_have_one_order() -> None:
    """By hand: a tree of additions over distances 1, 2, 4, 8, in single precision."""
    x, rotation = heavy(16, 9), Rotation(16)
    values = list(x)
    for half in (1, 2, 4, 8):
        for start in range(0, 16, 2 * half):
            for i in range(start, start + half):
                a, b = values[i], values[i + half]
                values[i], values[i + half] = np.float32(a + b), np.float32(a - b)
    zeros = np.zeros(rotation.signs_shape[1], dtype=np.uint32)
    out = np.empty(16, dtype=np.float32)
    reference.rotate_blocks(x, 1.0, zeros, zeros, 16, out)
    assert out.tolist() == [float(value) for value in values]


def test_sums_of_squares_have_one_order(backend: str) -> None:
    x = heavy(1000, 4)
    lanes = [0.0] * 8
    for i, value in enumerate(x.tolist()):
        lanes[i % 8] += value * value
    a, b, c, d, e, f, g, h = lanes
    assert kernels.active().sum_of_squares(x) == ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert kernels.active().sum_of_squares(x[:0]) == 0.0


def test_native_rotation_keeps_subnormal_numbers() -> None:
    if not kernels.native_available():
        pytest.skip("the native library was not built")
    torch = pytest.importorskip("torch")
    rotation = Rotation(100)
    x, signs = np.full(100, 3e-40, dtype=np.float32), signs_of(rotation)
    with kernels.using("native"):
        expected = rotation.forward(x, signs)
        assert expected.any()
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush")
        try:
            flushed = rotation.forward(x, signs)
        finally:
            torch.set_flush_denormal(False)
    assert flushed.tobytes() == expected.tobytes()


# -- extremes and refusals -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 999])
def test_what_is_not_finite_is_refused(backend: str, bad: float, position: int, kind: type) -> None:
    rotation, x = Rotation(1000), heavy(1000, 1, kind)
    x[position] = bad
    with pytest.raises(InputRefused, match=f"entry {position} of the vector is NaN or infinite"):
        rotation.forward(x, signs_of(rotation))


@pytest.mark.parametrize(("kind", "most"), [(np.float32, 3e38), (np.float64, 1e308)])
def test_finite_entries_of_any_size_stay_finite(backend: str, kind: type, most: float) -> None:
    """They are cut to 2^90, which no sum of them leaves."""
    rotation = Rotation(70_000)
    signs = signs_of(rotation)
    v = rotation.forward(np.full(70_000, most, dtype=kind), signs, samples=1000)
    assert np.isfinite(v).all()
    np.testing.assert_allclose(rotation.inverse(v, signs), 2.0**90, rtol=1e-5)


def test_counts_multiply_before_rounding_to_single_precision(backend: str) -> None:
    rotation, zeros = Rotation(1), np.zeros((2, 1), dtype=np.uint32)
    v = rotation.forward(np.array([1 + 2.0**-24]), zeros, samples=3)
    assert v[0] == 3 + 2.0**-22  # without signs the two passes undo each other here


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    rotation = Rotation(40)
    signs, x = signs_of(rotation), heavy(40, 1)
    with pytest.raises(InputRefused, match="one-dimensional"):
        rotation.forward(x.reshape(4, 10), signs)
    with pytest.raises(InputRefused, match="float16"):
        rotation.forward(x.astype(np.float16), signs)
    with pytest.raises(FieldError, match="39 entries are not the 40"):
        rotation.forward(x[:39], signs)
    for wrong in (signs[:1], signs.astype(np.int64), signs[:, :1], np.asfortranarray(signs)):
        with pytest.raises(FieldError, match=r"uint32 words of shape \(2, 2\)"):
            rotation.forward(x, wrong)
        with pytest.raises(FieldError, match=r"uint32 words of shape \(2, 2\)"):
            rotation.inverse(np.zeros(48, dtype=np.float32), wrong)
    for v in (np.zeros(40, "f4"), np.zeros(48), np.zeros(96, "f4")[::2]):
        with pytest.raises(FieldError, match="48 contiguous float32 entries"):
            rotation.inverse(v, signs)
    for dimension in (0, -1, 2.5):
        with pytest.raises(ParameterError, match="dimension d"):
            Rotation(dimension)  # type: ignore[arg-type]
