"""A policy that leaves the model open: the hash comes with the update (S08, S42, S44)."""

from __future__ import annotations

import pytest
from driver import HONEST, MALICIOUS, Federation, Network
from film import step_of

from lightsecagg.errors import LocalProtocolError, MaskAlreadyUsed, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.client import Client
from lightsecagg.protocol.interface import SERVER, Send
from lightsecagg.protocol.messages import MaskedUpload, Opening, Reports
from lightsecagg.protocol.settings import hash_model, version_hash

MODEL, OTHER = hash_model(b"the model"), hash_model(b"another")


def open_round(federation: Federation, number: int = 1, model: bytes = MODEL) -> Network:
    """A round that names this model, up to the inputs; client 2 learns its model later."""
    network = federation.network(number)
    policy = federation.policy(model=None)
    network.server = type(network.server)(
        federation.settings(number, model=model), federation.allow_list, federation.ids
    )
    for client in federation.ids:
        ledger = federation.ledgers.setdefault(client, network.clients[client].ledger)
        network.clients[client] = Client(client, federation.identities[client], policy, ledger)
    network.train_at_once = False
    return network.start().run()


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_a_round_in_which_clients_learn_their_model_after_the_opening_is_exact(
    threat_model: ThreatModel,
) -> None:
    federation = Federation(6, 1, 1, 4, threat_model)
    network = open_round(federation)
    for client in federation.ids:
        outputs = network.clients[client].set_input(network.inputs[client], model=MODEL)
        assert isinstance(outputs[-1], Send)
        network.send(client, outputs)
    network.run()
    network.assert_exact(federation.ids)


def test_S08_no_model_is_none_of_the_models_that_a_server_can_send() -> None:
    """Else it could give one client a model, and its peers none, under one hash in C0."""
    for number in (0, 1, 2**40):
        for length in (1, 4, 8, 32):
            model = (number % 256**length).to_bytes(length, "big")
            assert version_hash(model, number) == hash_model(model) != version_hash(b"", number)
    assert version_hash(b"", 1) != version_hash(b"", 2)


def test_S08_an_update_of_another_model_than_the_round_names_is_not_masked() -> None:
    federation = Federation(5, 1, 1)
    network = open_round(federation)
    party = network.clients[2]
    before = party.snapshot()
    with pytest.raises(RemoteProtocolError, match="another global model"):
        party.set_input(network.inputs[2], model=OTHER)
    assert party.snapshot() == before
    outputs = party.set_input(network.inputs[2], model=MODEL)
    assert [type(o.message) for o in outputs if isinstance(o, Send)] == [Reports, MaskedUpload]


def test_S08_the_naive_client_that_takes_the_server_s_word_masks_it() -> None:
    """The control: who trains from a model of its own and believes the name is told apart."""

    class Believes(Client):
        def _check_model(self, settings: object, model: bytes | None) -> None:
            return

    federation = Federation(5, 1, 1)
    network = open_round(federation)
    snapshot = network.clients[2].snapshot()
    naive = Believes.restore(snapshot, federation.identities[2], federation.policy(model=None), 0)
    outputs = naive.set_input(network.inputs[2], model=OTHER)
    assert any(isinstance(o, Send) and isinstance(o.message, MaskedUpload) for o in outputs)


def test_a_policy_that_leaves_the_model_open_wants_it_with_the_update() -> None:
    network = open_round(Federation(5, 1, 1))
    with pytest.raises(LocalProtocolError, match="leaves the model open"):
        network.clients[2].set_input(network.inputs[2])
    assert step_of(network.clients[2]) == "Sharing, closed"


def test_S42_one_model_one_update_also_where_the_model_comes_late() -> None:
    federation = Federation(5, 1, 1)
    first = open_round(federation, 1)
    first.clients[2].set_input(first.inputs[2], model=MODEL)
    second = open_round(federation, 2)
    with pytest.raises(MaskAlreadyUsed, match="has uploaded another update"):
        second.clients[2].set_input(second.inputs[2], model=MODEL)
    assert second.clients[2].set_input(first.inputs[2], model=MODEL)


def test_S44_a_server_that_names_a_new_model_each_time_does_not_escape_the_count() -> None:
    federation = Federation(5, 1, 1)
    policy = federation.policy(model=None, max_openings=3)
    ledger = federation.client(2).ledger
    for number in range(1, 5):
        party = Client(2, federation.identities[2], policy, ledger)
        model = hash_model(b"%d" % number)
        opening = Opening(federation.settings(number, model=model).to_bytes())
        if number <= 3:
            assert party.receive(SERVER, opening)
        else:
            with pytest.raises(RemoteProtocolError, match="opened 3 rounds since this client"):
                party.receive(SERVER, opening)
    ledger.count_upload(MODEL)
    party = Client(2, federation.identities[2], policy, ledger)
    assert party.receive(SERVER, Opening(federation.settings(9, model=MODEL).to_bytes()))
