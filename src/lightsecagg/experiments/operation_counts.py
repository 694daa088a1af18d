"""Counts field operations and pseudo-random elements instead of seconds.

The native loops are replaced by ones that count and then call them, and the PRG's key stream by one
that counts its words. One operation is an addition or a multiplication in F_q; a butterfly of a
transform counts as one multiplication and two additions. A PRG word counts as one operation too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
            self._counter.operations += count(*arguments)
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
    "weighted_accumulate": lambda totals, vectors, weights: 2 * _of_vectors(totals, vectors),
    "matmul": lambda a, b, q: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    "ntt_forward": _forward,
    "ntt_inverse": _inverse,
}


@contextmanager
def counting() -> Iterator[Counter]:
    """Count everything that happens in the block."""
    counter = Counter()
    loops, keystream = kernels.active(), prg.aes_ctr_keystream

    def counted_keystream(seed: bytes) -> prg.Keystream:
        stream = keystream(seed)

        def next_words(words: NDArray[np.uint32]) -> None:
            counter.operations += len(words)
            stream(words)

        return next_words

    kernels._active = CountingLoops(loops, counter)
    prg.aes_ctr_keystream = counted_keystream
    try:
        yield counter
    finally:
        kernels._active = loops
        prg.aes_ctr_keystream = keystream
