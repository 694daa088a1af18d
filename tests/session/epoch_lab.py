"""The asynchronous mode without a socket, a loop or a clock: see `session_lab`.

Every update belongs to one client and one version, so what a buffer must hold is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from session_lab import DIMENSION, SESSION, Laboratory

from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import StalenessTable
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import LedgerChanged, Promised
from lightsecagg.protocol.jobs import Upload, UploadInMemory
from lightsecagg.protocol.journal_facts import (
    SumAnnounced,
    SumEnded,
    decode_facts,
    encode_fact,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import SealedShare, SumRequest, Tag
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings, version_hash
from lightsecagg.session.epoch import EpochInProgress
from lightsecagg.session.epoch_client import EpochClientSession
from lightsecagg.session.epoch_server import EpochServerSession
from lightsecagg.session.interface import (
    Announcement,
    AnyRecord,
    Applied,
    ApplyBuffer,
    Effect,
    Renew,
    RoundAbandoned,
    RoundOpened,
    Spoilt,
    Stored,
    StoreFailed,
    Trained,
)
from lightsecagg.session.past import Past, Unfinished
from lightsecagg.session.plan import Flushing

BUFFERING = Buffering(StalenessTable((1,) * 6, 1), max_updates=4)


class Killed(Exception):  # noqa: N818 - not an error
    """kill -9 of the server, between two of its instructions."""


class EpochDisk:
    """What a server's driver has made durable; outlives the server."""

    def __init__(self) -> None:
        self.opened: dict[int, Settings] = {}
        self.over: dict[int, str] = {}
        self.facts: list[bytes] = []
        self.uploads: dict[tuple[int, int, int], UploadInMemory] = {}
        self.shares: dict[tuple[int, int], tuple[SealedShare, ...]] = {}
        self.keeps_shares = True
        """Or it is naive, and takes what was sent for what has arrived."""
        self.refuses: Callable[[AnyRecord], bool] = lambda record: False
        """Which records find it full."""
        self.versions: dict[tuple[int, int, int], int] = {}
        """Of every upload that was ever stored."""
        self.gone: dict[tuple[int, int, int], int] = {}
        """Those that were deleted in the middle of their epoch -> at which time."""
        self.failed: set[tuple[int, int, int]] = set()
        """Those whose buffer was announced, and answered by too few."""
        self.left: dict[tuple[int, int, int], str] = {}
        """Those that were in no sum when their epoch ended -> why it did."""
        self.version = self.completed = 0
        self.model = np.zeros(DIMENSION, dtype=np.float32)
        self.hashes = {0: version_hash(self.model.tobytes(), 0)}

    def store(self, number: int, record: AnyRecord) -> Upload | None:
        match record:
            case RoundOpened(settings):
                self.opened[number] = settings
            case RoundAbandoned(reason):
                self.left |= dict.fromkeys(self.uploads, reason)
                self.over[number], self.facts, self.uploads = reason, [], {}
                self.shares = {}
            case Promised():
                return self.change(number, record)
            case _:
                raise AssertionError(record)
        return None

    def change(self, number: int, record: Promised) -> Upload | None:
        self.facts += [encode_fact(fact) for fact in record.facts]
        stored = None
        if record.upload is not None:
            tag = record.upload.tag
            stored = UploadInMemory(record.upload.vector.copy())
            self.uploads[number, tag.owner, tag.serial] = stored
            self.versions[number, tag.owner, tag.serial] = tag.version
        past = {(number, owner, serial) for owner, serial in record.past}
        past = set(self.uploads) if record.is_over else past & set(self.uploads)
        self.gone |= dict.fromkeys(past, self.version)
        self.uploads = {key: upload for key, upload in self.uploads.items() if key not in past}
        for share in record.shares if self.keeps_shares else ():
            mask = (share.owner, share.serial)
            self.shares[mask] = (*self.shares.get(mask, ()), share)
        for mask in record.past:
            self.shares.pop(mask, None)
        if record.is_over:
            self.facts, self.shares = [], {}
        return stored

    @property
    def announcement(self) -> Announcement:
        return Announcement(self.model.tobytes())

    def unfinished(self, lab: EpochLaboratory) -> Unfinished | None:
        left = [number for number in self.opened if number not in self.over]
        if not left:
            return None
        (number,) = left

        def recall(tag: Tag) -> Upload:
            return self.uploads[number, tag.owner, tag.serial]

        def recall_shares(owner: int, serial: int) -> tuple[SealedShare, ...]:
            return self.shares.get((owner, serial), ())

        settings = self.opened[number]
        return Unfinished(settings, self.facts, recall, recall_shares, lab.allow_list)


class EpochLaboratory(Laboratory):
    """One server, its clients, and what is between them."""

    disk: EpochDisk  # type: ignore[assignment]
    server: EpochServerSession
    clients: dict[int, EpochClientSession]  # type: ignore[assignment]

    def __init__(
        self,
        buffering: Buffering = BUFFERING,
        flushing: Flushing | None = None,
        threat_model: ThreatModel = ThreatModel.MALICIOUS_SERVER,
        **options: Any,
    ) -> None:
        self.buffering, self.threat_model = buffering, threat_model
        self.flushing = flushing or Flushing(flush_after=60.0, reports=10.0, renew=2)
        self.made = False
        self.sums: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        """Version before, owners and staleness of every buffer that was applied."""
        self.renewals: list[int] = []
        self.spoils = False
        self.kill_at: int | None = None
        """After so many more durable changes the server is killed."""
        super().__init__(**options)

    def start(self) -> None:
        if not self.made:
            self.made = True
            self.disk = EpochDisk()
            parameters = replace(self.settings.parameters, threat_model=self.threat_model)
            quantizer = Quantizer(DEFAULT_FIELD, 1.0, self.buffering.max_updates)
            self.settings = replace(
                self.settings,
                parameters=parameters,
                quantizer=quantizer,
                buffering=self.buffering,
            )
        left = self.disk.unfinished(self)
        self.server = EpochServerSession(
            self.settings,
            self.plan,
            self.allow_list,
            self.disk.announcement,
            lambda ready, number, first: sorted(ready)[: self.settings.parameters.clients],
            Past(1 + max(self.disk.opened, default=0), self.disk.completed),
            flushing=self.flushing,
            version=self.disk.version,
            models=self.disk.hashes,
            unfinished=left,
        )
        self.finished = None
        self.do(2**64 - 1, self.server.start(self.now))

    def policy(self, **changes: Any) -> Policy:
        return replace(
            Policy(
                self.allow_list,
                SESSION,
                1,
                self.threat_model,
                bound=1.0,
                buffering=self.buffering,
            ),
            **changes,
        )

    def client(self, client: int) -> EpochClientSession:
        ledger = Ledger.from_bytes(self.ledgers[client])
        return EpochClientSession(
            client, self.identities[client], self.policy(), ledger, patience=600.0
        )

    def do(self, party: int, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case ApplyBuffer():
                    self.apply_buffer(effect)
                case Renew():
                    self.renew(effect)
                case _:
                    super().do(party, [effect])

    def _store(self, party: int, number: int, record: AnyRecord) -> bool:
        if isinstance(record, LedgerChanged):
            return super()._store(party, number, record)
        if self.disk.refuses(record):
            self.tell(StoreFailed(record, "the disk is full"))
            return False
        stored = self.disk.store(number, record)
        self.note_change()
        self.tell(Stored(record, stored))
        return True

    def note_change(self) -> None:
        """Something is durable now; the server may not live to tell."""
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at == 0:
                raise Killed

    def step(self) -> bool:
        try:
            return super().step()
        except Killed:
            self.crash()
            self.start()
            self.connect()
            return True

    def apply_buffer(self, effect: ApplyBuffer) -> None:
        aggregate = effect.aggregate
        if self.spoils:
            self.spoils = False
            self.tell(Spoilt("beyond the bound"))
            return
        mean = effect.settings.buffer_average(aggregate.total, aggregate.weights)
        versions = [aggregate.time - tau for tau in aggregate.staleness]
        vectors = [
            self.update(owner, version).vector
            for owner, version in zip(aggregate.owners, versions, strict=True)
        ]
        expected = np.average(vectors, axis=0, weights=aggregate.weights)
        np.testing.assert_allclose(mean, expected, atol=1 / effect.settings.quantizer.scale)
        self.sums.append((aggregate.time, aggregate.owners, aggregate.staleness))
        self.disk.completed += 1
        self.new_model(aggregate.time + 1, self.disk.model + mean.astype(np.float32))
        self.disk.change(effect.settings.round, effect.change)
        self.note_change()
        self.tell(Applied(self.disk.announcement))

    def renew(self, effect: Renew) -> None:
        flight: SumRequest | None = None
        for fact in decode_facts(self.disk.facts)[1] if self.disk.facts else ():
            match fact:
                case SumAnnounced(request):
                    flight = request
                case SumEnded():
                    flight = None
        for tag in () if flight is None else flight.tags:
            self.disk.failed.add((effect.epoch, tag.owner, tag.serial))
        self.renewals.append(effect.version)
        model = self.disk.model.copy()
        model[0] = np.nextafter(model[0], np.float32(np.inf))
        self.new_model(effect.version, model)
        self.disk.change(effect.epoch, effect.change)
        self.tell(Applied(self.disk.announcement))

    def new_model(self, version: int, model: np.ndarray[Any, Any]) -> None:
        assert version == self.disk.version + 1, "no version is skipped or made twice"
        self.disk.version, self.disk.model = version, model
        self.disk.hashes[version] = version_hash(model.tobytes(), version)

    # -- what there is at the server -----------------------------------------------------------

    @property
    def epoch(self) -> EpochInProgress:
        assert self.server._round is not None
        return self.server._round

    @property
    def party(self) -> Server:
        return self.epoch._party

    @property
    def promised(self) -> tuple[set[tuple[int, int]], SumRequest | None]:
        """The uploads that are not past, and the buffer in flight."""
        flight = self.party.in_flight.recovery
        needed = {(mask.owner, mask.serial) for mask in self.party._needed()}
        return needed, None if flight is None else flight.request

    @property
    def summed(self) -> list[tuple[int, int]]:
        """Owner and version of what is in a sum."""
        return [
            (owner, time - tau)
            for time, owners, staleness in self.sums
            for owner, tau in zip(owners, staleness, strict=True)
        ]

    @property
    def dropped(self) -> list[tuple[int, int]]:
        """Owner and version of what was acknowledged and is lost, though it was not too stale."""
        versions, summed = self.disk.versions, set(self.summed)
        return [
            (key[1], versions[key])
            for key, time in self.disk.gone.items()
            if (key[1], versions[key]) not in summed
            and key not in self.disk.failed
            and time - versions[key] <= self.buffering.table.max_staleness
        ]

    @property
    def wasted(self) -> list[tuple[int, int]]:
        """Of these, what had the company that its model needs (S56)."""
        crowd = self.buffering.per_model(self.settings.parameters)
        stored = {(key[1], version) for key, version in self.disk.versions.items()}
        left = Counter(version for _, version in stored - set(self.summed))
        return [(owner, version) for owner, version in self.dropped if left[version] >= crowd]

    @property
    def left_behind(self) -> list[tuple[int, int]]:
        """Owner and version of what an epoch that ended in order has left in no sum."""
        versions = self.disk.versions
        return [
            (key[1], versions[key])
            for key, reason in self.disk.left.items()
            if reason == "others are to join"
        ]

    def assert_summed_once(self) -> None:
        pairs = self.summed
        assert len(set(pairs)) == len(pairs), "an owner's update of one version was summed twice"


def finish_training(lab: EpochLaboratory, *clients: int) -> None:
    """Of these clients alone."""
    for client, train in [each for each in lab.trainings if each[0] in clients]:
        lab.trainings.remove((client, train))
        event = Trained(train.round, lab.update(client, train.round))
        lab.do(client, lab.clients[client].handle(event, lab.now))
        lab.settle()


def opened(**options: Any) -> EpochLaboratory:
    """Everybody is registered, has masks and trains from version 0."""
    lab = EpochLaboratory(**{"number": 50, "retries": 5} | options)
    lab.hold_training = True
    lab.connect()
    lab.wait(2)
    assert sorted(client for client, _ in lab.trainings) == list(range(len(lab.identities)))
    return lab
