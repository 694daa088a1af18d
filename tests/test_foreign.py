"""What others wrote is decoded without surprises and shown without harm (S41, S48)."""

from __future__ import annotations

import ast
import errno
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg import foreign
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import context_hash
from lightsecagg.drivers.federation import client_ledger, membership
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.durable import checksummed, write_synced
from lightsecagg.errors import ConfigurationError, DecodeError, JournalError, LightSecAggError
from lightsecagg.protocol import settings
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.settings import Settings
from lightsecagg.session import envelope

ROOT = Path(__file__).parents[1]
DEEP = b"\x91" * 1100 + b"\xc0"
"""msgpack: null in an array in an array, 1,100 deep."""

# -- S41: decoders -------------------------------------------------------------------------------


def unknown_key(encoded: bytes) -> bytes:
    """A msgpack map with one entry more in front: deep arrays, under a key that nobody reads."""
    assert 0x80 <= encoded[0] < 0x8F
    return bytes([encoded[0] + 1]) + msgspec.msgpack.encode("deep") + DEEP + encoded[1:]


def deep_hello() -> bytes:
    return unknown_key(msgspec.msgpack.encode(envelope.Hello(1, -1)))


def deep_settings() -> bytes:
    """The last field but one is a map: the table of the asynchronous mode."""
    fields = ["lightsecagg", "malicious-server", "seeded", settings.POINT_RULE]
    fields += [bytes(32), 1, bytes(32), bytes(32), 8, 2, 2, 6, 4294967291, 0, 5, False, 1.0, 1, 2.0]
    encoded = msgspec.msgpack.encode([*fields, {}, 0])
    return encoded[:-2] + unknown_key(b"\x80") + b"\x00"


def deep_snapshot() -> bytes:
    allow_list, identity = allowed()
    policy = Policy(allow_list=allow_list, session=bytes(32), privacy=2)
    stored = Client(0, identity, policy, Ledger.volatile()).snapshot()[32:]
    return unknown_key(stored)


def deep_client_ledger() -> bytes:
    return unknown_key(msgspec.msgpack.encode(client_ledger._Stored(bytes(32), 0, b"")))


def allowed() -> tuple[AllowList, IdentityKey]:
    keys = [IdentityKey.generate() for _ in range(4)]
    return AllowList({i: key.public for i, key in enumerate(keys)}), keys[0]


def restore(payload: bytes) -> Any:
    allow_list, identity = allowed()
    policy = Policy(allow_list=allow_list, session=bytes(32), privacy=2)
    snapshot = context_hash("round snapshot", payload) + payload
    return Client.restore(snapshot, identity, policy, 0)


@pytest.mark.parametrize(
    ("naive", "ours", "make"),
    [
        (envelope._decoder, lambda data: envelope.unpack(b"\x00" + data), deep_hello),
        (settings._decoder, Settings.from_bytes, deep_settings),
    ],
    ids=["control", "settings"],
)
def test_S41_deep_nesting_is_a_malformed_message(
    naive: Any, ours: Callable[[bytes], Any], make: Callable[[], bytes]
) -> None:
    data = make()
    with pytest.raises(RecursionError):
        naive.decode(data)
    with pytest.raises(DecodeError, match=r"malformed .*maximum recursion depth"):
        ours(data)


def test_S41_deep_nesting_in_a_snapshot_is_a_malformed_snapshot() -> None:
    with pytest.raises(DecodeError, match="malformed snapshot"):
        restore(deep_snapshot())


def test_S41_deep_nesting_in_a_clients_ledger_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write_synced(path, checksummed(client_ledger._PLACE, deep_client_ledger()))
    with pytest.raises(RecursionError):
        client_ledger._decoder.decode(deep_client_ledger())
    with pytest.raises(JournalError, match=f"{path} is damaged: malformed entry"):
        ClientLedger(path, bytes(32), 0)


def test_S41_deep_nesting_in_a_configuration_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("x = " + "[" * 2000)
    with pytest.raises(RecursionError):
        tomllib.loads(path.read_text())
    with pytest.raises(ConfigurationError, match=f"{path}: malformed TOML"):
        load_config(ServerConfig, path)


def test_S41_deep_nesting_in_an_allow_list_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "allow-list.json"
    path.write_text('{"version": 1, "deep": ' + "[" * 2000)
    with pytest.raises(ConfigurationError, match=f"{path} is not an allow-list"):
        membership.load_membership(path, bytes(32))


@pytest.mark.parametrize("error", [RecursionError("x"), MemoryError(), KeyError("x"), OSError()])
def test_S41_whatever_a_decoder_raises_is_a_decode_error(error: Exception) -> None:
    def decoder(data: bytes) -> None:
        raise error

    with pytest.raises(DecodeError, match="malformed thing"):
        foreign.decode(decoder, b"", "thing")


def test_S41_an_interruption_is_not_a_malformed_message() -> None:
    def decoder(data: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        foreign.decode(decoder, b"", "thing")


# Programs that read back what they wrote themselves, from folders of their own.
OWN_FILES = {
    "src/lightsecagg/drivers/federation/demo_audit.py",
    "src/lightsecagg/drivers/federation/demo_notes.py",
    "src/lightsecagg/drivers/federation/demo_processes.py",
    "src/lightsecagg/drivers/federation/history.py",
    "lab/src/lightsecagg_lab/experiments/campaign.py",
    "lab/src/lightsecagg_lab/experiments/federation_bench.py",
    "lab/src/lightsecagg_lab/experiments/link_rounds.py",
    "lab/src/lightsecagg_lab/experiments/flush_bench.py",
    "lab/src/lightsecagg_lab/experiments/kernel_bench.py",
    "lab/src/lightsecagg_lab/experiments/round_audit.py",
    "lab/src/lightsecagg_lab/experiments/soak.py",
    "lab/src/lightsecagg_lab/experiments/state_damage.py",
}


def bare_decoders(source: str) -> set[str]:
    """Calls of a decoder that go neither through `foreign.decode` nor happen in `reading`."""
    tree = ast.parse(source)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any(ast.unparse(item.context_expr).startswith("reading(") for item in node.items)
        for inner in ast.walk(node)
    }
    decoders = {"json", "tomllib", "msgspec.json", "msgspec.msgpack", "msgspec.toml"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            made = ast.unparse(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "msgspec." in made and ".Decoder(" in made:
                decoders |= {ast.unparse(target) for target in targets}
    found = set()
    for node in ast.walk(tree):
        if (
            node not in guarded
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
        ):
            owner, method = ast.unparse(node.func.value).split("[")[0], node.func.attr
            if owner in decoders and method in ("decode", "decode_lines", "load", "loads"):
                found.add(ast.unparse(node.func))
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("json.loads(x)", {"json.loads"}),
        ("tomllib.load(f)", {"tomllib.load"}),
        ("msgspec.msgpack.decode(x)", {"msgspec.msgpack.decode"}),
        ("d = msgspec.json.Decoder(T)\nd.decode(x)", {"d.decode"}),
        ("D: F = {k: msgspec.json.Decoder(k) for k in K}\nD[k].decode(x)", {"D[k].decode"}),
        ("d = msgspec.json.Decoder(T)\ndecode(d.decode, x, 'y')", set()),
        ("decode(json.loads, x, 'y')", set()),
        ("with reading(p, 'y'):\n  x = json.loads(p.read_text())", set()),
        ("with open(p) as f:\n  x = json.load(f)", {"json.load"}),
        ("b'x'.decode('ascii')", set()),
        ("json.dumps(x)", set()),
    ],
)
def test_S41_bare_decoders_are_seen(source: str, found: set[str]) -> None:
    assert bare_decoders(source) == found


def test_S41_every_decoder_of_foreign_bytes_goes_through_one_function() -> None:
    bare = {
        path.relative_to(ROOT).as_posix(): found
        for source in ("src", "lab/src")
        for path in (ROOT / source).rglob("*.py")
        if (found := bare_decoders(path.read_text("utf-8")))
    }
    assert set(bare) <= OWN_FILES, bare


# -- S48: text -----------------------------------------------------------------------------------

CLEAR_SCREEN, RIGHT_TO_LEFT = "\x1b[2J", "\u202e"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("harmless, even with accents: é, ß, 漢", "harmless, even with accents: é, ß, 漢"),
        (CLEAR_SCREEN, r"\x1b[2J"),
        ("a\nERROR forged", r"a\nERROR forged"),
        ("a\r\u2028\u0085b", r"a\r\u2028\x85b"),
        (f"abc{RIGHT_TO_LEFT}txt.exe", r"abc\u202etxt.exe"),
        ("\u200bhidden\ufeff\x00\x7f\x9b", r"\u200bhidden\ufeff\x00\x7f\x9b"),
        ("\ud800", r"\ud800"),
    ],
)
def test_S48_what_cannot_be_seen_is_escaped(text: str, expected: str) -> None:
    assert foreign.escaped(text) == foreign.shown(text) == expected


@given(st.text())
def test_S48_a_shown_text_is_short_printable_and_stays_as_it_is(text: str) -> None:
    shown = foreign.shown(text)
    assert shown.isprintable()
    assert len(shown) <= foreign.SHOWN
    assert foreign.shown(shown) == shown
    assert foreign.escaped(foreign.escaped(text)) == foreign.escaped(text)


def test_S48_a_long_text_is_cut() -> None:
    assert foreign.shown("x" * 10**6) == "x" * 197 + "..."
    assert foreign.shown("\x1b" * 10**6) == (r"\x1b" * 50)[:197] + "..."
    assert foreign.shown("x" * foreign.SHOWN) == "x" * foreign.SHOWN


def test_S48_a_field_name_that_an_error_quotes_is_escaped() -> None:
    key = f"{CLEAR_SCREEN}\n2026 ERROR forged {'x' * 5000}"
    data = msgspec.msgpack.encode({"type": "Hello", key: 1})
    with pytest.raises(msgspec.ValidationError) as naive:
        envelope._decoder.decode(data)
    assert CLEAR_SCREEN in str(naive.value)
    with pytest.raises(DecodeError) as ours:
        envelope.unpack(b"\x00" + data)
    assert str(ours.value).isprintable()
    assert len(str(ours.value)) < 300


# -- errors ----------------------------------------------------------------------------------------


def test_the_place_of_an_error_is_told_without_its_message() -> None:
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("secret")
    assert foreign.where(caught.value).startswith("JSONDecodeError at decoder.py:")
    assert "unforeseen JSONDecodeError at" in foreign.explain(caught.value)
    assert foreign.where(ValueError("secret")) == "ValueError"
    assert foreign.explain(DecodeError("our own words")) == "our own words"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("secret"), "x is not a thing"),
        (EOFError("secret"), "x is not a thing"),
        (RecursionError("secret"), "x is not a thing"),
        (OSError("secret"), "x is not a thing"),
        (PermissionError(errno.EACCES, "denied"), "x cannot be read: denied"),
    ],
)
def test_damage_to_a_local_file_names_the_file_and_quotes_nothing(
    raised: Exception, said: str
) -> None:
    with (
        pytest.raises(ConfigurationError, match=said) as caught,
        foreign.reading(Path("x"), "a thing"),
    ):
        raise raised
    assert "secret" not in str(caught.value)


def test_reading_leaves_our_own_errors_and_interruptions_alone() -> None:
    for error in (LightSecAggError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)), foreign.reading(Path("x"), "a thing"):
            raise error
