"""Real vectors into F_q and back, Eq. (29)-(31) and (36): Q_c, phi, phi^-1, and the range budget.

    Q_c(x)    stochastic rounding: c * x to one of its two neighbouring integers, unbiased
    phi       two's complement: a negative integer v becomes q + v
    phi^-1    the signed integer again; [0, (q-1)/2) is positive, the rest negative

A sum over the field equals the sum over the integers as long as its size is at most (q - 3) / 2.
`Quantizer` makes that certain before anything is masked: it knows how many vectors are summed,
how large their entries and weights may be, and refuses a scale that could wrap. Entries beyond
the bound, NaN and infinities are refused (or, if asked for, entries are clipped and counted).

Sample counts: the client's sample count s multiplies its vector *before* rounding (rounding first
would amplify the error s-fold), and rides behind it as one more coordinate, so that the server
learns the sum of counts and never a single one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import FieldError, InputRefused, ParameterError
from lightsecagg.field import kernels
from lightsecagg.field.prime import Elements, PrimeField

Reals = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Rounds vectors with entries in [-bound, bound] so that no sum of them can wrap around.

    Leave `scale` out to get the largest safe c_l, that is, the finest rounding.
    """

    field: PrimeField
    bound: float
    """Largest size of an entry of the vector, before weighting."""
    summands: int
    """n_max: how many vectors may be summed (N, or the largest buffer)."""
    max_samples: int = 1
    """s_max: the largest sample count; larger ones are cut to it."""
    max_weight: int = 1
    """w_max: the largest integer weight that the server may apply (staleness)."""
    weighted: bool = False
    """Whether vectors are weighted by sample counts, which then ride as a last coordinate."""
    clip: bool = False
    """Clip entries beyond the bound instead of refusing them (NaN is always refused)."""
    scale: float = 0.0
    """c_l; 0 stands for the largest safe value, which may be below 1."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise ParameterError(f"bound = {self.bound} must be positive and finite")
        for name in ("summands", "max_samples", "max_weight"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} = {getattr(self, name)} must be at least 1")
        if not self.weighted and self.max_samples != 1:
            raise ParameterError("max_samples only makes sense for a weighted quantizer")
        if self.max_samples > self.budget:
            raise ParameterError(
                f"sample counts up to {self.max_samples} could wrap around: at most "
                f"{self.budget} per client fit a sum of {self.summands} with weights up to "
                f"{self.max_weight} in F_{self.field.modulus}; lower max_samples"
            )
        if self.scale == 0.0:
            object.__setattr__(self, "scale", self._largest_safe_scale())
        elif not (math.isfinite(self.scale) and self.scale > 0):
            raise ParameterError(f"scale c_l = {self.scale} must be positive and finite")
        elif self.limit > self.budget:
            raise ParameterError(
                f"scale c_l = {self.scale} could wrap around: entries up to {self.limit} times "
                f"{self.summands} summands and weight {self.max_weight} exceed "
                f"(q - 3) / 2 = {(self.field.modulus - 3) // 2}; "
                f"the largest safe scale is {self._largest_safe_scale()}"
            )

    @property
    def budget(self) -> int:
        """The largest integer that one client may contribute per coordinate."""
        return (self.field.modulus - 3) // 2 // (self.summands * self.max_weight)

    @property
    def limit(self) -> int:
        """ceil(c_l * s_max * bound): the largest integer that an entry may round to."""
        return math.ceil(Fraction(self.scale) * self.max_samples * Fraction(self.bound))

    def _largest_safe_scale(self) -> float:
        largest = Fraction(self.budget) / (self.max_samples * Fraction(self.bound))
        scale = float(largest)
        if scale > largest:  # float() rounds to nearest
            scale = math.nextafter(scale, 0.0)
        if self.budget < 1 or scale == 0.0:
            raise ParameterError(
                f"F_{self.field.modulus} is too small for sums of {self.summands} vectors with "
                f"bound {self.bound}, counts up to {self.max_samples} and weights up to "
                f"{self.max_weight}"
            )
        return scale

    def length(self, dimension: int) -> int:
        """How many field elements a vector of `dimension` entries becomes."""
        return dimension + int(self.weighted)

    def quantise(self, x: Reals, uniforms: Elements, samples: int = 1) -> Elements:
        """phi(c_l * Q(s * x)), followed by the count s if weighted; see `quantise_and_mask`."""
        nothing = np.zeros(self.length(x.size), dtype=np.uint32)
        return self.quantise_and_mask(x, uniforms, nothing, samples)

    def quantise_and_mask(
        self, x: Reals, uniforms: Elements, mask: Elements, samples: int = 1
    ) -> Elements:
        """The quantised vector plus the mask, over F_q.

        * `x`: one-dimensional float32 or float64, entries within the bound.
        * `uniforms`: one uniform 32-bit word per entry; they decide the rounding.
        * `mask`: `length(x.size)` field elements.
        * `samples`: the sample count, cut to [1, s_max]; only for a weighted quantizer.
        """
        x = self._admit(x)
        if uniforms.shape != x.shape or uniforms.dtype != np.uint32:
            raise FieldError(f"rounding {x.size} entries takes {x.size} uniform 32-bit words")
        self.field.check(mask, (self.length(x.size),))
        weight = self._weight(samples)
        out = np.empty(mask.size, dtype=np.uint32)
        out[: x.size] = kernels.active().quantise_mask(
            x, self.scale * weight, self.limit, uniforms, mask[: x.size], self.field.modulus
        )
        if self.weighted:
            out[-1] = (weight + int(mask[-1])) % self.field.modulus
        return out

    def dequantise(self, total: Elements, divisor: float = 1.0) -> NDArray[np.float64]:
        """phi^-1(total) / (c_l * divisor)."""
        nothing = np.zeros(total.size, dtype=np.uint32)
        return self.unmask_and_dequantise(total, nothing, divisor)

    def unmask_and_dequantise(
        self, masked: Elements, mask: Elements, divisor: float = 1.0
    ) -> NDArray[np.float64]:
        """phi^-1(masked - mask) / (c_l * divisor), Eq. (35)."""
        out = np.empty(masked.size, dtype=np.float64)
        factor = 1.0 / (self.scale * divisor)
        kernels.active().unmask_dequantise(masked, mask, factor, self.field.modulus, out)
        return out

    def count_clipped(self, x: NDArray[Any]) -> int:
        """How many entries lie beyond the bound. Private to the client unless masked."""
        return int(np.count_nonzero(np.abs(x) > self.bound))

    def _weight(self, samples: int) -> int:
        if not self.weighted:
            if samples != 1:
                raise ParameterError("an unweighted quantizer takes no sample count")
            return 1
        if samples < 1:
            raise InputRefused(f"sample count {samples} must be at least 1")
        return min(int(samples), self.max_samples)

    def _admit(self, x: Reals) -> Reals:
        if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float64):
            kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
            raise InputRefused(f"the vector must be a float32 or float64 array, got {kind}")
        if x.ndim != 1:
            raise InputRefused(f"the vector must be one-dimensional, got shape {x.shape}")
        x = np.ascontiguousarray(x)
        position = kernels.active().find_beyond(x, self.bound)
        if position < 0:
            return x
        if self.clip and not np.isnan(x).any():
            return np.clip(x, -self.bound, self.bound, dtype=x.dtype)
        value = float(x[position])
        problem = (
            "is not a number"
            if math.isnan(value)
            else f"lies beyond the bound {self.bound}; raise the bound or ask for clipping"
        )
        raise InputRefused(f"entry {position} of the vector {problem}")


def signed(field: PrimeField, total: Elements) -> NDArray[np.int64]:
    """phi^-1: the signed integers that field elements stand for, Eq. (36)."""
    value = total.astype(np.int64)
    value[value >= (field.modulus - 1) // 2] -= field.modulus
    return value
