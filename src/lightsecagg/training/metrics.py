"""Figures that clients measure on their own data; only their weighted means leave the masks.

A task names them with their least and largest values. Each becomes one extra masked coordinate of
the upload, a number in [-1, 1], weighted like the rest: the server recovers

    sum_i s_i m_i / sum_i s_i

to within `Metric.error`, and never the value m_i of one client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightsecagg.errors import ConfigurationError, InputRefused

MAX_METRICS = 64
"""The most metrics of a task: each is a coordinate of every upload."""
MAX_NAME = 64
"""Characters of a metric's name."""
_FLOAT32 = 2.0**-24
"""Relative error of a number that was rounded to float32."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A named figure and the range that it is clipped to."""

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME:
            raise ConfigurationError(
                f"the metric {self.name!r} must have a name of 1 to {MAX_NAME} characters"
            )
        if not self.name.isprintable():
            raise ConfigurationError(f"the name of the metric {self.name!r} is not printable")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigurationError(
                f"the metric {self.name!r} needs two finite bounds, low < high; it has "
                f"{self.low} and {self.high}"
            )

    def to_extra(self, value: float) -> float:
        """The value within [-1, 1]; `InputRefused` for NaN, which must not reach the mask."""
        if math.isnan(value):
            raise InputRefused(f"the metric {self.name!r} is not a number; the update is kept back")
        clipped = min(max(value, self.low), self.high)
        return 2.0 * (clipped - self.low) / (self.high - self.low) - 1.0

    def from_extra(self, mean: float) -> float:
        """The mean of the values whose `to_extra` has this mean; rounding stays in the range."""
        value = self.low + (mean + 1.0) / 2.0 * (self.high - self.low)
        return min(max(value, self.low), self.high)

    def error(self, rounding: float) -> float:
        """How far the mean may be off if quantisation moved its coordinate by up to `rounding`.

        * `rounding`: as a share of the bound that the coordinate was scaled to.
        """
        return (rounding + _FLOAT32) * (self.high - self.low) / 2.0


def metrics_of(bounds: Mapping[str, tuple[float, float]]) -> tuple[Metric, ...]:
    """`Task.metrics`, checked."""
    if len(bounds) > MAX_METRICS:
        raise ConfigurationError(f"{len(bounds)} metrics; a task names {MAX_METRICS} at most")
    try:
        metrics = [Metric(name, float(low), float(high)) for name, (low, high) in bounds.items()]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "a task's metrics are a dict such as {'accuracy': (0, 1)}: name, least and largest"
        ) from error
    for metric in metrics:
        if metric.name == "local_steps":
            raise ConfigurationError("a metric cannot be called 'local_steps': fednova's extra is")
    return tuple(metrics)


def to_extras(metrics: tuple[Metric, ...], values: Mapping[str, float]) -> dict[str, float]:
    """What one client measured, as extras of its update, in the order of `metrics`."""
    names = [metric.name for metric in metrics]
    if sorted(values) != sorted(names):
        raise ConfigurationError(
            f"measure returned {sorted(values)}; the task's metrics are {sorted(names)}"
        )
    return {metric.name: metric.to_extra(float(values[metric.name])) for metric in metrics}
