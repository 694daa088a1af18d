"""The generator against a pure-Python oracle, and its sampling rule by enumeration (S17)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice, product

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightsecagg.crypto.prg import (
    BLOCK_WORDS,
    add_words,
    aes_ctr_keystream,
    derive_seed,
    draw_bound,
    draw_uniform,
    expand,
    fill_uniform,
)
from lightsecagg.errors import CryptoError, FieldError, ParameterError

SEED = bytes(range(32))
DEFAULT_PRIME = 2**31 - 2**19 + 1
PAPER_PRIME = 2**32 - 5
BABY_BEAR = 15 * 2**27 + 1  # 6 % of all words are rejected
PRIMES = [2, 3, 5, 7, 11, 257, 65537, BABY_BEAR, DEFAULT_PRIME, PAPER_PRIME]


def oracle_words(seed: bytes) -> Iterator[int]:
    """The stream, one AES block at a time, without counter mode."""
    aes = Cipher(algorithms.AES(seed), modes.ECB()).encryptor()  # noqa: S305 - one block each
    for counter in count():
        block = aes.update(counter.to_bytes(16, "big"))
        yield from (int.from_bytes(block[i : i + 4], "little") for i in range(0, 16, 4))


def oracle_sample(words: Iterable[int], length: int, modulus: int) -> list[int]:
    """The sampling rule, written as in the module's docstring."""
    stream = iter(words)
    low_bits = (1 << (modulus - 1).bit_length()) - 1
    result = [word & low_bits for word in islice(stream, length)]
    for position, value in enumerate(result):
        while value >= modulus:
            value = next(stream) & low_bits
        result[position] = value
    return result


@pytest.mark.parametrize("modulus", PRIMES)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 17, 1000])
def test_expand_equals_the_oracle(modulus: int, length: int) -> None:
    expanded = expand(SEED, length, modulus)
    assert expanded.dtype == np.uint32
    assert expanded.tolist() == oracle_sample(oracle_words(SEED), length, modulus)


@pytest.mark.parametrize("modulus", [5, BABY_BEAR, DEFAULT_PRIME])
def test_expand_equals_the_oracle_across_blocks(modulus: int) -> None:
    length = BLOCK_WORDS + 12345
    expected = oracle_sample(oracle_words(SEED), length, modulus)
    assert expand(SEED, length, modulus).tolist() == expected


@given(st.binary(min_size=32, max_size=32), st.integers(0, 300), st.integers(2, 2**32 - 1))
def test_expand_equals_the_oracle_for_any_modulus(seed: bytes, length: int, modulus: int) -> None:
    expected = oracle_sample(oracle_words(seed), length, modulus)
    assert expand(seed, length, modulus).tolist() == expected


def test_wire_vector() -> None:
    """Frozen: changing these numbers breaks every deployed peer."""
    # AES-256 of the zero block under the zero key is dc95c078 a2408989 ad48a214 92842087.
    paper = [0x78C095DC, 0x898940A2, 0x14A248AD, 0x87208492, 4220129107, 3107341767]
    assert expand(bytes(32), 6, PAPER_PRIME).tolist() == paper
    assert expand(bytes(32), 6, DEFAULT_PRIME).tolist() == [word % 2**31 for word in paper]
    assert expand(bytes(32), 6, 5).tolist() == [4, 2, 1, 2, 3, 4]


class PlayedStream:
    """A keystream that plays the given words, then rejected ones, and refuses a second helping."""

    def __init__(self, words: Iterable[int], rejected: int) -> None:
        self._words = list(words)
        self._rejected = rejected
        self.exhausted = False

    def __call__(self, words: NDArray[np.uint32]) -> None:
        if self.exhausted:
            raise EOFError
        for position in range(len(words)):
            words[position] = self._words.pop(0) if self._words else self._rejected
            self.exhausted = self.exhausted or not self._words


@pytest.mark.parametrize(
    ("modulus", "length", "stream_length"), [(3, 2, 5), (3, 3, 5), (5, 2, 4), (2, 3, 3), (7, 2, 3)]
)
def test_S17_sampling_is_exactly_uniform(modulus: int, length: int, stream_length: int) -> None:
    """Every stream of the given length is played; each output must occur equally often."""
    symbols = 1 << (modulus - 1).bit_length()
    outcomes: Counter[tuple[int, ...]] = Counter()
    for words in product(range(symbols), repeat=stream_length):
        out = np.empty(length, dtype=np.uint32)
        try:
            fill_uniform(PlayedStream(words, rejected=symbols - 1), modulus, out)
        except EOFError:  # this stream holds too few accepted words
            with pytest.raises((StopIteration, RuntimeError)):
                oracle_sample(words, length, modulus)
            continue
        assert out.tolist() == oracle_sample(words, length, modulus)
        outcomes[tuple(out.tolist())] += 1
    assert len(outcomes) == modulus**length
    assert len(set(outcomes.values())) == 1


def test_S17_high_bits_do_not_matter() -> None:
    words = [0xFFFFFFF8 | low for low in (1, 6, 7, 2, 4, 3)]
    out = np.empty(3, dtype=np.uint32)
    fill_uniform(PlayedStream(words, rejected=7), 5, out)
    assert out.tolist() == [1, 2, 4]


@pytest.mark.parametrize("modulus", [5, 11, 65537, BABY_BEAR, DEFAULT_PRIME, PAPER_PRIME])
def test_S17_histogram_is_uniform(modulus: int) -> None:
    """Chi-square test; with a random seed a right generator would fail one time in 10^9."""
    bins, draws = min(modulus, 64), 400_000
    values = expand(SEED, draws, modulus).astype(np.uint64)
    observed = np.bincount(values * bins // modulus, minlength=bins)
    edges = [-(-index * modulus // bins) for index in range(bins + 1)]
    expected = draws * np.diff(edges) / modulus
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Laurent and Massart: P[chi^2_k > k + 2 sqrt(k x) + 2 x] <= exp(-x).
    freedom, x = bins - 1, math.log(1e9)
    assert statistic < freedom + 2 * math.sqrt(freedom * x) + 2 * x


def test_output_array_is_filled_in_place() -> None:
    buffer = np.zeros(30, dtype=np.uint32)
    assert expand(SEED, 20, DEFAULT_PRIME, out=buffer[5:25]).base is buffer
    assert buffer[5:25].tolist() == expand(SEED, 20, DEFAULT_PRIME).tolist()
    assert not buffer[:5].any()
    assert not buffer[25:].any()


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(9, dtype=np.uint32),
        np.zeros((10, 1), dtype=np.uint32),
        np.zeros(10, dtype=np.int32),
        np.zeros(20, dtype=np.uint32)[::2],
    ],
)
def test_unfit_output_arrays_are_refused(out: NDArray[np.uint32]) -> None:
    with pytest.raises(FieldError):
        expand(SEED, 10, DEFAULT_PRIME, out=out)


@pytest.mark.parametrize("modulus", [-5, 0, 1, 2**32, 2**61 - 1])
def test_moduli_out_of_range_are_refused(modulus: int) -> None:
    with pytest.raises(ParameterError, match="modulus"):
        expand(SEED, 1, modulus)


def test_negative_length_is_refused() -> None:
    with pytest.raises(ParameterError, match="-1"):
        expand(SEED, -1, 5)


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_seeds_of_another_length_are_refused_and_not_shown(length: int) -> None:
    seed = b"Z" * length
    for call in (
        lambda: expand(seed, 1, 5),
        lambda: aes_ctr_keystream(seed),
        lambda: derive_seed(seed, b"context", "label"),
    ):
        with pytest.raises(CryptoError) as caught:
            call()
        assert "ZZ" not in str(caught.value)


def test_derived_seeds_give_unrelated_streams() -> None:
    seeds = [derive_seed(SEED, b"context", "label", bytes([part])) for part in range(4)]
    streams = [tuple(expand(seed, 8, PAPER_PRIME)) for seed in (SEED, *seeds)]
    assert len(set(streams)) == 5


def test_draw_uniform_takes_one_seed_from_its_entropy() -> None:
    asked = []

    def entropy(length: int) -> bytes:
        asked.append(length)
        return SEED

    drawn = draw_uniform(100, DEFAULT_PRIME, entropy)
    assert asked == [32]
    assert drawn.tolist() == expand(SEED, 100, DEFAULT_PRIME).tolist()


def test_S17_bound_draws_are_exactly_uniform_if_their_words_are() -> None:
    """For a fixed key every word has one image: 256 words give all 256 elements, each once."""

    def drawn(word: int) -> int:
        words = iter((SEED, word.to_bytes(4, "little")))
        (element,) = draw_bound(1, 256, lambda _count: next(words), b"C1", "mask")
        return int(element)

    assert sorted(drawn(word) for word in range(256)) == list(range(256))


def test_S06_bound_draws_differ_by_purpose_though_the_source_repeats_itself() -> None:
    def repeated(count: int) -> bytes:
        return (SEED * (count // len(SEED) + 1))[:count]

    purposes = (
        (b"C1", "mask", b"1"),
        (b"C2", "mask", b"1"),
        (b"C1", "other", b"1"),
        (b"C1", "mask", b"2"),
    )
    draws = [draw_bound(100, PAPER_PRIME, repeated, *purpose) for purpose in purposes]
    naive = [draw_uniform(100, PAPER_PRIME, repeated) for _ in purposes]
    assert all((one == naive[0]).all() for one in naive)
    for index, one in enumerate(draws):
        for other in draws[:index]:
            assert (one == other).sum() < 3
    again = draw_bound(100, PAPER_PRIME, repeated, *purposes[0])
    assert again.tolist() == draws[0].tolist()


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 70_000])
@pytest.mark.parametrize("length", [0, 1, 65_537])
def test_words_are_added_from_wherever_a_part_begins(start: int, length: int) -> None:
    seeds = [bytes([k, 1]) * 16 for k in range(70)][: 70 if length < 2 else 3]
    totals = np.full(length, 2**32 - 1, dtype=np.uint32)
    add_words(totals, iter(seeds), start)
    expected = np.full(length, 2**32 - 1, dtype=np.uint32)
    for seed in seeds:
        encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
        stream = np.frombuffer(encryptor.update(bytes(4 * (start + length))), dtype="<u4")
        expected += stream[start:]
    assert np.array_equal(totals, expected)


def test_words_of_a_seed_of_another_length_are_refused() -> None:
    with pytest.raises(CryptoError, match="32 bytes, not 31"):
        add_words(np.zeros(3, dtype=np.uint32), [bytes(31)])
