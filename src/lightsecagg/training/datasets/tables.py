"""The user's own arrays (npz) and tables (CSV)."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import member, reading
from lightsecagg.training.datasets.dataset import Dataset, Inputs, as_labels, data_folder, find_file

_NPZ = "data.npz with x_train, y_train and, as needed, x_test, y_test, users"
_CSV = "train.csv and, to evaluate, test.csv: a header, a column label, numbers in all others"


def read_npz(data_dir: Path | None, classes: int | None, *, server_too: bool = False) -> Dataset:
    """`data_dir` is the npz file or the folder of `data.npz`; bytes are scaled, floats are not.

    `server_too`: it may be a server's, which has no examples to train on.
    """
    root = data_folder("npz", data_dir, _NPZ)
    path = root if root.is_file() else find_file("npz", [root], ["data.npz"], _NPZ)
    arrays = load_arrays(path)
    if server_too and "x_train" not in arrays and {"x_test", "y_test"} <= set(arrays):
        arrays |= {"x_train": arrays["x_test"][:0], "y_train": arrays["y_test"][:0]}
    for required in ("x_train", "y_train"):
        if required not in arrays:
            raise ConfigurationError(f"npz: {path} has no array {required!r}; it must be {_NPZ}")
    inputs = _examples(arrays["x_train"], path)
    targets = as_labels(arrays["y_train"], f"{path}, y_train")
    if not len(targets) and not server_too:
        raise ConfigurationError(f"npz: {path} has no training example")
    test_inputs, test_targets = inputs[:0], targets[:0]
    if "x_test" in arrays and "y_test" in arrays:
        test_inputs = _examples(arrays["x_test"], path)
        test_targets = as_labels(arrays["y_test"], f"{path}, y_test")
    groups = as_labels(arrays["users"], f"{path}, users") if "users" in arrays else None
    return _dataset("npz", inputs, targets, test_inputs, test_targets, classes, groups)


def read_csv(data_dir: Path | None, classes: int | None, *, server_too: bool = False) -> Dataset:
    """Columns `label` and, for the natural partition, `user` are whole numbers; the rest features.

    Features are used as they are: scale them alike on every client. `server_too`: the folder may be
    a server's, which has no examples to train on.
    """
    root = data_folder("csv", data_dir, _CSV)
    if server_too and not (root / "train.csv").is_file() and (root / "test.csv").is_file():
        _, inputs, targets, _ = _read_table(root / "test.csv")
        return _dataset("csv", inputs[:0], targets[:0], inputs, targets, classes, None)
    train = find_file("csv", [root], ["train.csv"], _CSV)
    columns, inputs, targets, groups = _read_table(train)
    if not len(targets):
        raise ConfigurationError(f"csv: {train} has no training example")
    test_inputs, test_targets = inputs[:0], targets[:0]
    if (root / "test.csv").is_file():
        test_columns, test_inputs, test_targets, _ = _read_table(root / "test.csv")
        if test_columns != columns:
            raise ConfigurationError(f"csv: test.csv and train.csv in {root} differ in columns")
    return _dataset("csv", inputs, targets, test_inputs, test_targets, classes, groups)


def read_writer_ids(path: Path) -> NDArray[np.int64]:
    """The array `train` of an npz file: the writer of each training example, in file order."""
    if not path.is_file():
        raise ConfigurationError(
            f"--writer-ids: {path} does not exist; it must be an npz file with the array 'train'"
        )
    arrays = load_arrays(path)
    if "train" not in arrays:
        raise ConfigurationError(f"--writer-ids: {path} has no array 'train'")
    return as_labels(arrays["train"], f"{path}, train")


def load_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """All arrays of an npz file; pickled objects inside it are refused."""
    # NumPy leaves a file open that it opened itself and cannot read.
    with reading(path, "an npz file of plain arrays"), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        return {name: member(archive, name) for name in archive.files}


def _dataset(
    name: str,
    inputs: Inputs,
    targets: NDArray[np.int64],
    test_inputs: Inputs,
    test_targets: NDArray[np.int64],
    classes: int | None,
    groups: NDArray[np.int64] | None,
) -> Dataset:
    if classes is None and len(targets):
        classes = max(2, int(max(targets.max(), test_targets.max(initial=0))) + 1)
    return Dataset(name, inputs, targets, test_inputs, test_targets, classes or 2, groups)


def _examples(array: NDArray[np.generic], path: Path) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Bytes as they are, numbers as float32; (n, h, w) becomes (n, 1, h, w)."""
    if array.ndim < 2 or array.dtype.kind not in "iufb":
        raise ConfigurationError(
            f"npz: {path} must hold numbers with one row per example, not {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.ndim == 3:
        array = array[:, None]
    if array.dtype == np.uint8:
        return array.astype(np.uint8)
    return array.astype(np.float32)


def _read_table(
    path: Path,
) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64] | None]:
    with (
        reading(path, "a table in CSV and UTF-8"),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        if "label" not in header or len(set(header)) != len(header):
            raise ConfigurationError(
                f"csv: the first line of {path} must name each column once, one of them 'label'"
            )
        features = [name for name in header if name not in ("label", "user")]
        if not features:
            raise ConfigurationError(f"csv: {path} has no feature column beside the label")
        rows = [_numbers(row, header, path, reader.line_num) for row in reader if row]
    table = np.array(rows, dtype=np.float64).reshape(-1, len(header))
    place = {name: k for k, name in enumerate(header)}
    inputs = table[:, [place[name] for name in features]].astype(np.float32)
    targets = _whole(table[:, place["label"]], path, "label")
    groups = _whole(table[:, place["user"]], path, "user") if "user" in place else None
    return features, inputs, targets, groups


def _numbers(row: list[str], header: list[str], path: Path, line: int) -> list[float]:
    if len(row) != len(header):
        raise ConfigurationError(
            f"csv: line {line} of {path} has {len(row)} values for {len(header)} columns"
        )
    values: list[float] = []
    for name, text in zip(header, row, strict=True):
        try:
            values.append(float(text))
        except ValueError:
            # The value itself stays out of the message: it may be a patient's.
            raise ConfigurationError(
                f"csv: column {name!r} in line {line} of {path} is not a number"
            ) from None
    return values


def _whole(values: NDArray[np.float64], path: Path, column: str) -> NDArray[np.int64]:
    if not np.isfinite(values).all() or not np.array_equal(values, np.rint(values)):
        raise ConfigurationError(f"csv: column {column!r} of {path} must hold whole numbers")
    return values.astype(np.int64)
