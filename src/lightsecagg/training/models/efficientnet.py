"""EfficientNet-B0, the paper's model for GLD-23k: 5,288,548 parameters with 1000 outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Stage(NamedTuple):
    """One row of the published table: `repeats` blocks, the first of which has the stride."""

    expansion: int
    outputs: int
    repeats: int
    stride: int
    kernel: int


B0 = (
    Stage(1, 16, 1, 1, 3),
    Stage(6, 24, 2, 2, 3),
    Stage(6, 40, 2, 2, 5),
    Stage(6, 80, 3, 2, 3),
    Stage(6, 112, 3, 1, 5),
    Stage(6, 192, 4, 2, 5),
    Stage(6, 320, 1, 1, 3),
)
DROP_CONNECT = 0.2


def _convolution(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate; squeezes to a quarter of the block's *input* channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.SiLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x)
        return x * gate


class MBConv(nn.Module):
    """Inverted bottleneck with squeeze-excite and, on the shortcut, stochastic depth."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, drop: float
    ) -> None:
        super().__init__()
        wide = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*_convolution(inputs, wide), nn.SiLU()]
        layers += [*_convolution(wide, wide, kernel, stride, groups=wide), nn.SiLU()]
        layers += [SqueezeExcite(wide, max(1, inputs // 4)), *_convolution(wide, outputs)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        if not self.shortcut:
            return y
        if self.training and self.drop > 0:
            # The whole branch of an example is dropped, and kept ones are scaled to match.
            keep = torch.rand(len(y), 1, 1, 1, dtype=y.dtype, device=y.device) >= self.drop
            y = y * keep / (1 - self.drop)
        return x + y


class EfficientNetB0(nn.Module):
    """5,288,548 parameters with 1000 outputs; 42,016 batch-norm statistics."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        total = sum(stage.repeats for stage in B0)
        width = 32
        for stage in B0:
            for repeat in range(stage.repeats):
                blocks.append(
                    MBConv(
                        width,
                        stage.outputs,
                        stage.kernel,
                        stage.stride if repeat == 0 else 1,
                        stage.expansion,
                        DROP_CONNECT * len(blocks) / total,
                    )
                )
                width = stage.outputs
        self.features = nn.Sequential(
            *_convolution(channels, 32, 3, stride=2),
            nn.SiLU(),
            *blocks,
            *_convolution(width, 1280),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
