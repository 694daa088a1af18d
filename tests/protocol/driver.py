"""A small federation on a fake wire: what the tests of the protocol layer have in common.

Inputs are whole numbers and the scale is 1, so quantisation is exact and sums can be compared
element for element. Every client's first entry is a power of two of its own: a client counted
twice, or one that is missing, shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from bundles import Part, parts_of, whole
from links import Links

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.local import Packet
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.params import (
    DEFAULT_MODULUS,
    PAPER_MODULUS,
    Decoding,
    Parameters,
    ShareMode,
    ThreatModel,
)
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    NeedInput,
    RoundAborted,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import SumRequest, Tag
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

HONEST, MALICIOUS = ThreatModel.HONEST_BUT_CURIOUS, ThreatModel.MALICIOUS_SERVER
PAPER, SEEDED = ShareMode.PAPER, ShareMode.SEEDED
MODULI = (DEFAULT_MODULUS, PAPER_MODULUS)
SESSION = b"a session of the tests".ljust(32, b".")


def request(survivors: Iterable[int]) -> SumRequest:
    """A round's, for these clients."""
    return SumRequest(0, tuple(map(Tag, survivors)))


class CountingEntropy:
    """Reproducible bytes: SHA-256 in counter mode. `drawn` remembers what was handed out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.drawn: list[bytes] = []

    def __call__(self, count: int) -> bytes:
        seed = f"{self._name} {len(self.drawn)}".encode()
        blocks = (hashlib.sha256(seed + k.to_bytes(4)).digest() for k in range(-(-count // 32)))
        self.drawn.append(b"".join(blocks)[:count])
        return self.drawn[-1]


@dataclass
class Federation:
    """Identities and settings of N clients; their ids are not their positions."""

    clients: int = 6
    privacy: int = 1
    dropouts: int = 2
    survivors: int = 0
    threat_model: ThreatModel = HONEST
    share_mode: ShareMode = SEEDED
    modulus: int = DEFAULT_MODULUS
    dimension: int = 7
    weighted: bool = True
    strangers: int = 0
    """Clients on the allow-list beyond N."""
    decoding: Decoding | None = None
    identities: dict[int, IdentityKey] = field(init=False)
    ledgers: dict[int, Ledger] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.identities = {
            3 * k + 2: IdentityKey(hashlib.sha256(b"identity %d" % k).digest())
            for k in range(self.clients + self.strangers)
        }

    @property
    def ids(self) -> tuple[int, ...]:
        """The N clients that take part."""
        return tuple(self.identities)[: self.clients]

    @property
    def allow_list(self) -> AllowList:
        return AllowList({client: key.public for client, key in self.identities.items()})

    @property
    def parameters(self) -> Parameters:
        return Parameters(
            self.clients,
            self.privacy,
            self.dropouts,
            self.survivors,
            self.threat_model,
            self.share_mode,
            self.modulus,
        )

    @property
    def codec(self) -> Codec:
        return Codec(PrimeField(self.modulus))

    def settings(self, round_number: int = 1, **changes: Any) -> Settings:
        quantizer = make_quantizer(
            self.parameters,
            self.dimension,
            bound=1024.0,
            max_samples=64 if self.weighted else 1,
            weighted=self.weighted,
            scale=1.0,
            decoding=self.decoding,
        )
        settings = Settings(
            "lightsecagg",
            self.parameters,
            quantizer,
            self.dimension,
            SESSION,
            round_number,
            self.allow_list.digest,
        )
        return replace(settings, **changes)

    def policy(self, **changes: Any) -> Policy:
        mode = self.share_mode if self.share_mode is ShareMode.SHORT_KEY else None
        policy = Policy(self.allow_list, SESSION, self.privacy, self.threat_model, share_mode=mode)
        return replace(policy, **changes)

    def client(
        self,
        client: int,
        kind: type[Client] = Client,
        entropy: Entropy | None = None,
        **policy: Any,
    ) -> Client:
        """A client with the ledger that it had in its last round."""
        source = {} if entropy is None else {"entropy": entropy}
        ledger = self.ledgers.setdefault(client, Ledger.volatile(**source))
        identity = self.identities[client]
        return kind(client, identity, self.policy(**policy), ledger, **source)

    def network(
        self,
        round_number: int = 1,
        kind: type[Client] = Client,
        settings: Settings | None = None,
        **policy: Any,
    ) -> Network:
        """A server and all clients, joined by a fake wire, before the start."""
        settings = self.settings(round_number) if settings is None else settings
        server = Server(settings, self.allow_list, self.ids)
        clients = {client: self.client(client, kind, **policy) for client in self.ids}
        inputs = {client: self.update(client, round_number) for client in self.ids}
        return Network(self, server, clients, inputs)

    def update(self, client: int, round_number: int = 1) -> Update:
        """An input that is unique in its first entry, and new in every round."""
        k = tuple(self.identities).index(client)
        rng = np.random.default_rng((k, round_number))
        vector = rng.integers(-1000, 1001, self.dimension).astype(np.float64)
        vector[0] = 2.0**k
        return Update(vector, k + 1 if self.weighted else 1)

    def exact_sum(self, updates: Iterable[Update]) -> Elements:
        """What the sum must be, in Python integers."""
        updates = list(updates)
        total = [
            sum(u.samples * int(u.vector[k]) for u in updates) % self.modulus
            for k in range(self.dimension)
        ]
        if self.weighted:
            total.append(sum(u.samples for u in updates) % self.modulus)
        return np.array(total, dtype=np.uint32)


Tamper = Callable[[int, int, Part], list[Part]]


class Network(Links):
    """The wire in memory, with what the tests do to it and want to know afterwards."""

    server: Server
    clients: dict[int, Client]

    def __init__(
        self,
        federation: Federation,
        server: Server,
        clients: dict[int, Client],
        inputs: dict[int, Update],
    ) -> None:
        super().__init__(server, clients, federation.codec)
        self.federation = federation
        self.inputs = inputs
        self.wire: list[tuple[int, int, bytes]] = []
        """Everything that was ever sent: sender, recipient, bytes."""
        self.dead: set[int] = set()
        self.results: list[Aggregate | RoundAborted] = []
        self.aborted: dict[int, str] = {}
        """Clients that were told that the round is over for them."""
        self.tamper: Tamper = lambda _sender, _recipient, message: [message]
        """What the network does to a message; returns what arrives."""
        self.waiting: set[int] = set()
        """Clients whose training is under way; only used if `train_at_once` is false."""
        self.train_at_once = True

    def start(self) -> Network:
        self.call(SERVER, self.server.start)
        return self

    @property
    def queue(self) -> list[Packet]:
        """What is on its way, the next one first."""
        return [*self.up, *self.down]

    def carry(self, packet: Packet) -> Iterable[Packet]:
        sender, to, data, _ = packet
        parts = parts_of(self.codec.decode(data))
        for message in [whole(p) for part in parts for p in self.tamper(sender, to, part)]:
            data = self.codec.encode(message)
            self.wire.append((sender, to, data))
            yield Packet(sender, to, data, type(message))

    def output(self, party: int, output: object) -> None:
        match output:
            case NeedInput():
                self.waiting.add(party)
                if self.train_at_once:
                    self.train(party)
            case RoundAborted(reason) if party != SERVER:
                self.aborted[party] = reason
            case Aggregate() | RoundAborted():
                self.results.append(output)

    def train(self, client: int) -> None:
        self.waiting.discard(client)
        if client not in self.dead:
            self.call(client, partial(self.clients[client].set_input, self.inputs[client]))

    def deliver(self, packet: Packet) -> None:
        if packet.recipient not in self.dead:
            super().deliver(packet)

    def run(self, until: Callable[[], bool] = lambda: False) -> Network:
        """Deliver until nothing is under way any more, or `until` holds."""
        while not until() and self.step():
            pass
        return self

    def finish(self) -> Network:
        """Run to the end; a deadline fires whenever nothing moves."""
        for _ in range(6):
            self.run()
            if self.results:
                break
            self.call(SERVER, self.server.proceed)
        return self.run()

    @property
    def result(self) -> Aggregate | RoundAborted:
        assert len(self.results) == 1, f"a round has one result, not {self.results}"
        return self.results[0]

    def assert_exact(self, included: Iterable[int]) -> None:
        """The round ended with the exact sum over these clients."""
        result = self.result
        assert isinstance(result, Aggregate), result
        expected = tuple(sorted(included))
        assert result.included == expected
        total = self.federation.exact_sum(self.inputs[client] for client in expected)
        np.testing.assert_array_equal(result.total, total)

    def assert_aborted(self) -> str:
        """The round ended without a result, and for a stated reason."""
        result = self.result
        assert isinstance(result, RoundAborted)
        assert result.reason
        return result.reason

    def messages(self, kind: type, to: int | None = None) -> list[Any]:
        """All messages of this type that were sent (to this recipient)."""
        decoded = (
            self.federation.codec.decode(data)
            for _, recipient, data in self.wire
            if to is None or recipient == to
        )
        parts = (part for message in decoded for part in parts_of(message))
        return [part for part in parts if isinstance(part, kind)]
