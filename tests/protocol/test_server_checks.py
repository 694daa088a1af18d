"""The server applies what clients will apply, before they must (S45, R30).

Each attack first meets a server without the check: every honest client then refuses, every time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from async_driver import AsyncFederation, model_of
from driver import HONEST, MALICIOUS
from driver import Federation as LightSecAgg

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.errors import LocalProtocolError, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import SERVER, Send
from lightsecagg.protocol.messages import Advertise, Opening, Roster, SumRequest
from lightsecagg.protocol.roles import registration
from lightsecagg.protocol.roster import sign_keys
from lightsecagg.protocol.settings import Settings

ONE = AgreementKey(b"a key that two clients share ...")
OTHER = AgreementKey(b"another key of these two clients")


def twin_of(key: bytes) -> bytes:
    """X25519 ignores the top bit: another encoding of the same key."""
    return key[:-1] + bytes([key[-1] | 128])


def advertise(federation: Any, client: int, *keys: bytes) -> Advertise:
    """What a hostile client can sign: any keys, also those whose private halves it lacks."""
    proposal = federation.settings
    context = (proposal if isinstance(proposal, Settings) else proposal()).context
    return Advertise(keys, sign_keys(federation.identities[client], context, client, keys))


def without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "check_fresh", lambda *_: None)


def open_round(federation: LightSecAgg, hostile: dict[int, Advertise]) -> tuple[Any, list[int]]:
    """A round in which these clients advertise these keys; who of the honest refuses the roster."""
    network = federation.network()
    refused: list[int] = []

    def tamper(sender: int, _recipient: int, message: Any) -> list[Any]:
        return (
            [hostile[sender]] if isinstance(message, Advertise) and sender in hostile else [message]
        )

    network.tamper = tamper
    network.start()
    while network.queue:
        sender, recipient, _, _ = network.queue[0]
        try:
            network.step()
        except RemoteProtocolError:
            if recipient == SERVER:
                network.call(SERVER, partial(network.server.drop, sender))
                network.dead.add(sender)
            elif recipient not in hostile:
                refused.append(recipient)
    return network, refused


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S45_R30_two_clients_with_one_key_do_not_make_the_others_refuse(
    threat_model: ThreatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = LightSecAgg(7, 1, 2, 4, threat_model)
    first, second, *honest = federation.ids
    hostile = {c: advertise(federation, c, ONE.public) for c in (first, second)}
    with monkeypatch.context() as patch:
        without_the_check(patch)
        _, refused = open_round(LightSecAgg(7, 1, 2, 4, threat_model), hostile)
        assert refused == honest, "without the check nobody accepts the roster"
    network, refused = open_round(federation, hostile)
    assert refused == []
    # The one that came first stays on the roster; it cannot open what is sealed for it.
    (roster,) = set(network.messages(Roster))
    assert [member.client for member in roster.members] == [first, *honest]
    network.dead.add(first)
    network.call(SERVER, partial(network.server.drop, first))
    network.finish().assert_exact(honest)


def test_S45_a_high_bit_twin_is_refused_and_so_is_a_copy_of_an_honest_key() -> None:
    federation = LightSecAgg(7, 1, 2, 4)
    honest, copier, *_ = federation.ids
    network = federation.network()
    outputs = network.clients[honest].receive(SERVER, Opening(federation.settings().to_bytes()))
    network.server.start()
    (sent,) = (output.message for output in outputs if isinstance(output, Send))
    assert isinstance(sent, Advertise)
    network.server.receive(honest, sent)
    with pytest.raises(RemoteProtocolError, match="not canonical"):
        network.server.receive(copier, advertise(federation, copier, twin_of(sent.keys[0])))
    with pytest.raises(RemoteProtocolError, match=f"client {copier} advertised a key that another"):
        network.server.receive(copier, advertise(federation, copier, *sent.keys))
    # A repeat of one's own message is no copy, and the copier may still come with a key of its own.
    assert network.server.receive(honest, sent) == []
    network.server.receive(copier, advertise(federation, copier, ONE.public))
    assert copier not in network.server.pending


def test_S45_two_clients_with_one_key_cannot_stop_an_asynchronous_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def registered() -> tuple[AsyncFederation, list[str]]:
        fed = AsyncFederation(7, 1, 1, buffer_size=3)
        fed.call(SERVER, fed.server.start)
        for client in (0, 1):
            keys = (ONE.public,)
            signature = sign_keys(fed.keys[client], fed.settings.context, client, keys)
            fed.lose(SERVER, client)
            fed.send(client, [Send(SERVER, Advertise(keys, signature))])
        fed.away.update((0, 1))
        fed.settle()
        if 1 in fed.server.pending:
            fed.call(SERVER, partial(fed.server.drop, 1))
        fed.settle()
        return fed, fed.refusals

    with monkeypatch.context() as patch:
        without_the_check(patch)
        fed, refused = registered()
        assert refused == ["two keys of the roster are equal"] * 5
        assert fed.ready == set()
    fed, refused = registered()
    assert len(refused) == 1
    assert "client 1 advertised a key that another client has advertised" in refused[0]
    assert fed.ready == {2, 3, 4, 5, 6}


# -- the asynchronous mode's models ---------------------------------------------------------------


def test_S45_an_upload_cannot_name_the_model_of_a_version_before_the_server_does() -> None:
    """The first of a version used to decide: one client then shut out all that told the truth."""
    fed = AsyncFederation(publish=False).open()
    hostile = fed.make_upload(0, 0, model_of(99))
    with pytest.raises(RemoteProtocolError, match=r"version 0, but none was published"):
        fed.server.receive(0, hostile)
    fed.server.intake.publish(model_of(0))
    with pytest.raises(RemoteProtocolError, match="another model of version 0"):
        fed.server.receive(0, hostile)
    for client in (1, 2, 3, 4):
        fed.upload(client)
    fed.settle()
    fed.call(SERVER, fed.server.proceed)  # the liar gives no answer
    assert fed.results[0].owners == (1, 2, 3, 4)
    fed.assert_exact()
    (refusal,) = fed.refusals
    assert "trained from another model" in refusal, "only the liar itself refuses the buffer"


def test_S45_a_naive_buffer_of_two_models_is_refused_by_every_client() -> None:
    """What the check is for."""
    fed = AsyncFederation().open()
    honest = [fed.make_upload(client, 0).tag for client in (1, 2, 3)]
    hostile = fed.make_upload(0, 0, model_of(99)).tag
    buffer = SumRequest(0, (hostile, *honest))
    for client in (1, 2, 3):
        with pytest.raises(RemoteProtocolError, match="another model of version 0"):
            fed.tell(client, buffer)


def test_S45_models_are_published_once_and_not_ahead_of_time() -> None:
    fed = AsyncFederation(publish=False).open()
    fed.server.intake.publish(model_of(0))
    fed.server.intake.publish(model_of(0), 0)
    with pytest.raises(LocalProtocolError, match="another model of version 0"):
        fed.server.intake.publish(model_of(1))
    for version in (-1, 1):
        with pytest.raises(LocalProtocolError, match=f"version {version} cannot be published"):
            fed.server.intake.publish(model_of(1), version)


def test_S45_an_update_of_a_forgotten_version_is_dropped_and_not_held_against_its_owner() -> None:
    fed = AsyncFederation(clients=8, buffer_size=3).open()
    stale = fed.make_upload(7, 0)
    for _ in range(7):
        for client in (0, 1, 2):
            fed.upload(client, fed.server.time)
            fed.settle()
            fed.send(client, fed.clients[client].restock())
        fed.settle()
    assert fed.server.time == 7
    fed.send(7, [Send(SERVER, stale)])
    fed.settle()
    for client in (0, 1, 2):
        fed.upload(client, fed.server.time)
    fed.settle()
    assert fed.refusals == []
    assert all(7 not in result.owners for result in fed.results)
    assert fed.server.intake.waiting == 0
