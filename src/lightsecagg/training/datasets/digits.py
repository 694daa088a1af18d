"""scikit-learn's digits: 1,797 real images of 8x8 that come inside the package."""

from __future__ import annotations

import numpy as np

from lightsecagg.errors import MissingExtra
from lightsecagg.training.datasets.dataset import Dataset, as_labels


def read_digits() -> Dataset:
    """Every fifth image is a test image: 1,437 to train, 360 to test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise MissingExtra("the digits task needs scikit-learn", "torch") from error
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    targets = as_labels(labels, "digits")
    test = np.arange(len(targets)) % 5 == 0
    return Dataset("digits", images[~test], targets[~test], images[test], targets[test], classes=10)
