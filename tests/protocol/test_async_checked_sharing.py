"""Clients that lie about shares in the asynchronous mode (S46); see `test_checked_sharing`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import pytest
from async_driver import AsyncFederation, change

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.errors import LocalProtocolError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Phase, Send
from lightsecagg.protocol.messages import MaskComplete, MaskReport, SealedShare, ShareBundle
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, MaskRef, PreparedMask
from lightsecagg.protocol.share_exchange import Share

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

    def report(self, held: Mapping[MaskRef, Share], check_secret: bytes) -> Elements:
        (ref,) = held
        values = super().report(held, check_secret)
        lie = prg.draw_uniform(len(values), self.settings.field.modulus)
        return lie if ref.owner in self.slandered else values


def federation(
    liars: Mapping[int, tuple[Collection[int], Collection[int]]],
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS,
    survivors: int = 4,
) -> AsyncFederation:
    """Eight clients; with U = 4 reports tell two liars. Liar -> whom and about whom it lies."""
    fed = AsyncFederation(
        clients=8, dropouts=2, survivors=survivors, threat_model=threat_model, strict=False
    )
    for client, (cheated, slandered) in liars.items():

        def scheme(
            round_: Round,
            own: int,
            cheated: Collection[int] = cheated,
            slandered: Collection[int] = slandered,
        ) -> Liar:
            liar = Liar(round_, own)
            liar.cheated, liar.slandered = cheated, slandered
            return liar

        fed.clients[client]._scheme_class = scheme  # type: ignore[assignment]
    return fed.open(masks=1)


def upload(fed: AsyncFederation, *owners: int) -> None:
    for owner in owners:
        fed.upload(owner)
        fed.settle()


# -- the attack ----------------------------------------------------------------------------------


def test_S46_attack_unchecked_a_lying_owner_spoils_the_sum_unnoticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four answers are awaited, and one of them sums garbage."""
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())
    fed = federation({0: ([1, 2, 3, 4, 5, 6, 7], ())})
    upload(fed, 0, 1, 2, 3)
    (result,) = fed.results
    assert result.suspects == ()
    assert result.total.tolist() != fed.expected(0).tolist()


# -- owners that lie -----------------------------------------------------------------------------


@both_models
@pytest.mark.parametrize("cheated", [[1], [6, 7]])
def test_S46_R59_garbage_for_one_peer_costs_two_answers_and_for_more_the_update(
    cheated: list[int], threat_model: ThreatModel
) -> None:
    fed = federation({0: (cheated, ())}, threat_model)
    upload(fed, 0, 1, 2, 3)
    if len(cheated) > 1:
        assert (fed.results, fed.server.waiting) == ([], 4)
        upload(fed, 4)
    (result,) = fed.results
    assert result.owners == ((0, 1, 2, 3) if len(cheated) == 1 else (1, 2, 3, 4))
    assert result.accused == tuple((0, peer) for peer in cheated)
    assert len(cheated) > 1 or not set(result.responders) & {0, *cheated}
    assert result.suspects == ()
    fed.assert_exact()


@both_models
def test_S46_an_owner_of_garbage_is_dropped_told_and_named(threat_model: ThreatModel) -> None:
    fed = federation({0: ([1, 2, 3, 4, 5], ())}, threat_model)
    upload(fed, 0, 1, 2, 3)
    assert fed.results == []
    assert fed.server.waiting == 3
    assert not fed.clients[0].state.outstanding, "it was told that its upload waits no longer"
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
    assert fed.server.waiting == 2
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
    return isinstance(fed.under_way(client, SERVER)[0], MaskReport)


@pytest.mark.parametrize("way", ["proceed", "flush", "drop"])
def test_S46_a_silent_client_holds_up_nobody_for_good(way: str) -> None:
    fed = federation({})
    for reported in fed.server._stock.reports.values():
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
    for reported in fed.server._stock.reports.values():
        del reported[7]
    fed.leave(7)
    fed.rejoin(7)
    fed.settle()
    assert all(7 in reported for reported in fed.server._stock.reports.values())


# -- one set of coefficients, one report ---------------------------------------------------------


def test_S46_a_secret_is_revealed_when_the_shares_of_its_mask_have_left() -> None:
    fed = AsyncFederation().open(masks=1)
    shares = shares_of(fed, 0)
    assert fed.server.receive(0, ShareBundle(shares[:-1])) == []
    outputs = fed.server.receive(0, ShareBundle(shares[-1:]))
    messages = [output.message for output in outputs if isinstance(output, Send)]
    assert [type(message) for message in messages[:5]] == [ShareBundle] * 5
    assert (
        messages[5:]
        == [MaskComplete(0, 1, fed.server._stock.completion(MaskRef(0, 1)).check_secret)] * 6
    )


def shares_of(fed: AsyncFederation, owner: int) -> tuple[SealedShare, ...]:
    """Of one more mask; not sent."""
    shares: list[SealedShare] = []
    for output in fed.clients[owner].restock():
        assert isinstance(output, Send)
        assert isinstance(output.message, ShareBundle)
        shares += output.message.shares
    return tuple(shares)


def test_S46_only_the_roster_s_secret_of_that_owner_and_mask_is_accepted() -> None:
    fed = AsyncFederation().open(masks=2)
    secret = fed.server._stock.secret
    for owner, serial, wrong in (
        (0, 2, bytes(32)),
        (0, 2, secret(0, 1)),
        (0, 2, secret(0, 3)),
        (0, 2, secret(1, 2)),
        (0, 1, secret(0, 2)),
        (0, 0, secret(0, 1)),
        (0, -1, secret(0, -1)),
        (0, 4096, secret(0, 4095)),
        (77, 0, secret(0, 0)),
        (0, 2, b"short"),
    ):
        with pytest.raises(RemoteProtocolError, match=r"another secret|to be checked|32 bytes"):
            fed.tell(5, MaskComplete(owner, serial, wrong))
    assert fed.tell(5, MaskComplete(0, 2, secret(0, 2))) == [MaskReport(0, 2, ())]


def test_S46_a_client_reports_once_and_repeats_itself() -> None:
    fed = AsyncFederation().open(masks=2)
    for serial in (0, 1):  # also of a mask before the last one
        asked = MaskComplete(0, serial, fed.server._stock.secret(0, serial))
        first, second = fed.tell(5, asked), fed.tell(5, asked)
        assert first == second
        (report,) = first
        assert isinstance(report, MaskReport)
        stored = fed.server._stock.reports[MaskRef(0, serial)][5]
        assert report.values == stored


@pytest.mark.parametrize("values", [(1,), (1, 2, 3), (-1, 0), (0, 2**31 - 2**19 + 1)])
def test_S46_malformed_reports_are_refused(values: tuple[int, ...]) -> None:
    fed = AsyncFederation().open(masks=1)
    with pytest.raises(RemoteProtocolError, match="instead of 2 elements"):
        fed.server.receive(5, MaskReport(0, 0, values))


def test_S46_a_second_different_report_is_refused_and_a_late_one_ignored() -> None:
    fed = AsyncFederation().open(masks=1)
    with pytest.raises(RemoteProtocolError, match="client 5 reported twice on one share"):
        fed.server.receive(5, MaskReport(0, 0, (1, 2)))
    before = fed.server.late_messages["MaskReport"]
    assert fed.server.receive(5, MaskReport(0, 7, (1, 2))) == []
    assert fed.server.late_messages["MaskReport"] == before + 1


def test_S46_masks_beyond_the_chain_are_refused() -> None:
    fed = AsyncFederation().open(masks=1)
    change(fed.clients[0], stock={}, next_serial=4096)
    with pytest.raises(LocalProtocolError, match="an epoch has 4096 masks of one client"):
        fed.clients[0].restock()
    change(fed.clients[0], next_serial=4095)
    shares = shares_of(fed, 0)
    beyond = ShareBundle((*shares[:1], replace(shares[1], serial=4096)))
    with pytest.raises(RemoteProtocolError, match="shares its mask 4096"):
        fed.server.receive(0, beyond)
    fed.send(0, [Send(SERVER, ShareBundle(shares))])
    fed.settle()
    assert not fed.refusals


def test_S46_reports_are_forgotten_with_their_masks() -> None:
    fed = federation({})
    upload(fed, 0, 1, 2, 3)
    assert {mask.owner for mask in fed.server._stock.reports} == {4, 5, 6, 7}
    assert not set(fed.server._stock._judged) - set(fed.server._stock.reports)
