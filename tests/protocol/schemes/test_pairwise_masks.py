"""SecAgg's and SecAgg+'s masks by themselves, without parties: graph, shares, recovery."""

from __future__ import annotations

import numpy as np
import pytest
from secagg_driver import Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, InconsistentAnswers, NotEnoughAnswers
from lightsecagg.protocol.messages import Member, Roster, UnmaskingShares
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.interface import Answer, MaskRef, MaskSum, Term
from lightsecagg.protocol.schemes.pairwise_masks import PairwiseMasksClient, PairwiseMasksServer
from lightsecagg.protocol.settings import ProtocolName
from lightsecagg.protocol.share_exchange import Share

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
    np.testing.assert_array_equal(recovered, scene.server.settings.field.sum(masks))
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
