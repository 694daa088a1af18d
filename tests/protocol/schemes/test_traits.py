"""What protocols say of themselves: parameters, shares, answers, and who has which limits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from secagg_driver import Fault, Federation

from lightsecagg.errors import ParameterError
from lightsecagg.masks.sharing_graph import find_graph_parameters
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.interface import Aggregate, Phase
from lightsecagg.protocol.messages import AggregatedShare, SealedShare, UnmaskingShares
from lightsecagg.protocol.schemes.traits import TRAITS, ProtocolName, traits_of

PARAMETERS = Parameters(100, 20, 10, 60)
MALICIOUS = Parameters(9, 2, 3, threat_model=ThreatModel.MALICIOUS_SERVER)


def test_parameters_are_those_that_the_protocol_has() -> None:
    lightsecagg, secagg, sparse, plain = (traits.resolve(PARAMETERS) for traits in TRAITS.values())
    assert lightsecagg == plain == (PARAMETERS, 0, 0)
    assert secagg.parameters.survivors == 21
    found = find_graph_parameters(100, 20, 10)
    assert sparse.parameters.survivors == 90
    assert sparse[1:] == (found.degree, found.threshold)
    assert traits_of("secagg").resolve(MALICIOUS).parameters.survivors == 6
    assert traits_of("secagg").resolve(PARAMETERS, threshold=50).parameters.survivors == 50
    assert traits_of("secagg+").resolve(PARAMETERS, 80, 40)[1:] == (80, 40)
    assert traits_of("secagg+").resolve(PARAMETERS, 80)[1:] == (80, found.threshold)


@pytest.mark.parametrize("protocol", ProtocolName)
def test_parameters_that_a_protocol_does_not_have_are_refused(protocol: ProtocolName) -> None:
    traits = traits_of(protocol)
    if not traits.ring:
        with pytest.raises(ParameterError, match="neighbours are for secagg"):
            traits.resolve(PARAMETERS, neighbours=40)
    if not traits.has_threshold:
        with pytest.raises(ParameterError, match="a threshold is for secagg"):
            traits.resolve(PARAMETERS, threshold=40)


def test_who_has_a_malicious_server_mode_an_asynchronous_one_and_protection() -> None:
    malicious = ThreatModel.MALICIOUS_SERVER
    able = [name for name, traits in TRAITS.items() if malicious in traits.threat_models]
    assert able == ["lightsecagg", "secagg"]
    assert [name for name, traits in TRAITS.items() if traits.buffered] == ["lightsecagg", "plain"]
    assert [name for name, traits in TRAITS.items() if not traits.protected] == ["plain"]
    assert traits_of("plain").phases == (Phase.UPLOAD,)


@pytest.mark.parametrize("dropped", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"protocol": ProtocolName.LIGHTSECAGG, "t": 4},
        {"protocol": ProtocolName.SECAGG},
        {"protocol": ProtocolName.SECAGG_PLUS, "N": 10, "k": 6, "t": 4},
        {"protocol": ProtocolName.PLAIN},
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
