"""Vectors over a prime field F_q, q < 2^32: exact arithmetic on contiguous uint32 arrays."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import FieldError
from lightsecagg.field import kernels
from lightsecagg.field.group import Elements as Elements
from lightsecagg.field.group import Group
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, check_modulus

_FEW = 128


@dataclass(frozen=True, slots=True)
class PrimeField(Group):
    """F_q with vectorised arithmetic."""

    modulus: int
    """q"""

    def __post_init__(self) -> None:
        check_modulus(self.modulus)

    def check(self, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> Elements:
        """The array itself if it is a vector (or matrix) over F_q of that shape; else an error."""
        self.check_shape(array, shape)
        position = kernels.active().find_out_of_range(array.reshape(-1), self.modulus)
        if position >= 0:
            raise FieldError(f"element {position} is not below the modulus q = {self.modulus}")
        return array

    def check_bytes(self, data: bytes) -> None:
        """Refuse what `from_bytes` refuses; fast for the short shares that come by the hundred."""
        count = len(data) // 4
        # Between two decryptions, numpy and the loops cost more than a look at a few integers.
        few = len(data) == 4 * count and count <= _FEW
        if few and max(struct.unpack(f"<{count}I", data), default=0) < self.modulus:
            return
        self.from_bytes(data, count)

    def accumulator(self, shape: tuple[int, ...]) -> Accumulator:
        """A sum of vectors of this shape, with nothing in it yet."""
        return Accumulator(self, shape)

    def matmul(self, a: Elements, b: Elements) -> Elements:
        """The matrix product a @ b."""
        self.check_type(a)
        self.check_type(b)
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            raise FieldError(f"cannot multiply matrices of shapes {a.shape} and {b.shape}")
        return kernels.active().matmul(a, b, self.modulus)

    def multiply(self, a: Elements, b: Elements) -> Elements:
        """Element-wise a * b for short vectors (coefficients, not models)."""
        return (a.astype(np.uint64) * b % self.modulus).astype(np.uint32)

    def inverse(self, a: int) -> int:
        """a^-1; zero has none."""
        if a % self.modulus == 0:
            raise FieldError("zero has no inverse")
        return pow(a, -1, self.modulus)

    def inverses(self, array: Elements) -> Elements:
        """Element-wise inverses with one modular exponentiation, by prefix products."""
        flat = [int(value) for value in array.reshape(-1)]
        if 0 in flat:
            raise FieldError("zero has no inverse")
        prefix = [1]
        for value in flat:
            prefix.append(prefix[-1] * value % self.modulus)
        running = pow(prefix[-1], -1, self.modulus)
        out = [0] * len(flat)
        for k in range(len(flat) - 1, -1, -1):
            out[k] = running * prefix[k] % self.modulus
            running = running * flat[k] % self.modulus
        return np.array(out, dtype=np.uint32).reshape(array.shape)


class Accumulator:
    """A running sum of weighted vectors over F_q in 64-bit words, reduced only when it must be.

    Vectors are added in small batches: one pass over the total for several vectors is what
    makes summing models as fast as reading them. The accumulator keeps references to at most
    `_BATCH` vectors until then; do not change a vector after adding it.
    """

    _BATCH = 8

    def __init__(self, field: PrimeField, shape: tuple[int, ...]) -> None:
        self._field = field
        self._shape = shape
        self._totals = np.zeros(int(np.prod(shape)), dtype=np.uint64)
        self._headroom = 2**64 - 1
        self._pending: list[Elements] = []
        self._weights: list[int] = []
        self.count = 0
        """How many vectors have been added."""

    def add(self, vector: Elements, weight: int = 1) -> None:
        """Add weight * vector."""
        self._field.check_type(vector)
        if vector.shape != self._shape:
            raise FieldError(f"shapes differ: {self._shape} and {vector.shape}")
        self.count += 1
        weight %= self._field.modulus
        needed = weight * (self._field.modulus - 1)
        if self._headroom < needed:
            self._reduce()
        self._headroom -= needed
        self._pending.append(vector.reshape(-1))
        self._weights.append(weight)
        if len(self._pending) == self._BATCH:
            self._flush()

    def total(self) -> Elements:
        """The sum so far, in [0, q)."""
        self._flush()
        return kernels.active().reduce(self._totals, self._field.modulus).reshape(self._shape)

    def _flush(self) -> None:
        if all(weight == 1 for weight in self._weights):
            kernels.active().accumulate(self._totals, self._pending)
        else:
            kernels.active().weighted_accumulate(self._totals, self._pending, self._weights)
        self._pending, self._weights = [], []

    def _reduce(self) -> None:
        """Make room again: a reduced total plus any one product, at most (q-1)^2, fits a word."""
        self._flush()
        reduced = kernels.active().reduce(self._totals, self._field.modulus)
        self._totals = reduced.astype(np.uint64)
        self._headroom = 2**64 - self._field.modulus


DEFAULT_FIELD = PrimeField(DEFAULT_MODULUS)
PAPER_FIELD = PrimeField(PAPER_MODULUS)
