"""How a server tells its clients to train in a round, and what they measure beside it.

Instructions travel with the global model. Their hash is part of the round's settings, which every
client signs: whoever takes part in a sum was told the same.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightsecagg.crypto.transcript import context_hash
from lightsecagg.training.metrics import MAX_METRICS, MAX_NAME, Metric

MAX_SETTINGS = 16
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Value = int | float | _Name


class Instructions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of local training by name; clients keep their own for what is not named."""

    local: Annotated[dict[_Name, Value], msgspec.Meta(max_length=MAX_SETTINGS)] = {}
    """Keys and values of `LocalConfig`."""
    metrics: Annotated[
        tuple[tuple[_Name, float, float], ...], msgspec.Meta(max_length=MAX_METRICS)
    ] = ()
    """Name, least and largest value of what the last coordinates of an upload hold."""

    @property
    def digest(self) -> bytes:
        """What the settings of the round name."""
        encoded = msgspec.msgpack.encode(self, order="deterministic")
        return context_hash("instructions for training", encoded)


def of_metrics(metrics: tuple[Metric, ...]) -> tuple[tuple[str, float, float], ...]:
    """Metrics as they travel."""
    return tuple((metric.name, metric.low, metric.high) for metric in metrics)
