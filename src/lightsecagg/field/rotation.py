"""A rotation that spreads every entry of a vector over many of them, before rounding.

A vector of d entries is padded with zeros to n, turned, and its entries are then nearly alike: one
range r fits them all, however uneven the vector was, and rounding errors are uniform noise.

    v = 2^-k P2 D2 P1 D1 (y, 0, ...)        y = 2^-k D1 P1 D2 P2 v

    k   the least number from 4 on with 4^k >= d; n is d rounded up to a multiple of 2^k
    P1  Walsh-Hadamard transforms of the contiguous blocks of 2^k entries
    P2  the same of the columns, where the vector is a matrix of 2^k rows
    D   signs from a public stream, which all parties derive and no message carries

It is orthonormal and linear, so sums are rotated back as one vector. All of it is float32 in one
order of additions: the same vector becomes the same integers on every backend and machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightsecagg.errors import FieldError
from lightsecagg.field import kernels
from lightsecagg.field.group import Elements
from lightsecagg.field.quantization import Reals, find_beyond
from lightsecagg.field.reference import Singles
from lightsecagg.params import check_integer

_SMALLEST_ORDER = 4


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of vectors of one length; the signs are an argument."""

    dimension: int
    """d"""

    def __post_init__(self) -> None:
        check_integer("dimension d", self.dimension, 1)

    @property
    def block(self) -> int:
        """2^k"""
        order = _SMALLEST_ORDER
        while 4**order < self.dimension:
            order += 1
        return 1 << order

    @property
    def length(self) -> int:
        """n: entries of a rotated vector."""
        return -(-self.dimension // self.block) * self.block

    @property
    def signs_shape(self) -> tuple[int, int]:
        """Of the uniform words that hold the signs, a bit per entry: a row for D1, one for D2."""
        return 2, -(-self.length // 32)

    def forward(self, x: Reals, signs: Elements, samples: int = 1) -> Singles:
        """The rotation of samples * x, which is cut to +-2^90; `InputRefused` unless x is finite.

        * `x`: d entries, float32 or float64.
        * `signs`: words of `signs_shape`; bit i % 32 of word i / 32 turns the sign of entry i.
        """
        self._check_signs(signs)
        values, _ = find_beyond(x, math.inf)
        if values.size != self.dimension:
            raise FieldError(f"{values.size} entries are not the {self.dimension} to be rotated")
        out = np.empty(self.length, dtype=np.float32)
        loops = kernels.active()
        loops.rotate_blocks(values, float(samples), signs[0], signs[1], self.block, out)
        loops.rotate_strided(out, self.block, 1 / self.block)
        return out

    def inverse(self, v: Singles, signs: Elements) -> Singles:
        """The vector whose rotation is v, in the memory of v, which is spent."""
        self._check_signs(signs)
        if v.dtype != np.float32 or v.shape != (self.length,) or not v.flags.c_contiguous:
            raise FieldError(f"a rotated vector has {self.length} contiguous float32 entries")
        loops = kernels.active()
        loops.rotate_strided(v, self.block, 1 / self.block)
        loops.rotate_blocks(v, 1.0, signs[1], signs[0], self.block, v)
        return v[: self.dimension]

    def _check_signs(self, signs: Elements) -> None:
        plain = signs.dtype == np.uint32 and signs.flags.c_contiguous
        if signs.shape != self.signs_shape or not plain:
            raise FieldError(
                f"the signs are contiguous uint32 words of shape {self.signs_shape}, "
                f"got {signs.dtype} of shape {signs.shape}"
            )
