"""SecAgg's and SecAgg+'s masks by themselves, without parties: graph, shares, recovery."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from secagg_driver import Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import (
    CryptoError,
    InconsistentAnswers,
    NotEnoughAnswers,
    RemoteProtocolError,
)
from lightsecagg.protocol.messages import Member, Roster, UnmaskingShares
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.interface import Answer, MaskRef, MaskSum, Term
from lightsecagg.protocol.share_exchange import Share
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.pairwise_scheme import PairwiseMasksClient, PairwiseMasksServer

SPARSE = {"protocol": ProtocolName.SECAGG_PLUS, "N": 10, "T": 2, "D": 2, "k": 6, "t": 4}


class Scene:
    """Eight clients' schemes and the server's; shares move without seals."""

    def __init__(self, **options: object) -> None:
        federation = Federation(**options)  # type: ignore[arg-type]
        self.ids = federation.ids
        private = {c: [AgreementKey.generate() for _ in range(2)] for c in self.ids}
        members = [Member(c, tuple(key.public for key in private[c]), b"") for c in self.ids]
        ring = tuple(range(len(members))) if federation.k else ()
        roster = Roster(tuple(members), ring)
        round_ = fix_round(federation.settings, federation.allow_list, roster)
        self.server = PairwiseMasksServer(round_, system_entropy)
        self.clients = {c: PairwiseMasksClient(round_, c) for c in self.ids}
        self.held: dict[int, dict[MaskRef, Share]] = {c: {} for c in self.ids}
        self.secrets: dict[int, bytes] = {}
        for c, scheme in self.clients.items():
            keys = tuple(key.private_bytes() for key in private[c])
            mask = scheme.prepare(0, keys, system_entropy)
            self.secrets[c] = mask.secret
            self.held[c][MaskRef(c)] = mask.own
            assert {share.recipient for share in mask.outgoing} == scheme.peers
            for share in mask.outgoing:
                scheme.admit(share.kind, len(share.plaintext))
                scheme.check(share.kind, share.plaintext)
                self.held[share.recipient][MaskRef(c)] = (share.kind.value, share.plaintext)

    def asked(self, survivors: list[int]) -> MaskSum:
        held = {c: frozenset(ref.owner for ref in self.held[c]) for c in survivors}
        terms = tuple(Term(MaskRef(c)) for c in survivors)
        return MaskSum(terms, frozenset(self.ids), held)

    def answers(self, survivors: list[int]) -> dict[int, Answer]:
        terms = self.asked(survivors).terms
        return {c: self.clients[c].answer(self.held[c], terms, self.ids) for c in survivors}


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["secagg", "secagg+"])
@pytest.mark.parametrize("dropped", [0, 2])
def test_recovery_finds_what_the_masks_add_up_to(options: dict[str, object], dropped: int) -> None:
    scene = Scene(**options)
    survivors = sorted(scene.ids[dropped:])
    asked = scene.asked(survivors)
    assert scene.server.choose(scene.ids, asked.held) == tuple(survivors)
    answers = scene.answers(survivors)
    for client, answer in answers.items():
        scene.server.check_answer(asked, client, answer)
    masks = [scene.clients[c].mask(scene.secrets[c], scene.ids) for c in survivors]
    recovered, suspects = scene.server.recover(asked, answers)
    np.testing.assert_array_equal(recovered, scene.server.settings.group.sum(masks))
    assert suspects == ()


def test_S15_an_answer_holds_one_secret_of_every_client() -> None:
    scene = Scene()
    answer = scene.answers(sorted(scene.ids[2:]))[scene.ids[5]]
    assert isinstance(answer, UnmaskingShares)
    assert len(answer.of_seeds) == 6 * 64
    assert len(answer.of_keys) == 2 * 64


def test_too_few_answers_and_wrong_ones_are_noticed() -> None:
    scene = Scene()
    survivors = sorted(scene.ids[2:])
    asked, answers = scene.asked(survivors), scene.answers(survivors)
    few = dict(list(answers.items())[: scene.server.threshold - 1])
    with pytest.raises(NotEnoughAnswers, match="needs t = 6 shares"):
        scene.server.recover(asked, few)
    client = survivors[0]
    answer = answers[client]
    assert isinstance(answer, UnmaskingShares)
    swapped = answer.of_keys[64:] + answer.of_keys[:64]
    answers[client] = UnmaskingShares(answer.of_seeds, swapped)
    with pytest.raises(InconsistentAnswers, match="mask key"):
        scene.server.recover(asked, answers)


def test_S12_shares_of_another_kind_or_length_and_no_elements_are_refused() -> None:
    scheme = next(iter(Scene().clients.values()))
    with pytest.raises(CryptoError, match="SecAgg has no shares of kind SEED"):
        scheme.admit(ShareKind.SEED, 32)
    with pytest.raises(CryptoError, match="has 128 bytes, not 64"):
        scheme.admit(ShareKind.SHAMIR, 64)
    with pytest.raises(CryptoError, match="no field elements"):
        scheme.check(ShareKind.SHAMIR, b"\xff" * 128)


# -- who is hidden ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "needed"), [({}, 3), (SPARSE, 3), ({**SPARSE, "t": 2}, 2)])
def test_a_client_is_hidden_by_more_neighbours_than_may_collude(
    options: dict[str, object], needed: int
) -> None:
    """T + 1 of them, or t where fewer than t of a sparse graph's are corrupt."""
    scene = Scene(**options)
    client = scene.ids[0]
    scheme = scene.clients[client]
    peers = sorted(scheme.peers)
    strangers = sorted(set(scene.ids) - set(peers))
    assert scheme.hides(client, [*strangers, *peers[:needed]])
    assert not scheme.hides(client, [*strangers, *peers[: needed - 1]])
    scheme.accept([*strangers, *peers[:needed]])
    with pytest.raises(RemoteProtocolError, match="too few neighbours of this client"):
        scheme.accept([*strangers, *peers[: needed - 1]])


def test_a_client_goes_on_if_enough_have_shared_and_hide_it() -> None:
    scheme = next(iter(Scene().clients.values()))
    least = scheme.settings.minimum
    owners = [scheme.client, *sorted(scheme.peers)]
    assert scheme.suffices((), owners[:least])
    assert not scheme.suffices(owners, owners[: least - 1])
    sparse = Scene(**{**SPARSE, "D": 6})
    scheme = next(iter(sparse.clients.values()))
    strangers = sorted(set(sparse.ids) - scheme.peers)
    owners = [*strangers, *sorted(scheme.peers)]
    assert len(strangers) + 2 >= scheme.settings.minimum
    assert not scheme.suffices((), owners[: len(strangers) + 2]), "two neighbours do not hide it"
    assert scheme.suffices((), owners[: len(strangers) + 3])


def test_the_ring_of_the_roster_makes_neighbours() -> None:
    scene = Scene(**SPARSE)
    round_, n = scene.server.round, len(scene.ids)
    shuffled = tuple(3 * k % n for k in range(n))
    server = PairwiseMasksServer(replace(round_, graph=shuffled), system_entropy)
    order = [scene.ids[position] for position in shuffled]
    for k, client in enumerate(order):
        near = {order[(k + step) % n] for step in (-3, -2, -1, 1, 2, 3)}
        assert server.neighbours(client) == near
        assert server.holders(client) == near | {client}
        for other in scene.ids:
            assert server.are_peers(client, other) == (other in near)


# -- whose updates are summed ----------------------------------------------------------------------


def test_no_sum_is_chosen_that_leaves_somebody_bare_or_a_secret_out_of_reach() -> None:
    scene = Scene(**{**SPARSE, "D": 6})
    client = scene.ids[0]
    peers = sorted(scene.server.neighbours(client))
    gone = set(peers[2:])
    bare = scene.asked([c for c in scene.ids if c not in gone]).held
    with pytest.raises(NotEnoughAnswers, match=rf"too few neighbours of clients .*{client}"):
        scene.server.choose(scene.ids, bare)
    scene = Scene()
    t, owner = scene.server.threshold, scene.ids[3]
    held = dict(scene.asked(list(scene.ids)).held)
    for holder in scene.ids[: len(scene.ids) - t]:
        held[holder] -= {owner}
    assert scene.server.choose(scene.ids, held) == tuple(sorted(scene.ids)), "t hold a share"
    held[scene.ids[-1]] -= {owner}
    with pytest.raises(NotEnoughAnswers, match=rf"secrets of clients \[{owner}\] are out of reach"):
        scene.server.choose(scene.ids, held)


def test_of_a_dropped_client_without_a_neighbour_in_the_sum_no_key_is_needed() -> None:
    scene = Scene(**SPARSE)
    dropped = scene.ids[0]
    alone = set(scene.ids) - scene.server.holders(dropped)
    assert scene.server._dropped([dropped], alone) == ()
    near = sorted(scene.server.neighbours(dropped))[:1]
    assert scene.server._dropped([dropped], [*alone, *near]) == (dropped,)
    assert scene.server._dropped([dropped], [*alone, dropped]) == ()


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_has_a_share_of_one_secret_for_each_client_it_is_asked_about() -> None:
    scene = Scene()
    survivors = sorted(scene.ids[2:])
    asked, answers = scene.asked(survivors), scene.answers(survivors)
    client = survivors[0]
    answer = answers[client]
    assert isinstance(answer, UnmaskingShares)
    scene.server.check_answer(asked, client, answer)
    for seeds, keys, count in [
        (answer.of_seeds[64:], answer.of_keys, 6),
        (answer.of_seeds, answer.of_keys[64:], 2),
        (answer.of_seeds, b"\xff" * len(answer.of_keys), 2),
        (answer.of_seeds + bytes(64), answer.of_keys, 6),
    ]:
        with pytest.raises(RemoteProtocolError, match=f"{client} answered for {count} clients"):
            scene.server.check_answer(asked, client, UnmaskingShares(seeds, keys))


def test_t_answers_suffice_for_every_secret_that_is_rebuilt() -> None:
    scene = Scene()
    survivors, t = sorted(scene.ids[1:]), scene.server.threshold
    asked = scene.asked(survivors)
    assert scene.server.suffice(asked, survivors[:t])
    assert not scene.server.suffice(asked, survivors[: t - 1])
    assert not scene.server.suffice(asked, [*survivors[: t - 1], *scene.ids[:1]][: t - 1])
    lacking = dict(asked.held)
    lacking[survivors[0]] -= {survivors[-1]}
    asked = MaskSum(asked.terms, asked.owners, lacking)
    assert not scene.server.suffice(asked, survivors[:t]), "of one owner a share is missing"
    assert scene.server.suffice(asked, survivors[: t + 1])


def test_a_wrong_share_is_blamed_on_the_client_whose_secret_it_is_of() -> None:
    scene = Scene()
    survivors = sorted(scene.ids[2:])
    asked = scene.asked(survivors)
    for position, owner in enumerate(scene.server.round.members[2:]):
        answers = scene.answers(survivors)
        first = answers[survivors[0]]
        assert isinstance(first, UnmaskingShares)
        wrong = bytearray(first.of_seeds)
        wrong[64 * position] ^= 1
        answers[survivors[0]] = UnmaskingShares(bytes(wrong), first.of_keys)
        with pytest.raises(InconsistentAnswers, match=f"self-mask seed of client {owner} does not"):
            scene.server.recover(asked, answers)
    for position, owner in enumerate(scene.server.round.members[:2]):
        answers = scene.answers(survivors)
        first = answers[survivors[0]]
        assert isinstance(first, UnmaskingShares)
        wrong = bytearray(first.of_keys)
        wrong[64 * position] ^= 1
        answers[survivors[0]] = UnmaskingShares(first.of_seeds, bytes(wrong))
        with pytest.raises(InconsistentAnswers, match=f"mask key of client {owner} does not"):
            scene.server.recover(asked, answers)


def test_a_key_that_rebuilds_but_was_not_advertised_is_noticed() -> None:
    """All holders exchange the shares of two keys: each of them rebuilds, as the other's."""
    scene = Scene()
    survivors = sorted(scene.ids[2:])
    answers: dict[int, Answer] = {}
    for client, answer in scene.answers(survivors).items():
        assert isinstance(answer, UnmaskingShares)
        exchanged = answer.of_keys[64:] + answer.of_keys[:64]
        answers[client] = UnmaskingShares(answer.of_seeds, exchanged)
    with pytest.raises(InconsistentAnswers, match="does not match the one that it advertised"):
        scene.server.recover(scene.asked(survivors), answers)


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["secagg", "secagg+"])
def test_a_mask_that_was_expanded_ahead_fits_whoever_shared(options: dict[str, object]) -> None:
    scene = Scene(**options)
    scheme = scene.clients[scene.ids[3]]
    keys = tuple(AgreementKey.generate().private_bytes() for _ in range(2))
    prepared = scheme.prepare(0, keys, system_entropy)
    assert prepared.expanded is not None
    np.testing.assert_array_equal(prepared.expanded, scheme.mask(prepared.secret, scene.ids))
    for owners in (scene.ids, scene.ids[1:], scene.ids[2:6], [scheme.client]):
        kept = prepared.expanded.copy()
        finished = scheme.finish_mask(kept, prepared.secret, owners)
        np.testing.assert_array_equal(finished, scheme.mask(prepared.secret, owners))
    scheme.expands_ahead = False
    assert scheme.prepare(0, keys, system_entropy).expanded is None
