"""LightSecAgg's masks by themselves: which shares a round has, what they say (S06, S12, S19)."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import combinations, product

import numpy as np
import pytest
from bundles import whole
from driver import HONEST, MALICIOUS, PAPER, SEEDED, CountingEntropy, Federation

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.prg import SEED_LENGTH
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import (
    CryptoError,
    InconsistentAnswers,
    NotEnoughAnswers,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.params import ShareMode
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.messages import AggregatedShare, Member, Roster, SealedShare
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.schemes.coded_masks import (
    CodedMasksClient,
    CodedMasksServer,
    _end_quarrels,
    _most_missed,
)
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
    full = 4 * settings.share_length + 16  # with four blinds
    lengths = {ShareKind.EXPLICIT: full}
    if share_mode is SEEDED:
        lengths[ShareKind.SEED] = SEED_LENGTH
    for length in (0, SEED_LENGTH, full - 16, full, full + 4):
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
        owner,
        recipient,
        ShareKind.SEED,
        SEED_LENGTH,
        bytes(16),
        bytes(SEED_LENGTH + 16),
        mac=bytes(16),
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


# -- shares and reports ----------------------------------------------------------------------------


def test_S12_an_explicit_share_holds_field_elements_and_every_seed_is_one() -> None:
    federation = Federation()
    scheme = CodedMasksClient(round_of(federation, 1), federation.ids[0])
    length = 4 * federation.settings().shared_length
    scheme.check(ShareKind.EXPLICIT, bytes(length))
    with pytest.raises(CryptoError, match="holds no field elements"):
        scheme.check(ShareKind.EXPLICIT, b"\xff" * length)
    scheme.check(ShareKind.SEED, b"\xff" * SEED_LENGTH)


class Sharers:
    """All clients have shared one mask with each other, without seals."""

    def __init__(self, federation: Federation) -> None:
        self.ids, self.round = federation.ids, round_of(federation, 1)
        self.schemes = {c: CodedMasksClient(self.round, c) for c in self.ids}
        self.server = CodedMasksServer(self.round, system_entropy)
        self.held: dict[int, dict[MaskRef, Share]] = {c: {} for c in self.ids}
        self.masks: dict[int, Elements] = {}
        for c, scheme in self.schemes.items():
            mask = scheme.prepare(0, (), system_entropy)
            self.masks[c] = scheme.mask(mask.secret, ())
            self.held[c][MaskRef(c)] = mask.own
            for share in mask.outgoing:
                self.held[share.recipient][MaskRef(c)] = (share.kind.value, share.plaintext)

    def reports(self) -> dict[int, dict[int, Elements]]:
        """Holder -> owner -> its values."""
        return {
            c: {
                ref.owner: scheme.report(ref, share, bytes([ref.owner]) * 32)
                for ref, share in self.held[c].items()
            }
            for c, scheme in self.schemes.items()
        }

    def answers(self, *weights: int) -> tuple[dict[int, AggregatedShare], Elements]:
        """Everybody's answer for so many masks with these weights, and what they decode to."""
        pairs = list(zip(self.ids, weights, strict=False))
        terms = [Term(MaskRef(c), weight) for c, weight in pairs]
        field = self.server.settings.field
        total = field.weighted_sum(list(weights), [self.masks[c] for c, _ in pairs])
        return {c: self.schemes[c].answer(self.held[c], terms, ()) for c in self.ids}, total


def test_S46_the_server_finds_the_pairs_of_which_one_lied_and_names_who_is_in_many() -> None:
    sharers = Sharers(Federation(7, 1, 2, 3))
    said = sharers.reports()
    assert sharers.server.examine(said) == (frozenset(), ())
    owner, holder, liar = sharers.ids[1], sharers.ids[4], sharers.ids[6]
    said[holder][owner] = said[holder][owner][::-1].copy()
    assert sharers.server.examine(said) == (frozenset({(owner, holder)}), ())
    for other in sharers.ids:
        said[liar][other] = said[liar][other][::-1].copy()
    findings = sharers.server.examine(said)
    assert findings.accused == {(owner, holder)} | {(other, liar) for other in sharers.ids}
    assert findings.named == (liar,)


@pytest.mark.parametrize("weights", [(1, 1), (2, 2), (2, 3), (1, 2)])
def test_weights_count_whatever_they_are(weights: tuple[int, ...]) -> None:
    sharers = Sharers(Federation())
    answers, total = sharers.answers(*weights)
    mask, suspects = sharers.server.recover(MaskSum(()), answers)
    assert (mask == total).all()
    assert suspects == ()


def test_S14_two_spare_answers_name_a_liar_and_the_sum_is_right_without_it() -> None:
    sharers = Sharers(Federation(6, 1, 2, 4))
    answers, total = sharers.answers(1, 1, 1)
    liar = sharers.ids[3]
    answers[liar] = AggregatedShare(answers[liar].vector[::-1].copy())
    mask, suspects = sharers.server.recover(MaskSum(()), answers)
    assert suspects == (liar,)
    assert (mask == total).all()
    spare = {c: answers[c] for c in sharers.ids[1:]}
    with pytest.raises(InconsistentAnswers):
        sharers.server.recover(MaskSum(()), spare)
    entropy = CountingEntropy("spare")
    just_enough = CodedMasksServer(sharers.round, entropy)
    just_enough.recover(MaskSum(()), {c: answers[c] for c in sharers.ids[:4]})
    assert not entropy.drawn, "U answers contradict nothing"


def test_an_answer_is_as_long_as_a_share() -> None:
    sharers = Sharers(Federation())
    answers, _ = sharers.answers(1, 1)
    client, answer = next(iter(answers.items()))
    sharers.server.check_answer(MaskSum(()), client, answer)
    for vector in (answer.vector[1:], np.append(answer.vector, answer.vector[:1])):
        with pytest.raises(RemoteProtocolError, match=f"client {client} answered with"):
            sharers.server.check_answer(MaskSum(()), client, AggregatedShare(vector))


# -- whose updates are summed ----------------------------------------------------------------------


def chooser(N: int, D: int, U: int, malicious: bool = False) -> tuple[CodedMasksServer, list[int]]:
    threat_model = MALICIOUS if malicious else HONEST
    federation = Federation(N, 1, D, U, threat_model)
    server = CodedMasksServer(round_of(federation, 1), system_entropy)
    return server, list(federation.ids)


def all_but(ids: list[int], lacks: dict[int, list[int]]) -> dict[int, frozenset[int]]:
    """What uploads say: everybody holds everything but this."""
    return {c: frozenset(ids) - set(lacks.get(c, ())) for c in ids}


def test_S46_floor_of_half_the_spare_uploads_may_lie() -> None:
    server, _ = chooser(9, 4, 5)
    assert [server._liars(n) for n in range(4, 10)] == [0, 0, 0, 1, 1, 2]


def test_with_as_many_answers_as_liars_ask_for_nobody_is_left_out() -> None:
    server, ids = chooser(8, 4, 4)
    a, b, x, *_ = ids
    held = all_but(ids, {a: [x], b: [x]})
    assert server.choose(ids, held) == tuple(sorted(set(ids) - {x})), "x has cheated two"


def test_with_fewer_an_owner_is_left_out_that_others_lack() -> None:
    server, ids = chooser(6, 2, 4)
    a, b, x, *_ = ids
    held = all_but(ids, {a: [x], b: [x]})
    assert server.choose(ids, held) == tuple(sorted(set(ids) - {x})), "U + 1 are to be had"


def test_the_larger_set_stands_where_a_smaller_one_has_no_more_answers() -> None:
    server, ids = chooser(6, 2, 4)
    a, b, x, y, *_ = ids
    held = all_but(ids, {a: [x], b: [y]})
    assert server.choose(ids, held) == tuple(ids)


def test_U_answers_are_enough_where_no_more_can_be_had_and_fewer_are_not() -> None:
    server, ids = chooser(5, 1, 4)
    a, b, x, *_ = ids
    assert server.choose(ids, all_but(ids, {a: [x]})) == tuple(ids)
    assert server.choose(ids, all_but(ids, {a: [x], b: [x]})) == tuple(sorted(set(ids) - {x}))
    lonely = all_but(ids, {c: [x, b] for c in ids if c not in (x, b)})
    with pytest.raises(NotEnoughAnswers, match="no survivor set has 4 members that hold all its "):
        server.choose(ids, lonely)


def test_neither_one_answer_too_few_nor_a_sum_over_too_few_is_chosen() -> None:
    server, ids = chooser(5, 1, 4)
    a, b, x, y, _ = ids
    with pytest.raises(NotEnoughAnswers):
        server.choose(ids, all_but(ids, {a: [x], b: [y]}))
    server, ids = chooser(5, 2, 2)
    pair = frozenset(ids[:2])
    assert server.settings.minimum == 3, "T + 2; U = 2 answers would do"
    held = {c: pair if c in pair else frozenset({c}) for c in ids}
    with pytest.raises(NotEnoughAnswers):
        server.choose(ids, held)


def test_S05_as_many_as_must_sign_hold_all_shares() -> None:
    server, ids = chooser(7, 2, 4, malicious=True)
    quorum = server.settings.parameters.quorum
    assert quorum == 5
    x = ids[-1]
    held = all_but(ids, {ids[0]: [x], ids[1]: [ids[2]]})
    assert server.choose(ids, held) == tuple(ids), "m = 5 may sign, and so many answer"
    held = all_but(ids, {c: [x] for c in ids[:3]})
    assert server.choose(ids, held) == tuple(ids[:-1])


def test_S46_who_is_accused_holds_its_shares_and_signs_but_its_answer_does_not_count() -> None:
    server, ids = chooser(7, 2, 4, malicious=True)
    x = ids[0]
    held = all_but(ids, {})
    accused = {(x, c) for c in ids[1:4]}
    assert server.choose(ids, held, accused) == tuple(ids[1:]), "4 answers, of 5 that are wanted"
    everybody = {(owner, holder) for owner in ids for holder in ids}
    with pytest.raises(NotEnoughAnswers, match="all its shares that agree with each other"):
        server.choose(ids, held, everybody)
    nothing = dict.fromkeys(ids, frozenset[int]())
    with pytest.raises(NotEnoughAnswers, match=r"all its shares$"):
        server.choose(ids, nothing)


def test_S46_peace_is_made_with_as_few_as_may_have_lied_and_leaves_enough() -> None:
    server, ids = chooser(9, 4, 5)
    x, y, z, *others = ids
    good = {c: set(ids) for c in ids}
    assert server._at_peace(good) == set(ids)
    for c in others:
        good[c].discard(x)  # one side of a quarrel is enough
    assert server._at_peace(good) == set(ids) - {x}
    good[y].clear()
    assert server._at_peace(good) == set(ids) - {x, y}
    good[z].clear()
    assert server._at_peace(good) == set(), "three of nine cannot be told for U = 5"
    server, ids = chooser(7, 1, 5, malicious=True)
    good = {c: set(ids) for c in ids}
    good[ids[0]].clear()
    assert server._at_peace(good) == set(ids[1:])
    few, ids = chooser(7, 0, 7)
    good = {c: set(ids) for c in ids}
    assert few._at_peace(good) == set(ids)


def test_S46_a_peace_that_leaves_fewer_than_a_sum_may_have_is_none() -> None:
    server, ids = chooser(9, 3, 2, malicious=True)
    assert server.settings.minimum == server.settings.parameters.quorum == 6
    x, y, *_ = left = ids[:7]
    good = {c: set(left) for c in left}
    good[x].clear()
    assert server._at_peace(good) == set(left) - {x}
    good[y].clear()
    assert server._at_peace(good) == set(), "two liars can be told, but five may not be summed"


def graphs() -> Iterator[dict[int, set[int]]]:
    """Quarrels among seven."""
    coins = random.Random(7)
    for _ in range(150):
        quarrels: dict[int, set[int]] = {c: set() for c in range(7)}
        for a, b in combinations(range(7), 2):
            if coins.random() < coins.choice([0.1, 0.3]):
                quarrels[a].add(b)
                quarrels[b].add(a)
        yield quarrels


def test_S46_quarrels_end_without_the_fewest() -> None:
    """Beside all sets there are."""
    for quarrels in graphs():
        for size in range(5):
            found = _end_quarrels(quarrels, size, iter(range(1000)))
            possible = any(
                all(not enemies - set(gone) for c, enemies in quarrels.items() if c not in gone)
                for count in range(size + 1)
                for gone in combinations(quarrels, count)
            )
            assert (found is not None) == possible
            if found is not None:
                assert len(found) <= size
                assert all(not quarrels[c] - found for c in quarrels.keys() - found)


def test_S46_a_search_that_cannot_end_well_takes_no_step_and_none_goes_on_without() -> None:
    triangle = {1: {2, 3}, 2: {1, 3}, 3: {1, 2}}
    steps = iter(range(9))
    assert _end_quarrels(triangle, 1, steps) is None
    assert next(steps) == 0
    pair = {1: {2}, 2: {1}}
    assert _end_quarrels(pair, 1, iter(range(1))) == {2}
    assert _end_quarrels(pair, 1, iter(())) is None
    assert _end_quarrels({1: set(), 2: set()}, 0, iter(())) == frozenset()


def test_S46_who_alone_keeps_most_from_answering_goes_first() -> None:
    assert _most_missed({1: {5}, 2: {6, 7}, 3: {6, 7}, 4: {6, 7}}) == 5
    assert _most_missed({1: {5}, 2: {6}, 3: {5, 6, 7}}) == 6, "the higher id, where all is equal"
    assert _most_missed({1: {5}, 2: {6}, 3: {5, 7}}) == 5, "whom more lack"
    assert _most_missed({1: {5, 6}, 2: {6, 7}, 3: set()}) == 6


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
def test_masks_are_taken_away_range_by_range_in_any_order(share_mode: ShareMode) -> None:
    sharers = Sharers(Federation(share_mode=share_mode, dimension=40))
    answers, total = sharers.answers(1, 1, 1)
    field = sharers.server.settings.field
    job = sharers.server.recovery(MaskSum(()), answers)
    assert job.columns == sharers.server.settings.share_length
    job.open()
    left = field.add(total, np.arange(total.size, dtype=np.uint32))
    for start, stop in ((4, job.columns), (0, 1), (1, 4)):
        job.take_away(left, start, job.run(start, stop))
    assert left.tolist() == list(range(total.size))


# -- R59: liars in the answers ---------------------------------------------------------------------


def doubts_of(liars: Collection[int], ids: Collection[int]) -> list[Pair]:
    """All pairs of whom one lies."""
    return [(o, h) for o in ids for h in ids if o != h and (o in liars or h in liars)]


def check_parting(
    server: CodedMasksServer, ids: list[int], liars: set[int], accused: set[Pair], lost: set[Pair]
) -> tuple[int, ...]:
    """However these lie in sharing and then in their answers, every lie is located."""
    lacks = {h: [o for o, other in lost if other == h] for h in ids}
    held = all_but(ids, lacks)
    chosen = server.choose(ids, held, accused)
    answering = server.answering(chosen, held, accused)
    assert answering <= set(chosen)
    assert not [pair for pair in accused | lost if pair[0] in chosen and pair[1] in answering]
    signers = sum(set(chosen) <= held[client] for client in chosen)
    assert signers >= server.settings.parameters.quorum
    assert len(answering) >= server.settings.parameters.survivors + 2 * len(answering & liars)
    return chosen


@pytest.mark.parametrize("malicious", [False, True])
def test_R59_one_liar_is_located_whatever_it_does_to_its_peers(malicious: bool) -> None:
    """All 2^10 patterns of cheating and slander, in wrong shares and in lost ones."""
    server, ids = chooser(6, 2, 4, malicious)
    liar = ids[2]
    possible = doubts_of({liar}, ids)
    for bits in product((False, True), repeat=len(possible)):
        pattern = {pair for pair, bit in zip(possible, bits, strict=True) if bit}
        chosen = check_parting(server, ids, {liar}, pattern, set())
        assert set(ids) - {liar} <= set(chosen), "no honest update is left out"
        if not malicious:
            assert check_parting(server, ids, {liar}, set(), pattern) == chosen


@pytest.mark.parametrize(("clients", "survivors"), [(4, 2), (5, 3)])
def test_R59_one_liar_is_located_where_a_quorum_needs_one_of_the_two_that_quarrel(
    clients: int, survivors: int
) -> None:
    """All patterns of wrong shares and lost ones: without a share nobody signs for its owner."""
    server, ids = chooser(clients, 1, survivors, malicious=True)
    liar = ids[0]
    possible = doubts_of({liar}, ids)
    for states in product(("held", "wrong", "lost"), repeat=len(possible)):
        pairs = list(zip(possible, states, strict=True))
        accused = {pair for pair, state in pairs if state == "wrong"}
        lost = {pair for pair, state in pairs if state == "lost"}
        chosen = check_parting(server, ids, {liar}, accused, lost)
        assert len(chosen) >= server.settings.minimum


def test_R59_two_liars_are_located_in_all_patterns_that_a_search_tries() -> None:
    server, ids = chooser(9, 4, 5)
    coins = random.Random(59)
    for _ in range(6000):
        liars = set(coins.sample(ids, 2))
        density = coins.choice([0.05, 0.15, 0.4, 0.8])
        possible = doubts_of(liars, ids)
        pattern = {pair for pair in possible if coins.random() < density}
        lost = {pair for pair in pattern if coins.random() < 0.3}
        check_parting(server, ids, liars, pattern - lost, lost)


def test_R59_where_more_quarrel_than_can_be_told_holders_leave_alone() -> None:
    server, ids = chooser(6, 1, 5)
    held, accused = all_but(ids, {}), {(ids[0], ids[1])}
    chosen = server.choose(ids, held, accused)
    assert chosen == tuple(ids)
    assert server.answering(chosen, held, accused) == frozenset(ids)
