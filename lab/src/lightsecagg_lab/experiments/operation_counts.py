"""Counts field operations and pseudo-random elements instead of seconds.

The native loops are replaced by ones that count and then call them, and the PRG's key stream by one
that counts its words. One operation is an addition or a multiplication in F_q; a butterfly of a
transform counts as one multiplication and two additions. A PRG word counts as one operation too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto import prg
from lightsecagg.field import kernels


class Counter:
    """Operations so far; also the clock of a simulated round."""

    def __init__(self) -> None:
        self.operations = 0
        self.prg_words = 0
        """Those of them that are words of the PRG."""
        self.coding = 0
        """Those of them that matrix products and transforms take: encoding and decoding."""

    def __call__(self) -> float:
        return float(self.operations)


class CountingLoops:
    """The loops in use, with a counter in front of them."""

    def __init__(self, loops: kernels.Loops, counter: Counter) -> None:
        self._loops = loops
        self._counter = counter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        loop = getattr(self._loops, name)
        count = _COUNTS.get(name)
        if count is None:
            return loop  # type: ignore[no-any-return]

        def counted(*arguments: Any) -> Any:
            operations = count(*arguments)
            self._counter.operations += operations
            if name in _CODING:
                self._counter.coding += operations
            return loop(*arguments)

        return counted


def _transform(size: int, columns: int) -> int:
    return int(3 * size / 2 * log2(max(size, 2)) * columns)


def _of_first(first: Any, *rest: Any) -> int:
    return int(first.size)


def _of_vectors(totals: Any, vectors: Any, *rest: Any) -> int:
    return int(totals.size) * len(vectors)


def _forward(rows: Any, scales: Any, positions: Any, *rest: Any) -> int:
    return _transform(max(len(rows), len(positions)), rows.shape[1])


def _inverse(rows: Any, positions: Any, multipliers: Any, coefficients: int, *rest: Any) -> int:
    return _transform(max(len(rows), coefficients), rows.shape[1])


_COUNTS: dict[str, Callable[..., int]] = {
    "add": _of_first,
    "subtract": _of_first,
    "reduce": _of_first,
    "quantise_mask": _of_first,
    "accumulate": _of_vectors,
    "accumulate_words": _of_vectors,
    "weighted_accumulate": lambda totals, vectors, weights: 2 * _of_vectors(totals, vectors),
    "matmul": lambda a, b, q: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    "ntt_forward": _forward,
    "ntt_inverse": _inverse,
}

_CODING = {"matmul", "ntt_forward", "ntt_inverse"}


@contextmanager
def counting() -> Iterator[Counter]:
    """Count everything that happens in the block."""
    counter = Counter()
    loops, keystream, add_words = kernels.active(), prg.aes_ctr_keystream, prg.add_words

    def counted_keystream(seed: bytes) -> prg.Keystream:
        stream = keystream(seed)

        def next_words(words: NDArray[np.uint32]) -> None:
            counter.operations += len(words)
            counter.prg_words += len(words)
            stream(words)

        return next_words

    def counted_addition(
        totals: NDArray[np.uint32], seeds: Iterable[bytes], start: int = 0
    ) -> None:
        """A word of the stream and an addition each."""
        streams = list(seeds)
        counter.operations += 2 * totals.size * len(streams)
        counter.prg_words += totals.size * len(streams)
        add_words(totals, streams, start)

    kernels._active = CountingLoops(loops, counter)
    prg.aes_ctr_keystream, prg.add_words = counted_keystream, counted_addition
    try:
        yield counter
    finally:
        kernels._active = loops
        prg.aes_ctr_keystream, prg.add_words = keystream, add_words
