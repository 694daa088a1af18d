"""The tasks that come with the package: a data set, a partition and a model, by name.

`synthetic` has the shapes of the paper's Table 2 and random pixels: for timing, where pixel
values do not matter.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import nn

from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.training import partition
from lightsecagg.training.config import TaskConfig
from lightsecagg.training.datasets import DATASETS, Dataset, read_dataset
from lightsecagg.training.models import build_model
from lightsecagg.training.task import Examples, Task

DEFAULT_MODELS = {
    "digits": "mlp",
    "mnist": "cnn",
    "fashion-mnist": "cnn",
    "cifar10": "lenet5",
    "femnist": "cnn",
    "folder": "mobilenetv3-small",
    "npz": "mlp",
    "csv": "mlp",
}


class PaperModel(NamedTuple):
    """A learning task of the paper: its model, the shape of its data, and d."""

    model: str
    shape: tuple[int, ...]
    classes: int
    parameters: int


# Table 2 and Appendix F.5, by the data set that the paper trains on
PAPER_MODELS = {
    "mnist": PaperModel("logistic", (1, 28, 28), 10, 7_850),
    "femnist": PaperModel("cnn", (1, 28, 28), 62, 1_206_590),
    "cifar10": PaperModel("mobilenetv3-small", (3, 32, 32), 1000, 3_111_462),
    "gld23k": PaperModel("efficientnet-b0", (3, 224, 224), 1000, 5_288_548),
    "async-mnist": PaperModel("lenet5", (1, 28, 28), 10, 61_706),
    "async-cifar10": PaperModel("lenet5", (3, 32, 32), 10, 62_006),
}


def builtin_task(config: TaskConfig) -> Task:
    """The built-in task of that name."""
    if config.options:
        raise ParameterError(f"the built-in task {config.task!r} takes no --task-option")
    if config.task.startswith("synthetic"):
        return SyntheticTask(config)
    if config.task not in DATASETS:
        raise ParameterError(
            f"there is no task {config.task!r}; choose one of {', '.join(DATASETS)}, "
            "synthetic-<paper task>, or your own as package.module:Task"
        )
    return DatasetTask(config)


class DatasetTask(Task):
    """Classification of one of the data sets, dealt to the clients by one of the partitions."""

    @cached_property
    def dataset(self) -> Dataset:
        """Read on first use."""
        config = self.config
        if config.partition == "local" and config.task in ("npz", "csv") and not config.classes:
            raise ConfigurationError(
                "with partition local each client knows its own labels only: set classes, or the "
                "clients' models would differ in size"
            )
        return read_dataset(config)

    @cached_property
    def parts(self) -> list[partition.Indices]:
        """The examples of each client, by number."""
        config, data = self.config, self.dataset
        rng = np.random.default_rng(config.seed)
        labels = data.train_targets
        match config.partition:
            case "local":
                everything = np.arange(len(labels), dtype=np.int64)
                parts = [everything] * config.clients
            case "iid":
                parts = partition.iid(len(labels), config.clients, rng)
            case "dirichlet":
                parts = partition.dirichlet(labels, config.clients, config.dirichlet_alpha, rng)
            case "shards":
                parts = partition.shards(labels, config.clients, config.shards_per_client, rng)
            case "natural":
                if data.groups is None:
                    raise ConfigurationError(
                        f"the natural partition needs to know who wrote what, and {data.name} "
                        "does not say; pass --writer-ids FILE.npz with the array 'train'"
                    )
                parts = partition.natural(data.groups, config.clients, rng)
        if config.samples_per_client is None:
            return parts
        limit = config.samples_per_client
        return [np.sort(rng.permutation(part)[:limit]) for part in parts]

    def model(self) -> nn.Module:
        name = self.config.model or DEFAULT_MODELS[self.config.task]
        return build_model(name, self.dataset.shape, self.dataset.classes)

    def client_data(self, client: int) -> Examples:
        return Examples.from_arrays(*self.dataset.train(self.parts[client]))

    @cached_property
    def _test_examples(self) -> Examples:
        everything = np.arange(len(self.dataset.test_targets), dtype=np.int64)
        return Examples.from_arrays(*self.dataset.test(everything))

    def test_data(self) -> Examples:
        return self._test_examples


class SyntheticTask(Task):
    """`synthetic-femnist` and so on: the paper's shapes with random pixels and labels."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        name = config.task.removeprefix("synthetic").removeprefix("-")
        if name not in PAPER_MODELS:
            known = ", ".join(f"synthetic-{known}" for known in PAPER_MODELS)
            raise ParameterError(f"there is no task {config.task!r}; choose one of {known}")
        if config.partition != "iid":
            raise ParameterError(f"synthetic data has no partition {config.partition!r}; use iid")
        paper = PAPER_MODELS[name]
        self._model = config.model or paper.model
        self._classes = config.classes or paper.classes
        self._shape = paper.shape
        if config.image_size is not None:
            self._shape = (paper.shape[0], config.image_size, config.image_size)

    def model(self) -> nn.Module:
        return build_model(self._model, self._shape, self._classes)

    def client_data(self, client: int) -> Examples:
        return self._draw(client, self.config.samples_per_client or 100)

    def test_data(self) -> Examples:
        return self._draw(self.config.clients, 100)

    def _draw(self, stream: int, samples: int) -> Examples:
        rng = np.random.default_rng([self.config.seed, stream])
        inputs = rng.standard_normal((samples, *self._shape), dtype=np.float32)
        return Examples.from_arrays(inputs, rng.integers(self._classes, size=samples))
