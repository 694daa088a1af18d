"""Several small integers in one element, so that no sum of them can wrap: packed updates.

A client's entry becomes a level z in -L..L. Element e of an upload holds s of them, its digits:

    g z_0 + B_0 (z_1 + B_1 (z_2 + B_1 (...)))        entry j E + e in slot j, E = ceil(n / s)

At most N vectors of weights up to w are summed, so the sum of a digit stays within N w L, and the
bases leave room for that on both sides of zero: a sum over F_q has the balanced digits of the sum
over the integers, whatever the clients uploaded. Nothing depends on luck, and nothing is lost but
what rounding to L levels takes.

Without noise g = 1 and B_0 = B_1 = B, the largest odd number with B^s <= q - 2. Noise that stays
in the sum (dithered short keys) moves the lowest digit alone: B_0 has room for it, and g spreads
the levels so that it weighs less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from lightsecagg.errors import FieldError, ParameterError, RecoveryError
from lightsecagg.field import kernels
from lightsecagg.field.group import Elements, Group
from lightsecagg.field.reference import Singles
from lightsecagg.params import check_integer

SMALLEST_RANGE: Final = 1e-12
LARGEST_RANGE: Final = 1e12
"""Limits of r: below and beyond, float32 meets subnormal numbers, whose time depends on them."""

NOISE_VARIANCE: Final = 64
"""Of one client's noise: the ones among 256 coins (`reference.add_popcount_noise`)."""

_LARGEST_GAIN: Final = 64


@dataclass(frozen=True, slots=True)
class Packing:
    """Bases and levels of `slots` integers per element; every party computes them itself."""

    group: Group
    """Where the vectors are summed."""
    summands: int
    """N: how many vectors may be summed."""
    slots: int
    """s: integers per element, at least 2."""
    max_weight: int = 1
    """w: the largest integer weight that the server may apply."""
    step: int = 1
    """t: masks may add multiples of it to a sum, which are removed where it exceeds 1."""
    noise: int = 0
    """Emax: at most so many multiples; they stay in the lowest slot where t is 1."""

    gain: int = dataclasses.field(init=False)
    """g: what one level of the lowest slot adds to an element."""
    levels: int = dataclasses.field(init=False)
    """L: a client's integers lie in -L..L."""

    def __post_init__(self) -> None:
        check_integer("summands", self.summands, 1)
        check_integer("slots", self.slots, 2)
        check_integer("max_weight", self.max_weight, 1)
        check_integer("step t", self.step, 1)
        check_integer("noise Emax", self.noise, 0)
        gains = range(1, _LARGEST_GAIN + 1) if self.residue else range(1, 2)
        choices = [(gain, self._most_levels(gain)) for gain in gains]
        fitting = [choice for choice in choices if choice[1] >= 1]
        if not fitting:
            raise ParameterError(self._complaint())
        gain, levels = min(fitting, key=lambda choice: (self._error(*choice), -choice[1]))
        object.__setattr__(self, "gain", gain)
        object.__setattr__(self, "levels", levels)

    @property
    def residue(self) -> int:
        """How far noise that stays in a sum moves the lowest digit."""
        return self.noise if self.step == 1 else 0

    @property
    def variance(self) -> float:
        """Of one client's entry of weight 1, in squared levels, on average over slots."""
        return float(self._error(self.gain, 1)) / self.slots

    @property
    def bases(self) -> tuple[int, ...]:
        """B_0, B_1, ..., one less than slots: the highest digit is what is left."""
        if not self.residue:
            return (self._base(),) * (self.slots - 1)
        reach = self.summands * self.max_weight * self.levels
        low = 2 * (self.gain * reach + self.residue) + 1
        return (low, *[2 * reach + 1] * (self.slots - 2))

    @property
    def places(self) -> tuple[int, ...]:
        """What one level of each slot adds to an element."""
        places, place = [self.gain], 1
        for base in self.bases:
            place *= base
            places.append(place)
        return tuple(places)

    def length(self, entries: int) -> int:
        """E: how many elements `entries` numbers take."""
        return -(-entries // self.slots)

    def pack(
        self, v: Singles, r: float, coins: Elements, mask: Elements, out: Elements | None = None
    ) -> tuple[Elements, int]:
        """Round v to multiples of r / L within -r..r, pack and mask; how many entries were cut.

        * `v`: finite float32 numbers, rotated so that few lie beyond r (`rotation.Rotation`).
        * `coins`: ceil(v.size / 2) uniform 32-bit words, a half of one for every entry.
        * `mask`: `length(v.size)` elements; `out` may be where they lie.

        The bias of an entry within the range is at most 2^-11 of a level.
        """
        if not isinstance(v, np.ndarray) or v.dtype != np.float32 or v.ndim != 1 or not v.size:
            raise FieldError("what is packed is a vector of float32 numbers, and not empty")
        self.group.check(mask, (self.length(v.size),))
        if coins.shape != (-(-v.size // 2),) or coins.dtype != np.uint32:
            raise FieldError(
                f"packing {v.size} entries takes {-(-v.size // 2)} uniform uint32 words, "
                f"got {coins.dtype} of shape {coins.shape}"
            )
        if out is None:
            out = np.empty_like(mask)
        self.group.check_shape(out, mask.shape)
        check_range(r)
        cut = kernels.active().quantise_pack(
            np.ascontiguousarray(v),
            float(np.float32(self.levels / r)),
            np.ascontiguousarray(coins).view(np.uint16),
            self.levels,
            self.places,
            mask,
            self.group.modulus,
            out,
        )
        return out, cut

    def unpack(self, total: Elements, entries: int, r: float, weight: int) -> Singles:
        """The sum of the vectors that were packed, times their weights, from an unmasked total.

        * `weight`: the sum of the integer weights; without weights, the number of summands.

        `RecoveryError` for an entry that no honest inputs add up to (S47).
        """
        self.group.check(total, (self.length(entries),))
        check_range(r)
        out = np.empty(entries, dtype=np.float32)
        level = r / self.levels
        factors = [level / self.gain] + [level] * (self.slots - 1)
        kernels.active().unpack(total, self.bases, factors, self.group.modulus, out)
        self._check_digits(out[: total.size], r * weight + self.residue * factors[0])
        self._check_digits(out[total.size :], r * weight)
        return out

    def _check_digits(self, values: Singles, limit: float) -> None:
        # Half a unit in the last place higher: the values were rounded to float32.
        position = kernels.active().find_beyond(values, limit * (1 + 2.0**-23))
        if position >= 0:
            raise RecoveryError(
                f"an entry of the packed sum is {abs(values[position]):.3g}, and honest clients' "
                f"add up to {limit:.3g} at most: the sum is spoilt, by a false upload or a wrong "
                "answer"
            )

    @property
    def _whole(self) -> int:
        """The odd number of integers that a sum in the group can stand for."""
        return 2 * ((self.step - 1 if self.step > 1 else self.group.modulus - 3) // 2) + 1

    def _base(self) -> int:
        """B: the largest odd number whose s-th power is within the whole."""
        root = _largest(lambda root: root**self.slots <= self._whole)
        return root - 1 + root % 2

    def _most_levels(self, gain: int) -> int:
        """The largest L of this g."""
        weights = self.summands * self.max_weight
        return _largest(
            lambda levels: (
                (2 * (gain * weights * levels + self.residue) + 1)
                * (2 * weights * levels + 1) ** (self.slots - 1)
                <= self._whole
            )
        )

    def _error(self, gain: int, levels: int) -> Fraction:
        """(s / 6 + 64 / g^2) / L^2: an element's variance, in units of the range."""
        noise = Fraction(NOISE_VARIANCE, gain**2) if self.residue else 0
        return (Fraction(self.slots, 6) + noise) / levels**2

    def _complaint(self) -> str:
        summed = f"{self.summands} vectors of weight {self.max_weight}"
        if self.residue:
            return f"{self.slots} slots leave no level for sums of {summed} with noise: take fewer"
        return (
            f"{self.slots} slots leave no level for sums of {summed}, at most "
            f"{(self._base() - 1) // 2}: take fewer"
        )


def check_range(r: float) -> None:
    """Refuse a range that is not a number within 1e-12..1e12."""
    if not SMALLEST_RANGE <= r <= LARGEST_RANGE:
        raise ParameterError(
            f"range r = {r} must be between {SMALLEST_RANGE:g} and {LARGEST_RANGE:g}"
        )


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to 2^32 that fits, where all smaller ones do."""
    low, high = 0, 1 << 32
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
