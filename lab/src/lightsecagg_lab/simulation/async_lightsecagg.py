"""Asynchronous LightSecAgg with N parties in one process, over the bytes of a network.

Theory of operation. The parties are joined by a metered wire (`drivers.local`, `metering`), which
settles after everything that happens; if the server still waits for answers then, its deadline
fires. Clients refill their stock of masks right after they have used one, so no upload waits for
the offline phase.

Every recovered sum is compared, element for element in F_q, with the weighted sum of the quantised
updates that were announced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH
from lightsecagg.drivers.footprint import check_memory
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import Aborted, ParameterError
from lightsecagg.field.prime import Elements
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import (
    SERVER,
    BufferAggregate,
    BufferedServerParty,
    BufferFailed,
    ClientParty,
    Phase,
    RoundAborted,
    Send,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Roster,
    ShareBundle,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.quantizers import decoding_of
from lightsecagg.protocol.registry import client_party, server_party
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.simulation.async_federation import Flush
from lightsecagg_lab.simulation.metering import PHASE_OF, MeteredWire
from lightsecagg_lab.simulation.recording import allowed_error, largest_error, quantised
from lightsecagg_lab.simulation.workload import Vector


@dataclass(frozen=True, slots=True)
class AsyncConfig:
    """The parameters of an asynchronous federation."""

    parameters: Parameters
    buffering: Buffering
    quantizer: Quantizer
    dimension: int
    buffer_size: int
    """K"""
    stock: int = 2
    """How many masks each client keeps shared ahead of time."""
    protocol: str = ProtocolName.LIGHTSECAGG
    departures: float = 0.0
    """How often a client vanishes while a buffer is in flight, and comes back after it."""

    def __post_init__(self) -> None:
        if not 1 <= self.stock < self.buffering.stock:
            raise ParameterError(
                f"stock = {self.stock} must be at least 1 and below the {self.buffering.stock} "
                "masks that peers keep per owner, because uploads that wait count as well"
            )
        if not 0 <= self.departures < 1:
            raise ParameterError(f"departures = {self.departures} must lie in [0, 1)")


class ProtectedFederation(MeteredWire):
    """Asynchronous LightSecAgg, every party and every byte."""

    server: BufferedServerParty
    clients: dict[int, ClientParty]

    def __init__(
        self,
        config: AsyncConfig,
        rounding: np.random.Generator,
        on_stocked: Callable[[], None] | None = None,
    ) -> None:
        """Registers the clients and shares their first masks.

        * `on_stocked`: called for every client that has shared its first masks.
        """
        self.config = config
        parameters = config.parameters
        keys = [IdentityKey.generate() for _ in range(parameters.clients)]
        allow_list = AllowList({client: key.public for client, key in enumerate(keys)})
        session = draw(system_entropy, HASH_LENGTH)
        self.settings = Settings(
            protocol=config.protocol,
            parameters=parameters,
            quantizer=config.quantizer,
            dimension=config.dimension,
            session=session,
            round=0,
            allow_list=allow_list.digest,
            buffering=config.buffering,
        )
        check_memory(self.settings, masks=config.stock + 1)  # one more is in use
        server = server_party(self.settings, allow_list, buffer_size=config.buffer_size)
        policy = Policy(
            allow_list=allow_list,
            session=session,
            privacy=parameters.privacy,
            threat_model=parameters.threat_model,
            protocols=(config.protocol,),
            dimension=config.dimension,
            buffering=config.buffering,
            scale=config.quantizer.scale,
            share_mode=parameters.share_mode if self.settings.has_short_keys else None,
            max_attempts=1,
        )
        # Rounding is not secret in a simulation; given keys make a run reproducible.
        self._ledgers = [Ledger.volatile(rounding.bytes) for _ in keys]
        clients = {
            client: client_party(client, key, policy, self._ledgers[client])
            for client, key in enumerate(keys)
        }
        self._rounding = rounding
        self._away: set[int] = set()
        self._returning: list[int] = []
        self._tags: dict[int, tuple[Tag, ...]] = {}
        self._quantised: dict[tuple[int, int], Elements] = {}
        self._flushes: list[Flush] = []
        malicious = parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        phases = {
            **PHASE_OF,
            Roster: Phase.ADVERTISE,  # registration ends with it
            SumRequest: Phase.AGREE if malicious else Phase.RECOVER,
        }
        super().__init__(server, clients, Codec(self.settings.group), phases)
        self.call(SERVER, self.server.start)
        self._until_collecting()
        for client in clients:
            self._restock(client)
            if on_stocked is not None:
                on_stocked()

    @property
    def time(self) -> int:
        """t"""
        return self.server.time

    @property
    def protection(self) -> dict[str, str | bool | float]:
        """Against whom the run defends, and how; for its document."""
        parameters, buffering = self.config.parameters, self.config.buffering
        return {
            "threat_model": parameters.threat_model.value,
            "strict": buffering.together(parameters) > 1,
            "scale": self.config.quantizer.scale,
            "share_mode": parameters.share_mode.value,
        } | ({"decoding": self._decoding} if self.settings.has_short_keys else {})

    @property
    def _decoding(self) -> str:
        return decoding_of(self.config.quantizer).value

    def publish(self, model: bytes, version: int) -> None:
        """See `Federation`."""
        self.server.intake.publish(model, version)

    def ready(self, client: int) -> bool:
        """See `Federation`."""
        return bool(self.clients[client].stock or self.clients[client].room)

    def upload(self, client: int, vector: Vector, version: int, model: bytes) -> list[Flush]:
        """See `Federation`."""
        party = self.clients[client]
        if not party.stock:
            self._restock(client)
        update = Update(vector)
        with self.work(client, MaskedUpload):
            outputs = party.set_input(update, version, model)
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.message, MaskedUpload):
                tag = output.message.tag
                self._quantised[client, tag.serial] = quantised(
                    self.settings, self._ledgers[client], update, model
                )
        self.send(client, outputs)
        flushes = self._until_collecting()
        self._restock(client)
        return flushes

    def leave(self, client: int) -> list[Flush]:
        """See `Federation`."""
        self._away.add(client)
        self.call(SERVER, partial(self.server.drop, client))
        return self._until_collecting()

    def rejoin(self, client: int) -> list[Flush]:
        """See `Federation`."""
        self._away.discard(client)
        self.call(SERVER, partial(self.server.rejoin, client), ShareBundle)
        flushes = self._until_collecting()
        self._restock(client)
        return flushes

    def flush(self) -> list[Flush]:
        """See `Federation`; does nothing while fewer than T + 2 updates may be summed."""
        if self.server.summable < self.config.parameters.privacy + 2:
            return []
        self.call(SERVER, self.server.flush)
        return self._until_collecting()

    def _restock(self, client: int) -> None:
        """Share masks ahead of time, until the stock is full or peers would drop old ones."""
        party = self.clients[client]
        while client not in self._away and party.room and party.stock < self.config.stock:
            self.call(client, party.restock, ShareBundle)
            self._until_collecting()

    # -- the network -------------------------------------------------------------------------

    def _until_collecting(self) -> list[Flush]:
        """Deliver everything; fire the server's deadline if it waits for what never comes."""
        self.settle()
        while self.server.phase is not Phase.UPLOAD:
            self.call(SERVER, self.server.proceed)
            self.settle()
        flushes, self._flushes = self._flushes, []
        returning, self._returning = self._returning, []
        for client in returning:
            flushes += self.rejoin(client)
        return flushes

    def settle(self) -> None:
        """Deliver everything, shares that wait for others included."""
        super().settle()
        while self.server.intake.has_shares_to_relay:
            self.call(SERVER, self.server.intake.relay, ShareBundle)
            super().settle()

    def send(self, sender: int, outputs: Sequence[object]) -> None:
        """Send, and remember what was announced."""
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.message, SumRequest):
                self._tags[output.message.time] = output.message.tags
        super().send(sender, outputs)

    def output(self, party: int, output: object) -> None:
        """What became of a buffer."""
        match output:
            case BufferAggregate():
                self._flushes.append(self._recovered(output))
            case BufferFailed():
                self._take_expected(output.time)
                self._flushes.append(Flush(output.time, output.owners, lost=output.reason))
            case RoundAborted():
                raise Aborted(output.reason)

    def deliver(self, packet: Packet) -> None:
        """Nothing arrives at a client that is away; over an announcement it may leave."""
        client = packet.recipient
        if client in self._away:
            return
        departs = packet.kind is SumRequest and self._departs()
        if departs and self._rounding.random() < 0.5:
            self._depart(client)
            return
        super().deliver(packet)
        if departs:
            self._depart(client)

    def _departs(self) -> bool:
        return self.config.departures > 0 and self._rounding.random() < self.config.departures

    def _depart(self, client: int) -> None:
        """The client vanishes with a buffer in flight, and is back when that is over."""
        self._away.add(client)
        self._returning.append(client)
        self.call(SERVER, partial(self.server.drop, client))

    # -- the check ---------------------------------------------------------------------------

    def _take_expected(self, time: int) -> list[tuple[int, Elements]]:
        """Weight and quantised update of everything that was announced for this buffer."""
        return [
            (
                self.config.buffering.table.weight(time - tag.version),
                self._quantised.pop((tag.owner, tag.serial)),
            )
            for tag in self._tags.pop(time)
        ]

    def _recovered(self, aggregate: BufferAggregate) -> Flush:
        time = aggregate.time
        staleness = tuple(time - tag.version for tag in self._tags[time])
        weights, vectors = zip(*self._take_expected(time), strict=True)
        expected = self.settings.field.weighted_sum(list(weights), list(vectors))
        return Flush(
            time=time,
            owners=aggregate.owners,
            staleness=staleness,
            mean=self.settings.buffer_average(aggregate.total, aggregate.weights),
            exact=largest_error(self.settings, aggregate.total, expected)
            <= allowed_error(self.settings),
            responders=len(aggregate.responders),
        )
