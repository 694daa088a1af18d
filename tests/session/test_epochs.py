"""The asynchronous sessions, in memory: buffers, stragglers, restarts, crashes and attacks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from epoch_lab import BUFFERING, EpochDisk, EpochLaboratory, finish_training, opened

from laboratory import needs_laboratory
from lightsecagg.field.staleness import StalenessTable
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Phase, Promised
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import Opening, SumRequest
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import (
    EpochBegins,
    Fetch,
    MasksKnown,
    RoundModel,
    Version,
    Withdraw,
    name_of,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.epoch_client import EpochClientSession
from lightsecagg.session.instructions import Instructions
from lightsecagg.session.interface import (
    Announcement,
    Post,
    Received,
    Stop,
    Trained,
    TrainingFailed,
    TrainingRefused,
)
from lightsecagg.session.plan import Flushing
from lightsecagg.session.server import State


def posted(effects: Any) -> list[Any]:
    """The control messages, and the names of the others, that effects send."""
    sent = []
    for effect in effects:
        if isinstance(effect, Post):
            content = unpack(effect.data)
            sent.append(name_of(effect.data) if isinstance(content, tuple) else content)
    return sent


def test_buffers_of_k_updates_are_exact_and_clients_train_on() -> None:
    lab = EpochLaboratory(number=4)
    lab.connect()
    lab.wait(10)
    assert lab.finished is not None
    assert lab.finished.error is None
    assert [time for time, _, _ in lab.sums] == [0, 1, 2, 3]
    assert all(len(owners) == 4 for _, owners, _ in lab.sums)
    assert {goodbye.error for goodbye in lab.goodbyes.values()} == {None}
    assert lab.cuts == []
    record = lab.records[-1]
    assert (record.round, record.epoch, len(record.included)) == (4, 1, 4)
    assert sum(record.staleness.values()) == 4
    assert set(record.phases) >= {"agree", "recover"}
    lab.assert_summed_once()


def test_the_record_of_a_buffer_has_the_phases_of_that_buffer_alone() -> None:
    lab = opened(number=2)
    began, ready = 1000.0, lab.now
    for _ in range(2):
        lab.wait(7)
        finish_training(lab, 0, 1, 2, 3)
    first, second = (record.phases for record in lab.records)
    assert list(first) == ["advertise", "upload", "agree", "recover"]
    assert list(second) == ["upload", "agree", "recover"]
    assert [first["upload"].seconds, second["upload"].seconds] == [ready - began + 7, 7]
    assert second["upload"].start == 1e9 + ready + 7


def test_nobody_waits_for_a_straggler_whose_update_counts_when_it_comes() -> None:
    lab = opened(threat_model=ThreatModel.HONEST_BUT_CURIOUS)
    slow = 5
    for _ in range(4):
        finish_training(lab, 0, 1, 2, 3)
    assert lab.party.time == 4
    finish_training(lab, slow)
    finish_training(lab, 0, 1, 2)
    time, owners, staleness = lab.sums[-1]
    assert (time, owners) == (4, (0, 1, 2, slow))
    assert staleness[-1] == 4


def test_S56_a_straggler_without_company_is_in_no_buffer_and_holds_up_none() -> None:
    lab = opened()
    slow = 5
    for _ in range(4):
        finish_training(lab, 0, 1, 2, 3)
    finish_training(lab, slow)
    finish_training(lab, 0, 1, 2, 3)
    assert [(time, owners) for time, owners, _ in lab.sums[3:]] == [
        (3, (0, 1, 2, 3)),
        (4, (0, 1, 2, 3)),
    ]
    assert lab.party.intake.waiting == 0, "nobody else trains from its model any more"
    assert lab.dropped == [(slow, 0)]


def test_S56_R31_updates_that_wait_in_vain_leave_their_owners_room_for_more_masks() -> None:
    """Of five clients one is late in turn; peers keep the shares of two masks of each."""
    lab = opened(clients=5, dropouts=1, buffering=replace(BUFFERING, stock=2))
    for turn in range(8):
        late = turn % 5
        finish_training(lab, *(client for client in range(5) if client != late))
        finish_training(lab, late)
    assert len(lab.sums) == 8


def test_S56_R31_older_updates_without_company_are_given_up_when_no_buffer_can_be_formed() -> None:
    """Two wait for a third that is away and may come back, until nothing else goes on."""
    lab = opened(clients=7, flushing=Flushing(flush_after=20.0, reports=1.0, renew=2))
    finish_training(lab, 0, 1, 2, 3)
    finish_training(lab, 4, 5)
    lab.disconnect(6)
    lab.settle()
    assert lab.party.intake.waiting == 2
    lab.wait(19)
    assert lab.party.intake.waiting == 2
    lab.wait(30)
    assert lab.party.intake.waiting == 0


def test_S56_who_has_uploaded_from_a_model_is_no_company_that_may_still_come() -> None:
    lab = opened()
    finish_training(lab, 0, 1, 2, 3)
    finish_training(lab, 5)
    finish_training(lab, 0, 1, 2)
    assert lab.dropped == [(5, 0)], "4 alone may bring another"
    assert lab.party.intake.waiting == 3


def test_S56_who_has_no_memory_of_an_epoch_is_no_company_that_may_still_come() -> None:
    lab = opened(clients=7)
    finish_training(lab, 0, 1, 2, 3)
    finish_training(lab, 4, 5)
    lab.restart(6)
    lab.settle()
    finish_training(lab, 0, 1, 2, 3)
    assert lab.party.intake.waiting == 0
    assert lab.dropped == [(4, 0), (5, 0)]


@pytest.mark.parametrize("asked", [Instructions({"epochs": 9}), None])
def test_S55_an_update_waits_for_an_epoch_with_its_own_instructions(
    asked: Instructions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch's clients have what they were asked for; only then is it uploaded."""
    announced = property(lambda disk: Announcement(disk.model.tobytes(), asked))
    monkeypatch.setattr(EpochDisk, "announcement", announced)
    lab = opened()
    finish_training(lab, 0, 1, 2, 3)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3)]


def test_fast_clients_do_not_queue_up_ever_older_updates() -> None:
    """Six who train in no time, buffers of four: nobody is more than two versions behind."""
    lab = EpochLaboratory(number=12)
    lab.connect()
    lab.wait(10)
    assert len(lab.sums) == 12
    assert max(max(staleness) for _, _, staleness in lab.sums) <= 2


def test_masks_are_shared_several_at_a_time_when_half_of_those_shared_ahead_are_used() -> None:
    lab = opened(buffering=replace(BUFFERING, stock=8))
    bundles = [client for client, kind in lab.seen if kind == "ShareBundle"]
    assert sorted(bundles) == list(range(6)), "four masks in one bundle each"
    counts = []
    for _ in range(6):
        finish_training(lab, 0, 1, 2, 3)
        counts.append([client for client, kind in lab.seen if kind == "ShareBundle"].count(0))
    assert counts == [1, 1, 2, 2, 2, 3], "when one is left, three more"
    assert len(lab.sums) == 6


def test_too_few_updates_are_summed_when_the_deadline_fires() -> None:
    lab = opened(flushing=Flushing(flush_after=60.0, renew=5))
    finish_training(lab, 0, 1)
    lab.wait(70)
    assert lab.sums == [], "T + 2 = 3 at least"
    finish_training(lab, 2)
    lab.wait(70)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2)]


def test_nobody_waits_for_the_deadline_if_nobody_else_can_come() -> None:
    lab = opened(dropouts=2)
    lab.disconnect(4, 5)
    finish_training(lab, 0, 1, 2)
    client, train = next(each for each in lab.trainings if each[0] == 3)
    lab.trainings.remove((client, train))
    lab.do(3, lab.clients[3].handle(TrainingFailed(train.round, "no data"), lab.now))
    lab.wait(lab.plan.grace + 1)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2)]


def test_S42_a_model_that_nobody_can_train_from_any_more_is_renewed() -> None:
    """All updates were lost: a client hands in no second one from the same model."""
    lab = opened()
    before = lab.disk.model.copy()
    for client, train in list(lab.trainings):
        lab.do(client, lab.clients[client].handle(TrainingFailed(train.round, "lost"), lab.now))
    lab.trainings.clear()
    lab.wait(lab.plan.grace + 1)
    assert lab.renewals == [1]
    assert (lab.disk.model != before).sum() == 1
    assert abs(lab.disk.model - before).max() < 1e-30
    assert {train.round for _, train in lab.trainings} == {1}
    finish_training(lab, 0, 1, 2, 3)
    assert lab.sums[-1][0] == 1


def fail_training(lab: EpochLaboratory, *clients: int) -> None:
    """These clients have no update from the model that they got."""
    for client, train in [each for each in lab.trainings if each[0] in clients]:
        lab.trainings.remove((client, train))
        lab.do(client, lab.clients[client].handle(TrainingFailed(train.round, ""), lab.now))
    lab.settle()


def test_R59_a_buffer_that_nobody_here_can_complete_is_not_waited_for() -> None:
    """One update waits and one client trains: the third that their model needs is away."""
    lab = opened()
    finish_training(lab, 0)
    fail_training(lab, 1, 2, 3)
    lab.wait(lab.plan.grace + 1)
    assert lab.renewals == [], "4 and 5 may still bring two more"
    lab.disconnect(5)
    lab.wait(lab.plan.grace - 1)
    assert lab.renewals == [], "it may be back soon"
    lab.wait(2)
    assert lab.renewals == [1]
    finish_training(lab, 1, 2, 3)
    lab.wait(lab.flushing.flush_after)
    assert [owners for _, owners, _ in lab.sums] == [(1, 2, 3)]


def test_R59_who_is_here_and_silent_puts_a_new_version_off_and_does_not_prevent_it() -> None:
    lab = opened(upload=300.0, flushing=Flushing(flush_after=1000.0))
    finish_training(lab, 0, 1)
    fail_training(lab, 2, 3, 5)
    lab.wait(290)
    assert lab.renewals == [], "4 may train for long"
    lab.wait(15)
    assert lab.renewals == [1]
    finish_training(lab, 0, 1, 2, 3)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3)]


def test_R59_while_all_who_are_here_train_the_model_stays() -> None:
    lab = opened(upload=300.0)
    lab.wait(1000)
    assert lab.renewals == []


def test_R59_updates_of_an_older_model_wait_for_who_still_trains_from_it() -> None:
    lab = opened(clients=7)
    finish_training(lab, 0, 1, 2, 3)
    finish_training(lab, 4, 5)
    fail_training(lab, *range(6))
    lab.wait(lab.plan.grace + 1)
    assert lab.renewals == []
    finish_training(lab, 6)
    lab.wait(lab.flushing.flush_after)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3), (4, 5, 6)]


def test_R59_without_classes_the_updates_of_all_versions_make_a_buffer() -> None:
    lab = opened(threat_model=ThreatModel.HONEST_BUT_CURIOUS)
    finish_training(lab, 0, 1, 2, 3)
    finish_training(lab, 4)
    fail_training(lab, 1, 2, 3)
    lab.disconnect(5)
    lab.wait(lab.plan.grace + 1)
    assert lab.renewals == [2], "4 waits and 0 trains, three are needed"
    lab.connect(5)
    lab.settle()
    finish_training(lab, 5, 0)
    lab.wait(lab.flushing.flush_after)
    assert lab.sums[-1][1] == (0, 4, 5)


def test_R32_a_restarted_client_joins_the_next_epoch_and_the_others_go_on() -> None:
    lab = opened(flushing=Flushing(renew=2), threat_model=ThreatModel.HONEST_BUT_CURIOUS)
    lab.restart(5)
    lab.trainings = [each for each in lab.trainings if each[0] != 5]
    lab.settle()
    assert 5 not in {client for client, _ in lab.trainings}
    finish_training(lab, 0, 1, 2, 3)
    assert lab.epoch.number == 1, "not before `renew` buffers are recovered"
    finish_training(lab, 4)
    lab.settle()
    assert lab.party.intake.waiting == 1
    finish_training(lab, 0, 1, 2)
    lab.wait(2)
    assert lab.epoch.number == 2
    assert sorted(lab.party.members) == list(range(6))
    assert lab.party.time == 2, "versions go on from epoch to epoch"
    straggler = next(train for client, train in lab.trainings if client == 3)
    assert straggler.round == 1, "it has trained through the end of its epoch"
    finish_training(lab, 3, 4, 5, 0)
    time, owners, staleness = lab.sums[-1]
    assert (time, owners, staleness) == (2, (0, 3, 4, 5), (0, 1, 1, 0))
    lab.assert_summed_once()


def test_an_epoch_without_enough_memories_ends_at_once_and_its_owners_train_anew() -> None:
    lab = opened(dropouts=1)  # five of six are needed
    finish_training(lab, 0, 1, 2)
    lab.trainings = [each for each in lab.trainings if each[0] not in (4, 5)]
    lab.restart(4)
    lab.restart(5)
    lab.wait(2)
    assert lab.epoch.number == 2
    assert lab.renewals == [1]
    assert lab.party.time == 1
    finish_training(lab, 0, 1, 2, 4)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 4)]


def test_what_is_lost_with_a_connection_is_sent_again_or_forgotten() -> None:
    lab = opened(buffering=replace(BUFFERING, stock=2))
    client, train = next(each for each in lab.trainings if each[0] == 0)
    lab.trainings.remove((client, train))
    event = Trained(train.round, lab.update(0, train.round))
    lab.do(0, lab.clients[0].handle(event, lab.now))
    assert [name_of(data) for _, data in lab.up] == [
        "MaskedUpload",
        "ShareBundle",
        "Reports",
        "Fetch",
    ]
    lab.disconnect(0)  # all four are on their way
    ready, waiting = lab.clients[0]._round.party.serials  # type: ignore[union-attr]
    assert waiting == (0,)
    lab.connect(0)
    lab.settle()
    assert lab.party.intake.waiting == 1
    here, used = lab.party.serials(0)
    assert used == [0]
    ready, waiting = lab.clients[0]._round.party.serials  # type: ignore[union-attr]
    assert (list(ready), waiting) == (here, (0,)), "masks that never came are not used"
    finish_training(lab, 1, 2, 3)
    assert lab.sums[-1][1] == (0, 1, 2, 3)


def test_R52_a_buffer_in_flight_waits_for_clients_that_lose_their_connection() -> None:
    lab = opened(dropouts=1)
    lab.hold_jobs = True
    finish_training(lab, 0, 1, 2)
    client, train = next(each for each in lab.trainings if each[0] == 3)
    lab.trainings.remove((client, train))
    lab.do(3, lab.clients[3].handle(Trained(0, lab.update(3, 0)), lab.now))
    lab.settle(lambda: lab.party.phase is Phase.AGREE)
    lab.disconnect(4, 5)
    lab.settle()
    assert lab.party.phase is Phase.AGREE or lab.party.phase is Phase.RECOVER
    lab.connect(4, 5)
    lab.hold_jobs = False
    lab.settle()
    assert lab.sums[-1][1] == (0, 1, 2, 3)


@pytest.mark.parametrize("come_back", [True, False])
def test_R52_a_buffer_that_would_fail_without_the_absent_waits_until_its_deadline(
    come_back: bool,
) -> None:
    """Its updates are acknowledged: an outage longer than `grace` must not cost them."""
    lab = opened(dropouts=1)
    finish_training(lab, 0, 1, 2)
    client, train = next(each for each in lab.trainings if each[0] == 3)
    lab.trainings.remove((client, train))
    lab.do(3, lab.clients[3].handle(Trained(0, lab.update(3, 0)), lab.now))
    lab.settle(lambda: lab.party.phase is Phase.AGREE)
    lab.disconnect(4, 5)
    lab.wait(lab.plan.grace + 5)
    assert lab.party.in_flight.recovery is not None
    assert lab.renewals == []
    if come_back:
        lab.connect(4)
        lab.settle()
        assert lab.sums[-1][1] == (0, 1, 2, 3)
    else:
        lab.wait(lab.plan.recover)
        assert lab.records[-1].aborted is not None, "nobody waits for ever"


def test_a_spoilt_sum_costs_its_buffer_and_nothing_else() -> None:
    lab = opened()
    lab.spoils = True
    finish_training(lab, 0, 1, 2, 3)
    assert lab.sums == []
    assert lab.records[-1].spoilt
    assert lab.renewals == [1]
    finish_training(lab, 0, 1, 2, 3)
    assert lab.sums[-1][:2] == (1, (0, 1, 2, 3))


def test_R31_whatever_waits_when_an_epoch_makes_room_is_summed_first() -> None:
    """It is acknowledged: in as many buffers as it takes, down to one of T + 2."""
    lab = opened(clients=12, dropouts=3, flushing=Flushing(renew=1))
    lab.hold_jobs = True
    finish_training(lab, 0, 1, 2, 3)
    lab.restart(11)
    lab.trainings = [each for each in lab.trainings if each[0] != 11]
    finish_training(lab, *range(4, 11))
    lab.hold_jobs = False
    lab.wait(2)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]
    assert lab.epoch.number == 2


def test_R31_an_epoch_that_was_about_to_end_when_its_server_was_killed_goes_on() -> None:
    """Clients that were told to upload no more are not held to it by the next server."""
    lab = opened(clients=8, flushing=Flushing(renew=1))
    lab.hold_jobs = True
    finish_training(lab, 0, 1, 2, 3)
    lab.restart(7)
    lab.trainings = [each for each in lab.trainings if each[0] != 7]
    finish_training(lab, 4, 5, 6)
    lab.hold_jobs = False
    lab.settle(until=lambda: lab.clients[0]._closes)
    assert lab.clients[0]._closes
    lab.crash()
    lab.start()
    lab.connect()
    lab.settle()
    assert not lab.party.paused
    before = len(lab.sums)
    finish_training(lab, 0, 1, 2, 3)
    assert len(lab.sums) > before
    lab.assert_summed_once()


def test_R40_a_server_that_is_told_to_stop_begins_no_other_buffer() -> None:
    """However many updates wait: the one in flight is recovered, and that is all."""
    lab = opened()
    lab.hold_jobs = True
    finish_training(lab, 0, 1, 2, 3)
    assert lab.party.in_flight.recovery is not None
    finish_training(lab, 4, 5)
    lab.tell(Stop())
    lab.hold_jobs = False
    lab.hold_training = False
    lab.settle()
    assert lab.server.state is State.ENDED
    assert [time for time, _, _ in lab.sums] == [0]


def test_R40_a_server_that_is_told_to_stop_goes_on_with_the_same_epoch() -> None:
    lab = opened()
    finish_training(lab, 0, 1)
    lab.tell(Stop())
    lab.settle()
    assert lab.server.state is State.ENDED
    lab.crash()
    lab.start()
    lab.connect()
    lab.settle()
    assert lab.epoch.number == 1
    assert lab.party.intake.waiting == 2
    finish_training(lab, 2, 3)
    assert lab.sums[-1][1] == (0, 1, 2, 3)


class Unprotected(EpochLaboratory):
    """FedBuff: the same sockets, journal and weights, and no masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(threat_model=ThreatModel.HONEST_BUT_CURIOUS, **options)

    def start(self) -> None:
        parameters = replace(self.settings.parameters, threat_model=self.threat_model)
        self.settings = replace(self.settings, protocol="plain", parameters=parameters)
        super().start()

    def policy(self, **changes: Any) -> Policy:
        return super().policy(**{"protocols": ("plain",)} | changes)


@needs_laboratory
@pytest.mark.parametrize("crash", [False, True])
def test_fedbuff_runs_without_protection_over_the_same_sessions(crash: bool) -> None:
    lab = Unprotected(number=5)
    lab.hold_jobs = True
    lab.connect()
    lab.wait(2)
    assert lab.party.in_flight.recovery is not None
    kinds = {kind for _, kind in lab.seen}
    assert kinds == {"Hello", "Advertise", "Fetch", "MaskedUpload"}, "nobody is asked for shares"
    if crash:
        announced = lab.promised
        lab.crash()
        lab.start()
        assert lab.promised == announced
        lab.connect()
    lab.hold_jobs = False
    lab.wait(20)
    assert len(lab.sums) == 5
    assert lab.finished is not None
    lab.assert_summed_once()


@needs_laboratory
def test_S01_no_server_talks_a_client_into_going_unprotected() -> None:
    lab = Unprotected(number=1, retries=0, wait_for_clients=5.0)
    lab.connect(0, 1, 2, 3)
    lab.clients[4] = lab.client(4)
    careful = lab.policy(protocols=("lightsecagg",))
    lab.clients[5] = EpochClientSession(5, lab.identities[5], careful, Ledger(), patience=600.0)
    lab.connect(4, 5)
    lab.wait(10)
    ((reason, clients),) = lab.records[0].withdrawn.items()
    assert clients == [5]
    assert "plain, which this client does not accept" in reason


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("naive", [True, False])
def test_R31_a_server_killed_at_every_durable_point_loses_nothing_and_changes_nothing(
    naive: bool,
) -> None:
    """One run per point; in the last nothing is killed.

    A naive server stores that a mask is complete, and not its shares: whoever uploads under it
    when they are lost with the server is told that the update is stored, and later that it is not.
    """
    points, dropped = 0, 0
    while True:
        points += 1
        lab = EpochLaboratory(clients=5, dropouts=1, number=2, retries=9)
        lab.disk.keeps_shares = not naive
        lab.kill_at = points
        lab.connect()
        before: tuple[set[tuple[int, int]], Any] | None = None
        for _ in range(3000):
            if lab.finished is not None:
                break
            running = lab.server._round is not None and lab.party._registration.roster is not None
            before = lab.promised if running else None
            crashed = lab.kill_at == 1
            if not lab.step():
                lab.now += 1.0
                lab.do(SERVER, lab.server.tick(lab.now))
            if crashed and lab.kill_at == 0 and before is not None and lab.server._round:
                summed = [time for time, _, _ in lab.sums]
                needed, flight = lab.promised
                known = before[1]
                same = known is None or flight == known or known.time in summed
                assert same, "an announced buffer changed"
                assert before[0] <= needed or summed, "an upload that was acknowledged is lost"
        assert lab.finished is not None, f"it hangs after point {points}"
        assert lab.finished.error is None
        assert len(lab.sums) == 2
        assert lab.cuts == []
        assert not any("cannot follow" in line for line in lab.client_log)
        dropped += len(lab.wasted)
        if lab.kill_at > 0 or (naive and dropped):
            break
    assert (dropped > 0) == naive
    assert naive or points > 20


def test_R31_an_upload_whose_mask_was_lost_with_the_server_is_not_acknowledged() -> None:
    """Both are on their way when the server is killed; the upload alone is sent again."""
    lab = opened()
    client = lab.clients[0]
    party = client._round.party  # type: ignore[union-attr]
    party.discard(party.serials[0])  # type: ignore[union-attr]
    client._go_on()
    lab.do(0, client._taken())
    train = next(train for worker, train in lab.trainings if worker == 0)
    lab.trainings.remove((0, train))
    lab.do(0, client.handle(Trained(train.round, lab.update(0, train.round)), lab.now))
    assert [name_of(data) for _, data in lab.up] == [
        "ShareBundle",
        "Reports",
        "MaskedUpload",
        "Fetch",
    ]
    lab.crash()
    lab.start()
    lab.connect()
    lab.settle()
    assert lab.party.intake.waiting == 0
    assert client.rounds == 0, "it was not acknowledged"
    assert party.serials == (tuple(lab.party.serials(0)[0]), ())  # type: ignore[union-attr]
    finish_training(lab, 1, 2, 3, 4)
    finish_training(lab, 0, 1, 2, 3)
    assert [owners for _, owners, _ in lab.sums] == [(1, 2, 3, 4), (0, 1, 2, 3)]
    assert client.rounds == 1


def test_R31_a_buffer_in_flight_waits_for_those_who_were_away_when_its_server_was_killed() -> None:
    """Three have signed, the others are away, and it was waiting for them."""
    lab = opened()
    lab.disconnect(4, 5)
    finish_training(lab, 0, 1, 2)
    client, train = next(each for each in lab.trainings if each[0] == 3)
    lab.trainings.remove((client, train))
    lab.do(3, lab.clients[3].handle(Trained(0, lab.update(3, 0)), lab.now))
    lab.settle(lambda: lab.party.in_flight.recovery is not None and len(signatures(lab)) == 3)
    (unsigned,) = {0, 1, 2, 3} - set(signatures(lab))
    lab.disconnect(unsigned)
    lab.crash()
    lab.start()
    assert lab.renewals == []
    assert lab.party.phase is Phase.AGREE
    lab.connect()
    lab.settle()
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3)]


def signatures(lab: EpochLaboratory) -> dict[int, bytes]:
    flight = lab.party.in_flight.recovery
    return {} if flight is None else dict(flight.agreement.signatures)


def upload_of(owner: int) -> Any:
    """Whether a record brings an upload of this client's."""
    return lambda r: isinstance(r, Promised) and r.upload and r.upload.tag.owner == owner


def shares_of(owner: int) -> Any:
    """Whether a record brings a mask of this client's."""
    return lambda r: isinstance(r, Promised) and r.shares and r.shares[0].owner == owner


@pytest.mark.parametrize("crash", [False, True])
def test_R36_a_full_disk_costs_an_upload_which_is_not_acknowledged(crash: bool) -> None:
    lab = opened()
    lab.disk.refuses = upload_of(0)
    finish_training(lab, 0)
    assert "epoch 1: the upload of client 0: the disk is full" in lab.log
    assert (lab.party.intake.waiting, lab.clients[0].rounds) == (0, 0)
    lab.disk.refuses = lambda record: False
    if crash:
        lab.crash()
        lab.start()
        lab.connect()
        lab.settle()
    finish_training(lab, 1, 2, 3, 4)
    finish_training(lab, 0, 1, 2, 3)
    assert [owners for _, owners, _ in lab.sums] == [(1, 2, 3, 4), (0, 1, 2, 3)], "from version 1"
    assert lab.clients[0].rounds == 1
    assert lab.dropped == []


def test_R36_the_last_upload_of_a_buffer_that_finds_the_disk_full_is_not_in_it() -> None:
    lab = opened()
    finish_training(lab, 0, 1, 2)
    lab.disk.refuses = upload_of(3)
    finish_training(lab, 3)
    assert lab.party.phase is Phase.UPLOAD
    assert lab.party.intake.waiting == 3
    finish_training(lab, 4)
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 4)]


def test_R36_masks_that_find_the_disk_full_cost_updates_and_then_others_are_shared() -> None:
    lab = EpochLaboratory(number=50, retries=5)
    lab.hold_training = True
    lab.disk.refuses = shares_of(0)
    lab.connect()
    lab.wait(2)
    assert lab.party.serials(0) == ([], [])
    finish_training(lab, 0)
    assert (lab.party.intake.waiting, lab.clients[0].rounds) == (0, 0), "its mask is unknown"
    lab.disk.refuses = lambda record: False
    for _ in range(2):
        finish_training(lab, 1, 2, 3, 4)
        finish_training(lab, 0)
    assert lab.clients[0].rounds == 1, "it had two masks that nobody knows"
    finish_training(lab, 1, 2, 3)
    assert lab.sums[-1][:2] == (2, (0, 1, 2, 3))
    assert lab.dropped == []


@pytest.mark.parametrize("threat_model", ThreatModel)
@pytest.mark.parametrize("seed", range(2))
def test_R31_R32_random_kills_of_server_and_clients(seed: int, threat_model: ThreatModel) -> None:
    """Whatever happens: every sum is exact, of no update two, and the federation finishes."""
    rng = random.Random(seed)
    lab = EpochLaboratory(number=6, retries=9, wait_for_clients=60.0, threat_model=threat_model)
    lab.hold_training = True
    lab.connect()
    for _ in range(700):
        happening, client = rng.random(), rng.choice(list(lab.identities))
        if lab.finished is not None:
            break
        if happening < 0.01:
            running = (
                lab.server.state is State.RUNNING and lab.party._registration.roster is not None
            )
            before = lab.promised if running else (set(), None)
            lab.crash()
            lab.start()
            assert not running or lab.promised == before
        elif happening < 0.02 and client in lab.online:
            lab.trainings = [each for each in lab.trainings if each[0] != client]
            lab.restart(client)
        elif happening < 0.03 and client in lab.online:
            lab.disconnect(client)
        elif happening < 0.15 and client not in lab.online:
            lab.connect(client)
        elif happening < 0.2:
            lab.now += rng.choice([0.1, 1.0, 3.0])
            lab.do(SERVER, lab.server.tick(lab.now))
        elif happening < 0.35 and lab.trainings:
            worker, train = lab.trainings.pop(rng.randrange(len(lab.trainings)))
            event = Trained(train.round, lab.update(worker, train.round))
            lab.do(worker, lab.clients[worker].handle(event, lab.now))
        else:
            lab.step()
    lab.hold_training = False
    for _ in range(200):
        away = [client for client in lab.identities if client not in lab.online]
        if lab.finished is not None:
            break
        if away:
            lab.connect(*away)
        lab.wait(3)
    assert lab.finished is not None
    assert lab.finished.error is None
    assert len(lab.sums) == 6
    slow = "it did not say hello within 10 s"  # time passes while a greeting is on its way
    assert {reason for _, reason in lab.cuts} <= {slow}
    assert not any("cannot follow" in line for line in lab.client_log)
    # Against a malicious server an update may find no company (S56).
    assert threat_model is ThreatModel.MALICIOUS_SERVER or lab.dropped == []
    assert lab.left_behind == []
    lab.assert_summed_once()


def random_history(lab: EpochLaboratory, rng: random.Random, silent: int | None) -> None:
    """Clients train, fail, lose connections and restart; the disk is full at times."""
    clients, full = list(lab.identities), False
    lab.disk.refuses = lambda record: full and getattr(record, "can_fail", False)
    for _ in range(rng.randrange(20, 120)):
        happening, client = rng.random(), rng.choice(clients)
        busy = [worker for worker, _ in lab.trainings if worker != silent]
        if happening < 0.6 and busy:
            do = fail_training if rng.random() < 0.15 else finish_training
            do(lab, rng.choice(busy))
        elif happening < 0.65 and client in lab.online:
            lab.disconnect(client)
        elif happening < 0.75 and client not in lab.online:
            lab.connect(client)
        elif happening < 0.79 and client in lab.online:
            lab.trainings = [each for each in lab.trainings if each[0] != client]
            lab.restart(client)
        elif happening < 0.81:
            lab.crash()
            lab.start()
            lab.connect()
        elif happening < 0.83:
            full = not full
        elif happening < 0.93:
            lab.wait(rng.choice([0.1, 1.0, 6.0, 12.0]))
        for _ in range(rng.choice([5, 10, 10_000])):
            if not lab.step():
                break
    full = False


@pytest.mark.parametrize("seed", range(40))
def test_R59_whatever_has_happened_the_next_buffers_come_once_all_is_well(seed: int) -> None:
    """All are connected and train at once, but for one client that may say nothing at all."""
    rng = random.Random(seed)
    clients = rng.choice([5, 6, 7, 8, 9])
    silent = rng.choice([None, clients - 1])
    modes = [ThreatModel.MALICIOUS_SERVER, ThreatModel.HONEST_BUT_CURIOUS]
    lab = opened(
        clients=clients,
        dropouts=1 if clients == 5 else rng.choice([1, 2]),
        buffering=replace(BUFFERING, stock=rng.choice([2, 4])),
        threat_model=rng.choice(modes),
        flushing=Flushing(flush_after=10.0, reports=5.0, renew=rng.choice([1, 2, 5])),
        upload=300.0,
    )
    random_history(lab, rng, silent)
    lab.connect(*(client for client in range(clients) if client not in lab.online))
    sums, end = len(lab.sums), lab.now + (100.0 if silent is None else 1000.0)
    while len(lab.sums) < sums + 3 and lab.now < end:
        lab.settle()
        finish_training(lab, *(client for client, _ in lab.trainings if client != silent))
        lab.wait(1)
    assert len(lab.sums) >= sums + 3
    lab.assert_summed_once()


# -- attacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("naive", [True, False])
def test_S42_a_client_that_uploads_twice_from_one_version_counts_once(naive: bool) -> None:
    """A server that forgets who has uploaded from which model lets both wait; ours drops one."""
    lab = opened()
    cheat = lab.clients[0]
    finish_training(lab, 0)
    lab.trainings.clear()
    if naive:
        lab.party.intake.queue.accepted.clear()
    cheat._newest = -1
    again = pack_control(Version(0, lab.disk.model.tobytes()))
    lab.do(0, cheat.handle(Received(SERVER, again), lab.now))
    ((_, train),) = lab.trainings
    lab.trainings.clear()
    lab.do(0, cheat.handle(Trained(train.round, lab.update(0, 99)), lab.now))
    lab.settle()
    waiting = [each.tag.serial for each in lab.party.intake.queue.waiting]
    assert waiting == ([0, 1] if naive else [0])


@pytest.mark.parametrize("naive", [True, False])
def test_S44_a_server_that_gives_one_model_again_and_again_gets_few_answers(naive: bool) -> None:
    """Whether an upload follows tells whether the update is within the bound of the epoch.

    Epochs without an upload are counted, but those since the last one alone, whatever model that
    came from: with uploads from others in between, a naive client would let a server search for the
    size of its update from one model, by as many bounds as it likes.
    """
    lab = opened()
    victim = lab.clients[0]
    party = victim._round.party  # type: ignore[union-attr]
    if naive:
        party._contributor._policy = lab.policy(max_openings=1000)  # type: ignore[union-attr]
    lab.do(0, victim.handle(TrainingFailed(0, "no data"), lab.now))
    answers = 0
    for version in range(1, 31):
        if version == 10:
            model = Version(version, b"another model")
            lab.do(0, victim.handle(Received(SERVER, pack_control(model)), lab.now))
            event = Trained(version, lab.update(0, version))
            assert "MaskedUpload" in posted(victim.handle(event, lab.now))
            assert victim._ledger._entries.unconfirmed == 0
            continue
        offer = pack_control(Version(version, b"the same model"))
        effects = victim.handle(Received(SERVER, offer), lab.now)
        kinds = [type(effect).__name__ for effect in effects]
        if "Train" in kinds:
            assert kinds.index("Store") < kinds.index("Train"), "a restart forgets none of them"
            answers += 1
            victim.handle(TrainingFailed(version, "beyond the bound"), lab.now)
    assert answers == (29 if naive else 16)


def test_S09_a_server_that_announces_two_buffers_for_one_time_gets_no_second_answer() -> None:
    lab = opened()
    lab.hold_jobs = True
    finish_training(lab, 0, 1, 2, 3)
    flight = lab.party.in_flight.recovery
    assert flight is not None
    codec, victim = Codec(lab.settings.field), lab.clients[5]
    other = SumRequest(flight.time, flight.request.tags[1:])
    again = pack_protocol(lab.epoch.number, codec.encode(flight.request))
    second = pack_protocol(lab.epoch.number, codec.encode(other))
    # A naive client answers whatever it is asked: the difference of the two sums is an update.
    assert posted(victim.handle(Received(SERVER, again), lab.now)) == ["AggregatedShare"]
    (reply,) = posted(victim.handle(Received(SERVER, second), lab.now))
    assert isinstance(reply, Withdraw)
    assert "has consented to another" in reply.reason
    assert victim.round == -1


def test_S06_R32_what_a_restarted_client_is_replayed_gets_no_upload_and_no_answer() -> None:
    """Its masks are gone with its process, its ledger remembers the epoch."""
    lab = opened()
    heard: list[bytes] = []
    original = lab.clients[5].handle

    def listen(event: Any, now: float) -> Any:
        if isinstance(event, Received):
            heard.append(event.data)
        return original(event, now)

    lab.clients[5].handle = listen  # type: ignore[method-assign]
    finish_training(lab, 0, 1, 2, 3)
    assert "SumRequest" in set(map(name_of, heard))
    opening = pack_protocol(
        1, Codec(lab.settings.field).encode(Opening(lab.epoch.settings.to_bytes()))
    )
    replay = [pack_control(EpochBegins(1)), opening, *heard]
    fresh = lab.client(5)
    sent = [reply for data in replay for reply in posted(fresh.handle(Received(SERVER, data), 0))]
    assert [type(reply).__name__ for reply in sent] == ["Withdraw"]
    assert "has already seen round 1" in sent[0].reason


@pytest.mark.parametrize(
    "other",
    [
        replace(BUFFERING, max_updates=5),
        replace(BUFFERING, table=StalenessTable((2, 1, 1, 1, 1, 1), 2)),
        replace(BUFFERING, stock=6),
        replace(BUFFERING, strict=True),
        replace(BUFFERING, max_ratio=2.0),
    ],
    ids=["K", "weights", "stock", "strict", "ratio"],
)
def test_S09_a_client_takes_part_with_its_own_buffering_and_no_other(other: Any) -> None:
    lab = EpochLaboratory(number=1, retries=0)
    lab.connect(0, 1, 2, 3, 4)
    lab.buffering = other
    odd = lab.client(5)
    lab.clients[5] = odd
    lab.buffering = BUFFERING
    lab.connect(5)
    lab.wait(2)
    assert lab.records[0].withdrawn, "it says why"
    ((reason, clients),) = lab.records[0].withdrawn.items()
    assert clients == [5]
    assert "other asynchronous settings" in reason
    assert lab.sums, "the others go on"


def test_rounds_and_epochs_do_not_mix() -> None:
    lab = opened()
    client = lab.clients[0]
    model = pack_control(RoundModel(7, b"", 1.0))
    (reply,) = posted(client.handle(Received(SERVER, model), lab.now))
    assert isinstance(reply, Withdraw)
    assert client.round == 1, "and its epoch goes on"


def test_S41_what_nobody_foresaw_ends_the_epoch_and_not_the_server() -> None:
    lab = opened()

    def fault(client: int) -> None:
        raise ZeroDivisionError("a secret")

    lab.party.leave = fault  # type: ignore[assignment,method-assign]
    lab.disconnect(5)
    lab.wait(2)
    assert any("unforeseen ZeroDivisionError at" in line for line in lab.log)
    assert not any("a secret" in line for line in lab.log)
    lab.connect(5)
    lab.wait(5)
    assert lab.epoch.number == 2
    finish_training(lab, *range(4))
    assert [owners for _, owners, _ in lab.sums] == [(0, 1, 2, 3)]


def test_S41_control_messages_out_of_place_change_nothing() -> None:
    lab = opened()
    client = lab.clients[0]
    for message in (
        MasksKnown(99, (), ()),
        Version(-5, b""),
        Version(3, b"x"),
        Fetch(3),
        EpochBegins(99),
    ):
        client.handle(Received(SERVER, pack_control(message)), lab.now)
    assert client.round == 99
    (effects,) = [lab.server.handle(Received(1, pack_control(Fetch(-7))), lab.now)]
    assert [type(each).__name__ for each in posted(effects)] == ["Version"]
    lab.tell(Received(2, pack_control(Version(3, b""))))
    assert lab.cuts[-1][0] == 2


def test_a_client_that_refuses_the_settings_withdraws_from_the_epoch_and_says_why() -> None:
    lab = opened()
    for _ in range(3):  # versions and the number of the epoch are different things
        finish_training(lab, 0, 1, 2, 3)
    train = next(train for client, train in lab.trainings if client == 0)
    assert train.round == 3
    lab.trainings.remove((0, train))
    effects = lab.clients[0].handle(TrainingRefused(train.round, "epochs = 9 is too many"), lab.now)
    lab.do(0, effects)
    lab.settle()
    assert "client 0: round 1: epochs = 9 is too many" in lab.client_log
    assert any("it withdraws: 'epochs = 9 is too many'" in line for line in lab.log)
    assert lab.clients[0]._work is None
    finish_training(lab, 1, 2, 3)
    lab.wait(lab.flushing.flush_after + 1)
    assert lab.sums[-1][1] == (1, 2, 3)


@pytest.mark.parametrize("naive", [True, False])
def test_S55_an_update_is_not_uploaded_in_an_epoch_with_other_instructions(naive: bool) -> None:
    """Training may outlast its epoch, and the next one may ask for something else."""
    lab = opened()
    ((_, train),) = [each for each in lab.trainings if each[0] == 0]
    epoch = lab.clients[0]._round
    assert epoch is not None
    if not naive:
        epoch.announcement = Announcement(b"", Instructions({"epochs": 9}))
    event = Trained(train.round, lab.update(0, train.round))
    sent = posted(lab.clients[0].handle(event, lab.now))
    assert ("MaskedUpload" in sent) == naive
    assert any(isinstance(each, Fetch) for each in sent), "it goes on with another model"
