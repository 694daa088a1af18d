"""CIFAR-10 from its original Python pickles, or from one PNG per batch with JSON labels.

A pickle can run any program when it is opened. `read_batch` therefore resolves no class at all:
the few names that a CIFAR batch mentions are replaced by inert records, everything else is
refused, and the array is built here from the raw bytes.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import reading, shown
from lightsecagg.training.datasets.dataset import Dataset, as_labels, data_folder, find_file
from lightsecagg.training.datasets.images import open_image

_TRAIN = [f"data_batch_{k}" for k in range(1, 6)]
_TEST = "test_batch"
_CONTENTS = (
    "cifar-10-batches-py (data_batch_1 to data_batch_5 and test_batch), or data_batch_1.png to "
    "data_batch_5.png and test_batch.png with train_labels.json and test_labels.json"
)
_Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_cifar10(data_dir: Path | None) -> Dataset:
    """`data_dir` is the folder that holds `cifar-10-batches-py`, that folder, or the PNGs'."""
    root = data_folder("cifar10", data_dir, _CONTENTS)
    pickles = root / "cifar-10-batches-py"
    if (root / f"{_TRAIN[0]}.png").is_file():
        train, test = _png_parts(root)
    else:
        folders = [pickles, root]
        parts = [read_batch(find_file("cifar10", folders, [n], _CONTENTS)) for n in _TRAIN]
        train = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        test = read_batch(find_file("cifar10", folders, [_TEST], _CONTENTS))
    return Dataset(
        "cifar10",
        *train,
        *test,
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )


def _png_parts(root: Path) -> tuple[_Part, _Part]:
    def labels(part: str) -> NDArray[np.int64]:
        # One published set of these PNGs spells the word "lables".
        names = [f"{part}_labels.json", f"{part}_lables.json"]
        path = find_file("cifar10", [root], names, _CONTENTS)
        with reading(path, "a JSON list of labels"):
            return as_labels(json.loads(path.read_text(encoding="utf-8")), str(path))

    def pixels(name: str) -> NDArray[np.uint8]:
        path = find_file("cifar10", [root], [f"{name}.png"], _CONTENTS)
        rows = open_image(path)
        if rows.ndim != 3 or rows.shape[1:] != (1024, 3):
            raise ConfigurationError(
                f"{path} must have one image of 32x32 RGB pixels per row, so a width of 1024"
            )
        return rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

    train = np.concatenate([pixels(name) for name in _TRAIN])
    return (train, labels("train")), (pixels(_TEST), labels("test"))


def read_batch(path: Path) -> _Part:
    """One CIFAR batch file: images (n, 3, 32, 32) and labels, without trusting the file."""
    with reading(path, "a CIFAR-10 batch with 'data' and 'labels'"):
        try:
            with path.open("rb") as file:
                batch = _CifarUnpickler(file, encoding="bytes").load()
        except pickle.UnpicklingError as error:
            raise ConfigurationError(f"{path} is not a CIFAR-10 batch: {shown(error)}") from error
        keys = {_text(key): value for key, value in batch.items()}
        images = keys["data"].to_bytes_array()
        return images.reshape(-1, 3, 32, 32), as_labels(keys["labels"], str(path))


def _text(key: object) -> str:
    return key.decode("ascii") if isinstance(key, bytes) else str(key)


class _InertDtype:
    """Stands for numpy.dtype; remembers its code, does nothing."""

    def __init__(self, code: object = "", *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _InertArray:
    """Stands for numpy.ndarray; remembers the state it was given."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def to_bytes_array(self) -> NDArray[np.uint8]:
        """The array, if it is one of bytes in C order."""
        _version, shape, dtype, fortran, raw = self.state
        if dtype.code not in ("u1", b"u1") or fortran or not isinstance(raw, bytes):
            raise ValueError("not an array of bytes in C order")
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


def _inert_reconstruct(*_: object) -> _InertArray:
    return _InertArray()


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes at protocol 2: `_codecs.encode(text, 'latin1')`."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r}")
    return text.encode("latin-1")


class _CifarUnpickler(pickle.Unpickler):
    """Resolves the four names of a CIFAR batch to inert records, and no other."""

    _NAMES: dict[tuple[str, str], Any] = {  # noqa: RUF012 - read only
        ("numpy.core.multiarray", "_reconstruct"): _inert_reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _inert_reconstruct,
        ("numpy", "ndarray"): _InertArray,
        ("numpy", "dtype"): _InertDtype,
        ("_codecs", "encode"): _latin1_bytes,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self._NAMES[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module_name}.{global_name}, which a data file has no business with"
            ) from None
