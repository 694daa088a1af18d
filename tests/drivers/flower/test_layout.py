"""Arrays as Flower serialises them: read where they lie, and written in one copy."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy

from lightsecagg.drivers.flower.layout import hash_assignment, view_of
from lightsecagg.drivers.flower.parcels import Parcel, attach, detach
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
    told: tuple[Any, ...] = ({}, "num-examples", {}, "train")
    assert hash_assignment({"w": view}, *told) == hash_assignment({"w": read.copy()}, *told)


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
    numbers = ConfigRecord({"protocol": 1})
    frames = ArrayRecord({"frames": Array("uint8", (7,), "numpy.ndarray", data)})
    with pytest.raises(DecodeError, match="malformed"):
        detach(RecordDict({"lightsecagg": numbers, "lightsecagg.frames": frames}))
