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
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightsecagg.crypto.transcript import context_hash
from lightsecagg.errors import InputRefused, ParameterError

Arrays = dict[str, NDArray[Any]]

SMALLEST_LIMIT, LARGEST_LIMIT = 1e-100, 1e100
_FLOATS = (np.float16, np.float32, np.float64)
_UNAVERAGED = "biu"
"""NumPy's kinds of truth values and integers."""
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


def hash_run(context: Context) -> bytes:
    """What the app reads of its run: ids, and its config in any order, as Flower carries it."""
    told = [context.run_id, context.series_id, sorted(context.run_config.items())]
    return context_hash("Flower run", _encode(told))


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
    run: bytes,
    records: bytes,
    message_type: str,
    weighted_by: str,
    limits: Mapping[str, float],
    stage: str,
) -> bytes:
    """What stands for a global model in tags: all that decides about a node's vector (S08, S57).

    A server that gives one node another model, learning rate, weight or limit than its peers could
    find that node's part in the sum.

    * `run`, `records`: of `hash_run` and `hash_records`.
    * `message_type`: with its suffix, which selects a function of the app.
    * `stage`: whether the model is trained or evaluated.
    """
    told = _encode([message_type, weighted_by, list(limits.items()), str(stage)])
    return context_hash("Flower assignment", run, records, told)


def _hash_arrays(record: ArrayRecord) -> bytes:
    """Names, types, shapes and bytes, as the app gets them."""
    parts: list[bytes] = []
    for name, array in record.items():
        parts.append(_encode([name, array.dtype, list(array.shape), array.stype]))
        parts.append(context_hash("array", array.data))
    return context_hash("Flower arrays", *parts)


class Layout:
    """Where each array of floats lies in the vector.

    Integers and truth values, such as BatchNorm's `num_batches_tracked`, are in no vector: they
    have no average. Nodes get the server's, and the server keeps them.
    """

    def __init__(self, model: Arrays) -> None:
        for name, array in model.items():
            if array.dtype not in _FLOATS and array.dtype.kind not in _UNAVERAGED:
                raise ParameterError(
                    f"array {name!r} is of {array.dtype}; only floats can be averaged under a "
                    "mask, and integers travel beside them: leave it out of the ArrayRecord, or "
                    "send it as float32"
                )
        self._model = model
        self._floats = {name: array for name, array in model.items() if array.dtype in _FLOATS}
        self.kept = tuple(name for name in model if name not in self._floats)
        """The arrays that keep the server's value."""
        is_double = any(array.dtype == np.float64 for array in self._floats.values())
        self.dtype = np.float64 if is_double else np.float32
        self.size = sum(array.size for array in self._floats.values())
        if not self.size:
            raise ParameterError("the ArrayRecord has no floats: there is no model to train")

    def write_change(self, trained: Arrays, out: NDArray[Any]) -> None:
        """What training added to the model; refuse other names or shapes."""
        if differing := trained.keys() ^ self._model.keys():
            name = min(differing)
            raise InputRefused(
                "training returned arrays of other names than it was given: "
                f"{name!r} is {'new' if name in trained else 'missing'}"
            )
        for name, array in self._floats.items():
            if trained[name].shape != array.shape:
                raise InputRefused(
                    f"array {name!r} has shape {trained[name].shape} after training, and "
                    f"{array.shape} before"
                )
        start = 0
        for name, array in self._floats.items():
            part = out[start : start + array.size].reshape(array.shape)
            np.subtract(trained[name], array, out=part, dtype=self.dtype, casting="same_kind")
            start += array.size

    def changed(self, change: NDArray[np.float64]) -> ArrayRecord:
        """The model plus a change, each array of its own type again."""
        arrays: dict[str, Array] = {}
        start = 0
        for name, array in self._model.items():
            if name in self._floats:
                part = change[start : start + array.size].reshape(array.shape)
                array = (array.astype(np.float64) + part).astype(array.dtype)
                start += array.size
            arrays[name] = Array(array)
        return ArrayRecord(arrays)

    def restore_kept(self, averaged: ArrayRecord | None) -> None:
        """Undo what a strategy did to arrays that have no average: Flower makes floats of them."""
        if averaged is not None:
            for name in averaged.keys() & set(self.kept):
                averaged[name] = Array(self._model[name])


def check_limits(limits: Mapping[str, float]) -> None:
    """Refuse limits of metrics that are no sizes of metrics; nodes ask before they train (S62)."""
    for name, limit in limits.items():
        if not isinstance(limit, float) or not SMALLEST_LIMIT <= limit <= LARGEST_LIMIT:
            raise ParameterError(
                f"the largest value of metric {name!r} is {limit}, not between {SMALLEST_LIMIT} "
                f"and {LARGEST_LIMIT}"
            )


def scaled_metrics(
    metrics: Mapping[str, Any], limits: Mapping[str, float], bound: float
) -> NDArray[np.float64]:
    """The metrics that the server asked for, as entries within the bound.

    What is beyond its limit counts as the limit, and so does NaN. If a value could be refused, a
    server that varies limits or models would find it by bisection (S62).
    """
    if missing := limits.keys() - metrics.keys():
        raise InputRefused(
            f"the app returned no metric {min(missing)!r}, which LightSecAgg(metrics=...) or "
            "(evaluation=...) names"
        )
    values = np.array([float(metrics[name]) for name in limits], dtype=np.float64)
    with np.errstate(over="ignore"):
        parts = values / np.array(list(limits.values()), dtype=np.float64)
    return np.nan_to_num(parts, nan=1.0).clip(-1.0, 1.0) * bound


def unscaled_metrics(
    values: NDArray[np.float64], limits: Mapping[str, float], bound: float
) -> dict[str, float]:
    """The inverse of `scaled_metrics`, of an average."""
    pairs = zip(limits.items(), values, strict=True)
    return {name: float(value) * limit / bound for (name, limit), value in pairs}
