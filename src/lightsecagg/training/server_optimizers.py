"""Server optimisers on the recovered average: FedAvg, FedAvgM, FedAdam, FedYogi; NumPy only.

They follow Reddi et al., "Adaptive Federated Optimization" (2021), Algorithm 2, with the average
delta as a pseudo-gradient that points downhill. All of them need the averages of `AverageUpdate`
and nothing else, so they work unchanged on the output of secure aggregation.

*FedNova.* Each client uploads `delta_i / a_i`, where `a_i` is its number of effective steps, and
the extra `local_steps = a_i / step_limit`. With the weights `p_i = s_i / sum s`, the server moves
by `(sum p_i a_i) * (sum p_i delta_i / a_i)`: the product of two of the averages.

*Batch-norm statistics* are averaged, never optimised: an adaptive step, momentum or a learning
rate other than one can make a running variance negative. Quantisation noise can as well, so
running variances are clamped at zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import InputRefused, ParameterError
from lightsecagg.training.config import LocalConfig
from lightsecagg.training.updates import AverageUpdate, Vector

ServerAlgorithm = Literal["fedavg", "fedavgm", "fedadam", "fedyogi"]


class Coordinates(Protocol):
    """What the server must know of a model's `Layout`; it needs no torch for that."""

    @property
    def size(self) -> int:
        """Length of the vector."""

    @property
    def parameters(self) -> int:
        """How many leading coordinates are parameters; the rest are batch-norm statistics."""

    @property
    def nonnegative(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) that hold running variances."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Which server optimiser, and its constants (names as in Reddi et al.)."""

    algorithm: ServerAlgorithm = "fedavg"
    """How the average delta is turned into a step."""
    learning_rate: float = 1.0
    """eta_g; 1 is plain averaging, the adaptive methods want about 0.01 to 0.1."""
    momentum: float = 0.9
    """FedAvgM's momentum, and beta_1 of FedAdam and FedYogi."""
    beta2: float = 0.99
    """Decay of the second moment in FedAdam and FedYogi."""
    adaptivity: float = 1e-3
    """tau: the smaller, the more adaptive; also sets the initial second moment tau^2."""

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(ServerAlgorithm):
            raise ParameterError(
                f"server algorithm is {self.algorithm!r}; "
                f"choose one of {', '.join(get_args(ServerAlgorithm))}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ParameterError(f"server learning_rate is {self.learning_rate}; must be positive")
        for name, value in (("momentum", self.momentum), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ParameterError(f"server {name} is {value}; it must lie in [0, 1)")
        if not 0 < self.adaptivity < math.inf:
            raise ParameterError(f"server adaptivity is {self.adaptivity}; must be positive")


class ServerOptimizer:
    """x(t) -> x(t+1): applies one average update per round to the global model's vector."""

    def __init__(
        self, config: ServerConfig, coordinates: Coordinates, local: LocalConfig | None = None
    ) -> None:
        self._config = config
        self._local = local or LocalConfig()
        self._coordinates = coordinates
        self._m: NDArray[np.float64] = np.zeros(coordinates.parameters)
        self._v: NDArray[np.float64] = np.full(coordinates.parameters, config.adaptivity**2)

    def step(self, model: Vector, average: AverageUpdate, *, rate: float = 1.0) -> Vector:
        """The next global model; `model` is left as it is.

        * `rate`: multiplies the learning rate of this step, for schedules.
        """
        self._check(model, average)
        p = self._coordinates.parameters
        after = model.astype(np.float64)
        delta = average.delta[:p].astype(np.float64)
        after[:p] += rate * self._parameter_step(delta, average.extras)
        after[p:] += average.delta[p:]
        for start, stop in self._coordinates.nonnegative:
            np.maximum(after[start:stop], 0.0, out=after[start:stop])
        result = after.astype(np.float32)
        if not np.isfinite(result).all():
            raise InputRefused(
                "the server step left the range of float32; lower the server learning rate"
            )
        return result

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Everything to store with the model in order to resume: feed it to `load_state`."""
        return {"m": self._m.copy(), "v": self._v.copy()}

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Resume from what `state` returned."""
        for name in ("m", "v"):
            if name not in state or state[name].shape != (self._coordinates.parameters,):
                raise ParameterError(
                    f"optimiser state {name!r} must be a vector of "
                    f"{self._coordinates.parameters}; it belongs to another model"
                )
        self._m = np.array(state["m"], dtype=np.float64)
        self._v = np.array(state["v"], dtype=np.float64)

    def _check(self, model: Vector, average: AverageUpdate) -> None:
        for name, vector in (("model", model), ("average delta", average.delta)):
            if vector.shape != (self._coordinates.size,):
                raise ParameterError(
                    f"the {name} has shape {vector.shape}; the layout has "
                    f"{self._coordinates.size} coordinates"
                )
        if not np.isfinite(average.delta).all():
            raise InputRefused("the average delta is not finite; the global model is unchanged")

    def _parameter_step(
        self, delta: NDArray[np.float64], extras: Mapping[str, float]
    ) -> NDArray[np.float64]:
        if self._local.algorithm == "fednova":
            if "local_steps" not in extras:
                raise ParameterError("fednova needs the average of the extra 'local_steps'")
            if extras["local_steps"] <= 0:
                raise InputRefused(
                    "the average number of local steps is not positive: some client lied, or the "
                    "rounding is too coarse for step_limit; the global model is unchanged"
                )
            delta = delta * (extras["local_steps"] * self._local.step_limit)
        config = self._config
        if config.algorithm == "fedavg":
            return config.learning_rate * delta
        if config.algorithm == "fedavgm":
            self._m = config.momentum * self._m + delta
            return config.learning_rate * self._m
        self._m = config.momentum * self._m + (1 - config.momentum) * delta
        square = delta**2
        if config.algorithm == "fedadam":
            self._v = config.beta2 * self._v + (1 - config.beta2) * square
        else:
            self._v = self._v - (1 - config.beta2) * square * np.sign(self._v - square)
        return config.learning_rate * self._m / (np.sqrt(self._v) + config.adaptivity)
