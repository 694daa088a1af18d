"""Where a server's driver makes its promises durable; and what the server of an epoch is."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Promised
from lightsecagg.protocol.jobs import Upload, UploadInMemory
from lightsecagg.protocol.journal_facts import encode_fact
from lightsecagg.protocol.messages import SealedShare, Tag
from lightsecagg.protocol.server import Server


class Disk:
    """Facts in their order, uploads and shares by mask."""

    def __init__(self) -> None:
        self.facts: list[bytes] = []
        self.uploads: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self.shares: dict[tuple[int, int], tuple[SealedShare, ...]] = {}
        self.written = 0
        """Bytes of facts and rows; the vectors of uploads and sealed shares are not counted."""

    def store(self, record: Promised) -> Upload | None:
        facts = [encode_fact(fact) for fact in record.facts]
        self.facts += facts
        self.written += sum(map(len, facts))
        for share in record.shares:
            key = (share.owner, share.serial)
            self.shares[key] = (*self.shares.get(key, ()), share)
        stored = None
        if record.upload is not None:
            key = (record.upload.tag.owner, record.upload.tag.serial)
            assert key not in self.uploads, "stored twice"
            self.uploads[key] = record.upload.vector.copy()
            stored = UploadInMemory(self.uploads[key])
        for mask in record.past:
            self.uploads.pop(mask, None)
            self.shares.pop(mask, None)
        return stored

    def recall(self, tag: Tag) -> Upload:
        return UploadInMemory(self.uploads[tag.owner, tag.serial])

    def recall_shares(self, owner: int, serial: int) -> tuple[SealedShare, ...]:
        return self.shares[owner, serial]

    def restored(self, allow_list: AllowList, *entropy: Any) -> Server:
        return Server.restore(self.facts, allow_list, self.recall, self.recall_shares, *entropy)


def memory_of(server: Server) -> object:
    """All that decides what it does next, to be compared."""
    registered = dict(server._registration.advertised)
    if server._registration.roster is None:
        return server.phase, registered
    stock, queue, flight = server.intake.stock, server.intake.queue, server.in_flight.recovery
    flying: object = None
    if flight is not None:
        agreement = flight.agreement
        flying = (
            flight.request,
            flight.holders,
            dict(agreement.signatures),
            dict(agreement.refusals),
            sorted(flight.answers),
            flight.collected,
        )
    return (
        (server.phase, server.time, registered, server._registration.roster),
        dict(stock.relay.complete),
        {owner: (serial, sorted(begun)) for owner, (serial, begun) in stock.relay.begun.items()},
        {owner: dict(masks) for owner, masks in stock.shared.items()},
        {mask: dict(reports) for mask, reports in stock.reports.items()},
        (sorted(stock.unawaited), dict(stock.accused)),
        (dict(queue.last_tag), {model: sorted(owners) for model, owners in queue.accepted.items()}),
        [(waiting.tag, waiting.shared) for waiting in queue.waiting],
        {
            client: sorted(missed)
            for client, missed in server.intake.mailbox.missed.items()
            if missed
        },
        [
            (s.owner, s.recipient, s.serial)
            for f in server.intake.outbox._waiting.values()
            for s in f.shares
        ],
        flying,
    )
