"""LEAF's JSON layout (FEMNIST): users, and for each user the examples x and labels y."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import reading
from lightsecagg.training.datasets.dataset import Dataset, data_folder

_CONTENTS = (
    "train/*.json and test/*.json as LEAF's preprocess.sh writes them "
    "(keys users, num_samples, user_data)"
)


def read_leaf(data_dir: Path | None, classes: int | None) -> Dataset:
    """All users of all files; 784 values become a 28x28 image; 62 classes unless told otherwise.

    The training users are the groups of the natural partition.
    """
    root = data_folder("femnist", data_dir, _CONTENTS)
    inputs, targets, groups = _read_part(root / "train")
    test_inputs, test_targets, _ = _read_part(root / "test")
    return Dataset(
        "femnist", inputs, targets, test_inputs, test_targets, classes or 62, groups=groups
    )


def _read_part(
    folder: Path,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigurationError(f"femnist: no .json file in {folder}; put {_CONTENTS} there")
    xs: list[NDArray[np.float32]] = []
    ys: list[NDArray[np.int64]] = []
    users: list[str] = []
    for path in files:
        with reading(path, "a LEAF file with user_data of x and y"):
            data = json.loads(path.read_text(encoding="utf-8"))["user_data"]
            for user, examples in data.items():
                if not len(examples["y"]):
                    continue
                xs.append(np.array(examples["x"], dtype=np.float32))
                ys.append(np.array(examples["y"], dtype=np.int64))
                if xs[-1].ndim != 2 or len(xs[-1]) != len(ys[-1]):
                    raise ValueError("x and y differ in length")
                users.append(user)
    if len({x.shape[1] for x in xs}) != 1:
        raise ConfigurationError(f"femnist: the examples in {folder} differ in length")
    inputs = np.concatenate(xs)
    if inputs.shape[1] == 784:
        inputs = inputs.reshape(-1, 1, 28, 28)
    numbers = {user: number for number, user in enumerate(sorted(set(users)))}
    groups = np.repeat([numbers[user] for user in users], [len(y) for y in ys])
    return inputs, np.concatenate(ys), groups.astype(np.int64)
