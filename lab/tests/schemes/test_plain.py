"""Plain summation: the same interface without protection, and only for clients that ask for it."""

from __future__ import annotations

import numpy as np
import pytest
from driver import request
from secagg_driver import Fault, Federation

from lightsecagg.errors import (
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.params import Parameters
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import SERVER, Aggregate, NeedInput, Phase, RoundAborted, Send
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    MaskedUpload,
    Opening,
    Roster,
    SharesClosed,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg_lab.schemes.baseline_traits import ProtocolName


def plain(**options: object) -> Federation:
    return Federation(protocol=ProtocolName.PLAIN, **options)  # type: ignore[arg-type]


def test_sum_is_exact_and_uploads_are_the_updates_themselves() -> None:
    federation = plain()
    result = federation.run()
    assert isinstance(result, Aggregate)
    assert result.included == tuple(sorted(federation.ids))
    np.testing.assert_array_equal(result.total, federation.exact_sum(federation.ids))
    for client in federation.ids:  # no protection: this is what the module warns of
        (upload,) = federation.sent(MaskedUpload, client)
        np.testing.assert_array_equal(upload.vector, federation.quantised(client))


def test_there_are_two_messages_per_client() -> None:
    federation = plain()
    federation.run()
    kinds = [type(message) for _, _, message in federation.log]
    assert sorted(kind.__name__ for kind in kinds) == ["MaskedUpload"] * 8 + ["Opening"] * 8


@pytest.mark.parametrize("announce", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_R30_dropouts(count: int, moment: str, announce: bool) -> None:
    federation = plain(announce_drops=announce)
    victims = frozenset(federation.ids[:count])
    federation.fault = Fault(Phase.UPLOAD, moment, victims)
    result = federation.run()
    if count > federation.D and moment != "after":
        assert isinstance(result, RoundAborted)
        assert "only 5 clients uploaded" in result.reason
        return
    assert isinstance(result, Aggregate)
    left = set(federation.ids) - (victims if moment != "after" else set())
    assert set(result.included) == left
    np.testing.assert_array_equal(result.total, federation.exact_sum(left))


@pytest.mark.parametrize(
    "protocols",
    [(ProtocolName.LIGHTSECAGG,), (ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)],
    ids=["lightsecagg", "secagg"],
)
def test_S01_no_server_talks_a_secure_client_into_plain_summation(
    protocols: tuple[str, ...],
) -> None:
    federation = plain()
    client = federation.ids[0]
    identity = federation.identities[client]
    secure = federation.policy(protocols=protocols)
    opening = Opening(federation.settings.to_bytes())
    with pytest.raises(RemoteProtocolError, match="proposed protocol plain"):
        Client(client, identity, secure, Ledger.volatile()).receive(SERVER, opening)
    mixed = federation.policy(protocols=(*protocols, ProtocolName.PLAIN))
    with pytest.raises(ParameterError, match=r"one protocol, but the policy names .*, plain"):
        Client(client, identity, mixed, Ledger.volatile())


def test_S01_default_policy_does_not_name_plain() -> None:
    federation = plain()
    client = federation.ids[0]
    default = Policy(federation.allow_list, federation.settings.session, privacy=2)
    assert ProtocolName.PLAIN not in default.protocols
    party = Client(client, federation.identities[client], default, Ledger.volatile())
    with pytest.raises(RemoteProtocolError, match="proposed protocol plain"):
        party.receive(SERVER, Opening(federation.settings.to_bytes()))


def test_plain_client_takes_part_in_nothing_else() -> None:
    federation = plain()
    settings = federation.make_settings(protocol=ProtocolName.SECAGG)
    with pytest.raises(RemoteProtocolError, match="takes part in plain"):
        federation.clients[federation.ids[0]].receive(SERVER, Opening(settings.to_bytes()))


def test_S29_messages_of_the_secure_protocols_are_refused() -> None:
    federation = plain()
    client = federation.clients[federation.ids[0]]
    everybody = tuple(federation.ids)
    (output,) = client.receive(SERVER, Opening(federation.settings.to_bytes()))
    assert isinstance(output, NeedInput)
    foreign = (
        Roster((), (0,)),
        SharesClosed(everybody),
        request(everybody),
        SumRequest(0, ()),
    )
    for message in foreign:
        with pytest.raises(RemoteProtocolError):
            client.receive(SERVER, message)
    (send,) = client.set_input(federation.update(client.client))
    assert isinstance(send, Send)
    for message in foreign:
        with pytest.raises(RemoteProtocolError):
            client.receive(SERVER, message)
    client.receive(SERVER, AbortRound("over"))
    with pytest.raises(RemoteProtocolError, match="is over"):
        client.receive(SERVER, Opening(federation.settings.to_bytes()))


def test_S06_input_is_taken_once() -> None:
    federation = plain()
    client = federation.clients[federation.ids[0]]
    client.receive(SERVER, Opening(federation.settings.to_bytes()))
    restored = Client.restore(
        client.snapshot(), federation.identities[client.client], federation.policy(), 0
    )
    restored.set_input(federation.update(client.client))
    with pytest.raises(MaskAlreadyUsed, match="input is already set"):
        restored.set_input(federation.update(client.client))
    with pytest.raises(MaskAlreadyUsed):
        Client.restore(
            client.snapshot(),
            federation.identities[client.client],
            federation.policy(),
            restored.generation,
        )


def test_reconnecting_client_is_asked_again_and_counted_once() -> None:
    federation = plain()
    federation.server.start()
    client = federation.ids[0]
    (again,) = federation.server.rejoin(client)
    assert isinstance(again.message, Opening)
    party = federation.clients[client]
    party.receive(SERVER, again.message)
    assert party.receive(SERVER, again.message) == []
    (send,) = party.set_input(federation.update(client))
    for _ in range(2):
        assert federation.server.receive(client, send.message) == []
    assert federation.server.rejoin(client) == []
    assert client not in federation.server.pending


def test_malformed_uploads_are_refused() -> None:
    federation = plain()
    federation.server.start()
    client = federation.ids[0]
    vector = federation.quantised(client)
    for bad in (MaskedUpload(Tag(client), vector[:-1]), MaskedUpload(Tag(client), vector)):
        with pytest.raises(RemoteProtocolError, match=f"client {client}"):
            federation.server.receive(client, bad)
    assert federation.server.pending == frozenset(federation.ids)


def test_threat_model_that_plain_cannot_have_is_refused() -> None:
    federation = plain()
    malicious = Parameters(8, 1, 2, threat_model="malicious-server")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="protects from nobody"):
        federation.make_settings(parameters=malicious)
