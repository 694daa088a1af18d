"""Messages as bytes: versioned, deterministic and strict.

Every message starts with two bytes, version and tag. Then:

* control messages: the fields in order, as one msgpack array;
* vector messages: a fixed little-endian struct, then raw bytes to the end of the message.

    SealedShare      owner u32, recipient u32, serial u64, kind u8, length u32 | sealed bytes
    MaskedUpload     bitmap length u16, elements u32 | elements | bitmap
    AggregatedShare  zero u16, elements u32 | elements

(With the prefix, elements start at byte 8: they are used where they lie, without a copy.)

There is one encoding per message and one message per encoding: decoding refuses unknown versions
and tags, wrong lengths, bytes left over, msgpack that is not in its shortest form, and elements
that are not below q.
"""

from __future__ import annotations

import struct
from typing import Final, cast

import msgspec

from lightsecagg.crypto.sealing import ShareKind, sealed_length
from lightsecagg.errors import DecodeError, FieldError
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.protocol import messages
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Control,
    MaskedUpload,
    Message,
    SealedShare,
)

VERSION: Final = 1

# Tags are wire format: never renumber, only append.
TAGS: Final[dict[type, int]] = {
    messages.Opening: 1,
    messages.Advertise: 2,
    messages.Roster: 3,
    messages.SealedShare: 4,
    messages.SharesClosed: 5,
    messages.MaskedUpload: 6,
    messages.SurvivorSet: 7,
    messages.SurvivorSignature: 8,
    messages.Certificate: 9,
    messages.Refusal: 10,
    messages.AggregatedShare: 11,
    messages.UnmaskingShares: 12,
    messages.AbortRound: 13,
}
_TYPES: Final = {tag: kind for kind, tag in TAGS.items()}

_PREFIX = struct.Struct("<BB")
_SEALED = struct.Struct("<IIQBI")
_UPLOAD = struct.Struct("<HI")
_ANSWER = struct.Struct("<HI")


class Codec:
    """Encodes and decodes messages of one field."""

    def __init__(self, field: PrimeField) -> None:
        self._field = field
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = {
            kind: msgspec.msgpack.Decoder(kind) for kind in TAGS if issubclass(kind, Control)
        }

    def encode(self, message: Message) -> bytes:
        """The bytes of a message."""
        prefix = _PREFIX.pack(VERSION, TAGS[type(message)])
        match message:
            case SealedShare(owner, recipient, kind, length, sealed, serial):
                header = _SEALED.pack(owner, recipient, serial, kind.value, length)
                return b"".join((prefix, header, sealed))
            case MaskedUpload(held, vector):
                header = _UPLOAD.pack(len(held), vector.size)
                return b"".join((prefix, header, self._field.to_bytes(vector), held))
            case AggregatedShare(vector):
                header = _ANSWER.pack(0, vector.size)
                return b"".join((prefix, header, self._field.to_bytes(vector)))
            case _:
                return prefix + self._encoder.encode(message)

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """The message; `DecodeError` for anything that `encode` does not produce."""
        view = memoryview(data)
        if len(view) < _PREFIX.size:
            raise DecodeError(f"a message has at least {_PREFIX.size} bytes, got {len(view)}")
        version, tag = _PREFIX.unpack_from(view)
        if version != VERSION:
            raise DecodeError(f"wire version {version} is not supported; this is {VERSION}")
        kind = _TYPES.get(tag)
        if kind is None:
            raise DecodeError(f"unknown message tag {tag}")
        body = view[_PREFIX.size :]
        if kind is SealedShare:
            return _decode_sealed(body)
        if kind is MaskedUpload:
            return self._decode_upload(body)
        if kind is AggregatedShare:
            return self._decode_answer(body)
        return self._decode_control(kind, body)

    def _decode_control(self, kind: type, body: memoryview) -> Message:
        try:
            message = cast(Message, self._decoders[kind].decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DecodeError(f"malformed {kind.__name__}: {error}") from error
        if self._encoder.encode(message) != body:
            raise DecodeError(f"malformed {kind.__name__}: not in its one canonical form")
        return message

    def _decode_upload(self, body: memoryview) -> MaskedUpload:
        bitmap, elements = _unpack(_UPLOAD, body)
        end = _UPLOAD.size + 4 * elements
        if len(body) != end + bitmap:
            raise DecodeError(
                f"an upload of {elements} elements and a bitmap of {bitmap} bytes takes "
                f"{end + bitmap} bytes, got {len(body)}"
            )
        return MaskedUpload(bytes(body[end:]), self._elements(body[_UPLOAD.size : end], elements))

    def _decode_answer(self, body: memoryview) -> AggregatedShare:
        zero, elements = _unpack(_ANSWER, body)
        if zero:
            raise DecodeError("malformed AggregatedShare: a reserved field is not zero")
        return AggregatedShare(self._elements(body[_ANSWER.size :], elements))

    def _elements(self, body: memoryview, count: int) -> Elements:
        try:
            return self._field.from_bytes(body, count)
        except FieldError as error:
            raise DecodeError(str(error)) from error


def _decode_sealed(body: memoryview) -> SealedShare:
    owner, recipient, serial, kind, length = _unpack(_SEALED, body)
    try:
        share_kind = ShareKind(kind)
    except ValueError as error:
        raise DecodeError(f"unknown kind of share {kind}") from error
    sealed = bytes(body[_SEALED.size :])
    if len(sealed) != sealed_length(length):
        raise DecodeError(
            f"a sealed share of {length} bytes takes {sealed_length(length)}, got {len(sealed)}"
        )
    return SealedShare(owner, recipient, share_kind, length, sealed, serial)


def _unpack(layout: struct.Struct, body: memoryview) -> tuple[int, ...]:
    if len(body) < layout.size:
        raise DecodeError(f"the header takes {layout.size} bytes, got {len(body)}")
    return layout.unpack_from(body)
