"""Staleness functions s(tau), Eq. (26), and their integer weights in F_q, Eq. (34).

An update that was trained from the model of round t_i and is used in round t is tau = t - t_i
rounds stale. The server discounts it by s(tau), with s(0) = 1 and s decreasing. Masks live in a
field, so clients and server apply integers instead:

    w(tau) = max(1, round(c_g * s(tau))),   tau = 0 .. tau_max

a public table, divided by its greatest common divisor: only ratios matter, because the weighted sum
is divided by the sum of the weights, and small weights leave more of the field to the updates. No
weight is ever 0: an update whose mask is consumed counts.

The paper rounds at random without saying whose coin it is; clients with different coins would
answer for different sums. `stochastic_weights` takes the coins as an argument, so that everybody
can derive the same ones (honest-but-curious only: a server that picks its coin picks the weights).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lightsecagg.errors import ParameterError

StalenessFunction = Callable[[int], float]
"""s: rounds of staleness -> discount in (0, 1], with s(0) = 1 and never increasing."""

MAX_SCALE = 2**31
"""c_g and with it every weight stays below any 32-bit modulus of use."""


def constant() -> StalenessFunction:
    """s(tau) = 1: no discount."""
    return lambda tau: 1.0


def polynomial(alpha: float = 1.0) -> StalenessFunction:
    """s(tau) = (1 + tau)^-alpha, the paper's choice with alpha = 1."""
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ParameterError(f"staleness exponent alpha = {alpha} must be finite and >= 0")
    return lambda tau: float((1 + tau) ** -alpha)


def hinge(a: float, b: int) -> StalenessFunction:
    """s(tau) = 1 up to tau = b, then 1 / (a (tau - b) + 1)."""
    if not (math.isfinite(a) and a >= 0):
        raise ParameterError(f"hinge slope a = {a} must be finite and >= 0")
    if b < 0:
        raise ParameterError(f"hinge position b = {b} must be >= 0")
    return lambda tau: 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)


class Staleness(StrEnum):
    """The functions s(tau) by name."""

    CONSTANT = "constant"
    POLY = "poly"
    HINGE = "hinge"

    def function(self, alpha: float = 1.0, knee: int = 3) -> StalenessFunction:
        """s(tau): `alpha` is poly's exponent and hinge's slope, `knee` where hinge begins."""
        match self:
            case Staleness.CONSTANT:
                return constant()
            case Staleness.POLY:
                return polynomial(alpha)
            case Staleness.HINGE:
                return hinge(alpha, knee)


@dataclass(frozen=True, slots=True)
class StalenessTable:
    """The integer weights that every party applies; part of the round context."""

    weights: tuple[int, ...]
    """w(0), ..., w(tau_max): positive, never increasing, without a common divisor."""
    scale: int
    """c_g, from which they were rounded."""

    def __post_init__(self) -> None:
        _check_scale(self.scale)
        if not self.weights:
            raise ParameterError("a staleness table needs at least the weight of tau = 0")
        if min(self.weights) < 1 or max(self.weights) > MAX_SCALE:
            raise ParameterError(f"staleness weights must be in [1, 2^31], not {self.weights}")
        if any(later > earlier for earlier, later in pairwise(self.weights)):
            raise ParameterError(f"staleness weights must not increase with tau: {self.weights}")
        if math.gcd(*self.weights) != 1:
            raise ParameterError(
                f"staleness weights {self.weights} have the common divisor "
                f"{math.gcd(*self.weights)}; divide by it"
            )

    @classmethod
    def from_function(
        cls, function: StalenessFunction, scale: int, max_staleness: int
    ) -> StalenessTable:
        """Tabulate max(1, round(c_g * s(tau))) for tau = 0 .. tau_max; halves round up."""
        _check_scale(scale)
        if max_staleness < 0:
            raise ParameterError(f"tau_max = {max_staleness} must be >= 0")
        rounded = [
            max(1, math.floor(scale * _discount(function, tau) + 0.5))
            for tau in range(max_staleness + 1)
        ]
        divisor = math.gcd(*rounded)
        return cls(tuple(weight // divisor for weight in rounded), scale)

    @property
    def max_staleness(self) -> int:
        """tau_max"""
        return len(self.weights) - 1

    @property
    def max_weight(self) -> int:
        """w(0), the largest: what the range budget of the quantiser must allow for."""
        return self.weights[0]

    @property
    def ratio(self) -> float:
        """max w / min w, which a client bounds by R."""
        return self.weights[0] / self.weights[-1]

    def weight(self, tau: int) -> int:
        """w(tau)"""
        if not 0 <= tau <= self.max_staleness:
            raise ParameterError(f"staleness tau = {tau} is outside [0, {self.max_staleness}]")
        return self.weights[tau]

    def to_bytes(self) -> bytes:
        """The same bytes for the same table: c_g, the number of weights, the weights."""
        count = len(self.weights)
        return struct.pack(f">{count + 2}I", self.scale, count, *self.weights)


def stochastic_weights(
    function: StalenessFunction, scale: int, staleness: Sequence[int], words: Sequence[int]
) -> tuple[int, ...]:
    """c_g * Q_{c_g}(s(tau)) of Eq. (34) for each tau, at least 1.

    c_g * s(tau) is rounded up where its fraction exceeds word / 2^32; for uniform words that is
    unbiased.

    - `words` are uniform 32-bit integers, one per element of `staleness`.
    """
    _check_scale(scale)
    if len(words) != len(staleness):
        raise ParameterError(f"{len(words)} random words for {len(staleness)} updates")
    weights = []
    for tau, word in zip(staleness, words, strict=True):
        if tau < 0:
            raise ParameterError(f"staleness tau = {tau} must be >= 0")
        if not 0 <= word < 2**32:
            raise ParameterError(f"{word} is not a 32-bit random word")
        exact = scale * _discount(function, tau)
        down = math.floor(exact)
        weights.append(max(1, down + ((exact - down) * 2.0**32 > word)))
    return tuple(weights)


def _discount(function: StalenessFunction, tau: int) -> float:
    value = function(tau)
    if not 0 <= value <= 1 or (tau == 0 and value != 1):
        raise ParameterError(
            f"s({tau}) = {value}: a staleness function starts at s(0) = 1 and stays in [0, 1]"
        )
    return value


def _check_scale(scale: int) -> None:
    if not 1 <= scale <= MAX_SCALE:
        raise ParameterError(f"c_g = {scale} must be in [1, 2^31]")
