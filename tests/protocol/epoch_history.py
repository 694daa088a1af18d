"""Random histories of epochs of the asynchronous mode; see `test_histories`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from disk import Disk, memory_of
from history import SHORT, History, Kind
from links import stored

from lightsecagg.drivers.local import Packet
from lightsecagg.errors import (
    LocalProtocolError,
)
from lightsecagg.field.staleness import StalenessTable, constant, polynomial
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.client import Client, Registered
from lightsecagg.protocol.interface import (
    SERVER,
    BufferAggregate,
    BufferFailed,
    Phase,
    Update,
)
from lightsecagg.protocol.kept_shares import Answered, Signed
from lightsecagg.protocol.messages import (
    MaskedUpload,
    SumRequest,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import hash_model


class Epochs(History):
    """One epoch of the asynchronous mode after the other, each with many buffers."""

    SIZE = 4
    """K"""
    clients: dict[int, Client]
    server: Server

    def __init__(self, kind: Kind, seed: int) -> None:
        self.updates: dict[tuple[int, ...], Update] = {}
        self.announced: dict[int, SumRequest] = {}
        self.summed: dict[int, set[tuple[int, ...]]] = {}
        """Client -> the masks of all buffers that it has consented to."""
        self.consented: dict[tuple[int, int], SumRequest] = {}
        super().__init__(kind, seed)

    def buffering(self) -> Buffering:
        staleness = constant() if self.kind.share_mode is SHORT else polynomial(1.0)
        table = StalenessTable.from_function(staleness, 64, 5)
        return Buffering(table=table, max_updates=self.SIZE, share_lifetime=12, strict=False)

    def begin(self) -> None:
        self.number += 1
        self.forget_the_wire()
        self.announced, self.summed, self.consented = {}, {}, {}
        self.settings = replace(self.settings, round=self.number)
        self.clients = {c: self.make_client(c) for c in self.ids}
        self.server = Server(
            self.settings,
            self.allow_list,
            self.ids,
            self.sources[SERVER],
            buffer_size=self.SIZE,
            durable=True,
        )
        self.disk = Disk()
        self.server.intake.publish(self.model_of(0))
        self.call(SERVER, self.server.start)

    def model_of(self, version: int) -> bytes:
        return hash_model(b"epoch %d, version %d" % (self.number, version))

    def make_client(self, client: int) -> Client:
        source, identity = self.sources[client], self.identities[client]
        return Client(client, identity, self.policy, self.ledgers[client], source)

    def train(self, client: int, lag: int = -1) -> None:
        party = self.clients[client]
        if not isinstance(party.state, Registered):
            return
        if party.stock < 2 and party.room:
            self.call(client, party.restock)
        if not party.stock:
            return
        lag = self.coins.randint(0, 3) if lag < 0 else lag
        version = max(0, self.server.time - lag)
        vector = np.array([self.coins.randint(-1000, 1000) for _ in range(7)], dtype=np.float64)
        update = Update(vector)
        self.updates[self.number, client, min(party.state.contributor.stock)] = update
        self.call(client, partial(party.set_input, update, version, self.model_of(version)))

    def mask_of(self, client: int, message: Any) -> tuple[int, ...]:
        return (self.number, client, message.tag.serial)

    def update_of(self, upload: tuple[int, ...]) -> Update:
        return self.updates[upload]

    def carry(self, packet: Packet) -> Iterable[Packet]:
        if packet.kind is SumRequest:
            request = self.codec.decode(packet.data)
            assert isinstance(request, SumRequest)
            known = self.announced.setdefault(request.time, request)
            assert known == request, "an announced buffer never changes"
        return super().carry(packet)

    def output(self, party: int, output: object) -> None:
        super().output(party, output)
        if isinstance(output, BufferAggregate | BufferFailed):
            self.server.intake.publish(self.model_of(output.time + 1), output.time + 1)

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """What the server promises is stored on the spot."""
        kept = stored(self.server, outputs, self.disk) if party == SERVER else outputs
        return super().compute(party, kept)

    def everything_arrives(self) -> None:
        """Shares that wait for others leave at a moment of the driver's choice."""
        super().everything_arrives()
        if self.coins.random() < 0.7 and self.server.intake.has_shares_to_relay:
            self.call(SERVER, self.server.intake.relay)
            super().everything_arrives()

    def leave(self, client: int) -> None:
        super().leave(client)
        self.call(SERVER, partial(self.server.drop, client))

    def disconnect(self, client: int) -> list[Packet]:
        """A client's driver knows which uploads were not acknowledged."""
        lost = super().disconnect(client)
        for packet in lost:
            match self.codec.decode(packet.data):
                case MaskedUpload(tag=tag):
                    self.clients[client].receive(SERVER, UploadDropped(tag.serial))
                case UploadDropped() as dropped:
                    self.clients[client].receive(SERVER, dropped)
        return lost

    def come_back(self, client: int) -> None:
        self.away.discard(client)
        self.call(SERVER, partial(self.server.rejoin, client))

    def crash(self) -> None:
        if self.server._registration.roster is None or self.disk is None:
            return  # nothing was promised: the driver drops such an epoch
        before, ready = self.server, {c: self.server.serials(c)[0] for c in self.ids}
        self.server = self.disk.restored(self.allow_list, self.sources[SERVER])
        assert self.server.time == before.time
        assert self.server._needed() == before._needed()
        assert {c: self.server.serials(c)[0] for c in self.ids} == ready
        for version in range(self.server.time + 1):
            self.server.intake.publish(self.model_of(version), version)
        self.call(SERVER, self.server.resume)
        for client in self.ids:
            if client not in self.away:
                self.come_back(client)

    def the_deadline_fires(self) -> None:
        if self.server.phase is Phase.UPLOAD and self.coins.random() < 0.5:
            with suppress(LocalProtocolError):  # too few may share a buffer
                self.call(SERVER, self.server.flush)
        else:
            super().the_deadline_fires()

    def it_begins_anew(self) -> None:
        if self.coins.random() < 0.5 or self.server.phase is Phase.DONE:
            super().it_begins_anew()

    def memory(self, party: int) -> object:
        return memory_of(self.server) if party == SERVER else self.clients[party].snapshot()

    def check_sums(self) -> None:
        masks = [(t.owner, t.serial) for b in self.announced.values() for t in b.tags]
        assert len(set(masks)) == len(masks), "a mask in two buffers"
        for result in self.results:
            if not isinstance(result, BufferAggregate):
                assert result.reason
                continue
            tags = self.announced[result.time].tags
            assert result.owners == tuple(tag.owner for tag in tags)
            assert len(result.owners) >= self.parameters.privacy + 2
            assert not result.suspects
            assert not result.accused
            table = self.settings.buffering.table  # type: ignore[union-attr]
            terms = [
                (table.weight(result.time - tag.version), self.updates[self.number, *key(tag)])
                for tag in tags
            ]
            expected = [
                sum(weight * int(update.vector[k]) for weight, update in terms) % self.group.modulus
                for k in range(7)
            ]
            assert result.total.tolist() == expected

    def check_consents(self) -> None:
        for client, party in self.clients.items():
            state = party.state.holder if isinstance(party.state, Registered) else None
            if not isinstance(state, Signed | Answered):
                continue
            if self.consented.setdefault((client, state.time), state.buffer) != state.buffer:
                raise AssertionError("two buffers of one time")
            done = self.summed.setdefault(client, set())
            mine = {(state.time, *key(tag)) for tag in state.buffer.tags}
            others = {mask[1:] for mask in done - mine}
            assert others.isdisjoint(mask[1:] for mask in mine), "a mask in two answers"
            done |= mine

    def finish(self) -> None:
        """Where links kept their promise and clients their memory, this epoch goes on."""
        if not self.rough and len(self.fresh()) >= max(self.SIZE, self.parameters.quorum):
            self.finish_undisturbed()
            self.check()
        super().finish()

    def fresh(self) -> list[int]:
        """Clients that are registered and have uploaded nothing from the newest model."""
        if self.server._registration.roster is None:
            return []
        used = self.server.intake.queue.accepted.get(self.model_of(self.server.time), ())
        states = {c: party.state for c, party in self.clients.items()}
        able = [c for c, state in states.items() if isinstance(state, Registered)]
        return [client for client in able if client not in used]

    def finish_undisturbed(self) -> None:
        self.rough = False
        for client in sorted(self.away):
            self.come_back(client)
        before = len(self.results)
        self.settle_all()
        for client in self.fresh():
            self.train(client, lag=0)
            self.settle_all()
        for _ in Phase:
            if any(isinstance(r, BufferAggregate) for r in self.results[before:]):
                return
            self.call(SERVER, self.server.proceed)
            self.settle_all()
        raise AssertionError("no buffer is recovered any more")

    def settle_all(self) -> None:
        while self.busy() or self.jobs or self.server.intake.has_shares_to_relay:
            self.everything_arrives()
            self.work_is_done()


def key(tag: Tag) -> tuple[int, int]:
    return tag.owner, tag.serial
