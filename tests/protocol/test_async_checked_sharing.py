"""Clients that lie about shares in the asynchronous mode (S46); see `test_checked_sharing`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import AsyncFederation
from bundles import relayed
from mortal import Mortal

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import BLINDS, report_on_share
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffers import sign_tag
from lightsecagg.protocol.in_flight import InFlight
from lightsecagg.protocol.interface import SERVER, Phase, Send
from lightsecagg.protocol.journal_facts import SumAnnounced
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Refusal,
    Report,
    Reports,
    ReportsWanted,
    SealedShare,
    ShareBundle,
    SumRequest,
)
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, MaskRef, PreparedMask
from lightsecagg.protocol.share_exchange import OutgoingShare, Share, root_of, seal_shares

both_models = pytest.mark.parametrize("threat_model", ThreatModel)


class Liar(CodedMasksClient):
    """Sends some peers garbage, and lies about some owners."""

    cheated: Collection[int] = ()
    slandered: Collection[int] = ()

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        mask, q = super().prepare(serial, private_keys, entropy), self.settings.field.modulus
        outgoing = []
        for share in mask.outgoing:
            garbage = prg.draw_uniform(len(share.plaintext) // 4, q, entropy).tobytes()
            spoilt = share._replace(plaintext=garbage)
            outgoing.append(spoilt if share.recipient in self.cheated else share)
        return mask._replace(outgoing=outgoing)

    def report(self, ref: MaskRef, share: Share, header: bytes) -> Elements:
        values = super().report(ref, share, header)
        lie = prg.draw_uniform(len(values), self.settings.field.modulus)
        return lie if ref.owner in self.slandered else values


def federation(
    liars: Mapping[int, tuple[Collection[int], Collection[int]]],
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS,
    survivors: int = 4,
    clients: int = 8,
) -> AsyncFederation:
    """Eight clients; with U = 4 reports tell two liars. Liar -> whom and about whom it lies."""
    fed = AsyncFederation(
        clients=clients, dropouts=2, survivors=survivors, threat_model=threat_model, strict=False
    )
    for client, (cheated, slandered) in liars.items():
        corrupt(fed, client, cheated, slandered)
    return fed.open(masks=1)


def corrupt(
    fed: AsyncFederation, client: int, cheated: Collection[int], slandered: Collection[int] = ()
) -> None:
    """Let a client lie to some of its peers, and about some."""

    def scheme(round_: Round, own: int) -> Liar:
        liar = Liar(round_, own)
        liar.cheated, liar.slandered = cheated, slandered
        return liar

    fed.clients[client]._scheme_class = scheme  # type: ignore[assignment]


def upload(fed: AsyncFederation, *owners: int) -> None:
    for owner in owners:
        fed.upload(owner)
        fed.settle()


# -- the attack ----------------------------------------------------------------------------------


def test_S46_attack_unchecked_a_lying_owner_stops_a_buffer_unnamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All answers but its own sum garbage."""
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())
    fed = federation({0: ([1, 2, 3, 4, 5, 6, 7], ())})
    upload(fed, 0, 1, 2, 3)
    (failed,) = fed.failures
    assert fed.results == []
    assert failed.suspects == ()


# -- owners that lie -----------------------------------------------------------------------------


@both_models
@pytest.mark.parametrize("cheated", [[1], [6, 7]])
def test_S46_R59_garbage_for_one_peer_costs_two_answers_and_for_more_the_update(
    cheated: list[int], threat_model: ThreatModel
) -> None:
    fed = federation({0: (cheated, ())}, threat_model)
    upload(fed, 0, 1, 2, 3)
    if len(cheated) > 1:
        assert (fed.results, fed.server.intake.waiting) == ([], 4)
        upload(fed, 4)
    (result,) = fed.results
    assert result.owners == ((0, 1, 2, 3) if len(cheated) == 1 else (1, 2, 3, 4))
    assert result.accused == tuple((0, peer) for peer in cheated)
    assert len(cheated) > 1 or not set(result.responders) & {0, *cheated}
    assert result.suspects == ()
    fed.assert_exact()


@pytest.mark.parametrize("naive", [True, False])
@pytest.mark.parametrize("phase", [Phase.AGREE, Phase.RECOVER])
def test_R59_R31_quarrels_are_known_after_a_crash(
    phase: Phase, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends while the sum is in flight; who cheated one peer then lies in its answer."""
    if naive:
        replay = InFlight.replay

        def forgetful(in_flight: InFlight, fact: Any) -> bool:
            known = isinstance(fact, SumAnnounced)
            return replay(in_flight, msgspec.structs.replace(fact, trusted=()) if known else fact)

        monkeypatch.setattr(InFlight, "replay", forgetful)
    fed = Mortal(clients=5, survivors=3, threat_model=ThreatModel.MALICIOUS_SERVER)
    corrupt(fed, 0, cheated=[1])

    def carry(packet: Packet) -> list[Packet]:
        message = fed.codec.decode(packet.data)
        if packet.sender == 0 and isinstance(message, AggregatedShare):
            lie = AggregatedShare(message.vector[::-1].copy(), message.time)
            packet = packet._replace(data=fed.codec.encode(lie))
        return [*Mortal.carry(fed, packet)]

    fed.carry = carry  # type: ignore[method-assign]
    fed.open(masks=1)
    for owner in range(4):
        fed.upload(owner)
    while fed.server.phase is not phase:
        fed.deliver(fed.take(*fed.busy()[0]))
    fed.kill()
    fed.settle()
    if naive:
        assert "contradict each other" in fed.failures[0].reason
        return
    assert [result.responders for result in fed.results] == [(2, 3, 4)]
    fed.assert_exact()


def test_R59_answers_of_who_quarrels_do_not_end_the_wait_for_the_others() -> None:
    """Five answers of which two do not count: with U = 3 the lie of client 5 would go unnoticed."""
    fed = federation({0: ([1], ())}, survivors=3)
    held: dict[int, Packet] = {}

    def carry(packet: Packet) -> list[Packet]:
        if packet.kind is AggregatedShare:
            held[packet.sender] = packet
            return []
        return [*AsyncFederation.carry(fed, packet)]

    fed.carry = carry  # type: ignore[method-assign]
    upload(fed, 0, 2, 3, 4)
    assert set(held) == set(range(8))
    answer = fed.codec.decode(held[5].data)
    assert isinstance(answer, AggregatedShare)
    lie = AggregatedShare(answer.vector[::-1].copy(), answer.time)
    held[5] = held[5]._replace(data=fed.codec.encode(lie))
    for client in (0, 1, 5, 2, 3, 4, 6):
        assert fed.results == []
        fed.deliver(held[client])
    (result,) = fed.results
    assert result.suspects == (5,)
    fed.assert_exact()


def test_R59_where_too_few_would_be_left_to_answer_holders_leave_alone() -> None:
    """Three pairs quarrel, U = 5 of 10: without them four would be left, who doubt owner 3."""
    fed = federation({0: ([1, 2], ()), 3: ([4, 5], ()), 6: ([7], ())}, survivors=5, clients=10)
    masks = [MaskRef(owner, 0) for owner in (0, 3, 6, 8)]
    assert fed.server.intake.stock.part(masks) == (frozenset(range(10)), frozenset())
    assert fed.server.intake.stock.part(masks[1:]) == (
        frozenset({0, 1, 2, 5, 8, 9}),
        frozenset({3}),
    )


@both_models
def test_S46_an_owner_of_garbage_is_dropped_told_and_named(threat_model: ThreatModel) -> None:
    fed = federation({0: ([1, 2, 3, 4, 5], ())}, threat_model)
    upload(fed, 0, 1, 2, 3)
    assert fed.results == []
    assert fed.server.intake.waiting == 3
    assert not fed.clients[0].state.contributor.outstanding, (
        "it was told that its upload waits no longer"
    )
    upload(fed, 4)
    (result,) = fed.results
    assert result.owners == (1, 2, 3, 4)
    assert result.suspects == (0,)
    fed.assert_exact()


# -- holders that lie ----------------------------------------------------------------------------


@both_models
def test_S46_a_lying_holder_evicts_nobody_and_is_named(threat_model: ThreatModel) -> None:
    fed = federation({7: ((), range(8))}, threat_model)
    upload(fed, 0, 1, 2, 3)
    (result,) = fed.results
    assert result.owners == (0, 1, 2, 3)
    assert {holder for _, holder in result.accused} == {7}
    assert 7 not in result.responders
    assert result.suspects == (7,)
    fed.assert_exact()


def test_S46_buffers_need_enough_good_holders_of_all_their_masks() -> None:
    """Each mask alone has six good holders or more, all four together three; U = 4.

    Who is to answer doubts the masks of two owners, so these wait.
    """
    fed = federation({0: ([4, 5], ()), 1: ([6, 7], ()), 2: ([3], ())})
    upload(fed, 0, 1, 2, 3)
    assert fed.results == []
    assert fed.server.summable == 2
    upload(fed, 4, 5)
    (result,) = fed.results
    assert result.owners == (2, 3, 4, 5)
    assert not set(result.responders) & {2, 3}, "they leave together"
    assert fed.server.intake.waiting == 2
    fed.assert_exact()


@both_models
def test_S46_as_many_must_hold_good_shares_as_must_sign(threat_model: ThreatModel) -> None:
    """Four of eight hold good shares of all four masks: U = 4 may answer, and m = 5 must sign."""
    fed = federation({0: ([4, 5], ()), 1: ([6], ()), 2: ([7], ())}, threat_model)
    upload(fed, 0, 1, 2, 3)
    if threat_model is ThreatModel.MALICIOUS_SERVER:
        assert (fed.results, fed.server.summable) == ([], 3)
    else:
        assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
        fed.assert_exact()


def test_S46_an_upload_waits_for_the_reports_of_everybody_online() -> None:
    """Were it summed after U reports, nothing would ever be noticed."""
    fed = AsyncFederation(clients=8, dropouts=2, survivors=4)
    fed.call(SERVER, fed.server.start)
    fed.settle()
    for party in fed.clients.values():
        fed.call(party.client, partial(party.restock, 1))
    late = 7
    while links := [link for link in fed.busy() if link[0] != late or not reports(fed, late)]:
        for link in links:
            fed.deliver(fed.take(*link))
    assert not fed.server.intake.has_shares_to_relay, "everybody has shared: nothing is waited for"
    for owner in range(4):
        fed.upload(owner)
        fed.step_up(owner)
    assert fed.server.phase is Phase.UPLOAD
    assert fed.server.summable == 0
    fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    fed.assert_exact()


def reports(fed: AsyncFederation, client: int) -> bool:
    """Whether this client's next message is a report."""
    return isinstance(fed.under_way(client, SERVER)[0], Reports)


@pytest.mark.parametrize("way", ["proceed", "flush", "drop"])
def test_S46_a_silent_client_holds_up_nobody_for_good(way: str) -> None:
    fed = federation({})
    for reported in fed.server.intake.stock.reports.values():
        del reported[7]
    for owner in range(4):
        fed.upload(owner)
    fed.settle()
    assert fed.results == []
    if way == "drop":
        fed.leave(7)
    else:
        fed.call(SERVER, getattr(fed.server, way))
    fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    fed.assert_exact()


def test_S46_a_client_that_lost_its_connection_is_asked_again() -> None:
    fed = federation({})
    for reported in fed.server.intake.stock.reports.values():
        del reported[7]
    fed.leave(7)
    fed.rejoin(7)
    fed.settle()
    assert all(7 in reported for reported in fed.server.intake.stock.reports.values())


# -- one set of coefficients, one report ---------------------------------------------------------


def test_S46_shares_leave_when_a_mask_is_complete_and_no_others_are_expected() -> None:
    fed = AsyncFederation().open(masks=1)
    first, second = shares_of(fed, 0), shares_of(fed, 1)
    assert fed.server.receive(0, ShareBundle(first[:-1])) == []
    assert not fed.server.intake.has_shares_to_relay
    assert fed.server.receive(0, ShareBundle(first[-1:])) == []
    assert fed.server.intake.has_shares_to_relay
    assert fed.server.receive(1, ShareBundle(second)) == []
    outputs = fed.server.intake.relay()
    sent = {output.to: output.message for output in outputs if isinstance(output, Send)}
    assert {to: [s.owner for s in bundle.shares] for to, bundle in sent.items()} == {  # type: ignore[union-attr]
        0: [1],
        1: [0],
    } | {client: [0, 1] for client in (2, 3, 4, 5)}
    roots = {share.owner: share.root for bundle in sent.values() for share in bundle.shares}  # type: ignore[union-attr]
    assert roots == {0: root_of(first), 1: root_of(second)}
    assert fed.server.intake.relay() == []


def test_S46_an_upload_whose_shares_wait_makes_them_leave() -> None:
    fed = AsyncFederation().open(masks=1)
    for client, party in fed.clients.items():
        fed.upload(client)
        fed.send(client, party.restock()) if client == 0 else None
    fed.settle()
    fed.results.clear()
    party = fed.clients[1]
    fed.call(1, party.restock)
    while fed.busy():
        for link in fed.busy():
            fed.deliver(fed.take(*link))
    assert fed.server.intake.has_shares_to_relay
    fed.upload(1, fed.server.time)
    fed.step_up(1)
    assert not fed.server.intake.has_shares_to_relay
    assert all(isinstance(m, ShareBundle) for m in fed.under_way(SERVER, 3))


def test_forty_clients_need_less_than_five_hundred_messages_for_a_buffer() -> None:
    """Eleven for each: opening, keys, roster, shares and reports, upload, and four for the sum."""
    fed = AsyncFederation(
        clients=40, dropouts=4, buffer_size=40, threat_model=ThreatModel.MALICIOUS_SERVER
    )
    count = 0

    def carry(packet: Packet) -> list[Packet]:
        nonlocal count
        count += 1
        return [*AsyncFederation.carry(fed, packet)]

    fed.carry = carry  # type: ignore[method-assign]
    fed.open(masks=1)
    for owner in fed.clients:
        fed.upload(owner)
    fed.settle()
    assert len(fed.results[0].owners) == 40
    fed.assert_exact()
    assert count == 12 * 40, "its own shares are reported on apart"


def shares_of(fed: AsyncFederation, owner: int) -> tuple[SealedShare, ...]:
    """Of one more mask; not sent."""
    shares: list[SealedShare] = []
    for output in fed.clients[owner].restock():
        assert isinstance(output, Send)
        if isinstance(output.message, ShareBundle):
            shares += output.message.shares
    return tuple(shares)


def test_S19_a_salt_hides_the_shares_that_it_follows_from() -> None:
    """Whoever guesses shares cannot try them on the salt; of another mask it is another."""
    fed = AsyncFederation().open(masks=1)
    round_ = fed.server._registration.scheme.round
    shares = [OutgoingShare(peer, ShareKind.SEED, bytes([peer]) * 32) for peer in range(1, 6)]
    key = AgreementKey(b"k" * 32)

    def salt(key: AgreementKey, serial: int) -> bytes:
        (one,) = {share.salt for share in seal_shares(round_, key, 0, shares, serial).shares}
        return one

    assert salt(key, 0) == salt(key, 0)
    assert len({salt(key, 0), salt(key, 1), salt(AgreementKey(b"l" * 32), 0)}) == 3


def test_S46_a_share_under_another_header_is_not_held() -> None:
    fed = AsyncFederation().open(masks=1)
    shares = shares_of(fed, 0)
    mine = next(share for share in relayed(shares) if share.recipient == 5)
    for wrong in (replace(mine, root=bytes(32)), replace(mine, mac=bytes(16))):
        assert fed.tell(5, wrong) == [Reports((Report(0, 1, b""),))]
        assert 1 not in fed.clients[5].state.holder.kept[0]  # type: ignore[union-attr]
    (said,) = fed.tell(5, mine)
    assert isinstance(said, Reports)
    assert len(said.reports[0].values) == 4 * BLINDS


def test_S46_the_coefficients_are_those_of_the_header() -> None:
    """A report is what the holder's share gives, by what follows from the owner's sealed shares."""
    fed = AsyncFederation().open(masks=1)
    for owner, holder in ((0, 5), (3, 1), (2, 2)):
        kept = fed.clients[holder].state.holder.kept[owner][0]  # type: ignore[union-attr]
        assert fed.server.intake.stock.shared[owner][0].header == kept.header
        scheme = fed.clients[holder]._scheme(fed.clients[holder].state)
        share = scheme.elements(MaskRef(owner), kept.share)  # type: ignore[attr-defined]
        expected = report_on_share(fed.field, share, kept.header)
        assert fed.server.intake.stock.reports[MaskRef(owner)][holder].tolist() == expected.tolist()


def test_S46_a_client_repeats_itself_whoever_asks_and_however() -> None:
    fed = AsyncFederation().open(masks=2)
    missed = fed.server.intake.mailbox.missed
    assert not any(missed.values()), "everybody has reported"
    again = relayed(shares_of(fed, 0))
    mine = next(share for share in again if share.recipient == 5)
    assert fed.tell(5, mine) == fed.tell(5, mine)
    for serial in (0, 1):
        (said,) = fed.tell(5, ReportsWanted(((0, serial),)))
        stored = fed.server.intake.stock.reports[MaskRef(0, serial)][5]
        assert said == Reports((Report(0, serial, stored.tobytes()),))
    assert fed.tell(5, ReportsWanted(((0, 9),))) == [Reports((Report(0, 9, b""),))]
    with pytest.raises(RemoteProtocolError, match=r"clients \[77\] have no masks"):
        fed.tell(5, ReportsWanted(((77, 0),)))


def test_S46_holders_answer_for_the_header_that_a_tag_names() -> None:
    """Else shares of one mask under two headers could be asked for in one sum."""
    fed = AsyncFederation().open(masks=1)
    tags = [fed.make_upload(owner, 0).tag for owner in (0, 1, 2)]
    context = fed.server._registration.scheme.round.context
    other = msgspec.structs.replace(tags[2], header=bytes(32))
    with pytest.raises(RemoteProtocolError, match="tag of client 2 refused"):
        fed.tell(5, SumRequest(0, (*tags[:2], other)))
    lie = sign_tag(fed.keys[2], context, other)
    assert fed.tell(5, SumRequest(0, (*tags[:2], lie))) == [Refusal(0, (2,))]
    assert isinstance(fed.tell(5, SumRequest(0, tuple(tags)))[0], AggregatedShare)


@pytest.mark.parametrize("header", [b"", bytes(31), bytes(33)])
def test_S12_a_tag_names_a_header_of_one_length(header: bytes) -> None:
    fed = AsyncFederation().open(masks=1)
    tags = [fed.make_upload(owner, 0).tag for owner in (0, 1, 2)]
    context = fed.server._registration.scheme.round.context
    bad = sign_tag(fed.keys[2], context, msgspec.structs.replace(tags[2], header=header))
    with pytest.raises(RemoteProtocolError, match="malformed hashes"):
        fed.tell(5, SumRequest(0, (*tags[:2], bad)))


def test_S45_an_upload_under_another_header_than_the_shares_is_refused() -> None:
    fed = AsyncFederation().open(masks=1)
    message = fed.make_upload(0, 0)
    context = fed.server._registration.scheme.round.context
    tag = sign_tag(fed.keys[0], context, msgspec.structs.replace(message.tag, header=bytes(32)))
    with pytest.raises(RemoteProtocolError, match="another header of its mask 0"):
        fed.server.receive(0, replace(message, tag=tag))
    fed.server.receive(0, message)
    assert fed.server.intake.waiting == 1


@pytest.mark.parametrize(
    "values",
    [
        bytes(3),
        bytes(4),
        bytes(8),
        bytes(20),
        bytes(12) + b"\xff" * 4,
    ],
)
def test_S46_malformed_reports_are_refused(values: bytes) -> None:
    fed = AsyncFederation().open(masks=1)
    with pytest.raises(RemoteProtocolError, match="what is not 4 elements"):
        fed.server.receive(5, Reports((Report(0, 0, values),)))


def test_S46_a_second_different_report_is_refused_and_a_late_one_ignored() -> None:
    fed = AsyncFederation().open(masks=1)
    other = np.arange(1, 5, dtype=np.uint32).tobytes()
    with pytest.raises(RemoteProtocolError, match="client 5 reported twice on one share"):
        fed.server.receive(5, Reports((Report(0, 0, other),)))
    before = fed.server.late_messages["Reports"]
    for late in (Report(0, 7, other), Report(0, 0, b"")):
        assert fed.server.receive(5, Reports((late,))) == []
    assert fed.server.late_messages["Reports"] == before + 2
    assert fed.server.intake.stock.reports[MaskRef(0, 0)][5].size == 4


def test_S46_reports_are_forgotten_with_their_masks() -> None:
    fed = federation({})
    upload(fed, 0, 1, 2, 3)
    assert {mask.owner for mask in fed.server.intake.stock.reports} == {4, 5, 6, 7}
    assert not set(fed.server.intake.stock._judged) - set(fed.server.intake.stock.reports)
