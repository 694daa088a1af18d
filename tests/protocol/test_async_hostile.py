"""S09: every hostile buffer is refused with its reason, and two certificates leak nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import HONEST, MALICIOUS, AsyncFederation, model_of
from bundles import relayed, sealed_alone, shares_in

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ParameterError, RecoveryError, RemoteProtocolError
from lightsecagg.field.staleness import StalenessTable, constant, polynomial
from lightsecagg.params import DEFAULT_MODULUS, ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.buffers import sign_tag, sum_statement
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import SERVER
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Certificate,
    Consent,
    Opening,
    Refusal,
    Report,
    Reports,
    SealedShare,
    ShareBundle,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, MaskRef, PreparedMask
from lightsecagg.protocol.share_exchange import OutgoingShare

NOW = 5
VICTIM = 5


class Hostile:
    """A registered federation whose server is the test: it holds everybody's signed tags."""

    def __init__(self, versions: tuple[int, ...] = (4, 4, 4, 4, 3, 3), **options: Any) -> None:
        self.fed = AsyncFederation(**{"clients": 6, "buffer_size": 5} | options).open()
        self.uploads = [
            self.fed.make_upload(client, version) for client, version in enumerate(versions)
        ]
        self.tags = [upload.tag for upload in self.uploads]

    def honest(self, *owners: int, time: int = NOW) -> SumRequest:
        return SumRequest(time, tuple(self.tags[owner] for owner in owners or (0, 1, 2, 3)))


def changed(tag: Tag, **changes: Any) -> Tag:
    return msgspec.structs.replace(tag, **changes)


def resigned(case: Hostile, tag: Tag, context: bytes | None = None, **changes: Any) -> Tag:
    """What a corrupt owner, or one in another epoch, would sign."""
    tag = changed(tag, **changes)
    ours = case.fed.server._registration.scheme.round.context
    return sign_tag(case.fed.keys[tag.owner], ours if context is None else context, tag)


def with_tag(case: Hostile, tag: Tag) -> SumRequest:
    """The honest buffer with its last tag replaced."""
    return SumRequest(NOW, (*case.honest().tags[:-1], tag))


HOSTILE: dict[str, tuple[Callable[[Hostile], SumRequest], str]] = {
    "too few owners": (lambda c: c.honest(0, 1), "2 updates is refused: it must have T \\+ 2 = 3"),
    "no owners": (lambda c: SumRequest(NOW, ()), "0 updates is refused"),
    "too many owners": (lambda c: c.honest(0, 1, 2, 3, 4, 5), "to K_max = 5 owners"),
    "an owner twice": (lambda c: c.honest(0, 1, 1, 2), "once each, in increasing order"),
    "owners in another order": (lambda c: c.honest(1, 0, 2, 3), "in increasing order"),
    "an update of the future": (
        lambda c: c.honest(time=3),
        "client 0 is -1 buffers stale; allowed are 0 to tau_max = 5",
    ),
    "an update too stale": (lambda c: c.honest(time=10), "client 0 is 6 buffers stale"),
    "a stranger": (
        lambda c: with_tag(c, changed(c.tags[3], owner=77)),
        "client 77, is not on the roster",
    ),
    "a forged signature": (
        lambda c: with_tag(c, changed(c.tags[3], signature=bytes(64))),
        "tag of client 3 refused",
    ),
    "another version than the owner signed": (
        lambda c: with_tag(c, changed(c.tags[3], version=3)),
        "tag of client 3 refused",
    ),
    "another serial than the owner signed": (
        lambda c: with_tag(c, changed(c.tags[3], serial=1)),
        "tag of client 3 refused",
    ),
    "another upload than the owner signed": (
        lambda c: with_tag(c, changed(c.tags[3], digest=bytes(32))),
        "tag of client 3 refused",
    ),
    "another header than the owner signed": (
        lambda c: with_tag(c, changed(c.tags[3], header=bytes(32))),
        "tag of client 3 refused",
    ),
    "one owner's tag in another's name": (
        lambda c: with_tag(c, changed(c.tags[4], owner=3, version=4, model=model_of(4))),
        "tag of client 3 refused",
    ),
    "another model than the owner signed": (
        lambda c: with_tag(c, changed(c.tags[3], model=model_of(9))),
        "tag of client 3 refused",
    ),
    "a tag of another epoch": (
        lambda c: with_tag(c, resigned(c, c.tags[3], context=bytes(32))),
        "tag of client 3 refused",
    ),
    "a malformed digest": (
        lambda c: with_tag(c, changed(c.tags[3], digest=b"")),
        "malformed hashes",
    ),
    "a malformed hash of the model": (
        lambda c: with_tag(c, changed(c.tags[3], model=b"")),
        "malformed hashes",
    ),
    "a negative serial": (lambda c: with_tag(c, changed(c.tags[3], serial=-1)), "negative number"),
    "a serial that no journal stores": (
        lambda c: with_tag(c, changed(c.tags[3], serial=2**63)),
        "or one beyond",
    ),
    "a negative version": (
        lambda c: SumRequest(4, (*c.tags[2:5], changed(c.tags[5], version=-1))),
        "negative number",
    ),
}


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
@pytest.mark.parametrize("clause", HOSTILE)
def test_S09_a_hostile_buffer_is_refused_with_its_reason(
    clause: str, threat_model: ThreatModel
) -> None:
    case = Hostile(threat_model=threat_model)
    make, reason = HOSTILE[clause]
    with pytest.raises(RemoteProtocolError, match=reason):
        case.fed.tell(VICTIM, make(case))
    # and the refusal has changed nothing: the honest buffer is still welcome
    (reply,) = case.fed.tell(VICTIM, case.honest())
    assert isinstance(reply, AggregatedShare if threat_model is HONEST else Consent)


def test_S09_weights_too_far_apart_are_refused() -> None:
    case = Hostile(versions=(5, 5, 4, 4, 3, 3), max_ratio=1.5)  # 64 and 32
    with pytest.raises(RemoteProtocolError, match="weights from 32 to 64 exceed"):
        case.fed.tell(VICTIM, case.honest())


def test_S09_a_buffer_of_fewer_owners_than_the_policy_demands_is_refused() -> None:
    """`Policy.minimum` is about sums: a large enough roster does not make up for a small buffer."""
    case = Hostile()
    party = case.fed.clients[VICTIM]
    party._holder._policy = replace(party._policy, minimum=4)
    with pytest.raises(RemoteProtocolError, match="this client demands 4 owners"):
        case.fed.tell(VICTIM, case.honest(0, 1, 2))
    (reply,) = case.fed.tell(VICTIM, case.honest(0, 1, 2, 3))
    assert isinstance(reply, AggregatedShare)


def test_S01_a_policy_whose_sums_no_buffer_can_have_is_refused() -> None:
    policy = AsyncFederation().policy
    assert replace(policy, minimum=4).minimum == 4
    with pytest.raises(ParameterError, match="at least and buffers of at most K_max = 4"):
        replace(policy, minimum=5)


def test_S01_the_shares_of_the_whole_stock_count() -> None:
    fed = AsyncFederation(stock=3)
    size = 4 * 3 * 6 * fed.settings.shared_length
    replace(fed.policy, max_share_bytes=size).check(fed.settings)
    with pytest.raises(RemoteProtocolError, match=f"3 x N = 6 shares .* {size} bytes"):
        replace(fed.policy, max_share_bytes=size - 1).check(fed.settings)


def test_S09_strict_mode_refuses_a_weight_of_few_owners() -> None:
    case = Hostile(versions=(5, 5, 5, 4, 4, 4), strict=True)
    with pytest.raises(RemoteProtocolError, match="fewer than T \\+ 2 = 3 owners share a weight"):
        case.fed.tell(VICTIM, case.honest(0, 1, 2, 3))
    (reply,) = case.fed.tell(VICTIM, case.honest(0, 1, 2))
    assert isinstance(reply, AggregatedShare)


def test_S08_owners_that_were_given_different_models_are_not_summed() -> None:
    case = Hostile()
    fed = case.fed
    other = resigned(case, case.tags[3], model=model_of(99))
    with pytest.raises(RemoteProtocolError, match="client 3 trained from another model"):
        fed.tell(VICTIM, with_tag(case, other))
    # also when all of them agree on a model other than the client's own of that version
    lied_to = case.fed.make_upload(VICTIM, 4, model_of(98))
    assert lied_to.tag.version == 4
    with pytest.raises(RemoteProtocolError, match="client 0 trained from another model"):
        fed.tell(VICTIM, case.honest())


def test_S08_no_two_buffers_name_different_models_of_one_version() -> None:
    """The client itself trained from neither; it holds the server to what it has signed for."""
    case = Hostile(threat_model=MALICIOUS)
    case.fed.tell(VICTIM, case.honest(0, 1, 2))
    lied_to = resigned(case, case.tags[3], model=model_of(99))  # version 4, as client 2's
    buffer = SumRequest(NOW + 1, (lied_to, case.tags[4], case.tags[5]))
    with pytest.raises(RemoteProtocolError, match="client 3 trained from another model"):
        case.fed.tell(VICTIM, buffer)


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S09_time_goes_forward_only(threat_model: ThreatModel) -> None:
    case = Hostile(threat_model=threat_model)
    case.fed.tell(VICTIM, case.honest(0, 1, 2))
    for time in (NOW, NOW - 1):
        with pytest.raises(RemoteProtocolError, match="has consented to another of time 5"):
            case.fed.tell(VICTIM, case.honest(2, 3, 4, time=time))


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S09_a_second_buffer_of_the_same_time_is_refused(threat_model: ThreatModel) -> None:
    case = Hostile(threat_model=threat_model)
    first = case.fed.tell(VICTIM, case.honest(0, 1, 2, 3))
    with pytest.raises(RemoteProtocolError, match="answering both would reveal"):
        case.fed.tell(VICTIM, case.honest(0, 1, 2))
    assert case.fed.tell(VICTIM, case.honest(0, 1, 2, 3)) == first  # S04: the same bytes again


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S09_masks_are_burnt_at_signing(threat_model: ThreatModel) -> None:
    """A later buffer with any of them is refused, although no certificate was ever shown."""
    case = Hostile(threat_model=threat_model)
    case.fed.tell(VICTIM, case.honest(0, 1, 2))
    replies = case.fed.tell(VICTIM, case.honest(1, 2, 3, time=NOW + 1))
    assert replies == [Refusal(NOW + 1, (1, 2))]


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S09_a_share_delivered_again_after_use_is_not_kept(threat_model: ThreatModel) -> None:
    fed = AsyncFederation(threat_model=threat_model, clients=6, buffer_size=5)
    fed.call(SERVER, fed.server.start)
    fed.settle()
    kept: list[SealedShare] = []
    for client, party in fed.clients.items():
        outputs = party.restock()
        kept += [share for share in relayed(shares_in(outputs)) if share.recipient == VICTIM]
        fed.send(client, outputs)
    fed.settle()
    tags = tuple(fed.make_upload(client, 5).tag for client in range(4))
    fed.tell(VICTIM, SumRequest(NOW, tags))
    for share in kept:
        if share.owner < 4:
            assert fed.tell(VICTIM, share) == [Reports((Report(share.owner, 0, b""),))]
        else:
            assert len(fed.tell(VICTIM, share)) == 1
    assert fed.clients[VICTIM].late_messages["SealedShare"] == len(kept)
    later = SumRequest(NOW + 1, tags[1:])
    assert fed.tell(VICTIM, later) == [Refusal(NOW + 1, (1, 2, 3))]


def test_S09_shares_of_non_increasing_serial_are_not_kept() -> None:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    fed.settle()
    shares = shares_for_the_victim(fed, 2)
    said = fed.tell(VICTIM, shares[1])
    before = fed.clients[VICTIM].state
    nothing = Report(0, 0, b"")
    assert fed.tell(VICTIM, shares[0]) == [Reports((nothing,))]
    assert fed.tell(VICTIM, shares[1]) == said
    (report,) = said[0].reports  # type: ignore[union-attr]
    assert fed.tell(VICTIM, ShareBundle(tuple(shares))) == [Reports((nothing, report))]
    assert fed.clients[VICTIM].state == before


def test_S19_a_share_that_does_not_open_is_not_kept_and_blocks_no_good_one() -> None:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    fed.settle()
    (share,) = shares_for_the_victim(fed)
    flipped = bytes([share.sealed[0] ^ 1]) + bytes(share.sealed[1:])
    for bad, why in (
        (replace(share, sealed=flipped), "does not open"),
        (replace(share, serial=9), "not bound to the header"),
    ):
        assert fed.tell(VICTIM, bad) == [Reports((Report(0, bad.serial, b""),))]
        assert why in fed.clients[VICTIM].refused_shares[0]
    assert len(fed.tell(VICTIM, share)[0].reports[0].values) == 16  # type: ignore[union-attr]
    assert 0 in fed.clients[VICTIM].state.holder.kept[0]


def shares_for_the_victim(fed: AsyncFederation, count: int = 1) -> list[SealedShare]:
    """Of the next masks of client 0, as the server passes them on."""
    shares = shares_in(fed.clients[0].restock(count))
    masks = sorted({share.serial for share in shares})
    passed_on = [s for k in masks for s in relayed(s for s in shares if s.serial == k)]
    return [share for share in passed_on if share.recipient == VICTIM]


def registered() -> AsyncFederation:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    fed.settle()
    return fed


def seal(fed: AsyncFederation, owner: int, serial: int, share: OutgoingShare) -> SealedShare:
    """What a corrupt owner can seal: anything."""
    party = fed.clients[owner]
    key = AgreementKey(party.state.private_keys[0])
    return sealed_alone(party._scheme(party.state).round, key, owner, share, serial)


def test_S12_S19_a_share_of_the_wrong_length_or_of_no_elements_is_not_kept() -> None:
    fed = registered()
    length = 4 * fed.settings.shared_length
    bad = [
        OutgoingShare(VICTIM, ShareKind.EXPLICIT, bytes(length + 4)),
        OutgoingShare(VICTIM, ShareKind.SEED, bytes(16)),
        OutgoingShare(VICTIM, ShareKind.EXPLICIT, b"\xff" * length),
    ]
    for serial, share in enumerate(bad):
        assert fed.tell(VICTIM, seal(fed, 0, serial, share)) == [Reports((Report(0, serial, b""),))]
        assert f"share {serial}" in fed.clients[VICTIM].refused_shares[0]
        assert not fed.clients[VICTIM].state.holder.kept.get(0)
    good = OutgoingShare(VICTIM, ShareKind.EXPLICIT, bytes(length))
    fed.tell(VICTIM, seal(fed, 0, 0, good))
    assert 0 in fed.clients[VICTIM].state.holder.kept[0]


def test_S19_a_share_for_another_client_from_oneself_or_a_stranger_is_refused() -> None:
    fed = registered()
    (share,) = shares_in(fed.clients[0].restock(), VICTIM)
    for bad in (
        replace(share, recipient=4),
        replace(share, owner=VICTIM),
        replace(share, owner=77),
    ):
        with pytest.raises(RemoteProtocolError, match="is not for client 5"):
            fed.tell(VICTIM, bad)
    assert not fed.clients[VICTIM].state.holder.kept


def test_S09_shares_expire_by_the_buffers_of_this_client() -> None:
    """After share_lifetime buffers nothing is left that an old tag could be answered with."""
    case = Hostile(versions=(5,) * 6, share_lifetime=6, stock=4)
    fed = case.fed
    for time in (NOW, NOW + 7):  # one buffer to date the shares by, one to expire them
        for owner in (0, 1, 2):
            case.tags[owner] = fed.make_upload(owner, time).tag
            for share in relayed(shares_in(fed.clients[owner].restock())):
                if share.recipient == VICTIM:
                    fed.tell(VICTIM, share)
        assert isinstance(fed.tell(VICTIM, case.honest(0, 1, 2, time=time))[0], AggregatedShare)
    assert not fed.clients[VICTIM].state.holder.kept[3]
    assert not fed.clients[VICTIM].stock
    newer = {"version": NOW + 8, "model": model_of(NOW + 8)}
    stale = tuple(resigned(case, tag, **newer) for tag in case.tags[3:5])
    fresh = fed.make_upload(0, NOW + 8).tag
    replies = fed.tell(VICTIM, SumRequest(NOW + 8, (fresh, *stale)))
    assert replies == [Refusal(NOW + 8, (3, 4))]


class GivesSixZeros(CodedMasksClient):
    """Sends client 6 zeros instead of its share."""

    def prepare(self, *arguments: Any) -> PreparedMask:
        mask = super().prepare(*arguments)
        zeros = bytes(4 * self.settings.shared_length)
        outgoing = [
            OutgoingShare(6, ShareKind.EXPLICIT, zeros) if share.recipient == 6 else share
            for share in mask.outgoing
        ]
        return mask._replace(outgoing=outgoing)


def test_S14_an_owner_that_gives_one_peer_another_share_spoils_no_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unnoticed by reports (S46), the peer's answer stands out, if there are spare ones."""
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())
    fed = AsyncFederation(clients=7, dropouts=2, survivors=5)
    fed.clients[0]._scheme_class = GivesSixZeros
    fed.open(masks=1)
    for owner in range(4):
        fed.upload(owner)
        fed.settle()
    assert [result.suspects for result in fed.results] == [(6,)]
    fed.assert_exact()


@pytest.mark.parametrize(
    "change",
    [
        {"table": StalenessTable.from_function(polynomial(1.0), 32, 5)},
        {"table": StalenessTable.from_function(constant(), 64, 5)},
        {"table": StalenessTable.from_function(polynomial(1.0), 64, 6)},
        {"max_updates": 4},
        {"max_ratio": 65.0},
        {"strict": True},
        {"stock": 5},
        {"share_lifetime": 13},
    ],
)
def test_S09_table_scale_and_limits_are_pinned_by_the_policy(change: dict[str, Any]) -> None:
    fed = AsyncFederation(buffer_size=5)
    settings = replace(fed.settings, buffering=replace(fed.buffering, **change))
    with pytest.raises(RemoteProtocolError, match="other asynchronous settings"):
        fed.clients[0].receive(SERVER, Opening(settings.to_bytes()))


def test_S09_weights_are_the_client_s_own() -> None:
    """A buffer has no place for weights; the answer is the sum by the client's own table."""
    assert SumRequest.__struct_fields__ == ("time", "tags")
    assert "weight" not in Tag.__struct_fields__
    case = Hostile(versions=(5, 5, 4, 4, 3, 3))
    shares = {
        owner: case.fed.clients[VICTIM].state.holder.kept[owner][0].share for owner in range(4)
    }
    (answer,) = case.fed.tell(VICTIM, case.honest())
    assert isinstance(answer, AggregatedShare)
    party = case.fed.clients[VICTIM]
    scheme = party._scheme(party.state)
    assert isinstance(scheme, CodedMasksClient)
    expected = [0] * case.fed.settings.share_length
    for owner, weight in enumerate((64, 64, 32, 32)):
        elements = scheme.elements(MaskRef(owner), shares[owner])
        expected = [
            (old + weight * int(new)) % case.fed.field.modulus
            for old, new in zip(expected, elements[: len(expected)], strict=True)
        ]
    assert answer.vector.tolist() == expected


# -- certificates (S05) ------------------------------------------------------------------------


def certificate(case: Hostile, buffer: SumRequest, signers: range) -> Certificate:
    context = case.fed.server._registration.scheme.round.context
    return Certificate(
        buffer.time,
        tuple((c, sum_statement(context, buffer).sign(case.fed.keys[c])) for c in signers),
    )


def test_S05_no_answer_without_a_quorum_of_all_N() -> None:
    case = Hostile(threat_model=MALICIOUS)
    quorum = case.fed.parameters.quorum
    assert 2 * quorum > 6 + 1
    buffer = case.honest()
    with pytest.raises(RemoteProtocolError, match="is not expected by client"):
        case.fed.tell(VICTIM, certificate(case, buffer, range(quorum)))
    case.fed.tell(VICTIM, buffer)
    good = certificate(case, buffer, range(quorum)).signatures
    other = certificate(case, case.honest(0, 1, 2), range(quorum)).signatures
    bad = {
        f"{quorum - 1} signatures": good[:-1],
        "a stranger or for a second time": (*good[:-1], good[0]),
        "names client 9": (*good[:-1], (9, good[0][1])),
        "does not verify": (*good[:-1], other[-1]),
        "signature of client 0": ((0, good[1][1]), *good[1:]),
    }
    for reason, signatures in bad.items():
        with pytest.raises(RemoteProtocolError, match=reason):
            case.fed.tell(VICTIM, Certificate(NOW, signatures))
    (answer,) = case.fed.tell(VICTIM, Certificate(NOW, good))
    assert isinstance(answer, AggregatedShare)
    assert case.fed.tell(VICTIM, Certificate(NOW, good)) == [answer]


@pytest.mark.parametrize(
    "change",
    [
        {"owner": 4},
        {"serial": 1},
        {"version": 5},
        {"model": bytes(32)},
        {"digest": bytes(32)},
        {"time": NOW + 1},
        {"context": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_S05_a_signature_is_for_one_epoch_time_and_list_of_tags(change: dict[str, Any]) -> None:
    """Else consents to different sums could be counted as consents to one of them.

    Consents to the same tags at different times, for instance: their weights differ.
    """
    case = Hostile(threat_model=MALICIOUS)
    buffer = case.honest()
    case.fed.tell(VICTIM, buffer)
    context = change.pop("context", case.fed.server._registration.scheme.round.context)
    time = change.pop("time", NOW)
    other = SumRequest(time, (*buffer.tags[:-1], changed(buffer.tags[-1], **change)))
    good = certificate(case, buffer, range(case.fed.parameters.quorum)).signatures
    client = good[-1][0]
    signature = sum_statement(context, other).sign(case.fed.keys[client])
    with pytest.raises(RemoteProtocolError, match=f"signature of client {client}"):
        case.fed.tell(VICTIM, Certificate(NOW, (*good[:-1], (client, signature))))


def test_S09_a_certificate_that_comes_after_the_next_signature_is_too_late() -> None:
    case = Hostile((4, 4, 4, 3, 3, 3), threat_model=MALICIOUS)
    first, second = case.honest(0, 1, 2), case.honest(3, 4, 5, time=NOW + 1)
    case.fed.tell(VICTIM, first)
    case.fed.tell(VICTIM, second)
    with pytest.raises(RemoteProtocolError, match="for which this client signed nothing"):
        case.fed.tell(VICTIM, certificate(case, first, range(4)))


def known_forms(fed: AsyncFederation, answers: list[tuple[int, SumRequest]], colluder: int) -> int:
    """How many linear forms in the honest masks' pieces the server knows.

    It holds the released answers, and with the colluder all shares that the colluder was sent.
    Unknowns are the U rows (pieces, then noise) of every honest owner's mask; what does not
    depend on noise is knowledge about the masks, hence about the updates.
    """
    code, q = fed.settings.code, fed.field.modulus
    U, pieces = code.survivors, code.pieces
    matrix = [[int(value) for value in row] for row in code.matrix]
    owners = [client for client in fed.clients if client != colluder]

    def form(position: int, weights: dict[int, int]) -> list[int]:
        return [
            weights.get(owner, 0) * matrix[row][position] % q
            for owner in owners
            for row in range(U)
        ]

    rows = [form(colluder, {owner: 1}) for owner in owners]
    for client, buffer in answers:
        table = fed.buffering.table
        rows.append(
            form(client, {t.owner: table.weight(buffer.time - t.version) for t in buffer.tags})
        )
    noise = [[row[k] for k in range(len(row)) if k % U >= pieces] for row in rows]
    return rank(rows, q) - rank(noise, q)


def rank(rows: list[list[int]], q: int) -> int:
    rows, found = [list(row) for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((k for k in range(found, len(rows)) if rows[k][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        inverse = pow(rows[found][column], -1, q)
        rows[found] = [value * inverse % q for value in rows[found]]
        for k in range(len(rows)):
            if k != found and rows[k][column]:
                factor = rows[k][column]
                rows[k] = [(a - factor * b) % q for a, b in zip(rows[k], rows[found], strict=True)]
        found += 1
    return found


def split_attack(
    clients: int, shown_first: int, threat_model: ThreatModel
) -> tuple[AsyncFederation, list[tuple[int, SumRequest]], int]:
    """The two-certificate attack on client 0 by the server and the last client.

    B is announced to `shown_first` honest clients, and B without the victim, one tick later, to
    everybody. The colluder signs whatever it is asked to. Returns all answers that came out.
    """
    fed = AsyncFederation(
        clients=clients,
        privacy=1,
        dropouts=1,
        survivors=clients - 2,
        buffer_size=clients,
        threat_model=threat_model,
    ).open()
    colluder = clients - 1
    tags = tuple(fed.make_upload(client, 0).tag for client in range(clients))
    both = (SumRequest(1, tags), SumRequest(2, tags[1:]))
    honest = [client for client in range(clients) if client != colluder]
    answers: list[tuple[int, SumRequest]] = []
    certificates: dict[int, Certificate] = {}
    context = fed.server._registration.scheme.round.context
    for buffer, audience in zip(both, (honest[:shown_first], honest), strict=True):
        signed = {colluder: sum_statement(context, buffer).sign(fed.keys[colluder])}
        for client in audience:
            for reply in fed.tell(client, buffer):
                if isinstance(reply, AggregatedShare):
                    answers.append((client, buffer))
                elif isinstance(reply, Consent):
                    signed[client] = reply.signature
        certificates[buffer.time] = Certificate(buffer.time, tuple(signed.items()))
        for client, old in product(honest, both):
            if threat_model is MALICIOUS and old.time in certificates:
                try:
                    replies = fed.tell(client, certificates[old.time])
                except RemoteProtocolError:
                    continue
                answers += [
                    (client, old) for reply in replies if isinstance(reply, AggregatedShare)
                ]
    return fed, answers, colluder


@pytest.mark.parametrize("clients", [5, 6, 7])
def test_S09_two_certificates_leak_nothing_beyond_one_agreed_sum(clients: int) -> None:
    ever = set()
    for shown_first in range(clients):
        fed, answers, colluder = split_attack(clients, shown_first, MALICIOUS)
        agreed = {buffer.time for _, buffer in answers}
        ever |= agreed
        assert len(agreed) <= 1
        assert known_forms(fed, answers, colluder) <= len(agreed) * fed.settings.code.pieces
    assert ever == {1, 2}  # either buffer can be agreed on, never both


@pytest.mark.parametrize("clients", [5, 6, 7])
def test_S09_control_without_agreement_the_same_attack_succeeds(clients: int) -> None:
    """The yardstick detects the leak in the mode that trusts the server to follow the protocol."""
    leaks = []
    for shown_first in range(clients):
        fed, answers, colluder = split_attack(clients, shown_first, HONEST)
        leaks.append(known_forms(fed, answers, colluder) - fed.settings.code.pieces)
    assert max(leaks) > 0


@pytest.mark.parametrize("lie", [0, 10**6, -(10**6)])
def test_S47_a_buffer_whose_average_is_beyond_the_bound_is_refused(lie: int) -> None:
    """An owner masks with another mask than it has shared; the sum is recovered, and nonsense."""
    fed = AsyncFederation().open()
    masks = fed.clients[2]._contributor.masks._masks
    mask = masks[min(masks)]
    mask[3] = (int(mask[3]) + lie) % fed.field.modulus
    for client in range(4):
        fed.upload(client)
    fed.settle()
    (result,) = fed.results
    if not lie:
        mean = fed.settings.buffer_average(result.total, result.weights)
        assert np.abs(mean).max() <= fed.settings.quantizer.bound
        return
    with pytest.raises(RecoveryError, match="entry 3 of the average lies beyond the bound 1000"):
        fed.settings.buffer_average(result.total, result.weights)


def test_a_wrong_identity_or_a_policy_without_buffering_is_refused() -> None:
    fed = AsyncFederation()
    with pytest.raises(ParameterError, match="not on the allow-list with this identity"):
        Client(0, fed.keys[1], fed.policy, Ledger.volatile())
    rounds = Client(0, fed.keys[0], replace(fed.policy, buffering=None), Ledger.volatile())
    with pytest.raises(RemoteProtocolError, match="other asynchronous settings"):
        rounds.receive(SERVER, Opening(fed.settings.to_bytes()))


# -- what integer weights leak -----------------------------------------------------------------


def recover_second(fed: AsyncFederation, total: np.ndarray[Any, Any]) -> list[int]:
    """From 64 x + 21 y, what an observer learns of y: its residue mod 64, signed."""
    q = fed.field.modulus
    signed = [int(v) - q if int(v) > q // 2 else int(v) for v in total]
    residues = [value * pow(21, -1, 64) % 64 for value in signed]
    return [residue - 64 if residue >= 32 else residue for residue in residues]


@pytest.mark.parametrize(("size", "whole"), [(31, True), (1000, False)])
def test_different_integer_weights_reveal_low_bits(size: int, whole: bool) -> None:
    """Two honest updates of weights 64 and 21: six low bits of the second, in each coordinate.

    That is all of it when the updates are small against the quantum 1 / c_l.
    """
    fed = AsyncFederation(clients=4, privacy=0, dropouts=0, buffer_size=2, dimension=200).open()
    fed._unique = np.random.default_rng(1)
    limit = size

    def small() -> Any:
        return fed._unique.integers(-limit, limit + 1, 200).astype(np.float64)

    fed.unique_vector = small  # type: ignore[method-assign]
    fed.skip_to(2)
    fed.upload(0, version=2)
    fed.upload(1, version=0)
    fed.settle()
    (result,) = fed.results
    assert result.weights == (64, 21)
    q = fed.field.modulus
    truth = [int(v) - q if int(v) > q // 2 else int(v) for v in fed.updates[1, 0]]
    guess = recover_second(fed, result.total)
    assert all((a - b) % 64 == 0 for a, b in zip(guess, truth, strict=True))
    right = sum(a == b for a, b in zip(guess, truth, strict=True))
    assert right == 200 if whole else right < 40  # 64 of 2,001 values by chance


def test_strict_mode_or_equal_weights_stop_the_low_bit_leak() -> None:
    strict = Hostile(versions=(5, 3, 5, 3), clients=4, privacy=0, dropouts=0, strict=True)
    with pytest.raises(RemoteProtocolError, match="low bits of the sum"):
        strict.fed.tell(2, strict.honest(0, 1))
    (answer,) = strict.fed.tell(2, strict.honest(0, 1, 2, 3))
    assert isinstance(answer, AggregatedShare)


# -- S43: the server chooses versions, hence weights, and c_l ------------------------------------


def read_the_victim(**options: Any) -> tuple[Any, AsyncFederation]:
    """Three peers at weight 64, the victim at 21, c_l = 800; what the agreed sum says of it.

    Every step is the protocol's: clients sign the buffer, the quorum is complete, nobody colludes.
    The server only decides which version of the model each client gets, and the settings.
    """
    fed = AsyncFederation(
        6, 1, 1, buffer_size=4, threat_model=MALICIOUS, dimension=2000, scale=800.0, **options
    ).open()
    rng = np.random.default_rng(7)
    vectors: list[Any] = []

    def unique_vector() -> Any:
        vectors.append(rng.normal(0, 0.01, 2000))
        return vectors[-1]

    fed.unique_vector = unique_vector  # type: ignore[method-assign]
    fed.skip_to(2)
    for client in (1, 2, 3):
        fed.upload(client, version=2)
    fed.upload(0, version=0)
    fed.settle()
    if not fed.results:
        return None, fed
    assert fed.results[0].weights == (21, 64, 64, 64)
    guess = recover_second(fed, fed.results[0].total)
    return np.corrcoef(guess, vectors[-1])[0, 1], fed


def test_S43_without_the_rules_a_server_reads_one_update_from_the_agreed_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Buffering, "per_model", lambda *_: 1)
    correlation, fed = read_the_victim(policy={"scale": 0.0})
    assert correlation > 0.99
    assert fed.refusals == []


def test_S43_S01_a_coarse_scale_is_refused_where_an_update_may_have_its_own_weight() -> None:
    fed = AsyncFederation(6, 1, 1, threat_model=HONEST, scale=800.0, policy={})
    with pytest.raises(RemoteProtocolError, match=r"c_l = 800, this client demands 65536"):
        fed.tell(0, Opening(fed.settings.to_bytes()))


@pytest.mark.parametrize("demand", [{}, {"scale": 0.0}, {"scale": 800.0}])
def test_S43_S56_T_plus_2_owners_share_a_weight_against_a_malicious_server(
    demand: dict[str, float],
) -> None:
    correlation, fed = read_the_victim(policy=demand)
    assert correlation is None, "the honest server does not even form the buffer"
    tags = [waiting.tag for waiting in fed.server.intake.queue.waiting]
    buffer = SumRequest(2, tuple(sorted(tags, key=lambda tag: tag.owner)))
    for client in (0, 1, 4):
        with pytest.raises(RemoteProtocolError, match="1 of the owners trained from the model"):
            fed.tell(client, buffer)


@pytest.mark.parametrize("strict", [True, False])
def test_S43_equal_weights_need_neither_rule(strict: bool) -> None:
    table = StalenessTable.from_function(constant(), 64, 5)
    fed = AsyncFederation(6, 1, 1, scale=1.0, policy={}, strict=strict, table=table).open()
    fed.skip_to(2)
    for client, version in enumerate((0, 1, 2, 2)):
        fed.upload(client, version)
    fed.settle()
    (result,) = fed.results
    assert result.weights == (1, 1, 1, 1)
    fed.assert_exact()


# -- S56: models of different versions -------------------------------------------------------------


def dead_model(fed: AsyncFederation) -> tuple[Any, Any]:
    """Four owners on a model that cannot learn, the victim on a real one; all weights equal.

    Returns the sum, if there is one, and the victim's update.
    """
    update = fed.unique_vector()
    vectors = iter([*(np.zeros_like(update) for _ in range(4)), update])
    fed.unique_vector = lambda: next(vectors)  # type: ignore[method-assign]
    fed.skip_to(2)
    for client in (1, 2, 3, 4):
        fed.upload(client, version=1)
    fed.upload(0, version=2)
    fed.settle()
    return (fed.results[0].total if fed.results else None), update


EQUAL = StalenessTable.from_function(constant(), 64, 5)


def test_S56_a_server_cannot_give_one_owner_a_model_of_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are equal, every signature is genuine, and the agreed sum is one update."""
    options: dict[str, Any] = {"buffer_size": 5, "threat_model": MALICIOUS, "table": EQUAL}
    with monkeypatch.context() as naive:
        naive.setattr(Buffering, "per_model", lambda *_: 1)
        total, update = dead_model(AsyncFederation(**options).open())
        assert total.tolist() == (update.astype(np.int64) % DEFAULT_MODULUS).tolist()
    fed = AsyncFederation(**options).open()
    total, update = dead_model(fed)
    assert total is None, "the honest server does not form the buffer"
    tags = sorted(
        (waiting.tag for waiting in fed.server.intake.queue.waiting), key=lambda t: t.owner
    )
    for client in fed.clients:
        with pytest.raises(RemoteProtocolError, match=r"1 of the owners .* version 2, 3 are"):
            fed.tell(client, SumRequest(2, tuple(tags)))


@pytest.mark.parametrize("counts", [(3, 2), (2, 3), (4, 1), (3, 3), (5,), (4, 3), (1, 4, 3)])
def test_S56_every_model_of_a_buffer_has_T_plus_2_owners(counts: tuple[int, ...]) -> None:
    clients = sum(counts)
    fed = AsyncFederation(
        max(clients, 6), 1, 1, buffer_size=max(clients, 4), threat_model=MALICIOUS, table=EQUAL
    ).open()
    versions = [version for version, count in enumerate(counts) for _ in range(count)]
    tags = tuple(fed.make_upload(owner, version).tag for owner, version in enumerate(versions))
    if min(counts) >= 3:
        assert isinstance(fed.tell(0, SumRequest(5, tags))[-1], Consent)
    else:
        with pytest.raises(RemoteProtocolError, match="3 are needed"):
            fed.tell(0, SumRequest(5, tags))


@pytest.mark.parametrize("owners", [(0, 0, 1), (0, 1, 0), (0, 0, 1, 2)])
def test_S56_one_owner_counts_once_among_the_owners_of_a_class(owners: tuple[int, ...]) -> None:
    """It may have several updates of one model, each under a mask and a tag that are genuine."""
    options: dict[str, Any] = {"buffer_size": 4, "threat_model": MALICIOUS, "table": EQUAL}
    fed = AsyncFederation(6, 1, 1, **options).open()
    tags = tuple(fed.make_upload(owner, 0).tag for owner in owners)
    with pytest.raises(RemoteProtocolError, match="once each"):
        fed.tell(5, SumRequest(0, tags))
    with pytest.raises(RemoteProtocolError, match="once each"):
        fed.tell(5, SumRequest(0, tuple(sorted(tags, key=lambda tag: tag.owner))))


def test_S56_a_client_that_wants_a_larger_crowd_wants_it_of_every_model() -> None:
    fed = AsyncFederation(
        8, 1, 1, buffer_size=8, threat_model=MALICIOUS, table=EQUAL, policy={"minimum": 4}
    ).open()
    tags = tuple(fed.make_upload(owner, int(owner < 3)).tag for owner in range(7))
    with pytest.raises(RemoteProtocolError, match=r"3 of the owners .* version 1, 4 are needed"):
        fed.tell(7, SumRequest(5, tags))
    fed.tell(7, SumRequest(5, tags[3:]))
