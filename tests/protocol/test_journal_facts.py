"""The server of an epoch, killed: its facts bring it back, nothing acknowledged is lost (R31)."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import HONEST, MALICIOUS, model_of
from disk import memory_of
from mortal import Mortal

from lightsecagg.errors import DecodeError, LocalProtocolError, ParameterError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import SERVER, Persist, Phase, Promised
from lightsecagg.protocol.jobs import Compute, complete
from lightsecagg.protocol.journal_facts import (
    VERSION,
    RosterFixed,
    UploadWaits,
    decode_facts,
    encode_fact,
)
from lightsecagg.protocol.messages import Report, Reports, ShareBundle, UploadDropped

BOTH = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


def live(fed: Mortal, seed: int) -> None:
    """Uploads, deliveries in any order, departures, deadlines, early flushes, and kills."""
    coins = random.Random(seed)
    fed.open()
    for _ in range(120):
        client = coins.randrange(len(fed.clients))
        party = fed.clients[client]
        deeds = ["upload"] * 5 + ["deliver"] * 8 + ["leave", "rejoin", "time", "flush", "kill"]
        match coins.choice(deeds):
            case "upload" if client not in fed.away:
                if party.stock < 2 and party.room:
                    fed.call(client, party.restock)
                if party.stock:
                    fed.upload(client, max(0, fed.server.time - coins.randrange(3)))
            case "deliver":
                for _ in range(coins.randrange(1, 30)):
                    if links := fed.busy():
                        fed.deliver(fed.take(*coins.choice(links)))
                    elif fed.server.intake.has_shares_to_relay:
                        fed.call(SERVER, fed.server.intake.relay)
            case "leave" if len(fed.away) < 2:
                fed.leave(client)
            case "rejoin" if client in fed.away:
                fed.rejoin(client)
            case "time" if fed.server.phase is not Phase.UPLOAD:
                fed.call(SERVER, fed.server.proceed)
            case "flush":
                with suppress(LocalProtocolError):
                    fed.call(SERVER, fed.server.flush)
            case "kill":
                fed.kill()
    for client in sorted(fed.away):
        fed.rejoin(client)
    fed.settle()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
@BOTH
def test_R31_a_server_that_is_killed_again_and_again_sums_each_upload_once(
    threat_model: ThreatModel, share_mode: ShareMode, seed: int
) -> None:
    fed = Mortal(threat_model=threat_model, share_mode=share_mode)
    live(fed, seed)
    before = len(fed.results)
    for _ in range(3):  # whatever was lost, now a buffer is recovered; models need company (S56)
        for client, party in fed.clients.items():
            if not party.stock and party.room:
                fed.call(client, party.restock)
                fed.settle()
            if party.stock:
                fed.upload(client, fed.server.time)
                fed.settle()
        if fed.server.phase is not Phase.UPLOAD:
            fed.call(SERVER, fed.server.proceed)
            fed.settle()
    assert len(fed.results) > before
    fed.assert_exact()
    fed.fate_of_uploads()


@pytest.mark.parametrize("kill_at", [Phase.UPLOAD, Phase.AGREE, Phase.RECOVER])
def test_R31_with_all_connections_cut_no_acknowledged_upload_is_lost(kill_at: Phase) -> None:
    """The announced buffer is asked for again with the same tags, and summed."""
    fed = Mortal(threat_model=MALICIOUS, dropouts=1).open()
    assert isinstance(fed, Mortal)
    for client in range(3):
        fed.upload(client)
    fed.settle()
    if kill_at is Phase.UPLOAD:
        fed.kill()
        assert fed.server.intake.waiting == 3
    fed.upload(3)
    fed.step_up(3)
    if kill_at is not Phase.UPLOAD:
        while fed.server.phase is not kill_at:
            fed.deliver(fed.take(*fed.busy()[0]))
        announced = dict(fed.announced)
        fed.kill()
        assert fed.server.phase is kill_at
        fed.settle()
        assert fed.announced == announced, "an announced buffer never changes"
    fed.settle()
    fed.assert_exact()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]


def test_R31_shares_that_had_not_left_reach_those_who_lack_them() -> None:
    fed = Mortal().open(masks=1)
    assert isinstance(fed, Mortal)
    fed.call(0, fed.clients[0].restock)
    while fed.on(0, SERVER):
        fed.step_up(0)
    fed.call(SERVER, fed.server.intake.relay)
    fed.step_down(3)  # one peer has its share of mask 1; the others' are lost
    fed.kill()
    fed.settle()
    assert {len(said) for said in fed.server.intake.stock.reports[(0, 1)].values()} == {4}  # type: ignore[index]
    assert not fed.refusals


def test_R31_S09_shares_from_before_a_crash_come_before_newer_ones_of_their_owner() -> None:
    """A client takes an owner's masks in order: the older share would be lost for good."""
    fed = Mortal().open(masks=1)
    assert isinstance(fed, Mortal)
    fed.leave(5)
    fed.call(0, fed.clients[0].restock)
    while fed.on(0, SERVER):
        fed.step_up(0)
    fed.kill()
    fed.settle()
    fed.call(0, fed.clients[0].restock)
    fed.settle()
    fed.rejoin(5)
    fed.settle()
    for serial in (0, 1, 2):
        reports = fed.server.intake.stock.reports[(0, serial)]  # type: ignore[index]
        assert {client: len(values) for client, values in reports.items()} == dict.fromkeys(
            fed.clients, 4
        )


@BOTH
def test_R31_what_was_being_computed_is_computed_again(threat_model: ThreatModel) -> None:
    fed = Mortal(threat_model=threat_model)
    fed.open()
    jobs: list[Compute] = []
    compute = fed.compute

    def hold(party: int, outputs: Any) -> Any:
        held = [output for output in outputs if isinstance(output, Compute)]
        jobs.extend(held)
        return compute(party, [output for output in outputs if output not in held])

    for client in range(3):
        fed.upload(client)
    fed.settle()
    fed.upload(3)
    fed.settle = lambda: None  # type: ignore[method-assign]
    fed.compute = hold  # type: ignore[method-assign]
    while links := fed.busy():
        fed.deliver(fed.take(*links[0]))
    if not jobs:
        pytest.fail("no job was asked for")
    assert fed.disk is not None
    again = fed.disk.restored(fed.allow_list)
    (summing,) = again.resume()
    assert isinstance(summing, Compute)
    assert not again.computed(jobs[0].job, complete(jobs[0].job)), "of the server that is gone"


def test_R31_what_is_journalled_for_a_buffer_grows_with_its_uploads_alone() -> None:
    """Bytes of facts per upload, with their tags and what is announced: flat from 10 to 40."""
    per_upload = {}
    for clients in (10, 40):
        fed = Mortal(clients=clients, buffer_size=clients, dropouts=1)
        fed.open(masks=1)
        assert fed.disk is not None
        before = fed.disk.written
        for owner in fed.clients:
            fed.upload(owner)
        fed.settle()
        assert len(fed.results[0].owners) == clients
        per_upload[clients] = (fed.disk.written - before) / clients
    assert per_upload[40] < 1.2 * per_upload[10]


# -- facts that are damaged ------------------------------------------------------------------------


def stored() -> Mortal:
    fed = Mortal(threat_model=HONEST).open()
    assert isinstance(fed, Mortal)
    fed.leave(5)
    for client in range(3):
        fed.upload(client)
    fed.settle()
    return fed


def test_a_restored_server_is_as_it_was_but_for_what_clients_repeat() -> None:
    fed = stored()
    assert fed.disk is not None
    again = fed.disk.restored(fed.allow_list)
    assert again._needed() == fed.server._needed()
    assert again.serials(0) == fed.server.serials(0)
    assert again.intake.queue.last_tag == fed.server.intake.queue.last_tag
    assert again.intake.queue.accepted == fed.server.intake.queue.accepted
    assert memory_of(again) == memory_of(fed.disk.restored(fed.allow_list))


def test_R36_facts_that_are_cut_or_altered_are_refused() -> None:
    fed = stored()
    disk = fed.disk
    assert disk is not None
    whole = list(disk.facts)
    for facts in ([], whole[1:], [*whole, whole[0]], [b"", *whole], [whole[0], b"\x90"]):
        disk.facts = facts
        with pytest.raises(DecodeError, match="malformed"):
            disk.restored(fed.allow_list)


def test_R37_facts_of_another_version_or_allow_list_are_refused() -> None:
    fed = stored()
    disk = fed.disk
    assert disk is not None
    first, _ = decode_facts(disk.facts)
    assert isinstance(first, RosterFixed)
    newer = msgspec.structs.replace(first, version=VERSION + 1)
    whole, disk.facts = list(disk.facts), [encode_fact(newer), *disk.facts[1:]]
    with pytest.raises(DecodeError, match=f"version {VERSION + 1} is not read by this release"):
        disk.restored(fed.allow_list)
    disk.facts = whole
    with pytest.raises(ParameterError, match="another allow-list"):
        disk.restored(AllowList({c: fed.allow_list[c] for c in range(5)}))


def test_a_record_that_cannot_be_stored_costs_its_sender_and_nothing_else() -> None:
    """What else it promised is promised with the next one."""
    fed = stored()
    server = fed.server
    lost = fed.make_upload(3, 0)
    outputs = server.receive(3, lost)
    (record,) = [o.record for o in outputs if isinstance(o, Persist)]
    assert isinstance(record, Promised)
    assert record.can_fail
    after = server.unstored(record)
    assert any(getattr(o, "message", None) == UploadDropped(lost.tag.serial) for o in after)
    assert server.intake.waiting == 3
    assert not server.intake.is_stored(lost.tag)
    assert fed.disk is not None
    assert fed.disk.restored(fed.allow_list)._needed() == server._needed()


def fail(fed: Mortal, client: int, message: Any, *, committed: bool = False) -> list[Any]:
    """What a server does when it cannot store what comes with this message.

    `committed`: it is on the disk for all that, as after a full disk that took the rows alone.
    """
    (record,) = [o.record for o in fed.server.receive(client, message) if isinstance(o, Persist)]
    assert isinstance(record, Promised)
    assert record.can_fail
    if committed:
        assert fed.disk is not None
        fed.disk.store(record)
    outputs = fed.server.unstored(record)
    fed.call(SERVER, lambda: outputs)
    return outputs


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("what", ["upload", "shares"])
def test_R31_after_a_failed_store_and_a_crash_no_lost_share_is_looked_for(
    what: str, committed: bool
) -> None:
    """The rows of the masks go with the next record, and whoever asks for them then gets nothing.

    The mask that failed is past, and so are those that it passed over, or pushed out.
    """
    fed = Mortal(stock=2).open(masks=2)
    assert isinstance(fed, Mortal)
    if what == "upload":
        fed.clients[1].discard([0])
        fail(fed, 1, fed.make_upload(1, 0), committed=committed)
    else:
        fed.clients[1].discard([0])
        for output in fed.clients[1].restock():
            if isinstance(output.message, ShareBundle):  # type: ignore[union-attr]
                message = output.message  # type: ignore[union-attr]
                if sum(s.owner == 1 for s in message.shares) == 5:
                    fail(fed, 1, message, committed=committed)
    ready = fed.server.serials(1)
    fed.upload(2)
    fed.settle()
    fed.kill()
    assert fed.server.serials(1) == ready
    for serial in range(3):
        lacks = Reports((Report(1, serial, b""),))
        fed.call(SERVER, partial(fed.server.receive, 5, lacks))
    fed.settle()
    assert not fed.refusals
    assert fed.server.intake.waiting == 1


def test_R31_what_may_fail_to_be_stored_promises_nothing_else() -> None:
    """A useless upload that goes when another comes: its owner would never hear of it."""
    fed = Mortal(threat_model=MALICIOUS, buffer_size=3).open()
    assert isinstance(fed, Mortal)
    fed.upload(0)
    fed.settle()
    fed.call(SERVER, fed.server.skip)
    fed.server.intake.publish(model_of(1), 1)
    fed.upload(1, 1)
    fed.settle()
    fed.server.intake.closing = (
        True  # nobody is to bring company for the upload from the older model
    )
    outputs = fed.server.receive(2, fed.make_upload(2, 1))
    (record,) = [output.record for output in outputs if isinstance(output, Persist)]
    assert isinstance(record, Promised)
    assert [type(fact) for fact in record.facts] == [UploadWaits]
    fed.call(SERVER, partial(fed.server.unstored, record))
    fed.upload(3, 1)
    fed.settle()
    assert fed.server.intake.waiting == 2
    assert fed.clients[0].state.contributor.outstanding == (), "it was told"  # type: ignore[union-attr]


def test_R31_without_protection_clients_come_back_to_a_server_that_was_killed() -> None:
    """There are no shares to look for, also when a client asks for some."""
    fed = Mortal(protocol="plain")
    fed.call(SERVER, fed.server.start)
    fed.settle()
    for client, party in fed.clients.items():
        fed.call(client, party.restock)
    for client in range(3):
        fed.upload(client)
    fed.settle()
    fed.kill()
    assert fed.server.intake.waiting == 3
    assert fed.server.receive(5, Reports((Report(0, 0, b""),))) == []
    fed.upload(3)
    fed.settle()
    (result,) = fed.results
    assert result.owners == (0, 1, 2, 3)
    weight, q = fed.buffering.table.weight(0), fed.field.modulus
    plain = sum(fed.updates[owner, 0].astype(np.uint64) for owner in range(4))
    assert np.array_equal(result.total, plain * np.uint64(weight) % np.uint64(q))


def test_uploads_are_read_where_they_are_stored() -> None:
    fed = stored()
    assert fed.disk is not None
    again = fed.disk.restored(fed.allow_list)
    for waiting in again.intake.queue.waiting:
        kept = fed.disk.uploads[waiting.tag.owner, waiting.tag.serial]
        assert np.array_equal(waiting.upload.read(0, kept.size), kept)


def test_the_model_of_every_version_is_published_again() -> None:
    fed = stored()
    assert fed.disk is not None
    again = fed.disk.restored(fed.allow_list)
    message = fed.make_upload(4, 0)
    with pytest.raises(Exception, match="none was published"):
        again.receive(4, message)
    again.intake.publish(model_of(0), 0)
    again.receive(4, message)
