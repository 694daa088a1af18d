"""N clients and their server in the asynchronous mode: what a run needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightsecagg_lab.simulation.metering import Meter
from lightsecagg_lab.simulation.workload import Vector


@dataclass(frozen=True, slots=True)
class Flush:
    """What became of one buffer."""

    time: int
    owners: tuple[int, ...]
    staleness: tuple[int, ...] = ()
    """t - t_i, by owner."""
    mean: NDArray[np.float64] | None = field(default=None, repr=False)
    """The weighted mean of the updates; None if the buffer was lost."""
    exact: bool | None = None
    """Whether the sum over F_q is what it must be; None without protection, or if lost."""
    responders: int = 0
    lost: str | None = None
    """Why the buffer was lost."""


class Federation(Protocol):
    """N clients and their server, between a schedule and a workload."""

    meter: Meter

    @property
    def time(self) -> int:
        """t: the version of the current model."""

    def publish(self, model: bytes, version: int) -> None:
        """The hash of the model of this version."""

    def ready(self, client: int) -> bool:
        """Whether this client may upload; not while too many of its updates wait."""

    def upload(self, client: int, vector: Vector, version: int, model: bytes) -> list[Flush]:
        """A client hands in its update; the buffers that this fills."""

    def leave(self, client: int) -> list[Flush]:
        """A client is gone."""

    def rejoin(self, client: int) -> list[Flush]:
        """A client is back."""

    def flush(self) -> list[Flush]:
        """The server will not wait any longer for a full buffer."""
