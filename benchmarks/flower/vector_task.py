"""The task of apps over shaped links: a flat vector, and a pause in place of training.

Its source is the apps' module `task`, with other constants written behind it (`source`).
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

DIMENSION, PAUSE = 1_206_590, 1.75
EXAMPLES = 100
"""Of every node: all weigh the same."""

Arrays = dict[str, Any]


def source(dimension: int, pause: float) -> str:
    """This module, for vectors of another length."""
    text = Path(__file__).read_text("utf-8")
    return f"{text}\n\nDIMENSION, PAUSE = {dimension}, {pause}\n"


def new_model() -> Arrays:
    """A model of its own for every run: nodes train from a model once, ever."""
    return {"vector": np.random.default_rng().random(DIMENSION, dtype=np.float32)}


def load(partition: int, partitions: int) -> tuple[Any, Any]:
    """Who it is, in place of images, and as many labels as it has examples."""
    return np.array([partition]), np.zeros(EXAMPLES)


def train(model: Arrays, images: Any, labels: Any) -> Arrays:
    time.sleep(PAUSE)
    vector = model["vector"]
    return {"vector": vector + change(int(images[0]), len(vector))}


def change(node: int, dimension: int) -> Any:
    """Different for every node, so that none can stand in for another."""
    return np.linspace(-0.5, 0.5, dimension, dtype=np.float32) + np.float32(node / 256)


def error(models: list[Arrays], nodes: int) -> float:
    """How far the models are at most from those of plain averaging, each from the one before."""
    dimension = len(models[0]["vector"])
    mean = np.mean([change(node, dimension) for node in range(nodes)], axis=0, dtype=np.float64)
    return max(
        float(np.abs(after["vector"] - before["vector"] - mean).max())
        for before, after in pairwise(models)
    )
