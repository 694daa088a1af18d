"""Z_{2^32}: 32-bit words, whose sums wrap around by themselves.

Pairwise masks need a group and no field. In this one every word of a stream is a uniform element,
so a mask is a keystream as it comes: nothing is cut, compared, rejected or reduced. Loops that take
a modulus take 2^32 for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import FieldError
from lightsecagg.field import kernels
from lightsecagg.field.group import Elements, Group

WORD_BITS = 32


class Words(Group):
    """Z_{2^32}; there is one such group, `WORDS`."""

    __slots__ = ()

    modulus = 2**WORD_BITS

    def __repr__(self) -> str:
        return "WORDS"

    def check(self, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> Elements:
        """The array itself if it is of that shape: every word is an element."""
        self.check_shape(array, shape)
        return array

    def accumulator(self, shape: tuple[int, ...]) -> SumOfWords:
        """A sum of vectors of this shape, with nothing in it yet."""
        return SumOfWords(shape)


class SumOfWords:
    """A running sum; several vectors are added in one pass over it (see `prime.Accumulator`)."""

    _BATCH = 8

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._total = np.zeros(shape, dtype=np.uint32)
        self._pending: list[Elements] = []

    def add(self, vector: Elements, weight: int = 1) -> None:
        """Add weight * vector."""
        WORDS.check_type(vector)
        if vector.shape != self._total.shape:
            raise FieldError(f"shapes differ: {self._total.shape} and {vector.shape}")
        factor = weight % WORDS.modulus
        term = vector if factor == 1 else vector * np.uint32(factor)
        self._pending.append(term.reshape(-1))
        if len(self._pending) == self._BATCH:
            self._flush()

    def total(self) -> Elements:
        """The sum so far, modulo 2^32."""
        self._flush()
        return self._total

    def _flush(self) -> None:
        kernels.active().accumulate_words(self._total.reshape(-1), self._pending)
        self._pending = []


WORDS = Words()
