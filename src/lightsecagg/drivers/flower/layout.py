"""An `ArrayRecord` as one vector, and back: what is masked is the change of a model.

The change is small where the model is not, so that a small bound rounds finely. Behind it ride
metrics that the server asked for, each scaled from its own limit to the bound of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightsecagg.crypto.transcript import context_hash
from lightsecagg.errors import InputRefused, ParameterError
from lightsecagg.field.quantization import clip_to_bound

Arrays = dict[str, NDArray[Any]]


def arrays_of(record: ArrayRecord) -> Arrays:
    """The arrays by name, in the record's order; to be read only."""
    return {name: view_of(array) for name, array in record.items()}


def view_of(array: Array) -> NDArray[Any]:
    """What `array.numpy()` returns, where it lies: a copy of a model takes as long as its hash."""
    stream = BytesIO(array.data)
    if array.stype != SType.NUMPY or npy.read_magic(stream) != (1, 0):
        return array.numpy()
    shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    flat = np.frombuffer(array.data, dtype, math.prod(shape), stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def hash_assignment(
    arrays: Arrays, config: object, weighted_by: str, limits: object, stage: str
) -> bytes:
    """What stands for a global model in tags: all that decides about a node's vector (S08, S42).

    Names, types, shapes and values of the arrays; and what the node is told beside them, because a
    server that tells one node another learning rate, weight or limit than its peers could find that
    node's part in the sum.

    * `config`, `limits`: as a `ConfigRecord` and a dict of metrics, of which bytes can be made.
    * `stage`: whether the model is trained or evaluated.
    """
    parts = [msgspec.msgpack.encode([config, weighted_by, limits, str(stage)])]
    for name, array in arrays.items():
        shape = ",".join(map(str, array.shape))
        parts += [name.encode(), array.dtype.str.encode(), shape.encode()]
        parts.append(context_hash("array", _bytes_of(array)))
    return context_hash("Flower assignment", *parts)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def config_of(records: RecordDict) -> dict[str, dict[str, Any]]:
    """The `ConfigRecord`s beside a model."""
    return {name: dict(record) for name, record in records.config_records.items()}


class Layout:
    """Where each array of a model lies in the vector."""

    def __init__(self, model: Arrays) -> None:
        for name, array in model.items():
            if array.dtype not in (np.float16, np.float32, np.float64):
                raise ParameterError(
                    f"array {name!r} is of {array.dtype}; only floats can be averaged under a "
                    "mask: leave it out of the ArrayRecord, or send it as float32"
                )
        self._model = model
        self.dtype = np.float64 if np.float64 in {a.dtype for a in model.values()} else np.float32
        self.size = sum(array.size for array in model.values())
        if not self.size:
            raise ParameterError("the ArrayRecord is empty: there is no model to train")

    def write_change(self, trained: Arrays, out: NDArray[Any]) -> None:
        """What training added to the model; refuse other names or shapes."""
        if trained.keys() != self._model.keys():
            raise InputRefused("training returned arrays of other names than it was given")
        for name, array in trained.items():
            if array.shape != self._model[name].shape:
                raise InputRefused(
                    f"array {name!r} has shape {array.shape} after training, and "
                    f"{self._model[name].shape} before"
                )
        start = 0
        for name, array in self._model.items():
            part = out[start : start + array.size].reshape(array.shape)
            np.subtract(trained[name], array, out=part, dtype=self.dtype, casting="same_kind")
            start += array.size

    def changed(self, change: NDArray[np.float64]) -> ArrayRecord:
        """The model plus a change, each array of its own type again."""
        arrays: dict[str, Array] = {}
        start = 0
        for name, array in self._model.items():
            part = change[start : start + array.size].reshape(array.shape)
            arrays[name] = Array((array.astype(np.float64) + part).astype(array.dtype))
            start += array.size
        return ArrayRecord(arrays)


def scaled_metrics(
    metrics: Mapping[str, Any], limits: Mapping[str, float], bound: float
) -> NDArray[np.float64]:
    """The metrics that the server asked for, as entries within the bound."""
    if missing := limits.keys() - metrics.keys():
        raise InputRefused(
            f"the app returned no metric {min(missing)!r}, which LightSecAgg(metrics=...) or "
            "(evaluation=...) names"
        )
    values = np.array([float(metrics[name]) for name in limits], dtype=np.float64)
    scale = np.array(list(limits.values()), dtype=np.float64) / bound
    return clip_to_bound(values / scale, bound).astype(np.float64)


def unscaled_metrics(
    values: NDArray[np.float64], limits: Mapping[str, float], bound: float
) -> dict[str, float]:
    """The inverse of `scaled_metrics`, of an average."""
    pairs = zip(limits.items(), values, strict=True)
    return {name: float(value) * limit / bound for (name, limit), value in pairs}
