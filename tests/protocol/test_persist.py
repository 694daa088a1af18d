"""What a party has to remember is named before anything leaves that depends on it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import links
import msgspec
import pytest
from async_driver import AsyncFederation, model_of
from driver import HONEST, MALICIOUS, Federation, Network

from lightsecagg.errors import LocalProtocolError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import (
    SERVER,
    LedgerChanged,
    Output,
    Persist,
    Phase,
    Promised,
    Send,
    Update,
)
from lightsecagg.protocol.jobs import UploadInMemory
from lightsecagg.protocol.journal_facts import (
    Reported,
    RosterFixed,
    SharingClosed,
    SumAnnounced,
    UploadWaits,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    Advertise,
    AggregatedShare,
    Consent,
    MaskedUpload,
    Message,
    SharesClosed,
    SumRequest,
)
from lightsecagg.protocol.server import Server

BOTH = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


class Disk:
    """What a client's driver has stored, and what left when."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.left: dict[type[Message], Ledger] = {}
        """The first message of a kind -> the ledger on disk when it left."""

    def release(self, outputs: Sequence[object]) -> None:
        for output in outputs:
            match output:
                case Persist(LedgerChanged(entries)):
                    self.ledger = Ledger.from_bytes(entries)
                case Send(_, message) if self.ledger is not None:
                    self.left.setdefault(type(message), self.ledger)


class Watched(Network):
    """Keeps what one client's driver would have kept."""

    watched = -1
    disk: Disk

    def send(self, sender: int, outputs: Sequence[object]) -> None:
        if sender == self.watched:
            self.disk.release(outputs)
        super().send(sender, outputs)


@BOTH
def test_S06_what_a_client_must_remember_is_stored_before_anything_leaves(
    threat_model: ThreatModel,
) -> None:
    """A client that dies after any of its messages finds in its ledger what it has said."""
    federation = Federation(6, 1, 1, threat_model=threat_model)
    me = federation.ids[0]
    federation.ledgers[me] = Ledger()
    made = federation.network()
    network = Watched(federation, made.server, made.clients, made.inputs)
    network.watched, network.disk = me, Disk()
    network.start().finish().assert_exact(federation.ids)
    left, model = network.disk.left, federation.settings().model
    assert left[Advertise].last_round == 1, "the round is not opened a second time"
    assert left[MaskedUpload].uploads() == {model.hex(): 1}
    consent = left[AggregatedShare if threat_model is HONEST else Consent]
    update = network.inputs[me]
    with pytest.raises(Exception, match="spent"):
        consent.check_unspent(consent.fingerprint(update))
    with pytest.raises(RemoteProtocolError, match="a second, different survivor set"):
        consent.consent(b"\1" * 32, b"f", (1, 2)) or consent.consent(b"\1" * 32, b"f", (1, 3))


@BOTH
def test_S06_an_asynchronous_client_stores_before_it_speaks(threat_model: ThreatModel) -> None:
    fed = AsyncFederation(threat_model=threat_model)
    party = Client(0, fed.keys[0], fed.policy, Ledger())
    fed.clients[0] = party
    disk, send = Disk(), fed.send

    def watched(sender: int, outputs: Sequence[object]) -> None:
        if sender == 0:
            disk.release(outputs)
        send(sender, outputs)

    fed.send = watched  # type: ignore[method-assign]
    fed.open()
    update = Update(fed.unique_vector())
    fed.call(0, lambda: party.set_input(update, 0, model_of(0)))
    assert disk.left[Advertise].last_round == 1
    uploaded = disk.left[MaskedUpload]
    assert uploaded.uploads()[model_of(0).hex()] == 1
    with pytest.raises(Exception, match="spent"):
        uploaded.check_unspent(uploaded.fingerprint(update))
    for client in (1, 2, 3):
        fed.upload(client)
    fed.settle()
    consent = disk.left[AggregatedShare if threat_model is HONEST else Consent]
    with pytest.raises(RemoteProtocolError, match="consented to sum one before"):
        consent.check_buffer([(0, model_of(0))])


def test_a_volatile_ledger_asks_for_nothing_to_be_stored() -> None:
    federation = Federation()
    network = federation.network()
    (opening, *_) = network.server.start()
    assert isinstance(opening, Send)
    for client in network.clients.values():
        assert [type(output) for output in client.receive(SERVER, opening.message)] == [Send]


# -- the server ----------------------------------------------------------------------------------


@dataclass
class Stage:
    """A durable server in its upload phase, and what its clients upload."""

    federation: Federation
    server: Server
    uploads: dict[int, MaskedUpload]
    closed: list[Output]
    """What closing sharing returned."""


def stage(threat_model: ThreatModel = MALICIOUS) -> Stage:
    federation = Federation(6, 1, 2, threat_model=threat_model)
    network = federation.network()
    network.server = server = Server(
        federation.settings(), federation.allow_list, federation.ids, durable=True
    )
    uploads: dict[int, MaskedUpload] = {}
    closed: list[Output] = []

    def tamper(sender: int, _: int, message: Any) -> list[Any]:
        if isinstance(message, MaskedUpload):
            uploads[sender] = message
            return []
        return [message]

    receive = server.receive

    def watched(sender: int, message: Message) -> list[Output]:
        outputs = receive(sender, message)
        if any(isinstance(output, Persist) for output in outputs):
            closed.extend(outputs)
        return outputs

    server.receive = watched  # type: ignore[method-assign]
    network.tamper = tamper
    network.start().run()
    del server.receive
    assert uploads.keys() == set(federation.ids)
    return Stage(federation, server, uploads, closed)


def take(scene: Stage, client: int) -> Promised:
    match scene.server.receive(client, scene.uploads[client]):
        case [Persist(Promised(upload=MaskedUpload()) as record)]:
            assert record.sender == client
            assert record.can_fail
            assert record.one_sum
            assert [type(fact) for fact in record.facts] == [Reported, UploadWaits]
            return record
        case outputs:
            raise AssertionError(outputs)


def store(scene: Stage, *clients: int) -> list[Output]:
    outputs: list[Output] = []
    for client in clients:
        record = take(scene, client)
        outputs = scene.server.stored(record, kept(record))
    return outputs


def kept(record: Promised) -> UploadInMemory:
    assert record.upload is not None
    return UploadInMemory(record.upload.vector)


def chosen(outputs: list[Output]) -> tuple[int, ...]:
    """U1, as it is stored before anything else leaves."""
    first = outputs[0]
    assert isinstance(first, Persist)
    assert isinstance(first.record, Promised)
    (fact,) = first.record.facts
    assert isinstance(fact, SumAnnounced)
    return fact.request.survivors


def test_R31_closed_sharing_is_stored_before_anybody_hears_of_it() -> None:
    scene = stage()
    kinds = [
        type(output.record if isinstance(output, Persist) else output.message)
        for output in scene.closed
        if isinstance(output, Persist | Send)
    ]
    assert kinds.index(Promised) < kinds.index(SharesClosed)
    (record,) = (o.record for o in scene.closed if isinstance(o, Persist))
    assert isinstance(record, Promised)
    roster, closed = record.facts
    assert isinstance(roster, RosterFixed)
    assert isinstance(closed, SharingClosed)
    assert [owner for owner, _ in closed.masks] == [*scene.federation.ids]


@BOTH
def test_R31_U1_is_stored_before_anybody_hears_of_it(threat_model: ThreatModel) -> None:
    scene = stage(threat_model)
    outputs = store(scene, *scene.federation.ids)
    assert chosen(outputs) == scene.federation.ids
    assert {o.to for o in outputs[1:] if isinstance(o, Send) and isinstance(o.message, SumRequest)}


def test_R31_an_upload_counts_once_it_is_stored() -> None:
    """The control is the last one: without it U1 is announced, with it under way nothing is."""
    scene = stage()
    *early, last = scene.federation.ids
    store(scene, *early)
    record = take(scene, last)
    with pytest.raises(LocalProtocolError, match="say where the upload is stored"):
        scene.server.stored(record, None)
    assert scene.server.phase is Phase.UPLOAD
    assert last not in scene.server.pending, "nobody waits for it"
    outputs = scene.server.stored(record, kept(record))
    assert chosen(outputs) == scene.federation.ids
    assert scene.server.stored(record, kept(record)) == [], "a second time changes nothing"


def test_R31_an_upload_that_cannot_be_stored_harms_its_sender_only() -> None:
    scene = stage()
    *early, last = scene.federation.ids
    store(scene, *early)
    outputs = scene.server.unstored(take(scene, last))
    assert chosen(outputs) == tuple(early)


def test_R31_a_deadline_waits_for_the_upload_that_is_being_stored() -> None:
    """Else U1 would be announced without an upload that is on disk, where a restart finds it."""
    scene = stage()
    *early, slow, gone = scene.federation.ids
    store(scene, *early)
    record = take(scene, slow)
    assert scene.server.proceed() == []
    assert scene.server.drop(gone) == []
    assert scene.server.phase is Phase.UPLOAD
    outputs = scene.server.stored(record, kept(record))
    assert chosen(outputs) == (*early, slow)


def test_an_upload_that_comes_again_while_it_is_being_stored() -> None:
    scene = stage()
    client = scene.federation.ids[0]
    take(scene, client)
    upload = scene.uploads[client]
    assert scene.server.receive(client, upload) == []
    other = upload.vector.copy()
    other[0] ^= 1
    tag = msgspec.structs.replace(upload.tag, digest=bytes(32))
    with pytest.raises(RemoteProtocolError, match="two different uploads"):
        scene.server.receive(client, MaskedUpload(tag, other))


class Remembered(UploadInMemory):
    """An upload that can be referred to weakly."""


def test_a_server_keeps_uploads_where_they_are_stored_and_nothing_after_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[weakref.ref[UploadInMemory]] = []

    def remember(vector: Elements) -> UploadInMemory:
        upload = Remembered(vector.copy())
        kept.append(weakref.ref(upload))
        return upload

    monkeypatch.setattr(links, "UploadInMemory", remember)
    federation = Federation()
    network = federation.network()
    network.server = Server(federation.settings(), federation.allow_list, durable=True)
    network.start().run(until=lambda: len(kept) == 2)
    assert all(upload() is not None for upload in kept)
    network.finish().assert_exact(federation.ids)
    assert len(kept) == len(federation.ids)
    assert all(upload() is None for upload in kept)
