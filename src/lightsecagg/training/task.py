"""The task interface: what a user implements to federate their own model and data.

A task defines the model, the examples of client i, the loss, and the evaluation of a model. It does
not deal with batches, optimisers, vectors, masks or the network. `docs/own-task.md` is the
tutorial, and `lightsecagg task template` writes a file to start from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.training.config import TaskConfig
from lightsecagg.training.plugin import load_named

EVALUATION_BATCH = 256
CLASSIFICATION: Final = {"accuracy": (0.0, 1.0), "loss": (0.0, 10.0)}
"""Metrics of a classifier; a larger loss counts as the largest."""


class Data(Protocol):
    """A client's data: anything with a length and examples by number, such as a torch Dataset."""

    def __len__(self) -> int:
        """Number of examples."""

    def __getitem__(self, index: int, /) -> Any:
        """One example, of a kind that torch's `default_collate` can stack."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Data that is two tensors: fast to cut into batches of (inputs, targets)."""

    inputs: Tensor = field(repr=False)
    """One row per example."""
    targets: Tensor = field(repr=False)
    """One row per example."""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ParameterError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets; they go in pairs"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    @classmethod
    def from_arrays(cls, inputs: NDArray[Any], targets: NDArray[Any]) -> Examples:
        """Copies of two NumPy arrays."""
        return cls(torch.from_numpy(np.array(inputs)), torch.from_numpy(np.array(targets)))


def make_batch(data: Data, indices: Sequence[int]) -> Any:
    """The chosen examples, stacked."""
    if isinstance(data, Examples):
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return data.inputs[chosen], data.targets[chosen]
    return default_collate([data[index] for index in indices])


def batches(data: Data, size: int) -> Iterator[Any]:
    """All examples in order, for evaluation."""
    for start in range(0, len(data), size):
        yield make_batch(data, range(start, min(start + size, len(data))))


class Task(ABC):
    """What is trained, on whose data. Implement `model` and `client_data`; override the rest.

    The constructor gets the `TaskConfig` (clients, data_dir, seed, options ...) and must pass it
    to `super().__init__`. Every party builds the same task from the same configuration.
    """

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Its random weights come from torch's generator, which the caller seeds."""

    @abstractmethod
    def client_data(self, client: int) -> Data:
        """The training examples of client 0, ..., clients - 1."""

    def test_data(self) -> Data:
        """The examples that `evaluate` uses; only the evaluating party needs them."""
        raise ConfigurationError(
            f"the task {self.config.task!r} has no test data; override test_data or evaluate"
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of a batch, a scalar to differentiate. Here: cross-entropy of classes."""
        inputs, targets = _on_device(model, batch)
        logits = model(inputs)
        _refuse_bad_labels(targets, logits)
        return nn.functional.cross_entropy(logits, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures to report. Here: accuracy and mean loss on the test data."""
        data = self.test_data()
        if not len(data):
            raise ConfigurationError(
                f"the task {self.config.task!r} has no test examples to evaluate on"
            )
        return _classify(model, data)

    @property
    def can_evaluate(self) -> bool:
        """Whether this task can evaluate a model, with `test_data` or `evaluate`."""
        own = type(self)
        return own.test_data is not Task.test_data or own.evaluate is not Task.evaluate

    @property
    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """What every client measures in each round: name -> least and largest value.

        Each rides as one more masked coordinate of the upload; the server learns the means,
        weighted by sample counts. A class attribute will do: `metrics = {"accuracy": (0, 1)}`.
        Here: accuracy and loss, where `client_metrics` of the configuration asks for them.
        """
        return CLASSIFICATION if self.config.client_metrics else {}

    def validation_data(self, client: int) -> Data:
        """What `measure` uses; here all that the client trains on."""
        return self.client_data(client)

    def measure(self, model: nn.Module, client: int) -> dict[str, float]:
        """One client's values of `metrics`, for the global model that a round begins with.

        Here: those of accuracy and mean loss that `metrics` names, on the validation data.
        """
        figures = _classify(model, self.validation_data(client))
        return {name: value for name, value in figures.items() if name in self.metrics}

    def shared(self, name: str) -> bool:
        """Whether this state-dict entry is federated. What is not stays as `model()` made it.

        Say False for a frozen backbone, and let `model()` load the same weights everywhere.
        """
        return True

    @property
    def options(self) -> dict[str, str]:
        """The `--task-option key=value` pairs of the command line."""
        return dict(self.config.options)


def _classify(model: nn.Module, data: Data) -> dict[str, float]:
    """Accuracy and mean cross-entropy of a classifier."""
    correct, loss = 0, 0.0
    for batch in batches(data, EVALUATION_BATCH):
        inputs, targets = _on_device(model, batch)
        logits = model(inputs)
        _refuse_bad_labels(targets, logits)
        loss += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(dim=1) == targets).sum())
    return {"accuracy": correct / len(data), "loss": loss / len(data)}


def _on_device(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A pair of tensors, where the model is: a task that returns a CUDA model trains on CUDA."""
    inputs, targets = batch
    first = next(model.parameters(), None)
    device = inputs.device if first is None else first.device
    return inputs.to(device), targets.to(device)


def _refuse_bad_labels(targets: Tensor, logits: Tensor) -> None:
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= logits.shape[1]:
        raise ConfigurationError(
            f"the labels run from {low} to {high}, but the model has {logits.shape[1]} outputs; "
            "number the classes from 0"
        )


def load_task(config: TaskConfig) -> Task:
    """Build the task that `config.task` names: built in, or `package.module:Task`.

    The part before the colon is a module, looked for in the working directory too, or a path that
    ends in `.py`. The part after it is called with the configuration.
    """
    if ":" not in config.task:
        from lightsecagg.training.builtin_tasks import builtin_task

        return builtin_task(config)
    factory = load_named(config.task, "--task")
    attribute = config.task.rpartition(":")[2]
    if isinstance(factory, type):
        _check_class(config.task, factory)
    task = factory(config)
    if not isinstance(task, Task):
        raise ConfigurationError(
            f"--task {config.task}: {attribute}(config) returned a {type(task).__name__}, not a "
            "subclass of lightsecagg.training.Task"
        )
    if not isinstance(getattr(task, "config", None), TaskConfig):
        raise ConfigurationError(
            f"--task {config.task}: {attribute}.__init__ must call super().__init__(config)"
        )
    return task


def _check_class(name: str, kind: type) -> None:
    if not issubclass(kind, Task):
        raise ConfigurationError(
            f"--task {name}: {kind.__name__} is not a subclass of lightsecagg.training.Task"
        )
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise ConfigurationError(
            f"--task {name}: {kind.__name__} lacks {' and '.join(missing)}; "
            "`lightsecagg task template` shows what they return"
        )


@lru_cache(maxsize=4)
def _loaded(config: TaskConfig) -> Task:
    return load_task(config)


def as_task(task: Task | TaskConfig) -> Task:
    """The task itself, or the one that the configuration names (loaded once per process)."""
    return task if isinstance(task, Task) else _loaded(task)
