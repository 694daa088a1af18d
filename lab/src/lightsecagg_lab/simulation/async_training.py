"""A model that is trained by buffers of stale updates: the workload of asynchronous learning.

Batches are seeded by (seed, job, client), apart from the schedule and from rounding, so runs with
and without protection train on the same batches for as long as their models agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto.transcript import uint
from lightsecagg.errors import ParameterError
from lightsecagg.protocol.settings import hash_model
from lightsecagg.training import (
    AverageUpdate,
    LocalConfig,
    ServerConfig,
    ServerOptimizer,
    Task,
    TaskConfig,
    evaluate,
    initial_model,
    local_update,
    model_layout,
)


class TrainingWorkload:
    """x(t+1) = x(t) + eta_g * mean, Eq. (35)-(37), for any task of the training engine.

    Updates count alike, whatever the sizes of the clients' data sets, as in FedBuff.

    * `annealing`: multiplies eta_g, by version t; constant if there is none.
    """

    def __init__(
        self,
        task: Task | TaskConfig,
        local: LocalConfig,
        server: ServerConfig,
        *,
        max_staleness: int,
        seed: int = 0,
        annealing: Callable[[int], float] | None = None,
    ) -> None:
        if local.extras:
            raise ParameterError(
                f"{local.algorithm} uploads {', '.join(local.extras)} beside the update, which the "
                "asynchronous mode does not; use fedavg or fedprox"
            )
        layout = model_layout(task)
        self.dimension = layout.size
        self.seconds = 0.0
        """CPU seconds of local training so far."""
        self._task = task
        self._local = local
        self._optimizer = ServerOptimizer(server, layout, local)
        self._max_staleness = max_staleness
        self._seed = seed
        self._annealing = annealing or (lambda version: 1.0)
        self._version = 0
        self._models = {0: initial_model(task, seed=seed)}

    @property
    def model(self) -> NDArray[np.float32]:
        """The current model's vector."""
        return self._models[self._version]

    @property
    def model_hash(self) -> bytes:
        """Hash of the current model and its version: after a lost buffer the model is the same,

        and clients would hand in no second update from it. Nothing is secret in a simulation.
        """
        return hash_model(uint(self._version) + self.model.tobytes())

    def update(self, client: int, version: int, job: int) -> NDArray[np.float32]:
        """Train from the model of this version, on the client's data."""
        started = time.process_time()
        result = local_update(
            self._task,
            client,
            self._models[version],
            self._local,
            seed=self._seed,
            round_index=job,
        )
        self.seconds += time.process_time() - started
        return result.delta

    def advance(self, mean: NDArray[np.float64] | None) -> None:
        """The next model; the same again if the buffer was lost."""
        model = self.model
        if mean is not None:
            average = AverageUpdate(mean.astype(np.float32))
            model = self._optimizer.step(model, average, rate=self._annealing(self._version))
        self._version += 1
        self._models[self._version] = model
        self._models.pop(self._version - self._max_staleness - 1, None)

    def evaluate(self) -> dict[str, float]:
        """The task's figures for the current model."""
        return evaluate(self._task, self.model)
