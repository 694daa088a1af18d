"""A federation in memory whose server is killed, and comes back from what it had stored."""

from __future__ import annotations

from functools import partial
from typing import Any

from async_driver import AsyncFederation

from lightsecagg.protocol.interface import SERVER
from lightsecagg.protocol.journal_facts import decode_facts
from lightsecagg.protocol.messages import MaskedUpload, UploadDropped


class Mortal(AsyncFederation):
    """A federation whose server is killed, with everything that is on its way."""

    def __init__(self, **options: Any) -> None:
        super().__init__(durable=True, **options)
        self.accepted: set[tuple[int, int]] = set()
        """Owner and serial of every upload that was stored."""
        self.told: set[tuple[int, int]] = set()
        """Of those whose owners were told that they wait no longer."""

    def kill(self) -> None:
        """All connections are cut; the server comes back, and then everybody else."""
        assert self.disk is not None
        lost = [p for c in self.clients for p in (*self.lose(c, SERVER), *self.lose(SERVER, c))]
        self.accepted |= set(self.disk.uploads)
        self.server = self.disk.restored(self.allow_list)
        for version in range(self.server.time + 1):
            self._publish(version)
        for packet in lost:
            match self.codec.decode(packet.data):
                case MaskedUpload(tag=tag) if not self.server.intake.is_stored(tag):
                    self.clients[tag.owner].receive(SERVER, UploadDropped(tag.serial))
                case UploadDropped() as dropped:
                    self.clients[packet.recipient].receive(SERVER, dropped)
        self.call(SERVER, self.server.resume)
        for client, party in self.clients.items():
            ready, _ = self.server.serials(client)
            party.discard(set(party.serials[0]) - set(ready))
            if client not in self.away:
                self.call(SERVER, partial(self.server.rejoin, client))

    def output(self, party: int, output: object) -> None:
        super().output(party, output)
        assert self.disk is not None
        self.accepted |= set(self.disk.uploads)

    def fate_of_uploads(self) -> None:
        """Every stored upload is in one sum, in a lost one, dropped, or waits."""
        summed = [(t.owner, t.serial) for b in self.announced.values() for t in b.tags]
        assert len(set(summed)) == len(summed)
        waiting = {(w.tag.owner, w.tag.serial) for w in self.server.intake.queue.waiting}
        _, facts = decode_facts(self.disk.facts)  # type: ignore[union-attr]
        dropped = {mask for fact in facts for mask in getattr(fact, "masks", ())}
        assert self.accepted <= {*summed, *waiting, *dropped}
