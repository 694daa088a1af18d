"""Vectors over a finite group of integers: what uploads are, whatever hides them.

Two groups exist: the additive group of F_q (`prime.PrimeField`), whose masks can be coded, and the
32-bit words Z_{2^32} (`words.WORDS`), whose sums wrap around by themselves and in which the words
of a stream are uniform as they come. An array is checked where it enters (`vector`, `from_bytes`,
`check`); the arithmetic then trusts its elements and only checks types and shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightsecagg.errors import FieldError
from lightsecagg.field import kernels

Elements = NDArray[np.uint32]

_WORD = np.dtype("<u4")


class RunningSum(Protocol):
    """A sum of weighted vectors that come one after the other."""

    def add(self, vector: Elements, weight: int = 1) -> None:
        """Add weight * vector; the vector must not change before `total`."""

    def total(self) -> Elements:
        """The sum so far."""


class Group(ABC):
    """Integers modulo `modulus` <= 2^32, as contiguous uint32 arrays."""

    __slots__ = ()

    modulus: int

    @abstractmethod
    def check(self, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> Elements:
        """The array itself if it is a vector (or matrix) of that shape; else an error."""

    @abstractmethod
    def accumulator(self, shape: tuple[int, ...]) -> RunningSum:
        """A sum of vectors of this shape, with nothing in it yet."""

    # -- entering and leaving ----------------------------------------------------------------

    def vector(self, values: ArrayLike) -> Elements:
        """Integers of any size, positive or negative, reduced into [0, modulus)."""
        array = np.asarray(values)
        if array.dtype.kind not in "iuO" and array.size:
            raise FieldError(f"a vector over F_q is made from integers, not from {array.dtype}")
        if array.dtype == np.uint64 or array.dtype.kind == "O":
            return np.ascontiguousarray(array % self.modulus, dtype=np.uint32)
        return np.ascontiguousarray(array.astype(np.int64) % self.modulus, dtype=np.uint32)

    def to_bytes(self, array: Elements) -> bytes:
        """Little-endian 32-bit words."""
        return bytes(self.to_buffer(array))

    def to_buffer(self, array: Elements) -> memoryview:
        """What `to_bytes` returns, without a copy: a view into the array, to be joined or sent."""
        self.check_type(array)
        return array.astype(_WORD, copy=False).reshape(-1).view(np.uint8).data

    def from_bytes(self, data: bytes | bytearray | memoryview, length: int) -> Elements:
        """The inverse of `to_bytes`; refuses a wrong length and what is no element."""
        if len(data) != 4 * length:
            raise FieldError(f"{length} field elements take {4 * length} bytes, got {len(data)}")
        array = np.frombuffer(data, dtype=_WORD).astype(np.uint32, copy=False)
        return self.check(array)

    def check_type(self, array: NDArray[Any]) -> None:
        """Refuse what is not a contiguous uint32 array; the elements are not looked at."""
        if not isinstance(array, np.ndarray) or array.dtype != np.uint32:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise FieldError(f"field elements are uint32 arrays, got {kind}")
        if not array.flags.c_contiguous:
            raise FieldError("field arrays must be C-contiguous; use numpy.ascontiguousarray")

    def check_shape(self, array: NDArray[Any], shape: tuple[int, ...] | None) -> None:
        """Refuse what is not such an array of that shape, if one is given."""
        self.check_type(array)
        if shape is not None and array.shape != shape:
            raise FieldError(f"expected shape {shape}, got {array.shape}")

    def _check_pair(self, a: Elements, b: Elements) -> None:
        self.check_type(a)
        self.check_type(b)
        if a.shape != b.shape:
            raise FieldError(f"shapes differ: {a.shape} and {b.shape}")

    # -- arithmetic --------------------------------------------------------------------------

    def add(self, a: Elements, b: Elements) -> Elements:
        """a + b."""
        self._check_pair(a, b)
        return kernels.active().add(a, b, self.modulus)

    def subtract(self, a: Elements, b: Elements) -> Elements:
        """a - b."""
        self._check_pair(a, b)
        return kernels.active().subtract(a, b, self.modulus)

    def sum(self, vectors: Iterable[Elements]) -> Elements:
        """The sum of at least one vector."""
        return self._summed((vector, 1) for vector in vectors)

    def weighted_sum(self, weights: Sequence[int], vectors: Sequence[Elements]) -> Elements:
        """sum of weight * vector, for integer weights of any sign."""
        if len(weights) != len(vectors):
            raise FieldError(f"{len(weights)} weights for {len(vectors)} vectors")
        return self._summed(zip(vectors, weights, strict=True))

    def _summed(self, terms: Iterable[tuple[Elements, int]]) -> Elements:
        running: RunningSum | None = None
        for vector, weight in terms:
            if running is None:
                running = self.accumulator(vector.shape)
            running.add(vector, weight)
        if running is None:
            raise FieldError("the sum of no vectors has no length")
        return running.total()
