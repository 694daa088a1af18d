"""Epochs that end while updates wait, or are on their way: none that is stored is left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from epoch_lab import BUFFERING, EpochLaboratory, finish_training, opened

from lightsecagg.field.staleness import StalenessTable
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Phase
from lightsecagg.protocol.messages import UploadDropped
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import EpochCloses, name_of, pack_control, pack_protocol
from lightsecagg.session.epoch_client import _Trained
from lightsecagg.session.interface import Received, Trained, TrainingFailed
from lightsecagg.session.plan import Flushing

K, LEAST = 4, 3


def with_somebody_outside(waiting: int, clients: int = 9, **options: Any) -> EpochLaboratory:
    """A buffer is in flight, and so many updates wait behind it; the last client was restarted.

    Honest-but-curious, so that updates of any versions share a buffer.
    """
    kind = {"threat_model": ThreatModel.HONEST_BUT_CURIOUS} | options
    lab = opened(clients=clients, flushing=Flushing(renew=1), **kind)
    lab.hold_jobs = True
    finish_training(lab, *range(K))
    assert lab.party.in_flight.recovery is not None
    finish_training(lab, *range(K, K + waiting))
    lab.trainings = [each for each in lab.trainings if each[0] != clients - 1]
    lab.restart(clients - 1)
    lab.settle()
    assert lab.party.intake.waiting == waiting
    return lab


def land(lab: EpochLaboratory) -> None:
    lab.hold_jobs = False
    lab.settle()


def trains(lab: EpochLaboratory) -> dict[int, int]:
    """Who trains from which version."""
    return {client: train.round for client, train in lab.trainings}


def send(lab: EpochLaboratory, client: int) -> None:
    """Its upload leaves, and has not arrived."""
    train = next(train for owner, train in lab.trainings if owner == client)
    lab.trainings.remove((client, train))
    event = Trained(train.round, lab.update(client, train.round))
    lab.do(client, lab.clients[client].handle(event, lab.now))
    assert "MaskedUpload" in [name_of(data) for owner, data in lab.up if owner == client]


def nobody_else_has_an_update(lab: EpochLaboratory) -> None:
    """All who train fail to."""
    while lab.trainings:
        client, train = lab.trainings.pop()
        lab.do(client, lab.clients[client].handle(TrainingFailed(train.round, ""), lab.now))
        lab.settle()


@pytest.mark.parametrize("waiting", range(1, LEAST))
def test_R31_an_epoch_goes_on_until_all_that_waits_makes_a_buffer(waiting: int) -> None:
    lab = with_somebody_outside(waiting)
    land(lab)
    lab.wait(5)
    assert lab.epoch.number == 1
    assert not any(client._closes for client in lab.clients.values()), "they may bring more"
    left = [7, 6, 5]
    for client in left[: LEAST - waiting]:
        finish_training(lab, client)
    lab.wait(2)
    assert [len(owners) for _, owners, _ in lab.sums] == [K, LEAST]
    assert lab.epoch.number == 2
    assert 8 in lab.party.members
    assert lab.left_behind == []


def test_R31_what_is_trained_when_the_last_buffer_is_announced_waits_for_the_next_epoch() -> None:
    lab = with_somebody_outside(1)
    land(lab)
    lab.hold_jobs = True
    finish_training(lab, 7, 6)
    assert lab.party.phase is not Phase.UPLOAD
    assert all(lab.clients[client]._closes for client in range(8))
    finish_training(lab, 5)
    assert lab.party.intake.waiting == 0, "it keeps its update"
    land(lab)
    lab.wait(2)
    assert lab.epoch.number == 2
    assert lab.party.intake.waiting == 1, "and has brought it along"
    assert lab.left_behind == []


def test_R31_an_upload_on_its_way_when_the_epoch_closes_is_refused_and_not_acknowledged() -> None:
    lab = with_somebody_outside(1)
    land(lab)
    lab.hold_jobs = True
    finish_training(lab, 7)
    send(lab, 6)
    send(lab, 5)  # behind that of client 6, with which the epoch closes
    lab.settle()
    assert lab.party.in_flight.recovery is not None
    assert (lab.clients[6].rounds, lab.clients[5].rounds) == (1, 0)
    refused = "client 5: the server has not taken its update, which is spent all the same"
    assert refused in lab.client_log
    land(lab)
    lab.wait(2)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3), (4, 6, 7)]
    assert lab.epoch.number == 2
    assert trains(lab)[5] == 1, "it goes on from a newer model"
    finish_training(lab, 5, 6, 7, 8)
    assert lab.sums[-1][1] == (5, 6, 7, 8)
    assert lab.left_behind == []
    lab.assert_summed_once()


def test_R31_more_than_one_buffer_of_them_is_summed_and_nobody_trains_meanwhile() -> None:
    """Else as many would come as are summed, and the epoch would never end."""
    lab = with_somebody_outside(9, clients=15, dropouts=3)
    lab.hold_jobs = False
    lab.settle(until=lambda: len(lab.sums) == 1 and not lab.up and not lab.down)
    assert lab.party.intake.waiting >= LEAST
    assert not set(range(K)) & set(trains(lab))
    lab.settle()
    assert [len(owners) for _, owners, _ in lab.sums] == [K, K, K], "and one is left"
    assert lab.epoch.number == 1
    assert set(range(K)) <= set(trains(lab))
    assert 12 not in trains(lab), "two updates of one owner share no buffer"
    finish_training(lab, 0, 1)
    lab.wait(2)
    assert lab.epoch.number == 2
    assert lab.left_behind == []


def test_R31_if_everybody_has_trained_from_the_model_the_next_version_brings_what_is_missing() -> (
    None
):
    lab = with_somebody_outside(1)
    land(lab)
    for client, train in list(lab.trainings):
        event = TrainingFailed(train.round, "no data")
        lab.trainings.remove((client, train))
        lab.do(client, lab.clients[client].handle(event, lab.now))
    lab.settle()
    nobody_else_has_an_update(lab)  # who had trained from version 0 has got version 1
    assert lab.epoch.number == 1
    lab.wait(lab.plan.grace + 1)
    assert lab.renewals == [2]
    assert set(trains(lab)) == set(range(8)) - {4}
    finish_training(lab, 0, 1)
    lab.wait(2)
    assert lab.epoch.number == 2
    assert lab.sums[-1][:2] == (2, (0, 1, 4))
    assert lab.left_behind == []


def test_R31_updates_that_nobody_completes_to_a_buffer_are_given_up_in_the_end() -> None:
    """Those who wait outside do not wait for ever, and the owners hear of it."""
    lab = with_somebody_outside(2, upload=300.0)
    land(lab)
    lab.wait(290)
    assert lab.epoch.number == 1
    lab.wait(20)
    assert lab.epoch.number == 2
    said = (
        "epoch 1 has ended: the 2 updates that wait make no buffer; uploads that are in no sum: 2"
    )
    assert said in lab.log
    told = [line for line in lab.client_log if "saw in no buffer: 1" in line]
    assert sorted(line[:9] for line in told) == ["client 4:", "client 5:"]
    assert lab.renewals == [2], "the owners can train again"


def test_R31_new_versions_that_nobody_has_an_update_from_put_the_end_off_no_further() -> None:
    patient = replace(BUFFERING, table=StalenessTable((1,) * 40, 1))
    lab = with_somebody_outside(2, upload=60.0, buffering=patient)
    land(lab)
    end = lab.now + 65
    while lab.now < end:
        for client, train in lab.trainings:
            lab.do(client, lab.clients[client].handle(TrainingFailed(train.round, ""), lab.now))
        lab.trainings.clear()
        lab.wait(1)
    assert len(lab.renewals) > 3
    assert lab.epoch.number == 2
    assert lab.dropped == []


def test_R31_the_last_buffer_waits_for_reports_no_longer_than_any_other() -> None:
    lab = with_somebody_outside(LEAST - 1)
    land(lab)
    stock = lab.party.intake.stock
    stock.awaits_reports = lambda mask, offline: mask not in stock.unawaited  # type: ignore[method-assign]
    finish_training(lab, 7)
    assert lab.party.intake.waiting == LEAST
    lab.wait(lab.flushing.reports - 1)
    assert lab.epoch.number == 1
    lab.wait(3)
    assert lab.epoch.number == 2
    assert lab.left_behind == []


def test_an_epoch_that_can_bear_no_other_loss_ends_before_its_time() -> None:
    lab = opened(clients=6, dropouts=1, flushing=Flushing(renew=10))
    lab.trainings = [each for each in lab.trainings if each[0] != 5]
    lab.restart(5)
    lab.settle()
    finish_training(lab, *range(K))
    lab.wait(2)
    assert lab.epoch.number == 2
    assert 5 in lab.party.members


def test_R31_uploads_that_wait_for_reports_are_no_more_than_the_last_buffer_takes() -> None:
    """One client reports late: all the others could upload before any buffer is formed."""
    lab = with_somebody_outside(1, clients=12, dropouts=3)
    land(lab)
    lab.party.intake.stock.awaits_reports = lambda mask, offline: True  # type: ignore[method-assign]
    finish_training(lab, *range(5, 11))
    assert lab.party.intake.waiting == K
    assert sum(lab.clients[client].rounds for client in range(5, 11)) == K - 1
    del lab.party.intake.stock.awaits_reports
    lab.wait(lab.flushing.reports + 2)
    assert lab.epoch.number == 2
    assert lab.left_behind == []


def test_R31_two_updates_of_one_owner_keep_nobody_out_whom_the_last_buffer_needs() -> None:
    """Versions without a buffer let two owners of K = 4 upload twice: four wait, and no buffer."""
    kind = ThreatModel.HONEST_BUT_CURIOUS
    lab = opened(clients=9, flushing=Flushing(renew=0), threat_model=kind)
    for _ in range(2):
        finish_training(lab, 0, 1)
        nobody_else_has_an_update(lab)
        lab.wait(lab.plan.grace + 1)
    assert lab.renewals == [1, 2]
    lab.trainings = [each for each in lab.trainings if each[0] != 8]
    lab.restart(8)
    nobody_else_has_an_update(lab)
    lab.wait(lab.plan.grace + 1)
    assert (lab.party.intake.waiting, lab.party.unsummed) == (2, 4)
    assert lab.epoch._ending.begun
    assert lab.party.intake._has_no_room(0), "a third of its updates would want a third buffer"
    finish_training(lab, 2, 3)
    lab.wait(2)
    assert lab.sums[-1][1] == (0, 1, 2, 3)
    finish_training(lab, 2)
    lab.wait(2)
    assert lab.sums[-1][1] == (0, 1, 2)
    assert lab.epoch.number == 2
    assert (lab.left_behind, lab.dropped) == ([], [])


# -- malicious-server: T + 2 share a model ---------------------------------------------------------

MALICIOUS = ThreatModel.MALICIOUS_SERVER


def test_S56_an_epoch_that_ends_does_not_wait_for_company_of_an_older_model() -> None:
    """Nobody trains from it any more: two updates, of which three are needed, are given up."""
    lab = with_somebody_outside(2, threat_model=MALICIOUS)
    land(lab)
    assert lab.party.intake.waiting == 2
    nobody_else_has_an_update(lab)
    lab.wait(lab.plan.grace + 2)
    assert lab.epoch.number == 2, "long before the deadline of uploads"
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3)]
    assert sorted(lab.dropped) == [(4, 0), (5, 0)]


def test_S56_the_last_buffer_sweeps_up_who_has_no_company() -> None:
    lab = with_somebody_outside(2, threat_model=MALICIOUS)
    land(lab)
    finish_training(lab, 0, 1, 2)
    lab.wait(lab.flushing.flush_after + 2)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3), (0, 1, 2)]
    assert lab.epoch.number == 2


def test_S56_company_of_the_same_model_is_summed_whenever_it_comes() -> None:
    lab = with_somebody_outside(2, threat_model=MALICIOUS)
    land(lab)
    finish_training(lab, 6)  # which trains from version 0 still
    lab.wait(2)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3), (4, 5, 6)]
    assert lab.epoch.number == 2
    assert lab.left_behind == []


def test_S56_R31_the_owner_of_an_update_that_is_dropped_as_an_epoch_ends_trains_anew() -> None:
    """It was held back for the sake of that update, and nobody else may bring another."""
    lab = with_somebody_outside(1, threat_model=MALICIOUS)
    land(lab)
    assert 4 not in trains(lab), "its update waits"
    lab.trainings = [each for each in lab.trainings if each[0] in (0, 4)]  # the others hang
    lab.wait(lab.flushing.flush_after + 1)
    assert lab.dropped == [(4, 0)]
    assert trains(lab) == {0: 1, 4: 1}


# -- attacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("naive", [True, False])
def test_S42_an_update_that_a_server_says_it_has_refused_is_not_given_again(naive: bool) -> None:
    """It says so, sums the upload, and lets the update come once more in the next epoch.

    Whoever signs there may know nothing of the first sum, so the two are over any clients that the
    server likes, and their difference is one client's update (`test_one_model_one_set`). A naive
    client believes the refusal.
    """
    lab, victim = with_somebody_outside(3), 4
    session, ledger = lab.clients[victim], lab.clients[victim]._ledger
    kept = _Trained(0, lab.disk.hashes[0], session._round.instructions, lab.update(victim, 0))  # type: ignore[union-attr]
    refusal = Codec(lab.settings.field).encode(UploadDropped(0))
    for lie in (pack_control(EpochCloses(1)), pack_protocol(1, refusal)):
        lab.do(victim, session.handle(Received(SERVER, lie), lab.now))
    for signer in lab.clients.values():
        signer._ledger.check_buffer = lambda terms: None  # type: ignore[method-assign]
    if naive:
        ledger.check_unspent = lambda fingerprint: None  # type: ignore[method-assign]
        ledger.check_epoch = lambda model: None  # type: ignore[method-assign]
    land(lab)
    assert lab.summed.count((victim, 0)) == 1
    assert session._work is None or session._work.version > 0, "it has nothing to give from it"
    session._work = kept
    lab.wait(2)
    assert lab.epoch.number == 2
    finish_training(lab, 5, 6, 7, 8)
    finish_training(lab, 5, 6, 7, 8)
    assert lab.summed.count((victim, 0)) == (2 if naive else 1)
    refused = any("this update is spent" in line for line in lab.client_log)
    assert refused != naive
