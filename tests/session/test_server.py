"""The server's session: every state and event, resumption at every point, deadlines by `now`."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import session_lab
from session_lab import CLIENTS, DIMENSION, SESSION, Disk, Laboratory

from laboratory import needs_laboratory
from lightsecagg.errors import Aborted, JournalError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    SERVER,
    LedgerChanged,
    Promised,
)
from lightsecagg.protocol.jobs import SumUploads
from lightsecagg.protocol.journal_facts import SharingClosed, SumAgreed, SumAnnounced
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.one_sum import OneSum
from lightsecagg.protocol.policy import Policy
from lightsecagg.session import server
from lightsecagg.session.envelope import (
    MAX_SEEN,
    VERSION,
    Goodbye,
    Hello,
    RoundOver,
    Withdraw,
    name_of,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.interface import (
    NEVER,
    Announcement,
    AnyRecord,
    Applied,
    Computed,
    ComputeFailed,
    Connected,
    Disconnected,
    Event,
    Members,
    MembersChanged,
    Post,
    Received,
    RoundAbandoned,
    Spoilt,
    Stop,
    Stored,
    StoreFailed,
    Trained,
    TrainingFailed,
    TrainingRefused,
)
from lightsecagg.session.peers import GREETING_DEADLINE
from lightsecagg.session.round_client import RoundClientSession
from lightsecagg.session.server import State

EVERYBODY = list(range(CLIENTS))
PHASES = {
    "advertise": ("Advertise", 1),
    "share": ("ShareBundle", 1),
    "upload": ("MaskedUpload", 2),
    "agree": ("Consent", 2),
    "recover": ("AggregatedShare", 2),
}
"""A point inside each phase: so many messages of this kind are in."""


def at(point: str, **plan: Any) -> Laboratory:
    """A laboratory in a state, or inside a phase of its first round."""
    lab = Laboratory(**plan)
    if point == "waiting":
        return lab
    lab.connect()
    if point in PHASES:
        lab.until_seen(*PHASES[point])
        return lab
    if point == "applying":
        lab.hold_apply = True
        lab.settle(lambda: lab.server.state is State.APPLYING)
    if point == "leaving":
        lab.settle()
        lab.disk.completed = 1
        lab.crash()
        lab.start()
        lab.settle()
    if point == "ended":
        lab.settle()
    return lab


def test_a_round_from_the_first_hello_to_goodbye() -> None:
    lab = Laboratory()
    lab.connect()
    lab.settle()
    (record,) = lab.records
    assert record.aborted is None
    assert record.included == record.invited == EVERYBODY
    assert lab.finished is not None
    assert lab.finished.error is None
    assert {end.goodbye for end in lab.goodbyes.values()} == {"the federation has finished"}
    assert lab.goodbyes.keys() == set(EVERYBODY)
    assert all(session.rounds == 1 for session in lab.clients.values())
    assert lab.server.state is State.ENDED
    assert lab.server.deadline == NEVER


JOB = SumUploads(DEFAULT_FIELD, DIMENSION, [])
EVENTS: dict[str, Event] = {
    "a stream": Connected(0),
    "a stranger's end": Disconnected(77, ""),
    "garbage": Received(0, b"\xff"),
    "bytes of a stranger": Received(77, b"\x00"),
    "a second hello": Received(0, pack_control(Hello(VERSION, -1))),
    "a withdrawal": Received(0, pack_control(Withdraw(1, "why not"))),
    "a message of another round": Received(0, pack_protocol(99, b"\x01\x01")),
    "an old record": Stored(Promised(one_sum=True)),
    "an old record that failed": StoreFailed(RoundAbandoned("x"), "the disk is full"),
    "a result that nobody asked for": Computed(JOB, np.zeros(DIMENSION, np.uint32)),
    "a job that nobody asked for, failed": ComputeFailed(JOB, "a file is gone"),
    "training at the server": Trained(1, Any),  # type: ignore[arg-type]
    "failed training at the server": TrainingFailed(1, "x"),
    "refused training at the server": TrainingRefused(1, "x"),
    "a ledger at the server": Stored(LedgerChanged(b"")),
}
STATES = ["waiting", *PHASES, "applying", "leaving", "ended"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", EVENTS)
def test_S29_every_event_has_an_answer_in_every_state(state: str, name: str) -> None:
    """Nothing is raised, and the others' round ends with their sum."""
    lab = at(state)
    lab.hold_apply = False
    lab.tell(EVENTS[name])
    if state == "waiting":
        lab.connect(*EVERYBODY[1:])
    lab.wait(2000.0)
    assert lab.finished is not None
    fails = name == "an old record that failed" and state in PHASES
    if not fails and state != "ended":
        assert [record.aborted for record in lab.records] == [None]


@pytest.mark.parametrize("state", STATES)
def test_R40_stop_ends_the_session_after_the_round_that_is_under_way(state: str) -> None:
    lab = at(state, number=3)
    lab.hold_apply = False
    lab.tell(Stop())
    lab.settle()
    assert lab.server.state is State.ENDED
    assert lab.finished is not None
    assert lab.finished.error is None
    if state == "waiting":
        assert lab.records == []
        assert lab.finished.goodbye is None, "clients wait for it to come back"
    elif state not in ("leaving", "ended"):
        assert [record.aborted for record in lab.records] == [None]


# -- R31: resumption -----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("count", range(1, CLIENTS + 1))
def test_R31_a_crash_at_any_message_loses_no_acknowledged_upload(phase: str, count: int) -> None:
    """Clients live on; the server comes back with what its disk holds."""
    lab = Laboratory()
    lab.connect()
    lab.until_seen(PHASES[phase][0], count)
    stored = set(lab.disk.rounds[1]["uploads"])
    announced = lab.disk.rounds[1]["survivors"]
    lab.crash()
    lab.start()
    lab.connect()
    lab.wait(1000.0)
    assert lab.finished is not None
    assert lab.finished.error is None
    (record,) = lab.records
    assert record.aborted is None
    assert record.resumed == bool(stored)
    assert stored <= set(record.included)
    if announced is not None:
        assert record.included == list(announced)


def test_R31_another_survivor_set_than_the_announced_one_is_refused() -> None:
    lab = Laboratory()
    lab.connect()
    lab.until_seen("Consent", 1)
    lab.crash()
    del lab.disk.rounds[1]["uploads"][0]
    with pytest.raises(
        Exception, match="no upload of client 0 is stored; restore it, or give the round up"
    ):
        lab.start()


def test_S41_reports_that_break_the_party_do_not_end_every_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server died between storing them and finding out."""
    lab = Laboratory(retries=1)
    lab.connect()
    lab.until_seen("MaskedUpload", CLIENTS)
    lab.crash()
    facts = lab.disk.rounds[1]["facts"]
    announced = [fact for fact in facts if b"SumAnnounced" in fact]
    assert len(announced) == 1
    lab.disk.rounds[1]["facts"] = [fact for fact in facts if fact not in announced]
    lab.disk.rounds[1]["survivors"] = None
    with monkeypatch.context() as patch:
        patch.setattr(OneSum, "_examine", lambda _self: 1 // 0)
        lab.start()
        lab.settle()
        assert "ZeroDivisionError" in lab.disk.rounds[1]["over"]
    lab.connect()
    lab.wait(30)
    assert [record.aborted is None for record in lab.records] == [False, True]


def test_S41_an_unforeseen_fault_in_what_is_stored_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Laboratory()
    lab.connect()
    lab.until_seen("Consent", 1)
    lab.crash()
    monkeypatch.setattr(OneSum, "_examine", lambda _self: 1 // 0)
    with pytest.raises(JournalError, match=r"ZeroDivisionError.*--abandon-round"):
        lab.start()


def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[RoundAbandoned]:
    """What is stored of the rounds that end without a sum."""
    ends: list[RoundAbandoned] = []
    store = Disk.store

    def noted(disk: Disk, number: int, record: AnyRecord) -> Any:
        if isinstance(record, RoundAbandoned):
            ends.append(record)
        return store(disk, number, record)

    monkeypatch.setattr(Disk, "store", noted)
    return ends


@pytest.mark.parametrize("crashes", [False, True])
def test_R59_S42_a_set_that_clients_may_have_answered_for_is_asked_again(
    crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few sign: nobody has answered, unless a certificate left before a crash."""
    monkeypatch.setattr(session_lab, "Announcement", lambda: Announcement(b"a model"))
    ends = abandoned(monkeypatch)
    lab = at("agree")
    if crashes:
        lab.crash()
        lab.start()
        lab.connect(0, 1)
    else:
        lab.disconnect(*EVERYBODY[2:])
    lab.wait(100.0)
    assert "clients signed, m = 4 are needed" in ends[0].reason
    assert ends[0].renews != crashes
    assert lab.server._announced[1] == (tuple(EVERYBODY) if crashes else None)


def test_R59_S42_a_set_that_has_its_signatures_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few answer here; those who did have answered for this set from this model."""
    monkeypatch.setattr(session_lab, "Announcement", lambda: Announcement(b"a model"))
    ends = abandoned(monkeypatch)
    lab = at("recover")
    lab.disconnect(*EVERYBODY[2:])
    lab.wait(1000.0)
    assert [end.renews for end in ends] == [False]
    assert lab.server._announced[1] == tuple(EVERYBODY)


def test_R59_a_model_is_renewed_whose_predecessor_had_a_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The set of the round before is of another model: it keeps nobody to this one."""
    models = count()
    monkeypatch.setattr(session_lab, "Announcement", lambda: Announcement(b"%d" % next(models)))
    lab = Laboratory(number=2)
    ends = abandoned(monkeypatch)
    lab.connect()
    lab.until_seen("MaskedUpload", CLIENTS + 1)
    lab.disconnect(*EVERYBODY[2:])
    lab.wait(1000.0)
    assert [record.aborted is None for record in lab.records] == [True, False]
    assert [end.renews for end in ends] == [True]


def test_a_round_without_an_upload_is_dropped_after_a_crash() -> None:
    lab = at("share")
    lab.crash()
    lab.start()
    assert lab.disk.rounds[1]["over"] == "dropped after a crash"
    lab.connect()
    lab.settle()
    assert [record.round for record in lab.records] == [2]


# -- members -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_new_allow_list_is_in_use_from_the_next_round_on(state: str) -> None:
    """Client 5 is revoked: the round under way keeps it, the next is without it."""
    lab = at(state, number=2)
    lab.hold_apply = False
    fewer = AllowList({i: key.public for i, key in lab.identities.items() if i != 5})
    settings = replace(
        lab.settings,
        parameters=replace(lab.settings.parameters, clients=5, survivors=0, dropouts=1),
        quantizer=Quantizer(DEFAULT_FIELD, bound=1.0, summands=5),
        allow_list=fewer.digest,
    )
    lab.tell(MembersChanged(Members(2, fewer, b"signed"), settings))
    lab.connect(*(client for client in EVERYBODY if client not in lab.online))
    lab.settle()
    if state in ("leaving", "ended"):
        return
    if state == "waiting":
        assert lab.records[0].invited == EVERYBODY[:5]
    else:
        assert lab.records[0].invited == EVERYBODY
        assert lab.records[0].aborted is None
    assert "client 5 is not on the allow-list any more" in str(lab.goodbyes[5].error)
    assert any("allow-list number 2 is in use" in line for line in lab.log)
    assert lab.takes == [(client, b"signed") for client in EVERYBODY[:5]]


# -- disks that are full -------------------------------------------------------------------------


def is_upload_of_3(record: AnyRecord) -> bool:
    return isinstance(record, Promised) and record.upload is not None and record.sender == 3


def promises(record: AnyRecord, kind: type) -> bool:
    facts = record.facts if isinstance(record, Promised) else ()
    return any(isinstance(fact, kind) for fact in facts)


def test_R36_an_upload_that_is_not_stored_is_not_acknowledged_nor_summed() -> None:
    lab = Laboratory()
    lab.disk.refuses = is_upload_of_3
    lab.connect()
    lab.settle()
    (record,) = lab.records
    assert record.included == [c for c in EVERYBODY if c != 3]
    assert record.dropped == {"upload": [3]}
    assert record.refusals == {"JournalError": 1}
    assert "client 3: round 1 was aborted: the server could not store the upload" in lab.client_log


@pytest.mark.parametrize(
    ("kind", "forbidden"),
    [(SharingClosed, "MaskedUpload"), (SumAnnounced, "Consent"), (SumAgreed, "AggregatedShare")],
)
def test_R36_nobody_hears_of_what_is_not_stored(kind: type, forbidden: str) -> None:
    lab = Laboratory()
    lab.disk.refuses = lambda record: promises(record, kind)
    lab.connect()
    lab.settle()
    (record,) = lab.records
    assert record.aborted == "the disk is full"
    assert forbidden not in {name for _, name in lab.seen}
    assert isinstance(lab.finished and lab.finished.error, Aborted)


# -- clients that come and go --------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["upload", "agree", "recover"])
def test_a_client_that_is_back_within_grace_is_asked_again(phase: str) -> None:
    lab = at(phase)
    lab.disconnect(5)
    lab.wait(4.0)
    lab.connect(5)
    lab.wait(100.0)
    (record,) = lab.records
    assert record.included == EVERYBODY
    assert record.dropped == {}


@pytest.mark.parametrize("phase", PHASES)
def test_R32_a_restarted_client_is_a_dropout_and_no_more(phase: str) -> None:
    lab = at(phase)
    lab.restart(5)
    lab.wait(100.0)
    (record,) = lab.records
    assert record.aborted is None
    assert record.dropped == {phase: [5]}


def same_vector_again(monkeypatch: pytest.MonkeyPatch, client: int) -> None:
    """As of one whose file nobody replaces."""
    real = Laboratory.update
    monkeypatch.setattr(
        Laboratory, "update", lambda lab, c, number: real(lab, c, 1 if c == client else number)
    )


def test_S06_R32_a_vector_that_was_summed_while_its_client_was_away_is_not_summed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was killed between its upload and its consent, which the others gave without it."""
    same_vector_again(monkeypatch, 5)
    lab = Laboratory(number=3)
    lab.connect()
    lab.until_seen("MaskedUpload", CLIENTS)
    lab.restart(5)
    lab.wait(100.0)
    first, *others = lab.records
    assert (first.included, first.dropped) == (EVERYBODY, {"agree": [5]})
    for record in others:
        assert record.included == EVERYBODY[:5]
        assert record.withdrawn == {"it has no update to upload": [5]}
    assert any("round 2" in line and "spent" in line for line in lab.client_log)


def test_a_vector_whose_round_failed_while_its_client_was_away_is_summed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_vector_again(monkeypatch, 5)
    lab = Laboratory(retries=1)
    lab.connect()
    lab.until_seen("MaskedUpload", CLIENTS)
    for client in (3, 4, 5):
        lab.restart(client)
    lab.wait(100.0)
    failed, repeated = lab.records
    assert failed.aborted is not None
    assert 5 in repeated.included


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_does_not_come_back_is_given_up_after_grace(phase: str) -> None:
    lab = at(phase)
    lab.disconnect(5)
    lab.wait(4.9)
    at_once = phase in ("advertise", "share")
    (running,) = [lab.server._round] if lab.server._round else [None]
    if running is not None and not at_once:
        assert running.record.dropped == {}
    lab.wait(0.2)
    lab.wait(100.0)
    (record,) = lab.records
    assert record.aborted is None
    assert record.dropped == {phase: [5]}


OUTAGE = 60.0


@pytest.mark.parametrize("phase", ["upload", "agree", "recover"])
def test_R31_no_network_at_the_server_loses_no_round_that_a_crash_would_not(phase: str) -> None:
    """Far longer than grace; the phase's own deadline is longer still."""
    lab = at(phase, agree=120.0)
    lab.disconnect()
    lab.wait(OUTAGE)
    assert lab.records == []
    lab.connect()
    lab.wait(200.0)
    (record,) = lab.records
    assert record.aborted is None
    assert record.included == EVERYBODY
    assert record.dropped == {}


@pytest.mark.parametrize("phase", ["upload", "agree", "recover"])
def test_R35_an_outage_ends_at_the_deadline_of_the_phase(phase: str) -> None:
    lab = at(phase)
    lab.disconnect()
    lab.wait(1000.0)
    assert lab.records[0].aborted is not None


def test_who_stays_away_after_an_outage_has_its_grace_from_then_on() -> None:
    lab = at("recover")
    lab.disconnect()
    lab.wait(OUTAGE)
    lab.connect(*EVERYBODY[:5])
    lab.settle()
    assert lab.records == [], "client 5 has its grace, which begins now"
    lab.wait(4.9)
    assert lab.records == []
    lab.wait(0.2)
    (record,) = lab.records
    assert record.aborted is None
    assert record.dropped == {"recover": [5]}


def test_grace_counts_where_nothing_is_stored() -> None:
    """A server that is killed here drops the round as well."""
    lab = Laboratory()
    lab.connect()
    lab.hold_training = True
    lab.settle()
    lab.disconnect()
    lab.wait(6.0)
    assert lab.records[0].aborted is not None


# -- deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_R35_a_phase_ends_at_its_deadline(phase: str) -> None:
    """One client says nothing more, and stays connected."""
    lab = at(phase)
    lab.clients[5].handle = lambda *_: []  # type: ignore[method-assign]
    lab.up = type(lab.up)(item for item in lab.up if item[0] != 5)
    lab.trainings = [item for item in lab.trainings if item[0] != 5]
    lab.wait(1200.0)
    (record,) = lab.records
    assert record.aborted is None
    assert record.phases[phase].seconds >= getattr(lab.plan, phase) - 1e-6


def test_R35_a_deadline_while_only_a_result_is_awaited_changes_nothing() -> None:
    lab = Laboratory()
    lab.connect()
    lab.hold_jobs = True
    lab.wait(5000.0)
    assert lab.records == []
    lab.hold_jobs = False
    lab.settle()
    assert lab.records[0].included == EVERYBODY


def test_a_client_that_refuses_for_want_of_shares_is_named_in_the_record() -> None:
    """The shares on their way to client 5 are lost, and its stream is not."""
    lab = Laboratory()
    lab.connect()
    while lab.step():
        lost = [each for each in lab.down if each[0] == 5 and name_of(each[1]) == "ShareBundle"]
        for each in lost:
            lab.down.remove(each)
    (record,) = lab.records
    assert record.aborted is None
    assert record.included == EVERYBODY[:5]
    reason = "it lacks the shares of 5 peers"
    assert record.withdrawn == {reason: [5]}
    assert f"round 1: client 5 refuses: {reason}" in lab.log


def test_a_failed_job_ends_its_round() -> None:
    lab = Laboratory()
    lab.connect()
    lab.hold_jobs = True
    lab.settle()
    lab.tell(ComputeFailed(lab.jobs[0], "a file is gone"))
    lab.settle()
    assert lab.records[0].aborted == "a file is gone"


def test_R35_a_stream_that_never_greets_is_cut() -> None:
    lab = Laboratory()
    lab.tell(Connected(0))
    lab.wait(GREETING_DEADLINE - 0.1)
    assert lab.cuts == []
    lab.wait(0.2)
    assert lab.cuts == [(0, "it did not say hello within 10 s")]


def test_R37_another_version_is_turned_away() -> None:
    lab = Laboratory()
    lab.tell(Connected(0))
    effects = lab.server.handle(Received(0, pack_control(Hello(VERSION + 1, -1))), lab.now)
    (post,) = [effect for effect in effects if isinstance(effect, Post)]
    content = unpack(post.data)
    assert isinstance(content, Goodbye)
    assert f"this server speaks version {VERSION}" in content.reason
    assert lab.server.connected == []


# -- waiting, retries and the end ----------------------------------------------------------------


def test_a_round_waits_for_more_clients_once_enough_are_there() -> None:
    lab = Laboratory()
    lab.connect(*EVERYBODY[:4])
    lab.wait(0.9)
    assert lab.server.state is State.WAITING
    lab.connect(4)
    lab.wait(0.2)
    assert lab.records[0].invited == EVERYBODY[:5]


def test_those_who_wait_begin_to_settle_when_the_last_that_is_needed_comes() -> None:
    lab = Laboratory()
    lab.connect(*EVERYBODY[:3])
    lab.wait(50.0)
    lab.connect(3)
    lab.settle()
    assert lab.server.state is State.WAITING
    lab.wait(1.1)
    assert lab.records[0].invited == EVERYBODY[:4]


def test_too_few_clients_end_the_federation_with_a_reason() -> None:
    lab = Laboratory()
    lab.connect(0, 1)
    lab.wait(121.0)
    assert lab.finished is not None
    assert "only 2 clients connected within 120 s, 4 are needed" in str(lab.finished.error)
    assert all(isinstance(lab.goodbyes[client].error, Aborted) for client in (0, 1))


def test_a_failed_round_is_tried_again_and_then_given_up() -> None:
    lab = Laboratory(retries=2)
    lab.disk.refuses = lambda record: promises(record, SharingClosed)
    lab.connect()
    lab.settle()
    assert [record.round for record in lab.records] == [1, 2, 3]
    assert "3 attempts at round 1: the disk is full" in str(lab.finished and lab.finished.error)


def test_a_spoilt_sum_ends_its_round_and_tells_clients_nothing_about_it() -> None:
    lab = at("applying", retries=1)
    lab.applying.clear()
    lab.tell(Spoilt("entry 3 is too large"))
    lab.hold_apply = False
    lab.settle()
    assert lab.records[0].spoilt
    assert lab.records[0].aborted == "the sum is spoilt: it cannot be used: entry 3 is too large"
    heard = [line for line in lab.client_log if "round 1 was aborted" in line]
    assert len(heard) == CLIENTS
    assert not any("entry 3" in line for line in heard)
    assert lab.records[1].aborted is None


def test_no_other_round_where_the_driver_has_enough() -> None:
    lab = at("applying", number=5)
    lab.applying.clear()
    lab.tell(Applied(Announcement(), "stopped early"))
    lab.settle()
    assert [record.round for record in lab.records] == [1]
    assert {end.goodbye for end in lab.goodbyes.values()} == {"stopped early"}


def test_a_restarted_server_tells_those_who_come_back_that_it_is_over() -> None:
    lab = at("ended")
    lab.goodbyes.clear()
    lab.crash()
    for client in EVERYBODY:
        del lab.clients[client]
    lab.start()
    lab.settle()
    assert lab.server.state is State.LEAVING
    lab.connect(2)
    lab.settle()
    assert lab.goodbyes.keys() == {2}
    lab.wait(16.0)
    assert lab.server.state is State.ENDED


def test_a_client_of_an_old_round_hears_that_it_is_over() -> None:
    lab = Laboratory()
    lab.tell(Connected(0))
    effects = lab.server.handle(Received(0, pack_control(Hello(VERSION, 41))), lab.now)
    posts = [effect.data for effect in effects if isinstance(effect, Post)]
    assert [unpack(data) for data in posts] == [RoundOver(41, "that round is over")]
    assert SERVER not in {effect.peer for effect in effects if isinstance(effect, Post)}


@pytest.mark.parametrize(("claims", "number"), [([41] * 6, 42), ([41, 41, 41, 41, 2**62, 99], 42)])
def test_S41_R31_a_server_with_an_older_journal_goes_on_behind_the_rounds_of_its_clients(
    claims: list[int], number: int
) -> None:
    """Clients refuse a round that they have seen; D = 2 of them may lie about it."""
    lab = Laboratory()
    for client, seen in enumerate(claims):
        lab.tell(Connected(client))
        lab.tell(Received(client, pack_control(Hello(VERSION, -1, seen=seen))))
    lab.wait(2)
    assert lab.server._round is not None
    assert lab.server._round.number == number
    assert any("this journal is older" in line for line in lab.log)


@pytest.mark.parametrize("naive", [True, False])
def test_S41_liars_cannot_use_up_the_numbers_of_rounds(
    naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than D claim to have seen all rounds, and leave: the honest have rounds."""
    if naive:
        monkeypatch.setattr(server, "FARTHEST_LEAP", MAX_SEEN)
    lab = Laboratory()
    for client in EVERYBODY:
        lab.tell(Connected(client))
        lab.tell(Received(client, pack_control(Hello(VERSION, -1, seen=MAX_SEEN))))
    lab.wait(2)
    lab.crash()
    lab.clients.clear()
    lab.start()
    lab.connect()
    lab.wait(30)
    assert (lab.records[-1].aborted is None) is not naive


def test_R31_rounds_go_on_after_a_journal_is_restored_from_a_backup() -> None:
    lab = Laboratory(number=3)
    lab.connect()
    while len(lab.records) < 2:
        if not lab.step():
            lab.now += 1.0
            lab.do(SERVER, lab.server.tick(lab.now))
    lab.crash()
    lab.disk = Disk()
    lab.start()
    lab.connect()
    lab.wait(30)
    assert lab.finished is not None
    assert lab.finished.error is None
    assert [record.aborted for record in lab.records] == [None] * 5
    numbers = [record.round for record in lab.records]
    assert numbers == sorted(set(numbers))


class Unprotected(Laboratory):
    """Nothing is masked: no roster, and the round begins with the uploads."""

    def start(self) -> None:
        parameters = replace(self.settings.parameters, threat_model=ThreatModel.HONEST_BUT_CURIOUS)
        self.settings = replace(self.settings, protocol="plain", parameters=parameters)
        super().start()

    def client(self, client: int) -> RoundClientSession:
        policy = Policy(
            self.allow_list,
            SESSION,
            1,
            ThreatModel.HONEST_BUT_CURIOUS,
            protocols=("plain",),
            bound=1.0,
        )
        ledger = Ledger.from_bytes(self.ledgers[client])
        return RoundClientSession(client, self.identities[client], policy, ledger, patience=600.0)


@needs_laboratory
@pytest.mark.parametrize("count", range(1, CLIENTS))
def test_R31_without_a_roster_those_who_had_not_uploaded_come_back_too(count: int) -> None:
    lab = Unprotected()
    lab.connect()
    lab.until_seen("MaskedUpload", count)
    lab.crash()
    lab.start()
    lab.connect()
    lab.settle()
    (record,) = lab.records
    assert record.resumed
    assert record.included == EVERYBODY
