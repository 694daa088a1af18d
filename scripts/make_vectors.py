#!/usr/bin/env python3
"""Write tests/vectors/*.json: what another implementation must compute, and must refuse.

A vector has a name, an operation, its inputs, and a result; a negative one has an error instead,
the kind of refusal by the name of our exception. Bytes are hex, vectors over F_q are lists.
Everything follows from the constants here: running this again changes nothing, unless the
wire format or the cryptography has changed, which must never happen by accident.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey, check_public_key
from lightsecagg.crypto.identity import IdentityKey, verify
from lightsecagg.crypto.sealing import (
    ShareHeader,
    ShareKeys,
    ShareKind,
    open_sealed,
    seal,
    share_salt,
)
from lightsecagg.crypto.transcript import context_hash
from lightsecagg.errors import LightSecAggError, ParameterError
from lightsecagg.field import ntt
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.words import WORDS
from lightsecagg.masks import short_keys
from lightsecagg.masks.checked_sharing import BLINDS, report_on_share
from lightsecagg.masks.mask_encoding import MaskId, expand_share
from lightsecagg.params import (
    DEFAULT_MODULUS,
    PAPER_MODULUS,
    Decoding,
    Parameters,
    ShareMode,
    ThreatModel,
)
from lightsecagg.protocol import messages as m
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import sum_statement
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.roster import check_keys, fix_round, sign_keys
from lightsecagg.protocol.settings import Settings, _Fields
from lightsecagg.protocol.share_exchange import mask_header, root_of
from lightsecagg.protocol.wire import TAGS, VERSION, Codec

FOLDER = Path(__file__).parents[1] / "tests" / "vectors"
MODULI = (DEFAULT_MODULUS, PAPER_MODULUS)

Vector = dict[str, Any]


def fixed(name: str, count: int = 32) -> bytes:
    """Bytes that stand for a secret or a hash."""
    return hashlib.shake_256(b"lightsecagg vectors: " + name.encode()).digest(count)


# -- operations: JSON in, JSON out ---------------------------------------------------------------


def _wire_decode(modulus: int, message: str) -> Any:
    decoded = Codec(PrimeField(modulus)).decode(bytes.fromhex(message))
    return {"type": type(decoded).__name__, **_fields(decoded)}


def _fields(message: object) -> dict[str, Any]:
    names = getattr(message, "__struct_fields__", None) or message.__slots__  # type: ignore[attr-defined]
    return {name: _jsonable(getattr(message, name)) for name in names}


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return value.hex()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, ShareKind):
        return value.name
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    if isinstance(value, msgspec.Struct | m.SealedShare):
        return _fields(value)
    return value


def _prg_expand(seed: str, length: int, modulus: int) -> list[int]:
    return _ints(prg.expand(bytes.fromhex(seed), length, modulus))


def _share_expand(
    seed: str, context: str, owner: int, serial: int, recipient: int, length: int, modulus: int
) -> list[int]:
    mask_id = MaskId(bytes.fromhex(context), owner, serial)
    return _ints(expand_share(bytes.fromhex(seed), mask_id, recipient, length, modulus))


def _points(modulus: int, count: int) -> list[int]:
    return _ints(ntt.points(PrimeField(modulus), count))


def _mask_header(context: str, owner: int, serial: int, salt: str, root: str) -> str:
    parts = map(bytes.fromhex, (context, salt, root))
    context_, salt_, root_ = parts
    return mask_header(context_, owner, serial, salt_, root_).hex()


def _root(bundle: str) -> str:
    shares = Codec(PrimeField(DEFAULT_MODULUS)).decode(bytes.fromhex(bundle))
    if not isinstance(shares, m.ShareBundle):
        raise TypeError("the vector holds no shares")
    return root_of(shares.shares).hex()


def _report(header: str, share: list[int], modulus: int) -> list[int]:
    field = PrimeField(modulus)
    elements = field.check(np.array(share, dtype=np.uint32))
    if len(share) <= BLINDS:
        raise ParameterError(f"a share has more than {BLINDS} elements")
    return _ints(report_on_share(field, elements, bytes.fromhex(header)))


def _salt(key: str, shares: list[tuple[int, str, str]]) -> str:
    line = [(recipient, ShareKind[kind], bytes.fromhex(text)) for recipient, kind, text in shares]
    return share_salt(bytes.fromhex(key), line).hex()


def _ints(elements: Any) -> list[int]:
    return [int(element) for element in elements]


def _context_hash(label: str, parts: list[str]) -> str:
    return context_hash(label, *map(bytes.fromhex, parts)).hex()


def _settings_context(settings: str) -> str:
    return Settings.from_bytes(bytes.fromhex(settings)).context.hex()


def _allow_list_digest(identities: list[tuple[int, str]]) -> str:
    return _allow_list(identities).digest.hex()


def _allow_list(identities: list[tuple[int, str]]) -> AllowList:
    return AllowList({client: bytes.fromhex(key) for client, key in identities})


def _roster_context(settings: str, identities: list[tuple[int, str]], roster: str) -> str:
    decoded = Codec(PrimeField(DEFAULT_MODULUS)).decode(bytes.fromhex(roster))
    if not isinstance(decoded, m.Roster):
        raise TypeError("the vector holds no roster")
    proposal = Settings.from_bytes(bytes.fromhex(settings))
    return fix_round(proposal, _allow_list(identities), decoded).context.hex()


def _agreement_key(private: str, peer: str, context: str, sender: int, recipient: int) -> str:
    secret = AgreementKey(bytes.fromhex(private)).agree(bytes.fromhex(peer), recipient)
    return secret.directed_key(bytes.fromhex(context), "vectors", sender, recipient).hex()


def _agreement_check(public: str) -> str:
    return check_public_key(bytes.fromhex(public), 1).hex()


def _header(header: dict[str, Any]) -> ShareHeader:
    return ShareHeader(
        bytes.fromhex(header["context"]),
        ShareKind[header["kind"]],
        header["sender"],
        header["recipient"],
        header["mask_id"],
        header["length"],
        bytes.fromhex(header["salt"]),
    )


def _seal(private: str, peer: str, header: dict[str, Any], plaintext: str) -> str:
    secret = AgreementKey(bytes.fromhex(private)).agree(bytes.fromhex(peer), header["recipient"])
    key = ShareKeys(secret, _header(header))
    return seal(key, _header(header), bytes.fromhex(plaintext)).hex()


def _open(private: str, peer: str, header: dict[str, Any], sealed: str) -> str:
    secret = AgreementKey(bytes.fromhex(private)).agree(bytes.fromhex(peer), header["sender"])
    key = ShareKeys(secret, _header(header))
    return open_sealed(key, _header(header), bytes.fromhex(sealed)).hex()


def _bind(private: str, peer: str, header: dict[str, Any], mask: str) -> str:
    secret = AgreementKey(bytes.fromhex(private)).agree(bytes.fromhex(peer), header["recipient"])
    return ShareKeys(secret, _header(header)).bind(bytes.fromhex(mask)).hex()


def _check_binding(private: str, peer: str, header: dict[str, Any], mask: str, mac: str) -> bool:
    secret = AgreementKey(bytes.fromhex(private)).agree(bytes.fromhex(peer), header["sender"])
    ShareKeys(secret, _header(header)).check_binding(bytes.fromhex(mask), bytes.fromhex(mac))
    return True


def _sign(private: str, label: str, fields: list[str]) -> str:
    return IdentityKey(bytes.fromhex(private)).sign(label, *map(bytes.fromhex, fields)).hex()


def _verify(public: str, label: str, fields: list[str], signature: str) -> bool:
    fields_ = map(bytes.fromhex, fields)
    verify("the signer", bytes.fromhex(public), bytes.fromhex(signature), label, *fields_)
    return True


def _verify_keys(
    settings: str,
    identities: list[tuple[int, str]],
    client: int,
    keys: list[str],
    signature: str,
) -> bool:
    proposal = Settings.from_bytes(bytes.fromhex(settings))
    keys_ = tuple(map(bytes.fromhex, keys))
    check_keys(proposal, _allow_list(identities), client, keys_, bytes.fromhex(signature), 1)
    return True


def _request(survivors: list[int]) -> m.SumRequest:
    """A round's, for these clients."""
    return m.SumRequest(0, tuple(map(m.Tag, survivors)))


def _verify_survivors(
    identities: list[tuple[int, str]],
    context: str,
    survivors: list[int],
    client: int,
    signature: str,
) -> bool:
    statement = sum_statement(bytes.fromhex(context), _request(survivors))
    statement.check(_allow_list(identities), client, bytes.fromhex(signature))
    return True


def _digest(elements: Any) -> dict[str, Any]:
    """A long vector: its first elements, and the SHA-256 of all as little-endian words."""
    data = np.ascontiguousarray(elements, dtype="<u4").tobytes()
    return {"first": _ints(elements[:4]), "sha256": hashlib.sha256(data).hexdigest()}


def _short_key_parameters(summands: int, max_weight: int, dimension: int) -> dict[str, int]:
    bound = short_keys.noise_bound(summands, max_weight, dimension)
    return {"noise": bound, "step": short_keys.exact_step(DEFAULT_MODULUS, bound)}


def _short_key_matrix(context: str, dimension: int) -> dict[str, Any]:
    matrix = short_keys.public_matrix(bytes.fromhex(context), dimension, DEFAULT_MODULUS)
    return _digest(matrix.reshape(-1))


def _short_key_noise(seed: str, dimension: int, step: int) -> list[int]:
    field = PrimeField(DEFAULT_MODULUS)
    mask = np.zeros(dimension, dtype=np.uint32)
    short_keys.add_noise(field, mask, bytes.fromhex(seed), dimension, step)
    return _ints(mask)


def _short_key_mask(
    context: str, key_seed: str, elements: int, noise_seed: str, dimension: int, step: int
) -> dict[str, Any]:
    field = PrimeField(DEFAULT_MODULUS)
    key = prg.expand(bytes.fromhex(key_seed), elements, DEFAULT_MODULUS)
    mask = short_keys.expand(field, bytes.fromhex(context), key, dimension)
    short_keys.add_noise(field, mask, bytes.fromhex(noise_seed), dimension, step)
    return _digest(mask)


def _short_key_strip(total: list[int], dimension: int, step: int, squares: int) -> list[int]:
    field = PrimeField(DEFAULT_MODULUS)
    return _ints(short_keys.strip(field, field.vector(total), dimension, step, squares))


def _pairwise_mask(
    self_seed: str, pairwise: list[tuple[int, str]], own: int, length: int
) -> dict[str, Any]:
    from lightsecagg_lab.schemes.pairwise_masks import client_mask

    seeds = {peer: bytes.fromhex(seed) for peer, seed in pairwise}
    return _digest(client_mask(bytes.fromhex(self_seed), seeds, own, length))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "pairwise.mask": _pairwise_mask,
    "short_keys.parameters": _short_key_parameters,
    "short_keys.matrix": _short_key_matrix,
    "short_keys.noise": _short_key_noise,
    "short_keys.mask": _short_key_mask,
    "short_keys.strip": _short_key_strip,
    "wire.decode": _wire_decode,
    "prg.expand": _prg_expand,
    "share.expand": _share_expand,
    "code.points": _points,
    "check.root": _root,
    "check.header": _mask_header,
    "check.report": _report,
    "context.hash": _context_hash,
    "context.settings": _settings_context,
    "context.allow_list": _allow_list_digest,
    "context.roster": _roster_context,
    "agreement.directed_key": _agreement_key,
    "agreement.check": _agreement_check,
    "sealing.seal": _seal,
    "sealing.open": _open,
    "sealing.salt": _salt,
    "sealing.bind": _bind,
    "sealing.check_binding": _check_binding,
    "identity.sign": _sign,
    "identity.verify": _verify,
    "advertise.verify": _verify_keys,
    "survivors.verify": _verify_survivors,
}


def run(operation: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """{"result": ...}, or {"error": name of the refusal}."""
    try:
        return {"result": OPERATIONS[operation](**inputs)}
    except LightSecAggError as error:
        return {"error": type(error).__name__}


def vector(name: str, operation: str, refused: bool = False, **inputs: Any) -> Vector:
    """A vector with what our implementation makes of it; it must be what the author expects."""
    outcome = run(operation, inputs)
    if refused != ("error" in outcome):
        raise AssertionError(f"{name}: {outcome}")
    return {"name": name, "operation": operation, "inputs": inputs, **outcome}


# -- wire ----------------------------------------------------------------------------------------


def sealed_shares() -> tuple[m.SealedShare, ...]:
    """Two shares of one mask, on their way to the server."""
    salt = fixed("salt", 16)
    return tuple(
        m.SealedShare(
            7,
            recipient,
            ShareKind.SEED,
            32,
            salt,
            fixed(f"sealed for {recipient}", 48),
            mac=fixed(f"mac for {recipient}", 16),
        )
        for recipient in (300, 70000)
    )


def examples() -> list[m.Message]:
    vector_ = np.array([0, 1, DEFAULT_MODULUS - 1, 12345], dtype=np.uint32)
    tag = m.Tag(7, 2, fixed("header"), 3, fixed("model"), fixed("digest"), fixed("signature", 64))
    member = m.Member(7, (fixed("key"),), fixed("signature", 64))
    return [
        m.Opening(b"settings"),
        m.Advertise((fixed("key"),), fixed("signature", 64)),
        m.Roster((member, m.Member(300, (fixed("other key"),), fixed("other signature", 64)))),
        m.ShareBundle(
            (
                m.SealedShare(7, 300, ShareKind.SEED, 32, fixed("salt", 16), fixed("sealed", 48)),
                m.SealedShare(7, 9, ShareKind.SEED, 32, fixed("salt 2", 16), fixed("more", 48)),
            )
        ),
        m.ShareBundle(sealed_shares()),
        m.ShareBundle(tuple(replace(s, root=root_of(sealed_shares())) for s in sealed_shares())),
        m.SharesClosed((7, 300, 70000)),
        m.MaskedUpload(m.Tag(7, 0, tag.header, 0, tag.model, tag.digest), vector_),
        m.SumRequest(0, (m.Tag(7), m.Tag(300))),
        m.Consent(0, fixed("signature", 64)),
        m.Certificate(0, ((7, fixed("signature", 64)), (300, fixed("other signature", 64)))),
        m.Refusal(0, (7,)),
        m.AggregatedShare(vector_),
        m.UnmaskingShares(fixed("seeds", 64), fixed("keys", 64)),
        m.AbortRound("only 3 clients advertised their keys, at least 4 are needed"),
        m.MaskedUpload(tag, vector_),
        m.SumRequest(9, (tag,)),
        m.Consent(9, fixed("signature", 64)),
        m.Certificate(9, ((7, fixed("signature", 64)),)),
        m.Refusal(9, (7,)),
        m.AggregatedShare(vector_, 9),
        m.UploadDropped(2),
        m.Reports((m.Report(7, 2, fixed("elements", 16)), m.Report(300, 0, b""))),
        m.ReportsWanted(((7, 2), (300, 0))),
    ]


def _binding(bundle: m.ShareBundle) -> int:
    return bool(bundle.shares[0].mac) + bool(bundle.shares[0].root)


def wire_vectors() -> Iterator[Vector]:
    codec = Codec(PrimeField(DEFAULT_MODULUS))

    def decode(name: str, data: bytes, refused: bool = True, q: int = DEFAULT_MODULUS) -> Vector:
        return vector(name, "wire.decode", refused, modulus=q, message=data.hex())

    def body(kind: type, content: bytes) -> bytes:
        return bytes([VERSION, TAGS[kind]]) + content

    for message in examples():
        name, data = type(message).__name__, codec.encode(message)
        signed = isinstance(message, m.MaskedUpload) and bool(message.tag.signature)
        name += " of a buffer" if signed or getattr(message, "time", 0) else ""
        if isinstance(message, m.ShareBundle):
            name += (", unchecked", ", bound", ", relayed")[_binding(message)]
        yield decode(name, data, refused=False)
        yield decode(f"{name}, last byte missing", data[:-1])
        yield decode(f"{name}, one byte too many", data + b"\0")
    data = codec.encode(examples()[4])
    for version in (0, 1, 2, 3, 255):
        yield decode(f"version {version}", bytes([version]) + data[1:])
    for tag in (0, 127, 255):
        yield decode(f"unknown tag {tag}", bytes([VERSION, tag]) + data[2:])
    yield decode("nothing", b"")
    yield decode("a version and no tag", bytes([VERSION]))
    for name, content in {
        "1 as uint8": "91cc01",
        "1 as uint16": "91cd0001",
        "1 as int8": "91d001",
        "1 as a float": "91cb3ff0000000000000",
        "true for 1": "91c3",
        "nil for a list": "c0",
        "a list as array16": "dc000101",
        "an extension": "91d40100",
        "a length of 4 GiB": "ddffffffff",
    }.items():
        yield decode(f"SharesClosed, {name}", body(m.SharesClosed, bytes.fromhex("91" + content)))
    for name, content in {
        "ids": "920092010a",
        "the message as array16": "dc00020090",
        "a field is missing": "9100",
        "a field too many": "93009000",
        "a map": "82a474696d6500a47461677390",
        "no time": "9190",
        "a tag of six fields": "92059196010203c400c400c400",
        "a tag of eight fields": "920591980700c40000c400c400c40000",
        "a tag of an owner alone": "92009107",
    }.items():
        yield decode(f"SumRequest, {name}", body(m.SumRequest, bytes.fromhex(content)))
    yield decode("SharesClosed, a secret", body(m.SharesClosed, bytes.fromhex("929101c400")))
    yield decode("Roster, commitments", body(m.Roster, bytes.fromhex("93909091c400")))
    for name, content in {
        "elements as integers": "91930702940102" + "0304",
        "no values": "91920702",
        "text for bytes": "91930702a178",
    }.items():
        yield decode(f"Reports, {name}", body(m.Reports, bytes.fromhex("91" + content)))
    for length in range(4):
        content = struct.pack("<HI", length, 1) + bytes(4) + bytes(length)
        yield decode(f"MaskedUpload, a trailer of {length} bytes", body(m.MaskedUpload, content))
    yield decode("Opening, bytes as bin16", body(m.Opening, bytes.fromhex("91c5000178")))
    yield decode("Opening, text for bytes", body(m.Opening, bytes.fromhex("91a178")))
    yield decode("AbortRound, bytes for text", body(m.AbortRound, bytes.fromhex("91c40178")))
    yield decode("AbortRound, no UTF-8", body(m.AbortRound, bytes.fromhex("91a2fffe")))
    for q in MODULI:
        short = msgspec.msgpack.encode(m.Tag(7))
        for kind, trailer in ((m.MaskedUpload, short), (m.AggregatedShare, bytes(8))):
            header = struct.pack("<HI", len(trailer), 1)
            for element in (q - 1, q, 2**32 - 1):
                content = header + struct.pack("<I", element) + trailer
                name = f"{kind.__name__}, element {element} of F_{q}"
                yield decode(name, body(kind, content), refused=element >= q, q=q)
    yield decode(
        "AggregatedShare, a trailer", body(m.AggregatedShare, struct.pack("<HI", 1, 0) + b"x")
    )
    claim = struct.pack("<HI", 8, 2**32 - 1)
    yield decode("AggregatedShare, claims 16 GiB", body(m.AggregatedShare, claim))
    for kind_value, length in ((0, 32), (4, 32), (1, 31), (1, 33), (2, 2**32 - 1)):
        header = struct.pack("<QQQBBI", 7, 300, 0, kind_value, 0, length) + fixed("salt", 16)
        name = f"ShareBundle, kind {kind_value}, length {length}"
        yield decode(name, body(m.ShareBundle, header + fixed("sealed", 48)))
    for binding, size in ((3, 48), (255, 48), (1, 48), (2, 48), (1, 48 + 48), (2, 48 + 16)):
        header = struct.pack("<QQQBBI", 7, 300, 0, 1, binding, 32) + fixed("salt", 16)
        name = f"ShareBundle, binding {binding}, {size} bytes behind the salt"
        yield decode(name, body(m.ShareBundle, header + fixed("sealed", size)))


# -- expansion -----------------------------------------------------------------------------------


def expansion_vectors() -> Iterator[Vector]:
    seed = fixed("seed").hex()
    for q in (*MODULI, 5, 65537):
        yield vector(f"16 elements of F_{q}", "prg.expand", seed=seed, length=16, modulus=q)
    yield vector("no element", "prg.expand", seed=seed, length=0, modulus=5)
    for length in (0, 16, 31, 33, 64):
        bad = fixed("seed", length).hex()
        name = f"a seed of {length} bytes"
        yield vector(name, "prg.expand", True, seed=bad, length=1, modulus=5)
    for q in (0, 1, 2**32):
        yield vector(f"modulus {q}", "prg.expand", True, seed=seed, length=1, modulus=q)
    yield vector("a negative length", "prg.expand", True, seed=seed, length=-1, modulus=5)
    share = {
        "seed": seed,
        "context": fixed("C1").hex(),
        "owner": 7,
        "serial": 0,
        "recipient": 300,
        "length": 4,
        "modulus": DEFAULT_MODULUS,
    }
    yield vector("a seeded share", "share.expand", **share)
    for name, change in {
        "another context": {"context": fixed("another C1").hex()},
        "another owner": {"owner": 8},
        "another serial": {"serial": 1},
        "another recipient": {"recipient": 301},
        "owner and recipient exchanged": {"owner": 300, "recipient": 7},
        "the paper's field": {"modulus": PAPER_MODULUS},
    }.items():
        yield vector(f"a seeded share, {name}", "share.expand", **(share | change))
    yield vector(
        "a seeded share, short seed", "share.expand", True, **(share | {"seed": seed[:-2]})
    )
    for q in MODULI:
        yield vector(f"20 points of F_{q}", "code.points", modulus=q, count=20)
    yield vector("more points than F_5 has", "code.points", True, modulus=5, count=5)
    yield vector("no points", "code.points", True, modulus=5, count=0)
    yield vector("points of no field", "code.points", True, modulus=9, count=2)
    yield from check_vectors()


def check_vectors() -> Iterator[Vector]:
    context = fixed("C1").hex()
    codec = Codec(PrimeField(DEFAULT_MODULUS))

    def bundle(shares: Iterable[m.SealedShare]) -> str:
        return codec.encode(m.ShareBundle(tuple(shares))).hex()

    first, second = sealed_shares()
    for name, shares in {
        "a root": (first, second),
        "a root of one share": (first,),
        "a root, another sealed share": (replace(first, sealed=fixed("other", 48)), second),
        "a root, another recipient": (replace(first, recipient=301), second),
    }.items():
        yield vector(name, "check.root", bundle=bundle(shares))
    header = {
        "context": context,
        "owner": 7,
        "serial": 2,
        "salt": fixed("salt", 16).hex(),
        "root": root_of(sealed_shares()).hex(),
    }
    yield vector("a header", "check.header", **header)
    for name, change in {
        "another round": {"context": fixed("another C1").hex()},
        "another owner": {"owner": 8},
        "another serial": {"serial": 3},
        "another salt": {"salt": fixed("another salt", 16).hex()},
        "another root": {"root": fixed("another root").hex()},
    }.items():
        yield vector(f"a header, {name}", "check.header", **(header | change))
    for name, change in {
        "a negative owner": {"owner": -1},
        "a negative serial": {"serial": -1},
        "a serial of 2^64": {"serial": 2**64},
    }.items():
        yield vector(f"a header, {name}", "check.header", True, **(header | change))
    report = {
        "header": fixed("header").hex(),
        "share": [3, 1, 4, 1, 5, 9, 2],
        "modulus": DEFAULT_MODULUS,
    }
    yield vector("a report", "check.report", **report)
    for name, change in {
        "another header": {"header": fixed("another header").hex()},
        "another share": {"share": [3, 1, 5, 1, 5, 9, 2]},
        "another blind": {"share": [3, 1, 4, 1, 5, 9, 3]},
        "the paper's field": {"modulus": PAPER_MODULUS},
    }.items():
        yield vector(f"a report, {name}", "check.report", **(report | change))
    for place in range(7):
        beyond = [*report["share"]]
        beyond[place] = DEFAULT_MODULUS
        name = f"a report, element {place} beyond q"
        yield vector(name, "check.report", True, **(report | {"share": beyond}))
    for length in (0, 1, 4):
        name = f"a report on {length} elements"
        share = report["share"][:length]
        yield vector(name, "check.report", True, **(report | {"share": share}))


# -- contexts ------------------------------------------------------------------------------------

IDENTITIES = {client: IdentityKey(fixed(f"identity {client}")) for client in (7, 300, 70000, 8)}
ALLOWED = [(client, key.public.hex()) for client, key in IDENTITIES.items()]


def settings() -> Settings:
    parameters = Parameters(4, 1, 0, 3, ThreatModel.MALICIOUS_SERVER)
    quantizer = Quantizer(PrimeField(DEFAULT_MODULUS), 1.0, 4, 100, weighted=True, scale=1000.0)
    return Settings(
        "lightsecagg",
        parameters,
        quantizer,
        dimension=10,
        session=fixed("session"),
        round=3,
        allow_list=_allow_list(ALLOWED).digest,
        model=fixed("model"),
    )


def roster() -> m.Roster:
    context = settings().context
    members = []
    for client, identity in IDENTITIES.items():
        keys = (AgreementKey(fixed(f"ephemeral {client}")).public,)
        members.append(m.Member(client, keys, sign_keys(identity, context, client, keys)))
    return m.Roster(tuple(members))


def context_vectors() -> Iterator[Vector]:
    yield vector("no parts", "context.hash", label="vectors", parts=[])
    yield vector("two parts", "context.hash", label="vectors", parts=["00", "0102"])
    yield vector("the same bytes cut elsewhere", "context.hash", label="vectors", parts=["000102"])
    yield vector("no label", "context.hash", True, label="", parts=[])
    yield vector("a label that is not ASCII", "context.hash", True, label="\u00e9", parts=[])
    yield vector("an allow-list", "context.allow_list", identities=ALLOWED)
    yield vector("an allow-list in another order", "context.allow_list", identities=ALLOWED[::-1])
    for name, entry in {
        "a shared key": (9, ALLOWED[0][1]),
        "an id of 2^64 - 1": (2**64 - 1, fixed("k").hex()),
        "a negative id": (-1, fixed("k").hex()),
        "a short key": (9, ALLOWED[0][1][:-2]),
        "a key of low order": (9, "01" + "00" * 31),
        "a key that is not canonical": (9, "ee" + "ff" * 30 + "7f"),
    }.items():
        name = f"an allow-list with {name}"
        yield vector(name, "context.allow_list", True, identities=[*ALLOWED, entry])
    yield from settings_vectors()
    codec = Codec(PrimeField(DEFAULT_MODULUS))
    members = roster().members
    for name, line in {
        "a roster": m.Roster(members),
        "a roster in another order": m.Roster(members[::-1]),
        "a smaller roster": m.Roster(members[:3]),
    }.items():
        encoded = codec.encode(line).hex()
        yield vector(
            name,
            "context.roster",
            settings=settings().to_bytes().hex(),
            identities=ALLOWED,
            roster=encoded,
        )


def settings_vectors() -> Iterator[Vector]:
    """C0, and settings that no client may accept (S01)."""
    proposal = settings()
    data = proposal.to_bytes()
    yield vector("settings", "context.settings", settings=data.hex())
    other = replace(proposal, round=4)
    yield vector("the next round", "context.settings", settings=other.to_bytes().hex())
    other = replace(proposal, model=fixed("another model"))
    yield vector("another model", "context.settings", settings=other.to_bytes().hex())
    fields = msgspec.msgpack.decode(data)
    order = _Fields.__struct_fields__
    for name, value in [
        ("protocol", "unknown"),
        ("threat_model", "trusting"),
        ("share_mode", "none"),
        ("point_rule", "integers"),
        ("session", b"short"),
        ("round", -1),
        ("allow_list", b""),
        ("model", b"\0" * 33),
        ("clients", 1),
        ("clients", 2**62),
        ("privacy", -1),
        ("privacy", 3),
        ("dropouts", 2),
        ("dropouts", 4),
        ("survivors", 0),
        ("survivors", 1),
        ("survivors", 5),
        ("modulus", 2**31 - 2**19 + 2),
        ("modulus", 2**32 + 15),
        ("modulus", 3),
        ("neighbours", 2),
        ("dimension", 0),
        ("dimension", 2**30),
        ("bound", 0.0),
        ("bound", float("inf")),
        ("bound", float("nan")),
        ("max_samples", 0),
        ("max_samples", 2**40),
        ("scale", 0.0),
        ("scale", 1e9),
        ("scale", float("nan")),
        ("threshold", 1),
    ]:
        changed = list(fields)
        changed[order.index(name)] = value
        shown = value.hex() if isinstance(value, bytes) else value
        encoded = msgspec.msgpack.encode(changed).hex()
        yield vector(f"settings with {name} = {shown}", "context.settings", True, settings=encoded)
    yield vector("settings, cut", "context.settings", True, settings=data[:-1].hex())
    yield vector("settings, one byte more", "context.settings", True, settings=data.hex() + "00")


# -- agreement, sealing, signatures --------------------------------------------------------------


def agreement_vectors() -> Iterator[Vector]:
    alice, bob = AgreementKey(fixed("alice")), AgreementKey(fixed("bob"))
    pair = {
        "private": fixed("alice").hex(),
        "peer": bob.public.hex(),
        "context": fixed("C1").hex(),
        "sender": 7,
        "recipient": 300,
    }
    yield vector("a directed key", "agreement.directed_key", **pair)
    mirrored = {"private": fixed("bob").hex(), "peer": alice.public.hex()}
    yield vector("the same key, on the other side", "agreement.directed_key", **(pair | mirrored))
    reverse = {"sender": 300, "recipient": 7}
    yield vector("the key of the other direction", "agreement.directed_key", **(pair | reverse))
    yield vector("a public key", "agreement.check", public=bob.public.hex())
    p = 2**255 - 19
    order8 = 325606250916557431795983626356110631294008115727848805560023387167927233504
    other8 = 39382357235489614581723060781553021112529911719440698176882885853963445705823
    for name, number in {
        "0": 0,
        "1": 1,
        "-1": p - 1,
        "order 8": order8,
        "another of order 8": other8,
        "p, a second 0": p,
        "p + 1, a second 1": p + 1,
        "a high-bit twin": int.from_bytes(bob.public, "little") | 1 << 255,
        "all ones": 2**256 - 1,
    }.items():
        raw = number.to_bytes(32, "little").hex()
        yield vector(f"public key: {name}", "agreement.check", True, public=raw)
        if number < 2:
            low = pair | {"peer": raw}
            yield vector(f"agreeing with {name}", "agreement.directed_key", True, **low)
    for raw in ("", bob.public.hex()[:-2], bob.public.hex() + "00"):
        name = f"public key of {len(raw) // 2} bytes"
        yield vector(name, "agreement.check", True, public=raw)
    own = pair | {"peer": alice.public.hex()}
    yield vector("agreeing with oneself", "agreement.directed_key", True, **own)


def sealing_vectors() -> Iterator[Vector]:
    alice, bob = AgreementKey(fixed("alice")), AgreementKey(fixed("bob"))
    header = {
        "context": fixed("C1").hex(),
        "kind": "SEED",
        "sender": 7,
        "recipient": 300,
        "mask_id": 0,
        "length": 32,
        "salt": fixed("salt", 16).hex(),
    }
    ours = {"private": fixed("alice").hex(), "peer": bob.public.hex()}
    theirs = {"private": fixed("bob").hex(), "peer": alice.public.hex()}
    plaintext = fixed("share").hex()
    made = vector("a share", "sealing.seal", **ours, header=header, plaintext=plaintext)
    sealed = made["result"]
    yield made
    empty = header | {"length": 0}
    yield vector("an empty share", "sealing.seal", **ours, header=empty, plaintext="")
    yield vector(
        "a share of another length",
        "sealing.seal",
        True,
        **ours,
        header=header,
        plaintext=plaintext[:-2],
    )
    yield vector("opened", "sealing.open", **theirs, header=header, sealed=sealed)
    for name, change in {
        "for another round": {"context": fixed("another C1").hex()},
        "as another kind": {"kind": "EXPLICIT"},
        "as a Shamir share": {"kind": "SHAMIR"},
        "from another sender": {"sender": 8},
        "by another recipient": {"recipient": 301},
        "reflected": {"sender": 300, "recipient": 7},
        "as another mask": {"mask_id": 1},
        "under another salt": {"salt": fixed("another salt", 16).hex()},
        "under no salt": {"salt": ""},
        "under a short salt": {"salt": fixed("salt", 15).hex()},
        "under a long salt": {"salt": fixed("salt", 17).hex()},
        "as a shorter share": {"length": 31},
        "as a longer share": {"length": 33},
    }.items():
        name = f"opened {name}"
        yield vector(name, "sealing.open", True, **theirs, header=header | change, sealed=sealed)
    raw = bytes.fromhex(sealed)
    for name, altered in {
        "first bit flipped": bytes([raw[0] ^ 1]) + raw[1:],
        "last bit flipped": raw[:-1] + bytes([raw[-1] ^ 128]),
        "cut": raw[:-1],
        "extended": raw + b"\0",
        "without its tag": raw[:32],
        "empty": b"",
    }.items():
        yield vector(
            f"opened {name}", "sealing.open", True, **theirs, header=header, sealed=altered.hex()
        )
    stranger = theirs | {"private": fixed("mallory").hex()}
    yield vector(
        "opened with another key", "sealing.open", True, **stranger, header=header, sealed=sealed
    )
    yield from binding_vectors(ours, theirs, header)


def binding_vectors(
    ours: dict[str, str], theirs: dict[str, str], header: dict[str, Any]
) -> Iterator[Vector]:
    """A share counts under one header of its mask; and all shares of a mask have one salt."""
    mask = fixed("header").hex()
    made = vector("a binding", "sealing.bind", **ours, header=header, mask=mask)
    mac = made["result"]
    yield made
    given = {**theirs, "header": header, "mask": mask, "mac": mac}
    yield vector("a binding is taken", "sealing.check_binding", **given)
    for name, change in {
        "to another header": {"mask": fixed("another header").hex()},
        "to no header": {"mask": ""},
        "without a mac": {"mac": ""},
        "with a short mac": {"mac": mac[:-2]},
        "with a long mac": {"mac": mac + "00"},
        "with a bit flipped": {"mac": f"{int(mac[:2], 16) ^ 1:02x}" + mac[2:]},
        "with another key": {"private": fixed("mallory").hex()},
        "of another round": {"header": header | {"context": fixed("another C1").hex()}},
        "of another sender": {"header": header | {"sender": 8}},
        "of another recipient": {"header": header | {"recipient": 301}},
        "reflected": {"header": header | {"sender": 300, "recipient": 7}},
        "of another mask": {"header": header | {"mask_id": 1}},
        "of another salt": {"header": header | {"salt": fixed("another salt", 16).hex()}},
    }.items():
        yield vector(f"a binding {name}", "sealing.check_binding", True, **(given | change))
    shares = [(300, "SEED", fixed("share").hex()), (70000, "EXPLICIT", fixed("long", 40).hex())]
    key = fixed("salt key").hex()
    yield vector("a salt", "sealing.salt", key=key, shares=shares)
    for name, other in {
        "another share": [shares[0], (70000, "EXPLICIT", fixed("other", 40).hex())],
        "another kind": [shares[0], (70000, "SEED", fixed("long", 40).hex())],
        "another recipient": [shares[0], (70001, "EXPLICIT", fixed("long", 40).hex())],
        "another order": shares[::-1],
    }.items():
        yield vector(f"a salt, {name}", "sealing.salt", key=key, shares=other)


def signature_vectors() -> Iterator[Vector]:
    key = IdentityKey(fixed("identity 7"))
    other = IdentityKey(fixed("identity 8"))
    fields = ["00", "0102"]
    made = vector(
        "a signature", "identity.sign", private=fixed("identity 7").hex(), label="vectors",
        fields=fields,
    )  # fmt: skip
    yield made
    signature = made["result"]
    good = {
        "public": key.public.hex(),
        "label": "vectors",
        "fields": fields,
        "signature": signature,
    }
    yield vector("verified", "identity.verify", **good)
    for name, change in {
        "another label": {"label": "other vectors"},
        "fields cut elsewhere": {"fields": ["0001", "02"]},
        "one field less": {"fields": ["00"]},
        "an empty field more": {"fields": [*fields, ""]},
        "another signer": {"public": other.public.hex()},
        "a flipped bit": {"signature": f"{int(signature[:2], 16) ^ 1:02x}" + signature[2:]},
        "a short signature": {"signature": signature[:-2]},
        "no signature": {"signature": ""},
        "a key of low order": {"public": "00" * 32},
        "a short key": {"public": key.public.hex()[:-2]},
    }.items():
        yield vector(f"verified with {name}", "identity.verify", True, **(good | change))
    yield from advertise_vectors()
    context, survivors = fixed("C1"), [7, 300, 70000]
    consent = {
        "identities": ALLOWED,
        "context": context.hex(),
        "survivors": survivors,
        "client": 7,
        "signature": sum_statement(context, _request(survivors)).sign(key).hex(),
    }
    yield vector("consent to a survivor set", "survivors.verify", **consent)
    for name, change in {
        "another round": {"context": fixed("another C1").hex()},
        "a smaller set": {"survivors": survivors[:2]},
        "a larger set": {"survivors": [*survivors, 8]},
        "another order": {"survivors": survivors[::-1]},
        "another signer": {"client": 300},
        "no signature": {"signature": ""},
    }.items():
        yield vector(f"consent, {name}", "survivors.verify", True, **(consent | change))


def advertise_vectors() -> Iterator[Vector]:
    member = roster().members[0]
    good = {
        "settings": settings().to_bytes().hex(),
        "identities": ALLOWED,
        "client": member.client,
        "keys": [key.hex() for key in member.keys],
        "signature": member.signature.hex(),
    }
    yield vector("advertised keys", "advertise.verify", **good)
    next_round = replace(settings(), round=4).to_bytes().hex()
    twin = member.keys[0][:-1] + bytes([member.keys[0][-1] | 128])
    for name, change in {
        "of another round": {"settings": next_round},
        "of another client": {"client": 8},
        "of a stranger": {"client": 9},
        "none": {"keys": []},
        "two": {"keys": [*good["keys"], *good["keys"]]},
        "others": {"keys": [fixed("k").hex()[:-2] + "00"]},
        "of low order": {"keys": ["00" * 32]},
        "a high-bit twin": {"keys": [twin.hex()]},
        "with a forged signature": {"signature": "00" * 64},
    }.items():
        yield vector(f"advertised keys, {name}", "advertise.verify", True, **(good | change))


# -- short keys ----------------------------------------------------------------------------------


def short_key_settings(decoding: Decoding) -> Settings:
    base = settings()
    parameters = replace(base.parameters, share_mode=ShareMode.SHORT_KEY)
    quantizer = make_quantizer(
        parameters, 5000, 1.0, max_samples=100, weighted=True, scale=1000.0, decoding=decoding
    )
    return replace(base, parameters=parameters, quantizer=quantizer, dimension=5000)


def short_key_vectors() -> Iterator[Vector]:
    q, context = DEFAULT_MODULUS, fixed("C1").hex()
    for summands, weight, dimension in ((200, 1, 1_206_590), (1, 1, 1), (10, 64, 7850)):
        yield vector(
            f"the noise of {summands} summands of weight {weight} in {dimension} entries",
            "short_keys.parameters",
            summands=summands,
            max_weight=weight,
            dimension=dimension,
        )
    for dimension in (1, 2048, 2049):
        yield vector(
            f"the matrix for d = {dimension}",
            "short_keys.matrix",
            context=context,
            dimension=dimension,
        )
    seed = fixed("noise").hex()
    for step in (1, 1_022_848, q - 1):
        yield vector(f"noise, t = {step}", "short_keys.noise", seed=seed, dimension=6, step=step)
    for step in (0, -1, q, q + 1):
        name = f"noise, t = {step}"
        yield vector(name, "short_keys.noise", True, seed=seed, dimension=6, step=step)
    for length in (0, 16, 31, 33):
        name = f"noise, a seed of {length} bytes"
        wrong = fixed("noise", length).hex()
        yield vector(name, "short_keys.noise", True, seed=wrong, dimension=6, step=1)
    mask = {
        "context": context,
        "key_seed": fixed("key").hex(),
        "elements": 2049,
        "noise_seed": seed,
        "dimension": 5000,
        "step": 1_022_848,
    }
    yield vector("a mask of 5000 entries and a count", "short_keys.mask", **mask)
    yield vector("the same, dithered", "short_keys.mask", **(mask | {"step": 1}))
    for name, change in {
        "t = 0": {"step": 0},
        "no entries": {"dimension": 0},
        "a key of 2047 elements": {"elements": 2047},
        "no key": {"elements": 0},
    }.items():
        yield vector(f"a mask with {name}", "short_keys.mask", True, **(mask | change))
    strip = {"total": [5 + 1000 * 3, q - 7 - 1000 * 2, 499, q - 499, 9], "step": 1000}
    yield vector("a stripped sum", "short_keys.strip", dimension=4, squares=1, **strip)
    total = _ints(prg.expand(fixed("no sum"), 1000, q))
    yield vector(
        "a sum under other keys",
        "short_keys.strip",
        True,
        total=total,
        dimension=1000,
        step=1_022_848,
        squares=4,
    )
    yield from short_key_settings_vectors()


def short_key_settings_vectors() -> Iterator[Vector]:
    """C0 of rounds with short keys, and what no client may accept (S49)."""
    for decoding in Decoding:
        data = short_key_settings(decoding).to_bytes().hex()
        yield vector(f"settings, {decoding}", "context.settings", settings=data)
    exact = short_key_settings(Decoding.EXACT)
    fields, t = msgspec.msgpack.decode(exact.to_bytes()), exact.quantizer.step
    order = _Fields.__struct_fields__
    table = {"weights": [2, 1], "scale": 2}
    loose = {"table": table, "max_updates": 4, "max_ratio": 64.0, "strict": False}
    for name, value in [
        *(("short_keys", [n, 256, t]) for n in (0, 1024, 2047, 4096)),
        *(("short_keys", [2048, coins, t]) for coins in (0, 128, 255, 257)),
        *(("short_keys", [2048, 256, s]) for s in (-1, 0, 2, t - 1, t + 1, DEFAULT_MODULUS)),
        ("short_keys", [2048, 256]),
        ("short_keys", [2048, 256, t, 0]),
        ("short_keys", None),
        ("share_mode", "seeded"),
        ("modulus", PAPER_MODULUS),
        ("dimension", 2**21),
        ("scale", 1e6),
        ("buffering", {**loose, "stock": 4, "share_lifetime": 64}),
    ]:
        changed = list(fields)
        changed[order.index(name)] = value
        encoded = msgspec.msgpack.encode(changed).hex()
        shown = f"settings of short keys with {name} = {value}"
        yield vector(shown, "context.settings", True, settings=encoded)


# -- pairwise masks ------------------------------------------------------------------------------


def pairwise_vectors() -> Iterator[Vector]:
    """SecAgg's masks, modulo 2^32, and the settings that say so."""
    seeds = {peer: fixed(f"pair {peer}").hex() for peer in (3, 9, 12)}
    own = fixed("self mask").hex()
    for name, peers in {"alone": (), "a pair": (9,), "three pairs": (3, 9, 12)}.items():
        pairs = [(peer, seeds[peer]) for peer in peers]
        inputs = {"self_seed": own, "pairwise": pairs, "own": 5, "length": 70_001}
        yield vector(f"the mask of client 5, {name}", "pairwise.mask", **inputs)
    yield vector(
        "a pair with oneself",
        "pairwise.mask",
        True,
        self_seed=own,
        pairwise=[(5, seeds[3])],
        own=5,
        length=4,
    )
    for length in (0, 31, 33):
        short = fixed("self mask", length).hex()
        inputs = {"self_seed": short, "pairwise": [], "own": 5, "length": 4}
        yield vector(f"a seed of {length} bytes", "pairwise.mask", True, **inputs)
    quantizer = Quantizer(WORDS, 1.0, 4, 100, weighted=True, scale=1000.0)
    secagg = replace(settings(), protocol="secagg", quantizer=quantizer)
    fields, order = msgspec.msgpack.decode(secagg.to_bytes()), _Fields.__struct_fields__
    yield vector("settings", "context.settings", settings=secagg.to_bytes().hex())
    for bits in (None, 0, 31, 33, 64, True, 32.0):
        changed = [*fields[: order.index("word_bits")], bits]
        encoded = msgspec.msgpack.encode(changed).hex()
        yield vector(f"settings, {bits} bits", "context.settings", True, settings=encoded)
    for name, value in [("protocol", "lightsecagg"), ("protocol", "plain"), ("scale", 1e9)]:
        changed = list(fields)
        changed[order.index(name)] = value
        encoded = msgspec.msgpack.encode(changed).hex()
        yield vector(f"settings, {name} = {value}", "context.settings", True, settings=encoded)
    prime = fields[: order.index("instructions")]
    encoded = msgspec.msgpack.encode(prime).hex()
    yield vector("settings of a prime field", "context.settings", True, settings=encoded)


FILES: dict[str, Callable[[], Iterator[Vector]]] = {
    "pairwise": pairwise_vectors,
    "short_keys": short_key_vectors,
    "wire": wire_vectors,
    "expansion": expansion_vectors,
    "context": context_vectors,
    "agreement": agreement_vectors,
    "sealing": sealing_vectors,
    "signature": signature_vectors,
}


def render(name: str) -> str:
    """The text of one file."""
    content = {"version": VERSION, "vectors": list(FILES[name]())}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        (FOLDER / f"{name}.json").write_text(render(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
