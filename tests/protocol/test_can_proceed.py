"""A server says whether `proceed` would go on: cut at every message, it is right."""

from __future__ import annotations

import pytest
from async_driver import AsyncFederation
from driver import HONEST, MALICIOUS, Federation
from secagg_driver import Federation as SecAggFederation

from laboratory import needs_laboratory
from lightsecagg.errors import LocalProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Aggregate, BufferFailed, Phase, RoundAborted
from lightsecagg.protocol.jobs import at_once

BOTH = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


@BOTH
def test_a_round_goes_on_exactly_if_its_server_said_so(threat_model: ThreatModel) -> None:
    federation = Federation(5, 1, 1, 3, threat_model)
    seen: set[tuple[Phase, bool]] = set()
    for cut in range(200):
        federation.ledgers.clear()
        network = federation.network().start()
        network.run(until=iter([False] * cut + [True]).__next__)
        server = network.server
        if server.phase is Phase.DONE:
            assert not server.can_proceed
            break
        said, phase = server.can_proceed, server.phase
        outputs = at_once(server, server.proceed())
        assert said == (not any(isinstance(output, RoundAborted) for output in outputs))
        if said and phase is Phase.RECOVER:
            assert isinstance(outputs[-1], Aggregate)
        seen.add((phase, said))
    phases = {phase for phase, _ in seen}
    assert seen == {(phase, said) for phase in phases for said in (False, True)}
    malicious = threat_model is MALICIOUS
    assert phases == set(Phase) - {Phase.DONE} - (set() if malicious else {Phase.AGREE})


@needs_laboratory
def test_secagg_needs_t_holders_of_every_secret() -> None:
    federation = SecAggFederation()
    server = federation.server
    federation.advance(Phase.RECOVER)
    said = []
    while server.phase is Phase.RECOVER and federation.step():
        said.append((len(server.in_flight.flight.answers), server.can_proceed))
    threshold = server.settings.sharing_threshold
    assert {enough for answers, enough in said if 0 < answers < threshold} == {False}
    assert (threshold, True) in said


@BOTH
def test_an_epoch_loses_no_buffer_if_its_server_said_so(threat_model: ThreatModel) -> None:
    seen: set[tuple[Phase, bool]] = set()
    for cut in range(0, 60, 3):
        fed = AsyncFederation(clients=5, buffer_size=3, threat_model=threat_model).open(masks=1)
        assert fed.server.phase is Phase.UPLOAD
        assert not fed.server.can_proceed
        with pytest.raises(LocalProtocolError, match="may share a buffer now"):
            fed.server.flush()
        for client in range(3):
            fed.upload(client)
        for _ in range(cut):
            if links := fed.busy():
                fed.deliver(fed.take(*links[0]))
        said, phase = fed.server.can_proceed, fed.server.phase
        seen.add((phase, said))
        if phase in (Phase.AGREE, Phase.RECOVER):
            fed.call(SERVER, fed.server.proceed)
            assert said != any(isinstance(failed, BufferFailed) for failed in fed.failures)
    assert (Phase.RECOVER, False) in seen
    assert (Phase.UPLOAD, False) in seen
