"""FedBuff: NO PROTECTION AT ALL. The baseline of the asynchronous mode, Eq. (26) and Appendix F.1.

Clients send their updates as they are, in float32; the server reads each of them, discounts it by
the real number s(t - t_i) and averages K of them. Buffers are formed by the same rules as in the
protected mode (`buffers.choose_updates`), so that both train on the same updates. There is nothing
to register, to share, to agree on or to recover.

Unprotected uploads have a codec of their own: the decoder of the protected messages does not even
know them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import DecodeError, InputRefused, ParameterError, RemoteProtocolError
from lightsecagg.field.staleness import StalenessFunction
from lightsecagg.protocol.buffers import Rules, choose_updates
from lightsecagg.protocol.interface import Update

_HEADER = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class PlainUpload:
    """An update in the clear."""

    version: int
    """t_i: the time at which the client downloaded the model."""
    vector: NDArray[np.float32] = field(repr=False)

    def to_bytes(self) -> bytes:
        """version u64, entries u32 | entries as float32, little-endian."""
        return _HEADER.pack(self.version, self.vector.size) + self.vector.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> PlainUpload:
        """The inverse of `to_bytes`."""
        if len(data) < _HEADER.size:
            raise DecodeError(f"a plain upload has at least {_HEADER.size} bytes, got {len(data)}")
        version, entries = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + 4 * entries:
            raise DecodeError(
                f"a plain upload of {entries} entries takes {_HEADER.size + 4 * entries} bytes, "
                f"got {len(data)}"
            )
        return cls(version, np.frombuffer(data, dtype="<f4", offset=_HEADER.size))


@dataclass(frozen=True, slots=True)
class BufferMean:
    """The result of one buffer: sum s(t - t_i) x_i / sum s(t - t_i)."""

    time: int
    mean: NDArray[np.float64] = field(repr=False)
    owners: tuple[int, ...]
    staleness: tuple[int, ...]
    """t - t_i, by owner."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    owner: int
    upload: PlainUpload

    @property
    def version(self) -> int:
        return self.upload.version


class FedBuffClient:
    """A client that sends its updates UNPROTECTED."""

    def __init__(self, client: int) -> None:
        self.client = client

    def set_input(self, update: Update, version: int) -> PlainUpload:
        """The update in the clear; send it to the server."""
        vector = np.asarray(update.vector, dtype=np.float32)
        if not np.isfinite(vector).all():
            raise InputRefused(f"the update of client {self.client} holds NaN or infinite entries")
        return PlainUpload(version, vector)


class FedBuffServer:
    """A server that reads every update: the buffer of FedBuff."""

    def __init__(
        self, dimension: int, buffer_size: int, staleness: StalenessFunction, max_staleness: int
    ) -> None:
        if min(dimension, buffer_size) < 1 or max_staleness < 0:
            raise ParameterError(
                f"d = {dimension} and K = {buffer_size} must be at least 1, tau_max = "
                f"{max_staleness} at least 0"
            )
        self.time = 0
        """t: the version of the current model, and the time of the next buffer."""
        self._dimension = dimension
        self._buffer_size = buffer_size
        self._staleness = staleness
        self._max_staleness = max_staleness
        self._waiting: list[_Waiting] = []

    def receive(self, sender: int, upload: PlainUpload) -> list[BufferMean]:
        """Take an update; the means of the buffers that it fills."""
        if upload.vector.shape != (self._dimension,):
            raise RemoteProtocolError(
                f"client {sender} uploaded {upload.vector.size} entries instead of "
                f"{self._dimension}"
            )
        if upload.version > self.time:
            raise RemoteProtocolError(f"client {sender} trained from a model of the future")
        self._waiting.append(_Waiting(sender, upload))
        means: list[BufferMean] = []
        while len(chosen := self._choose()) == self._buffer_size:
            means.append(self._average(chosen))
        return means

    def _choose(self) -> list[_Waiting]:
        oldest = self.time - self._max_staleness
        self._waiting = [waiting for waiting in self._waiting if waiting.version >= oldest]
        return choose_updates(self._waiting, self._buffer_size, lambda version: 1, Rules())

    def _average(self, chosen: list[_Waiting]) -> BufferMean:
        chosen = sorted(chosen, key=lambda waiting: waiting.owner)
        staleness = tuple(self.time - waiting.version for waiting in chosen)
        discounts = [self._staleness(tau) for tau in staleness]
        mean = self._mean(discounts, [waiting.upload for waiting in chosen])
        taken = set(map(id, chosen))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        owners = tuple(waiting.owner for waiting in chosen)
        result = BufferMean(self.time, mean, owners, staleness)
        self.time += 1
        return result

    def _mean(
        self, discounts: Sequence[float], uploads: Sequence[PlainUpload]
    ) -> NDArray[np.float64]:
        total = np.zeros(self._dimension)
        for discount, upload in zip(discounts, uploads, strict=True):
            total += discount * upload.vector
        return total / sum(discounts)
