"""What a node's operator configured, and what a node remembers between two messages.

Flower starts a process for every message, and its own memory for apps (`Context.state`) is stored
after the reply has left, or not at all. A client that forgets an answer may be made to give a
second one, which reveals its peers' updates (S06). So a node whose operator names a folder keeps
everything there: it is written and synced before the mod returns, hence before anything leaves, and
is one and the same for all runs. Without a folder the memory is Flower's, which is good enough
against a server that only looks.

    memory   kilobytes: keys, seeds, the ledger, and the hashes of the parts; written anew each time
    parts/   megabytes: peers' explicit shares, and the answer; a file each, named by its SHA-256,
             written once and deleted when it is spent
    mark     how far the memory has come: an older one, or none, is noticed
    lock     one process at a time

The operator speaks through `--node-config`, which the server cannot change; see `Operator`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

import msgspec
from flwr.app import ConfigRecord, Context
from flwr.common.logger import log

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.durable import (
    ProcessLock,
    checksummed,
    sync_folder,
    verified,
    write_new,
    write_synced,
)
from lightsecagg.drivers.flower.agreed import buffering
from lightsecagg.errors import ConfigurationError, JournalError, RemoteProtocolError
from lightsecagg.foreign import decode, read_private, reading, shown
from lightsecagg.params import ShareMode, ThreatModel, choice
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import TravellingClientParty
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.settings import Settings

PREFIX = "lightsecagg-"
_PLACE = "memory of a Flower node, version 2"
_MARK = "mark of a Flower node"
_REMEDY = (
    "restore the newest copy. Without it this node does not know which updates it has spent: begin "
    "a new folder only if none of them can come again"
)
_RECORD = "lightsecagg.memory"
_PARTS = "lightsecagg.parts"
_SIMULATION = "flwr.simulation.ray_transport.ray_actor"
"""Runs apps in Flower's simulation, whose nodes have no SuperNode."""
_LARGE = 16 * 2**20
_ALL_RUNS = 2**31  # epochs of all runs are counted together, and clipped updates refuse nothing


@dataclass(frozen=True, slots=True)
class Operator:
    """What the operator of a node demands, from `--node-config 'lightsecagg-...=...'`."""

    dir: Path | None = None
    """Where the node's memory is kept; a folder that exists, for this node alone."""
    identity: Path | None = None
    """An identity key, 64 hexadecimal digits. Without it the node draws one and remembers it."""
    allow_list: Path | None = None
    """The public identity keys with which this node takes part, one per line."""
    privacy: int = 0
    """The least T."""
    minimum: int = 0
    """The fewest clients whose updates may be summed."""
    bound: float | None = None
    """The bound for the entries of an update, exactly."""
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    """`malicious-server` takes part in nothing less; it needs a folder, an allow-list and a T."""
    share_mode: ShareMode | None = None
    """How masks are shared, exactly; without it, short keys are refused."""
    max_failures: int = 16
    """How often this node may have no update in malicious-server mode, in all runs (S62)."""

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Operator:
        """Read the keys that begin with `lightsecagg-`; refuse those that do not exist."""
        given = {
            key.removeprefix(PREFIX).replace("-", "_"): value
            for key, value in node_config.items()
            if key.startswith(PREFIX)
        }
        known = {field: PREFIX + field.replace("_", "-") for field in cls.__slots__}
        if unknown := given.keys() - known.keys():
            name = shown(min(unknown).replace("_", "-"))
            raise ConfigurationError(
                f"node-config has {PREFIX}{name}, which does not exist; "
                f"there are {', '.join(known.values())}"
            )
        try:
            operator = decode(_given.decode, msgspec.json.encode(given), "demand").operator()
        except ValueError as error:  # a `DecodeError` is one too
            raise ConfigurationError(f"node-config: {error}") from error
        if operator.threat_model is ThreatModel.MALICIOUS_SERVER:
            operator.check_fit()
        return operator

    def check_fit(self) -> None:
        """Refuse malicious-server mode where it would promise too much."""
        if self.dir is None or self.allow_list is None:
            raise ConfigurationError(
                "malicious-server mode needs lightsecagg-dir and lightsecagg-allow-list in "
                "node-config: a node that forgets, or whose peers the server chooses, has no "
                "defence against it"
            )
        if self.privacy < 1:
            raise ConfigurationError(
                "malicious-server mode needs lightsecagg-privacy of at least 1 in node-config, not "
                f"{self.privacy}: a server that may choose T = 0 sums this node with one that "
                "colludes"
            )

    def policy(self, settings: Settings, keys: AllowList) -> Policy:
        """What this node demands of an epoch over these identities."""
        if settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER:
            self.check_fit()
        if self.allow_list is not None:
            pinned = load_keys(self.allow_list)
            if strangers := [keys[c] for c in keys.clients if keys[c] not in pinned]:
                raise RemoteProtocolError(
                    f"{len(strangers)} identities are not in {self.allow_list}, among them "
                    f"{strangers[0].hex()}"
                )
        return Policy(
            allow_list=keys,
            session=settings.session,
            privacy=self.privacy,
            threat_model=self.threat_model,
            buffering=buffering(len(keys)),
            max_openings=_ALL_RUNS,
            minimum=self.minimum,
            bound=self.bound,
            share_mode=self.share_mode,
        )


class _Given(msgspec.Struct):
    """As it is written: every value is a text, a number or a truth value."""

    dir: str = ""
    identity: str = ""
    allow_list: str = ""
    privacy: int = 0
    minimum: int = 0
    bound: float | None = None
    threat_model: str = ThreatModel.HONEST_BUT_CURIOUS
    share_mode: str = ""
    max_failures: int = 16

    def operator(self) -> Operator:
        return Operator(
            dir=Path(self.dir) if self.dir else None,
            identity=Path(self.identity) if self.identity else None,
            allow_list=Path(self.allow_list) if self.allow_list else None,
            privacy=self.privacy,
            minimum=self.minimum,
            bound=self.bound,
            threat_model=choice(ThreatModel, self.threat_model),
            share_mode=choice(ShareMode, self.share_mode) if self.share_mode else None,
            max_failures=self.max_failures,
        )


_given = msgspec.json.Decoder(_Given, strict=False)


def load_keys(path: Path) -> frozenset[bytes]:
    """The public keys of a file, one per line; what follows a # is for people."""
    with reading(path, "a list of identity keys, 64 hexadecimal digits in every line"):
        lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
        keys = frozenset(bytes.fromhex(line) for line in lines if line)
        if not keys or any(len(key) != len(next(iter(keys))) for key in keys):
            raise ValueError("keys of different lengths, or none")
        return keys


class Memory(msgspec.Struct):
    """All that a node remembers; its secrets too."""

    identity: bytes
    """The private key; empty if it lies in a file of the operator's."""
    ledger: bytes
    """Of all runs."""
    epoch: bytes = b""
    """C0 of the epoch in which this node takes part; empty if there is none."""
    settings: bytes = b""
    keys: list[bytes] = []
    """The identities of the epoch."""
    masked: bool = False
    """Whether the epoch's strategy wants nothing in the clear, evaluations included."""
    party: bytes = b""
    """The party's snapshot."""
    received: int = 0
    """How many frames of the epoch are here."""
    version: int = -1
    """The last round for which this node has trained."""
    serial: int = -1
    """The mask of its last upload."""
    failures: int = 0
    """How often it had no update, in all runs."""

    def __repr__(self) -> str:
        return f"Memory(epoch={self.epoch.hex()[:8]}, received={self.received})"


_decoder = msgspec.msgpack.Decoder(Memory)
_mark = msgspec.msgpack.Decoder(int)


class Store(Protocol):
    """Where a memory is kept."""

    def load(self) -> Memory | None:
        """The memory, if there is one."""

    def fetch(self, party: TravellingClientParty) -> None:
        """Let a restored party have what was kept apart; `JournalError` if some of it is lost."""

    def save(self, memory: Memory, party: TravellingClientParty | None = None) -> None:
        """Keep both; when this returns, what depends on them may leave."""


@contextmanager
def opened(operator: Operator, context: Context) -> Iterator[Store]:
    """The node's memory, for one process at a time."""
    if operator.dir is None:
        yield _Volatile(context)
        return
    if not operator.dir.is_dir():
        raise ConfigurationError(
            f"lightsecagg-dir {operator.dir} is not a folder; create it, for this node alone"
        )
    lock = ProcessLock(
        operator.dir / "lock",
        f"another process uses {operator.dir}; every node needs a folder of its own",
    )
    try:
        yield _Folder(operator.dir)
    finally:
        lock.release()


class _Folder:
    """Files that are whole or absent, checksummed, and synced."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "memory"
        self._mark = folder / "mark"
        self._parts = _Parts(folder / "parts")

    def load(self) -> Memory | None:
        mark = -1
        if self._mark.exists():
            mark = decode(_mark.decode, self._read(self._mark, _MARK), "mark of a node")
        if not self._path.exists():
            if mark >= 0:
                raise JournalError(f"{self._path} is gone, but {self._mark} is here; {_REMEDY}")
            return None
        memory = decode(_decoder.decode, self._read(self._path, _PLACE), "memory of a node")
        generation = Ledger.from_bytes(memory.ledger).generation
        if generation < mark or (generation and mark < 0):
            raise JournalError(
                f"{self._path} is of generation {generation}, and {self._mark} says {mark}: one of "
                f"them is older than the other, or gone; {_REMEDY}"
            )
        return memory

    def _read(self, path: Path, place: str) -> bytes:
        try:
            return verified(place, read_private(path))
        except (JournalError, OSError) as error:
            raise JournalError(
                f"{path} is damaged, or cannot be read: {error}; {_REMEDY}"
            ) from error

    def fetch(self, party: TravellingClientParty) -> None:
        self._parts.check(party.needed_parts)
        party.parts = self._parts

    def save(self, memory: Memory, party: TravellingClientParty | None = None) -> None:
        try:
            if party is not None:
                memory.party, parts, needed = party.snapshot_apart()
                self._parts.add(parts)
            write_synced(self._path, checksummed(_PLACE, msgspec.msgpack.encode(memory)))
            generation = Ledger.from_bytes(memory.ledger).generation
            write_synced(self._mark, checksummed(_MARK, msgspec.msgpack.encode(generation)))
            if party is not None:
                self._parts.keep_only(needed)
        except OSError as error:
            raise JournalError(
                f"{self._path.parent} cannot be written: {error.strerror or error}; nothing was "
                "sent"
            ) from error


class _Parts(Mapping[bytes, bytes]):
    """A folder of files, each named by the SHA-256 of its content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, needed: Iterable[bytes]) -> None:
        """`JournalError` for the first that is not there."""
        for digest in needed:
            if not self._file(digest).is_file():
                raise JournalError(f"{self._file(digest)} is gone, which this node's memory needs")

    def add(self, parts: Mapping[bytes, bytes]) -> None:
        """Write and sync them; a name that nothing refers to yet may be written in place."""
        if not parts:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for digest, content in parts.items():
            write_new(self._file(digest), content)
        sync_folder(self._folder)

    def keep_only(self, needed: Collection[bytes]) -> None:
        """Delete what is spent, and what a process left that died before its memory was saved."""
        for digest in set(self) - set(needed):
            self._file(digest).unlink(missing_ok=True)

    def _file(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def __getitem__(self, digest: bytes) -> bytes:
        try:
            content = read_private(self._file(digest))
        except OSError as error:
            raise JournalError(f"{self._file(digest)} cannot be read: {error.strerror}") from error
        if hashlib.sha256(content).digest() != digest:
            raise JournalError(f"{self._file(digest)} is damaged: it is not what was written")
        return content

    def __iter__(self) -> Iterator[bytes]:
        return (bytes.fromhex(file.name) for file in self._folder.glob("[0-9a-f]" * 64))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Volatile:
    """Flower's own memory: lost with the SuperNode, and stored after the reply has left."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def load(self) -> Memory | None:
        record = self._context.state.get(_RECORD)
        if not isinstance(record, ConfigRecord):
            if _SIMULATION not in sys.modules:
                log(
                    WARNING,
                    "lightsecagg: this node forgets everything when its SuperNode ends; name a "
                    "folder with --node-config 'lightsecagg-dir=\"/var/lib/lightsecagg\"'",
                )
            return None
        content = record["content"]
        if not isinstance(content, bytes):
            raise JournalError("Context.state holds another lightsecagg.memory than this node's")
        return decode(_decoder.decode, content, "memory of a node")

    def fetch(self, party: TravellingClientParty) -> None:
        party.parts = self._parts()
        if lost := party.needed_parts - party.parts.keys():
            raise JournalError(f"Context.state has lost {len(lost)} shares of this node's")

    def save(self, memory: Memory, party: TravellingClientParty | None = None) -> None:
        if party is not None:
            memory.party, new, needed = party.snapshot_apart()
            known = self._parts() | new
            parts = {digest.hex(): known[digest] for digest in needed}
            if (size := sum(map(len, parts.values()))) > _LARGE:
                log(
                    WARNING,
                    "lightsecagg: this node remembers %d MB, which Flower may not have the time to "
                    "store; name a folder with --node-config 'lightsecagg-dir=...'",
                    size // 2**20,
                )
            self._context.state[_PARTS] = ConfigRecord({**parts})
        self._context.state[_RECORD] = ConfigRecord({"content": msgspec.msgpack.encode(memory)})

    def _parts(self) -> dict[bytes, bytes]:
        record = self._context.state.get(_PARTS)
        if not isinstance(record, ConfigRecord):
            return {}
        pairs = ((name, data) for name, data in record.items() if isinstance(data, bytes))
        return {bytes.fromhex(name): data for name, data in pairs}


def new_memory(operator: Operator) -> Memory:
    """Of a node that has never taken part."""
    identity = b"" if operator.identity else IdentityKey.generate().private_bytes()
    return Memory(identity, Ledger().to_bytes())


def identity_of(operator: Operator, memory: Memory) -> IdentityKey:
    """The node's identity: its operator's, or the one that it drew."""
    if operator.identity is not None:
        from lightsecagg.drivers.federation.provisioning import load_identity

        return load_identity(operator.identity)
    return IdentityKey(memory.identity)
