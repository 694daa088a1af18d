"""Messages as chunks: a fixed header of eight bytes, then at most 256 KiB less that of payload.

    version u8 | kind u8 | zero u16 | remaining u32 (big-endian)

`kind` says whether the chunk starts a message, continues one, or says goodbye; `remaining` counts
the bytes of the message that are still to come, this chunk's included. A stream that ends without
a goodbye was lost: gRPC does not tell the two apart. There is one way to cut a message: every
chunk but the last is full. Anything else is refused, so a peer cannot drip single bytes into a
message, and a header that claims 2 GiB costs no memory (S25): the claim is checked before anything
is kept, and only bytes that arrived are. A chunk is as long as it is worth the calls that carry it:
it is what every peer can make the other side hold, and its event loop stop for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final

from lightsecagg.drivers.transport.keeping import Data, InMemory, Keep, Keeper
from lightsecagg.errors import DecodeError, ParameterError

MAX_CHUNK: Final = 1 << 18
"""Bytes in the largest chunk, header included."""

_HEADER: Final = struct.Struct("!BBHI")
_VERSION: Final = 2
"""Version 1 had chunks of 1 MiB."""
_START, _CONTINUATION, _GOODBYE = 0, 1, 2

PAYLOAD: Final = MAX_CHUNK - _HEADER.size
"""Bytes of the message in a full chunk."""

GOODBYE: Final = _HEADER.pack(_VERSION, _GOODBYE, 0, 0)
"""The last chunk of a stream that ends as it should."""

MAX_MESSAGE: Final = 0xFFFFFFFF
"""Bytes in the largest message that a header can announce."""


def chunks(message: bytes) -> Iterator[bytes]:
    """Cut one message into the chunks that carry it."""
    if not 0 < len(message) <= MAX_MESSAGE:
        raise ParameterError(f"a message has 1 to {MAX_MESSAGE} bytes, not {len(message)}")
    view = memoryview(message)
    kind = _START
    for start in range(0, len(message), PAYLOAD):
        header = _HEADER.pack(_VERSION, kind, 0, len(message) - start)
        yield b"".join((header, view[start : start + PAYLOAD]))
        kind = _CONTINUATION


class Reassembler:
    """Puts the chunks of one stream together again.

    `accept(length)` is asked once per message, before its first byte is kept; it raises to refuse.
    `keep` says where one that is accepted is kept. Any exception means that the stream is beyond
    repair and must be cut.
    """

    def __init__(self, accept: Callable[[int], None], keep: Keep = InMemory) -> None:
        self._accept, self._keep = accept, keep
        self._kept: Keeper | None = None
        self._missing = 0
        self.ended = False
        """Whether the peer said goodbye; no chunk may follow."""

    @property
    def inside_message(self) -> bool:
        """Whether a message has begun and is not complete."""
        return self._missing > 0

    @property
    def blocks(self) -> bool:
        """Whether the next `feed` may wait for the disk: then call it in a thread."""
        return self._kept is not None and self._kept.blocks

    def feed(self, chunk: bytes) -> Data | None:
        """Take the next chunk; return the message that it completes, if it does."""
        if chunk == GOODBYE and not self.inside_message and not self.ended:
            self.ended = True
            return None
        if self.ended:
            raise DecodeError("a chunk after the goodbye")
        if not _HEADER.size < len(chunk) <= MAX_CHUNK:
            raise DecodeError(
                f"a chunk has {_HEADER.size + 1} to {MAX_CHUNK} bytes, this one {len(chunk)}"
            )
        version, kind, zero, remaining = _HEADER.unpack_from(chunk)
        if version != _VERSION:
            raise DecodeError(f"chunk version {version}, this side speaks {_VERSION}")
        if zero or kind not in (_START, _CONTINUATION):
            raise DecodeError(f"unknown chunk kind {kind} or reserved bits {zero:#06x}")
        if (kind == _CONTINUATION) != self.inside_message:
            raise DecodeError("a chunk that continues no message, or starts one inside another")
        if kind == _CONTINUATION and remaining != self._missing:
            raise DecodeError(f"{self._missing} bytes are missing, the chunk says {remaining}")
        payload = memoryview(chunk)[_HEADER.size :]
        if len(payload) != min(remaining, PAYLOAD):
            raise DecodeError(
                f"a chunk carries {len(payload)} bytes where {remaining} remain; "
                f"every chunk but the last carries {PAYLOAD}"
            )
        if self._kept is None:
            self._accept(remaining)
            self._kept = self._keep(remaining)
        self._kept.add(payload)
        self._missing = remaining - len(payload)
        if self._missing:
            return None
        kept, self._kept = self._kept, None
        return kept.whole()

    def discard(self) -> None:
        """Keep nothing of a message that will not be completed."""
        if self._kept is not None:
            self._kept.discard()
