"""Clients that lie in sharing or in their reports, in whole rounds (S46).

A liar holds a scheme that lies. The control is a server that does not examine reports: there one
liar stops a round without being named, and with exactly U answers the sum is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from bundles import Part, whole
from disk import Disk
from driver import HONEST, MALICIOUS, PAPER, SEEDED, Federation, Network
from film import Film
from hypothesis import given
from hypothesis import strategies as st

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.sealing import ShareKeys
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.interface import SERVER, Aggregate, RoundAborted
from lightsecagg.protocol.messages import (
    AggregatedShare,
    MaskedUpload,
    Message,
    Reports,
    ReportsWanted,
    SealedShare,
    SharesClosed,
)
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, MaskRef, PreparedMask
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.share_exchange import OutgoingShare, Share

both_modes = pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
both_models = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


class Liar(CodedMasksClient):
    """Sends some peers other shares than those of its mask, and lies about some owners."""

    cheated: Collection[int] = ()
    slandered: Collection[int] = ()

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        mask = super().prepare(serial, private_keys, entropy)
        outgoing = [
            self._spoilt(share, entropy) if share.recipient in self.cheated else share
            for share in mask.outgoing
        ]
        return mask._replace(outgoing=outgoing)

    def _spoilt(self, share: OutgoingShare, entropy: Entropy) -> OutgoingShare:
        field, count = self.settings.field, len(share.plaintext) // 4
        garbage = prg.draw_uniform(count, field.modulus, entropy)
        return share._replace(plaintext=field.to_bytes(garbage))

    def report(self, ref: MaskRef, share: Share, header: bytes) -> Elements:
        honest = super().report(ref, share, header)
        lie = prg.draw_uniform(honest.size, self.settings.field.modulus)
        return lie if ref.owner in self.slandered else honest


def corrupt(
    network: Network, client: int, cheated: Collection[int] = (), slandered: Collection[int] = ()
) -> None:
    """Let a client lie to these peers, and about those owners."""

    def scheme(round_: Round, own: int) -> Liar:
        liar = Liar(round_, own)
        liar.cheated, liar.slandered = cheated, slandered
        return liar

    network.clients[client]._scheme_class = scheme  # type: ignore[assignment]


def believe_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server as it was before sharing was checked."""
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())


def make(
    threat_model: ThreatModel = HONEST, share_mode: ShareMode = SEEDED
) -> tuple[Federation, Network]:
    """Ten clients, U = 4: reports tell up to three liars."""
    federation = Federation(10, 1, 3, 4, threat_model, share_mode)
    return federation, federation.network()


def aggregate(network: Network) -> Aggregate:
    result = network.result
    assert isinstance(result, Aggregate), result
    pairs = itertools.product(result.included, result.responders)
    assert not set(pairs) & set(result.accused), "no accused pair lies in U1 x responders"
    return result


# -- the attack ----------------------------------------------------------------------------------


def lose_answers(network: Network, silent: Collection[int]) -> None:
    """Lose the answers of these clients."""
    network.tamper = lambda sender, _recipient, message: (
        [] if sender in silent and isinstance(message, AggregatedShare) else [message]
    )


@both_modes
def test_S46_attack_a_lying_sharer_stops_the_round_unnamed(
    share_mode: ShareMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe_everything(monkeypatch)
    federation, network = make(share_mode=share_mode)
    liar, *others = federation.ids
    corrupt(network, liar, cheated=others[:4])
    network.start().finish()
    assert "contradict each other and cannot be told apart" in network.assert_aborted()
    assert isinstance(network.result, RoundAborted)
    assert network.result.suspects == ()


@both_modes
def test_S46_attack_with_exactly_U_answers_a_wrong_sum_goes_unnoticed(
    share_mode: ShareMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe_everything(monkeypatch)
    federation, network = make(share_mode=share_mode)
    liar, victim, *others = federation.ids
    corrupt(network, liar, cheated=[victim])
    lose_answers(network, others[2:])
    network.start().finish()
    result = network.result
    assert isinstance(result, Aggregate)
    assert result.included == federation.ids
    assert result.suspects == ()
    total = federation.exact_sum(network.inputs.values())
    assert result.total.tolist() != total.tolist()


# -- sharers that lie ------------------------------------------------------------------------------


@both_modes
@both_models
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_S46_R59_garbage_for_one_peer_costs_two_answers_and_for_more_the_update(
    peers: int, threat_model: ThreatModel, share_mode: ShareMode
) -> None:
    federation, network = make(threat_model, share_mode)
    liar, *others = federation.ids
    corrupt(network, liar, cheated=others[:peers])
    network.start().finish().assert_exact(federation.ids if peers == 1 else others)
    result = aggregate(network)
    assert result.accused == tuple((liar, peer) for peer in others[:peers])
    assert set(result.responders) == set(others[1:]), "a pair leaves together"
    assert result.suspects == (), "three liars among the peers could have said the same"


@both_modes
@both_models
@pytest.mark.parametrize("peers", [4, 6, 9])
def test_S46_a_sharer_of_garbage_is_named_and_left_out(
    peers: int, threat_model: ThreatModel, share_mode: ShareMode
) -> None:
    federation, network = make(threat_model, share_mode)
    liar, *others = federation.ids
    corrupt(network, liar, cheated=others[:peers])
    network.start().finish().assert_exact(others)
    assert aggregate(network).suspects == (liar,)


# -- holders that lie ------------------------------------------------------------------------------


@both_models
@pytest.mark.parametrize("owners", [1, 3, 4, 10])
def test_S46_a_lying_holder_evicts_nobody(owners: int, threat_model: ThreatModel) -> None:
    federation, network = make(threat_model)
    liar = federation.ids[-1]
    slandered = federation.ids[:owners]
    corrupt(network, liar, slandered=slandered)
    network.start().finish().assert_exact(federation.ids)
    result = aggregate(network)
    assert result.accused == tuple((owner, liar) for owner in slandered)
    alone = liar in slandered  # it contradicts itself
    assert set(result.responders) == set(federation.ids) - {liar, *slandered[: not alone]}
    assert result.suspects == ((liar,) if owners > 3 else ())


# -- both, up to the stated number -----------------------------------------------------------------


@given(st.data())
def test_S46_up_to_the_stated_number_of_liars_the_sum_is_right_and_no_honest_client_is_named(
    data: st.DataObject,
) -> None:
    federation, network = make(data.draw(st.sampled_from([HONEST, MALICIOUS])))
    liars = data.draw(st.lists(st.sampled_from(federation.ids), max_size=3, unique=True))
    some = st.lists(st.sampled_from(federation.ids), unique=True)
    for liar in liars:
        corrupt(network, liar, cheated=data.draw(some), slandered=data.draw(some))
    network.start().finish()
    result = aggregate(network)
    network.assert_exact(result.included)
    assert set(result.suspects) <= set(liars)
    assert all(owner in liars or holder in liars for owner, holder in result.accused)


@both_modes
def test_S46_colluding_sharers_cannot_use_up_the_spare_answers(share_mode: ShareMode) -> None:
    """Two that cheat three peers each would leave exactly U answers, and a third could lie."""
    federation, network = make(share_mode=share_mode)
    first, second, third, *others = federation.ids
    corrupt(network, first, cheated=others[:3])
    corrupt(network, second, cheated=others[3:6])

    def tamper(sender: int, _recipient: int, message: Message) -> list[Message]:
        if sender == third and isinstance(message, AggregatedShare):
            return [AggregatedShare(np.zeros_like(message.vector))]
        return [message]

    network.tamper = tamper
    network.start().finish()
    result = aggregate(network)
    network.assert_exact(result.included)
    assert set(federation.ids) - set(result.included) <= {first, second}
    assert result.suspects == (third,)


@both_modes
def test_S46_with_exactly_U_answers_the_sum_is_right(share_mode: ShareMode) -> None:
    """Where the attack above succeeded: the doubtful answer is not used."""
    federation, network = make(share_mode=share_mode)
    liar, victim, *others = federation.ids
    corrupt(network, liar, cheated=[victim])
    lose_answers(network, others[3:])
    network.start().finish().assert_exact(federation.ids)
    assert aggregate(network).responders == (liar, *others[:3])


# -- R59: who lies in sharing, and then in its answer ----------------------------------------------


def lie_in_answers(network: Network, liars: Collection[int]) -> None:
    def tamper(sender: int, _recipient: int, message: Any) -> list[Any]:
        if sender in liars and isinstance(message, AggregatedShare):
            return [AggregatedShare(message.vector[::-1].copy())]
        return [message]

    network.tamper = tamper


@both_models
@pytest.mark.parametrize("naive", [True, False])
def test_R59_who_cheats_one_peer_and_then_lies_in_its_answer_stops_no_round(
    naive: bool, threat_model: ThreatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N = U + 2: one liar can be told. Its peer left, it stayed, and no spare answer was left."""
    if naive:
        keep = lambda self, survivors, held, accused: frozenset(survivors)  # noqa: E731
        monkeypatch.setattr(CodedMasksServer, "answering", keep)
    federation = Federation(6, 1, 2, 4, threat_model)
    network = federation.network()
    liar, peer, *others = federation.ids
    corrupt(network, liar, cheated=[peer])
    lie_in_answers(network, [liar])
    network.start().finish()
    if naive:
        assert "contradict each other" in network.assert_aborted()
        return
    network.assert_exact(federation.ids)
    assert aggregate(network).responders == tuple(others)


@both_models
@given(st.data())
def test_R59_up_to_the_stated_number_may_lie_in_sharing_and_in_answers(
    threat_model: ThreatModel, data: st.DataObject
) -> None:
    federation, network = make(threat_model)
    liars = data.draw(st.lists(st.sampled_from(federation.ids), max_size=3, unique=True))
    some = st.lists(st.sampled_from(federation.ids), unique=True, max_size=4)
    for liar in liars:
        corrupt(network, liar, cheated=data.draw(some), slandered=data.draw(some))
    lie_in_answers(network, liars)
    network.start().finish()
    result = aggregate(network)
    network.assert_exact(result.included)
    assert set(result.suspects) <= set(liars)


# -- fewer reports ---------------------------------------------------------------------------------


def with_uploads(count: int, cheated: int) -> tuple[Federation, Network]:
    """The first client cheats its next peers, and only so many clients upload."""
    federation = Federation(10, 1, 6, 4)
    network = federation.network()
    liar, *others = federation.ids
    corrupt(network, liar, cheated=others[:cheated])
    network.train_at_once = False
    network.start().run()
    for client in federation.ids[:count]:
        network.train(client)
    for client in federation.ids[count:]:
        network.dead.add(client)
    return federation, network


def test_S46_one_spare_report_leaves_the_liar_out_and_names_nobody() -> None:
    federation, network = with_uploads(5, cheated=1)
    network.finish().assert_exact(federation.ids[1:5])
    result = aggregate(network)
    assert {owner for owner, _ in result.accused} == {federation.ids[0]}
    assert result.suspects == ()


def test_S46_U_reports_show_nothing_as_the_documents_say() -> None:
    federation, network = with_uploads(4, cheated=1)
    network.finish()
    result = aggregate(network)
    assert result.accused == result.suspects == ()
    total = federation.exact_sum(network.inputs[c] for c in result.included)
    assert result.total.tolist() != total.tolist()


def test_S46_an_aborted_round_tells_its_server_who_was_accused() -> None:
    """Two of five lied to everybody: no four are left."""
    federation = Federation(10, 1, 6, 4)
    network = federation.network()
    for liar in federation.ids[:2]:
        corrupt(network, liar, cheated=federation.ids)
    network.train_at_once = False
    network.start().run()
    for client in federation.ids[:5]:
        network.train(client)
    network.dead.update(federation.ids[5:])
    network.finish()
    result = network.result
    assert isinstance(result, RoundAborted)
    assert "hold all its shares that agree with each other" in result.reason
    assert {owner for owner, _ in result.accused} == set(federation.ids[:2])
    assert result.suspects == ()


# -- one set of coefficients, one report -----------------------------------------------------------


def show_another_header(network: Network, odd: int) -> None:
    """The server shows one client other roots than the shares have."""

    def tamper(sender: int, recipient: int, part: Part) -> list[Part]:
        if recipient == odd and sender == SERVER and isinstance(part, SealedShare):
            return [replace(part, root=bytes(32))]
        return [part]

    network.tamper = tamper


@both_modes
def test_S46_coefficients_follow_from_what_the_owner_has_sealed(share_mode: ShareMode) -> None:
    """A server that shows one client another header hears nothing from it."""
    federation, network = make(share_mode=share_mode)
    odd = federation.ids[0]
    show_another_header(network, odd)
    network.start().finish()
    assert not [s for s, _, data in network.wire if s == odd and is_upload(federation, data)]
    refused = network.clients[odd].refused_shares
    assert refused == dict.fromkeys(
        federation.ids[1:], "share 0: the share is not bound to the header that it came with"
    )


@both_modes
def test_S46_control_without_the_binding_one_client_reports_by_other_coefficients(
    share_mode: ShareMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShareKeys, "check_binding", lambda *_: None)
    federation, network = make(share_mode=share_mode)
    odd = federation.ids[0]
    show_another_header(network, odd)
    network.start().finish()
    result = network.result
    assert isinstance(result, Aggregate)
    assert {holder for _, holder in result.accused} == {odd}, "its reports are off the code"


def is_upload(federation: Federation, data: bytes) -> bool:
    return isinstance(federation.codec.decode(data), MaskedUpload)


def test_S46_a_client_reports_the_same_until_its_shares_are_burnt_and_never_after() -> None:
    """Shares that come again change nothing; a server that asks again hears the same."""
    scene = Film(MALICIOUS)
    closed, share = scene.genuine[SharesClosed], whole(scene.shares[0])
    said = [scene.federation.codec.encode(message) for message in scene.sent[Reports]]
    client = scene.client("Uploaded")
    before = client.snapshot()
    assert scene.deliver(client, share) == []
    assert scene.deliver(client, closed) == said
    assert client.snapshot() == before
    for step in ("Signed", "Answered"):
        client = scene.client(step)
        before = client.snapshot()
        for message in (closed, share):
            assert scene.deliver(client, message) == []
            assert client.snapshot() == before


def test_S46_nothing_is_reported_before_sharing_is_closed() -> None:
    federation, network = make()
    network.tamper = lambda _sender, _recipient, message: (
        [] if isinstance(message, SharesClosed) else [message]
    )
    network.start().run()
    assert not network.messages(Reports)
    owner = federation.ids[1]
    with pytest.raises(RemoteProtocolError, match="when sharing is closed"):
        network.clients[federation.ids[0]].receive(SERVER, ReportsWanted(((owner, 0),)))


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_S46_reports_of_another_length_are_refused_and_none_of_them_is_taken(change: int) -> None:
    federation, network = make()
    sender = federation.ids[0]

    def tamper(who: int, _recipient: int, message: Message) -> list[Message]:
        if who == sender and isinstance(message, Reports):
            *first, last = message.reports
            values = (last.values * 2)[: len(last.values) + 4 * change]
            return [Reports((*first, msgspec.structs.replace(last, values=values)))]
        return [message]

    network.tamper = tamper
    network.start()
    with pytest.raises(RemoteProtocolError, match="what is not 4 elements"):
        network.run()
    assert sender not in network.server._sums.reports  # type: ignore[attr-defined]
    with pytest.raises(RemoteProtocolError, match="uploaded before it had reported"):
        network.run()


def test_S46_answers_leave_the_blinds_out() -> None:
    federation, network = make()
    network.start().finish()
    settings = federation.settings()
    answers = network.messages(AggregatedShare, to=SERVER)
    assert {answer.vector.size for answer in answers} == {settings.share_length}
    assert settings.shared_length == settings.share_length + BLINDS


# -- a server that crashes -------------------------------------------------------------------------


@both_models
@pytest.mark.parametrize("peers", [1, 9])
def test_R31_S46_a_resumed_server_finds_the_same_liars_and_the_same_set(
    threat_model: ThreatModel, peers: int
) -> None:
    """Reports are stored with the uploads, and whoever had not uploaded is asked again."""
    federation, network = make(threat_model)
    network.server = Server(
        federation.settings(), federation.allow_list, federation.ids, durable=True
    )
    network.disk = Disk()
    liar, *others = federation.ids
    corrupt(network, liar, cheated=others[:peers])
    network.train_at_once = False
    network.start().run()
    *early, last = federation.ids
    for client in early:
        network.train(client)
    network.run()
    assert network.disk is not None
    network.server = resumed = network.disk.restored(federation.allow_list)
    network.send(SERVER, resumed.resume())
    network.send(SERVER, resumed.rejoin(last))
    network.train(last)
    network.finish().assert_exact(federation.ids if peers == 1 else others)
    result = aggregate(network)
    assert {owner for owner, _ in result.accused} == {liar}
    assert result.suspects == (() if peers == 1 else (liar,))
