"""LeNet-5, the model of the asynchronous experiments (Appendix F.5)."""

from __future__ import annotations

from torch import Tensor, nn

from lightsecagg.errors import ParameterError


class LeNet5(nn.Module):
    """61,706 parameters for MNIST (28x28, padded to 32x32), 62,006 for CIFAR-10 (32x32x3)."""

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__()
        if side not in (28, 32):
            raise ParameterError(f"LeNet-5 takes images of 28x28 or 32x32, not {side}x{side}")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5, padding=(32 - side) // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
