"""MNIST and Fashion-MNIST from their four original idx files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import reading
from lightsecagg.training.datasets.dataset import Dataset, data_folder, find_file


class _Source(NamedTuple):
    name: str
    folder: str
    mean: float
    std: float


_MNIST = _Source("mnist", "MNIST", 0.1307, 0.3081)
_FASHION = _Source("fashion-mnist", "FashionMNIST", 0.2860, 0.3530)


def read_mnist(data_dir: Path | None) -> Dataset:
    """The handwritten digits; `data_dir` is the usual torchvision root, or the files' folder."""
    return _read(_MNIST, data_dir)


def read_fashion_mnist(data_dir: Path | None) -> Dataset:
    """The articles of clothing, in the same format."""
    return _read(_FASHION, data_dir)


def _read(source: _Source, data_dir: Path | None) -> Dataset:
    contents = (
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
        f"t10k-labels-idx1-ubyte (or .gz), directly or in {source.folder}/raw"
    )
    root = data_folder(source.name, data_dir, contents)
    folders = [root, root / source.folder / "raw", root / "raw"]

    def load(part: str, kind: str, dimensions: int) -> NDArray[np.uint8]:
        stem = f"{part}-{kind}-idx{dimensions}-ubyte"
        dotted = f"{part}-{kind}.idx{dimensions}-ubyte"
        names = [stem, f"{stem}.gz", dotted, f"{dotted}.gz"]
        return read_idx(find_file(source.name, folders, names, contents), dimensions)

    return Dataset(
        source.name,
        load("train", "images", 3)[:, None],
        load("train", "labels", 1).astype(np.int64),
        load("t10k", "images", 3)[:, None],
        load("t10k", "labels", 1).astype(np.int64),
        classes=10,
        mean=(source.mean,),
        std=(source.std,),
    )


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """One idx file of bytes: magic 0, 0, 8, dimensions; big-endian sizes; the values."""
    header = 4 + 4 * dimensions
    zipped = path.suffix == ".gz"
    with (
        reading(path, "a complete gzip file"),
        gzip.open(path, "rb") if zipped else path.open("rb") as file,
    ):
        head = file.read(header)
        body = file.read() if zipped else b""
    if len(head) != header or head[:4] != bytes([0, 0, 8, dimensions]):
        raise ConfigurationError(f"{path} is not an idx file of {dimensions}-dimensional bytes")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    size = len(body) if zipped else path.stat().st_size - header
    if size != math.prod(shape) or size == 0:
        raise ConfigurationError(
            f"{path} announces {shape} values but holds {size}; fetch it again"
        )
    if zipped:
        return np.frombuffer(body, dtype=np.uint8).reshape(shape)
    # Mapped, so that many client processes on one machine share the pages.
    return np.memmap(path, dtype=np.uint8, mode="r", offset=header, shape=shape)
