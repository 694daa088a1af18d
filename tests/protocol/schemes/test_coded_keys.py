"""Short keys by themselves: one key meets one noise, and their sums take the masks away (S49)."""

from __future__ import annotations

import numpy as np
import pytest
from driver import CountingEntropy, Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.prg import SEED_LENGTH
from lightsecagg.field.prime import Elements
from lightsecagg.masks.short_keys import strip
from lightsecagg.params import Decoding, ShareMode
from lightsecagg.protocol.contributor import hide
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.messages import Member, Roster
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.schemes import coded_keys
from lightsecagg.protocol.schemes.coded_keys import CodedKeysClient, CodedKeysServer
from lightsecagg.protocol.schemes.interface import MaskRef, MaskSum, PreparedMask, Term
from lightsecagg.protocol.share_exchange import Share


def federation(decoding: Decoding) -> Federation:
    return Federation(
        4,
        1,
        1,
        3,
        share_mode=ShareMode.SHORT_KEY,
        dimension=20,
        weighted=False,
        decoding=decoding,
    )


def a_round(fed: Federation) -> Round:
    keys = {c: (AgreementKey(bytes([c]) * 32).public,) for c in fed.ids}
    roster = Roster(tuple(Member(client, keys[client], b"") for client in fed.ids))
    return fix_round(fed.settings(), fed.allow_list, roster)


def prepared(client: int, serial: int, name: str = "bytes") -> tuple[CodedKeysClient, PreparedMask]:
    scheme = CodedKeysClient(a_round(federation(Decoding.EXACT)), client)
    return scheme, scheme.prepare(serial, (), CountingEntropy(name))


def test_S49_a_key_and_its_noise_make_the_same_mask_whenever_it_is_asked_for() -> None:
    client, other, *_ = federation(Decoding.EXACT).ids
    scheme, mask = prepared(client, 0)
    assert mask.expanded is None
    assert len(mask.secret) == 4 * scheme.settings.secret_length + SEED_LENGTH
    once, again = (scheme.mask(mask.secret, ()) for _ in range(2))
    assert once.shape == (scheme.settings.length,)
    assert (once == again).all()
    seeds = {prepared(c, s)[1].secret[-SEED_LENGTH:] for c in (client, other) for s in (0, 1)}
    assert len(seeds) == 4, "bound to client and serial, though the entropy repeats itself"
    assert prepared(client, 0, "other")[1].secret[-SEED_LENGTH:] not in seeds


@pytest.mark.parametrize("decoding", Decoding)
@pytest.mark.parametrize("weights", [(1, 1, 1), (2, 2, 2)])
def test_S49_the_sum_of_the_keys_takes_the_masks_away_and_exact_decoding_the_noise(
    decoding: Decoding, weights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    noises: list[int] = []
    monkeypatch.setattr(coded_keys, "strip", lambda *a: noises.append(a[-1]) or strip(*a))
    fed = federation(decoding)
    round_, settings = a_round(fed), fed.settings()
    schemes = {c: CodedKeysClient(round_, c) for c in fed.ids}
    held: dict[int, dict[MaskRef, Share]] = {c: {} for c in fed.ids}
    uploads: dict[int, Elements] = {}
    for c, scheme in schemes.items():
        mask = scheme.prepare(0, (), system_entropy)
        held[c][MaskRef(c)] = mask.own
        for share in mask.outgoing:
            held[share.recipient][MaskRef(c)] = (share.kind.value, share.plaintext)
        update = Update(np.full(20, float(c)))
        uploads[c] = hide(settings, update, bytes(32), scheme.mask(mask.secret, ()))
    summed = fed.ids[:3]
    terms = tuple(Term(MaskRef(c), w) for c, w in zip(summed, weights, strict=True))
    answers = {c: schemes[c].answer(held[c], terms, ()) for c in fed.ids}
    job = CodedKeysServer(round_, system_entropy).recovery(MaskSum(terms), answers)
    job.open()
    left = settings.field.weighted_sum(list(weights), [uploads[c] for c in summed])
    for start, stop in ((5, job.columns), (0, 5)):
        job.take_away(left, start, job.run(start, stop))
    found = job.finish(left)
    total = sum(w * c for c, w in zip(summed, weights, strict=True))
    if decoding is Decoding.EXACT:
        assert settings.quantizer.step > 1
        assert (found == total).all()
        assert noises == [sum(w * w for w in weights)], "the variance that the noise must have"
    else:
        assert settings.quantizer.step == 1
        off = (found.astype(np.int64) - total + 2**30) % settings.field.modulus - 2**30
        assert 0 < np.abs(off).max() < settings.quantizer.noise
