"""Chunks: one way to cut a message, no memory for claims, and never anything but our errors."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.drivers.transport.framing import (
    GOODBYE,
    MAX_CHUNK,
    PAYLOAD,
    Reassembler,
    chunks,
)
from lightsecagg.errors import DecodeError, ParameterError, RemoteProtocolError

START, CONTINUATION = 0, 1


def header(kind: int, remaining: int, version: int = 2, zero: int = 0) -> bytes:
    return struct.pack("!BBHI", version, kind, zero, remaining)


def anything(length: int) -> None:
    pass


@pytest.mark.parametrize("size", [1, 2, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD])
def test_messages_survive_and_chunks_stay_small(size: int) -> None:
    message = bytes(range(256)) * (size // 256 + 1)
    message = message[:size]
    pieces = list(chunks(message))
    assert len(pieces) == -(-size // PAYLOAD)
    assert max(map(len, pieces)) <= MAX_CHUNK
    reassembler = Reassembler(anything)
    for piece in pieces[:-1]:
        assert reassembler.feed(piece) is None
        assert reassembler.inside_message
    assert reassembler.feed(pieces[-1]) == message
    assert not reassembler.inside_message


def test_an_empty_message_cannot_be_sent() -> None:
    with pytest.raises(ParameterError, match="1 to"):
        list(chunks(b""))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (b"", None, "a chunk has 9 to"),
        (header(START, 0), None, "a chunk has 9 to"),
        (header(START, 5, version=1) + b"12345", None, "chunk version 1"),
        (header(3, 5) + b"12345", None, "unknown chunk kind"),
        (header(2, 5) + b"12345", None, "unknown chunk kind"),
        (header(2, 5), None, "a chunk has 9 to"),
        (GOODBYE, GOODBYE, "a chunk after the goodbye"),
        (GOODBYE, header(START, 5) + b"12345", "a chunk after the goodbye"),
        (header(START, PAYLOAD + 2) + bytes(PAYLOAD), GOODBYE, "a chunk has 9 to"),
        (header(START, 5, zero=1) + b"12345", None, "reserved bits"),
        (header(START, 4) + b"12345", None, "5 bytes where 4 remain"),
        (header(START, 6) + b"12345", None, "5 bytes where 6 remain"),
        (header(START, 0) + b"1", None, "1 bytes where 0 remain"),
        (header(CONTINUATION, 5) + b"12345", None, "continues no message"),
        (header(START, MAX_CHUNK) + bytes(PAYLOAD + 1), None, "a chunk has 9 to 262144"),
        (header(START, PAYLOAD + 2) + bytes(PAYLOAD), header(START, 2) + b"12", "inside another"),
        (header(START, PAYLOAD + 2) + bytes(PAYLOAD), header(1, 1) + b"1", "2 bytes are missing"),
        (header(START, PAYLOAD + 2) + bytes(PAYLOAD), header(1, 2) + b"1", "1 bytes where 2"),
    ],
)
def test_S25_every_other_way_to_cut_a_message_is_refused(
    first: bytes, second: bytes | None, reason: str
) -> None:
    reassembler = Reassembler(anything)
    if second is not None:
        assert reassembler.feed(first) is None
        first = second
    with pytest.raises(DecodeError, match=reason):
        reassembler.feed(first)


def test_S25_a_claim_of_two_gibibytes_costs_no_memory() -> None:
    chunk = header(START, 2 << 30) + bytes(PAYLOAD)

    def refuse(length: int) -> None:
        raise RemoteProtocolError(f"{length} bytes are too many")

    for accept in (refuse, anything):
        reassembler = Reassembler(accept)
        tracemalloc.start()
        try:
            if accept is refuse:
                with pytest.raises(RemoteProtocolError, match="2147483648"):
                    reassembler.feed(chunk)
            else:
                assert reassembler.feed(chunk) is None
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 16


def test_S25_the_claim_is_judged_once_and_before_anything_is_kept() -> None:
    asked: list[int] = []
    reassembler = Reassembler(asked.append)
    for chunk in chunks(bytes(2 * PAYLOAD + 7)):
        reassembler.feed(chunk)
    assert asked == [2 * PAYLOAD + 7]


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_S28_random_bytes_raise_our_error_or_parse(pieces: list[bytes]) -> None:
    reassembler = Reassembler(anything)
    for piece in pieces:
        try:
            message = reassembler.feed(piece)
        except DecodeError:
            return
        assert message is None or len(message) == len(piece) - 8


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
def test_S28_a_flipped_header_never_passes_for_another_message(
    sizes: list[int], position: int, flip: int
) -> None:
    """A changed header byte is noticed; a changed payload byte is the protocol's to notice."""
    messages = [bytes([size]) * size for size in sizes]
    pieces = [piece for message in messages for piece in chunks(message)]
    broken = bytearray(pieces[position % len(pieces)])
    broken[position % 8] ^= flip
    pieces[position % len(pieces)] = bytes(broken)
    reassembler = Reassembler(anything)
    received: list[bytes | None] = []
    with pytest.raises(DecodeError):
        received.extend(map(reassembler.feed, pieces))
    assert received == messages[: len(received)]
