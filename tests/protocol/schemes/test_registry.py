"""A scheme from outside the package is registered, and spoken by the parties there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from async_driver import AsyncFederation
from driver import Federation
from secagg_driver import Fault
from secagg_driver import Federation as Baseline
from toy import PADS, PadsClient, PadsServer

from lightsecagg.errors import DecodeError, ParameterError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import Aggregate, Phase, RoundAborted
from lightsecagg.protocol.schemes.registry import SCHEMES, register, scheme_of
from lightsecagg.protocol.schemes.traits import TRAITS, ProtocolName, traits_of
from lightsecagg.protocol.settings import Settings


@pytest.fixture
def pads() -> Iterator[str]:
    register(PADS, PadsClient, PadsServer)
    yield PADS.name
    del TRAITS[PADS.name], SCHEMES[PADS.name]


def test_every_protocol_has_traits_and_a_scheme() -> None:
    assert list(TRAITS) == list(SCHEMES) == list(ProtocolName)
    for name, traits in TRAITS.items():
        assert traits.name is ProtocolName(name)
        assert traits_of(name) is traits


def test_a_name_is_registered_once(pads: str) -> None:
    with pytest.raises(ParameterError, match="there is a protocol 'pads' already"):
        register(PADS, PadsClient, PadsServer)
    with pytest.raises(ParameterError, match="there is a protocol 'plain' already"):
        register(replace(PADS, name="plain"), PadsClient, PadsServer)


def test_a_name_that_nobody_registered_is_refused() -> None:
    settings = Federation().settings()
    with pytest.raises(ParameterError, match="protocol 'pads' is unknown; choose one of light"):
        replace(settings, protocol="pads")
    data = settings.to_bytes().replace(b"\xablightsecagg", b"\xa4pads")
    with pytest.raises(DecodeError, match="unknown protocol 'pads'"):
        Settings.from_bytes(data)


def test_settings_carry_the_name(pads: str) -> None:
    settings = replace(Federation().settings(), protocol=pads)
    assert Settings.from_bytes(settings.to_bytes()) == settings
    assert settings.traits is PADS
    assert scheme_of(pads) == (PadsClient, PadsServer)


@pytest.mark.parametrize("malicious", [False, True])
@pytest.mark.parametrize("phase", [Phase.SHARE, Phase.UPLOAD, Phase.RECOVER])
def test_a_foreign_scheme_speaks_synchronously(pads: str, malicious: bool, phase: Phase) -> None:
    federation = Baseline(pads, N=8, T=0, D=2, malicious=malicious)
    gone = frozenset(federation.ids[:2])
    federation.fault = Fault(phase, "before", gone)
    result = federation.run()
    assert isinstance(result, Aggregate)
    included = set(federation.ids) - (gone if phase is not Phase.RECOVER else set())
    assert set(result.included) == included
    np.testing.assert_array_equal(result.total, federation.exact_sum(included))


def test_a_foreign_scheme_has_its_own_demands(pads: str) -> None:
    federation = Baseline(pads, N=8, T=0, D=2)
    federation.fault = Fault(Phase.RECOVER, "before", frozenset(federation.ids))
    result = federation.run()
    assert isinstance(result, RoundAborted)
    assert result.reason == "nobody answered"


@pytest.mark.parametrize("threat_model", ThreatModel)
def test_a_foreign_scheme_speaks_asynchronously(pads: str, threat_model: ThreatModel) -> None:
    fed = AsyncFederation(privacy=0, threat_model=threat_model, protocol=pads).open(masks=2)
    stale = (4, 0)
    for uploads in ([(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (1, 1), (2, 1), stale]):
        for client, version in uploads:
            fed.upload(client, version)
        fed.settle()
    assert [set(result.weights) for result in fed.results] == [{64}, {64, 32}]
    fed.assert_exact()
