"""A client's contribution to one round, and the masked vector it becomes.

The vector that is aggregated securely is `[delta, extras]`, weighted by the sample count like
any other input. The server therefore recovers only

    sum_i s_i * delta_i,    sum_i s_i * extra_i,    sum_i s_i

and divides the first two by the third. It never sees a value of one client, and everything the
server does afterwards (`ServerOptimizer`) is a function of these averages alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import InputRefused, ParameterError

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """x_i(t) of Section 2 as a difference to the global model, with its weight."""

    delta: Vector = field(repr=False)
    """Trained model minus global model, flat, in the order of the task's `Layout`."""
    samples: int = field(repr=False)
    """s_i, the number of training examples: secret, it rides as a masked coordinate."""
    extras: Mapping[str, float] = field(repr=False, default_factory=dict)
    """Further scalars to be averaged with the same weights, each within [-1, 1]; secret too."""


@dataclass(frozen=True, slots=True)
class AverageUpdate:
    """What the server recovers: the weighted averages of all survivors' updates."""

    delta: Vector = field(repr=False)
    """sum s_i delta_i / sum s_i."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """sum s_i extra_i / sum s_i, by name."""


def pack(update: LocalUpdate, *, bound: float = 1.0) -> Vector:
    """The vector to hand to secure aggregation: delta, then the extras scaled from 1 to `bound`.

    `bound` is the largest coordinate that the quantiser accepts; scaling lets the extras use the
    whole of that range, whatever it is.
    """
    for name, value in update.extras.items():
        if not -1.0 <= value <= 1.0:
            raise InputRefused(f"the extra scalar {name!r} is not within [-1, 1]; scale it down")
    tail = np.array([value * bound for value in update.extras.values()], dtype=np.float32)
    return np.concatenate([update.delta, tail])


def unpack(average: Vector, names: Sequence[str], *, bound: float = 1.0) -> AverageUpdate:
    """Undo `pack` on the weighted average; `names` are `LocalConfig.extras`, in their order."""
    if len(average) < len(names):
        raise ParameterError(f"a vector of {len(average)} cannot end in {len(names)} extras")
    d = len(average) - len(names)
    extras = {name: float(value) / bound for name, value in zip(names, average[d:], strict=True)}
    return AverageUpdate(np.asarray(average[:d], dtype=np.float32), extras)


def weighted_average(updates: Sequence[LocalUpdate]) -> AverageUpdate:
    """What secure aggregation computes, in the clear: the yardstick for the real thing."""
    if not updates:
        raise ParameterError("no update to average")
    names = list(updates[0].extras)
    total = sum(update.samples for update in updates)
    mean = np.zeros(len(updates[0].delta) + len(names), dtype=np.float64)
    for update in updates:
        mean += pack(update) * (update.samples / total)
    return unpack(mean.astype(np.float32), names)
