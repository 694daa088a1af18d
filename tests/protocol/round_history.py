"""Random histories of synchronous rounds; see `test_histories`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from disk import Disk
from history import History, Kind

from lightsecagg.drivers.local import Packet
from lightsecagg.errors import (
    LightSecAggError,
)
from lightsecagg.protocol.client import Client, Registered
from lightsecagg.protocol.client_machine import Waiting
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    Persist,
    Phase,
    Promised,
    RoundAborted,
    Update,
)
from lightsecagg.protocol.kept_shares import Answered, Signed
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Opening,
    SharesClosed,
)
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import hash_model


class Rounds(History):
    """One synchronous round after the other, some of them from the same model again."""

    clients: dict[int, Client]
    server: Server

    def __init__(self, kind: Kind, seed: int) -> None:
        self.version = 0
        self.inputs: dict[int, Update] = {}
        self.uploads: dict[tuple[int, ...], Update] = {}
        self.consents: dict[tuple[int, int], tuple[int, ...]] = {}
        """(version, client) -> the one set that it has consented to."""
        self.storing: list[Promised] = []
        self.dropped: set[int] = set()
        self.journal, self.announced = Disk(), tuple[int, ...]()
        self.last_upload: dict[int, Packet] = {}
        super().__init__(kind, seed)

    def quantizer(self, **options: Any) -> Any:
        return super().quantizer(max_samples=64, weighted=True)

    def begin(self, again: bool | None = None) -> None:
        if again is None:
            again = self.number > 0 and self.coins.random() < 0.3
        self.number += 1
        self.forget_the_wire()
        self.storing, self.dropped, self.last_upload = [], set(), {}
        self.journal, self.announced = Disk(), ()
        if not again:
            self.version += 1
            self.inputs = {c: self.new_update(k) for k, c in enumerate(self.ids)}
        model = hash_model(b"model %d" % self.version)
        self.settings = replace(self.settings, round=self.number, model=model)
        self.policy = replace(self.policy, model=model)
        self.clients = {c: self.make_client(c) for c in self.ids}
        self.server = Server(
            self.settings, self.allow_list, self.ids, self.sources[SERVER], durable=True
        )
        self.call(SERVER, self.server.start)

    def new_update(self, k: int) -> Update:
        vector = np.array([2**k, *(self.coins.randint(-1000, 1000) for _ in range(6))])
        return Update(vector.astype(np.float64), k + 1)

    def make_client(self, client: int) -> Client:
        source, identity = self.sources[client], self.identities[client]
        return Client(client, identity, self.policy, self.ledgers[client], source)

    def train(self, client: int) -> None:
        self.waiting.discard(client)
        party = self.clients[client]
        try:
            self.call(client, partial(party.set_input, self.inputs[client]))
        except LightSecAggError as error:  # the round is over for it, or the update spent
            self.check_silent(error)

    def mask_of(self, client: int, message: Any) -> tuple[int, ...]:
        self.uploads[self.number, client] = self.inputs[client]
        return (self.number, client)

    def update_of(self, upload: tuple[int, ...]) -> Update:
        return self.uploads[upload]

    def carry(self, packet: Packet) -> Iterable[Packet]:
        if packet.kind is MaskedUpload:
            self.last_upload[packet.sender] = packet
        return super().carry(packet)

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """What the server wants to be stored takes its time, too."""
        left: list[object] = []
        for output in super().compute(party, outputs):
            match output:
                case Persist(Promised(upload=None) as record):
                    self.journal.store(record)
                    self.announced = self.server.asked or self.announced
                case Persist(Promised() as record):
                    self.storing.append(record)
                case _:
                    left.append(output)
        return left

    def work_is_done(self) -> None:
        while self.storing:
            record = self.storing.pop(self.coins.randrange(len(self.storing)))
            if self.rough and self.coins.random() < 0.05:
                self.dropped.add(record.sender)
                self.call(SERVER, partial(self.server.unstored, record))
            else:
                kept = self.journal.store(record)
                self.call(SERVER, partial(self.server.stored, record, kept))
        super().work_is_done()

    def leave(self, client: int) -> None:
        super().leave(client)
        if self.coins.random() < 0.5 and self.server.phase is not Phase.DONE:
            self.dropped.add(client)
            self.call(SERVER, partial(self.server.drop, client))

    def come_back(self, client: int) -> None:
        self.away.discard(client)
        if client in self.dropped or isinstance(self.clients[client].state, Waiting):
            return
        self.call(SERVER, partial(self.server.rejoin, client))

    def deliver(self, packet: Packet) -> None:
        super().deliver(packet)
        repeats = packet.kind in (Opening, SharesClosed) and not self.was_refused
        if repeats and packet.recipient in self.last_upload:
            # A client's driver repeats what was not acknowledged.
            self._queue(SERVER).append(self.last_upload[packet.recipient])

    def the_server_crashes(self) -> None:
        if self.server.phase is not Phase.DONE:
            super().the_server_crashes()

    def crash(self) -> None:
        if not self.journal.facts:
            if self.number < self.LIMIT + 2:
                self.begin()
            return
        self.storing.clear()
        self.server = server = self.journal.restored(self.allow_list, self.sources[SERVER])
        assert server.asked == self.announced, "an announced set never changes, nor is forgotten"
        self.call(SERVER, server.resume)
        self.dropped.clear()
        for client in self.ids:
            if client in self.away:
                self.dropped.add(client)
                self.call(SERVER, partial(server.drop, client))
            else:
                self.come_back(client)

    def memory(self, party: int) -> object:
        if party != SERVER:
            return self.clients[party].snapshot()
        server = self.server
        return server.phase, server.pending, server.uploaders, server.asked, server.refusals

    def check_sums(self) -> None:
        assert len(self.results) <= 1
        assert bool(self.results) == (self.server.phase is Phase.DONE)
        for result in self.results:
            if isinstance(result, RoundAborted):
                assert result.reason
                continue
            assert result.included == self.announced
            assert len(result.included) >= self.settings.minimum
            assert not result.suspects
            assert not result.accused
            updates = [self.inputs[client] for client in result.included]
            total = [sum(u.samples * int(u.vector[k]) for u in updates) for k in range(7)]
            total.append(sum(u.samples for u in updates))
            expected = [entry % self.group.modulus for entry in total]
            assert result.total.tolist() == expected

    def check_consents(self) -> None:
        for client, party in self.clients.items():
            state = party.state.holder if isinstance(party.state, Registered) else None
            if isinstance(state, Signed | Answered):
                key, survivors = (self.version, client), state.buffer.survivors
                assert self.consents.setdefault(key, survivors) == survivors, "two sets"
        if self.server.phase is not Phase.DONE and not self.jobs and not self.storing:
            assert self.server.pending, "the server never waits for nobody"

    def finish(self) -> None:
        """Deadlines end every round; another one follows."""
        for _ in Phase:
            self.work_is_done()
            self.call(SERVER, self.server.proceed)
        self.work_is_done()
        self.check()
        assert len(self.results) == 1
        self.begin(again=False)
        self.finish_undisturbed()
        self.check()

    def finish_undisturbed(self) -> None:
        self.rough = False
        self.everything_arrives()
        self.everybody_trains()
        for _ in range(3):
            self.everything_arrives()
            self.work_is_done()
        (result,) = self.results
        assert isinstance(result, Aggregate), result
        assert result.included == tuple(sorted(self.ids))
