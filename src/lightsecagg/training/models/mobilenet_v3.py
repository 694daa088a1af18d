"""MobileNetV3-Small, whose 1000-output variant is the paper's 3,111,462 parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Stage(NamedTuple):
    """One bottleneck of the published table."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    activation: type[nn.Module]
    squeeze: bool
    expansion: int


SMALL = (
    Stage(16, 16, 3, 2, nn.ReLU, True, 16),
    Stage(16, 24, 3, 2, nn.ReLU, False, 72),
    Stage(24, 24, 3, 1, nn.ReLU, False, 88),
    Stage(24, 40, 5, 2, nn.ReLU, True, 96),
    Stage(40, 40, 5, 1, nn.ReLU, True, 240),
    Stage(40, 40, 5, 1, nn.ReLU, True, 240),
    Stage(40, 48, 5, 1, nn.Hardswish, True, 120),
    Stage(48, 48, 5, 1, nn.Hardswish, True, 144),
    Stage(48, 96, 5, 2, nn.Hardswish, True, 288),
    Stage(96, 96, 5, 1, nn.Hardswish, True, 576),
    Stage(96, 96, 5, 1, nn.Hardswish, True, 576),
)


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Linear(channels, channels // 4),
            nn.ReLU(),
            nn.Linear(channels // 4, channels),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x.mean(dim=(2, 3)))
        return x * gate[:, :, None, None]


class Bottleneck(nn.Module):
    """Expand, convolve depthwise, squeeze-excite, project; with a shortcut where shapes allow."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        wide = stage.expansion
        self.shortcut = stage.stride == 1 and stage.inputs == stage.outputs
        self.layers = nn.Sequential(
            nn.Conv2d(stage.inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            stage.activation(),
            nn.Conv2d(wide, wide, stage.kernel, stage.stride, stage.kernel // 2, groups=wide),
            nn.BatchNorm2d(wide),
            SqueezeExcite(wide) if stage.squeeze else nn.Identity(),
            stage.activation(),
            nn.Conv2d(wide, stage.outputs, 1),
            nn.BatchNorm2d(stage.outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.shortcut else y


class MobileNetV3Small(nn.Module):
    """3,111,462 parameters with 1000 outputs, 1,843,272 with 10; 12,144 batch-norm statistics."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
            *(Bottleneck(stage) for stage in SMALL),
            nn.Conv2d(96, 576, 1),
            SqueezeExcite(576),
            nn.BatchNorm2d(576),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(576, 1280), nn.Hardswish(), nn.Linear(1280, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
