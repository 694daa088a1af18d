"""What travels in a Flower message: the frames of a link, and a few numbers.

A parcel rides beside the records of the user's app, in two records of its own: numbers and names in
a `ConfigRecord`, and all frames together in an `ArrayRecord` of one array of bytes. (Every array is
a request of its own, and large values in a `ConfigRecord` are slow.)

A frame is one encoded message of the protocol. The frames of a link, server to node, are numbered
from 0 in every epoch; a parcel says the number of its first. Frames that were not acknowledged are
sent again, so that a node gets all of them, in order, however many parcels or replies are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy

from lightsecagg.drivers.flower.layout import view_of
from lightsecagg.errors import DecodeError
from lightsecagg.foreign import decode

PROTOCOL = 2
"""Counts incompatible changes of what parcels say."""

_NUMBERS = "lightsecagg"
_FRAMES = "lightsecagg.frames"
_LENGTH = 4


class Stage(StrEnum):
    """What the server asks a node for."""

    HELLO = "hello"
    """Its identity key."""
    OPEN = "open"
    """Its keys for a new epoch."""
    TRAIN = "train"
    """Its masked update."""
    EVALUATE = "evaluate"
    """Its masked metrics."""
    RELAY = "relay"
    """Its answers to the frames, and shares of masks that it will need."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One direction of an exchange."""

    numbers: dict[str, Any]
    """By name; of the types that a `ConfigRecord` takes."""
    frames: tuple[bytes, ...] = field(default=(), repr=False)


def attach(parcel: Parcel, records: RecordDict) -> RecordDict:
    """The records, with a parcel beside them."""
    together = RecordDict(dict(records))
    together[_NUMBERS] = ConfigRecord({"protocol": PROTOCOL, **parcel.numbers})
    if parcel.frames:
        together[_FRAMES] = ArrayRecord({"frames": _pack(parcel.frames)})
    return together


def detach(records: RecordDict) -> tuple[Parcel | None, RecordDict]:
    """The parcel beside the records, if there is one, and the records without it."""
    rest = RecordDict({name: records[name] for name in records if name not in (_NUMBERS, _FRAMES)})
    if _NUMBERS not in records:
        return None, rest
    numbers = records[_NUMBERS]
    if not isinstance(numbers, ConfigRecord) or numbers.get("protocol") != PROTOCOL:
        raise DecodeError(
            "a parcel of another release of lightsecagg; use the same one in the whole federation"
        )
    frames: tuple[bytes, ...] = ()
    if _FRAMES in records:
        frames = tuple(_unpack(_bytes_of(records[_FRAMES])))
    return Parcel(dict(numbers), frames), rest


def _pack(frames: Sequence[bytes]) -> Array:
    """What `Array` makes of the bytes of all frames, in one copy instead of four."""
    size = sum(_LENGTH + len(frame) for frame in frames)
    head = BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    npy.write_array_header_1_0(head, fields)
    parts = [head.getvalue()]
    for frame in frames:
        parts += (len(frame).to_bytes(_LENGTH, "little"), frame)
    return Array("uint8", (size,), SType.NUMPY, b"".join(parts))


def _bytes_of(record: object) -> memoryview:
    """The one array of bytes; its serialisation is foreign data."""
    if not isinstance(record, ArrayRecord) or list(record) != ["frames"]:
        raise DecodeError("malformed parcel: its frames are not one array")
    array = decode(lambda _: view_of(record["frames"]), b"", "array of frames")
    if array.dtype != np.uint8 or array.ndim != 1:
        raise DecodeError(f"malformed parcel: frames of {array.dtype}, not a row of bytes")
    return np.ascontiguousarray(array).data


def _unpack(packed: memoryview) -> Iterator[bytes]:
    start = 0
    while start < len(packed):
        begin = start + _LENGTH
        end = begin + int.from_bytes(packed[start:begin], "little")
        if begin > len(packed) or end > len(packed):
            raise DecodeError("malformed parcel: its last frame is cut short")
        yield bytes(packed[begin:end])
        start = end
