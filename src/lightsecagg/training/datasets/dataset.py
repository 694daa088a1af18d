"""What every reader returns: examples, labels and, where there are any, writers; NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError

Labels = NDArray[np.int64]
Floats = NDArray[np.float32]


class Inputs(Protocol):
    """Examples that can be picked by index: an array, or images that are still on disk."""

    def __len__(self) -> int:
        """Number of examples."""

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8] | Floats:
        """The chosen examples, stacked."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(examples, ...) as of a stacked array."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A labelled data set with its training and test part."""

    name: str
    """For messages."""
    train_inputs: Inputs = field(repr=False)
    """Bytes (scaled on use) or finite floats, one row per example; none where nobody trains."""
    train_targets: Labels = field(repr=False)
    """Class numbers from 0."""
    test_inputs: Inputs = field(repr=False)
    """Like the training part; may be empty when nobody evaluates."""
    test_targets: Labels = field(repr=False)
    """Class numbers from 0."""
    classes: int
    """Number of classes."""
    groups: Labels | None = field(repr=False, default=None)
    """The writer or user of each training example, for the natural partition."""
    mean: tuple[float, ...] = (0.0,)
    """Per channel, subtracted from bytes / 255."""
    std: tuple[float, ...] = (1.0,)
    """Per channel, divides afterwards."""

    def __post_init__(self) -> None:
        if not len(self.train_targets) and not len(self.test_targets):
            raise ConfigurationError(f"{self.name}: there is no example")
        for part, inputs, targets in (
            ("training", self.train_inputs, self.train_targets),
            ("test", self.test_inputs, self.test_targets),
        ):
            if len(inputs) != len(targets):
                raise ConfigurationError(
                    f"{self.name}: {len(inputs)} {part} examples but {len(targets)} labels"
                )
            outside = np.flatnonzero((targets < 0) | (targets >= self.classes))
            if len(outside):
                raise ConfigurationError(
                    f"{self.name}: label {targets[outside[0]]} of {part} example {outside[0]} is "
                    f"outside 0 to {self.classes - 1}; number the classes from 0 or set classes"
                )
        if len(self.test_targets) and self.test_inputs.shape[1:] != self.shape:
            raise ConfigurationError(
                f"{self.name}: training examples have shape {self.shape}, test examples "
                f"{self.test_inputs.shape[1:]}"
            )
        if self.groups is not None and len(self.groups) != len(self.train_targets):
            raise ConfigurationError(
                f"{self.name}: {len(self.groups)} writer ids for {len(self.train_targets)} "
                "training examples"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.train_inputs.shape[1:])

    def with_groups(self, groups: Labels) -> Dataset:
        """The same data with these writers."""
        return replace(self, groups=groups)

    def train(self, indices: NDArray[np.int64]) -> tuple[Floats, Labels]:
        """The chosen training examples, scaled, with their labels."""
        return self._scaled(self.train_inputs[indices]), self.train_targets[indices]

    def test(self, indices: NDArray[np.int64]) -> tuple[Floats, Labels]:
        """The chosen test examples, scaled, with their labels."""
        return self._scaled(self.test_inputs[indices]), self.test_targets[indices]

    def _scaled(self, inputs: NDArray[np.uint8] | Floats) -> Floats:
        if inputs.dtype != np.uint8:
            floats = np.asarray(inputs, dtype=np.float32)
            if not np.isfinite(floats).all():
                raise ConfigurationError(f"{self.name}: the inputs contain NaN or infinity")
            return floats
        per_channel = (-1, *([1] * (inputs.ndim - 2)))
        mean = np.array(self.mean, dtype=np.float32).reshape(per_channel)
        std = np.array(self.std, dtype=np.float32).reshape(per_channel)
        # In place: temporaries of a client's size cost more in fresh pages than the arithmetic.
        scaled = inputs.astype(np.float32)
        scaled /= np.float32(255)
        scaled -= mean
        scaled /= std
        return scaled


def as_labels(values: object, name: str) -> Labels:
    """Class numbers or ids as int64; anything but whole numbers is refused."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{name}: labels and ids must be one-dimensional whole numbers, not "
            f"{array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def data_folder(name: str, data_dir: Path | None, contents: str) -> Path:
    """The user's data directory, or an error that says what to put there."""
    if data_dir is None:
        raise ConfigurationError(f"{name} needs --data-dir: a folder with {contents}")
    if not data_dir.exists():
        raise ConfigurationError(f"{name}: {data_dir} does not exist; it must hold {contents}")
    return data_dir


def find_file(name: str, folders: Sequence[Path], names: Sequence[str], contents: str) -> Path:
    """The first of the files that exists in one of the folders."""
    for folder in folders:
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    raise ConfigurationError(
        f"{name}: no file {' or '.join(names)} in {' or '.join(map(str, folders))}; "
        f"put {contents} there"
    )
