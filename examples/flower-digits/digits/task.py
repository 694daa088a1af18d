"""Softmax regression on scikit-learn's digits: 650 numbers, no download."""

from __future__ import annotations

import numpy as np

CLASSES, PIXELS = 10, 64
Arrays = dict[str, np.ndarray]


def new_model() -> Arrays:
    """A model of its own for every run: nodes train from a model once, ever."""
    weight = np.random.default_rng().normal(0, 0.01, (PIXELS, CLASSES)).astype(np.float32)
    return {"weight": weight, "bias": np.zeros(CLASSES, dtype=np.float32)}


def load(partition: int, partitions: int) -> tuple[np.ndarray, np.ndarray]:
    """The images and labels of one node; every fifth image is for testing."""
    images, labels = _digits()
    mine = [i for i in range(len(labels)) if i % 5 and (i // 5) % partitions == partition]
    return images[mine], labels[mine]


def load_test() -> tuple[np.ndarray, np.ndarray]:
    images, labels = _digits()
    return images[::5], labels[::5]


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # here: only training needs it

    digits = load_digits()
    return digits.data.astype(np.float32) / 16, digits.target


def train(model: Arrays, images: np.ndarray, labels: np.ndarray, steps: int = 20) -> Arrays:
    weight, bias = model["weight"].copy(), model["bias"].copy()
    wanted = np.eye(CLASSES, dtype=np.float32)[labels]
    for _ in range(steps):
        error = (_softmax(images @ weight + bias) - wanted) / len(labels)
        weight -= images.T @ error
        bias -= error.sum(axis=0)
    return {"weight": weight, "bias": bias}


def accuracy(model: Arrays, images: np.ndarray, labels: np.ndarray) -> float:
    guesses = (images @ model["weight"] + model["bias"]).argmax(axis=1)
    return float((guesses == labels).mean())


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
