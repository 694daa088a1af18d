"""A folder of images, one sub-folder per class; read from disk when they are needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError, MissingExtra
from lightsecagg.foreign import reading
from lightsecagg.training.datasets.dataset import Dataset, data_folder

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}
_CONTENTS = "train/<class>/<image> and, to evaluate, test/<class>/<image>"


class ImageFiles:
    """Images on disk that look like an array of shape (n, 3, side, side)."""

    def __init__(self, paths: list[Path], side: int) -> None:
        self._paths = paths
        self._side = side

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the stacked array."""
        return (len(self._paths), 3, self._side, self._side)

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        stacked = np.empty((len(indices), 3, self._side, self._side), dtype=np.uint8)
        for row, index in enumerate(indices):
            stacked[row] = open_image(self._paths[index], self._side).transpose(2, 0, 1)
        return stacked


def read_image_folder(data_dir: Path | None, side: int | None) -> Dataset:
    """Classes are the sub-folders of `train`, in sorted order; images become `side` x `side`.

    Where every client has a folder of its own, all of them need the same sub-folders (an empty
    one is fine), or their class numbers would differ.
    """
    root = data_folder("folder", data_dir, _CONTENTS)
    if side is None:
        raise ConfigurationError("folder needs --image-size: the side in pixels to resize to")
    train = root / "train"
    if not train.is_dir():
        raise ConfigurationError(f"folder: {train} is missing; {root} must hold {_CONTENTS}")
    classes = sorted(path.name for path in train.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise ConfigurationError(f"folder: {train} needs a sub-folder for each of two classes")
    train_paths, train_targets = _list(train, classes)
    test_paths, test_targets = _list(root / "test", classes)
    return Dataset(
        "folder",
        ImageFiles(train_paths, side),
        train_targets,
        ImageFiles(test_paths, side),
        test_targets,
        classes=len(classes),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )


def _list(folder: Path, classes: list[str]) -> tuple[list[Path], NDArray[np.int64]]:
    if folder.is_dir():
        unknown = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes)
        if unknown:
            raise ConfigurationError(
                f"folder: {folder / unknown[0]} is a class that the train folder does not have"
            )
    paths: list[Path] = []
    targets: list[int] = []
    for target, name in enumerate(classes):
        inside = folder / name
        found = sorted(inside.iterdir()) if inside.is_dir() else []
        images = [path for path in found if path.suffix.lower() in _SUFFIXES]
        paths += images
        targets += [target] * len(images)
    return paths, np.array(targets, dtype=np.int64)


def open_image(path: Path, side: int | None = None) -> NDArray[np.uint8]:
    """One image as (height, width, RGB) bytes, resized when `side` is given."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingExtra("reading images needs pillow", "torch") from error
    with reading(path, "an image"), Image.open(path) as image:
        rgb = image.convert("RGB")
        if side is not None:
            rgb = rgb.resize((side, side))
        return np.asarray(rgb, dtype=np.uint8)
