"""What protocols say of themselves: parameters, shares, answers, and who has which limits."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from async_driver import AsyncFederation
from driver import Federation as Coded
from secagg_driver import Fault, Federation
from toy import PADS

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.field.staleness import StalenessTable, constant
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.params import PAPER_MODULUS, Decoding, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.interface import Aggregate, Phase
from lightsecagg.protocol.messages import AggregatedShare, SealedShare, UnmaskingShares
from lightsecagg.protocol.schemes.traits import Shares, protocols, traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg_lab.schemes import baseline_traits as traits_module
from lightsecagg_lab.schemes.baseline_traits import PairwiseMaskTraits
from lightsecagg_lab.schemes.baselines import all_traits
from lightsecagg_lab.schemes.sharing_graph import find_graph_parameters, leak_bound

PARAMETERS = Parameters(100, 20, 10, 60)
MALICIOUS = Parameters(9, 2, 3, threat_model=ThreatModel.MALICIOUS_SERVER)


def test_parameters_are_those_that_the_protocol_has() -> None:
    lightsecagg, secagg, sparse, plain = (traits.resolve(PARAMETERS) for traits in all_traits())
    assert lightsecagg == plain == (PARAMETERS, 0, 0)
    assert secagg.parameters.survivors == 21
    found = find_graph_parameters(100, 20, 10)
    assert sparse.parameters.survivors == 90
    assert sparse[1:] == (found.degree, found.threshold)
    assert traits_of("secagg").resolve(MALICIOUS).parameters.survivors == 6
    assert traits_of("secagg").resolve(PARAMETERS, threshold=50).parameters.survivors == 50
    assert traits_of("secagg+").resolve(PARAMETERS, 80, 40)[1:] == (80, 40)
    assert traits_of("secagg+").resolve(PARAMETERS, 80)[1:] == (80, found.threshold)


@pytest.mark.parametrize("protocol", protocols())
def test_parameters_that_a_protocol_does_not_have_are_refused(protocol: str) -> None:
    traits = traits_of(protocol)
    if not traits.ring:
        with pytest.raises(ParameterError, match="neighbours are for secagg"):
            traits.resolve(PARAMETERS, neighbours=40)
    if not traits.has_threshold:
        with pytest.raises(ParameterError, match="a threshold is for secagg"):
            traits.resolve(PARAMETERS, threshold=40)


def test_who_has_a_malicious_server_mode_an_asynchronous_one_and_protection() -> None:
    malicious = ThreatModel.MALICIOUS_SERVER
    able = [traits.name for traits in all_traits() if malicious in traits.threat_models]
    assert able == ["lightsecagg", "secagg"]
    assert [traits.name for traits in all_traits() if traits.buffered] == ["lightsecagg", "plain"]
    assert [traits.name for traits in all_traits() if not traits.protected] == ["plain"]
    assert traits_of("plain").phases == (Phase.UPLOAD,)


@pytest.mark.parametrize("dropped", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "lightsecagg", "t": 4},
        {"protocol": "secagg"},
        {"protocol": "secagg+", "N": 10, "k": 6, "t": 4},
        {"protocol": "plain"},
    ],
    ids=lambda options: options["protocol"],
)
def test_shares_and_answers_are_as_many_and_as_long_as_foretold(
    options: dict[str, Any], dropped: int
) -> None:
    federation = Federation(**options)
    gone = frozenset(federation.ids[:dropped])
    federation.fault = Fault(Phase.UPLOAD, "before", gone)
    assert isinstance(federation.run(), Aggregate)
    traits, settings = federation.settings.traits, federation.settings
    of_one = [s for sender, _, s in federation.log if sender == federation.ids[3]]
    shares = [share for share in of_one if isinstance(share, SealedShare)]
    assert Counter((share.kind, share.length) for share in shares) == {
        (kind, shares.length): shares.count for kind, shares in traits.shares(settings).items()
    }
    answers = [m for _, _, m in federation.log if isinstance(m, AggregatedShare | UnmaskingShares)]
    longest = max((len(federation.codec.encode(answer)) for answer in answers), default=0)
    slack = 2 if traits.ring else 0  # the ring decides how many of a client's neighbours drop
    assert 0 <= traits.answer_bytes(settings, dropped) - longest <= slack


# -- limits ----------------------------------------------------------------------------------------

SPARSE: dict[str, Any] = {"protocol": "secagg+", "N": 10, "k": 6, "t": 4}
SHORT, PAPER, SEEDED = ShareMode.SHORT_KEY, ShareMode.PAPER, ShareMode.SEEDED


def short(**options: Any) -> Settings:
    return Coded(share_mode=SHORT, **options).settings()


def test_S15_settings_that_a_protocol_has_no_answer_to_are_refused() -> None:
    coded, secagg, plain = Coded().settings(), Federation().settings, Federation("plain").settings
    noisy = short(decoding=Decoding.DITHERED)
    malicious = replace(plain.parameters, threat_model=ThreatModel.MALICIOUS_SERVER)
    for settings, changes, match in [
        (plain, {"parameters": malicious}, "protects from nobody"),
        (coded, {"neighbours": 3}, "only secagg. has neighbours and a threshold"),
        (coded, {"threshold": 3}, "only secagg. has neighbours and a threshold"),
        (secagg, {"neighbours": 3}, "only secagg. has neighbours and a threshold"),
        (secagg, {"parameters": replace(secagg.parameters, share_mode=SHORT)}, "short keys are"),
        (noisy, {"parameters": replace(noisy.parameters, share_mode=SEEDED)}, "leave noise in"),
    ]:
        with pytest.raises(ParameterError, match=match):
            replace(settings, **changes)


def test_S49_short_keys_have_one_field_one_noise_and_equal_weights() -> None:
    exact, dithered = short(decoding=Decoding.EXACT), short(decoding=Decoding.DITHERED)
    assert exact.quantizer.step != dithered.quantizer.step
    with pytest.raises(ParameterError, match="are not those of these short keys"):
        replace(exact, quantizer=replace(exact.quantizer, step=exact.quantizer.step - 1))
    with pytest.raises(ParameterError, match="are not those of these short keys"):
        replace(dithered, quantizer=replace(dithered.quantizer, noise=1))
    other = Coded(modulus=PAPER_MODULUS, weighted=False).settings()
    with pytest.raises(ParameterError, match="short keys need the modulus"):
        replace(other, parameters=replace(other.parameters, share_mode=SHORT))
    equal = StalenessTable.from_function(constant(), 1, 5)
    buffered = partial(AsyncFederation, share_mode=SHORT, scale=0.0, decoding=Decoding.DITHERED)
    buffered(table=equal)
    buffered(strict=True)
    with pytest.raises(ParameterError, match="short keys need equal weights"):
        buffered()


def test_S49_clients_take_the_share_mode_that_they_demand() -> None:
    refuse = traits_of("lightsecagg").check_policy
    for demanded, offered in itertools.product(
        (None, PAPER, SEEDED, SHORT), (PAPER, SEEDED, SHORT)
    ):
        fed = Coded(share_mode=offered)
        policy, settings = fed.policy(share_mode=demanded), fed.settings()
        if demanded is offered or (demanded is None and offered is not SHORT):
            refuse(policy, settings)
            continue
        match = "which rest on ring-LWE" if demanded is None else f"this client demands {demanded}"
        with pytest.raises(RemoteProtocolError, match=match):
            refuse(policy, settings)


def test_clients_have_room_for_so_many_bytes_of_shares() -> None:
    """N shares of L + 2 elements of 4 bytes; in the asynchronous mode of so many masks."""
    fed, buffered = Coded(), AsyncFederation()
    once = 6 * 4 * (fed.settings().share_length + BLINDS)
    for settings, policy, size in [
        (fed.settings(), fed.policy(), once),
        (buffered.settings, buffered.policy, 4 * 6 * 4 * (buffered.settings.share_length + BLINDS)),
    ]:
        settings.traits.check_policy(replace(policy, max_share_bytes=size), settings)
        with pytest.raises(RemoteProtocolError, match=f"{size} bytes, this client allows"):
            settings.traits.check_policy(replace(policy, max_share_bytes=size - 1), settings)


@pytest.mark.parametrize(("t", "fits"), [(5, False), (6, True)])
def test_S15_a_lying_server_cannot_rebuild_both_secrets_of_a_client(t: int, fits: bool) -> None:
    """2t > N + T, for N = 8 and T = 2."""
    if fits:
        Federation(malicious=True, t=t)
    else:
        with pytest.raises(ParameterError, match="t = 5, N = 8, T = 2"):
            Federation(malicious=True, t=t)
        Federation(t=t)


def test_secrets_in_limbs_of_16_bits_need_a_field_that_holds_them() -> None:
    settings = Federation().settings
    for modulus in (65521, 65537):
        changes = {"parameters": replace(settings.parameters, modulus=modulus)}
        if modulus > 2**16:
            replace(settings, **changes)
        else:
            with pytest.raises(ParameterError, match="q = 65521 cannot hold"):
                replace(settings, **changes)


@pytest.mark.parametrize(
    ("k", "t", "match"),
    [
        (0, 1, "0 < k < N = 10, got 0"),
        (1, 1, ""),
        (9, 9, ""),
        (10, 4, "0 < k < N = 10, got 10"),
        (6, -1, "0 < t <= k = 6, got -1"),
        (6, 6, ""),
        (6, 7, "0 < t <= k = 6, got 7"),
    ],
)
def test_a_ring_has_neighbours_and_a_threshold_among_them(k: int, t: int, match: str) -> None:
    settings = Federation(**SPARSE).settings
    if not match:
        replace(settings, neighbours=k, threshold=t)
        return
    with pytest.raises(ParameterError, match=match):
        replace(settings, neighbours=k, threshold=t)


def test_clients_take_a_ring_that_fails_rarely_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Federation(**SPARSE)
    for leak, security, fits in [
        (Fraction(1, 128), 6, True),
        (Fraction(1, 128), 7, False),
        (Fraction(1, 129), 7, True),
        (Fraction(2), 0, True),
    ]:
        monkeypatch.setattr(PairwiseMaskTraits, "leak", lambda *_, leak=leak: leak)
        policy = fed.policy(graph_security=security)
        if fits:
            fed.settings.traits.check_roster(policy, fed.settings, 10)
        else:
            with pytest.raises(RemoteProtocolError, match="leave some of 10 clients unprotected"):
                fed.settings.traits.check_roster(policy, fed.settings, 10)


def test_a_ring_fails_as_often_as_chance_lets_it_and_a_complete_graph_never() -> None:
    """Whoever is missing from the roster has used up a dropout."""
    settings = replace(Federation(**SPARSE).settings, neighbours=2, threshold=2)
    for members, dropouts in [(10, 2), (9, 1), (8, 0), (7, 0)]:
        expected = leak_bound(members, 2, dropouts, settings.degree(members), 2)
        assert settings.traits.leak(settings, members) == expected > 0
    for protocol in ("lightsecagg", "secagg", "plain"):
        assert traits_of(protocol).leak(Federation(protocol).settings, 8) == 0


def test_how_few_may_be_summed_and_with_how_many_each_shares() -> None:
    coded, secagg, ring = (
        Federation(**options).settings for options in ({"protocol": "lightsecagg"}, {}, SPARSE)
    )
    assert coded.traits.minimum(coded) == coded.parameters.minimum == 6
    few = replace(secagg, parameters=replace(secagg.parameters, survivors=3))
    assert few.traits.minimum(few) == 4
    fewer = replace(ring, parameters=replace(ring.parameters, survivors=4))
    assert fewer.parameters.minimum == 4
    assert ring.traits.minimum(fewer) == 8, "N - D, whatever U a server proposes"
    assert ring.traits.minimum(replace(ring, parameters=replace(ring.parameters, dropouts=0))) == 10
    assert [coded.traits.degree(coded, n) for n in (5, 8)] == [4, 7]
    assert [secagg.traits.degree(secagg, n) for n in (5, 8)] == [4, 7]
    assert traits_of("plain").degree(coded, 8) == 0
    odd = replace(ring, neighbours=3, threshold=2)
    assert [ring.traits.degree(odd, n) for n in (3, 4, 5, 6, 7)] == [2, 3, 4, 3, 4]
    assert [ring.traits.degree(ring, n) for n in (5, 6, 7, 9, 10)] == [4, 5, 6, 6, 6]


# -- sizes -----------------------------------------------------------------------------------------


def test_shares_are_seeds_where_the_mode_has_them() -> None:
    for mode, U, explicit, seeds in [(PAPER, 4, 5, None), (SEEDED, 4, 1, 4), (SEEDED, 6, 0, 5)]:
        settings = Coded(6, 1, 0, U, share_mode=mode).settings()
        expected = {ShareKind.EXPLICIT: Shares(explicit, 4 * (settings.share_length + BLINDS))}
        if seeds is not None:
            expected[ShareKind.SEED] = Shares(seeds, 32)
        assert settings.traits.shares(settings) == expected


def test_the_longest_answer_is_foretold_whoever_drops() -> None:
    """A survivor of 20 holds shares of 10 neighbours and of itself; k of them may have dropped.

    Where both lists are longer than 255 bytes, msgpack takes a byte more.
    """
    settings = Federation("secagg+", N=20, T=2, D=2, k=10, t=5).settings
    codec = Codec(settings.group)
    for dropped, dead in [(0, 0), (3, 3), (4, 4), (17, 8), (19, 10)]:
        answer = UnmaskingShares(bytes((11 - dead) * 64), bytes(dead * 64))
        assert settings.traits.answer_bytes(settings, dropped) == len(codec.encode(answer))


# -- what is said of them --------------------------------------------------------------------------


def test_what_protocols_say_of_themselves() -> None:
    assert [traits.key_count for traits in all_traits()] == [1, 2, 2, 0]
    assert [t.name for t in all_traits() if t.has_threshold] == ["secagg", "secagg+"]
    assert [t.name for t in all_traits() if t.ring] == ["secagg+"]
    assert [t.name for t in all_traits() if t.checked] == ["lightsecagg"]
    for name in ("lightsecagg", "secagg", "secagg+"):
        assert traits_of(name).phases == tuple(Phase)[:-1]
    with pytest.raises(ParameterError, match="protocol 'morse' is unknown; choose one of light"):
        traits_of("morse")


def test_reports_tell_a_protocol_s_own_parameters() -> None:
    coded, exact = Coded(6, 1, 2, 4).settings(), short(decoding=Decoding.EXACT)
    assert coded.traits.describe(coded) == {
        "survivors": 4,
        "share_mode": "seeded",
        "share_length": coded.share_length,
    }
    assert exact.traits.describe(exact)["decoding"] == "exact"
    assert PADS.describe(coded) == {"survivors": 4}
    secagg, ring = Federation().settings, Federation(**SPARSE).settings
    assert secagg.traits.describe(secagg) == {
        "neighbours": 7,
        "threshold": 6,
        "leak_probability": 0.0,
    }
    leaky = replace(ring, neighbours=2, threshold=1)
    assert ring.traits.describe(leaky) == {
        "neighbours": 2,
        "threshold": 1,
        "leak_probability": 1.0,
    }
    assert traits_of("plain").describe(coded) == {}


def test_a_ring_that_is_given_whole_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found, resolve = find_graph_parameters(100, 20, 10), traits_of("secagg+").resolve
    assert resolve(PARAMETERS, 0, 40)[1:] == (found.degree, 40)
    monkeypatch.delattr(traits_module, "find_graph_parameters")
    assert resolve(PARAMETERS, 80, 40)[1:] == (80, 40)
