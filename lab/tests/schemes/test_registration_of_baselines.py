"""What the server and the clients of SecAgg and SecAgg+ check when a round registers (S45)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from secagg_driver import Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.protocol.interface import SERVER
from lightsecagg.protocol.messages import Advertise, Roster
from lightsecagg.protocol.roles.registration import Registration, draw_keys, enter_roster
from lightsecagg.protocol.roster import sign_keys
from lightsecagg_lab.schemes.pairwise_scheme import PairwiseMasksClient
from lightsecagg_lab.schemes.sharing_graph import find_graph_parameters

ONE = AgreementKey(b"a key that two clients share ...")
OTHER = AgreementKey(b"another key of these two clients")


def twin_of(key: bytes) -> bytes:
    """X25519 ignores the top bit: another encoding of the same key."""
    return key[:-1] + bytes([key[-1] | 128])


def advertise(federation: Federation, client: int, *keys: bytes) -> Advertise:
    """What a hostile client can sign: any keys, also those whose private halves it lacks."""
    context = federation.settings.context
    return Advertise(keys, sign_keys(federation.identities[client], context, client, keys))


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ((ONE.public, ONE.public), None, "one key for two purposes"),
        ((ONE.public, OTHER.public), (ONE.public, ONE.public), "one key for two purposes"),
        ((ONE.public, OTHER.public), (OTHER.public, ONE.public), "another client has advertised"),
        ((ONE.public, twin_of(ONE.public)), None, "not canonical"),
    ],
    ids=["one client", "one of two", "two clients, exchanged", "a twin"],
)
def test_S45_R30_secagg_goes_on_without_clients_that_use_a_key_twice(
    first: tuple[bytes, ...], second: tuple[bytes, ...] | None, match: str
) -> None:
    federation = Federation(N=8, T=2, D=2)
    a, b, *honest = federation.ids
    server = federation.server
    openings = server.start()
    for client, keys in ((a, first), (b, second)):
        if keys is None:
            continue
        message = advertise(federation, client, *keys)
        if (client, keys) == (a, first) and second is not None:
            server.receive(client, message)
            continue
        with pytest.raises(RemoteProtocolError, match=match):
            server.receive(client, message)
    outputs: list[Any] = [*server.drop(a), *server.drop(b)]
    for client in honest:
        for sent in federation.clients[client].receive(SERVER, openings[0].message):
            outputs += server.receive(client, sent.message)
    (roster,) = {output.message for output in outputs if isinstance(output.message, Roster)}
    for client in honest:
        assert federation.clients[client].receive(SERVER, roster), "every honest client accepts"


@pytest.mark.parametrize(("N", "T", "D"), [(30, 3, 6), (60, 5, 15), (100, 10, 20)])
def test_S45_absent_clients_cannot_make_the_others_refuse_a_graph_that_was_found(
    N: int, T: int, D: int
) -> None:
    """Clients check the graph again for the roster that came about."""
    graph = find_graph_parameters(N, T, D)
    federation = Federation("secagg+", N, T, D, graph.threshold, graph.degree)
    for members in range(N - D, N + 1):
        federation.policy().check_graph(federation.settings, members)


def test_a_client_leaves_a_ring_that_protects_too_few() -> None:
    """The policy checks the full ring at the opening, and again the one that the roster leaves."""
    fed = Federation("secagg+", N=10, T=2, D=2, k=6, t=4)
    fresh = {c: draw_keys(fed.settings, c, fed.identities[c], system_entropy) for c in fed.ids}
    server = Registration(fed.settings, fed.allow_list, fed.ids, system_entropy)
    for client in fed.ids:
        server.on_advertise(client, fresh[client].advertise)
    server.close()
    roster = server.roster
    assert roster is not None
    assert sorted(roster.graph) == list(range(10))
    client = fed.ids[0]
    entering = (fed.settings, fed.policy(), roster, client, fresh[client].advertise)
    enter_roster(*entering, PairwiseMasksClient)
    strict, sparse = fed.policy(), replace(fed.settings, neighbours=3, threshold=2)
    fresh = {c: draw_keys(sparse, c, fed.identities[c], system_entropy) for c in fed.ids}
    server = Registration(sparse, fed.allow_list, fed.ids, system_entropy)
    for client in fed.ids:
        server.on_advertise(client, fresh[client].advertise)
    server.close()
    roster = server.roster
    assert roster is not None
    with pytest.raises(RemoteProtocolError, match="leave some of 10 clients unprotected"):
        enter_roster(sparse, strict, roster, client, fresh[client].advertise, PairwiseMasksClient)
