"""The models of the paper in plain torch, by name, for any input shape and number of classes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightsecagg.errors import ParameterError
from lightsecagg.training.models.cnn import FemnistCNN
from lightsecagg.training.models.efficientnet import EfficientNetB0
from lightsecagg.training.models.lenet import LeNet5
from lightsecagg.training.models.linear import logistic, perceptron
from lightsecagg.training.models.mobilenet_v3 import MobileNetV3Small

Shape = tuple[int, ...]


def _image(name: str, shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ParameterError(
            f"the model {name!r} takes images of shape (channels, height, width), not {shape}; "
            "use logistic or mlp"
        )
    return shape[0], shape[1], shape[2]


def _cnn(shape: Shape, classes: int) -> nn.Module:
    return FemnistCNN(*_image("cnn", shape), classes)


def _lenet5(shape: Shape, classes: int) -> nn.Module:
    channels, height, width = _image("lenet5", shape)
    if height != width:
        raise ParameterError(f"LeNet-5 takes square images, not {height}x{width}")
    return LeNet5(channels, height, classes)


def _mobilenet(shape: Shape, classes: int) -> nn.Module:
    return MobileNetV3Small(_image("mobilenetv3-small", shape)[0], classes)


def _efficientnet(shape: Shape, classes: int) -> nn.Module:
    return EfficientNetB0(_image("efficientnet-b0", shape)[0], classes)


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "logistic": logistic,
    "mlp": perceptron,
    "cnn": _cnn,
    "lenet5": _lenet5,
    "mobilenetv3-small": _mobilenet,
    "efficientnet-b0": _efficientnet,
}


def build_model(name: str, shape: Shape, classes: int) -> nn.Module:
    """A fresh model of that name; its weights come from torch's global generator."""
    if name not in MODELS:
        raise ParameterError(f"there is no model {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name](shape, classes)
