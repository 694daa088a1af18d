"""Targets in memory: every decoder of what comes from peers, snapshots and rows of a journal."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from async_driver import AsyncFederation
from disk import Disk
from driver import Federation as RoundFederation
from driver import Network
from film import Film
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from fuzz_target import Target
from mortal import Mortal

from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash
from lightsecagg.drivers.columns import read_csv
from lightsecagg.drivers.federation import client_ledger, journal, marked_database, promise_store
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.dashboard.web import Gate, RefusedError, parse_request
from lightsecagg.drivers.federation.durable import checksummed
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.marked_database import MarkedDatabase
from lightsecagg.drivers.federation.promise_store import PromiseStore
from lightsecagg.drivers.flower import node, parcels
from lightsecagg.drivers.flower.node import Memory as NodeMemory
from lightsecagg.drivers.flower.node import Operator
from lightsecagg.drivers.flower.parcels import Parcel
from lightsecagg.drivers.transport import framing
from lightsecagg.drivers.transport.framing import Reassembler
from lightsecagg.drivers.transport.tls import client_of_pem
from lightsecagg.errors import (
    ConfigurationError,
    CryptoError,
    DecodeError,
    FieldError,
    InputRefused,
    JournalError,
    MaskAlreadyUsed,
    ParameterError,
    Refused,
    RemoteProtocolError,
)
from lightsecagg.field.prime import DEFAULT_FIELD, PrimeField
from lightsecagg.field.words import WORDS
from lightsecagg.params import PAPER_MODULUS, ShareMode, ThreatModel
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.jobs import UploadInMemory
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import Tag
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session import envelope
from lightsecagg.session.instructions import Instructions
from sound_files import party_files

VECTORS = Path(__file__).parents[1] / "vectors"

# -- messages -------------------------------------------------------------------------------------

CODECS = [Codec(WORDS), Codec(DEFAULT_FIELD), Codec(PrimeField(PAPER_MODULUS))]


def read_message(data: bytes) -> None:
    """There is one encoding per message, and one message per encoding."""
    for codec in CODECS:
        assert codec.encode(codec.decode(data)) == data


@cache
def messages() -> list[bytes]:
    """The published vectors, most of them negative."""
    vectors = json.loads((VECTORS / "wire.json").read_text())["vectors"]
    return [bytes.fromhex(vector["inputs"]["message"]) for vector in vectors]


def read_envelope(data: bytes) -> None:
    envelope.describe(data)
    content = envelope.unpack(data)
    if isinstance(content, tuple):
        assert envelope.pack_protocol(content[0], bytes(content[1])) == data
    else:
        again = envelope.unpack(envelope.pack_control(content))
        assert again == content or again != again, "a control message with a NaN in it"


def envelopes() -> Iterator[bytes]:
    controls = [
        envelope.Hello(1, -1),
        envelope.Withdraw(3, "no data"),
        envelope.Fetch(-1),
        envelope.NewMembers(b"a list"),
        envelope.RoundModel(3, bytes(8), 1.0, Instructions({"epochs": 2}, ())),
        envelope.EpochBegins(2),
        envelope.EpochCloses(2),
        envelope.Version(7, bytes(12)),
        envelope.MasksKnown(2, (1, 2), (3,)),
        envelope.UploadStored(4),
        envelope.RoundOver(4, "too few"),
        envelope.Goodbye("it is done", True),
    ]
    yield from map(envelope.pack_control, controls)
    yield from (envelope.pack_protocol(9, message) for message in messages()[:20])


def read_settings(data: bytes) -> None:
    assert Settings.from_bytes(data).to_bytes() == data


@cache
def settings() -> list[bytes]:
    found = [film(share_mode).federation.settings().to_bytes() for share_mode in SHARE_MODES]
    return [*found, epoch().settings.to_bytes()]


def read_ledger(data: bytes) -> None:
    content = Ledger.from_bytes(data).to_bytes()
    assert Ledger.from_bytes(content).to_bytes() == content


def read_elements(data: bytes) -> None:
    """The first byte says how many elements are expected."""
    for group in (WORDS, DEFAULT_FIELD):
        vector = group.from_bytes(data[1:], sum(data[:1]))
        assert bytes(group.to_buffer(vector)) == data[1:]
    DEFAULT_FIELD.check_bytes(data[1:])


# -- what a transport carries ---------------------------------------------------------------------

LARGEST_MESSAGE = 1 << 20


def read_frames(data: bytes) -> None:
    """A header and a length for each chunk of a stream; the payloads themselves are zeros."""

    def accept(length: int) -> None:
        if length > LARGEST_MESSAGE:
            raise DecodeError("too long")

    stream, fed = Reassembler(accept), []
    for start in range(0, len(data) - 11, 12):
        length = int.from_bytes(data[start + 8 : start + 12], "big") % (framing.MAX_CHUNK + 2)
        chunk = data[start : start + 8] + bytes(length)
        fed.append(chunk)
        message = stream.feed(chunk)
        if message is not None:
            assert list(framing.chunks(bytes(message))) == fed, "one way to cut a message"
            fed.clear()


def frames() -> Iterator[bytes]:
    for length in (1, framing.PAYLOAD, framing.PAYLOAD + 5, 3 * framing.PAYLOAD):
        cut = [*framing.chunks(bytes(length)), framing.GOODBYE]
        yield b"".join(chunk[:8] + (len(chunk) - 8).to_bytes(4, "big") for chunk in cut)


GATE = Gate("127.0.0.1", "0123456789abcdef", secure=True)


def read_request(data: bytes) -> None:
    request = parse_request(data)
    GATE.check_host(request)
    GATE.admits(request)


def requests() -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAuthorization: Bearer 0123456789abcdef\r\n"
    yield b"GET /a?b HTTP/1.0\r\nHost: [::1]:80\r\nCookie: lightsecagg-dashboard=x; y=z\r\n\r\n"


def read_certificate(data: bytes) -> None:
    assert client_of_pem(data) >= 0


@cache
def files() -> dict[str, Any]:
    """One federation's sound files; the folder is removed at exit."""
    files_folder.append(tempfile.TemporaryDirectory(dir=memory_folder()))
    return party_files(Path(files_folder[-1].name))


files_folder: list[tempfile.TemporaryDirectory[str]] = []


def memory_folder() -> str | None:
    """Where a file is written without a disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


# -- snapshots ------------------------------------------------------------------------------------

SHARE_MODES = ("seeded", "paper", "short-key")


@cache
def film(share_mode: str = "seeded") -> Film:
    model = ThreatModel.MALICIOUS_SERVER
    if share_mode == "short-key":
        model = ThreatModel.HONEST_BUT_CURIOUS
    return Film(model, ShareMode(share_mode))


@cache
def epoch() -> AsyncFederation:
    """In the middle of a buffer."""
    federation = AsyncFederation().open()
    for client in list(federation.clients)[:3]:
        federation.upload(client)
    federation.settle()
    return federation


def sealed(kind: str, payload: bytes) -> bytes:
    return context_hash(kind, payload) + payload


def read_round_snapshot(data: bytes) -> None:
    """With the right checksum: what is inside is looked at."""
    one = film()
    identity, policy = one.federation.identities[one.me], one.federation.policy()
    party = Client.restore(sealed("client snapshot", data), identity, policy, 0)
    repr(party)


def read_epoch_snapshot(data: bytes) -> None:
    federation = epoch()
    client = min(federation.clients)
    party = Client.restore(
        sealed("client snapshot", data), federation.keys[client], federation.policy, 0
    )
    repr(party)


def epoch_snapshots() -> list[bytes]:
    return [party.snapshot()[HASH_LENGTH:] for party in epoch().clients.values()]


def read_facts(data: bytes) -> None:
    """Of an epoch that has begun: behind its roster."""
    mortal = mortals()
    disk = mortal.disk
    assert disk is not None

    def recall(tag: Tag) -> UploadInMemory:
        return UploadInMemory(np.zeros(mortal.settings.length, dtype=np.uint32))

    Server.restore([disk.facts[0], data], mortal.allow_list, recall, disk.recall_shares)


@cache
def mortals() -> Mortal:
    federation = Mortal(threat_model=ThreatModel.MALICIOUS_SERVER).open()
    assert isinstance(federation, Mortal)
    for client in range(4):
        federation.upload(client)
    federation.settle()
    return federation


def facts() -> list[bytes]:
    disk = mortals().disk
    assert disk is not None
    return disk.facts


def read_round_facts(data: bytes) -> None:
    """Behind closed sharing."""
    network = durable_round()
    disk, federation = network.disk, network.federation
    assert disk is not None
    length = federation.settings().length

    def recall(tag: Tag) -> UploadInMemory:
        return UploadInMemory(np.zeros(length, dtype=np.uint32))

    server = Server.restore(
        [*disk.facts[:2], data], federation.allow_list, recall, disk.recall_shares
    )
    server.resume()


@cache
def durable_round() -> Network:
    federation = RoundFederation(threat_model=ThreatModel.MALICIOUS_SERVER)
    network = federation.network()
    network.server = Server(
        federation.settings(), federation.allow_list, federation.ids, durable=True
    )
    network.disk = Disk()
    network.start().finish().assert_exact(federation.ids)
    return network


def round_facts() -> list[bytes]:
    disk = durable_round().disk
    assert disk is not None
    return disk.facts[2:]


# -- rows of a journal, and files with a checksum -------------------------------------------------

ROWS = (journal._id_lists, journal._id_maps)


def read_row(data: bytes) -> None:
    """The first byte chooses the column."""
    decoder = ROWS[sum(data[:1]) % len(ROWS)]
    journal._unpack(decoder, "place", checksummed("place", data[1:]))


def rows() -> Iterator[bytes]:
    yield bytes([0]) + msgspec.msgpack.encode((1, 2, 3))
    yield bytes([1]) + msgspec.msgpack.encode({1: 2})


class _Database:
    """A journal's database whose every row is foreign."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def reporting(self, _: str) -> Any:
        return nullcontext()

    def execute(self, *_: object) -> Any:
        return SimpleNamespace(fetchone=lambda: (self._content,))


def read_epoch_row(data: bytes) -> None:
    """Hashes of models, or where an upload is: the first byte chooses."""
    if sum(data[:1]) % 2:
        Journal.hashes(SimpleNamespace(_meta=lambda _: data[1:]))  # type: ignore[arg-type]
        return
    tag = Tag(1, 2, bytes(32), 3, bytes(32), bytes(32), bytes(64))
    content = checksummed(promise_store._place(1, tag), data[1:])
    self = SimpleNamespace(
        _db=_Database(content),
        _stored=lambda number, tag, row: SimpleNamespace(
            length=row.length, read=lambda start, stop: None
        ),
    )
    PromiseStore.recall(self, 1)(tag)  # type: ignore[arg-type]


def epoch_rows() -> Iterator[bytes]:
    yield b"\x01" + msgspec.msgpack.encode({3: bytes(32)})
    yield b"\x00" + msgspec.msgpack.encode(promise_store._Row(7, (bytes(32),)))


def read_mark(data: bytes) -> None:
    self = SimpleNamespace(forgetful=JournalError)
    MarkedDatabase._mark_in(self, checksummed("mark", data))  # type: ignore[arg-type]


def marks() -> Iterator[bytes]:
    yield msgspec.msgpack.encode(marked_database._Mark())


def read_client_ledger(data: bytes) -> None:
    """The content of the file, with the right checksum."""
    path = Path(_scratch()) / "ledger"
    path.touch(0o600)
    path.write_bytes(checksummed(client_ledger._PLACE, data))
    ledger = object.__new__(ClientLedger)
    vars(ledger).update(_path=path, _session=bytes(32), _client=0)
    ledger._load()


def client_ledgers() -> Iterator[bytes]:
    yield msgspec.msgpack.encode(client_ledger._Stored(bytes(32), 0, Ledger().to_bytes()))


@cache
def _scratch() -> str:
    files_folder.append(tempfile.TemporaryDirectory(dir=memory_folder()))
    return files_folder[-1].name


def read_override(data: bytes) -> None:
    """`--set KEY=VALUE` of a command; the environment goes the same way."""
    text = data.decode("utf-8", "replace")
    load_config(ServerConfig, files()["server.toml"][0], [text], {})


# -- Flower ---------------------------------------------------------------------------------------

DTYPES = ("uint8", "float32", "object", "<U4", "")


def read_parcel(data: bytes) -> None:
    """The first byte chooses what the array of frames claims to be; the rest is its content."""
    choice, content = sum(data[:1]), data[1:]
    array = Array(
        dtype=DTYPES[choice % 5],
        shape=(len(content),),
        stype="numpy.ndarray" if choice % 2 else "another",
        data=content,
    )
    numbers = {"protocol": parcels.PROTOCOL, "first": choice}
    records = RecordDict(
        {"lightsecagg": ConfigRecord(numbers), "lightsecagg.frames": ArrayRecord({"frames": array})}
    )
    parcel, rest = parcels.detach(records)
    assert parcel is not None
    assert not rest
    again, _ = parcels.detach(parcels.attach(parcel, RecordDict()))
    assert again is not None
    assert again.frames == parcel.frames


def flower_frames() -> Iterator[bytes]:
    for frame_list in ((b"one", b"two" * 40), (b"",), (bytes(300),)):
        attached = parcels.attach(Parcel({}, frame_list), RecordDict())
        record = attached["lightsecagg.frames"]
        assert isinstance(record, ArrayRecord)
        yield b"\x05" + record["frames"].data


def write_private(path: Path, data: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(data)


def read_node_memory(data: bytes) -> None:
    """Flower's own memory of a node, and a file of the same content."""
    context = Context(1, 2, {}, RecordDict({node._RECORD: ConfigRecord({"content": data})}), {})
    memory = node._Volatile(context).load()
    assert memory is not None
    folder = Path(_scratch())
    write_private(folder / "memory", checksummed(node._PLACE, data))
    write_private(folder / "mark", checksummed(node._MARK, msgspec.msgpack.encode(0)))
    repr(node._Folder(folder).load())


def node_memories() -> Iterator[bytes]:
    yield msgspec.msgpack.encode(NodeMemory(bytes(32), Ledger().to_bytes()))


def read_node_mark(data: bytes) -> None:
    folder = Path(_scratch()) / "marked"
    folder.mkdir(exist_ok=True)
    write_private(folder / "mark", checksummed(node._MARK, data))
    node._Folder(folder).load()


def node_marks() -> Iterator[bytes]:
    yield from (msgspec.msgpack.encode(mark) for mark in (0, -1, 70_000))


def read_columns(data: bytes) -> None:
    table = Path(_scratch()) / "table.csv"
    table.write_bytes(data)
    columns, lines = read_csv(table)
    assert all(len(column) == len(lines) for column in columns.values())


def read_node_config(data: bytes) -> None:
    """Keys and values as `--node-config` may hold them."""
    given: dict[str, Any] = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        key, _, value = line.partition("=")
        given[f"lightsecagg-{key}"] = float(value) if value.isdecimal() else value
    Operator.of(given)


def node_configs() -> Iterator[bytes]:
    yield b"privacy=2\nminimum=3\nbound=1"
    yield b"dir=/x\nallow-list=/y\nthreat-model=malicious-server\nshare-mode=paper"


MESSAGE = (DecodeError,)
STORED = (JournalError, DecodeError)


def read_health_page(data: bytes) -> None:
    """Of a server that may be another one, and what is printed of it."""
    from lightsecagg.cli.status import _lines, read_health

    text = "\n".join(_lines(read_health(data), "source", 1e9))
    assert "\x1b" not in text


def health_pages() -> list[bytes]:
    return [
        b'{"state": "running", "rounds_done": 3, "rounds_wanted": 9, "connected": 2, "admitted": 3,'
        b' "needed": 2, "round": 4, "last_success": 1.5e9, "certificates": {"server": 2e9}}'
    ]


DECODERS = [
    Target(
        "health",
        read_health_page,
        health_pages,
        MESSAGE,
        ("cli/status.py:read_health",),
    ),
    Target(
        "message",
        read_message,
        messages,
        MESSAGE,
        (
            "protocol/wire.py:Codec.decode",
            "protocol/wire.py:Codec._decode_control",
            "protocol/wire.py:_unpack",
        ),
    ),
    Target(
        "envelope",
        read_envelope,
        envelopes,
        MESSAGE,
        ("session/envelope.py:unpack", "session/envelope.py:name_of"),
    ),
    Target(
        "settings",
        read_settings,
        settings,
        (DecodeError, ParameterError),
        ("protocol/settings.py:Settings.from_bytes",),
    ),
    Target(
        "ledger",
        read_ledger,
        lambda: [Ledger().to_bytes(), *(p.ledger.to_bytes() for p in epoch().clients.values())],
        MESSAGE,
        ("protocol/ledger.py:Ledger.from_bytes",),
    ),
    Target(
        "elements",
        read_elements,
        lambda: [b"\x03" + bytes(12), b"\x02" + b"\xff\xff\xf7\x7f" * 2],
        (FieldError,),
        ("field/group.py:Group.from_bytes", "field/prime.py:PrimeField.check_bytes"),
    ),
    Target(
        "frames",
        read_frames,
        frames,
        MESSAGE,
        ("drivers/transport/framing.py:Reassembler.feed",),
    ),
    Target(
        "http-request",
        read_request,
        requests,
        (RefusedError,),
        ("drivers/federation/dashboard/web.py:parse_request",),
    ),
    Target(
        "peer-certificate",
        read_certificate,
        lambda: [files()["certificate"][0].read_bytes(), files()["authority"][0].read_bytes()],
        (Refused,),
        ("drivers/transport/tls.py:client_of_pem",),
    ),
    Target(
        "round-snapshot",
        read_round_snapshot,
        lambda: [snapshot[HASH_LENGTH:] for snapshot in film().snapshots.values()],
        (DecodeError, ParameterError, RemoteProtocolError, MaskAlreadyUsed, CryptoError),
        ("protocol/client_machine.py:ClientMachine.restore",),
    ),
    Target(
        "epoch-snapshot",
        read_epoch_snapshot,
        epoch_snapshots,
        (DecodeError, ParameterError, RemoteProtocolError, MaskAlreadyUsed, CryptoError),
        ("protocol/client_machine.py:ClientMachine.restore",),
    ),
    Target(
        "facts",
        read_facts,
        facts,
        (DecodeError, ParameterError, CryptoError, FieldError, RemoteProtocolError),
        ("protocol/journal_facts.py:decode_facts",),
        slow=True,
    ),
    Target(
        "round-facts",
        read_round_facts,
        round_facts,
        (DecodeError, ParameterError, CryptoError, FieldError, RemoteProtocolError),
        ("protocol/journal_facts.py:decode_facts",),
        slow=True,
    ),
    Target(
        "journal-row",
        read_row,
        rows,
        (JournalError,),
        ("drivers/federation/journal.py:_decoded",),
    ),
    Target(
        "epoch-row",
        read_epoch_row,
        epoch_rows,
        (JournalError,),
        ("drivers/federation/promise_store.py:PromiseStore.recall.stored",),
    ),
    Target(
        "journal-mark",
        read_mark,
        marks,
        (JournalError,),
        ("drivers/federation/marked_database.py:MarkedDatabase._mark_in",),
    ),
    Target(
        "client-ledger",
        read_client_ledger,
        client_ledgers,
        (JournalError, ConfigurationError),
        ("drivers/federation/client_ledger.py:ClientLedger._load",),
    ),
    Target(
        "override",
        read_override,
        lambda: [b"aggregation.privacy=2", b"rounds.number = [1, 2]", b"vectors.output='x'"],
        (ConfigurationError,),
        ("drivers/federation/config.py:_parse",),
        slow=True,
    ),
    Target(
        "flower-parcel",
        read_parcel,
        flower_frames,
        MESSAGE,
        ("drivers/flower/parcels.py:_bytes_of",),
    ),
    Target(
        "flower-memory",
        read_node_memory,
        node_memories,
        STORED,
        ("drivers/flower/node.py:_Folder.load", "drivers/flower/node.py:_Volatile.load"),
    ),
    Target(
        "flower-mark", read_node_mark, node_marks, STORED, ("drivers/flower/node.py:_Folder.load",)
    ),
    Target(
        "columns",
        read_columns,
        lambda: [b"age,ward\n31,east\n,west\n", b'a,"b ""c"""\n1,2\n'],
        (ConfigurationError, InputRefused),
        ("drivers/columns.py:read_csv",),
    ),
    Target(
        "flower-config",
        read_node_config,
        node_configs,
        (ConfigurationError,),
        ("drivers/flower/node.py:Operator.of",),
    ),
]
