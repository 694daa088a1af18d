"""Real vectors into a group and back, Eq. (29)-(31) and (36): Q_c, phi, phi^-1, range budget.

    Q_c(x)    stochastic rounding: c * x to one of its two neighbouring integers (over c), unbiased
    phi       two's complement: a negative integer v becomes q + v
    phi^-1    the signed integer again; below q // 2 it is positive, the rest is negative

q is the prime of the field, or 2^32 where sums are taken modulo 2^32. A sum in the group equals the
sum over the integers as long as its size is at most (q - 3) / 2.
`Quantizer` makes that certain before anything is masked: it knows how many vectors are summed,
how large their entries and weights may be, and refuses a scale that could wrap. Entries beyond
the bound are refused, and so are NaN and infinities; who wants clipping asks `clip_to_bound` first.

Rounding is decided by one uniform 32-bit word per entry: y = c_l * s * x goes up where its fraction
exceeds word / 2^32, that is, with probability ceil(frac * 2^32) / 2^32. The bias is therefore at
most 2^-32 of a quantum (upwards), plus the error of computing y in float64, at most |y| * 2^-52;
the variance is that of Lemma 2, at most 1 / (4 c_l^2), up to the same 2^-32.

Sample counts: the client's sample count s multiplies its vector *before* rounding (rounding first
would amplify the error s-fold), and rides behind it as one more coordinate, so that the server
learns the sum of counts and never a single one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import FieldError, InputRefused, ParameterError, RecoveryError
from lightsecagg.field import kernels
from lightsecagg.field.group import Elements, Group
from lightsecagg.field.prime import PrimeField
from lightsecagg.params import check_integer

Reals = NDArray[np.float32] | NDArray[np.float64]

# Far beyond any model, and far enough inside float64 that no product here can over- or underflow.
_SMALLEST_BOUND, _LARGEST_BOUND = 1e-100, 1e100
_SMALLEST_SCALE = 1e-150

_BLOCK = 2**18
"""Entries of a sum that become real numbers at once."""
_SPOILT = "the sum is spoilt, by a false upload or a wrong answer"


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Rounds vectors with entries in [-bound, bound] so that no sum of them can wrap around.

    Leave `scale` out to get the largest safe c_l, that is, the finest rounding.
    """

    group: Group
    """Where the vectors are summed."""
    bound: float
    """Largest size of an entry, before weighting; compared in the vector's own precision."""
    summands: int
    """n_max: how many vectors may be summed (N, or the largest buffer)."""
    max_samples: int = 1
    """s_max: the largest sample count; larger ones are cut to it."""
    max_weight: int = 1
    """w_max: the largest integer weight that the server may apply (staleness)."""
    weighted: bool = False
    """Whether vectors are weighted by sample counts, which then ride as a last coordinate."""
    scale: float = 0.0
    """c_l; 0 stands for the largest safe value, which may be below 1."""
    step: int = 1
    """t: masks may add multiples of it to a sum, which are removed where it exceeds 1."""
    noise: int = 0
    """Emax: the most multiples; 0 where masks are removed without a rest."""

    def __post_init__(self) -> None:
        given: object = self.bound
        if isinstance(given, bool) or not isinstance(given, Real):
            raise ParameterError(f"bound = {self.bound!r} must be a number")
        # Settings are hashed, and have one form: 1, np.float32(1) and 1.0 are the same bound.
        object.__setattr__(self, "bound", float(given))
        if not _SMALLEST_BOUND <= self.bound <= _LARGEST_BOUND:
            raise ParameterError(
                f"bound = {self.bound} must be positive, between {_SMALLEST_BOUND} and "
                f"{_LARGEST_BOUND}"
            )
        for name in ("summands", "max_samples", "max_weight"):
            check_integer(name, getattr(self, name), 1)
        if not self.weighted and self.max_samples != 1:
            raise ParameterError("max_samples only makes sense for a weighted quantizer")
        self._check_noise()
        self._check_budget()
        if self.scale == 0.0:
            object.__setattr__(self, "scale", self._largest_safe_scale())
        elif not _SMALLEST_SCALE <= self.scale < math.inf:
            raise ParameterError(
                f"scale c_l = {self.scale} must be finite and at least {_SMALLEST_SCALE}"
            )
        elif self.limit > self.budget:
            raise ParameterError(
                f"scale c_l = {self.scale} could wrap around: entries up to {self.limit} times "
                f"{self.summands} summands and weight {self.max_weight} exceed "
                f"{self._room_formula} = {self._room}; "
                f"the largest safe scale is {self._largest_safe_scale()}"
            )

    def _check_noise(self) -> None:
        check_integer("step t", self.step, 1)
        check_integer("noise Emax", self.noise, 0)
        if self.step * (2 * self.noise + 1) > self.group.modulus:
            raise ParameterError(
                f"noise of up to {self.noise} steps of t = {self.step} could wrap around: "
                f"t (2 Emax + 1) must not exceed q = {self.group.modulus}"
            )
        if self.step > 1 and not self.noise:
            raise ParameterError(f"a step t = {self.step} only makes sense with noise")

    def _check_budget(self) -> None:
        if self.budget < 1:
            raise ParameterError(
                f"q = {self.group.modulus} is too small for sums of {self.summands} vectors with "
                f"weights up to {self.max_weight}: not even entries in -1..1 would fit"
            )
        most = self._whole // (self.summands * self.max_weight)
        if self.max_samples > most:
            raise ParameterError(
                f"sample counts up to {self.max_samples} could wrap around: at most "
                f"{most} per client fit a sum of {self.summands} with weights up to "
                f"{self.max_weight} modulo {self.group.modulus}; lower max_samples"
            )

    @property
    def budget(self) -> int:
        """The largest integer that one client may contribute per entry."""
        return self._room // (self.summands * self.max_weight)

    @property
    def _whole(self) -> int:
        """The largest size of a sum in the group; counts, which have no noise, may take it all."""
        return (self.group.modulus - 3) // 2

    @property
    def _room(self) -> int:
        """What the noise leaves of it to the sum of an entry."""
        return (self.step - 1) // 2 if self.step > 1 else self._whole - self.noise

    @property
    def _room_formula(self) -> str:
        if self.step > 1:
            return "(t - 1) / 2"
        return "(q - 3) / 2 - Emax" if self.noise else "(q - 3) / 2"

    @property
    def residue(self) -> int:
        """How far noise that stays in a sum moves an entry of it."""
        return self.noise if self.step == 1 else 0

    @property
    def limit(self) -> int:
        """ceil(c_l * s_max * bound): the largest integer that an entry may round to."""
        return math.ceil(Fraction(self.scale) * self.max_samples * Fraction(self.bound))

    def _largest_safe_scale(self) -> float:
        largest = Fraction(self.budget) / (self.max_samples * Fraction(self.bound))
        scale = float(largest)
        return scale if scale <= largest else math.nextafter(scale, 0.0)

    def length(self, dimension: int) -> int:
        """How many field elements a vector of `dimension` entries becomes."""
        return dimension + int(self.weighted)

    def quantise(self, x: Reals, uniforms: Elements, samples: int = 1) -> Elements:
        """phi(c_l * Q(s * x)), followed by the count s if weighted; see `quantise_and_mask`."""
        nothing = np.zeros(self.length(np.size(x)), dtype=np.uint32)
        return self.quantise_and_mask(x, uniforms, nothing, samples)

    def quantise_and_mask(
        self,
        x: Reals,
        uniforms: Elements,
        mask: Elements,
        samples: int = 1,
        out: Elements | None = None,
    ) -> Elements:
        """The quantised vector plus the mask, over F_q.

        * `x`: one-dimensional float32 or float64, entries within the bound.
        * `uniforms`: one uniform 32-bit word per entry; they decide the rounding.
        * `mask`: `length(x.size)` field elements.
        * `samples`: the sample count, at least 1, cut to s_max; only for a weighted quantizer.
        * `out`: where the result is wanted; it may lie where `uniforms` lie, which are lost then.
        """
        values = self._admit(x)
        if uniforms.shape != values.shape or uniforms.dtype != np.uint32:
            raise FieldError(
                f"rounding {values.size} entries takes {values.size} uniform uint32 words, "
                f"got {uniforms.dtype} of shape {uniforms.shape}"
            )
        self.group.check(mask, (self.length(values.size),))
        weight = self._weight(samples)
        if out is None:
            out = np.empty(mask.size, dtype=np.uint32)
        self.group.check_type(out)
        if out.shape != mask.shape:
            raise FieldError(f"{mask.size} elements do not fit where {out.size} are wanted")
        kernels.active().quantise_mask(
            values,
            self.scale * weight,
            self.limit,
            np.ascontiguousarray(uniforms),
            mask[: values.size],
            self.group.modulus,
            out[: values.size],
        )
        if self.weighted:
            out[-1] = (weight + int(mask[-1])) % self.group.modulus
        return out

    def check(self, x: Reals, samples: int = 1) -> None:
        """Raise `InputRefused` unless `quantise_and_mask` will take this vector and count."""
        self._admit(x)
        self._weight(samples)

    def dequantise(
        self, total: Elements, divisor: float = 1.0, in_place: bool = False
    ) -> NDArray[np.float64]:
        """phi^-1(total) / (c_l * divisor); of a weighted total without its count.

        * `in_place`: spend the total, and write over it if it is `with_room`.
        """
        self.group.check(total)
        nothing = np.zeros(min(total.size, _BLOCK), dtype=np.uint32)
        out = _room_of(total) if in_place else None
        if out is None:
            out = np.empty(total.size, dtype=np.float64)
        for start in range(0, total.size, _BLOCK):
            part = total[start : start + _BLOCK]
            out[start : start + part.size] = self.unmask_and_dequantise(
                part, nothing[: part.size], divisor
            )
        return out

    def unmask_and_dequantise(
        self, masked: Elements, mask: Elements, divisor: float = 1.0
    ) -> NDArray[np.float64]:
        """phi^-1(masked - mask) / (c_l * divisor), Eq. (35); of a weighted total without its count.

        * `divisor`: what the sum is divided by, such as the sum of the staleness weights.
        """
        self.group.check(masked)
        self.group.check(mask, masked.shape)
        if not 0 < divisor < math.inf:
            raise ParameterError(f"cannot divide a sum by {divisor}")
        out = np.empty(masked.size, dtype=np.float64)
        factor = 1.0 / (self.scale * divisor)
        kernels.active().unmask_dequantise(masked, mask, factor, self.group.modulus, out)
        return out

    def weighted_mean(
        self, total: Elements, weight: int, in_place: bool = False
    ) -> tuple[NDArray[np.float64], int]:
        """sum w s x / sum w s, and that sum of counts, from an unmasked weighted total.

        * `weight`: the sum of the integer weights w; without weights, the number of summands.
        * `in_place`: see `dequantise`.

        The count coordinate is the divisor. `RecoveryError` for a count or an entry that no
        honest inputs add up to (S47).
        """
        if not self.weighted:
            raise ParameterError("only a weighted quantizer carries sample counts")
        if total.size < 1:
            raise FieldError("a weighted total has at least its count coordinate")
        count = int(signed(self.group, total[-1:])[0])
        if not weight <= count <= weight * self.max_samples:
            raise RecoveryError(
                f"the sum of sample counts is {count}, outside {weight}..."
                f"{weight * self.max_samples}: {_SPOILT}"
            )
        mean = self.dequantise(total[:-1], count, in_place)
        self._check_mean(mean, 1.0, (weight + self.residue) / count)
        return mean, count

    def plain_sum(
        self, total: Elements, weight: int, divisor: float = 1.0, in_place: bool = False
    ) -> NDArray[np.float64]:
        """sum w x / divisor, from an unmasked total without counts; see `weighted_mean`."""
        if self.weighted:
            raise ParameterError("a weighted total has a count coordinate; take weighted_mean")
        values = self.dequantise(total, divisor, in_place)
        self._check_mean(values, weight / divisor, (weight + self.residue) / divisor)
        return values

    def _check_mean(self, values: NDArray[np.float64], weight: float, roundings: float) -> None:
        """Raise `RecoveryError` unless inputs within the bound can have led to these values.

        Each rounding, and each unit of noise, moves an entry by at most 1 / c_l, and a bound that
        float32 cannot hold is compared in float32, half a unit in the last place higher
        (`_in_precision`).
        """
        limit = weight * self.bound * (1 + 2.0**-23) + roundings / self.scale
        position = kernels.active().find_beyond(values, limit)
        if position >= 0:
            raise RecoveryError(
                f"entry {position} of the average lies beyond the bound {self.bound}: {_SPOILT}"
            )

    def _weight(self, samples: int) -> int:
        if not self.weighted:
            if samples != 1:
                raise ParameterError("an unweighted quantizer takes no sample count")
            return 1
        if not isinstance(samples, (int, np.integer)) or samples < 1:
            raise InputRefused(f"sample count {samples} must be an integer of at least 1")
        return min(int(samples), self.max_samples)

    def _admit(self, x: Reals) -> NDArray[Any]:
        values, position = find_beyond(x, self.bound)
        if position < 0:
            return values
        raise InputRefused(
            f"entry {position} of the vector lies beyond the bound {self.bound}; "
            "raise the bound (`bound=`, --bound, aggregation.bound) or ask for clipping "
            "(`clip=True`, client.clip)"
        )


def find_beyond(x: Reals, bound: float) -> tuple[NDArray[Any], int]:
    """`x` as contiguous real numbers, and where the first one beyond the bound is, or -1.

    `InputRefused` for what is not a vector of float32 or float64 numbers, all of them finite.
    """
    if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float64):
        kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise InputRefused(f"the vector must be a float32 or float64 array, got {kind}")
    if x.ndim != 1:
        raise InputRefused(f"the vector must be one-dimensional, got shape {x.shape}")
    values: NDArray[Any] = np.ascontiguousarray(x)
    position = kernels.active().find_beyond(values, _in_precision(bound, values.dtype))
    broken = np.flatnonzero(~np.isfinite(values)) if position >= 0 else np.empty(0)
    if broken.size:
        raise InputRefused(f"entry {broken[0]} of the vector is NaN or infinite")
    return values, position


def with_room(length: int) -> Elements:
    """Elements, not yet written, that can become real numbers where they are.

    They are the second half of a buffer. Real numbers, twice as long, fill it from its beginning,
    and never reach an element that has not been read: those before the k-th take 8 k bytes, and
    the k-th begins at 4 length + 4 k. So a sum and its average take the memory of the average.
    """
    return np.empty(2 * length, dtype=np.uint32)[length:]


def _room_of(total: Elements) -> NDArray[np.float64] | None:
    """Where the real numbers of a total `with_room`, or of its beginning, are to be written."""
    whole = total.base
    if not isinstance(whole, np.ndarray) or whole.dtype != np.uint32 or whole.ndim != 1:
        return None
    half = whole[whole.size // 2 :]
    if total.size > whole.size // 2 or total.ctypes.data != half.ctypes.data:
        return None
    return whole[: 2 * total.size].view(np.float64)


def quantizer_of_scale(modulus: int, buffer: int, max_weight: int, scale: float) -> Quantizer:
    """The quantizer with this c_l and the largest bound that cannot wrap around."""
    field = PrimeField(modulus)
    budget = Quantizer(field, 1.0, buffer, max_weight=max_weight).budget
    return Quantizer(field, budget / scale, buffer, max_weight=max_weight, scale=scale)


def clip_to_bound(x: Reals, bound: float) -> Reals:
    """`x` with its finite entries cut to [-bound, bound]; NaN and infinities stay, to be refused.

    Returns `x` itself if nothing is to be cut. The number of cut entries reveals something about
    the data: keep it to yourself.
    """
    limit = _in_precision(bound, x.dtype)
    is_plain = x.flags.c_contiguous and x.dtype in (np.float32, np.float64)
    if is_plain and kernels.active().find_beyond(x.reshape(-1), limit) < 0:
        return x
    clipped: Reals = np.where(np.isfinite(x), x.clip(-limit, limit), x)
    return clipped


def percent_clipped(x: Reals, clipped: Reals) -> float:
    """How many of the entries `clip_to_bound` has cut, for the log of whoever owns `x`."""
    return 0.0 if clipped is x else 100 * float(np.mean(np.abs(clipped) < np.abs(x)))


def _in_precision(bound: float, dtype: np.dtype[Any]) -> float:
    """The bound, rounded to `dtype`: what the user's own clamping in that type produces.

    Rounding may raise it by half a unit in the last place; the loops clamp to `limit`.
    """
    return float(dtype.type(min(bound, float(np.finfo(dtype).max))))


def signed(group: Group, total: Elements) -> NDArray[np.int64]:
    """phi^-1: the signed integers that group elements stand for, Eq. (36)."""
    group.check(total)
    value = total.astype(np.int64)
    value[value >= group.modulus // 2] -= group.modulus
    return value
