"""Arrays as Flower serialises them: read where they lie, and written in one copy."""

from __future__ import annotations

from dataclasses import fields
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from numpy.lib import format as npy

from lightsecagg.drivers.flower.layout import (
    hash_assignment,
    hash_records,
    hash_run,
    view_of,
)
from lightsecagg.drivers.flower.parcels import PROTOCOL, Parcel, attach, detach
from lightsecagg.errors import DecodeError

GRID = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
KINDS = {
    "rows": GRID,
    "columns": np.asfortranarray(GRID),
    "cut": GRID[:, ::2],
    "doubles": GRID.astype(np.float64),
    "halves": GRID.astype(np.float16),
    "others' order": GRID.astype(">f4"),
    "whole": np.arange(5),
    "one number": np.array(3.5, dtype=np.float32),
    "nothing": np.empty((3, 0), dtype=np.float32),
}


@pytest.mark.parametrize("array", KINDS.values(), ids=KINDS)
def test_a_view_is_what_flower_reads_without_its_copy(array: np.ndarray[Any, Any]) -> None:
    serialised = Array(array)
    view, read = view_of(serialised), serialised.numpy()
    assert (view.dtype, view.shape) == (read.dtype, read.shape)
    assert view.tobytes() == read.tobytes()
    data = np.frombuffer(serialised.data, dtype=np.uint8)
    assert np.shares_memory(view, data) == bool(array.size)


def test_layouts_that_are_rare_are_left_to_flower() -> None:
    stream = BytesIO()
    npy.write_array(stream, GRID, version=(2, 0))
    rare = Array("float32", GRID.shape, "numpy.ndarray", stream.getvalue())
    assert np.array_equal(view_of(rare), GRID)
    with pytest.raises(TypeError, match="Unsupported serialization type"):
        view_of(Array("float32", (1,), "another", b""))


def test_frames_are_serialised_as_flower_does_it() -> None:
    frames = (b"first", b"", bytes(1000))
    together = attach(Parcel({"stage": "train"}, frames), RecordDict())
    (record,) = together.array_records.values()
    packed = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    assert record["frames"] == Array(np.frombuffer(packed, dtype=np.uint8))
    parcel, rest = detach(together)
    assert parcel is not None
    assert parcel.frames == frames
    assert not rest


def told(config: dict[str, Any], run_id: int = 1) -> bytes:
    """The hash of a run, at any node."""
    return hash_run(Context(run_id, 3, {}, RecordDict(), config))


VALUES: list[Any] = [True, 1, 1.0, "1", b"1", 0.0, -0.0, False, 0, "", b"", "True"]
VALUES += [[value] for value in VALUES] + [[], [1, 1], ["1", ""], ["", "1"], "[1]"]


def test_S57_values_of_different_types_have_different_hashes() -> None:
    configs = [RecordDict({"config": ConfigRecord({"x": value})}) for value in VALUES]
    assert len({hash_records(config) for config in configs}) == len(VALUES)
    runs = [value for value in VALUES if isinstance(value, bool | int | float | str)]
    assert len({told({"x": value}) for value in runs}) == len(runs)


def test_S57_there_is_nothing_in_a_context_that_nobody_has_thought_of() -> None:
    """A new field of Flower's: does the server set it? Then sign it, or keep it from the app."""
    signed, local = {"run_id", "series_id", "run_config"}, {"node_id", "node_config", "state"}
    assert {field.name for field in fields(Context)} == signed | local


def test_S57_a_run_config_has_no_order_and_records_have_one() -> None:
    assert told({"a": 1, "b": 2}) == told({"b": 2, "a": 1})
    one, two = ConfigRecord({"a": 1, "b": 2}), ConfigRecord({"b": 2, "a": 1})
    assert hash_records(RecordDict({"c": one})) != hash_records(RecordDict({"c": two}))


RECORDS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "value of an array": {"arrays": ArrayRecord({"w": Array(GRID + 1)})},
    "name of an array": {"arrays": ArrayRecord({"v": Array(GRID)})},
    "shape": {"arrays": ArrayRecord({"w": Array(GRID.reshape(6, 4))})},
    "type": {"arrays": ArrayRecord({"w": Array(GRID.astype(np.int32))})},
    "claimed type": {
        "arrays": ArrayRecord({"w": Array("float64", (2, 3, 4), "numpy.ndarray", Array(GRID).data)})
    },
    "claimed shape": {
        "arrays": ArrayRecord({"w": Array("float32", (24,), "numpy.ndarray", Array(GRID).data)})
    },
    "claimed serialisation": {
        "arrays": ArrayRecord({"w": Array("float32", (2, 3, 4), "another", Array(GRID).data)})
    },
    "no array": {"arrays": ArrayRecord()},
    "one array more": {"arrays": ArrayRecord({"w": Array(GRID), "v": Array(GRID)})},
    "config": {"config": ConfigRecord({"lr": 0.2})},
    "no config": {"config": ConfigRecord()},
    "metrics": {"metrics": MetricRecord({"lr": 0.2})},
    "another kind of record": {"config": MetricRecord({"lr": 0.1})},
    "an empty record": {"more": ConfigRecord()},
    "another empty record": {"more": MetricRecord()},
    "empty arrays": {"more": ArrayRecord()},
}


def test_S57_every_record_of_a_message_is_in_its_hash() -> None:
    usual = {
        "arrays": ArrayRecord({"w": Array(GRID)}),
        "config": ConfigRecord({"lr": 0.1}),
        "metrics": MetricRecord({"lr": 0.1}),
    }
    found = {name: hash_records(RecordDict(usual | other)) for name, other in RECORDS.items()}
    found["another order"] = hash_records(RecordDict(dict(reversed(usual.items()))))
    found["another name"] = hash_records(RecordDict({**usual, "settings": usual["config"]}))
    renamed = {"settings" if name == "config" else name: each for name, each in usual.items()}
    found["a new name"] = hash_records(RecordDict(renamed))
    found["one less"] = hash_records(RecordDict(dict(list(usual.items())[:2])))
    assert len(set(found.values())) == len(RECORDS) + 4


def test_S57_all_that_a_node_is_told_is_in_the_hash_of_its_assignment() -> None:
    usual: dict[str, Any] = {
        "run": told({}),
        "records": hash_records(RecordDict()),
        "message_type": "train",
        "weighted_by": "num-examples",
        "limits": {"loss": 1.0},
        "stage": "train",
    }
    others: list[dict[str, Any]] = [
        {},
        {"run": told({"lr": 1})},
        {"run": told({}, run_id=2)},
        {"records": hash_records(RecordDict({"more": ConfigRecord()}))},
        {"message_type": "train.harder"},
        {"weighted_by": "one"},
        {"limits": {"loss": 2.0}},
        {"limits": {}},
        {"stage": "evaluate"},
    ]
    assert len({hash_assignment(**(usual | other)) for other in others}) == len(others)


def head(shape: str, descr: str = "'|u1'") -> bytes:
    fields = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(fields).to_bytes(2, "little") + fields.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        head("(8,)") + b"\3\0\0\0abc",
        head("(-1,)") + b"\3\0\0\0abc",
        head("(1, 7)") + b"\3\0\0\0abc",
        head("(7,)", "'|O'") + b"\3\0\0\0abc",
        head("(1,)", "'<u4'") + b"\0\0\0\0",
        head("(6,)") + b"\3\0\0\0ab",
        b"\x93NUMPY\x09\x00",
    ],
    ids=["empty", "cut", "negative", "matrix", "objects", "words", "short frame", "version"],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    numbers = ConfigRecord({"protocol": PROTOCOL})
    frames = ArrayRecord({"frames": Array("uint8", (7,), "numpy.ndarray", data)})
    with pytest.raises(DecodeError, match="malformed"):
        detach(RecordDict({"lightsecagg": numbers, "lightsecagg.frames": frames}))
