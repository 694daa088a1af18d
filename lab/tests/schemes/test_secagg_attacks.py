"""Attacks on SecAgg that succeed against a naive client and fail against ours.

Each attack is the same code in both tests; what it steals is compared with the victim's quantised
update, element for element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import pytest
from driver import request
from film import held_by, terms
from secagg_driver import Fault, Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.field.words import WORDS
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.client_machine import Closed, Seat
from lightsecagg.protocol.holder import Holder, Step
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, Send
from lightsecagg.protocol.kept_shares import AnyHolding
from lightsecagg.protocol.messages import (
    Certificate,
    MaskedUpload,
    Refusal,
    Roster,
    SealedShare,
    SharesClosed,
    SumRequest,
    UnmaskingShares,
)
from lightsecagg.protocol.schemes.registry import SCHEMES
from lightsecagg.protocol.schemes.traits import TRAITS
from lightsecagg.protocol.share_exchange import open_share
from lightsecagg_lab.schemes import shamir
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.pairwise_masks import client_mask
from lightsecagg_lab.schemes.pairwise_scheme import PairwiseMasks

SEED, KEY = 0, 1
"""Which of a client's two secrets."""

Loot = dict[int, bytes]
"""Holder -> its share of one secret of the victim."""


def loot(
    federation: Federation, answers: Mapping[int, UnmaskingShares], alive: Collection[int], v: int
) -> tuple[Loot, Loot]:
    """The shares of b_v and of sk_v in answers to a request that names `alive` as survivors."""
    secagg: PairwiseMasks = federation.server._registration.scheme
    dead = set(federation.ids) - set(alive)
    shares: tuple[Loot, Loot] = ({}, {})
    for holder, answer in answers.items():
        for which, blob, owners in (
            (SEED, answer.of_seeds, alive),
            (KEY, answer.of_keys, dead),
        ):
            order = secagg.revealed(holder, federation.ids, owners)
            if v in order:
                start = 64 * order.index(v)
                shares[which][holder] = blob[start : start + 64]
    return shares


def rebuild(federation: Federation, shares: Loot) -> bytes | None:
    """The secret, if there are t shares of it."""
    secagg: PairwiseMasks = federation.server._registration.scheme
    if len(shares) < secagg.threshold:
        return None
    holders = sorted(shares)[: secagg.threshold]
    field = federation.number_field
    rows = np.stack([field.from_bytes(shares[holder], shamir.LIMBS) for holder in holders])
    points = secagg.points(holders)
    return shamir.reconstruct(field, rows[:, np.newaxis], points, secagg.threshold).tobytes()


def open_upload(federation: Federation, v: int, seed: bytes, key: bytes) -> Elements:
    """x_v from the victim's upload and both of its secrets."""
    secagg: PairwiseMasks = federation.server._registration.scheme
    agreement = AgreementKey(key)
    pairwise = {j: secagg.pairwise_seed(agreement, v, j) for j in secagg.neighbours(v)}
    (upload,) = federation.sent(MaskedUpload, v)
    own = secagg.self_seed(seed, v)
    return WORDS.subtract(upload.vector, client_mask(own, pairwise, v, upload.vector.size))


def ask(
    federation: Federation, clients: Collection[int], survivors: Collection[int]
) -> dict[int, UnmaskingShares]:
    """Request these survivors of these clients; the answers that come back."""
    answers = {}
    for client in clients:
        try:
            (send,) = federation.clients[client].receive(SERVER, request(tuple(sorted(survivors))))
        except RemoteProtocolError:
            continue
        if isinstance(send.message, UnmaskingShares):
            answers[client] = send.message
    return answers


# -- overlapping lists -----------------------------------------------------------------------


class Forgetful(Holder):
    """Naive: answers every survivor set, as Algorithm descriptions that stop there suggest."""

    def take(self, seat: Seat, state: AnyHolding, message: object) -> Step | None:
        if not isinstance(message, SumRequest):
            return super().take(seat, state, message)
        self._seat = seat
        held = self._shares_for(state, message)
        answer = seat.scheme.answer(held, terms(message.survivors), seat.owners or ())
        return state, [Send(SERVER, answer)]


class AnswersEverything(Client):
    """Holds shares for as many sums as the server likes."""

    holder_type = Forgetful


def ask_twice(federation: Federation) -> tuple[int, bytes | None, bytes | None]:
    """The victim is alive in the first request and dead in the second."""
    federation.advance(Phase.AGREE if federation.malicious else Phase.RECOVER)
    v, *others = federation.ids
    first = ask(federation, others, federation.ids)
    second = ask(federation, others, others)
    of_seed, _ = loot(federation, first, federation.ids, v)
    _, of_key = loot(federation, second, others, v)
    return v, rebuild(federation, of_seed), rebuild(federation, of_key)


def test_S15_overlapping_lists_open_the_update_of_a_naive_client() -> None:
    federation = Federation(N=8, T=2, D=2, client_class=AnswersEverything)
    v, seed, key = ask_twice(federation)
    assert seed is not None
    assert key is not None
    stolen = open_upload(federation, v, seed, key)
    np.testing.assert_array_equal(stolen, federation.quantised(v))


def test_S15_our_clients_never_reveal_the_second_secret() -> None:
    federation = Federation(N=8, T=2, D=2)
    _, seed, key = ask_twice(federation)
    assert seed is not None
    assert key is None


def ask_two_halves(federation: Federation) -> tuple[int, bytes | None, bytes | None]:
    """One client is asked for b_v, another for sk_v: each of them sees one consistent story."""
    federation.advance(Phase.AGREE if federation.malicious else Phase.RECOVER)
    v, *others = federation.ids
    half = len(others) // 2
    first = ask(federation, others[:half], federation.ids)
    second = ask(federation, others[half:], others)
    of_seed, _ = loot(federation, first, federation.ids, v)
    _, of_key = loot(federation, second, others, v)
    return v, rebuild(federation, of_seed), rebuild(federation, of_key)


def test_S15_two_stories_defeat_a_client_that_trusts_its_server() -> None:
    """Why there is a malicious-server mode: the honest-but-curious one cannot see this."""
    federation = Federation(N=8, T=2, D=2, t=3)
    v, seed, key = ask_two_halves(federation)
    assert seed is not None
    assert key is not None
    stolen = open_upload(federation, v, seed, key)
    np.testing.assert_array_equal(stolen, federation.quantised(v))


@pytest.mark.parametrize("split", range(8))
def test_S15_two_stories_never_give_both_secrets_in_malicious_server_mode(split: int) -> None:
    """At most one story gets m signatures, although T colluders sign and answer both."""
    federation = Federation(N=9, T=2, D=3, malicious=True)
    federation.advance(Phase.AGREE)
    v, *others = federation.ids
    colluders, honest = others[:2], [v, *others[2:]]
    stories = (federation.ids, honest[:split]), (others, honest[split:])
    believed = []
    secrets = []
    for which, (alive, told) in enumerate(stories):
        survivors = request(tuple(sorted(alive)))
        parties = {
            client: federation.clients[client]
            for client in told
            if client in alive  # nobody believes a story that declares it dead itself
        }
        for client in colluders:  # a corrupt client is as many clients as it likes
            parties[client] = Client.restore(
                federation.clients[client].snapshot(),
                federation.identities[client],
                federation.policy(),
                generation=0,
            )
        held = {c: held_by(parties[c]) for c in colluders}
        signed = {c: party.receive(SERVER, survivors)[-1].message for c, party in parties.items()}
        certificate = Certificate(0, tuple((c, m.signature) for c, m in sorted(signed.items())))
        answers = {
            c: parties[c]._scheme(parties[c].state).answer(held[c], terms(alive), federation.ids)
            for c in colluders
        }
        for client in set(parties) - set(colluders):
            try:
                (send,) = parties[client].receive(SERVER, certificate)
            except RemoteProtocolError:
                continue
            answers[client] = send.message
            believed.append(which)
        secrets.append(rebuild(federation, loot(federation, answers, alive, v)[which]))
    assert len(set(believed)) <= 1
    assert None in secrets
    if split == len(honest):  # no lie at all: the round goes on
        assert believed == [0] * len(honest)


def test_S15_an_uploader_declared_dead_stays_hidden_by_its_self_mask() -> None:
    """The server may lie about who dropped; the key without the seed opens nothing."""
    federation = Federation(N=8, T=2, D=2)
    federation.advance(Phase.RECOVER)
    v, *others = federation.ids
    answers = ask(federation, others, others)
    of_seed, of_key = loot(federation, answers, others, v)
    assert of_seed == {}
    key = rebuild(federation, of_key)
    assert key is not None
    assert AgreementKey(key).public == federation.server._registration.scheme.mask_key(v)
    stolen = open_upload(federation, v, bytes(32), key)
    assert np.count_nonzero(stolen == federation.quantised(v)) <= 1


# -- one key pair ----------------------------------------------------------------------------


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> str:
    """Naive: the key that makes masks, and is secret-shared, seals shares as well."""
    traits = replace(TRAITS[ProtocolName.SECAGG], name="one-key secagg", key_count=1)
    monkeypatch.setitem(TRAITS, traits.name, traits)
    monkeypatch.setitem(SCHEMES, traits.name, SCHEMES[ProtocolName.SECAGG])
    return traits.name


def read_what_was_sealed_to_the_dead(
    federation: Federation,
) -> tuple[int, bytes | None, bytes | None]:
    """After an honest round: rebuild the dropped clients' keys, and open what was sealed to them.

    A survivor's seed is the server's by right; the attack is after its key.
    """
    dead = federation.ids[:3]
    federation.fault = Fault(Phase.UPLOAD, "before", frozenset(dead))
    result = federation.run()
    assert isinstance(result, Aggregate)
    np.testing.assert_array_equal(result.total, federation.exact_sum(result.included))

    alive, v = result.included, result.included[0]
    answers = {
        sender: message
        for sender, _, message in federation.log
        if isinstance(message, UnmaskingShares)
    }
    of_seed, _ = loot(federation, answers, alive, v)
    of_key: Loot = {}
    for j in dead:
        key = rebuild(federation, loot(federation, answers, alive, j)[KEY])
        assert key is not None
        (sealed,) = (
            m for m in federation.sent(SealedShare, v) if m.owner == v and m.recipient == j
        )
        try:
            opened = open_share(
                federation.server._registration.scheme.round, AgreementKey(key), j, sealed
            )
        except CryptoError:
            continue
        of_key[j] = opened[64:]
    return v, rebuild(federation, of_seed), rebuild(federation, of_key)


def test_S15_one_key_pair_lets_the_dead_testify_against_the_living(one_key: str) -> None:
    """t = D = 3: an honest-but-curious server reads every survivor's update."""
    federation = Federation(one_key, N=8, T=1, D=3, t=3)
    v, seed, key = read_what_was_sealed_to_the_dead(federation)
    assert seed is not None
    assert key is not None
    stolen = open_upload(federation, v, seed, key)
    np.testing.assert_array_equal(stolen, federation.quantised(v))


def test_S15_two_key_pairs_keep_sealed_shares_sealed() -> None:
    federation = Federation(N=8, T=1, D=3, t=3)
    _, seed, key = read_what_was_sealed_to_the_dead(federation)
    assert seed is not None
    assert key is None


# -- too few partners ------------------------------------------------------------------------


@pytest.mark.parametrize("named", [1, 3, 5])
def test_S15_client_does_not_mask_with_a_few_accomplices_only(named: int) -> None:
    """A server that names only its friends as owners would know every mask but one."""
    federation = Federation(N=8, T=2, D=2)
    federation.advance(Phase.SHARE)
    roster = federation.server._registration.roster
    assert isinstance(roster, Roster)
    v = federation.clients[federation.ids[0]]
    v.receive(SERVER, roster)
    v.set_input(federation.update(v.client))
    outputs = v.receive(SERVER, SharesClosed(tuple(federation.ids[:named])))
    sent = [output.message for output in outputs if isinstance(output, Send)]
    assert [type(message) for message in sent] == [Refusal]
    assert isinstance(v.state, Closed)


def test_S19_share_reflected_to_its_owner_or_redirected_does_not_open() -> None:
    federation = Federation(N=8, T=2, D=2)
    a, b, c = federation.ids[:3]

    def tamper(sender: int, to: int, message: object) -> object:
        if isinstance(message, SealedShare) and sender == SERVER and to == b:
            if message.owner == a:
                stolen = [m for m in federation.sent(SealedShare, a) if m.recipient == c]
                return replace(stolen[0], recipient=b)
            if message.owner == c:
                own = [m for m in federation.sent(SealedShare, b) if m.recipient == c]
                return replace(own[0], owner=c, recipient=b)
        return message

    federation.tamper = tamper  # type: ignore[assignment]
    result = federation.run()
    assert isinstance(result, Aggregate)
    np.testing.assert_array_equal(result.total, federation.exact_sum(result.included))
    assert set(federation.clients[b].refused_shares) == {a, c}
