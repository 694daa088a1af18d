"""SecAgg and SecAgg+ as state machines: exact sums under every dropout, and what clients refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bundles import shares_in, whole
from disk import Disk
from driver import request
from film import held_by, step_of
from hypothesis import given
from hypothesis import strategies as st
from secagg_driver import DIMENSION, SESSION, Fault, Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import MaskAlreadyUsed, ParameterError, RemoteProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD, PAPER_FIELD, PrimeField
from lightsecagg.field.quantization import Quantizer, signed
from lightsecagg.field.staleness import StalenessTable, constant
from lightsecagg.field.words import WORDS
from lightsecagg.params import Parameters
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.client import Client, Closed
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, RoundAborted, Send, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
    Member,
    Message,
    Opening,
    Refusal,
    Reports,
    Roster,
    SealedShare,
    SharesClosed,
    SumRequest,
    Tag,
    UnmaskingShares,
)
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings, hash_model
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.pairwise_scheme import PairwiseMasks, PairwiseMasksClient
from lightsecagg_lab.schemes.sharing_graph import find_graph_parameters

CASES: dict[str, dict[str, Any]] = {
    "secagg": {"N": 8, "T": 2, "D": 2},
    "secagg, malicious server": {"N": 9, "T": 2, "D": 3, "malicious": True},
    # t > T and k > T + D: this small graph protects everybody whatever the ring.
    "secagg+": {"protocol": ProtocolName.SECAGG_PLUS, "N": 10, "T": 2, "D": 2, "k": 6, "t": 4},
}
ALL_CASES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SPARSE = CASES["secagg+"]
MALICIOUS = CASES["secagg, malicious server"]


def assert_exact(federation: Federation, result: object) -> Aggregate:
    assert isinstance(result, Aggregate), result
    np.testing.assert_array_equal(result.total, federation.exact_sum(result.included))
    return result


# -- sums ------------------------------------------------------------------------------------


@ALL_CASES
@pytest.mark.parametrize("field", [DEFAULT_FIELD, PAPER_FIELD], ids=lambda f: str(f.modulus))
def test_everybody_survives(case: dict[str, Any], field: PrimeField, backend: str) -> None:
    federation = Federation(**case, number_field=field)
    result = assert_exact(federation, federation.run())
    assert result.included == tuple(sorted(federation.ids))
    average, samples = federation.settings.average(result.total, len(result.included))
    updates = [federation.update(client) for client in federation.ids]
    assert samples == sum(update.samples for update in updates)
    expected = sum(u.vector.astype(float) * u.samples for u in updates) / samples
    np.testing.assert_allclose(average, expected)


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("count", ["1", "D", "D+1"])
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        (name, phase)
        for name, case in CASES.items()
        for phase in Phase
        if phase is not Phase.DONE and (phase is not Phase.AGREE or case.get("malicious"))
    ],
)
def test_R30_dropouts(name: str, phase: Phase, count: str, moment: str) -> None:
    """The exact sum over whoever uploaded, or an abort that says why; never anything else."""
    case = CASES[name]
    number = {"1": 1, "D": case["D"], "D+1": case["D"] + 1}[count]
    federation = Federation(**case)
    victims = frozenset(federation.ids[1 : 1 + number])
    federation.fault = Fault(phase, moment, victims)
    result = federation.run()
    assert federation.gone == victims

    in_sum = phase in (Phase.AGREE, Phase.RECOVER) or (phase, moment) == (Phase.UPLOAD, "after")
    if isinstance(result, Aggregate):
        assert_exact(federation, result)
        left = set(federation.ids) if in_sum else set(federation.ids) - victims
        assert set(result.included) == left
    else:
        assert number > case["D"]
        assert re.search(r"only \d+ clients|out of reach|not be hidden", result.reason)
    if number > case["D"] and not in_sum:
        assert isinstance(result, RoundAborted)
        told = {to for sender, to, m in federation.log if isinstance(m, AbortRound)}
        assert told == set(federation.ids) - victims


@ALL_CASES
@pytest.mark.parametrize("phase", [Phase.SHARE, Phase.UPLOAD, Phase.RECOVER], ids=str)
def test_R30_dropouts_that_only_a_deadline_reveals(case: dict[str, Any], phase: Phase) -> None:
    federation = Federation(**case, announce_drops=False)
    federation.fault = Fault(phase, "before", frozenset(federation.ids[: case["D"]]))
    assert_exact(federation, federation.run())


def test_dropouts_in_several_phases_leave_the_exact_sum() -> None:
    """One is lost before sharing, one before uploading, one before answering."""
    federation = Federation(N=10, T=2, D=3)
    a, b, c = federation.ids[:3]

    def tamper(sender: int, to: int, message: Message) -> Message | None:
        lost = {a: SealedShare, b: MaskedUpload, c: UnmaskingShares}.get(sender)
        return None if lost is not None and isinstance(message, lost) else message

    federation.tamper = tamper
    result = assert_exact(federation, federation.run())
    assert set(federation.ids) - set(result.included) == {a, b}
    assert c not in result.responders


def test_server_rebuilds_no_mask_between_two_dropped_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = Federation(N=9, T=1, D=3)
    dead = frozenset(federation.ids[:3])
    federation.fault = Fault(Phase.UPLOAD, "before", dead)
    pairs: list[tuple[int, int]] = []
    original = PairwiseMasks.pairwise_seed

    def spy(self: PairwiseMasks, key: AgreementKey, own: int, peer: int) -> bytes:
        if federation.server.phase is Phase.RECOVER and own in dead:
            pairs.append((own, peer))
        return original(self, key, own, peer)

    monkeypatch.setattr(PairwiseMasks, "pairwise_seed", spy)
    assert_exact(federation, federation.run())
    alive = set(federation.ids) - dead
    assert sorted(pairs) == sorted((own, peer) for own in dead for peer in alive)


@ALL_CASES
def test_S15_masks_are_made_only_with_peers_whose_shares_are_complete(case: dict[str, Any]) -> None:
    """Who has not shared everything is nobody's partner: its key is never asked for."""
    federation = Federation(**case)
    federation.fault = Fault(Phase.SHARE, "during", frozenset(federation.ids[:2]))
    assert_exact(federation, federation.run())
    assert all(answer.of_keys == b"" for answer in federation.sent(UnmaskingShares))


def test_answers_carry_shares_and_nothing_else() -> None:
    federation = Federation(N=8, T=2, D=2)
    federation.fault = Fault(Phase.UPLOAD, "before", frozenset(federation.ids[:2]))
    federation.run()
    for answer in federation.sent(UnmaskingShares):
        assert (len(answer.of_seeds), len(answer.of_keys)) == (6 * 64, 2 * 64)
        assert len(federation.codec.encode(answer)) <= 8 * 64 + 10


def test_secagg_plus_sends_k_shares_per_client() -> None:
    federation = Federation(**SPARSE)
    federation.run()
    for client in federation.ids:
        assert len(federation.sent(SealedShare, client)) == federation.k


def test_secagg_plus_draws_a_fresh_ring_and_takes_odd_rosters() -> None:
    """With k and the roster odd, each client gets one neighbour more."""
    case = {"protocol": ProtocolName.SECAGG_PLUS, "N": 10, "T": 1, "D": 2, "k": 5, "t": 2}
    rings = set()
    for _ in range(3):
        federation = Federation(**case)
        federation.fault = Fault(Phase.ADVERTISE, "before", frozenset(federation.ids[:1]))
        assert_exact(federation, federation.run())
        rings.add(federation.server._registration.roster.graph)
        assert sorted(federation.server._registration.roster.graph) == list(range(9))
        assert len(federation.sent(SealedShare, federation.ids[1])) == 6
    assert len(rings) == 3


# -- shares that go wrong --------------------------------------------------------------------


def corrupt(share: SealedShare) -> SealedShare:
    return replace(share, sealed=bytes(len(share.sealed)))


def test_share_that_does_not_open_here_is_made_up_for_by_others() -> None:
    """Client v's share never opens at one peer; that peer still masks with v and answers."""
    federation = Federation(N=8, T=2, D=2)
    v, peer, dead = federation.ids[:3]

    def tamper(sender: int, to: int, message: Message) -> Message | None:
        if isinstance(message, SealedShare) and to == peer and message.owner in (v, dead):
            return corrupt(message)
        return None if sender == dead and isinstance(message, MaskedUpload) else message

    federation.tamper = tamper
    result = assert_exact(federation, federation.run())
    assert dead not in result.included
    assert v in result.included
    assert set(federation.clients[peer].refused_shares) == {v, dead}
    assert len(federation.sent(UnmaskingShares, peer)[0].of_seeds) == 6 * 64


@pytest.mark.parametrize("drops", [False, True])
def test_secrets_that_nobody_holds_abort_the_round_before_it_is_announced(drops: bool) -> None:
    federation = Federation(N=8, T=2, D=2)
    v = federation.ids[0]

    def tamper(sender: int, to: int, message: Message) -> Message | None:
        if isinstance(message, SealedShare) and message.owner == v and to != SERVER:
            return corrupt(message)
        return None if drops and sender == v and isinstance(message, MaskedUpload) else message

    federation.tamper = tamper
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert f"the secrets of clients [{v}] are out of reach" in result.reason
    assert federation.sent(SumRequest) == []


class SharesAnotherKey(PairwiseMasksClient):
    """Shares a key that is not the one it has advertised."""

    def share_secrets(self, secret: bytes, entropy: Entropy) -> dict[int, bytes]:
        another = AgreementKey.generate().private_bytes()
        return super().share_secrets(secret[:32] + another, entropy)


class SharesNonsense(PairwiseMasksClient):
    """Shares that lie on no polynomial."""

    def share_secrets(self, secret: bytes, entropy: Entropy) -> dict[int, bytes]:
        shares = super().share_secrets(secret, entropy)
        first, second = sorted(shares)[:2]
        return {**shares, first: shares[second], second: shares[first]}


def replace_scheme(federation: Federation, client: int, kind: type[PairwiseMasksClient]) -> None:
    federation.clients[client]._scheme_class = kind


def test_S15_rebuilt_key_that_does_not_match_names_the_client() -> None:
    federation = Federation(N=8, T=2, D=2)
    liar = federation.ids[3]
    replace_scheme(federation, liar, SharesAnotherKey)
    federation.fault = Fault(Phase.UPLOAD, "before", frozenset({liar}))
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert f"the mask key rebuilt for client {liar} does not match" in result.reason


@pytest.mark.parametrize("case", [CASES["secagg"], SPARSE], ids=["secagg", "secagg+"])
def test_wrong_shares_of_a_seed_name_the_client(case: dict[str, Any]) -> None:
    """The shares of the two lowest ids, which are always used, are exchanged."""
    federation = Federation(**{**case, "t": 6})
    liar = federation.ids[3]
    replace_scheme(federation, liar, SharesNonsense)
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert f"the self-mask seed of client {liar} does not rebuild" in result.reason


def test_unused_answers_do_not_matter() -> None:
    """t = 3 of 8 answers are used; the others may say what they like."""
    federation = Federation(N=8, T=2, D=2, t=3)
    last = max(federation.ids)

    def tamper(sender: int, to: int, message: Message) -> Message | None:
        if isinstance(message, UnmaskingShares) and sender == last:
            return UnmaskingShares(bytes(len(message.of_seeds)), message.of_keys)
        return message

    federation.tamper = tamper
    assert_exact(federation, federation.run())


# -- S01, S15: settings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"t": 2}, "must exceed privacy"),
        ({"t": 7}, "out of reach"),
        ({"D": 5}, "protects nobody"),
        ({"N": 9, "D": 3, "malicious": True, "t": 5}, r"2t > N \+ T"),
        ({"N": 9, "D": 4, "malicious": True}, r"needs T \+ 2D < N"),
        ({**SPARSE, "malicious": True}, "malicious-server mode is refused"),
        ({**SPARSE, "k": 0}, "number of neighbours"),
        ({**SPARSE, "k": 10}, "number of neighbours"),
        ({**SPARSE, "t": 7}, "threshold t with 0 < t <= k"),
        ({**SPARSE, "t": -1}, "threshold t with 0 < t <= k"),
        ({"k": 6}, "only secagg\\+ has neighbours"),
        ({"protocol": ProtocolName.PLAIN, "malicious": True, "N": 9}, "no malicious-server mode"),
    ],
)
def test_S15_parameters_that_protect_nobody_cannot_be_set(
    case: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        Federation(**case)


def test_S15_small_fields_cannot_share_secrets() -> None:
    with pytest.raises(ParameterError, match="16-bit limbs"):
        Settings(
            protocol=ProtocolName.SECAGG,
            parameters=Parameters(8, 2, 2, modulus=65521),
            quantizer=Quantizer(WORDS, 1.0, 8),
            dimension=3,
            session=SESSION,
            round=1,
            allow_list=bytes(32),
        )


@ALL_CASES
def test_settings_survive_the_wire(case: dict[str, Any]) -> None:
    settings = Federation(**case).settings
    restored = Settings.from_bytes(settings.to_bytes())
    assert restored == settings
    assert restored.sharing_threshold == (case.get("t") or case["N"] - case["D"])
    assert restored.degree(case["N"]) == case.get("k", case["N"] - 1)


def test_S01_threshold_is_part_of_the_context() -> None:
    federation = Federation(**SPARSE)
    other = federation.make_settings(threshold=3)
    assert federation.settings.context != other.context


def test_S15_leaky_graph_is_refused_unless_the_policy_says_otherwise() -> None:
    federation = Federation(protocol=ProtocolName.SECAGG_PLUS, N=20, T=4, D=4, k=6, t=3)
    client = federation.ids[0]
    opening = Opening(federation.settings.to_bytes())
    with pytest.raises(RemoteProtocolError, match="unprotected with a probability"):
        federation.clients[client].receive(SERVER, opening)
    careless = federation.policy(graph_security=0)
    party = Client(client, federation.identities[client], careless, Ledger.volatile())
    assert isinstance(party.receive(SERVER, opening)[0], Send)


def test_S15_graph_is_checked_again_for_the_roster_that_came_together() -> None:
    """T corrupt clients weigh more in a small roster: what protects 100 need not protect 70."""
    federation = Federation(N=100, T=10, D=30)
    settings = federation.make_settings(
        protocol=ProtocolName.SECAGG_PLUS, neighbours=36, threshold=10
    )
    policy = federation.policy(protocols=(ProtocolName.SECAGG_PLUS,), graph_security=8)
    policy.check(settings)
    policy.check_graph(settings, 100)
    with pytest.raises(RemoteProtocolError, match="some of 70 clients unprotected"):
        policy.check_graph(settings, 70)


def test_S15_found_graphs_are_accepted_for_every_roster() -> None:
    federation = Federation(N=100, T=10, D=30)
    found = find_graph_parameters(100, 10, 30)
    settings = federation.make_settings(
        protocol=ProtocolName.SECAGG_PLUS, neighbours=found.degree, threshold=found.threshold
    )
    for members in range(70, 101):
        federation.policy().check_graph(settings, members)


def test_S01_protocol_that_the_policy_does_not_name_is_refused() -> None:
    federation = Federation(**SPARSE)
    client = federation.ids[0]
    policy = federation.policy(protocols=(ProtocolName.SECAGG,))
    party = Client(client, federation.identities[client], policy, Ledger.volatile())
    with pytest.raises(RemoteProtocolError, match="takes part in secagg"):
        party.receive(SERVER, Opening(federation.settings.to_bytes()))


def test_S08_another_model_than_the_clients_is_refused() -> None:
    federation = Federation()
    client = federation.ids[0]
    policy = federation.policy(model=hash_model(b"mine"))
    party = Client(client, federation.identities[client], policy, Ledger.volatile())
    with pytest.raises(RemoteProtocolError, match="global model"):
        party.receive(SERVER, Opening(federation.settings.to_bytes()))


# -- S02: rosters ----------------------------------------------------------------------------


def roster_at(case: dict[str, Any]) -> tuple[Federation, Roster]:
    """A round whose roster is made but has not been delivered."""
    federation = Federation(**case)
    federation.advance(Phase.SHARE)
    assert federation.server._registration.roster is not None
    return federation, federation.server._registration.roster


@pytest.mark.parametrize(
    "ring", [(), tuple(range(9)), (0, *range(9)), tuple(range(1, 11)), (-1, *range(1, 10))]
)
def test_S02_ring_that_is_no_permutation_is_refused(ring: tuple[int, ...]) -> None:
    federation, roster = roster_at(SPARSE)
    client = federation.clients[federation.ids[0]]
    with pytest.raises(RemoteProtocolError, match="no permutation"):
        client.receive(SERVER, Roster(roster.members, ring))
    assert client.receive(SERVER, roster)


def test_S02_secagg_takes_no_ring() -> None:
    federation, roster = roster_at(CASES["secagg"])
    with pytest.raises(RemoteProtocolError, match="shares with everybody"):
        federation.clients[federation.ids[0]].receive(
            SERVER, Roster(roster.members, tuple(range(8)))
        )


def test_S02_another_ring_is_another_context() -> None:
    """Two clients that were shown different graphs cannot open each other's shares."""
    federation, roster = roster_at(SPARSE)
    one = federation.ids[0]
    outputs = federation.clients[one].receive(SERVER, roster)
    share = shares_in(outputs)[0]
    other = federation.clients[share.recipient]
    other.receive(SERVER, Roster(roster.members, roster.graph[::-1]))
    assert other.receive(SERVER, whole(share)) == []
    assert one in other.refused_shares


@pytest.mark.parametrize("kind", ["same key twice", "one key", "three keys"])
def test_S15_one_key_pair_for_both_purposes_is_refused(kind: str) -> None:
    """By the server on arrival, and by clients in the roster whatever the server says."""
    from lightsecagg.protocol.roster import sign_keys

    federation, roster = roster_at(CASES["secagg"])
    lazy, other = federation.ids[0], federation.ids[1]
    pair = [AgreementKey.generate().public for _ in range(3)]
    keys = {
        "same key twice": (pair[0], pair[0]),
        "one key": (pair[0],),
        "three keys": tuple(pair),
    }[kind]
    signature = sign_keys(federation.identities[lazy], federation.settings.context, lazy, keys)
    members = tuple(
        Member(lazy, keys, signature) if member.client == lazy else member
        for member in roster.members
    )
    with pytest.raises(RemoteProtocolError, match=r"two keys of the roster are equal|takes 2"):
        federation.clients[other].receive(SERVER, Roster(members))
    if kind != "same key twice":
        fresh = Federation(**CASES["secagg"])
        fresh.server.start()
        with pytest.raises(RemoteProtocolError):
            fresh.server.receive(lazy, Advertise(keys, signature))


# -- S03, S04, S05, S15: survivor sets -------------------------------------------------------


def uploaded(case: dict[str, Any], **options: Any) -> Federation:
    """A round in which everybody has uploaded and nobody has heard of the survivors."""
    federation = Federation(**case, **options)
    federation.advance(Phase.AGREE if case.get("malicious") else Phase.RECOVER)
    assert all(step_of(client) == "Uploaded" for client in federation.clients.values())
    return federation


@ALL_CASES
def test_S03_bad_survivor_sets_are_refused(case: dict[str, Any]) -> None:
    federation = uploaded(case)
    own = federation.ids[0]
    client = federation.clients[own]
    everybody = tuple(sorted(federation.ids))
    least = federation.settings.minimum
    others = [peer for peer in everybody if peer != own]
    for survivors, message in (
        ((*everybody, own), "twice"),
        ((*everybody, 999), "not on the roster"),
        (tuple(others), "lacks this client"),
        (sorted((own, *others[: least - 2])), "does not hide"),
        ((), "does not hide"),
    ):
        before = client.snapshot()
        with pytest.raises(RemoteProtocolError, match=message):
            client.receive(SERVER, request(survivors))
        assert client.snapshot() == before
    assert client.receive(SERVER, request(everybody))


def test_S15_alive_set_needs_t_and_T_plus_2() -> None:
    for case, least in (({"N": 8, "T": 2, "D": 2, "t": 3}, 4), ({"N": 8, "T": 1, "D": 2}, 6)):
        federation = uploaded(case)
        own, *others = federation.ids
        client = federation.clients[own]
        with pytest.raises(RemoteProtocolError, match=f"fewer than {least} clients"):
            client.receive(SERVER, request(sorted((own, *others[: least - 2]))))
        assert client.receive(SERVER, request(sorted((own, *others[: least - 1]))))


def test_S03_survivor_that_had_not_shared_is_refused() -> None:
    federation = Federation(N=8, T=2, D=2)
    absent = federation.ids[3]
    federation.fault = Fault(Phase.SHARE, "before", frozenset({absent}))
    federation.advance(Phase.RECOVER)
    with pytest.raises(RemoteProtocolError, match="had not shared"):
        federation.clients[federation.ids[0]].receive(SERVER, request(sorted(federation.ids)))


def leaky_federation(N: int, D: int) -> Federation:
    """A ring so sparse that dropouts can surround a client; its clients look away."""
    federation = Federation(protocol=ProtocolName.SECAGG_PLUS, N=N, T=1, D=D, k=4, t=2)
    policy = federation.policy(graph_security=0)
    for client, identity in federation.identities.items():
        federation.clients[client] = Client(client, identity, policy, Ledger.volatile())
    return federation


def test_S15_sparse_client_refuses_to_stand_without_neighbours() -> None:
    """N - D survive, and yet all neighbours of one client are gone: its mask would lie open."""
    federation = leaky_federation(N=12, D=4)
    federation.advance(Phase.RECOVER)
    own = federation.ids[0]
    neighbours = federation.server._registration.scheme.neighbours(own)
    left = tuple(sorted(set(federation.ids) - neighbours))
    assert len(left) == federation.settings.minimum
    with pytest.raises(RemoteProtocolError, match="too few neighbours"):
        federation.clients[own].receive(SERVER, request(left))


def test_S15_server_aborts_when_a_client_stands_without_neighbours() -> None:
    federation = leaky_federation(N=12, D=4)
    own = federation.ids[0]

    def tamper(sender: int, to: int, message: Message) -> Message | None:
        lost = isinstance(
            message, MaskedUpload
        ) and sender in federation.server._registration.scheme.neighbours(own)
        return None if lost else message

    federation.tamper = tamper
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert f"too few neighbours of clients [{own}] uploaded" in result.reason
    assert federation.sent(UnmaskingShares) == []


def test_S15_sparse_client_whose_neighbours_did_not_share_does_not_upload() -> None:
    """Nor can its key be rebuilt, so the round ends there."""
    federation = leaky_federation(N=14, D=5)
    own = federation.ids[0]

    def lost() -> set[int]:
        ring = federation.server._registration.scheme.graph.order
        place = ring.index(own)
        return {ring[place - 2], ring[place - 1], ring[(place + 1) % len(ring)]}

    def tamper(sender: int, to: int, message: Message) -> Message | None:
        return None if isinstance(message, SealedShare) and sender in lost() else message

    federation.tamper = tamper
    result = federation.run()
    assert federation.sent(Refusal, own)
    assert federation.sent(MaskedUpload, own) == []
    assert isinstance(federation.clients[own].state, Closed)
    assert isinstance(result, RoundAborted)
    assert f"the secrets of clients [{own}] are out of reach" in result.reason


@ALL_CASES
def test_S04_second_survivor_set_is_refused_and_a_repeat_gets_the_same_bytes(
    case: dict[str, Any],
) -> None:
    federation = uploaded(case)
    own, victim = federation.ids[0], federation.ids[1]
    client = federation.clients[own]
    everybody = tuple(sorted(federation.ids))
    first = client.receive(SERVER, request(everybody))
    without = tuple(peer for peer in everybody if peer != victim)
    with pytest.raises(RemoteProtocolError, match="answering both would reveal"):
        client.receive(SERVER, request(without))
    again = client.receive(SERVER, request(everybody))
    encode = federation.codec.encode
    assert [encode(o.message) for o in again] == [encode(o.message) for o in first]


def test_S05_no_answer_before_m_valid_signatures() -> None:
    federation = uploaded(MALICIOUS)
    survivors = tuple(sorted(federation.ids))
    signatures: dict[int, bytes] = {}
    for client in federation.ids:
        (send,) = federation.clients[client].receive(SERVER, request(survivors))
        assert isinstance(send.message, Consent)
        signatures[client] = send.message.signature
    m = federation.settings.parameters.quorum
    own = federation.clients[federation.ids[0]]
    valid = sorted(signatures.items())
    (stranger, _), (someone, signature) = valid[0], valid[1]
    for bad, message in (
        (valid[: m - 1], f"{m - 1} signatures, m = {m} are needed"),
        ([*valid[: m - 1], valid[0]], "second time"),
        ([*valid[: m - 1], (999, signature)], "stranger"),
        ([*valid[2 : m + 1], (stranger, signature)], "signature"),
    ):
        with pytest.raises(RemoteProtocolError, match=message):
            own.receive(SERVER, Certificate(0, tuple(bad)))
        assert step_of(own) == "Signed"
    (send,) = own.receive(SERVER, Certificate(0, tuple(valid[:m])))
    assert isinstance(send.message, UnmaskingShares)
    assert someone in survivors


@given(data=st.data())
def test_S15_no_sequence_of_messages_reveals_both_secrets_of_a_peer(data: st.DataObject) -> None:
    """Survivor sets in any order, repeated and contradictory, with aborts in between."""
    federation = _uploaded_once()
    own = federation.ids[0]
    party = Client.restore(
        _SNAPSHOTS[own], federation.identities[own], federation.policy(), generation=0
    )
    others = [client for client in federation.ids if client != own]
    revealed: dict[int, set[str]] = {client: set() for client in federation.ids}
    subsets = st.lists(st.sampled_from(others), unique=True)
    for absent in data.draw(st.lists(subsets, max_size=6)):
        survivors = tuple(sorted(set(federation.ids) - set(absent)))
        try:
            outputs = party.receive(SERVER, request(survivors))
        except RemoteProtocolError:
            continue
        for output in outputs:
            if not isinstance(output, Send):
                continue
            answer = output.message
            assert isinstance(answer, UnmaskingShares)
            assert len(answer.of_seeds) == 64 * len(survivors)
            assert len(answer.of_keys) == 64 * (len(federation.ids) - len(survivors))
            for client in federation.ids:
                revealed[client].add("b" if client in survivors else "sk")
    assert all(len(secrets) <= 1 for secrets in revealed.values())


_SNAPSHOTS: dict[int, bytes] = {}
_FEDERATION: list[Federation] = []


def _uploaded_once() -> Federation:
    if not _FEDERATION:
        federation = uploaded(CASES["secagg"] | {"t": 3})
        _SNAPSHOTS.update({c: party.snapshot() for c, party in federation.clients.items()})
        _FEDERATION.append(federation)
    return _FEDERATION[0]


# -- S06, S07: one use of everything ---------------------------------------------------------


def test_S06_update_that_was_answered_for_is_spent() -> None:
    federation = Federation()
    federation.run()
    own = federation.ids[0]
    ledger = federation.clients[own].ledger
    again = Federation(round_number=2)
    again.identities, again.allow_list = federation.identities, federation.allow_list
    again.settings = again.make_settings()
    again.server = Server(again.settings, again.allow_list, again.ids)
    for client in again.ids:
        kept = ledger if client == own else Ledger.volatile()
        again.clients[client] = Client(client, again.identities[client], again.policy(), kept)
    with pytest.raises(MaskAlreadyUsed, match="this update is spent"):
        again.run()


def test_S06_input_is_taken_once() -> None:
    federation = Federation()
    federation.advance(Phase.UPLOAD)
    client = federation.clients[federation.ids[0]]
    with pytest.raises(MaskAlreadyUsed, match="already set"):
        client.set_input(federation.update(5))


@ALL_CASES
def test_S07_aborted_round_leaves_no_secret(case: dict[str, Any]) -> None:
    federation = uploaded(case)
    own = federation.ids[0]
    client = federation.clients[own]
    shares = [plaintext for _, plaintext in held_by(client).values()]
    client.receive(SERVER, AbortRound("enough"))
    assert isinstance(client.state, Closed)
    stored = client.snapshot()
    assert not any(share in stored for share in shares)
    with pytest.raises(RemoteProtocolError, match="secrets gone"):
        client.receive(SERVER, request(tuple(sorted(federation.ids))))


def test_secrets_leave_with_the_transition_that_used_them() -> None:
    federation = Federation()
    federation.advance(Phase.SHARE)
    own = federation.ids[0]
    client = federation.clients[own]
    private = client.state.private_keys
    client.receive(SERVER, federation.server._registration.roster)
    assert private[0] in client.snapshot()
    assert private[1] in client.snapshot()

    federation = uploaded(CASES["secagg"])
    client = federation.clients[own]
    assert not client.state.private_keys
    assert not client.state.contributor.stock
    shares = held_by(client)
    client.receive(SERVER, request(tuple(sorted(federation.ids))))
    assert step_of(client) == "Answered"
    stored = client.snapshot()
    # The shares of mask keys were not asked for, so they are gone.
    assert not any(plaintext[64:] in stored for _, plaintext in shares.values())


# -- snapshots -------------------------------------------------------------------------------


class RestartedEachTime(Federation):
    """A federation in which every client is a new process for every message, as under Flower."""

    states: set[str]

    def send(self, sender: int, outputs: Any) -> None:
        if sender != SERVER:
            running = self.clients[sender]
            self.states.add(step_of(running).partition(",")[0])
            restored = type(running).restore(
                running.snapshot(), self.identities[sender], self.policy(), running.generation
            )
            assert restored.snapshot() == running.snapshot()
            self.clients[sender] = restored
        super().send(sender, outputs)


@ALL_CASES
def test_snapshot_round_trip_at_every_state(case: dict[str, Any]) -> None:
    federation = RestartedEachTime(**case)
    federation.states = set()
    federation.fault = Fault(Phase.UPLOAD, "before", frozenset(federation.ids[:2]))
    assert_exact(federation, federation.run())
    expected = {"Advertised", "Sharing", "Uploaded", "Answered"}
    if case.get("malicious"):
        expected |= {"Signed"}
    assert expected <= federation.states


def test_S06_older_snapshot_is_refused() -> None:
    federation = uploaded(CASES["secagg"])
    own = federation.ids[0]
    client = federation.clients[own]
    old = client.snapshot()
    client.receive(SERVER, request(tuple(sorted(federation.ids))))
    with pytest.raises(MaskAlreadyUsed, match="answer twice"):
        Client.restore(old, federation.identities[own], federation.policy(), client.generation)


# -- S16, S22: nothing leaks -----------------------------------------------------------------


@ALL_CASES
def test_S16_a_canary_update_leaves_no_canary_on_the_wire(case: dict[str, Any]) -> None:
    federation = Federation(**case)
    canary = np.full(DIMENSION, 77.0, dtype=np.float32)
    federation.update = lambda client: Update(canary, samples=1)  # type: ignore[method-assign]
    result = federation.run()
    assert isinstance(result, Aggregate)
    quantised = np.full(2, 77, dtype="<u4").tobytes()
    for _, _, message in federation.log:
        data = federation.codec.encode(whole(message))
        assert quantised not in data
        assert canary[:2].tobytes() not in data
    uploads = [m.vector for m in federation.sent(MaskedUpload)]
    assert all(77 not in upload for upload in uploads)
    for one, other in pairwise(uploads):
        assert not np.array_equal(one, other)


@ALL_CASES
def test_S22_no_secret_in_reprs_or_refusals(case: dict[str, Any]) -> None:
    federation = uploaded(case)
    own = federation.ids[0]
    client = federation.clients[own]
    secrets = [plaintext for _, plaintext in held_by(client).values()]
    (output,) = client.receive(SERVER, request(tuple(sorted(federation.ids))))
    texts = [repr(client), repr(client.state), repr(output), repr(federation.server)]
    if isinstance(output.message, UnmaskingShares):
        secrets += [output.message.of_seeds]
    try:
        client.receive(SERVER, request((own,)))
    except RemoteProtocolError as error:
        texts.append(str(error))
    for text in texts:
        for secret in secrets:
            assert repr(secret)[2:20] not in text
            assert secret.hex()[:16] not in text


# -- S29: every state, every message ---------------------------------------------------------


def _messages(federation: Federation) -> list[Message]:
    ids = tuple(sorted(federation.ids))
    vector = np.zeros(federation.settings.length, dtype=np.uint32)
    member = Member(ids[0], (bytes(32), bytes(32)), bytes(64))
    return [
        Opening(federation.settings.to_bytes()),
        Opening(b"\x01"),
        Advertise((bytes(32), bytes(32)), bytes(64)),
        Roster((member,)),
        whole(SealedShare(ids[1], ids[0], ShareKind.SHAMIR, 128, bytes(16), bytes(144))),
        whole(SealedShare(ids[1], ids[0], ShareKind.SEED, 32, bytes(16), bytes(48))),
        SharesClosed(ids),
        SharesClosed(ids[:2]),
        MaskedUpload(Tag(ids[0]), vector),
        Reports(()),
        request(ids),
        request(ids[:1]),
        Consent(0, bytes(64)),
        Certificate(0, ((ids[0], bytes(64)),)),
        Refusal(0, ids[:1]),
        AggregatedShare(vector),
        UnmaskingShares(b"", b""),
        AbortRound("enough"),
    ]


@ALL_CASES
def test_S29_client_has_an_answer_to_every_message_in_every_state(case: dict[str, Any]) -> None:
    """It acts, or refuses and stays as it was; it never fails in another way."""
    federation = Federation(**case)
    own = sorted(federation.ids)[0]
    seen: dict[str, bytes] = {}
    federation.call(SERVER, federation.server.start)
    seen["Waiting"] = federation.clients[own].snapshot()
    while federation.step():
        seen[step_of(federation.clients[own])] = federation.clients[own].snapshot()
    federation.clients[own].abort("over")
    seen["Closed"] = federation.clients[own].snapshot()
    assert len(seen) >= 6
    for state, snapshot in seen.items():
        for message in _messages(federation):
            party = Client.restore(snapshot, federation.identities[own], federation.policy(), 0)
            try:
                party.receive(SERVER, message)
            except RemoteProtocolError:
                assert step_of(party) == state
                assert party.snapshot() == snapshot


@ALL_CASES
def test_S29_server_has_an_answer_to_every_message_in_every_phase(case: dict[str, Any]) -> None:
    for phase in Phase:
        if phase is Phase.AGREE and not case.get("malicious"):
            continue
        federation = Federation(**case)
        federation.advance(phase)
        assert federation.server.phase is phase
        for message in _messages(federation):
            if isinstance(message, Refusal):
                continue  # a legal message: the client leaves
            pending, before = federation.server.pending, federation.server.phase
            try:
                federation.server.receive(min(federation.ids), message)
            except RemoteProtocolError:
                assert (federation.server.pending, federation.server.phase) == (pending, before)


# -- what the server refuses -----------------------------------------------------------------


def _answer_phase() -> tuple[Federation, int, UnmaskingShares]:
    federation = Federation(N=8, T=2, D=2)
    federation.fault = Fault(Phase.UPLOAD, "before", frozenset(federation.ids[:1]))
    federation.advance(Phase.RECOVER)
    own = federation.ids[1]
    (send,) = federation.clients[own].receive(SERVER, request(federation.server.asked))
    assert isinstance(send.message, UnmaskingShares)
    return federation, own, send.message


@pytest.mark.parametrize("field", ["of_seeds", "of_keys"])
@pytest.mark.parametrize("harm", ["short", "long", "empty", "not below q"])
def test_S12_malformed_answers_are_refused(field: str, harm: str) -> None:
    federation, own, answer = _answer_phase()
    good: bytes = getattr(answer, field)
    bad = {
        "short": good[:-4],
        "long": good + bytes(64),
        "empty": b"",
        "not below q": b"\xff" * 4 + good[4:],
    }[harm]
    with pytest.raises(RemoteProtocolError, match=f"client {own} answered for"):
        federation.server.receive(own, msgspec.structs.replace(answer, **{field: bad}))
    assert federation.server.receive(own, answer) == []


def test_S12_shares_of_other_kinds_or_to_strangers_are_not_relayed() -> None:
    federation, roster = roster_at(SPARSE)
    own = federation.ids[0]
    outputs = federation.clients[own].receive(SERVER, roster)
    share = shares_in(outputs)[0]
    neighbours = federation.server._registration.scheme.neighbours(own)
    stranger = next(c for c in federation.ids if c != own and c not in neighbours)
    for bad in (
        replace(share, kind=ShareKind.EXPLICIT),
        replace(share, length=64, sealed=bytes(80)),
        replace(share, recipient=stranger),
        replace(share, owner=stranger),
        replace(share, serial=1),
    ):
        with pytest.raises(RemoteProtocolError, match=f"client {own} sent a share"):
            federation.server.receive(own, whole(bad))


def test_R30_server_needs_t_answers_and_says_who_is_missing() -> None:
    federation = Federation(N=8, T=2, D=2)
    federation.fault = Fault(Phase.RECOVER, "before", frozenset(federation.ids[:3]))
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert "only 5 clients answered" in result.reason
    assert "needs t = 6 shares" in result.reason


@ALL_CASES
def test_R31_server_resumes_with_the_same_graph_and_the_same_sum(case: dict[str, Any]) -> None:
    """It crashes when half of the uploads are in; the clients notice nothing."""
    federation = Federation(**case)
    federation.disk = Disk()
    federation.server = Server(
        federation.settings, federation.allow_list, federation.ids, durable=True
    )
    federation.fault = Fault(Phase.UPLOAD, "before", frozenset(federation.ids[:1]))
    federation.advance(Phase.UPLOAD)
    while len(federation.sent(MaskedUpload)) < 4:
        federation.step()
    assert federation.disk is not None
    federation.server = federation.disk.restored(federation.allow_list)
    for client in federation.gone:
        federation.server.drop(client)
    federation.settle()
    result = assert_exact(federation, federation.result)
    assert set(result.included) == set(federation.ids[1:])


# -- Appendix F.2 ----------------------------------------------------------------------------


def test_the_page_on_asynchrony_runs() -> None:
    """Its assertions are the page's claims; the blocks share their variables, as a reader would."""
    page = Path(__file__).parents[3] / "docs" / "secagg-and-asynchrony.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        assert "assert" in block
        exec(compile(block, page.name, "exec"), names)  # noqa: S102 - our own page


@pytest.mark.parametrize("case", [CASES["secagg"], SPARSE], ids=["secagg", "secagg+"])
def test_secagg_has_no_asynchronous_mode(case: dict[str, Any]) -> None:
    table = StalenessTable.from_function(constant(), scale=2, max_staleness=1)
    with pytest.raises(ParameterError, match="has no asynchronous mode"):
        Federation(**case).make_settings(buffering=Buffering(table, max_updates=8))


def test_updates_are_summed_modulo_2_32_and_other_quantizers_are_refused() -> None:
    settings = Federation().settings
    assert settings.group is WORDS
    assert settings.field == DEFAULT_FIELD
    prime = replace(settings.quantizer, group=DEFAULT_FIELD)
    with pytest.raises(ParameterError, match="summed modulo 4294967296, not modulo 2146959361"):
        replace(settings, quantizer=prime)


def test_the_worst_sum_fits_and_one_more_summand_could_wrap() -> None:
    """Entries at the bound, all of one sign, as many as there may be."""
    quantizer = Quantizer(WORDS, 1.0, 8)
    assert 8 * quantizer.limit <= 2**31 - 2
    worst = WORDS.sum([WORDS.vector([-quantizer.limit, quantizer.limit])] * 8)
    assert signed(WORDS, worst).tolist() == [-8 * quantizer.limit, 8 * quantizer.limit]
    with pytest.raises(ParameterError, match="could wrap around"):
        Quantizer(WORDS, 1.0, 9, scale=quantizer.scale)
