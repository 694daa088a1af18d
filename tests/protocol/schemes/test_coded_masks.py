"""LightSecAgg's masks by themselves: which shares a round has, what they say (S06, S12, S19)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from bundles import whole
from driver import MALICIOUS, PAPER, SEEDED, CountingEntropy, Federation

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.prg import SEED_LENGTH
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, NotEnoughAnswers, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.params import ShareMode
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.messages import Member, Roster, SealedShare
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import MaskRef, MaskSum, PreparedMask, Term
from lightsecagg.protocol.share_exchange import OutgoingShare, Share


def round_of(federation: Federation, number: int) -> Round:
    keys = {c: (AgreementKey(bytes([c]) * 32).public,) for c in federation.ids}
    roster = Roster(tuple(Member(client, keys[client], b"") for client in federation.ids))
    return fix_round(federation.settings(number), federation.allow_list, roster)


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
def test_S06_masks_differ_by_round_and_serial_though_the_entropy_repeats_itself(
    share_mode: ShareMode,
) -> None:
    """A cloned machine draws the same bytes in two rounds, with the same keys of all clients.

    Under one mask the difference of two uploads would be that of the updates.
    """
    federation = Federation(share_mode=share_mode, dimension=500)
    owner, other, *_ = federation.ids
    field = federation.settings().field

    def mask(number: int, client: int = owner, serial: int = 0) -> Elements:
        entropy = CountingEntropy("the same bytes again")
        scheme = CodedMasksClient(round_of(federation, number), client)
        return scheme.mask(scheme.prepare(serial, (), entropy).secret, ())

    naive = [
        prg.draw_uniform(500, field.modulus, CountingEntropy("the same bytes again"))
        for _ in range(2)
    ]
    assert (naive[0] == naive[1]).all()
    masks = [mask(1), mask(2), mask(1, serial=1), mask(1, client=other)]
    for index, one in enumerate(masks):
        for another in masks[:index]:
            assert (one == another).sum() < 3
    assert (mask(1) == masks[0]).all()


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
@pytest.mark.parametrize("kind", ShareKind)
def test_S12_a_share_has_the_length_of_its_kind_and_a_kind_of_the_rounds_mode(
    share_mode: ShareMode, kind: ShareKind
) -> None:
    federation = Federation(share_mode=share_mode, dimension=40)
    settings, round_ = federation.settings(), round_of(federation, 1)
    scheme = CodedMasksClient(round_, federation.ids[0])
    full = 4 * settings.share_length + 8  # with two blinds
    lengths = {ShareKind.EXPLICIT: full}
    if share_mode is SEEDED:
        lengths[ShareKind.SEED] = SEED_LENGTH
    for length in (0, SEED_LENGTH, full - 8, full, full + 4):
        if lengths.get(kind) == length:
            scheme.admit(kind, length)
        else:
            with pytest.raises(CryptoError, match=f"kind {kind.name}"):
                scheme.admit(kind, length)


def test_S19_a_server_relays_no_seed_where_all_shares_are_explicit() -> None:
    federation = Federation(share_mode=PAPER)
    network = federation.network()
    network.start().run(until=lambda: network.server.phase is Phase.SHARE)
    owner, recipient, *_ = federation.ids
    seed = SealedShare(
        owner, recipient, ShareKind.SEED, SEED_LENGTH, bytes(16), bytes(SEED_LENGTH + 16)
    )
    with pytest.raises(RemoteProtocolError, match="no shares of kind SEED in paper mode"):
        network.server.receive(owner, whole(seed))


def test_S22_a_shared_mask_shows_neither_the_mask_nor_a_share() -> None:
    outgoing = [OutgoingShare(1, ShareKind.SEED, b"peer share")]
    mask = PreparedMask(b"secret", (1, b"own share"), outgoing)
    assert repr(mask) == "PreparedMask(outgoing=1)"


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
def test_any_U_answers_recover_the_weighted_sum_of_masks(share_mode: ShareMode) -> None:
    """Without parties: two masks per client, the terms of a sum with weights and serials."""
    federation = Federation(share_mode=share_mode, dimension=40)
    round_ = round_of(federation, 1)
    schemes = {c: CodedMasksClient(round_, c) for c in federation.ids}
    held: dict[int, dict[MaskRef, Share]] = {c: {} for c in federation.ids}
    masks = {}
    for c, scheme in schemes.items():
        for serial in range(2):
            mask = scheme.prepare(serial, (), system_entropy)
            masks[MaskRef(c, serial)] = scheme.mask(mask.secret, ())
            held[c][MaskRef(c, serial)] = mask.own
            for share in mask.outgoing:
                scheme.check(share.kind, share.plaintext)
                held[share.recipient][MaskRef(c, serial)] = (share.kind.value, share.plaintext)
    terms = tuple(
        Term(MaskRef(c, c % 2), weight) for c, weight in zip(held, (1, 3, 7), strict=False)
    )
    server, asked = CodedMasksServer(round_, system_entropy), MaskSum(terms)
    answers = {c: schemes[c].answer(held[c], terms, ()) for c in federation.ids}
    expected = server.settings.field.weighted_sum(
        [term.weight for term in terms], [masks[term.ref] for term in terms]
    )
    for chosen in combinations(answers, server.settings.parameters.survivors):
        mask, suspects = server.recover(asked, {c: answers[c] for c in chosen})
        assert (mask == expected).all()
        assert suspects == ()
    with pytest.raises(NotEnoughAnswers, match="only 3 clients answered, U = 4 are needed"):
        server.recover(asked, dict(list(answers.items())[:3]))


def test_an_answer_takes_a_share_of_every_mask_in_the_sum() -> None:
    federation = Federation()
    client, other, *_ = federation.ids
    scheme = CodedMasksClient(round_of(federation, 1), client)
    own = scheme.prepare(0, (), system_entropy).own
    held, terms = {MaskRef(client): own}, [Term(MaskRef(client)), Term(MaskRef(other))]
    assert scheme.missing(held, terms) == (other,)
    assert scheme.missing(held, terms[:1]) == ()
    assert scheme.missing(held, [Term(MaskRef(client, 1))]) == (client,)


def test_owners_whose_shares_did_not_arrive_are_left_out_of_the_sum() -> None:
    federation = Federation(survivors=4)
    server = CodedMasksServer(round_of(federation, 1), system_entropy)
    everybody = frozenset(federation.ids)
    lost = federation.ids[2]
    held = {c: everybody - {lost} if c != lost else everybody for c in federation.ids}
    assert server.choose(federation.ids, held) == tuple(sorted(everybody - {lost}))
    nothing = dict.fromkeys(federation.ids, frozenset[int]())
    with pytest.raises(NotEnoughAnswers, match="no survivor set has 4 members"):
        server.choose(federation.ids, nothing)


def quarrels(
    federation: Federation, liars: int
) -> Iterator[tuple[dict[int, frozenset[int]], set[Pair]]]:
    """What uploads say after two dropouts, if so many lie in sharing or about what they hold."""
    coins = random.Random(46)
    for _ in range(400):
        uploaders = coins.sample(federation.ids, federation.clients - 2)
        lying, honest = uploaders[:liars], uploaders[liars:]
        lacks: dict[int, set[int]] = {client: set() for client in uploaders}
        accused: set[Pair] = set()
        cheats, slanders = coins.choice([0.05, 0.1, 0.2]), coins.choice([0.1, 0.4, 0.7])
        for liar in lying:
            for client in honest:
                pairs = [(liar, client)] if coins.random() < cheats else []
                pairs += [(client, liar)] if coins.random() < slanders else []
                for owner, holder in pairs:
                    if coins.random() < 0.5:
                        lacks[holder].add(owner)
                    else:
                        accused.add((owner, holder))
        yield {c: frozenset(set(uploaders) - lacks[c]) for c in uploaders}, accused


@pytest.mark.parametrize("searches", [False, True])
def test_S46_liars_who_quarrel_with_many_do_not_stop_a_round(
    searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three liars and two dropouts, D = 5: leaving out whom most lack drops the honest instead."""
    if not searches:
        monkeypatch.setattr(CodedMasksServer, "_at_peace", lambda self, good: set())
    federation = Federation(14, privacy=2, dropouts=5, survivors=6, threat_model=MALICIOUS)
    server = CodedMasksServer(round_of(federation, 1), system_entropy)
    stopped = 0
    for held, accused in quarrels(federation, 3):
        try:
            chosen = set(server.choose(federation.ids, held, accused))
        except NotEnoughAnswers:
            stopped += 1
            continue
        doubted = {holder for owner, holder in accused if owner in chosen}
        signers = {client for client in chosen if chosen <= held[client]}
        assert len(signers) >= 9, "the quorum"
        assert len(signers - doubted) >= 6, "U answers that rest on no share in doubt"
    assert (stopped == 0) == searches, stopped


def test_S46_the_search_for_peace_ends_whatever_the_quarrels() -> None:
    federation = Federation(60, privacy=1, dropouts=20, survivors=20)
    server = CodedMasksServer(round_of(federation, 1), system_entropy)
    coins, everybody = random.Random(46), frozenset(federation.ids)
    held = {c: everybody - set(coins.sample(federation.ids, 3)) for c in federation.ids}
    with pytest.raises(NotEnoughAnswers, match="no survivor set has 20 members"):
        server.choose(federation.ids, held)
