"""A masked update on disk: read in parts when it is summed, and every part verified (R36)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightsecagg.drivers.federation.durable import patiently
from lightsecagg.errors import JournalError
from lightsecagg.field.prime import Elements

_BLOCK = 2**18
"""Elements of an upload that are read and verified together."""


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """One of them; nothing of it is kept in memory."""

    name: str
    path: Path
    length: int
    checksums: tuple[bytes, ...]

    def read(self, start: int, stop: int) -> Elements:
        """Its columns from `start` up to `stop`, exactly as they were stored."""
        first, last = start // _BLOCK, -(-stop // _BLOCK)
        offset = first * _BLOCK
        size = min(self.length, last * _BLOCK) - offset
        try:
            with patiently(lambda: self.path.open("rb")) as file:
                file.seek(4 * offset)
                # One byte more shows that the file has grown.
                data = file.read(4 * size + (offset + size == self.length))
        except OSError as error:
            raise JournalError(f"{self.name} is gone: {error}") from error
        if checksums_of(data) != self.checksums[first:last]:
            raise JournalError(f"{self.name} is damaged")
        return np.frombuffer(data, dtype=np.uint32)[start - offset : stop - offset]


def bytes_of(vector: Elements) -> memoryview:
    """Not copied."""
    return vector.view(np.uint8).data


def checksums_of(data: bytes | memoryview) -> tuple[bytes, ...]:
    """The hash of each block."""
    view = memoryview(data)
    starts = range(0, len(data), 4 * _BLOCK)
    return tuple(hashlib.sha256(view[start : start + 4 * _BLOCK]).digest() for start in starts)
