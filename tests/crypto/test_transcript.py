"""Transcripts are injective and domain-separated; derived keys follow every one of their inputs."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.crypto.transcript import (
    DOMAIN,
    context_hash,
    derive_key,
    transcript,
    transcript_head,
    uint,
)
from lightsecagg.errors import ParameterError

labels = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)
parts = st.lists(st.binary(max_size=12), max_size=4)


def parse(encoded: bytes) -> tuple[list[bytes], bytes]:
    """Read one transcript back; returns its items and whatever follows it."""

    def take(count: int) -> bytes:
        nonlocal encoded
        assert len(encoded) >= count
        head, encoded = encoded[:count], encoded[count:]
        return head

    items = []
    (count,) = struct.unpack(">I", take(4))
    for _ in range(count):
        (length,) = struct.unpack(">I", take(4))
        items.append(take(length))
    return items, encoded


@given(labels, parts, st.binary(max_size=8))
def test_a_transcript_can_be_read_in_one_way_only(
    label: str, fields: list[bytes], trailing: bytes
) -> None:
    items, rest = parse(transcript(label, *fields) + trailing)
    assert items == [DOMAIN, label.encode(), *fields]
    assert rest == trailing


@given(labels, parts, st.integers(0, 4))
def test_a_head_and_the_other_parts_are_the_transcript(
    label: str, fields: list[bytes], known: int
) -> None:
    others = b"".join(struct.pack(">I", len(part)) + part for part in fields[known:])
    head = transcript_head(label, len(fields), *fields[:known])
    assert head + others == transcript(label, *fields)


def test_moving_bytes_between_parts_changes_the_transcript() -> None:
    spellings = [
        transcript("label", b"ab", b"c"),
        transcript("label", b"a", b"bc"),
        transcript("label", b"abc"),
        transcript("label", b"abc", b""),
        transcript("label", b"", b"abc"),
        transcript("labelabc"),
        transcript("labela", b"bc"),
    ]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize("label", ["", "größe"])
def test_bad_labels_are_refused(label: str) -> None:
    with pytest.raises(ParameterError):
        transcript(label)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(ParameterError, match=str(value)):
        uint(value)


def test_numbers_have_one_width() -> None:
    assert uint(0) == bytes(8)
    assert uint(2**64 - 1) == b"\xff" * 8
    assert uint(258) == bytes(6) + b"\x01\x02"


def test_context_hash_is_sha256_of_the_transcript() -> None:
    expected = hashlib.sha256(transcript("context", b"a", b"b")).digest()
    assert context_hash("context", b"a", b"b") == expected


def test_derive_key_is_rfc5869_hkdf() -> None:
    """Against HKDF written out with the standard library's HMAC."""
    secret, salt = b"\x0b" * 32, b"context"
    pseudo_random_key = hmac.digest(salt, secret, "sha256")
    info = transcript("label", b"part")
    assert derive_key(secret, salt, "label", b"part") == hmac.digest(
        pseudo_random_key, info + b"\x01", "sha256"
    )


def test_derived_keys_follow_every_input() -> None:
    keys = {
        derive_key(b"s" * 32, b"context", "label", b"part"),
        derive_key(b"t" * 32, b"context", "label", b"part"),
        derive_key(b"s" * 32, b"contexT", "label", b"part"),
        derive_key(b"s" * 32, b"context", "labeL", b"part"),
        derive_key(b"s" * 32, b"context", "label", b"parT"),
        derive_key(b"s" * 32, b"context", "label", b"part", b""),
    }
    assert len(keys) == 6
