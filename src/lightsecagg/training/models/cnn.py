"""The FEMNIST CNN of the paper's Table 2: two 3x3 convolutions, two dense layers, dropout."""

from __future__ import annotations

from torch import Tensor, nn

from lightsecagg.errors import ParameterError


class FemnistCNN(nn.Module):
    """1,206,590 parameters for 28x28 images and 62 classes."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        if min(height, width) < 6:
            raise ParameterError(f"the CNN needs images of at least 6x6, not {height}x{width}")
        pooled = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        )
        self.classifier = nn.Sequential(
            nn.Linear(pooled, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
