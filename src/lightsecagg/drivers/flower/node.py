"""What a node's operator configured, and what a node remembers between two messages.

Flower starts a process for every message, and its own memory for apps (`Context.state`) is stored
after the reply has left, or not at all. A client that forgets an answer may be made to give a
second one, which reveals its peers' updates (S06). So a node whose operator names a folder keeps
everything in one file there: it is written and synced before the mod returns, hence before anything
leaves, and is one and the same for all runs. Without a folder the memory is Flower's, which is good
enough against a server that only looks.

The operator speaks through `--node-config`, which the server cannot change; see `Operator`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

import msgspec
from flwr.app import ConfigRecord, Context
from flwr.common.logger import log

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.durable import ProcessLock, seal, unseal, write_synced
from lightsecagg.drivers.flower.epoch import buffering
from lightsecagg.errors import ConfigurationError, JournalError, RemoteProtocolError
from lightsecagg.foreign import decode, reading
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.settings import Settings

PREFIX = "lightsecagg-"
_PLACE = "memory of a Flower node, version 1"
_RECORD = "lightsecagg.memory"
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
    """`malicious-server` takes part in nothing less; it needs a folder and an allow-list."""

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
            raise ConfigurationError(
                f"node-config has {PREFIX}{min(unknown).replace('_', '-')}, which does not exist; "
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

    def operator(self) -> Operator:
        return Operator(
            dir=Path(self.dir) if self.dir else None,
            identity=Path(self.identity) if self.identity else None,
            allow_list=Path(self.allow_list) if self.allow_list else None,
            privacy=self.privacy,
            minimum=self.minimum,
            bound=self.bound,
            threat_model=ThreatModel(self.threat_model),
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
    party: bytes = b""
    """The party's snapshot."""
    received: int = 0
    """How many frames of the epoch are here."""
    version: int = -1
    """The last round for which this node has trained."""
    serial: int = -1
    """The mask of its last upload."""

    def __repr__(self) -> str:
        return f"Memory(epoch={self.epoch.hex()[:8]}, received={self.received})"


_decoder = msgspec.msgpack.Decoder(Memory)


class Store(Protocol):
    """Where a memory is kept."""

    def load(self) -> Memory | None:
        """The memory, if there is one."""

    def save(self, memory: Memory) -> None:
        """Keep it; when this returns, what depends on it may leave."""


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
        yield _Folder(operator.dir / "memory")
    finally:
        lock.release()


class _Folder:
    """A file that is whole or absent, checksummed, and synced."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Memory | None:
        if not self._path.exists():
            return None
        try:
            content = unseal(_PLACE, self._path.read_bytes())
        except (JournalError, OSError) as error:
            raise JournalError(
                f"{self._path} is damaged, or cannot be read: {error}; restore it. Without it this "
                "node does not know which updates it has spent: remove it only if none of them can "
                "come again"
            ) from error
        return decode(_decoder.decode, content, "memory of a node")

    def save(self, memory: Memory) -> None:
        try:
            write_synced(self._path, seal(_PLACE, msgspec.msgpack.encode(memory)))
        except OSError as error:
            raise JournalError(
                f"{self._path} cannot be written: {error.strerror or error}; nothing was sent"
            ) from error


class _Volatile:
    """Flower's own memory: lost with the SuperNode, and stored after the reply has left."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def load(self) -> Memory | None:
        record = self._context.state.get(_RECORD)
        if not isinstance(record, ConfigRecord):
            log(
                WARNING,
                "lightsecagg: this node forgets everything when its SuperNode ends; name a folder "
                "with --node-config 'lightsecagg-dir=\"/var/lib/lightsecagg\"'",
            )
            return None
        content = record["content"]
        if not isinstance(content, bytes):
            raise JournalError("Context.state holds another lightsecagg.memory than this node's")
        return decode(_decoder.decode, content, "memory of a node")

    def save(self, memory: Memory) -> None:
        content = msgspec.msgpack.encode(memory)
        if len(content) > _LARGE:
            log(
                WARNING,
                "lightsecagg: this node remembers %d MB, which Flower may not have the time to "
                "store; name a folder with --node-config 'lightsecagg-dir=...'",
                len(content) // 2**20,
            )
        self._context.state[_RECORD] = ConfigRecord({"content": content})


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
