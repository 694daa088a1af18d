"""What repeated measurements come to: a median between its quartiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the interquartile range around it.

    f"{Spread.of([4.5, 4.7, 4.8]):.2f}" is "4.70 (4.60-4.75)". What is the same in every round,
    such as most counts of bytes, is printed without brackets.
    """

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        low, median, high = (float(q) for q in np.quantile(list(values), (0.25, 0.5, 0.75)))
        return cls(median, low, high)

    @classmethod
    def exactly(cls, value: float) -> Spread:
        """Of what does not vary."""
        return cls(value, value, value)

    def __truediv__(self, other: Spread) -> Spread:
        """The ratio of the medians, between the least and the most that the quartiles allow."""
        return Spread(self.median / other.median, self.low / other.high, self.high / other.low)

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __format__(self, spec: str) -> str:
        if self.low == self.high:
            return format(self.median, spec)
        return f"{self.median:{spec}} ({self.low:{spec}}-{self.high:{spec}})"

    def agrees_with(self, other: Spread) -> bool:
        """Whether each median lies in the other's interquartile range."""
        return self.median in other and other.median in self


def error_bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """How far the quartiles lie below and above each median, as matplotlib takes it."""
    return [
        [each.median - each.low for each in spreads],
        [each.high - each.median for each in spreads],
    ]


def as_document(value: Any) -> Any:
    """The same with every spread as an object of its three numbers, for JSON."""
    if isinstance(value, Spread):
        return asdict(value)
    if isinstance(value, Mapping):
        return {name: as_document(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_document(part) for part in value]
    return value


def spreads_in(document: Any, path: str = "") -> dict[str, Spread]:
    """Every spread of such a document, by where it stands."""
    if isinstance(document, Mapping):
        if set(document) == {"median", "low", "high"}:
            return {path: Spread(**document)}
        parts: Iterable[tuple[Any, Any]] = document.items()
    elif isinstance(document, list):
        parts = enumerate(document)
    else:
        return {}
    found: dict[str, Spread] = {}
    for name, part in parts:
        found |= spreads_in(part, f"{path}/{name}" if path else str(name))
    return found
