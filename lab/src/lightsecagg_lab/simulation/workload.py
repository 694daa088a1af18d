"""What the clients of an asynchronous simulation compute."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto.transcript import uint
from lightsecagg.protocol.settings import hash_model

Vector = NDArray[np.float32] | NDArray[np.float64]


class Workload(Protocol):
    """What clients compute, and what the server does with the mean of a buffer."""

    @property
    def dimension(self) -> int:
        """d"""

    @property
    def model_hash(self) -> bytes:
        """Hash of the current model; another for every version, also after a lost buffer."""

    def update(self, client: int, version: int, job: int) -> Vector:
        """The update of a client that trained from the model of this version.

        `job` counts the updates of the whole run and seeds the client's batches.
        """

    def advance(self, mean: NDArray[np.float64] | None) -> None:
        """Make the model of the next version; None if the buffer was lost."""


class RandomVectors:
    """Uniform random vectors instead of updates, for tests of the protocol alone."""

    def __init__(self, dimension: int, bound: float = 1.0, seed: int = 0) -> None:
        self.dimension = dimension
        self._bound = bound
        self._seed = seed
        self._version = 0

    @property
    def model_hash(self) -> bytes:
        """There is no model; the version stands for it."""
        return hash_model(uint(self._version))

    def update(self, client: int, version: int, job: int) -> Vector:
        """A vector of this client and job."""
        generator = np.random.default_rng((self._seed, client, job))
        return generator.uniform(-self._bound, self._bound, self.dimension)

    def advance(self, mean: NDArray[np.float64] | None) -> None:
        """Nothing learns."""
        self._version += 1
