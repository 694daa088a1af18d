"""Messages as bytes: versioned, deterministic and strict.

Every message starts with two bytes, version and tag. Then:

* control messages: the fields in order, as one msgpack array;
* vector messages: a fixed little-endian struct, then raw bytes to the end of the message.

    ShareBundle      owner u64, recipient u64, serial u64, kind u8, binding u8, length u32, salt |
                     mac | root | sealed bytes
    all others       trailer length u16, elements u32 | elements | trailer

where a salt and a mac have 16 bytes and a root has 32; binding is 0 where there is neither, 1 with
a mac, 2 with both. The trailer is MaskedUpload's tag as msgpack, and AggregatedShare's time as u64.
A bundle of several shares is as many bundles of one share, prefix included, one after the other.
(With the prefix, elements start at byte 8: they are used where they lie, without a copy, and so are
sealed shares.)

There is one encoding per message and one message per encoding: decoding refuses unknown versions
and tags, wrong lengths, bytes left over, msgpack that is not in its shortest form, and elements
that are not below q, where uploads are over F_q.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from lightsecagg.crypto.sealing import MAC_LENGTH, SALT_LENGTH, ShareKind, sealed_length
from lightsecagg.crypto.transcript import HASH_LENGTH
from lightsecagg.errors import DecodeError, FieldError
from lightsecagg.field.group import Elements, Group
from lightsecagg.foreign import decode
from lightsecagg.protocol import messages
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Control,
    MaskedUpload,
    Message,
    SealedShare,
    ShareBundle,
    Tag,
)

VERSION: Final = 4
"""Version 1 sealed shares without a salt; version 2 had clients of 32-bit ids, and messages of its
own for the sums of the asynchronous mode; in version 3 the server revealed by what to check, and a
round had an upload of its own."""

# Tags are wire format: never renumber, only append. 15 to 19 were version 2's; 6, 21 and 22 3's.
TAGS: Final[dict[type, int]] = {
    messages.Opening: 1,
    messages.Advertise: 2,
    messages.Roster: 3,
    messages.ShareBundle: 4,
    messages.SharesClosed: 5,
    messages.SumRequest: 7,
    messages.Consent: 8,
    messages.Certificate: 9,
    messages.Refusal: 10,
    messages.AggregatedShare: 11,
    messages.UnmaskingShares: 12,
    messages.AbortRound: 13,
    messages.MaskedUpload: 14,
    messages.UploadDropped: 20,
    messages.Reports: 23,
    messages.ReportsWanted: 24,
}
_VECTOR_MESSAGES: Final = (MaskedUpload, AggregatedShare)
_TYPES: Final = {tag: kind for kind, tag in TAGS.items()}

# Made at import, as every decoder of this package: msgspec examines a type when it first makes a
# decoder of it, and crashes if two threads do so at once.
_DECODERS: Final = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (*TAGS, Tag) if issubclass(kind, Control)
}

_SHARE_KINDS: Final = {kind.value: kind for kind in ShareKind}

_PREFIX = struct.Struct("<BB")
_SEALED = struct.Struct(f"<2sQQQBBI{SALT_LENGTH}s")
_VECTOR = struct.Struct("<HI")
_TIME = struct.Struct("<Q")


def kind_of(data: bytes | memoryview) -> str:
    """The name of the message that this claims to be, from its tag alone."""
    kind = _TYPES.get(data[1]) if len(data) >= _PREFIX.size else None
    return "an unknown message" if kind is None else kind.__name__


class Codec:
    """Encodes and decodes messages whose vectors are of one group (`Settings.group`)."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message, head: bytes = b"") -> bytes:
        """The bytes of a message, behind those of an envelope's head, if it has one."""
        prefix = _PREFIX.pack(VERSION, TAGS[type(message)])
        match message:
            case ShareBundle(shares):
                return b"".join((head, *_encode_shares(prefix, shares)))
            case AggregatedShare(vector, time):
                return self._encode_vector(head + prefix, vector, _TIME.pack(time))
            case MaskedUpload(tag, vector):
                return self._encode_vector(head + prefix, vector, self._encoder.encode(tag))
            case _:
                return head + prefix + self._encoder.encode(message)

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """The message; `DecodeError` for anything that `encode` does not produce."""
        view = memoryview(data)
        if len(view) < _PREFIX.size:
            raise DecodeError(f"a message has at least {_PREFIX.size} bytes, got {len(view)}")
        version, tag = _PREFIX.unpack_from(view)
        if version != VERSION:
            raise DecodeError(
                f"wire version {version} is not supported; this is {VERSION}: use the same "
                "release on both sides"
            )
        kind = _TYPES.get(tag)
        if kind is None:
            raise DecodeError(f"unknown message tag {tag}")
        body = view[_PREFIX.size :]
        if kind is ShareBundle:
            return ShareBundle(tuple(_decode_shares(view)))
        if kind in _VECTOR_MESSAGES:
            return self._decode_vector(kind, body)
        message: Message = self._decode_control(kind, body)
        return message

    def _encode_vector(self, prefix: bytes, vector: Elements, trailer: bytes) -> bytes:
        header = _VECTOR.pack(len(trailer), vector.size)
        return b"".join((prefix, header, self._group.to_buffer(vector), trailer))

    def _decode_control(self, kind: type, body: memoryview) -> Any:
        message = decode(_DECODERS[kind].decode, body, kind.__name__)
        if self._encoder.encode(message) != body:
            raise DecodeError(f"malformed {kind.__name__}: not in its one canonical form")
        return message

    def _decode_vector(self, kind: type, body: memoryview) -> Message:
        length, elements = _unpack(_VECTOR, body)
        end = _VECTOR.size + 4 * elements
        if len(body) != end + length:
            raise DecodeError(
                f"{elements} elements and a trailer of {length} bytes take {end + length} bytes, "
                f"got {len(body)}"
            )
        trailer = body[end:]
        vector = self._elements(body[_VECTOR.size : end], elements)
        if kind is MaskedUpload:
            return MaskedUpload(self._decode_control(Tag, trailer), vector)
        if length != _TIME.size:
            raise DecodeError(f"malformed {kind.__name__}: a trailer of {length} bytes")
        return AggregatedShare(vector, _TIME.unpack(trailer)[0])

    def _elements(self, body: memoryview, count: int) -> Elements:
        try:
            return self._group.from_bytes(body, count)
        except FieldError as error:
            raise DecodeError(str(error)) from error


def _encode_shares(prefix: bytes, shares: Iterable[SealedShare]) -> Iterator[bytes | memoryview]:
    for share in shares:
        kind, binding = share.kind.value, bool(share.mac) + bool(share.root)
        numbers = (share.owner, share.recipient, share.serial, kind, binding, share.length)
        yield _SEALED.pack(prefix, *numbers, share.salt)
        yield share.mac
        yield share.root
        yield share.sealed


def _decode_shares(view: memoryview) -> Iterator[SealedShare]:
    expected, start = bytes(view[: _PREFIX.size]), 0
    while start < len(view):
        prefix, owner, recipient, serial, kind, binding, length, salt = _unpack(
            _SEALED, view, start
        )
        if prefix != expected:
            raise DecodeError("malformed ShareBundle: something else follows a share")
        if kind not in _SHARE_KINDS:
            raise DecodeError(f"unknown kind of share {kind}")
        if binding > 2:
            raise DecodeError(f"unknown binding of a share {binding}")
        start += _SEALED.size
        mac = bytes(view[start : start + MAC_LENGTH * (binding > 0)])
        start += MAC_LENGTH * (binding > 0)
        root = bytes(view[start : start + HASH_LENGTH * (binding > 1)])
        start += HASH_LENGTH * (binding > 1)
        end = start + sealed_length(length)
        if end > len(view):
            raise DecodeError(
                f"a sealed share of {length} bytes takes {end - start}, got {len(view) - start}"
            )
        sealed = view[start:end]
        yield SealedShare(
            owner, recipient, _SHARE_KINDS[kind], length, salt, sealed, serial, mac, root
        )
        start = end


def _unpack(layout: struct.Struct, body: memoryview, start: int = 0) -> tuple[Any, ...]:
    if len(body) - start < layout.size:
        raise DecodeError(f"the header takes {layout.size} bytes, got {len(body) - start}")
    return layout.unpack_from(body, start)
