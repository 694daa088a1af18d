"""An asynchronous federation on a fake wire, whose links the test delivers as it likes.

Inputs are whole numbers and c_l is 1, so quantisation is exact: the sum that a buffer must have is
known without knowing any coin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from bundles import Part, whole
from disk import Disk
from links import Link, Links

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import DecodeError, RemoteProtocolError
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.staleness import StalenessTable, polynomial
from lightsecagg.params import DEFAULT_MODULUS, Decoding, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.client import Client, Registered
from lightsecagg.protocol.interface import (
    SERVER,
    BufferAggregate,
    BufferFailed,
    NeedInput,
    Send,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Message,
    SumRequest,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg.protocol.wire import Codec

HONEST, MALICIOUS = ThreatModel.HONEST_BUT_CURIOUS, ThreatModel.MALICIOUS_SERVER
SESSION = bytes(range(32))


def model_of(version: int) -> bytes:
    return hash_model(b"model %d" % version)


def change(party: Client, **fields: Any) -> None:
    """Give a contributor another memory than it has."""
    assert isinstance(party.state, Registered)
    assert party.state.contributor is not None
    ready = msgspec.structs.replace(party.state.contributor, **fields)
    party.state = msgspec.structs.replace(party.state, contributor=ready)


class AsyncFederation(Links):
    """N clients and their server; nothing moves until the test delivers it."""

    server: Server
    clients: dict[int, Client]

    def __init__(
        self,
        clients: int = 6,
        privacy: int = 1,
        dropouts: int = 1,
        survivors: int = 0,
        buffer_size: int = 4,
        threat_model: ThreatModel = HONEST,
        share_mode: ShareMode = ShareMode.SEEDED,
        modulus: int = DEFAULT_MODULUS,
        dimension: int = 11,
        max_attempts: int = 1000,
        publish: bool = True,
        durable: bool = False,
        protocol: str = "lightsecagg",
        scale: float = 1.0,
        decoding: Decoding | None = None,
        policy: Mapping[str, Any] = MappingProxyType({"scale": 0.0}),
        entropy: Callable[[str], Entropy] = lambda name: system_entropy,
        **buffering: Any,
    ) -> None:
        """Not strict, and with clients that accept every c_l, unless told otherwise.

        * `durable`: whether the server asks for its promises to be stored; `disk` has them.
        * `publish`: whether the server names the model of each version, as it should.
        * `entropy`: party's name -> where it draws from; "keys", "server", "client 0", ...
        """
        table = StalenessTable.from_function(polynomial(1.0), 64, 5)
        self.buffering = Buffering(
            **{"table": table, "max_updates": buffer_size, "share_lifetime": 12, "strict": False}
            | buffering
        )
        self.parameters = Parameters(
            clients,
            privacy,
            dropouts,
            survivors,
            threat_model=threat_model,
            share_mode=share_mode,
            modulus=modulus,
        )
        self.field = PrimeField(modulus)
        quantizer = make_quantizer(
            self.parameters,
            dimension,
            bound=1000.0,
            scale=scale,
            buffering=self.buffering,
            decoding=decoding,
        )
        keys = entropy("keys")
        self.keys = {client: IdentityKey(keys(32)) for client in range(clients)}
        self.allow_list = AllowList({client: key.public for client, key in self.keys.items()})
        self.settings = Settings(
            protocol,
            self.parameters,
            quantizer,
            dimension,
            SESSION,
            1,
            self.allow_list.digest,
            buffering=self.buffering,
        )
        self.policy = Policy(
            self.allow_list,
            SESSION,
            privacy,
            threat_model,
            protocols=(protocol,),
            buffering=self.buffering,
            max_attempts=max_attempts,
            share_mode=share_mode if share_mode is ShareMode.SHORT_KEY else None,
            **policy,
        )
        server = Server(
            self.settings,
            self.allow_list,
            buffer_size=buffer_size,
            entropy=entropy("server"),
            durable=durable,
        )
        self.disk = Disk() if durable else None
        self.publishes = publish
        sources = self.sources = {client: entropy(f"client {client}") for client in self.keys}
        clients = {
            client: Client(
                client, key, self.policy, Ledger.volatile(sources[client]), sources[client]
            )
            for client, key in self.keys.items()
        }
        super().__init__(server, clients, Codec(self.field))
        self._publish(0)
        self.away: set[int] = set()
        self.ready: set[int] = set()
        self.results: list[BufferAggregate] = []
        self.failures: list[BufferFailed] = []
        self.announced: dict[int, SumRequest] = {}
        self.updates: dict[tuple[int, int], Elements] = {}
        self.refusals: list[str] = []
        self._unique = np.random.default_rng(5)

    def open(self, masks: int = 2) -> AsyncFederation:
        """Register everybody and share the first masks."""
        self.call(SERVER, self.server.start)
        self.settle()
        for client, party in self.clients.items():
            self.call(client, partial(party.restock, masks))
        self.settle()
        return self

    # -- moving messages ---------------------------------------------------------------------

    def carry(self, packet: Packet) -> Iterable[Packet]:
        if packet.kind is SumRequest:
            buffer = self.codec.decode(packet.data)
            assert isinstance(buffer, SumRequest)
            self.announced[buffer.time] = buffer
        return (packet,)

    def output(self, party: int, output: object) -> None:
        match output:
            case NeedInput():
                self.ready.add(party)
            case BufferAggregate():
                self.results.append(output)
                self._publish(output.time + 1)
            case BufferFailed():
                self.failures.append(output)
                self._publish(output.time + 1)

    def _publish(self, version: int) -> None:
        if self.publishes:
            self.server.intake.publish(model_of(version), version)

    def skip_to(self, time: int) -> None:
        """As if buffers had gone by until then."""
        self.server.intake.time = time
        for version in range(1, time + 1):
            self._publish(version)

    def refused(self, packet: Packet, error: DecodeError | RemoteProtocolError) -> None:
        self.refusals.append(str(error))

    def step_up(self, client: int) -> None:
        """Deliver the oldest message of a client."""
        self.deliver(self.take(client, SERVER))

    def step_down(self, client: int) -> None:
        """Deliver the oldest message for a client."""
        self.deliver(self.take(SERVER, client))

    def busy(self) -> list[Link]:
        """What is meant for a client that is away waits for it."""
        return [link for link in super().busy() if link[1] not in self.away]

    def settle(self) -> None:
        """Deliver everything, one packet per link in turn; then shares that wait for others."""
        while (links := self.busy()) or self.server.intake.has_shares_to_relay:
            for link in links:
                self.deliver(self.take(*link))
            if not links:
                self.call(SERVER, self.server.intake.relay)

    # -- what happens to clients -------------------------------------------------------------

    def unique_vector(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return self._unique.integers(-1000, 1001, self.settings.dimension).astype(np.float64)

    def make_upload(self, client: int, version: int, model: bytes | None = None) -> MaskedUpload:
        """Mask a fresh update; the message is not sent."""
        vector = self.unique_vector()
        outputs = self.clients[client].set_input(
            Update(vector), version, model_of(version) if model is None else model
        )
        message = outputs[-1].message  # type: ignore[union-attr]
        assert isinstance(message, MaskedUpload)
        signed = vector.astype(np.int64) % self.field.modulus
        self.updates[client, message.tag.serial] = signed.astype(np.uint32)
        return message

    def upload(self, client: int, version: int = 0) -> Tag:
        """Send a fresh update; not delivered yet."""
        message = self.make_upload(client, version)
        self.send(client, [Send(SERVER, message)])
        return message.tag

    def leave(self, client: int) -> None:
        """The connection breaks: what was on its way is lost; the client's driver notices."""
        self.away.add(client)
        for packet in (*self.lose(client, SERVER), *self.lose(SERVER, client)):
            match self.codec.decode(packet.data):
                case MaskedUpload(tag=tag):
                    self.clients[client].receive(SERVER, UploadDropped(tag.serial))
                case UploadDropped() as dropped:
                    self.clients[client].receive(SERVER, dropped)
        self.call(SERVER, partial(self.server.drop, client))

    def rejoin(self, client: int) -> None:
        self.away.discard(client)
        self.call(SERVER, partial(self.server.rejoin, client))

    def tell(self, client: int, part: Part) -> list[Message]:
        """What a hostile server would do: send anything; returns the client's messages."""
        decoded = self.codec.decode(self.codec.encode(whole(part)))
        outputs = self.clients[client].receive(SERVER, decoded)
        return [output.message for output in outputs if isinstance(output, Send)]

    # -- what must hold ----------------------------------------------------------------------

    def expected(self, time: int) -> Elements:
        """The weighted sum over F_q of what was announced for this buffer, in Python integers."""
        total = [0] * self.settings.dimension
        for tag in self.announced[time].tags:
            weight = self.buffering.table.weight(time - tag.version)
            update = self.updates[tag.owner, tag.serial]
            total = [
                (old + weight * int(new)) % self.field.modulus
                for old, new in zip(total, update, strict=True)
            ]
        return np.array(total, dtype=np.uint32)

    def assert_exact(self) -> None:
        times = list(self.announced)
        assert times == sorted(set(times))
        masks = [(tag.owner, tag.serial) for b in self.announced.values() for tag in b.tags]
        assert len(set(masks)) == len(masks)
        for result in self.results:
            assert np.array_equal(result.total, self.expected(result.time))
            assert result.owners == tuple(t.owner for t in self.announced[result.time].tags)
