"""A client's session: whatever the server says, whatever fails here, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from session_lab import CLIENTS, Laboratory

from lightsecagg.errors import Aborted
from lightsecagg.protocol.interface import SERVER, LedgerChanged, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.session.envelope import (
    MAX_SEEN,
    VERSION,
    Goodbye,
    Hello,
    RoundModel,
    RoundOver,
    UploadStored,
    Withdraw,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.instructions import Instructions
from lightsecagg.session.interface import (
    NEVER,
    Connected,
    Disconnected,
    Effect,
    Event,
    Finished,
    Post,
    Received,
    RoundLeft,
    Stop,
    Store,
    Stored,
    StoreFailed,
    Train,
    Trained,
    TrainingFailed,
    TrainingRefused,
)

ME = 2
OTHERS = [c for c in range(CLIENTS) if c != ME]
POINTS = ["new", "connected", "announced", "sharing", "uploaded", "signed", "ended"]


def at(point: str) -> Laboratory:
    """A laboratory whose client ME has come this far."""
    lab = Laboratory()
    if point == "new":
        lab.clients[ME] = lab.client(ME)
        return lab
    lab.connect()
    if point == "announced":
        lab.settle(lambda: any(client == ME for client, _ in lab.trainings))
    if point == "sharing":
        lab.hold_training = True
        lab.settle()
    if point == "uploaded":
        lab.until_seen("MaskedUpload", CLIENTS)
    if point == "signed":
        lab.until_seen("Consent", CLIENTS)
    if point == "ended":
        lab.settle()
    return lab


def posts(effects: list[Effect]) -> list[Any]:
    return [unpack(effect.data) for effect in effects if isinstance(effect, Post)]


MESSAGES: dict[str, bytes] = {
    "garbage": b"\xff",
    "nothing": b"\x00",
    "a client's hello": pack_control(Hello(VERSION, 1)),
    "a client's withdrawal": pack_control(Withdraw(1, "")),
    "an acknowledgement": pack_control(UploadStored(1)),
    "the end of another round": pack_control(RoundOver(7, "x")),
    "a message of another round": pack_protocol(7, b"\x01\x01"),
    "garbage of this round": pack_protocol(1, bytes(9)),
    "an impossible model": pack_control(RoundModel(2**62, b"\x00" * 3, float("nan"))),
}
EVENTS: dict[str, Event] = {
    **{name: Received(SERVER, data) for name, data in MESSAGES.items()},
    "a stream": Connected(SERVER),
    "the end of a stream": Disconnected(SERVER, ""),
    "training of another round": Trained(9, Update(np.zeros(3))),
    "failed training of another round": TrainingFailed(9, "x"),
    "refused training of another round": TrainingRefused(9, "x"),
    "a stored ledger": Stored(LedgerChanged(b"")),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", EVENTS)
def test_S41_every_event_has_an_answer_at_every_point(point: str, name: str) -> None:
    """It lives on, and hears a goodbye."""
    lab = at(point)
    session = lab.clients[ME]
    session.handle(EVENTS[name], lab.now)
    goodbye = pack_control(Goodbye("enough", finished=True))
    effects = session.handle(Received(SERVER, goodbye), lab.now)
    ended = [effect for effect in effects if isinstance(effect, Finished)]
    assert ended == ([] if point == "ended" else [Finished("enough")])
    assert session.handle(Received(SERVER, goodbye), lab.now) == []


@pytest.mark.parametrize("point", POINTS)
def test_S07_a_stopped_client_forgets_its_round(point: str) -> None:
    lab = at(point)
    session = lab.clients[ME]
    party = None if session._round is None else session._round.party
    session.handle(Stop(), lab.now)
    assert session.round == -1
    assert party is None or party.stored == 0


def test_R31_a_greeting_is_understood_whatever_number_liars_have_led_to() -> None:
    """More than D liars can move a server beyond the numbers that a greeting may name."""
    lab = Laboratory()
    ledger = Ledger()
    ledger.accept_loss(2**62 + 5)
    lab.ledgers[ME] = ledger.to_bytes()
    (hello,) = posts(lab.client(ME).handle(Connected(SERVER), lab.now))
    assert unpack(pack_control(hello)) == hello == Hello(VERSION, -1, seen=MAX_SEEN)


def test_it_greets_with_the_round_whose_party_is_alive() -> None:
    lab = at("sharing")
    session = lab.clients[ME]
    session.handle(Disconnected(SERVER), lab.now)
    assert posts(session.handle(Connected(SERVER), lab.now)) == [Hello(VERSION, 1, seen=1)]
    assert posts(lab.client(ME).handle(Connected(SERVER), lab.now)) == [Hello(VERSION, -1, seen=1)]


@pytest.mark.parametrize("point", ["sharing", "uploaded", "signed"])
def test_a_lost_connection_loses_nothing_else(point: str) -> None:
    lab = at(point)
    lab.disconnect(ME)
    lab.connect(ME)
    lab.hold_training = False
    lab.wait(100.0)
    assert lab.records[0].included == list(range(CLIENTS))
    assert lab.clients[ME].rounds == 1


def test_an_upload_that_was_lost_with_the_connection_is_sent_again() -> None:
    lab = Laboratory()
    lab.connect()
    lab.settle(lambda: lab.clients[ME]._round is not None and lab.clients[ME]._round.uploaded)
    assert (ME, "MaskedUpload") not in lab.seen, "it is on its way"
    lab.disconnect(ME)
    lab.connect(ME)
    lab.wait(100.0)
    assert lab.records[0].included == list(range(CLIENTS))
    assert lab.seen.count((ME, "MaskedUpload")) == 1, "the first was lost on its way"
    assert lab.clients[ME].rounds == 1


@pytest.mark.parametrize("point", ["announced", "sharing"])
def test_S44_a_client_without_an_update_withdraws_when_the_upload_is_due(point: str) -> None:
    """Not before, and always in the same words."""
    lab = at(point)
    lab.hold_training = True
    session = lab.clients[ME]
    lab.trainings = [item for item in lab.trainings if item[0] != ME]
    effects = session.handle(TrainingFailed(1, "NaN in client 2's data"), lab.now)
    told = posts(effects)
    assert told == ([] if point == "announced" else [Withdraw(1, "it has no update to upload")])
    lab.do(ME, effects)
    lab.hold_training = False
    lab.wait(100.0)
    (record,) = lab.records
    assert record.included == OTHERS
    assert record.dropped == {"upload": [ME]}
    assert record.withdrawn == {"it has no update to upload": [ME]}
    assert any("NaN in client 2's data" in line for line in lab.client_log), "see its own log"


@pytest.mark.parametrize(
    "update",
    [
        Update(np.full(5, 2.0)),
        Update(np.full(5, np.nan)),
        Update(np.zeros(4)),
        Update("no vector"),  # type: ignore[arg-type]
    ],
    ids=["beyond the bound", "NaN", "too short", "no vector"],
)
def test_S44_an_update_that_cannot_be_masked_is_no_update(update: Update) -> None:
    lab = at("sharing")
    effects = lab.clients[ME].handle(Trained(1, update), lab.now)
    assert posts(effects) == [Withdraw(1, "it has no update to upload")]


def test_a_client_that_does_not_train_as_told_says_so_at_once() -> None:
    lab = at("announced")
    effects = lab.clients[ME].handle(TrainingRefused(1, "epochs = 9 is too many"), lab.now)
    assert posts(effects) == [Withdraw(1, "epochs = 9 is too many")]
    assert RoundLeft(1, False, "epochs = 9 is too many") in effects


@pytest.mark.parametrize("kind", ["Advertise", "MaskedUpload", "Consent"])
def test_R36_nothing_leaves_that_the_ledger_does_not_account_for(kind: str) -> None:
    """The control is the same client with room on its disk, in every other test."""
    lab = Laboratory()
    lab.connect()
    before = {"Advertise": "Hello", "MaskedUpload": "Advertise"}.get(kind, "MaskedUpload")
    lab.settle(lambda: (ME, before) in lab.seen)
    lab.ledger_is_full.add(ME)
    lab.wait(100.0)
    assert (ME, kind) not in lab.seen
    (record,) = lab.records
    assert record.aborted is None
    assert record.withdrawn == {"its ledger cannot be written": [ME]}


def test_S42_an_update_from_the_same_model_is_handed_in_again() -> None:
    lab = Laboratory()
    session = lab.clients[ME] = lab.client(ME)
    model = np.zeros(5, np.float32).tobytes()
    (first,) = [
        effect
        for effect in session.handle(Received(SERVER, pack_control(RoundModel(1, model, 1.0))), 0.0)
        if isinstance(effect, Train)
    ]
    assert first.update is None
    update = Update(np.ones(5))
    session.handle(Trained(1, update), 0.0)
    (second,) = [
        effect
        for effect in session.handle(Received(SERVER, pack_control(RoundModel(2, model, 1.0))), 0.0)
        if isinstance(effect, Train)
    ]
    assert second.update is update
    session.handle(Trained(2, update), 0.0)
    message = pack_control(RoundModel(3, model, 0.5))
    (third,) = [e for e in session.handle(Received(SERVER, message), 0.0) if isinstance(e, Train)]
    assert third.update is None, "another bound is another task"


@pytest.mark.parametrize("told", [Instructions({"epochs": 9}), Instructions()])
def test_S55_an_update_that_was_asked_for_otherwise_is_not_handed_in_nor_made_again(
    told: Instructions,
) -> None:
    lab = Laboratory()
    session = lab.clients[ME] = lab.client(ME)
    model = np.zeros(5, np.float32).tobytes()
    session.handle(Received(SERVER, pack_control(RoundModel(1, model, 1.0))), 0.0)
    session.handle(Trained(1, Update(np.ones(5))), 0.0)
    effects = session.handle(Received(SERVER, pack_control(RoundModel(2, model, 1.0, told))), 0.0)
    assert not [effect for effect in effects if isinstance(effect, Train)]
    assert session._round is not None
    assert session._round.without_update
    effects = session.handle(Received(SERVER, pack_control(RoundModel(3, model, 1.0))), 0.0)
    assert [effect.update is not None for effect in effects if isinstance(effect, Train)] == [True]


def test_R35_a_server_that_says_nothing_is_given_up() -> None:
    lab = at("connected")
    session = lab.clients[ME]
    assert session.deadline == lab.now + 600.0
    assert session.tick(lab.now + 599.0) == []
    (end,) = [e for e in session.tick(lab.now + 600.0) if isinstance(e, Finished)]
    assert isinstance(end.error, Aborted)
    assert "said nothing for 600 s" in str(end.error)
    assert session.deadline == NEVER


def test_a_disconnected_client_has_no_deadline() -> None:
    lab = at("connected")
    session = lab.clients[ME]
    session.handle(Disconnected(SERVER), lab.now)
    assert session.deadline == NEVER


def test_a_failed_store_of_a_round_that_is_over_changes_nothing() -> None:
    lab = at("ended")
    session = lab.client(ME)
    assert session.handle(StoreFailed(LedgerChanged(b""), "full"), lab.now) == []


def test_every_record_comes_before_what_it_accounts_for() -> None:
    lab = Laboratory()
    lab.connect()
    session, order = lab.clients[ME], []
    handle = session.handle

    def watched(event: Event, now: float) -> list[Effect]:
        effects = handle(event, now)
        kinds = [type(effect).__name__ for effect in effects if isinstance(effect, Store | Post)]
        if "Store" in kinds:
            order.append(kinds)
        return effects

    session.handle = watched  # type: ignore[method-assign]
    lab.settle()
    posts = [["Store", "Post"], ["Store", "Post", "Post"], ["Store", "Post"]]
    assert order == posts, "keys; reports and upload; signature"
