"""The wire format: one encoding per message, one message per encoding, nothing else (S12, S28)."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.crypto.sealing import SALT_LENGTH, ShareKind, sealed_length
from lightsecagg.errors import DecodeError
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, PrimeField
from lightsecagg.field.words import WORDS
from lightsecagg.protocol import messages as m
from lightsecagg.protocol.messages import Message
from lightsecagg.protocol.wire import TAGS, VERSION, Codec

FIELDS = [DEFAULT_FIELD, PAPER_FIELD, PrimeField(7)]
CODEC = Codec(DEFAULT_FIELD)

# -- messages of every type ----------------------------------------------------------------

short = st.binary(max_size=70)
whole = st.integers(-(2**63), 2**64 - 1)
ids = st.lists(whole, max_size=4).map(tuple)
pairs = st.lists(st.tuples(whole, short), max_size=3).map(tuple)
keys = st.lists(short, max_size=3).map(tuple)
tags = st.builds(m.Tag, whole, whole, short, whole, short, short, short)
uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def vectors(field: PrimeField) -> st.SearchStrategy[np.ndarray]:
    elements = st.lists(st.integers(0, field.modulus - 1), max_size=9)
    return elements.map(lambda values: np.array(values, dtype=np.uint32))


@st.composite
def sealed_shares(draw: st.DrawFn) -> m.SealedShare:
    length = draw(st.integers(0, 40))
    size = sealed_length(length)
    mac, root = draw(st.sampled_from([(0, 0), (16, 0), (16, 32)]))
    return m.SealedShare(
        draw(uint32),
        draw(uint32),
        draw(st.sampled_from(ShareKind)),
        length,
        draw(st.binary(min_size=SALT_LENGTH, max_size=SALT_LENGTH)),
        draw(st.binary(min_size=size, max_size=size)),
        draw(uint64),
        draw(st.binary(min_size=mac, max_size=mac)),
        draw(st.binary(min_size=root, max_size=root)),
    )


def strategies(field: PrimeField) -> dict[type, st.SearchStrategy[Any]]:
    return {
        m.Opening: st.builds(m.Opening, short),
        m.Advertise: st.builds(m.Advertise, keys, short),
        m.Roster: st.builds(
            m.Roster,
            st.lists(st.builds(m.Member, whole, keys, short), max_size=3).map(tuple),
            ids,
        ),
        m.ShareBundle: st.builds(
            m.ShareBundle, st.lists(sealed_shares(), min_size=1, max_size=3).map(tuple)
        ),
        m.SharesClosed: st.builds(m.SharesClosed, ids),
        m.UnmaskingShares: st.builds(m.UnmaskingShares, short, short),
        m.AbortRound: st.builds(m.AbortRound, st.text(max_size=20)),
        m.MaskedUpload: st.builds(m.MaskedUpload, tags, vectors(field)),
        m.SumRequest: st.builds(m.SumRequest, whole, st.lists(tags, max_size=3).map(tuple)),
        m.Consent: st.builds(m.Consent, whole, short),
        m.Certificate: st.builds(m.Certificate, whole, pairs),
        m.Refusal: st.builds(m.Refusal, whole, ids),
        m.AggregatedShare: st.builds(m.AggregatedShare, vectors(field), uint64),
        m.UploadDropped: st.builds(m.UploadDropped, whole),
        m.Reports: st.builds(
            m.Reports, st.lists(st.builds(m.Report, whole, whole, short), max_size=3).map(tuple)
        ),
        m.ReportsWanted: st.builds(
            m.ReportsWanted, st.lists(st.tuples(whole, whole), max_size=3).map(tuple)
        ),
    }


def any_message(field: PrimeField = DEFAULT_FIELD) -> st.SearchStrategy[Any]:
    return st.one_of(*strategies(field).values())


EXAMPLES: dict[type, Message] = {
    m.Opening: m.Opening(b"settings"),
    m.Advertise: m.Advertise((b"k" * 32,), b"s" * 64),
    m.Roster: m.Roster((m.Member(1, (b"k" * 32,), b"s" * 64), m.Member(300, (), b"")), (1, 0)),
    m.ShareBundle: m.ShareBundle(
        (m.SealedShare(1, 2, ShareKind.SEED, 4, b"s" * 16, b"x" * 20, 3),)
    ),
    m.SharesClosed: m.SharesClosed((1, 2, 300)),
    m.Certificate: m.Certificate(0, ((1, b"s" * 64), (2, b"t" * 64))),
    m.UnmaskingShares: m.UnmaskingShares(b"of seeds", b"of keys"),
    m.AbortRound: m.AbortRound("zu spät"),
    m.MaskedUpload: m.MaskedUpload(
        m.Tag(1, 2, b"h" * 32, 3, b"m" * 32, b"d" * 32, b"s" * 64), np.arange(3, dtype=np.uint32)
    ),
    m.SumRequest: m.SumRequest(5, (m.Tag(1, 2, b"h", 3, b"m", b"d", b"s"), m.Tag(70000))),
    m.Consent: m.Consent(5, b"s" * 64),
    m.Refusal: m.Refusal(5, (1, 2)),
    m.AggregatedShare: m.AggregatedShare(np.arange(3, dtype=np.uint32), 5),
    m.UploadDropped: m.UploadDropped(7),
    m.Reports: m.Reports((m.Report(1, 2, b"four words here!"), m.Report(1, 3, b""))),
    m.ReportsWanted: m.ReportsWanted(((1, 2), (1, 70000))),
}
each_type = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)


def test_every_message_has_a_tag_an_example_and_a_strategy() -> None:
    kinds = set(get_args(Message))
    assert set(TAGS) == kinds
    assert set(EXAMPLES) == kinds
    assert set(strategies(DEFAULT_FIELD)) == kinds
    assert len(set(TAGS.values())) == len(kinds)


def test_tags_are_wire_format() -> None:
    numbered = {tag: kind.__name__ for kind, tag in TAGS.items()}
    assert 6 not in numbered, "what version 3 uploaded in rounds"
    assert [numbered[tag] for tag in (1, 2, 3, 4, 5, 14, 7, 8, 9, 10, 11, 12, 13)] == [
        "Opening",
        "Advertise",
        "Roster",
        "ShareBundle",
        "SharesClosed",
        "MaskedUpload",
        "SumRequest",
        "Consent",
        "Certificate",
        "Refusal",
        "AggregatedShare",
        "UnmaskingShares",
        "AbortRound",
    ]


# -- round trips ----------------------------------------------------------------


@each_type
@given(data=st.data(), field=st.sampled_from(FIELDS))
def test_messages_survive_the_wire(kind: type, data: st.DataObject, field: PrimeField) -> None:
    message = data.draw(strategies(field)[kind])
    codec = Codec(field)
    encoded = codec.encode(message)
    assert encoded[:2] == bytes([VERSION, TAGS[kind]])
    assert codec.encode(message, b"an envelope's head") == b"an envelope's head" + encoded
    for buffer in (encoded, bytearray(encoded), memoryview(encoded)):
        decoded = codec.decode(buffer)
        assert type(decoded) is kind
        assert decoded == message
        assert codec.encode(decoded) == encoded


@given(any_message(), any_message())
def test_different_messages_have_different_encodings(one: Message, other: Message) -> None:
    assert (one == other) == (CODEC.encode(one) == CODEC.encode(other))


def test_elements_are_used_where_they_lie() -> None:
    encoded = CODEC.encode(EXAMPLES[m.AggregatedShare])
    decoded = CODEC.decode(encoded)
    assert isinstance(decoded, m.AggregatedShare)
    assert np.shares_memory(decoded.vector, np.frombuffer(encoded, np.uint8))
    assert not decoded.vector.flags.writeable


# -- S12: strictness ----------------------------------------------------------------


@each_type
def test_S12_a_message_cut_at_any_byte_is_refused(kind: type) -> None:
    encoded = CODEC.encode(EXAMPLES[kind])
    for length in range(len(encoded)):
        with pytest.raises(DecodeError):
            CODEC.decode(encoded[:length])


@each_type
def test_S12_bytes_left_over_are_refused(kind: type) -> None:
    encoded = CODEC.encode(EXAMPLES[kind])
    again = encoded[:-1] if kind is m.ShareBundle else encoded  # two bundles in a row are one
    for rest in (b"\0", b"\xc0", again, b"\0" * 4096):
        with pytest.raises(DecodeError):
            CODEC.decode(encoded + rest)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, 255])
def test_S12_other_versions_are_refused(version: int) -> None:
    encoded = CODEC.encode(EXAMPLES[m.Refusal])
    with pytest.raises(DecodeError, match=f"wire version {version} is not supported"):
        CODEC.decode(bytes([version]) + encoded[1:])


def test_R37_the_messages_of_the_version_before_are_refused_and_it_refuses_ours() -> None:
    """Both sides name the two versions, and what to do."""
    before = bytes.fromhex("0307") + b"\x92\x00\x92\x01\x02"  # its request for (1, 2)
    with pytest.raises(DecodeError, match="version 3 is not supported; this is 4: use the same"):
        CODEC.decode(before)
    ours = CODEC.encode(m.SumRequest(0, (1, 2)))
    assert ours[0] == 4, "which version 3 refuses by its first byte, as we refuse its"


def test_S12_ids_have_64_bits() -> None:
    share = m.SealedShare(2**64 - 2, 2**63, ShareKind.SEED, 4, b"s" * 16, b"x" * 20, 3)
    bundle = CODEC.decode(CODEC.encode(m.ShareBundle((share,))))
    assert isinstance(bundle, m.ShareBundle)
    assert (bundle.shares[0].owner, bundle.shares[0].recipient) == (2**64 - 2, 2**63)
    request = m.SumRequest(0, (m.Tag(1), m.Tag(2**64 - 2)))
    assert CODEC.decode(CODEC.encode(request)) == request


def test_S12_unknown_tags_are_refused() -> None:
    for tag in set(range(256)) - set(TAGS.values()):
        with pytest.raises(DecodeError, match=f"unknown message tag {tag}"):
            CODEC.decode(bytes([VERSION, tag]) + b"\x90")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"q={field.modulus}")
@pytest.mark.parametrize("kind", [m.MaskedUpload, m.AggregatedShare])
def test_S12_elements_that_are_not_below_q_are_refused(kind: type, field: PrimeField) -> None:
    codec = Codec(field)
    tag = msgspec.msgpack.encode(m.Tag(7))
    trailer = {m.MaskedUpload: tag, m.AggregatedShare: bytes(8)}[kind]

    def encoded(element: int) -> bytes:
        header = struct.pack("<BBHI", VERSION, TAGS[kind], len(trailer), 3)
        return header + struct.pack("<III", 0, element, 1) + trailer

    codec.decode(encoded(field.modulus - 1))
    for element in (field.modulus, field.modulus + 1, 2**32 - 1):
        with pytest.raises(DecodeError, match="element 1 is not below the modulus"):
            codec.decode(encoded(element))


def prefixed(kind: type, body: bytes) -> bytes:
    return bytes([VERSION, TAGS[kind]]) + body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (m.SumRequest, b"\x92\x00\x91\xcc\x01"),  # 1 as uint8
        (m.SumRequest, b"\x92\x00\x91\xcd\x00\x01"),  # 1 as uint16
        (m.SumRequest, b"\x92\x00\x91\xd0\x01"),  # 1 as int8
        (m.SumRequest, b"\x92\x00\xdc\x00\x01\x01"),  # array16 of one
        (m.SumRequest, b"\xdc\x00\x02\x00\x91\x01"),  # the message itself as array16
        (m.Opening, b"\x91\xc5\x00\x01x"),  # bin16 of one byte
        (m.Opening, b"\x91\xa1x"),  # text for bytes
        (m.AbortRound, b"\x91\xd9\x01x"),  # str8 of one character
        (m.AbortRound, b"\x91\xc4\x01x"),  # bytes for text
        (m.AbortRound, b"\x91\xa2\xff\xfe"),  # text that is no text
        (m.SumRequest, b"\x92\x00\x91\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"),  # 1.0 for 1
        (m.SumRequest, b"\x92\x00\x91\xc3"),  # true for 1
        (m.SumRequest, b"\x92\x00\xc0"),  # nil
        (m.SharesClosed, b"\x90"),  # a field is missing
        (m.SharesClosed, b"\x92\x91\x01\x01"),  # a field too many
        (m.SharesClosed, b"\x81\xa6owners\x91\x01"),  # a map
        (m.Roster, b"\x91\x90"),  # the graph is left out
        (m.Opening, b"\x91\xd4\x01x"),  # an extension type
        (m.SumRequest, b"\x92\x00\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    ],
)
def test_S12_control_messages_have_one_form(kind: type, body: bytes) -> None:
    with pytest.raises(DecodeError, match=f"malformed {kind.__name__}"):
        CODEC.decode(prefixed(kind, body))


def test_S12_reserved_and_derived_fields_are_checked() -> None:
    with pytest.raises(DecodeError, match="trailer of 1 bytes"):
        CODEC.decode(prefixed(m.AggregatedShare, struct.pack("<HI", 1, 0) + b"x"))
    with pytest.raises(DecodeError, match="trailer of 7 bytes"):
        CODEC.decode(prefixed(m.AggregatedShare, struct.pack("<HI", 7, 0) + bytes(7)))
    for kind in (0, 4, 255):
        header = struct.pack("<QQQBBI", 1, 2, 0, kind, 0, 4) + bytes(16)
        with pytest.raises(DecodeError, match=f"unknown kind of share {kind}"):
            CODEC.decode(prefixed(m.ShareBundle, header + bytes(20)))
    for binding in (3, 255):
        header = struct.pack("<QQQBBI", 1, 2, 0, 1, binding, 4) + bytes(16)
        with pytest.raises(DecodeError, match=f"unknown binding of a share {binding}"):
            CODEC.decode(prefixed(m.ShareBundle, header + bytes(68)))
    for binding, more in ((0, 0), (1, 16), (2, 48)):
        right = struct.pack("<QQQBBI", 1, 2, 0, 1, binding, 4) + bytes(16 + more + 20)
        CODEC.decode(prefixed(m.ShareBundle, right))
        for length in (5, 2**32 - 1):
            header = struct.pack("<QQQBBI", 1, 2, 0, 1, binding, length)
            with pytest.raises(DecodeError, match="a sealed share of"):
                CODEC.decode(prefixed(m.ShareBundle, header + bytes(16 + more + 20)))


def test_S12_nothing_but_shares_is_in_a_bundle() -> None:
    one = CODEC.encode(EXAMPLES[m.ShareBundle])
    both = CODEC.decode(one + one)
    assert isinstance(both, m.ShareBundle)
    assert both.shares == 2 * EXAMPLES[m.ShareBundle].shares
    assert CODEC.encode(both) == one + one
    for other in (b"\x01\x04", b"\x02\x05"):
        with pytest.raises(DecodeError, match="something else follows a share"):
            CODEC.decode(one + other + one[2:])
    with pytest.raises(DecodeError, match="the header takes"):
        CODEC.decode(one[:2])


def test_shares_of_a_bundle_are_used_where_they_lie() -> None:
    data = CODEC.encode(EXAMPLES[m.ShareBundle])
    bundle = CODEC.decode(data)
    assert isinstance(bundle, m.ShareBundle)
    (share,) = bundle.shares
    assert isinstance(share.sealed, memoryview)
    assert share.sealed.obj is data


@pytest.mark.parametrize(
    "data",
    [
        prefixed(m.Opening, b"\x91\xc6\xff\xff\xff\xff"),
        prefixed(m.SumRequest, b"\x92\x00\xdd\xff\xff\xff\xff"),
        prefixed(m.SumRequest, b"\xdd\xff\xff\xff\xff"),
        prefixed(m.Roster, b"\x92\xdd\xff\xff\xff\xff"),
        prefixed(m.Certificate, b"\x92\x00\xdd\xff\xff\xff\xff"),
        prefixed(m.AbortRound, b"\x91\xdb\xff\xff\xff\xff"),
        prefixed(m.AggregatedShare, struct.pack("<HI", 0, 2**32 - 1)),
        prefixed(m.MaskedUpload, struct.pack("<HI", 2**16 - 1, 2**32 - 1)),
        prefixed(m.ShareBundle, struct.pack("<QQQBBI", 1, 2, 0, 2, 0, 2**32 - 1)),
    ],
)
def test_S25_a_header_that_claims_gigabytes_costs_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            CODEC.decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_S28_deep_nesting_is_refused() -> None:
    for kind in TAGS:
        with pytest.raises(DecodeError):
            CODEC.decode(prefixed(kind, b"\x91" * 100_000))


# -- S28: fuzz ----------------------------------------------------------------


def decode_or_refuse(data: bytes) -> None:
    """Either the bytes are a message's one encoding, or `DecodeError`; never anything else."""
    try:
        message = CODEC.decode(data)
    except DecodeError:
        return
    assert CODEC.encode(message) == data


@given(st.binary(max_size=200))
def test_S28_random_bytes_decode_or_are_refused(data: bytes) -> None:
    decode_or_refuse(data)


@given(st.sampled_from(sorted(TAGS.values())), st.binary(max_size=200))
def test_S28_random_bodies_decode_or_are_refused(tag: int, body: bytes) -> None:
    decode_or_refuse(bytes([VERSION, tag]) + body)


@each_type
def test_S28_every_flipped_bit_decodes_or_is_refused(kind: type) -> None:
    encoded = CODEC.encode(EXAMPLES[kind])
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        decode_or_refuse(bytes(flipped))


@given(any_message(), st.data())
def test_S28_mutated_messages_decode_or_are_refused(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(CODEC.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(encoded) - 1))
        match data.draw(st.sampled_from(["set", "insert", "delete", "repeat"])):
            case "set":
                encoded[position] = data.draw(st.integers(0, 255))
            case "insert":
                encoded[position:position] = data.draw(st.binary(max_size=5))
            case "delete" if len(encoded) > 1:
                del encoded[position]
            case _:
                encoded += encoded[position:]
    decode_or_refuse(bytes(encoded))


@given(
    st.sampled_from([kind for kind in TAGS if issubclass(kind, m.Control)]),
    st.recursive(
        st.none() | st.booleans() | whole | st.floats() | short | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=12,
    ),
)
def test_S28_any_msgpack_decodes_or_is_refused(kind: type, value: object) -> None:
    decode_or_refuse(prefixed(kind, msgspec.msgpack.encode(value)))


def test_S12_an_upload_of_words_may_hold_any_word_and_no_other_length() -> None:
    codec = Codec(WORDS)
    largest = np.full(3, 2**32 - 1, dtype=np.uint32)
    data = codec.encode(m.MaskedUpload(m.Tag(7), largest))
    decoded = codec.decode(data)
    assert isinstance(decoded, m.MaskedUpload)
    assert decoded.vector.tolist() == [2**32 - 1] * 3
    with pytest.raises(DecodeError, match="not below the modulus"):
        Codec(PAPER_FIELD).decode(data)
    for wrong in (data[:-1], data + b"\0", data[:-4]):
        with pytest.raises(DecodeError):
            codec.decode(wrong)
