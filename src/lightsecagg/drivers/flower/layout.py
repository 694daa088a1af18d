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
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightsecagg.crypto.transcript import context_hash
from lightsecagg.errors import InputRefused, ParameterError
from lightsecagg.field.quantization import clip_to_bound

Arrays = dict[str, NDArray[Any]]

_KINDS = (ArrayRecord, ConfigRecord, MetricRecord)
_encode = msgspec.msgpack.encode


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


def hash_run_config(run_config: Mapping[str, Any]) -> bytes:
    """What the app reads in `Context.run_config`, in any order: Flower carries it as a map."""
    return context_hash("Flower run config", _encode(sorted(run_config.items())))


def hash_records(records: RecordDict, known: dict[int, bytes] | None = None) -> bytes:
    """All records of a message, in their order, which the app sees too.

    MessagePack keeps types apart: True, 1, 1.0, "1" and b"1" differ, and so do lists of them.

    * `known`: hashes of array records by `id`, where several messages have one in common.
    """
    known = {} if known is None else known
    parts: list[bytes] = []
    for name, record in records.items():
        kind = next(kind for kind in _KINDS if isinstance(record, kind))
        parts += [name.encode(), kind.__name__.encode()]
        if not isinstance(record, ArrayRecord):
            parts.append(_encode(list(record.items())))
            continue
        if id(record) not in known:
            known[id(record)] = _hash_arrays(record)
        parts.append(known[id(record)])
    return context_hash("Flower records", *parts)


def hash_assignment(
    run_config: bytes,
    records: bytes,
    message_type: str,
    weighted_by: str,
    limits: Mapping[str, float],
    stage: str,
) -> bytes:
    """What stands for a global model in tags: all that decides about a node's vector (S08, S57).

    A server that gives one node another model, learning rate, weight or limit than its peers could
    find that node's part in the sum.

    * `run_config`, `records`: of `hash_run_config` and `hash_records`.
    * `message_type`: with its suffix, which selects a function of the app.
    * `stage`: whether the model is trained or evaluated.
    """
    told = _encode([message_type, weighted_by, list(limits.items()), str(stage)])
    return context_hash("Flower assignment", run_config, records, told)


def _hash_arrays(record: ArrayRecord) -> bytes:
    """Names, types, shapes and bytes, as the app gets them."""
    parts: list[bytes] = []
    for name, array in record.items():
        parts.append(_encode([name, array.dtype, list(array.shape), array.stype]))
        parts.append(context_hash("array", array.data))
    return context_hash("Flower arrays", *parts)


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
