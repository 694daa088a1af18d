"""The range of packed rounds, from sums alone: pure functions of what a round has added up.

A client's rotated entries are rounded to multiples of r / L within -r..r (`packing.Packing`). Too
wide a range wastes levels, too narrow a one cuts entries off, so the server sets r by what the last
round's sums reveal. Every client adds two masked scalars to its upload,

    a = min(64 F, floor(F rms(v) / r + coin))       F = floor((q - 3) / (128 N w))
    c = floor(H cut / n + coin)                     H = min(n, floor((q - 3) / (2 N w)))

and with W the sum of the weights, W2 that of their squares and Y the sum of the vectors,

    rms   = max(r sum(a) / (F W), |Y| / (sqrt(n) W))      of a client, on average
    share = sum(c) / (H W)                                of the entries that were cut
    nu    = W2 n (r / L)^2 (1/6 + 64 / (s g^2)) / |Y|^2   of the sum's square, what is rounding

(64 / (s g^2) with noise that stays in the sum alone). The next range is kappa rms, and the next
round takes as many slots as keep the predicted nu within the error that users ask for; where none
does, and wherever the measure cannot be trusted, it takes one slot: today's quantiser.

A range that moves is an oracle: two sums under different ranges differ by what the largest client
has beyond the smaller one. A policy may pin it, and then no scalars are sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightsecagg.errors import ParameterError, RecoveryError
from lightsecagg.field import kernels
from lightsecagg.field.packing import LARGEST_RANGE, SMALLEST_RANGE, Packing, check_range
from lightsecagg.field.reference import Floats

DEFAULT_ERROR: Final = 3e-3
"""Of the average's square, what may be rounding."""

COARSE: Final = 0.5
"""Above this part of rounding, the average is made shorter and marked."""

_CUT: Final = 64  # a never exceeds so many units, and one-slot rounds have so many in one
_WORD: Final = 2**32
_CLEAR_SHARE: Final = 1e-3
_RECENT, _TOO_OFTEN = 10, 3
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64


def root_mean_square(x: Floats, entries: int, samples: int = 1) -> float:
    """Of samples * x, with zeros up to n = `entries`; the same on every backend, to the bit."""
    return samples * math.sqrt(kernels.active().sum_of_squares(x) / entries)


@dataclass(frozen=True, slots=True)
class RangeScalars:
    """The two scalars of an upload, whose sums cannot wrap."""

    modulus: int
    """q"""
    summands: int
    """N"""
    max_weight: int
    """w"""
    entries: int
    """n, of a rotated vector"""

    def norm_unit(self, slots: int) -> int:
        """F; 64 F in rounds of one slot, whose range is the bound and far above the entries."""
        unit = (self.modulus - 3) // (2 * _CUT * self.summands * self.max_weight)
        return unit if slots > 1 else _CUT * unit

    @property
    def cut_unit(self) -> int:
        """H"""
        return min(self.entries, (self.modulus - 3) // (2 * self.summands * self.max_weight))

    def norm(self, rms: float, r: float, slots: int, word: int) -> int:
        """a, rounded by a uniform 32-bit word: rounding up would count norms above a threshold."""
        most = self.norm_unit(1)
        scaled = self.norm_unit(slots) * (rms / r) + word / _WORD
        return most if scaled >= most else math.floor(scaled)

    def cut(self, count: int, word: int) -> int:
        """c, exactly as often rounded up as it should be."""
        return (self.cut_unit * count * _WORD + self.entries * word) // (self.entries * _WORD)

    def check(self, a: int, c: int, weight: int) -> None:
        """Raise `RecoveryError` for sums that no honest clients add up to (S47)."""
        limits = {
            "lengths": (a, self.norm_unit(1) * weight),
            "cut entries": (c, self.cut_unit * weight),
        }
        for name, (value, most) in limits.items():
            if not 0 <= value <= most:
                raise RecoveryError(
                    f"the sum of {name} is {value}, outside 0...{most}: the sum is spoilt, by a "
                    "false upload or a wrong answer"
                )


@dataclass(frozen=True, slots=True)
class Sums:
    """What a round has added up."""

    length: float
    """|Y|, of the sum and not of the average"""
    weight: int
    """W: the sum of the integer weights; without weights, the number of summands"""
    weights_squared: int
    """W2"""
    norms: int = 0
    """sum(a), weighted; nothing where the range is pinned"""
    cut: int = 0
    """sum(c), weighted; nothing where the range is pinned or the round has one slot"""


@dataclass(frozen=True, slots=True)
class Codec:
    """How the next round is encoded, and what the rule remembers."""

    slots: int = 1
    """1: today's quantiser, with the task's bound."""
    r: float = 0.0
    """Of the last packed round or the next one; 0 before there was one."""
    stretch: float = 1.0
    """kappa over its start, of these slots or the last ones"""
    stretches: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """The same by slots, where they were in use; others begin with the present one."""
    pause: int = 0
    """Rounds of one slot that are still to come."""
    next_pause: int = _FIRST_PAUSE
    """How many there will be next time: twice as many, less one for every packed round."""
    clear_cuts: tuple[bool, ...] = ()
    """Of the last packed rounds, which ones cut more than a thousandth, and than they should."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the sums of a round reveal, for metrics; and what is to be done with its average."""

    rms: float
    share: float
    nu: float
    rho: float
    """|mean| over the average length of the clients' vectors: how much they agree."""
    kappa: float

    @property
    def coarse(self) -> bool:
        """Whether the average is mostly rounding."""
        return self.nu > COARSE

    @property
    def factor(self) -> float:
        """What the average is to be multiplied by: less than 1 where it is coarse."""
        return max(0.0, 1.0 - self.nu) if self.coarse else 1.0


@dataclass(frozen=True, slots=True)
class RangeRule:
    """The server's choice of range and slots."""

    packings: Mapping[int, Packing]
    """By slots; those that clients accept and that leave a level."""
    scalars: RangeScalars
    bound: float
    """Of rounds of one slot."""
    error: float = DEFAULT_ERROR
    low: float = SMALLEST_RANGE
    high: float = LARGEST_RANGE
    """The policy's interval for r; low = high pins it."""

    def __post_init__(self) -> None:
        check_range(self.low)
        check_range(self.high)
        if self.low > self.high:
            raise ParameterError(f"the range's lowest value {self.low} exceeds {self.high}")
        if not 0 < self.error < 1:
            raise ParameterError(f"error = {self.error} must be between 0 and 1")

    @property
    def pinned(self) -> bool:
        """Whether r is fixed; then clients send no scalars and refuse to be asked for them."""
        return self.low == self.high

    def read(self, codec: Codec, sums: Sums) -> Reading:
        """What the sums reveal; `RecoveryError` if no honest clients add up to them (S47)."""
        n, W = self.scalars.entries, sums.weight
        rms = sums.length / (math.sqrt(n) * W)  # at least: that of the mean
        mean, share, nu, kappa = rms, 0.0, 0.0, 0.0
        if not self.pinned:
            self.scalars.check(sums.norms, sums.cut, W)
            r = codec.r if codec.slots > 1 else self.bound
            unit = self.scalars.norm_unit(codec.slots)
            rms = max(rms, r * sums.norms / (unit * W))
            share = sums.cut / (self.scalars.cut_unit * W)
        if codec.slots > 1:
            nu = self._noise(codec.slots, codec.r, sums.weights_squared, sums.length**2)
            kappa = self._kappa(codec.slots, codec.stretch)
            if not self.pinned:
                self._check_length(codec, sums)
        return Reading(rms, share, nu, mean / rms if rms else 0.0, kappa)

    def follow(self, codec: Codec, sums: Sums) -> tuple[Codec, Reading]:
        """The next round's codec, and the reading of this one's sums.

        * `codec`: that of the round; start with `Codec()`, the first round has one slot.
        """
        reading = self.read(codec, sums)
        packed = codec.slots > 1
        pause = max(0, codec.pause - 1)
        if not reading.rms:  # nobody has changed anything, and nothing was measured
            return dataclasses.replace(codec, pause=pause), reading
        after = self._remember(codec, reading) if packed else codec
        slots, r = self._choose(after, reading, sums)
        if packed and (slots == 1 or self._is_lost(codec, after, reading)):
            pause = codec.next_pause
            longer = min(2 * pause, _LONGEST_PAUSE)
            after = Codec(r=codec.r, next_pause=longer)
        if pause or slots == 1:
            return dataclasses.replace(after, slots=1, r=codec.r, pause=pause), reading
        stretch = after.stretches.get(slots, after.stretch)
        return dataclasses.replace(after, slots=slots, r=r, stretch=stretch), reading

    def _remember(self, codec: Codec, reading: Reading) -> Codec:
        """kappa after a packed round: wider at once, narrower slowly, only where r followed it."""
        target, wanted = self._target(codec.slots), reading.kappa * reading.rms
        change = 1.0
        if codec.r >= 0.8 * wanted and reading.share > 2 * target:
            change = 2.0 if reading.share > 20 * target else 1.25
        elif codec.r <= 1.25 * wanted and reading.share < target / 2:
            change = 1 / 1.05
        stretch = min(max(codec.stretch * change, 0.5), 8.0)
        clear = reading.share > max(_CLEAR_SHARE, 2 * target)
        return dataclasses.replace(
            codec,
            next_pause=max(codec.next_pause - 1, _FIRST_PAUSE),
            stretch=stretch,
            stretches={**codec.stretches, codec.slots: stretch},
            clear_cuts=(*codec.clear_cuts, clear)[-_RECENT:],
        )

    def _is_lost(self, codec: Codec, after: Codec, reading: Reading) -> bool:
        """Whether packed rounds keep cutting entries: unequal clients, or a liar."""
        at_limit = codec.stretch == 8.0 and reading.share > 2 * self._target(codec.slots)
        return at_limit or sum(after.clear_cuts) >= _TOO_OFTEN

    def _choose(self, codec: Codec, reading: Reading, sums: Sums) -> tuple[int, float]:
        """The most slots with a predicted nu within the error, and r; one slot if there are none.

        Of a measured square, nu is rounding and not signal.
        """
        signal = sums.length**2 * max(0.0, 1.0 - reading.nu)
        for slots in sorted(self.packings, reverse=True):
            stretch = codec.stretches.get(slots, codec.stretch)
            r = self._kappa(slots, stretch) * reading.rms
            if codec.slots > 1:
                r = min(max(r, codec.r / 256), codec.r * 64)
            r = min(max(r, self.low), self.high)
            if self._noise(slots, r, sums.weights_squared, signal) <= self.error:
                return slots, r
        return 1, 0.0

    def _noise(self, slots: int, r: float, weights_squared: int, square: float) -> float:
        """nu"""
        packing = self.packings[slots]
        quantum = r / packing.levels
        noise = weights_squared * self.scalars.entries * quantum**2 * packing.variance
        return noise / square if square else math.inf

    def _kappa(self, slots: int, stretch: float) -> float:
        return stretch * (2.5 + math.log2(self.packings[slots].levels))

    def _target(self, slots: int) -> float:
        """The share of cut entries that costs as much as a little less rounding gains."""
        return 1 / (10 * self.packings[slots].levels ** 2)

    def _check_length(self, codec: Codec, sums: Sums) -> None:
        """The triangle inequality, with what rounding may add: it finds accidents, not liars."""
        n, packing = self.scalars.entries, self.packings[codec.slots]
        unit = self.scalars.norm_unit(codec.slots)
        deviation = codec.r / packing.levels * math.sqrt(packing.variance + 1 / 12)
        spread = 1.1 + 4 / math.sqrt(n)
        most = codec.r * math.sqrt(n) * (sums.norms + sums.weight) / unit
        most += spread * deviation * math.sqrt(n * sums.weights_squared)
        if sums.length > most:
            raise RecoveryError(
                f"the sum is {sums.length:.3g} long, and the parties' own lengths allow "
                f"{most:.3g}: it is spoilt, by a false upload or a wrong answer"
            )
