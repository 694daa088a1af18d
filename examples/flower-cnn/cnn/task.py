"""The network, its data, training and test: plain PyTorch, nothing of Flower."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions with batch normalisation, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def load_data(partition: int, partitions: int, batch_size: int) -> DataLoader:
    """One node's images; every fifth image is for testing."""
    images, labels = _digits()
    mine = [i for i in range(len(labels)) if i % 5 and (i // 5) % partitions == partition]
    dataset = TensorDataset(images[mine], labels[mine])
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def load_test_data() -> DataLoader:
    """The images that no node trains on."""
    images, labels = _digits()
    return DataLoader(TensorDataset(images[::5], labels[::5]), batch_size=256)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # here: only training needs it

    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None] / 16
    return torch.from_numpy(images), torch.from_numpy(digits.target.astype(np.int64))


def train(net: Net, data: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train in place; the mean loss of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    net.train()
    for _ in range(epochs):
        total = 0.0
        for images, labels in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(data)


@torch.no_grad()
def accuracy(net: Net, data: DataLoader) -> float:
    """The fraction of images that the network names right."""
    net.eval()
    right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in data)
    return right / len(data.dataset)
