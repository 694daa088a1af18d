"""Logistic regression (MNIST in the paper) and a one-hidden-layer perceptron for small data."""

from __future__ import annotations

import math

from torch import Tensor, nn


class LogisticRegression(nn.Module):
    """Multinomial logistic regression on flattened inputs; 784 -> 10 has 7,850 parameters."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.flatten(1))
        return logits


class Perceptron(nn.Module):
    """One hidden layer of 64 rectified units: enough for digits and for tables."""

    def __init__(self, features: int, classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1))
        return logits


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression for inputs of any shape."""
    return LogisticRegression(math.prod(shape), classes)


def perceptron(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The perceptron for inputs of any shape."""
    return Perceptron(math.prod(shape), classes)
