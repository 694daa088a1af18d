"""A scheme from outside the package is registered, and spoken by the parties there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from async_driver import AsyncFederation
from driver import Federation
from mortal import Mortal
from pydantic import ValidationError
from secagg_driver import Fault
from secagg_driver import Federation as Baseline
from toy import PADS, PadsClient, PadsServer

import lightsecagg
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.tables import AggregationTable
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.errors import DecodeError, ParameterError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import SERVER, Aggregate, Phase, RoundAborted
from lightsecagg.protocol.schemes.coded_keys import CodedKeysClient, CodedKeysServer
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.registry import SCHEMES, register, scheme_of
from lightsecagg.protocol.schemes.traits import TRAITS, protocols, traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.session.budgets import phase_budget


@pytest.fixture
def pads() -> Iterator[str]:
    register(PADS, PadsClient, PadsServer)
    yield PADS.name
    del TRAITS[PADS.name], SCHEMES[PADS.name]


def test_every_protocol_has_traits_and_a_scheme() -> None:
    for name in protocols():
        traits = traits_of(name)
        assert traits.name == name
        assert (TRAITS[name], name in SCHEMES) == (traits, True)


def test_a_name_is_registered_once(pads: str) -> None:
    with pytest.raises(ParameterError, match="there is a protocol 'pads' already"):
        register(PADS, PadsClient, PadsServer)
    with pytest.raises(ParameterError, match="there is a protocol 'lightsecagg' already"):
        register(replace(PADS, name="lightsecagg"), PadsClient, PadsServer)


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


def test_a_party_speaks_one_protocol_and_short_keys_only_if_they_are_named(pads: str) -> None:
    for several in (("lightsecagg", "pads"), ()):
        with pytest.raises(ParameterError, match="a party speaks one protocol"):
            scheme_of(*several)
    masks, keys = (CodedMasksClient, CodedMasksServer), (CodedKeysClient, CodedKeysServer)
    assert scheme_of("lightsecagg") == scheme_of("lightsecagg", share_mode=ShareMode.PAPER) == masks
    assert scheme_of("lightsecagg", share_mode=ShareMode.SHORT_KEY) == keys
    assert scheme_of("pads", share_mode=ShareMode.SHORT_KEY) == (PadsClient, PadsServer)


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
    stale = [(4, 0), (5, 0)]
    for uploads in ([(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (1, 1), *stale]):
        for client, version in uploads:
            fed.upload(client, version)
        fed.settle()
    assert [set(result.weights) for result in fed.results] == [{64}, {64, 32}]
    fed.assert_exact()


def test_R31_holders_of_a_scheme_without_reports_get_their_shares_again(pads: str) -> None:
    fed = Mortal(privacy=0, protocol=pads).open(masks=1)
    assert isinstance(fed, Mortal)
    fed.call(0, fed.clients[0].restock)
    while fed.on(0, SERVER):
        fed.step_up(0)
    fed.kill()
    fed.settle()
    for client in range(4):
        fed.upload(client)
    fed.settle()
    fed.assert_exact()
    assert len(fed.results) == 1
    fed.upload(0, 1)
    for client in (1, 2, 3):
        fed.call(client, fed.clients[client].restock)
        fed.settle()
        fed.upload(client, 1)
    fed.settle()
    assert len(fed.results) == 2


def test_a_foreign_scheme_aggregates(pads: str) -> None:
    vectors = [np.full(3, 0.25 * client) for client in range(4)]
    result = lightsecagg.aggregate(vectors, privacy=0, bound=1.0, protocol=pads)
    np.testing.assert_allclose(result.mean, np.full(3, 0.375), atol=1e-6)


def test_a_foreign_scheme_has_budgets_and_a_configuration(pads: str) -> None:
    table = AggregationTable(
        protocol=pads, threat_model=ThreatModel.HONEST_BUT_CURIOUS, clients=9, privacy=0, dropouts=3
    )
    allow_list = AllowList({c: IdentityKey.generate().public for c in range(9)})
    settings = make_settings(table, VectorServer(VectorsTable(dimension=50)), bytes(32), allow_list)
    assert settings.traits is PADS
    assert phase_budget(settings, Phase.SHARE) > 8 * 4 * 50
    with pytest.raises(ValidationError, match="should be one of 'lightsecagg'"):
        AggregationTable(protocol="morse", clients=9, privacy=0, dropouts=3)
