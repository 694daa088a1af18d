"""A round on its way, by itself: a party that says what the test wants, and a clock by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from session_lab import DIMENSION, SESSION

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Persist,
    Phase,
    Promised,
    RoundAborted,
    Send,
)
from lightsecagg.protocol.jobs import Compute, SumUploads
from lightsecagg.protocol.journal_facts import SharingClosed, SumAnnounced
from lightsecagg.protocol.messages import (
    AbortRound,
    Consent,
    MaskedUpload,
    Message,
    Refusal,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.budgets import phase_budget
from lightsecagg.session.envelope import (
    VERSION,
    Hello,
    RoundOver,
    UploadStored,
    Withdraw,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.interface import (
    NEVER,
    Allow,
    ClientLeft,
    Computed,
    ComputeFailed,
    Cut,
    Disconnected,
    Effect,
    Leave,
    Log,
    PhaseBegan,
    Post,
    Progress,
    Store,
)
from lightsecagg.session.peers import Greeted, Peers, Spoke
from lightsecagg.session.plan import COMEBACK, Plan
from lightsecagg.session.round import RoundInProgress

EVERYBODY = tuple(range(6))
START, GRACE, NUMBER = 1000.0, 5.0, 7
SETTINGS = Settings(
    "lightsecagg",
    Parameters(6, 1, 2, threat_model=ThreatModel.MALICIOUS_SERVER),
    Quantizer(DEFAULT_FIELD, bound=1.0, summands=6),
    DIMENSION,
    SESSION,
    NUMBER,
    AllowList({client: IdentityKey.generate().public for client in EVERYBODY}).digest,
)
CODEC = Codec(SETTINGS.field)
UPLOAD = MaskedUpload(Tag(2), np.zeros(DIMENSION, np.uint32))
CLOSED = Promised((SharingClosed(tuple((c, b"") for c in EVERYBODY[:5])),), one_sum=True)


def taken(client: int) -> Promised:
    """The record of this client's upload."""
    return Promised((), MaskedUpload(Tag(client), UPLOAD.vector), one_sum=True)


def chosen_of(*survivors: int) -> Promised:
    """The record of U1."""
    request = SumRequest(0, tuple(map(Tag, survivors)))
    return Promised((SumAnnounced(request, (), ()),), one_sum=True)


class StubParty:
    """Notes what it is asked, and answers what it was told to."""

    def __init__(self) -> None:
        self.phase = Phase.ADVERTISE
        self.pending: frozenset[int] = frozenset(EVERYBODY)
        self.late_messages: Counter[str] = Counter()
        self.uploaders: frozenset[int] = frozenset()
        self.asked: tuple[int, ...] = ()
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Output]] = {}

    def _called(self, *call: Any) -> list[Output]:
        self.calls.append(call)
        return self.answers.pop(call[0], [])

    def receive(self, client: int, message: Message) -> list[Output]:
        if isinstance(message, AbortRound):
            raise RemoteProtocolError("not from a client")
        return self._called("receive", client)

    def drop(self, client: int) -> list[Output]:
        self.pending -= {client}
        return self._called("drop", client)

    def proceed(self) -> list[Output]:
        return self._called("proceed")

    def computed(self, job: Any, result: Any) -> list[Output]:
        return self._called("computed", job)

    def stored(self, record: Any, upload: Any) -> list[Output]:
        return self._called("stored", record.sender, upload is not None)

    def unstored(self, record: Any) -> list[Output]:
        return self._called("unstored", record.sender)

    def rejoin(self, client: int) -> list[Output]:
        return self._called("rejoin", client)


class Scene:
    """One round that has just begun, with everybody here."""

    def __init__(self, stored: list[int] | None = None, away: tuple[int, ...] = ()) -> None:
        self.now = START
        self.effects: list[Effect] = []
        self.party: Any = StubParty()
        self.peers = Peers(self.effects.append, len(EVERYBODY))
        for client in set(EVERYBODY) - set(away):
            self.greet(client)
        plan = Plan(grace=GRACE)
        settings = (self.party, SETTINGS, EVERYBODY, plan, self.peers, self.effects.append)
        if stored is not None:
            self.party.phase, self.party.uploaders = Phase.UPLOAD, frozenset(stored)
        self.round = RoundInProgress(*settings, self.now, resumed=stored is not None)
        self.effects.clear()
        self.round.begin([], self.now)

    def greet(self, client: int) -> None:
        self.peers.connected(client, self.now)
        self.peers.received(client, pack_control(Hello(VERSION, NUMBER)))

    def leave(self, client: int) -> None:
        self.peers.disconnected(client, self.now)
        self.round.take(Disconnected(client), self.now)

    def enter(self, phase: Phase) -> None:
        """The party goes on, which any event makes the round notice."""
        self.party.phase, self.party.pending = phase, frozenset(EVERYBODY)
        self.release()

    def release(self, *outputs: Output) -> None:
        """The party asks for something."""
        self.party.answers["computed"] = list(outputs)
        self.round.take(Computed(object(), object()), self.now)  # type: ignore[arg-type]

    def after(self, seconds: float) -> None:
        """What the session does when that much time has passed since the beginning."""
        self.now = START + seconds
        self.round.tick(self.now)

    def say(self, client: int, message: Message, number: int = NUMBER) -> None:
        body = memoryview(CODEC.encode(message))
        self.round.take(Spoke(client, (number, body)), self.now)

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def told(self, client: int) -> list[Any]:
        return [unpack(post.data) for post in self.of(Post) if post.peer == client]

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.party.calls if call[0] == name]


def test_a_phase_begins_with_budgets_a_line_and_progress() -> None:
    scene = Scene()
    budget = phase_budget(SETTINGS, Phase.ADVERTISE)
    assert scene.of(Allow) == [Allow(client, budget) for client in EVERYBODY]
    assert scene.of(Progress) == [Progress("advertise", 0, 6, frozenset(EVERYBODY))]
    (line,) = scene.of(Log)
    assert (
        line.message % line.arguments == "round 7: advertise: waiting for 6 clients, 30 s at most"
    )
    assert len(scene.of(PhaseBegan)) == 1
    assert scene.round.deadline == START, "somebody may be away already"
    scene.after(0.0)
    assert scene.round.deadline == START + 30.0


def test_progress_is_told_at_most_every_twentieth_of_a_second() -> None:
    scene = Scene()
    scene.party.pending = frozenset({4, 5})
    told = []
    for step in range(1, 8):
        scene.now = START + step / 40
        scene.effects.clear()
        scene.release()
        told.append(scene.of(Progress))
    one = [Progress("advertise", 4, 6, frozenset({4, 5}))]
    assert told == [[], one, [], one, [], one, []]


def test_no_progress_of_a_round_that_is_over() -> None:
    scene = Scene()
    scene.party.phase = Phase.DONE
    scene.release()
    scene.now += 1.0
    scene.effects.clear()
    scene.release()
    assert not scene.effects


def test_at_its_deadline_a_phase_goes_on_with_what_there_is_and_nobody_is_given_up() -> None:
    scene = Scene()
    scene.enter(Phase.UPLOAD)
    scene.now = START + 900.0 - GRACE
    scene.leave(3)
    scene.after(900.0 - 0.01)
    assert not scene.calls("proceed")
    scene.effects.clear()
    scene.after(900.0)
    assert scene.calls("proceed") == [()]
    assert not scene.calls("drop"), "whoever is late is the party's business now"
    assert [line.message % line.arguments for line in scene.of(Log)] == [
        "round 7: the deadline of phase upload fired"
    ]
    assert scene.round.deadline == NEVER
    scene.after(1000.0)
    assert scene.calls("proceed") == [()]


def test_a_deadline_with_nobody_pending_is_none() -> None:
    scene = Scene()
    scene.enter(Phase.RECOVER)
    scene.party.pending = frozenset()
    scene.effects.clear()
    scene.after(120.0)
    assert not scene.calls("proceed")
    assert not scene.of(Log)


@pytest.mark.parametrize("phase", [Phase.ADVERTISE, Phase.SHARE])
def test_who_leaves_while_shares_are_under_way_is_given_up_at_once(phase: Phase) -> None:
    scene = Scene()
    scene.enter(phase)
    scene.leave(3)
    assert scene.calls("drop") == [(3,)]
    assert scene.round.record.dropped == {str(phase): [3]}


@pytest.mark.parametrize("phase", [Phase.UPLOAD, Phase.AGREE, Phase.RECOVER])
def test_who_leaves_later_is_given_up_after_grace(phase: Phase) -> None:
    scene = Scene()
    scene.enter(phase)
    scene.now = START + 1.0
    scene.leave(3)
    scene.now = START + 2.0
    scene.leave(1)
    scene.leave(2)
    assert scene.round.deadline == START + 1.0 + GRACE
    scene.after(1.0 + GRACE - 0.01)
    assert not scene.calls("drop")
    scene.after(1.0 + GRACE)
    assert scene.calls("drop") == [(3,)]
    scene.after(1.5 + GRACE)
    assert scene.round.deadline == START + 2.0 + GRACE
    scene.after(2.0 + GRACE)
    assert scene.calls("drop") == [(3,), (1,), (2,)]
    (first, *_) = scene.of(ClientLeft)
    assert first == ClientLeft(3, str(phase), Leave.DROPPED, "did not come back")


def test_nobody_is_given_up_any_more_when_a_departure_ends_the_round() -> None:
    scene = Scene()
    scene.enter(Phase.UPLOAD)
    scene.leave(1)
    scene.leave(2)
    scene.party.drop = lambda client: setattr(scene.party, "phase", Phase.DONE) or []
    scene.after(GRACE)
    assert scene.round.record.dropped == {"upload": [1]}


@pytest.mark.parametrize(("stored", "patience"), [(None, GRACE), ([], COMEBACK)])
def test_who_never_came_has_grace_from_the_beginning_more_after_a_restart(
    stored: list[int] | None, patience: float
) -> None:
    scene = Scene(stored, away=(5,))
    scene.after(3.0)
    assert scene.round.deadline == START + patience
    scene.after(patience - 0.01)
    assert not scene.calls("drop")
    scene.after(patience)
    assert scene.calls("drop") == [(5,)]


def test_R31_nobody_is_given_up_while_too_few_are_here_for_uploads_that_are_stored() -> None:
    scene = Scene([0])
    scene.after(0.0)
    for client in (1, 2, 3):
        scene.leave(client)
    scene.after(100.0)
    assert not scene.calls("drop")
    assert scene.round.deadline == START + 900.0
    scene.greet(1)
    scene.round.take(Greeted(1, NUMBER), scene.now)
    assert scene.round.deadline == scene.now, "perhaps enough are here again"
    scene.after(100.0)
    assert scene.round.deadline == START + 100.0 + GRACE, "grace counts from then on"
    scene.after(100.0 + GRACE - 0.01)
    assert not scene.calls("drop")
    scene.after(100.0 + GRACE)
    assert scene.calls("drop") == [(2,), (3,)]


def test_who_can_still_be_in_the_sum_counts_alone() -> None:
    """Four are needed. Of the five owners one is lost, and one more is away."""
    scene = Scene([0])
    scene.release(Persist(CLOSED))
    scene.round.on_stored(CLOSED, None, scene.now)
    scene.leave(4)
    scene.after(GRACE)
    assert scene.calls("drop") == [(4,)]
    scene.leave(3)
    scene.after(10 * GRACE)
    assert scene.calls("drop") == [(4,)], "three owners are here, client 5 is none"


def test_of_the_survivors_none_is_given_up_whom_the_sum_needs() -> None:
    scene = Scene([0])
    chosen = chosen_of(0, 1, 2, 3)
    scene.release(Persist(chosen))
    assert scene.round.survivors == (0, 1, 2, 3)
    scene.round.on_stored(chosen, None, scene.now)
    scene.leave(3)
    scene.after(10 * GRACE)
    assert not scene.calls("drop"), "four are needed, and clients 4 and 5 are none of them"


@pytest.mark.parametrize("record", [CLOSED, chosen_of(0, 1, 2, 3)])
def test_a_phase_waits_for_the_promise_that_it_begins_with(record: Any) -> None:
    scene = Scene()
    scene.party.phase = Phase.RECOVER
    scene.effects.clear()
    scene.release(Persist(record))
    assert scene.of(Store) == [Store(NUMBER, record)]
    assert not scene.of(PhaseBegan)
    scene.round.on_stored(chosen_of(9), None, scene.now)
    assert not scene.of(PhaseBegan)
    scene.now += 1.0
    scene.round.on_stored(record, None, scene.now)
    assert len(scene.of(PhaseBegan)) == 1
    assert scene.round.record.phases["advertise"].seconds == 1.0


@pytest.mark.parametrize("record", [CLOSED, chosen_of(0, 1, 2, 3)])
def test_R36_a_promise_that_cannot_be_stored_ends_the_round(record: Any) -> None:
    scene = Scene()
    scene.release(Persist(record))
    scene.round.on_store_failed(chosen_of(9), "not this one", scene.now)
    assert not scene.round.is_over
    scene.effects.clear()
    scene.round.on_store_failed(record, "the disk is full", scene.now)
    assert scene.round.is_over
    assert scene.round.record.aborted == "the disk is full"
    assert scene.round.deadline == NEVER, "its end waits for no promise"
    assert [line.message % line.arguments for line in scene.of(Log)] == [
        "round 7: the disk is full"
    ]


def test_an_upload_counts_and_is_acknowledged_when_it_is_stored() -> None:
    scene = Scene()
    scene.enter(Phase.UPLOAD)
    record = taken(2)
    scene.party.answers["receive"] = [Persist(record)]
    scene.say(2, UPLOAD)
    assert scene.of(Store) == [Store(NUMBER, record)]
    assert not scene.told(2)
    scene.party.answers["stored"] = [Send(4, AbortRound("released"))]
    scene.round.on_stored(record, object(), scene.now)  # type: ignore[arg-type]
    assert scene.calls("stored") == [(2, True)]
    assert len(scene.told(4)) == 1
    assert scene.told(2) == [UploadStored(NUMBER)]
    assert scene.round.stored == {2}
    scene.say(2, UPLOAD)
    assert scene.told(2) == [UploadStored(NUMBER)] * 2, "it has sent it again"
    scene.say(2, Consent(0, bytes(64)))
    scene.say(3, UPLOAD)
    assert scene.told(2) == [UploadStored(NUMBER)] * 2
    assert not scene.told(3)


def test_an_upload_of_the_round_before_is_none_of_this_one() -> None:
    """It was being stored when that round ended."""
    scene = Scene()
    scene.enter(Phase.UPLOAD)
    scene.effects.clear()
    old, new = taken(2), taken(3)
    scene.release(Persist(new))
    scene.round.on_stored(old, object(), scene.now)  # type: ignore[arg-type]
    scene.round.on_store_failed(old, "the disk is full", scene.now)
    assert not scene.calls("stored")
    assert not scene.told(2)
    scene.round.on_stored(new, object(), scene.now)  # type: ignore[arg-type]
    scene.round.on_stored(new, object(), scene.now)  # type: ignore[arg-type]
    assert scene.calls("stored") == [(3, True)], "and once is enough"
    assert scene.round.stored == {3}


def test_R36_an_upload_that_cannot_be_stored_costs_its_sender_the_round() -> None:
    scene = Scene()
    scene.enter(Phase.UPLOAD)
    record = taken(2)
    scene.release(Persist(record))
    scene.effects.clear()
    scene.round.on_store_failed(record, "the disk is full", scene.now)
    assert scene.calls("unstored") == [(2,)]
    assert scene.told(2) == [RoundOver(NUMBER, "the server could not store the upload")]
    lines = [line.message % line.arguments for line in scene.of(Log)]
    assert lines == [
        "round 7: the upload of client 2: the disk is full",
        "round 7: client 2 dropped in phase upload: its upload could not be stored",
    ]
    assert not scene.round.is_over
    scene.say(2, UPLOAD)
    assert scene.party.late_messages == {"after a dropout": 1}
    scene.round.conclude()
    assert scene.round.record.refusals == {"JournalError": 1}
    assert scene.round.record.late == {"after a dropout": 1}


def test_jobs_are_effects_and_one_that_fails_ends_the_round() -> None:
    scene = Scene()
    done, failing = (SumUploads(SETTINGS.field, 1, []) for _ in range(2))
    scene.release(Compute(done), Compute(failing))
    assert scene.of(Compute) == [Compute(done), Compute(failing)]
    scene.round.take(Computed(done, np.zeros(1, np.uint32)), scene.now)
    assert scene.calls("computed")[-1] == (done,)
    scene.round.take(ComputeFailed(done, "it was done"), scene.now)
    assert not scene.round.is_over
    scene.round.take(ComputeFailed(failing, "a file is gone"), scene.now)
    assert scene.round.is_over
    assert scene.round.record.aborted == "a file is gone"


def test_a_result_is_noted_and_forgotten_with_a_failure() -> None:
    scene = Scene()
    total = Aggregate(np.zeros(1, np.uint32), (0, 1), (1, 2), (2,), ((0, 2),))
    scene.release(total)
    assert scene.round.aggregate is total
    record = scene.round.record
    assert (record.included, record.responders) == ([0, 1], [1, 2])
    assert (record.suspects, record.accused) == ([2], [(0, 2)])
    scene.round.fail("after all")
    assert scene.round.aggregate is None


def test_an_abort_is_noted() -> None:
    scene = Scene()
    scene.release(RoundAborted("too few", (3,), ((1, 3),)))
    record = scene.round.record
    assert (record.aborted, record.suspects, record.accused) == ("too few", [3], [(1, 3)])
    assert scene.round.aggregate is None


def test_S41_what_nobody_foresaw_ends_the_round_and_nothing_follows() -> None:
    scene = Scene()
    scene.now += 2.0
    scene.peers.bytes_in += 30
    scene.peers.bytes_out += 50
    scene.party.drop = None
    scene.leave(3)
    assert scene.round.is_over
    assert (scene.round.record.aborted or "").startswith("unforeseen TypeError")
    phase = scene.round.record.phases["advertise"]
    assert (phase.seconds, phase.bytes_in, phase.bytes_out) == (2.0, 30, 50)
    assert scene.round.deadline == NEVER
    scene.effects.clear()
    scene.say(4, UPLOAD)
    scene.after(1000.0)
    scene.round.take(Greeted(4, -1), scene.now)
    assert not scene.effects
    assert not scene.calls("receive")
    assert not scene.calls("proceed")


def test_who_greets_with_the_number_is_asked_again_and_anybody_else_is_out() -> None:
    scene = Scene()
    scene.enter(Phase.UPLOAD)
    scene.effects.clear()
    scene.party.answers["rejoin"] = [Send(1, AbortRound("again"))]
    scene.round.take(Greeted(1, NUMBER), scene.now)
    assert len(scene.told(1)) == 1
    scene.round.take(Greeted(2, -1), scene.now)
    scene.round.take(Greeted(3, 6), scene.now)
    assert not scene.told(2)
    assert scene.told(3) == [RoundOver(6, "that round is over")]
    assert scene.calls("drop") == [(2,), (3,)]
    scene.round.take(Greeted(2, NUMBER), scene.now)
    assert scene.told(2) == [RoundOver(NUMBER, "the round goes on without this client")]
    assert scene.calls("rejoin") == [(1,)]


def test_a_withdrawal_is_heard_once_and_from_members_alone() -> None:
    scene = Scene()
    for client, number in ((1, 6), (9, NUMBER), (1, NUMBER), (1, NUMBER)):
        scene.round.take(Spoke(client, Withdraw(number, "no update")), scene.now)
    assert scene.calls("drop") == [(1,)]
    assert scene.round.record.withdrawn == {"no update": [1]}
    assert scene.of(ClientLeft) == [
        ClientLeft(1, "advertise", Leave.WITHDRAWN, "it withdraws: 'no update'")
    ]


def test_a_message_of_another_round_is_late_and_a_refused_one_costs_its_sender_the_round() -> None:
    scene = Scene()
    scene.say(1, UPLOAD, NUMBER - 1)
    assert scene.party.late_messages == {"other round": 1}
    scene.say(2, AbortRound("a server's word"))
    assert [cut.peer for cut in scene.of(Cut)] == [2]
    assert scene.calls("drop") == [(2,)]
    assert scene.of(ClientLeft)[0].how is Leave.REFUSED
    scene.say(9, AbortRound("a stranger's"))
    assert [cut.peer for cut in scene.of(Cut)] == [2, 9]
    assert scene.calls("drop") == [(2,)]


def test_who_refuses_for_want_of_shares_is_named_once() -> None:
    scene = Scene()
    scene.effects.clear()
    for client in (1, 1, 2):
        scene.say(client, Refusal(0, (3, 4)))
    assert scene.round.record.withdrawn == {"it lacks the shares of 2 peers": [1, 2]}
    assert [line.message % line.arguments for line in scene.of(Log)] == [
        f"round 7: client {client} refuses: it lacks the shares of 2 peers" for client in (1, 2)
    ]
    assert scene.calls("receive") == [(1,), (1,), (2,)]
    assert not scene.calls("drop")


@pytest.mark.parametrize("phase", [Phase.SHARE, Phase.UPLOAD])
def test_the_last_one_that_is_awaited_may_take_long(phase: Phase) -> None:
    scene = Scene()
    scene.enter(phase)
    for awaited, closing in ((EVERYBODY[:2], False), (EVERYBODY[:1], True), ((), True)):
        scene.party.pending = frozenset(awaited)
        assert scene.round.is_closing == closing


def test_the_same_message_is_encoded_once() -> None:
    scene = Scene()
    message = AbortRound("to many")
    scene.release(*(Send(client, message) for client in EVERYBODY))
    posts = scene.of(Post)
    assert len(posts) == 6
    assert len({id(post.data) for post in posts}) == 1
    assert posts[0].data == pack_protocol(NUMBER, CODEC.encode(message))
