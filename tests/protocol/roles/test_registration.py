"""Registration in both modes: what is admitted, who is told what, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from async_driver import AsyncFederation
from driver import Federation

from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.errors import LocalProtocolError, ParameterError, RemoteProtocolError
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.client_machine import Advertised, Closed
from lightsecagg.protocol.interface import SERVER, RoundAborted, Send
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import AbortRound, Advertise, Opening, Roster
from lightsecagg.protocol.roles.registration import (
    Registration,
    accept_opening,
    draw_keys,
    enter_roster,
)
from lightsecagg.protocol.roster import sign_keys
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import hash_model


def test_S44_opening_epoch_after_epoch_comes_to_an_end() -> None:
    """A server that only opens and never sums learns from who takes part; epochs count, too."""
    fed = AsyncFederation(policy={"scale": 0.0, "max_openings": 2})
    ledger = Ledger.volatile()

    def take_part(number: int) -> list[Any]:
        party = Client(0, fed.keys[0], fed.policy, ledger)
        return party.receive(SERVER, Opening(replace(fed.settings, round=number).to_bytes()))

    for number in (1, 2):
        (sent,) = take_part(number)
        assert isinstance(sent, Send)
        assert isinstance(sent.message, Advertise)
    with pytest.raises(RemoteProtocolError, match="max_openings = 2"):
        take_part(3)


def test_S44_epochs_in_which_this_client_has_uploaded_do_not_count() -> None:
    fed = AsyncFederation(policy={"scale": 0.0, "max_openings": 1})
    ledger = Ledger.volatile()
    for number in range(1, 4):
        opening = Opening(replace(fed.settings, round=number).to_bytes())
        accept_opening(opening, fed.policy, ledger)
        ledger.count_upload(hash_model(b"%d" % number))


def servers() -> dict[str, Any]:
    """How a server of either mode is made for these guests."""
    round_, epoch = Federation(7, 1, 2, 4), AsyncFederation()
    return {
        "round": (
            round_.ids,
            lambda invited: Server(round_.settings(), round_.allow_list, invited),
        ),
        "epoch": (
            tuple(epoch.keys),
            lambda invited: Server(epoch.settings, epoch.allow_list, invited, buffer_size=4),
        ),
    }


@pytest.mark.parametrize("mode", ["round", "epoch"])
def test_both_modes_invite_distinct_clients_of_the_allow_list_and_enough_of_them(mode: str) -> None:
    ids, make = servers()[mode]
    for invited, match in [
        ((*ids[:-1], 999), r"clients \[999\] are invited but not on the allow-list"),
        ((*ids[:-1], ids[0]), "a client is invited twice"),
        (ids[:2], "2 clients are invited; these parameters take"),
    ]:
        with pytest.raises(ParameterError, match=match):
            make(invited)
    make(ids)


@pytest.mark.parametrize("mode", ["round", "epoch"])
def test_both_modes_take_nothing_before_they_are_started(mode: str) -> None:
    ids, make = servers()[mode]
    server = make(ids)
    with pytest.raises(LocalProtocolError, match=r"start the (round|epoch) before delivering"):
        server.receive(ids[0], Advertise((), b""))
    with pytest.raises(LocalProtocolError, match="before its first deadline"):
        server.proceed()
    server.start()
    with pytest.raises(RemoteProtocolError, match="client 999 was not invited"):
        server.receive(999, Advertise((), b""))


def test_who_is_late_with_its_keys_is_told_so_that_it_can_forget_them() -> None:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    fed.away.add(5)
    fed.settle()
    told = {send.to: send.message for send in fed.server.proceed() if isinstance(send, Send)}
    assert isinstance(told[0], Roster)
    assert [member.client for member in told[0].members] == [0, 1, 2, 3, 4]
    late = told[5]
    assert isinstance(late, AbortRound)
    fed.step_down(5)
    party = fed.clients[5]
    assert isinstance(party.state, Advertised)
    assert party.receive(SERVER, late) == [RoundAborted(late.reason)]
    assert party.state == Closed(late.reason)


def test_the_client_side_and_the_server_side_agree_on_the_roster() -> None:
    fed = Federation(7, 1, 2, 4)
    settings, policy = fed.settings(), fed.policy()
    server = Registration(settings, fed.allow_list, None, system_entropy)
    fresh = {c: draw_keys(settings, c, fed.identities[c], system_entropy) for c in fed.ids}
    for client, keys in fresh.items():
        assert server.on_advertise(client, keys.advertise)
        assert not server.on_advertise(client, keys.advertise)
    server.close()
    roster, theirs = server.roster, server.scheme.round.context
    assert roster is not None
    for client, keys in fresh.items():
        scheme = enter_roster(settings, policy, roster, client, keys.advertise, CodedMasksClient)
        assert scheme.round.context == theirs
    other = draw_keys(settings, fed.ids[0], fed.identities[fed.ids[0]], system_entropy)
    with pytest.raises(RemoteProtocolError, match="advertised two sets of keys"):
        server.on_advertise(fed.ids[0], other.advertise)
    assert repr(other) == "FreshKeys(1)"


def test_S01_S06_an_opening_is_taken_if_the_policy_and_the_ledger_admit_it() -> None:
    fed = Federation()
    ledger, policy = Ledger.volatile(), fed.policy()

    def opening(number: int, **changes: Any) -> Opening:
        return Opening(fed.settings(number, **changes).to_bytes())

    with pytest.raises(RemoteProtocolError, match="another session"):
        accept_opening(opening(1, session=b"t" * 32), policy, ledger)
    assert ledger.last_round == -1
    assert accept_opening(opening(3), policy, ledger) == fed.settings(3)
    for old in (2, 3):
        with pytest.raises(RemoteProtocolError, match="has already seen round 3"):
            accept_opening(opening(old), policy, ledger)
    for far in (4 + 2**48, 2**64 - 1):  # after which no honest server could open a round
        with pytest.raises(RemoteProtocolError, match="281474976710656 after the last one, 3"):
            accept_opening(opening(far), policy, ledger)
    accept_opening(opening(4), policy, ledger)


def test_S44_openings_are_counted_by_model_and_altogether_where_models_come_later() -> None:
    fed = Federation()
    models = {number: hash_model(b"%d" % number) for number in range(1, 6)}
    later, ledger = fed.policy(model=None, max_openings=2), Ledger.volatile()
    for number in (1, 2):
        message = Opening(fed.settings(number, model=models[number]).to_bytes())
        accept_opening(message, later, ledger)
    message = Opening(fed.settings(3, model=models[3]).to_bytes())
    with pytest.raises(RemoteProtocolError, match="2"):
        accept_opening(message, later, ledger)
    ledger = Ledger.volatile()
    again = fed.policy(max_openings=2)
    for number in (1, 2):
        accept_opening(Opening(fed.settings(number).to_bytes()), again, ledger)
    with pytest.raises(RemoteProtocolError, match="max_openings = 2"):
        accept_opening(Opening(fed.settings(3).to_bytes()), again, ledger)
    ledger = Ledger.volatile()
    for number, model in models.items():  # each of them given to this client before
        known = fed.policy(model=model, max_openings=2)
        accept_opening(Opening(fed.settings(number, model=model).to_bytes()), known, ledger)


def test_a_server_invites_as_few_as_the_parameters_take_and_nobody_by_another_list() -> None:
    fed = Federation(7, 1, 2, 4)
    settings = fed.settings()
    few = fed.ids[: settings.minimum]
    assert Registration(settings, fed.allow_list, few, system_entropy).invited == few
    with pytest.raises(ParameterError, match="4 to N = 7"):
        Registration(settings, fed.allow_list, few[1:], system_entropy)
    other = Federation(8, 1, 2, 4).allow_list
    with pytest.raises(ParameterError, match="made for another allow-list"):
        Registration(settings, other, fed.ids, system_entropy)


def test_S45_keys_are_taken_that_are_the_sender_s_own_and_nobody_else_s() -> None:
    fed = Federation(7, 1, 2, 4)
    settings = fed.settings()
    server = Registration(settings, fed.allow_list, None, system_entropy)
    first, second, *_ = fed.ids
    keys = draw_keys(settings, first, fed.identities[first], system_entropy)
    with pytest.raises(RemoteProtocolError, match="does not verify"):
        server.on_advertise(second, keys.advertise)
    server.on_advertise(first, keys.advertise)
    public = keys.advertise.keys
    copied = sign_keys(fed.identities[second], settings.context, second, public)
    with pytest.raises(RemoteProtocolError, match="another client has advertised before"):
        server.on_advertise(second, Advertise(public, copied))
    assert list(server.advertised) == [first]
