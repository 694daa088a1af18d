"""Short keys: the public matrix, the noise and its removal, against Python's integers."""

from __future__ import annotations

import math
import re

import flint
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightsecagg.crypto import prg
from lightsecagg.crypto.transcript import context_hash, uint
from lightsecagg.errors import FieldError, ParameterError, RecoveryError
from lightsecagg.field import ntt
from lightsecagg.field.prime import DEFAULT_FIELD, Elements
from lightsecagg.field.quantization import signed
from lightsecagg.masks.short_keys import (
    COINS,
    RING_DIMENSION,
    VARIANCE,
    add_noise,
    exact_step,
    expand,
    key_length,
    noise_bound,
    public_matrix,
    strip,
)

FIELD = DEFAULT_FIELD
Q, n = FIELD.modulus, RING_DIMENSION
C1 = context_hash("a round of the tests")


def uniform(size: int, seed: int) -> Elements:
    return np.random.default_rng(seed).integers(0, Q, size, dtype=np.uint32)


def noise(seed: bytes, size: int, step: int = 1) -> NDArray[np.int64]:
    """t e, as the loop makes it."""
    mask = np.zeros(size, dtype=np.uint32)
    add_noise(FIELD, mask, seed, size, step)
    return signed(FIELD, mask)


def coefficients(block: Elements) -> flint.nmod_poly:
    """The ring element with these values at the roots of X^n + 1, by interpolation in flint."""
    both = np.concatenate([np.zeros_like(block), block])[:, None]
    doubled = ntt.inverse(FIELD, np.ascontiguousarray(both), n)[:, 0]
    return flint.nmod_poly((2 * doubled.astype(np.int64) % Q).tolist(), Q)


def test_the_matrix_is_expanded_from_the_context_and_the_sizes() -> None:
    d = 3 * n + 5
    seed = context_hash("short key matrix", C1, uint(2048), uint(d), uint(Q))
    matrix = public_matrix(C1, d, Q)
    assert matrix.shape == (n, 4)
    assert np.array_equal(matrix.reshape(-1), prg.expand(seed, 4 * n, Q))
    assert not np.array_equal(matrix, public_matrix(context_hash("another"), d, Q))
    assert not np.array_equal(matrix, public_matrix(C1, d + 1, Q)), "d is bound too"


@pytest.mark.parametrize("dimension", [1, 5, n - 1, n, n + 1, 2 * n + 3])
@pytest.mark.parametrize("scalars", [0, 1, 2])
def test_expanding_is_the_product_with_every_block(
    backend: str, dimension: int, scalars: int
) -> None:
    key = uniform(key_length(scalars), dimension)
    mask = expand(FIELD, C1, key, dimension)
    assert mask.shape == (dimension + scalars,)
    assert np.array_equal(mask[dimension:], key[n:]), "scalars are masked one to one"
    matrix = public_matrix(C1, dimension, Q)
    s = flint.nmod_poly(key[:n].tolist(), Q)
    products = []
    for column in range(matrix.shape[1]):
        product = coefficients(np.ascontiguousarray(matrix[:, column])) * s
        products.append([int(product[k]) - int(product[k + n]) for k in range(n)])
    read_by_rows = np.array(products).T.reshape(-1) % Q
    assert np.array_equal(mask[:dimension], read_by_rows[:dimension])


def test_expanding_a_sum_of_keys_gives_the_sum_of_the_masks(backend: str) -> None:
    keys = [uniform(key_length(1), k) for k in range(4)]
    one_by_one = FIELD.sum([expand(FIELD, C1, key, 5000) for key in keys])
    assert np.array_equal(one_by_one, expand(FIELD, C1, FIELD.sum(keys), 5000))


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(FieldError, match="at least n = 2048"):
        expand(FIELD, C1, uniform(n - 1, 0), 10)
    with pytest.raises(FieldError, match="at least one entry"):
        expand(FIELD, C1, uniform(n, 0), 0)


@pytest.mark.parametrize("size", [1, 100, 8191, 8193, 20_000])
@pytest.mark.parametrize("step", [1, 1_022_848, Q - 1])
def test_noise_counts_the_ones_of_the_seeds_stream(backend: str, size: int, step: int) -> None:
    seed = bytes(range(32))
    words = np.empty(8 * size, dtype=np.uint32)
    prg.aes_ctr_keystream(seed)(words)
    expected = []
    for start, value in zip(range(0, 8 * size, 8), uniform(size, 1), strict=True):
        ones = sum(int(word).bit_count() for word in words[start : start + 8])
        expected.append((int(value) + step * (ones - 128)) % Q)
    mask = np.concatenate([uniform(size, 1), np.array([7], dtype=np.uint32)])
    add_noise(FIELD, mask, seed, size, step)
    assert mask.tolist() == [*expected, 7], "and scalars have none"


def test_noise_is_a_centred_binomial_of_256_coins() -> None:
    """A chi-square test with a fixed seed: the distribution that the proof is about."""
    size = 400_000
    e = noise(context_hash("coins"), size)
    assert abs(e).max() <= COINS // 2
    edges = range(-28, 29)
    weights = {k: math.comb(COINS, k + COINS // 2) / 2**COINS for k in range(-128, 129)}
    expected = [size * weights[k] for k in edges]
    observed = [int((e == k).sum()) for k in edges]
    expected.append(size - sum(expected))
    observed.append(size - sum(observed))
    statistic = sum((o - x) ** 2 / x for o, x in zip(observed, expected, strict=True))
    assert statistic < 57 + 5 * math.sqrt(2 * 57), "57 degrees of freedom"
    shifted = observed[1:] + observed[:1]
    assert sum((o - x) ** 2 / x for o, x in zip(shifted, expected, strict=True)) > 1000


def test_noise_follows_from_its_seed_alone() -> None:
    assert np.array_equal(noise(bytes(32), 9000), noise(bytes(32), 9000))
    assert np.array_equal(noise(bytes(32), 9000)[:100], noise(bytes(32), 100))
    assert not np.array_equal(noise(bytes(32), 100), noise(b"\1" + bytes(31), 100))


@pytest.mark.parametrize("step", [0, -1, Q, Q + 1])
def test_a_step_that_removes_the_noise_is_refused(step: int) -> None:
    with pytest.raises(ParameterError, match=re.escape(f"t = {step} must be in [1, q)")):
        add_noise(FIELD, np.zeros(5, dtype=np.uint32), bytes(32), 5, step)


@given(st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 10**9))
def test_the_bound_of_the_noise_covers_the_tail(
    summands: int, max_weight: int, dimension: int
) -> None:
    bound = noise_bound(summands, max_weight, dimension)
    variance = VARIANCE * summands * max_weight**2
    if bound < COINS // 2 * summands * max_weight:
        log2_tail = 1 - bound**2 / (2 * variance) / math.log(2)
        assert log2_tail + math.log2(dimension) < -40
    assert bound <= 1.03 * math.sqrt(2 * math.log(2) * (41 + math.log2(dimension)) * variance) + 2


def test_bounds_and_steps_are_pinned() -> None:
    """Part of the wire format: every party computes the same integers."""
    assert noise_bound(200, 1, 1_206_590) == 1049
    assert noise_bound(20, 1, 1_206_590) == 332
    assert noise_bound(1000, 1, 5_288_548) == 2384
    assert noise_bound(10, 64, 7850) == 14010
    assert noise_bound(1, 1, 1) == 61
    assert exact_step(Q, 1049) == 1_022_848
    for bound in (1, 105, 1049, 10**6):
        step = exact_step(Q, bound)
        assert step * (2 * bound + 1) <= Q < (step + 1) * (2 * bound + 1)


@given(st.integers(1, 5000), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_stripping_finds_every_sum_and_every_noise_within_the_bounds(
    bound: int, scalars: int, seed: int
) -> None:
    step = exact_step(Q, bound)
    rng = np.random.default_rng(seed)
    half = (step - 1) // 2
    x = np.concatenate([rng.integers(-half, half + 1, 60), [half, -half, half, -half, 0]])
    e = np.concatenate([rng.integers(-bound, bound + 1, 60), [bound, bound, -bound, -bound, 0]])
    total = FIELD.vector([*(x + step * e), *[Q - 1, 5][:scalars]])
    stripped = strip(FIELD, total, len(x), step, 1)
    assert signed(FIELD, stripped[: len(x)]).tolist() == x.tolist()
    assert np.array_equal(stripped[len(x) :], total[len(x) :])


def test_one_step_more_would_wrap() -> None:
    """The control: with t + 1 the largest sum and the largest noise come out wrong."""
    bound = 1049
    step = exact_step(Q, bound) + 1
    half = (step - 1) // 2
    total = FIELD.vector([half + step * bound])
    assert signed(FIELD, strip(FIELD, total, 1, step, 1)).tolist() != [half]


@pytest.mark.parametrize("summands", [2, 20, 200])
def test_noise_of_another_variance_is_noticed(summands: int) -> None:
    d, bound = 1000, noise_bound(summands, 1, 1000)
    step = exact_step(Q, bound)
    total = np.zeros(d, dtype=np.uint32)
    for k in range(summands):
        add_noise(FIELD, total, bytes([k]) * 32, d, step)
    assert not strip(FIELD, total, d, step, summands).any()
    with pytest.raises(RecoveryError, match="variance"):
        strip(FIELD, uniform(d, 1), d, step, summands)
