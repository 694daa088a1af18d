"""The asynchronous parties: exact buffers under any schedule, absences, failures, refusals."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from async_driver import HONEST, MALICIOUS, AsyncFederation, change, model_of

from lightsecagg.errors import (
    InputRefused,
    LocalProtocolError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.field.staleness import StalenessTable, constant
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, ShareMode, ThreatModel
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.client_machine import Closed
from lightsecagg.protocol.interface import SERVER, Phase, RoundAborted, Send, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    AggregatedShare,
    Consent,
    Opening,
    Refusal,
    SharesClosed,
    SumRequest,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.server import Server

BOTH = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


@BOTH
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
@pytest.mark.parametrize("modulus", [DEFAULT_MODULUS, PAPER_MODULUS])
def test_buffers_of_stale_updates_are_exact(
    threat_model: ThreatModel, share_mode: ShareMode, modulus: int
) -> None:
    fed = AsyncFederation(threat_model=threat_model, share_mode=share_mode, modulus=modulus).open()
    for turn in range(12):
        client = turn % 6
        if not fed.clients[client].stock:
            fed.send(client, fed.clients[client].restock())
            fed.settle()
        stale = turn in (8, 9) and threat_model is HONEST
        fed.upload(client, version=fed.server.time - stale)
        fed.settle()
    assert [result.time for result in fed.results] == [0, 1, 2]
    assert (len(set(fed.results[-1].weights)) > 1) == (threat_model is HONEST)
    fed.assert_exact()
    assert not fed.refusals


def test_S56_buffers_of_two_models_are_exact_where_each_has_company() -> None:
    fed = AsyncFederation(clients=8, buffer_size=6, threat_model=MALICIOUS).open()
    fed.skip_to(2)
    for owner, version in enumerate([2, 2, 1, 2, 0, 1, 1]):
        fed.upload(owner, version)
        fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3, 5, 6)]
    assert (
        fed.server.intake.waiting == 0
    )  # the only one of its model, from which nobody else will upload
    assert not fed.refusals
    fed.assert_exact()


def fill(fed: AsyncFederation, owners: tuple[int, ...], version: int | None = None) -> None:
    """Let these owners upload; everything but the last upload is delivered."""
    for owner in owners:
        fed.upload(owner, fed.server.time if version is None else version)
        fed.step_up(owner)


@BOTH
def test_R30_a_buffer_survives_D_absent_clients(threat_model: ThreatModel) -> None:
    fed = AsyncFederation(threat_model=threat_model).open()
    fed.leave(5)
    fill(fed, (0, 1, 2, 3))
    fed.settle()
    assert [result.responders for result in fed.results] == [(0, 1, 2, 3, 4)]
    fed.assert_exact()


@BOTH
def test_R30_too_many_absent_clients_lose_the_buffer_and_nothing_else(
    threat_model: ThreatModel,
) -> None:
    fed = AsyncFederation(threat_model=threat_model).open()
    fill(fed, (0, 1, 2, 3))
    for client in (4, 5):
        fed.leave(client)
    fed.settle()
    assert not fed.results
    assert [failure.owners for failure in fed.failures] == [(0, 1, 2, 3)]
    for client in (4, 5):
        fed.rejoin(client)
    fed.settle()
    assert fed.server.time == 1
    fill(fed, (0, 1, 2, 3))
    fed.settle()
    assert [result.time for result in fed.results] == [1]
    fed.assert_exact()


def test_R30_a_deadline_ends_a_buffer_that_nobody_answers() -> None:
    fed = AsyncFederation().open()
    fill(fed, (0, 1, 2, 3))
    fed.call(SERVER, fed.server.proceed)
    assert "U = 5 are needed" in fed.failures[0].reason
    assert fed.server.phase is Phase.UPLOAD


def test_a_client_that_was_away_gets_the_shares_of_waiting_uploads() -> None:
    """Without the mailbox, or if it forgot masks once they are uploaded, 5 could not answer."""
    fed = AsyncFederation(dropouts=0, survivors=6).open()
    fed.leave(5)
    for owner in (0, 1, 2):
        fed.send(owner, fed.clients[owner].restock())
        fed.settle()
        change(
            fed.clients[owner], stock={2: fed.clients[owner].state.contributor.stock[2]}
        )  # unseen by 5
        fed.upload(owner)
        fed.settle()
    fed.rejoin(5)
    fed.settle()
    fed.upload(3)
    fed.settle()
    assert [result.responders for result in fed.results] == [(0, 1, 2, 3, 4, 5)]
    fed.assert_exact()


def test_the_mailbox_forgets_masks_of_past_buffers() -> None:
    fed = AsyncFederation().open(masks=1)
    fed.leave(5)
    for owner in (0, 1, 2, 3):
        fed.upload(owner)
        fed.send(owner, fed.clients[owner].restock())
    fed.settle()
    fill(fed, (0, 1, 2, 3))
    fed.settle()
    assert len(fed.results) == 2
    fed.rejoin(5)
    assert not fed.on(SERVER, 5)


def test_an_owner_that_missed_its_buffer_is_told_and_may_restock() -> None:
    fed = AsyncFederation(stock=2).open()
    fed.upload(0)
    fed.settle()
    fed.leave(0)
    fill(fed, (1, 2, 3))
    fed.settle()
    assert len(fed.results) == 1
    assert fed.clients[0].room == 0
    fed.rejoin(0)
    fed.settle()
    assert fed.clients[0].room == 1


def test_a_client_that_was_away_for_long_keeps_what_it_gets_on_return() -> None:
    """Shares expire by the buffers that this client has seen since they came."""
    fed = AsyncFederation(stock=4, share_lifetime=6).open()
    fed.leave(5)
    for _ in range(10):
        for owner in (0, 1, 2, 3):
            if not fed.clients[owner].stock:
                fed.send(owner, fed.clients[owner].restock())
                fed.settle()
            fed.upload(owner, fed.server.time)
            fed.settle()
    assert len(fed.results) == 10
    fed.rejoin(5)
    for owner in (0, 1, 2, 3):
        fed.send(owner, fed.clients[owner].restock(2))
    fed.settle()
    for time in (10, 11):
        fed.leave(4)  # now 5 is needed
        fill(fed, (0, 1, 2, 3))
        fed.settle()
        assert 5 in fed.results[time].responders
    fed.assert_exact()


def test_expired_masks_do_not_spoil_a_buffer() -> None:
    """Peers have dropped the shares of 4's mask; its upload is dropped, the others' are not."""
    fed = AsyncFederation(stock=4, share_lifetime=6).open()
    for _ in range(8):
        for owner in (0, 1, 2, 3):
            if not fed.clients[owner].stock:
                fed.send(owner, fed.clients[owner].restock())
                fed.settle()
            fed.upload(owner, fed.server.time)
            fed.settle()
    party = fed.clients[4]
    assert not party.stock  # it has seen the buffers too: its masks are gone with the shares
    fed.send(4, party.restock())
    fed.settle()
    fed.server.intake.stock.shared[4] = {
        serial: mask._replace(time=0) for serial, mask in fed.server.intake.stock.shared[4].items()
    }
    fed.upload(4, fed.server.time)
    for owner in (0, 1, 2, 3):
        fed.send(owner, fed.clients[owner].restock())
        fed.settle()
        fed.upload(owner, fed.server.time)
        fed.settle()
    assert fed.results[-1].owners == (0, 1, 2, 3)
    assert party.room == fed.buffering.stock
    fed.assert_exact()


def test_stale_uploads_are_dropped_and_their_owners_told() -> None:
    fed = AsyncFederation(stock=4).open()
    fed.upload(5, version=0)
    fed.settle()
    fed.skip_to(6)
    for owner in (0, 1, 2, 3):
        fed.upload(owner, version=6)
        fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    assert fed.clients[5].room == 3
    fed.assert_exact()


def test_a_second_upload_of_an_owner_waits_for_the_next_buffer() -> None:
    fed = AsyncFederation().open(masks=3)
    fill(fed, (2, 3, 4, 5))
    fed.settle()
    for owner, version in ((0, 0), (0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2)):
        fed.upload(owner, version)
        fed.settle()
    owners = [result.owners for result in fed.results]
    assert owners == [(2, 3, 4, 5), (0, 1, 2, 3), (0, 1, 4, 5)]
    fed.assert_exact()


def test_R31_masks_that_are_lost_on_their_way_push_no_waiting_upload_out() -> None:
    """A server that is killed again and again loses shares, and no upload that it has stored."""
    fed = AsyncFederation(stock=4).open(masks=1)
    fed.upload(0)
    fed.settle()
    party, shared = fed.clients[0], 0
    while party.room:
        party.restock()  # its shares are on their way when the server ends
        party.discard(party.serials[0])
        shared += 1
    assert shared == 3
    with pytest.raises(LocalProtocolError, match="would push out old ones"):
        party.restock()
    fill(fed, (1, 2, 3))
    fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    assert party.room == 4
    fed.assert_exact()


def test_S42_a_second_upload_from_one_model_is_dropped_and_its_owner_told() -> None:
    """No client would sum it, so it must not spoil a buffer."""
    fed = AsyncFederation().open()
    for _ in range(2):
        fed.upload(0)
        fed.settle()
    assert fed.server.intake.waiting == 1
    assert fed.clients[0].room == 2, "the first upload waits, and two serials are taken since"
    fill(fed, (1, 2, 3))
    fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    assert not fed.refusals


def test_an_early_flush_takes_what_clients_accept() -> None:
    fed = AsyncFederation().open()
    fill(fed, (0, 1))
    with pytest.raises(LocalProtocolError, match=r"2 of 2 .* T \+ 2 = 3"):
        fed.server.flush()
    fill(fed, (2,))
    fed.call(SERVER, fed.server.flush)
    fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2)]
    fed.assert_exact()


def test_strict_mode_forms_buffers_of_whole_weight_classes() -> None:
    fed = AsyncFederation(clients=8, buffer_size=6, strict=True).open()
    fed.skip_to(2)
    for owner, version in enumerate([2, 2, 1, 2, 0, 1, 1]):
        fed.upload(owner, version)
        fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3, 5, 6)]
    assert fed.server.intake.waiting == 1  # the only one of its weight
    assert not fed.refusals
    fed.assert_exact()


def test_strict_mode_does_not_wait_for_ever_behind_updates_without_company() -> None:
    """Everybody's first update has a weight of its own; the second ones share theirs."""
    fed = AsyncFederation(clients=6, buffer_size=4, strict=True).open()
    fed.skip_to(4)
    for owner in range(4):
        fed.upload(owner, version=owner)
        fed.settle()
    assert (fed.server.intake.waiting, fed.server.summable) == (4, 0)
    with pytest.raises(LocalProtocolError, match="0 of 4 waiting updates may share a buffer"):
        fed.server.flush()
    for owner in range(4):
        fed.upload(owner, version=4)
        fed.settle()
    assert [result.weights for result in fed.results] == [(64, 64, 64, 64)]
    assert fed.server.intake.waiting == 4
    assert not fed.refusals
    fed.assert_exact()


def test_weights_too_far_apart_are_not_put_into_one_buffer() -> None:
    fed = AsyncFederation(max_ratio=2.0).open()
    fed.skip_to(3)
    for owner, version in enumerate([0, 3, 3, 2, 2]):  # weights 16, 64, 64, 32, 32
        fed.upload(owner, version)
        fed.settle()
    assert [result.owners for result in fed.results] == [(1, 2, 3, 4)]
    fed.assert_exact()


def test_S14_wrong_answers_are_named_with_two_spares() -> None:
    fed = AsyncFederation(clients=7, dropouts=2, survivors=5).open()
    fill(fed, (0, 1, 2, 3))
    for client in range(7):
        fed.step_down(client)
    liar = fed.codec.decode(fed.take(6, SERVER).data)
    assert isinstance(liar, AggregatedShare)
    forged = fed.field.add(liar.vector, np.ones_like(liar.vector))
    fed.send(6, [Send(SERVER, AggregatedShare(forged, 0))])
    fed.settle()
    assert fed.results[0].suspects == (6,)
    fed.assert_exact()


def test_S14_one_spare_detects_a_wrong_answer_and_the_buffer_is_lost() -> None:
    fed = AsyncFederation().open()  # six clients, U = 5
    fill(fed, (0, 1, 2, 3))
    for client in range(6):
        fed.step_down(client)
    liar = fed.codec.decode(fed.take(5, SERVER).data)
    assert isinstance(liar, AggregatedShare)
    forged = fed.field.add(liar.vector, np.ones_like(liar.vector))
    fed.send(5, [Send(SERVER, AggregatedShare(forged, 0))])
    fed.settle()
    assert not fed.results
    assert len(fed.failures) == 1


def test_a_reconnected_client_gets_its_certificate_again() -> None:
    fed = AsyncFederation(threat_model=MALICIOUS, dropouts=2, survivors=4).open()
    fill(fed, (0, 1, 2, 3))
    for client in range(5):
        fed.step_down(client)
        fed.step_up(client)
    assert fed.server.phase is Phase.RECOVER
    fed.leave(0)  # its certificate is lost
    fed.rejoin(0)
    for _ in range(2):
        fed.step_down(0)
        fed.step_up(0)
    assert 0 in fed.server.in_flight.recovery.answers


# -- the client's own mistakes, S06 ------------------------------------------------------------


@BOTH
def test_S06_an_update_is_uploaded_once_in_this_epoch_and_in_the_next(
    threat_model: ThreatModel,
) -> None:
    """Spent at upload: its buffer may be summed while its owner is away."""
    fed = AsyncFederation(threat_model=threat_model).open()
    party = fed.clients[0]
    update = Update(np.ones(11))
    party.set_input(update, 0, model_of(0))
    with pytest.raises(MaskAlreadyUsed, match="spent"):
        party.set_input(update, 0, model_of(0))
    assert party.stock == 1
    next_epoch = Client(0, fed.keys[0], fed.policy, party.ledger)
    fed.clients[0] = next_epoch
    fed.settings = replace(fed.settings, round=2)
    fed.server = Server(fed.settings, fed.allow_list, buffer_size=4)
    for client in range(1, 6):
        fed.clients[client] = Client(client, fed.keys[client], fed.policy, Ledger.volatile())
    fed.open()
    with pytest.raises(MaskAlreadyUsed, match="spent"):
        next_epoch.set_input(update, 0, model_of(0))


def test_S06_an_epoch_is_opened_once() -> None:
    fed = AsyncFederation().open()
    again = Client(0, fed.keys[0], fed.policy, fed.clients[0].ledger)
    fed.clients[0] = again
    opening = Server(fed.settings, fed.allow_list, buffer_size=4).start()[0]
    with pytest.raises(RemoteProtocolError, match="already seen round 1"):
        again.receive(SERVER, opening.message)  # type: ignore[union-attr]


def test_S06_a_party_is_not_copied() -> None:
    party = AsyncFederation().open().clients[0]
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(LocalProtocolError, match="not copied or pickled"):
            duplicate(party)


def test_S06_a_forked_party_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = AsyncFederation().open()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(MaskAlreadyUsed, match="fork"):
        fed.upload(0)
    with pytest.raises(MaskAlreadyUsed, match="fork"):
        fed.clients[0].restock()
    with pytest.raises(MaskAlreadyUsed, match="fork"):
        fed.tell(0, UploadDropped(0))


def test_S07_an_epoch_is_over_when_a_newer_one_is_opened() -> None:
    fed = AsyncFederation().open()
    party = fed.clients[0]
    newer = Client(0, fed.keys[0], fed.policy, party.ledger)
    newer.receive(SERVER, Opening(replace(fed.settings, round=2).to_bytes()))
    with pytest.raises(RemoteProtocolError, match="epoch 1 is over"):
        fed.tell(0, UploadDropped(0))
    with pytest.raises(LocalProtocolError, match="has opened epoch 2"):
        fed.upload(0)
    assert party.state == Closed("this client has opened epoch 2")
    assert not party._contributor.masks.nbytes
    another = fed.clients[1]  # which notices when it is asked for something, not when told
    newer = Client(1, fed.keys[1], fed.policy, another.ledger)
    newer.receive(SERVER, Opening(replace(fed.settings, round=2).to_bytes()))
    with pytest.raises(RemoteProtocolError, match="has opened epoch 2"):
        another.restock()


def test_S06_what_a_ledger_must_remember_makes_older_copies_of_it_stale() -> None:
    """Else a snapshot from before could be resumed, and would know of no upload since."""
    fed = AsyncFederation()
    ledger = fed.clients[0].ledger
    generations = [ledger.generation]
    fed.open()
    generations.append(ledger.generation)
    fed.upload(0)
    generations.append(ledger.generation)
    assert generations == sorted(set(generations))


def test_S06_no_mask_no_upload() -> None:
    fed = AsyncFederation().open(masks=1)
    fed.upload(0)
    with pytest.raises(LocalProtocolError, match="call restock"):
        fed.upload(0)


def test_S06_too_many_updates_for_one_model_are_refused() -> None:
    fed = AsyncFederation(max_attempts=1).open()
    fed.upload(0)
    with pytest.raises(RemoteProtocolError, match="the most that it allows"):
        fed.upload(0)


def test_S08_two_models_of_one_version_are_refused_before_masking() -> None:
    fed = AsyncFederation().open()
    fed.upload(0, version=0)
    with pytest.raises(RemoteProtocolError, match="two different models of version 0"):
        fed.make_upload(0, 0, model_of(99))
    with pytest.raises(RemoteProtocolError, match="models of version -1"):
        fed.make_upload(0, -1)
    assert fed.clients[0].stock == 1


def test_S08_no_update_is_masked_without_the_hash_of_its_model() -> None:
    client = AsyncFederation().open().clients[0]
    before = client.snapshot()
    with pytest.raises(LocalProtocolError, match="hand over the hash of the model"):
        client.set_input(Update(np.zeros(11)), 0)
    assert client.snapshot() == before


def test_a_driver_discards_no_mask_that_is_not_ready() -> None:
    client = AsyncFederation().open().clients[0]
    before = client.snapshot()
    with pytest.raises(LocalProtocolError, match=r"masks \[7\] are not ready"):
        client.discard([0, 7])
    assert client.snapshot() == before


def test_S29_what_a_round_says_is_refused_in_an_epoch() -> None:
    """Sharing is never closed there, and a sum names uploads."""
    fed = AsyncFederation().open()
    fed.upload(0)
    everybody, client = tuple(fed.clients), fed.clients[0]
    before = client.snapshot()
    for message in (SharesClosed(everybody), SumRequest(0, tuple(map(Tag, everybody[:4])))):
        with pytest.raises(RemoteProtocolError):
            client.receive(SERVER, message)
        assert client.snapshot() == before


def test_S08_a_client_holds_the_server_to_the_models_that_its_peers_trained_from() -> None:
    fed = AsyncFederation().open()
    fill(fed, (0, 1, 2, 3))
    fed.settle()
    assert len(fed.results) == 1
    with pytest.raises(RemoteProtocolError, match="than its peers have trained from"):
        fed.make_upload(5, 0, model_of(99))
    assert fed.make_upload(5, 0).tag.model == model_of(0)


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        (np.full(11, np.nan), "NaN"),
        (np.full(11, 1001.0), "beyond the bound"),
        (np.ones(12), "shape"),
    ],
)
def test_S13_a_bad_update_is_refused_and_costs_no_mask(
    vector: np.ndarray[tuple[int], np.dtype[np.float64]], reason: str
) -> None:
    fed = AsyncFederation().open()
    with pytest.raises(InputRefused, match=reason):
        fed.clients[0].set_input(Update(vector), 0, model_of(0))
    assert fed.clients[0].stock == 2


def test_stock_is_capped_by_what_peers_keep() -> None:
    fed = AsyncFederation(stock=3).open()
    for count in (2, 0, -1):
        with pytest.raises(LocalProtocolError, match="at most 3 per owner"):
            fed.clients[0].restock(count)
    fed.upload(0)
    assert fed.clients[0].room == 1  # an upload that waits still needs its shares


def test_peers_keep_a_bounded_number_of_an_owner_s_shares() -> None:
    """An owner that shares more than it may costs its peers no memory: old shares go first."""
    fed = AsyncFederation(stock=2).open()
    for _ in range(3):
        fed.clients[0].state.contributor.stock.clear()  # an owner that does not count
        fed.send(0, fed.clients[0].restock())
        fed.settle()
    assert sorted(fed.clients[1].state.holder.kept[0]) == [3, 4]


def test_S22_nothing_secret_is_printed() -> None:
    fed = AsyncFederation().open()
    fill(fed, (0, 1, 2, 3))
    fed.settle()
    party = fed.clients[0]
    assert repr(party) == "Client(client=0, state=Answered)"
    assert repr(party.state) == "Answered"
    assert "share" not in repr(party.state.holder.kept[4]).replace("KeptShare", "")


# -- the server's refusals ---------------------------------------------------------------------


def test_S29_the_server_refuses_bad_uploads_and_goes_on() -> None:
    fed = AsyncFederation().open()
    good = fed.make_upload(0, 0)
    other = fed.make_upload(1, 0)
    stranger = fed.make_upload(2, 0, model_of(5))
    bad = {
        "under another's tag": replace(good, tag=other.tag),
        "instead of 11": replace(good, vector=good.vector[:-1]),
        "not what its tag says": replace(good, vector=other.vector),
        "does not verify": replace(good, tag=_changed(good.tag, version=0, model=model_of(7))),
        "of the future": replace(good, tag=_changed(good.tag, version=1)),
    }
    for reason, message in bad.items():
        with pytest.raises(RemoteProtocolError, match=reason):
            fed.server.receive(0, message)
    assert fed.server.intake.waiting == 0
    with pytest.raises(RemoteProtocolError, match="another model of version 0"):
        fed.server.receive(2, stranger)
    fed.server.receive(0, good)
    assert fed.server.intake.waiting == 1
    assert fed.server.receive(0, good) == []  # a duplicate
    assert fed.server.late_messages == {"MaskedUpload": 1}
    assert fed.server.intake.waiting == 1
    with pytest.raises(RemoteProtocolError, match="0 was used already"):
        fed.server.receive(0, replace(good, tag=_changed(good.tag, digest=bytes(32))))


def test_S29_an_upload_under_a_mask_whose_shares_were_lost_is_dropped() -> None:
    fed = AsyncFederation().open(masks=1)
    party = fed.clients[0]
    fed.upload(0)
    fed.settle()
    fed.send(0, party.restock())
    fed.up.pop()  # one share is lost with the connection
    fed.settle()
    tag = fed.upload(0)
    fed.step_up(0)
    assert fed.under_way(SERVER, 0)[-1] == UploadDropped(tag.serial)
    assert fed.server.intake.waiting == 1


def test_S29_messages_out_of_place_are_refused_or_counted() -> None:
    fed = AsyncFederation().open()
    for message, sender in ((SharesClosed(()), 0), (AbortRound("no"), 0)):
        with pytest.raises(RemoteProtocolError, match="in phase upload"):
            fed.server.receive(sender, message)
    with pytest.raises(RemoteProtocolError, match="not invited"):
        fed.server.receive(99, SharesClosed(()))
    fed.server.receive(0, AggregatedShare(np.zeros(3, dtype=np.uint32), 7))
    fed.server.receive(0, Refusal(7, (1,)))
    fed.server.receive(0, Consent(7, b""))
    assert fed.server.late_messages.total() == 3


def test_S29_the_server_refuses_bad_replies() -> None:
    fed = AsyncFederation(threat_model=MALICIOUS, dropouts=2, survivors=4).open()
    fill(fed, (0, 1, 2, 3))
    with pytest.raises(RemoteProtocolError, match="does not verify"):
        fed.server.receive(0, Consent(0, bytes(64)))
    with pytest.raises(RemoteProtocolError, match="before the agreement"):
        fed.server.receive(0, AggregatedShare(np.zeros(4, dtype=np.uint32), 0))
    for client in range(4):
        fed.step_down(client)
        fed.step_up(client)
    with pytest.raises(RemoteProtocolError, match="instead of 4"):
        fed.server.receive(0, AggregatedShare(np.zeros(5, dtype=np.uint32), 0))


def test_too_few_registrations_abort_the_epoch() -> None:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    outputs = fed.server.proceed()
    assert any(isinstance(output, RoundAborted) for output in outputs)
    fed.send(SERVER, outputs)
    for client in range(6):
        while fed.on(SERVER, client):
            fed.step_down(client)
    with pytest.raises(LocalProtocolError, match="the epoch is over"):
        fed.clients[0].restock()


@pytest.mark.parametrize(("size", "reason"), [(2, "T \\+ 2 = 3"), (5, "K_max = 4")])
def test_a_buffer_size_that_clients_would_refuse_is_refused(size: int, reason: str) -> None:
    fed = AsyncFederation()
    with pytest.raises(ParameterError, match=reason):
        Server(fed.settings, fed.allow_list, buffer_size=size)


def test_equal_weights_are_reduced_to_one() -> None:
    fed = AsyncFederation(table=StalenessTable.from_function(constant(), 64, 5)).open()
    fill(fed, (0, 1, 2, 3))
    fed.settle()
    assert fed.results[0].weights == (1, 1, 1, 1)
    fed.assert_exact()


def _changed(tag: Tag, **changes: object) -> Tag:
    return msgspec.structs.replace(tag, **changes)
