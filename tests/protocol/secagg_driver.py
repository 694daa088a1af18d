"""Clients and a server of the baselines on a fake wire, with faults where a test wants them.

Every message is encoded and decoded on its way. Ids are neither contiguous nor in order, inputs
are unique integers, so the sum over any set of clients is known exactly and a client that is left
out or counted twice shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from bundles import parts_of, whole
from disk import Disk
from links import stored

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.local import Packet, Wire
from lightsecagg.errors import DecodeError
from lightsecagg.field.prime import DEFAULT_FIELD, Elements, PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    NeedInput,
    Phase,
    RoundAborted,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    Advertise,
    AggregatedShare,
    Consent,
    MaskedUpload,
    Message,
    SealedShare,
    ShareBundle,
    UnmaskingShares,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec

SESSION = bytes(range(32))
DIMENSION = 23
MAX_SAMPLES = 5

PHASE_OF = {
    Advertise: Phase.ADVERTISE,
    ShareBundle: Phase.SHARE,
    MaskedUpload: Phase.UPLOAD,
    Consent: Phase.AGREE,
    UnmaskingShares: Phase.RECOVER,
    AggregatedShare: Phase.RECOVER,
}


@dataclass(frozen=True)
class Fault:
    """These clients vanish in this phase: before, during or after sending."""

    phase: Phase
    moment: str
    clients: frozenset[int] = frozenset()


@dataclass
class Federation(Wire):
    """One round. Replace `clients[i]` or set `tamper` before `run` to misbehave."""

    protocol: str = "secagg"
    N: int = 8
    T: int = 2
    D: int = 2
    t: int = 0
    """Threshold; for SecAgg 0 stands for N - D."""
    k: int = 0
    malicious: bool = False
    number_field: PrimeField = DEFAULT_FIELD
    """Of the shares of secrets."""
    fault: Fault | None = None
    announce_drops: bool = True
    """Whether the server is told who is gone, or has to wait for its deadline."""
    round_number: int = 1
    client_class: type[Client] = Client
    disk: Disk | None = None
    """Of a durable server."""
    tamper: Callable[[int, int, Message], Message | None] | None = None
    """(sender, recipient, message) -> what arrives instead; None for nothing."""
    log: list[tuple[int, int, Message]] = field(default_factory=list)
    """Everything that went over the wire."""

    def __post_init__(self) -> None:
        self.ids = [(37 * i + 11) % 101 for i in range(self.N)]
        self.identities = {client: IdentityKey.generate() for client in self.ids}
        self.allow_list = AllowList({c: key.public for c, key in self.identities.items()})
        self.settings = self.make_settings()
        server = Server(self.settings, self.allow_list, self.ids)
        clients = {
            client: self.client_class(
                client, self.identities[client], self.policy(), Ledger.volatile()
            )
            for client in self.ids
        }
        Wire.__init__(self, server, clients, Codec(self.settings.group))
        self.gone: set[int] = set()
        self.result: Aggregate | RoundAborted | None = None

    def make_settings(self, **changes: Any) -> Settings:
        sparse = self.protocol == "secagg+"
        parameters = Parameters(
            clients=self.N,
            privacy=self.T,
            dropouts=self.D,
            survivors=0 if sparse else self.t,
            threat_model=ThreatModel.MALICIOUS_SERVER
            if self.malicious
            else ThreatModel.HONEST_BUT_CURIOUS,
            modulus=self.number_field.modulus,
        )
        quantizer = Quantizer(
            traits_of(changes.get("protocol", self.protocol)).group(parameters),
            1000.0,
            self.N,
            MAX_SAMPLES,
            weighted=True,
            scale=1.0,
        )
        options: dict[str, Any] = {
            "protocol": self.protocol,
            "parameters": parameters,
            "quantizer": quantizer,
            "dimension": DIMENSION,
            "session": SESSION,
            "round": self.round_number,
            "allow_list": self.allow_list.digest,
            "neighbours": self.k,
            "threshold": self.t if sparse else 0,
        }
        return Settings(**{**options, **changes})

    def policy(self, **changes: Any) -> Policy:
        options: dict[str, Any] = {
            "allow_list": self.allow_list,
            "session": SESSION,
            "privacy": self.T,
            "threat_model": self.settings.parameters.threat_model,
            "protocols": (self.protocol,),
        }
        return Policy(**{**options, **changes})

    def update(self, client: int) -> Update:
        rng = np.random.default_rng(client)
        vector = rng.integers(-1000, 1001, DIMENSION).astype(np.float32)
        return Update(vector, samples=client % MAX_SAMPLES + 1)

    def quantised(self, client: int) -> Elements:
        """x_i in the group: inputs are integers and the scale is 1, so rounding is exact."""
        update = self.update(client)
        integers = [int(value) * update.samples for value in update.vector]
        return self.settings.group.vector([*integers, update.samples])

    def exact_sum(self, clients: Collection[int]) -> Elements:
        return self.settings.group.sum(self.quantised(client) for client in clients)

    # -- running -----------------------------------------------------------------------------

    def run(self) -> Aggregate | RoundAborted:
        """The server's result; every deadline fires once the wire is silent."""
        self.call(SERVER, self.server.start)
        self.settle()
        while self.server.phase is not Phase.DONE:
            self.call(SERVER, self.server.proceed)
            self.settle()
        assert self.result is not None
        return self.result

    def output(self, party: int, output: object) -> None:
        match output:
            case NeedInput():
                self.call(party, partial(self.clients[party].set_input, self.update(party)))
            case Aggregate() | RoundAborted() if party == SERVER:
                self.result = output

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """A durable server's uploads are stored on the spot."""
        kept = stored(self.server, outputs, self.disk) if party == SERVER else outputs
        return super().compute(party, kept)

    def carry(self, packet: Packet) -> Iterable[Packet]:
        """Every share by itself, so that it can be lost by itself."""
        for part in parts_of(self.codec.decode(packet.data)):
            yield packet._replace(data=self.codec.encode(whole(part)))

    def deliver(self, packet: Packet) -> None:
        sender, to, data, kind = packet
        if not self.gone.isdisjoint((sender, to)):
            return
        fault = self.fault
        hit = fault is not None and sender in fault.clients and PHASE_OF.get(kind) is fault.phase
        moment = fault.moment if hit and fault is not None else "never"
        if moment == "before" or (moment == "during" and self.is_cut(packet)):
            self.vanish(sender)
            return
        (message,) = parts_of(self.codec.decode(data))
        if self.tamper is not None and message is not None:
            message = self.tamper(sender, to, message)
        if message is None:
            return
        self.log.append((sender, to, message))
        super().deliver(packet._replace(data=self.codec.encode(whole(message))))
        if moment == "after" and self.is_last(sender):
            self.vanish(sender)

    def is_cut(self, packet: Packet) -> bool:
        """Half of a client's shares arrive; of a single message only the first half does."""
        if packet.kind is ShareBundle:
            return 2 * self.shares_of(packet.sender) >= self.settings.degree(self.N)
        with pytest.raises(DecodeError):
            self.codec.decode(packet.data[: len(packet.data) // 2])
        return True

    def is_last(self, sender: int) -> bool:
        assert self.fault is not None
        if self.fault.phase is not Phase.SHARE:
            return True
        members = len(self.server.members)
        return self.shares_of(sender) == self.settings.degree(members)

    def shares_of(self, sender: int) -> int:
        return sum(c == sender and isinstance(m, SealedShare) for c, _, m in self.log)

    def vanish(self, client: int) -> None:
        self.gone.add(client)
        if self.announce_drops:
            self.call(SERVER, partial(self.server.drop, client))

    # -- looking -----------------------------------------------------------------------------

    def sent(self, kind: type, sender: int | None = None) -> list[Any]:
        """The messages of one type that were delivered, in order."""
        return [
            m for c, _, m in self.log if isinstance(m, kind) and (sender is None or c == sender)
        ]

    def advance(self, until: Phase) -> None:
        """Run until the server collects the messages of phase `until`."""
        self.call(SERVER, self.server.start)
        while self.server.phase is not until and self.step():
            pass
