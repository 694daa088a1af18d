"""What a client takes in each state and what it refuses (S01-S08, S22, S29), and its snapshots."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from bundles import sealed_alone, whole
from driver import HONEST, MALICIOUS, PAPER, SEEDED, CountingEntropy, Federation, request
from film import STEPS, Film, step_of
from rich.pretty import pretty_repr

from laboratory import needs_laboratory
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import (
    DecodeError,
    InputRefused,
    LocalProtocolError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.field.words import WORDS
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, ShareMode, ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import sum_statement
from lightsecagg.protocol.client import (
    TRANSITIONS,
    Client,
    Closed,
    Registered,
)
from lightsecagg.protocol.interface import SERVER, NeedInput, RoundAborted, Send, Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
    Member,
    Message,
    Opening,
    Refusal,
    Reports,
    ReportsWanted,
    Roster,
    SealedShare,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Tag,
    UnmaskingShares,
    UploadDropped,
)
from lightsecagg.protocol.policy import MAX_UNANNOUNCED_DIMENSION, Policy
from lightsecagg.protocol.registry import client_party
from lightsecagg.protocol.roster import fix_round, sign_keys
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient
from lightsecagg.protocol.schemes.interface import PreparedMask
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings, _Fields, hash_model
from lightsecagg.protocol.share_exchange import OutgoingShare

MODES = list(product((HONEST, MALICIOUS), (PAPER, SEEDED)))


@cache
def film(threat_model: ThreatModel = MALICIOUS, share_mode: ShareMode = SEEDED) -> Film:
    return Film(threat_model, share_mode)


# -- S29: every state x every message ----------------------------------------------------------

FROM_SERVER = (
    Opening,
    Roster,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Certificate,
    AbortRound,
    ReportsWanted,
    UploadDropped,
)
FROM_CLIENTS = (
    Advertise,
    Reports,
    MaskedUpload,
    Consent,
    Refusal,
    AggregatedShare,
    UnmaskingShares,
)

# m: moves on   r: the same answer again   i: ignored and counted   n: nothing at all   x: refused
GENUINE = {
    "Waiting": "m x x x x x m x i",
    "Advertised": "r m x x x x m x i",
    "Sharing": "i i m m x x m x x",
    "Sharing, shares held": "i i i m x x m x x",
    "Sharing, closed": "i i i i x x m x x",
    "Uploaded": "i i i r m x m x x",
    "Signed": "i i i i r m m x x",
    "Answered": "i i i i r r m x x",
    "Closed": "x x x x x x n x x",
}
CONTRADICTING = {
    "Waiting": "m x x x x x . x i",
    "Advertised": "x x x x x x . x i",
    "Sharing": "x x x x x x . x x",
    "Sharing, shares held": "x x x x x x . x x",
    "Sharing, closed": "x x x x x x . x x",
    "Uploaded": "x x x x x x . x x",
    "Signed": "x x x x x x . x x",
    "Answered": "x x x x x r . x x",
    "Closed": "x x x x x x . x x",
}
LATE = {"ShareBundle": "SealedShare"}
"""What a message that comes late is counted as, if not as itself."""


def check_cell(step: str, message: Message, expected: str) -> None:
    scene = film()
    client = scene.client(step)
    before, state = client.snapshot(), client.state
    kind = type(message).__name__
    if expected == "x":
        with pytest.raises(RemoteProtocolError):
            scene.deliver(client, message)
        assert client.snapshot() == before
        assert not client.late_messages
        return
    answer = scene.deliver(client, message)
    if expected == "m":
        assert client.state is not state
        assert client.generation > scene.client(step).generation
        return
    assert client.snapshot() == before
    assert client.late_messages[LATE.get(kind, kind)] == (expected == "i")
    if expected == "r":
        assert answer
        assert answer == scene.deliver(client, message), "a repeat gets identical bytes"
        sent = [scene.federation.codec.encode(m) for ms in scene.sent.values() for m in ms]
        assert set(answer) <= set(sent)
    else:
        assert not answer


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", range(len(FROM_SERVER)), ids=lambda k: FROM_SERVER[k].__name__)
def test_S29_every_state_has_an_answer_to_every_message(step: str, kind: int) -> None:
    check_cell(step, film().genuine[FROM_SERVER[kind]], GENUINE[step].split()[kind])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 7, 8], ids=lambda k: FROM_SERVER[k].__name__)
def test_S29_a_contradicting_message_is_refused_in_every_state(step: str, kind: int) -> None:
    check_cell(step, film().contradicting[FROM_SERVER[kind]], CONTRADICTING[step].split()[kind])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", FROM_CLIENTS, ids=lambda kind: kind.__name__)
def test_S29_a_client_takes_no_message_that_clients_send(step: str, kind: type) -> None:
    check_cell(step, film().genuine[kind], "x")


@pytest.mark.parametrize("step", STEPS)
def test_S29_a_client_listens_to_the_server_only(step: str) -> None:
    client = film().client(step)
    before = client.snapshot()
    with pytest.raises(RemoteProtocolError, match="only listens to the server"):
        client.receive(film().federation.ids[1], AbortRound("by a peer"))
    assert client.snapshot() == before


def test_S29_the_matrix_above_is_the_whole_table() -> None:
    """Every transition of the tables is a cell that is not refused, and the other way round.

    Of a round; two rows are of epochs alone: masks that are asked for again, and dropped uploads.
    """
    machines = {"Sharing": "Registered", "Uploaded": "Registered"}
    machines |= {"Signed": "Registered", "Answered": "Registered"}
    allowed = {
        (machines.get(name := step.split(",")[0], name), kind.__name__)
        for step in STEPS
        for kind, cell in zip(FROM_SERVER, GENUINE[step].split(), strict=True)
        if cell != "x"
    }
    table = {(state.__name__, kind.__name__) for state, kind in TRANSITIONS}
    of_epochs = {("Registered", "ReportsWanted"), ("Registered", "UploadDropped")}
    assert allowed == table - of_epochs
    assert of_epochs < table


def test_S29_repeating_every_message_changes_nothing_of_the_result() -> None:
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    network = federation.network()
    network.tamper = lambda _sender, _recipient, message: [message, message]
    network.start().finish().assert_exact(federation.ids)
    assert sum(network.server.late_messages.values()) > 0


# -- S01: settings ------------------------------------------------------------------------------


def proposals() -> dict[str, tuple[Settings, Policy, str]]:
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    settings, policy = federation.settings(), federation.policy()
    softer = replace(federation.parameters, threat_model=HONEST)
    bolder = replace(federation.parameters, privacy=0)
    return {
        "another session": (replace(settings, session=b"?" * 32), policy, "another session"),
        "another allow-list": (replace(settings, allow_list=b"?" * 32), policy, "allow-list"),
        "less privacy": (replace(settings, parameters=bolder), policy, "privacy T = 0"),
        "a weaker threat model": (replace(settings, parameters=softer), policy, "threat model"),
        "another dimension": (settings, replace(policy, dimension=8), "dimension 7"),
        "a huge dimension": (
            replace(settings, dimension=MAX_UNANNOUNCED_DIMENSION + 1),
            policy,
            "max_dimension = 67108864; a client that expects such vectors raises it",
        ),
        "another model": (settings, replace(policy, model=hash_model(b"mine")), "global model"),
        "a model that was not given": (
            replace(settings, model=hash_model(b"the server's")),
            policy,
            "global model",
        ),
        "sums over fewer": (settings, replace(policy, minimum=6), "over 5 clients.* demands 6"),
        "seeded shares": (settings, replace(policy, share_mode=PAPER), "seeded shares"),
        "explicit shares": (
            replace(settings, parameters=replace(federation.parameters, share_mode=PAPER)),
            replace(policy, share_mode=SEEDED),
            "paper shares",
        ),
        "a tight bound": (settings, replace(policy, bound=1024.5), "bound 1024.0 .* is 1024.5"),
        "a wide bound": (settings, replace(policy, bound=1023.5), "bound 1024.0 .* is 1023.5"),
        "a coarse scale": (settings, replace(policy, scale=1.5), "c_l = 1, .* demands 1.5"),
        "long shares": (settings, replace(policy, max_share_bytes=195), "196 bytes.*allows 195"),
    }


@pytest.mark.parametrize("name", proposals())
def test_S01_settings_that_fall_short_of_the_policy_are_refused(name: str) -> None:
    settings, policy, match = proposals()[name]
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    me = federation.ids[0]
    client = Client(me, federation.identities[me], policy, Ledger.volatile())
    before = client.snapshot()
    with pytest.raises(RemoteProtocolError, match=match):
        client.receive(SERVER, Opening(settings.to_bytes()))
    assert client.snapshot() == before


@needs_laboratory
def test_S01_another_protocol_than_the_policy_names_is_refused() -> None:
    federation = Federation(7, 1, 2, 4, HONEST)
    settings = federation.settings()
    settings = replace(
        settings,
        protocol="secagg",
        parameters=replace(federation.parameters, survivors=5),
        quantizer=replace(settings.quantizer, group=WORDS),
    )
    me = federation.ids[0]
    client = Client(me, federation.identities[me], federation.policy(), Ledger.volatile())
    with pytest.raises(RemoteProtocolError, match="proposed protocol secagg, this client"):
        client.receive(SERVER, Opening(settings.to_bytes()))


def test_S01_the_server_may_tighten_what_the_policy_demands() -> None:
    federation = Federation(7, 2, 1, 4, MALICIOUS)
    me = federation.ids[0]
    lenient = federation.policy(
        privacy=1,
        threat_model=HONEST,
        minimum=5,
        share_mode=SEEDED,
        bound=1024.0,
        scale=0.5,
        max_share_bytes=4 * 7 * (4 + 4),
    )
    client = Client(me, federation.identities[me], lenient, Ledger.volatile())
    (output,) = client.receive(SERVER, Opening(federation.settings().to_bytes()))
    assert isinstance(output, Send)
    assert isinstance(output.message, Advertise)


def test_S01_more_clients_than_the_allow_list_has_are_refused() -> None:
    federation = Federation(5, 1, 1)
    larger = Federation(6, 1, 1).settings(allow_list=federation.allow_list.digest)
    client = federation.client(federation.ids[0])
    with pytest.raises(RemoteProtocolError, match="exceeds the allow-list"):
        client.receive(SERVER, Opening(larger.to_bytes()))


def test_S01_huge_numbers_in_settings_cost_nothing() -> None:
    """Points and matrices are made after the policy's check, never for a server's whim."""
    federation = Federation(5, 1, 1)
    data = federation.settings().to_bytes()
    position = data.index(federation.allow_list.digest) + 32 + 2 + 32
    assert data[position] == 5, "N is a one-byte integer here"
    huge = data[:position] + b"\xcf" + (2**62).to_bytes(8, "big") + data[position + 1 :]
    client = federation.client(federation.ids[0])
    with pytest.raises(RemoteProtocolError, match="Opening refused"):
        client.receive(SERVER, Opening(huge))


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_S01_malformed_settings_are_the_servers_fault(cut: int) -> None:
    federation = Federation(5, 1, 1)
    data = federation.settings().to_bytes()
    client = federation.client(federation.ids[0])
    before = client.snapshot()
    with pytest.raises(RemoteProtocolError, match="Opening refused"):
        client.receive(SERVER, Opening(data[: cut % len(data)]))
    with pytest.raises(RemoteProtocolError, match="Opening refused"):
        client.receive(SERVER, Opening(data + b"\0" * (cut + 1)))
    assert client.snapshot() == before


def test_S01_text_that_is_no_text_is_the_servers_fault() -> None:
    federation = Federation(5, 1, 1)
    data = federation.settings().to_bytes().replace(b"ntt-leaves/1", b"\xff" * 12)
    with pytest.raises(RemoteProtocolError, match="Opening refused"):
        federation.client(federation.ids[0]).receive(SERVER, Opening(data))


def test_a_client_must_be_on_its_own_allow_list() -> None:
    federation = Federation(5, 1, 1)
    with pytest.raises(ParameterError, match="not on the allow-list"):
        Client(2, IdentityKey(b"?" * 32), federation.policy(), Ledger.volatile())
    with pytest.raises(ParameterError, match="not on the allow-list"):
        Client(4, federation.identities[2], federation.policy(), Ledger.volatile())
    with pytest.raises(ParameterError, match="protocol 'morse' is unknown; choose one of light"):
        Client(
            2, federation.identities[2], federation.policy(protocols=("morse",)), Ledger.volatile()
        )


def test_allow_lists_refuse_shared_keys_and_ids_out_of_range() -> None:
    key = IdentityKey(b"k" * 32).public
    with pytest.raises(ParameterError, match="share an identity key"):
        AllowList({1: key, 2: key})
    with pytest.raises(ParameterError, match="client id"):
        AllowList({SERVER: key})
    with pytest.raises(ParameterError, match="client id"):
        AllowList({-1: key})
    with pytest.raises(ParameterError, match="low order"):
        AllowList({1: bytes(32)})


# -- S02: rosters -------------------------------------------------------------------------------


def signed_member(federation: Federation, client: int, private: bytes = b"") -> Member:
    """A well-formed line of the roster for this client."""
    keys = (AgreementKey(private or bytes([client + 1]) * 32).public,)
    context = federation.settings().context
    identity = federation.identities[client]
    return Member(client, keys, sign_keys(identity, context, client, keys))


def twin(key: bytes) -> bytes:
    """Another encoding of the same X25519 key."""
    return key[:-1] + bytes([key[-1] | 0x80])


def bad_rosters() -> dict[str, str]:
    return {
        "self is missing": "does not name this client",
        "self is twice": "twice",
        "another key for self": "other keys than it advertised",
        "a stranger": "not on the allow-list",
        "a member twice": "twice",
        "too few members": "must have",
        "too many members": "must have",
        "an ephemeral key twice": "equal",
        "a high-bit twin": "not canonical",
        "a low-order key": "low order",
        "two keys": "takes 1",
        "no key": "takes 1",
        "a signature of another round": "does not verify",
        "a signature of another client": "does not verify",
        "a forged signature": "does not verify",
        "a sharing graph": "shares with everybody",
        "an id beyond 32 bits": "not on the allow-list",
    }


@pytest.mark.parametrize("name", bad_rosters())
@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S02_bad_rosters_are_refused(name: str, threat_model: ThreatModel) -> None:
    federation = Federation(7, 1, 2, 4, threat_model, strangers=1)
    me, peer, other = federation.ids[:3]
    client = federation.client(me)
    (output,) = client.receive(SERVER, Opening(federation.settings().to_bytes()))
    assert isinstance(output, Send)
    assert isinstance(output.message, Advertise)
    own = Member(me, output.message.keys, output.message.signature)
    members = {c: signed_member(federation, c) for c in federation.ids} | {me: own}
    graph: tuple[int, ...] = ()
    line = list(members.values())
    match name:
        case "self is missing":
            line = line[1:]
        case "self is twice":
            line = [*line[:-1], own]
        case "another key for self":
            line[0] = signed_member(federation, me)
        case "a stranger":
            key = line[1].keys
            line[1] = Member(999, key, sign_keys(IdentityKey(b"?" * 32), b"C", 999, key))
        case "a member twice":
            line = [*line[:-1], line[1]]
        case "too few members":
            line = line[: federation.parameters.minimum - 1]
        case "too many members":
            line.append(signed_member(federation, tuple(federation.identities)[-1]))
        case "an ephemeral key twice":
            line[2] = signed_member(federation, other, bytes([peer + 1]) * 32)
        case "a high-bit twin" | "a low-order key":
            key = twin(line[1].keys[0]) if "twin" in name else bytes(32)
            signature = sign_keys(
                federation.identities[other], federation.settings().context, other, (key,)
            )
            line[2] = Member(other, (key,), signature)
        case "two keys":
            line[1] = Member(peer, (*line[1].keys, *own.keys[:0], b"k" * 32), line[1].signature)
        case "no key":
            line[1] = Member(peer, (), line[1].signature)
        case "a signature of another round":
            signature = sign_keys(
                federation.identities[peer], federation.settings(2).context, peer, line[1].keys
            )
            line[1] = Member(peer, line[1].keys, signature)
        case "a signature of another client":
            line[1] = Member(peer, line[1].keys, line[2].signature)
        case "a forged signature":
            line[1] = Member(peer, line[1].keys, b"?" * 64)
        case "a sharing graph":
            graph = tuple(range(len(line)))
        case "an id beyond 32 bits":
            line[1] = Member(peer + 2**40, line[1].keys, line[1].signature)
    before = client.snapshot()
    with pytest.raises(RemoteProtocolError, match=bad_rosters()[name]):
        client.receive(SERVER, Roster(tuple(line), graph))
    assert client.snapshot() == before
    # The control: nothing else was wrong.
    outputs = client.receive(SERVER, Roster(tuple(members.values())))
    assert isinstance(outputs[-1], NeedInput)


# -- S03, S04, S05: survivor sets and certificates ------------------------------------------------


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S03_bad_survivor_sets_are_refused(threat_model: ThreatModel) -> None:
    scene = film(threat_model)
    ids = scene.federation.ids
    minimum = scene.federation.parameters.minimum
    for survivors, match in [
        ((*ids, ids[1]), "twice"),
        ((*ids[:-1], 999), "not on the roster"),
        (ids[1:], "lacks this client"),
        (ids[: minimum - 1], f"fewer than {minimum}"),
        ((), f"fewer than {minimum}"),
    ]:
        client = scene.client("Uploaded")
        before = client.snapshot()
        with pytest.raises(RemoteProtocolError, match=match):
            scene.deliver(client, request(survivors))
        assert client.snapshot() == before


@pytest.mark.parametrize(
    ("threat_model", "step"),
    [*product((HONEST, MALICIOUS), ("Uploaded", "Answered")), (MALICIOUS, "Signed")],
)
def test_S03_S04_only_the_sum_of_a_round_is_asked_for_in_a_round(
    threat_model: ThreatModel, step: str
) -> None:
    """Of time 0, of owners alone, in one order: one set has one statement."""
    scene = film(threat_model)
    ids = scene.federation.ids
    tags = [Tag(client) for client in ids]
    others = [
        Tag(ids[0], 1),
        Tag(ids[0], 0, b"header"),
        Tag(ids[0], 0, b"", 1),
        Tag(ids[0], 0, b"", 0, b"model"),
        Tag(ids[0], 0, b"", 0, b"", b"digest"),
        Tag(ids[0], 0, b"", 0, b"", b"", b"signature"),
    ]
    bad = [
        (SumRequest(1, tuple(tags)), "of time 1"),
        (SumRequest(1, tuple(tags[:-1])), "of time 1"),
        (SumRequest(0, tuple(reversed(tags))), "out of order"),
        *((SumRequest(0, (other, *tags[1:])), "owners alone") for other in others),
    ]
    client = scene.client(step)
    before = client.snapshot()
    for message, match in bad:
        late = step != "Uploaded" and message.time == 0
        with pytest.raises(RemoteProtocolError, match="consented to another" if late else match):
            scene.deliver(client, message)
        assert client.snapshot() == before


def test_S03_bad_lists_of_owners_are_refused() -> None:
    scene = film()
    ids = scene.federation.ids
    for owners, match in {
        (*ids, ids[-1]): "names a client twice",
        (*ids, 1): r"names \[1\], who are not on the roster",
        tuple(c for c in ids if c != scene.me): "lacks this client",
    }.items():
        client = scene.client("Sharing, shares held")
        before = client.snapshot()
        with pytest.raises(RemoteProtocolError, match=match):
            scene.deliver(client, scene.closed(owners))
        assert client.snapshot() == before


def test_S07_a_client_that_holds_too_few_shares_says_which_and_forgets_its_secrets() -> None:
    scene = film()
    client = scene.client("Sharing")
    outputs = client.receive(SERVER, scene.closed(scene.federation.ids))
    others = {c for c in scene.federation.ids if c != scene.me}
    refusal, aborted = outputs
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, Refusal)
    assert set(refusal.message.missing) == others
    assert isinstance(aborted, RoundAborted)
    assert client.state == Closed(aborted.reason)


def test_S03_survivors_that_had_not_shared_are_refused() -> None:
    scene = film()
    ids = scene.federation.ids
    client = scene.client("Sharing, shares held")
    scene.deliver(client, scene.closed(ids[:-1]))
    client.set_input(scene.federation.update(scene.me))
    assert step_of(client) == "Uploaded"
    with pytest.raises(RemoteProtocolError, match="had not shared"):
        scene.deliver(client, request(ids))
    assert scene.deliver(client, request(ids[:-1]))


def test_S03_a_member_whose_share_is_missing_is_named_in_a_refusal() -> None:
    scene = film()
    ids = scene.federation.ids
    client = scene.client("Sharing")
    for share in scene.shares[:-1]:
        scene.deliver(client, share)
    missing = scene.shares[-1].owner
    scene.deliver(client, scene.closed(ids))
    client.set_input(scene.federation.update(scene.me))
    before = client.snapshot()
    (answer,) = scene.deliver(client, request(ids))
    assert scene.federation.codec.decode(answer) == Refusal(0, (missing,))
    assert client.snapshot() == before, "it neither signs nor answers, and nothing is spent"


@pytest.mark.parametrize("has_uploaded", [False, True])
def test_S29_a_share_that_comes_after_sharing_was_closed_is_not_kept(has_uploaded: bool) -> None:
    """What is reported was fixed by then."""
    scene = film()
    client = scene.client("Sharing")
    for share in scene.shares[:-1]:
        scene.deliver(client, share)
    scene.deliver(client, scene.closed(scene.federation.ids))
    if has_uploaded:
        client.set_input(scene.federation.update(scene.me))
    before = client.snapshot()
    assert scene.deliver(client, scene.shares[-1]) == []
    assert client.late_messages["SealedShare"] == 1
    assert client.refused_shares == {}
    assert client.snapshot() == before


@pytest.mark.parametrize("step", ["Signed", "Answered"])
@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S04_a_second_different_survivor_set_is_refused(
    step: str, threat_model: ThreatModel
) -> None:
    scene = film(threat_model)
    if step not in scene.snapshots:
        assert threat_model is HONEST
        return
    ids = scene.federation.ids
    for smaller in (ids[:-1], ids[:3] + ids[4:], ids[::-1]):
        client = scene.client(step)
        before = client.snapshot()
        with pytest.raises(RemoteProtocolError, match="would reveal a client's model"):
            scene.deliver(client, request(smaller))
        assert client.snapshot() == before


def kept_by(client: Client) -> dict[int, bytes]:
    """Owner -> the share that this client holds."""
    assert isinstance(client.state, Registered)
    assert client.state.holder is not None
    kept = client.state.holder.kept
    return {owner: bytes(of[0].share[1]) for owner, of in kept.items()}  # type: ignore[arg-type]


def certificate_of(scene: Film) -> tuple[tuple[int, bytes], ...]:
    certificate = scene.genuine[Certificate]
    assert isinstance(certificate, Certificate)
    return certificate.signatures


def test_S05_no_answer_without_m_signatures_on_the_same_context_and_set() -> None:
    scene = film()
    signatures = certificate_of(scene)
    ids, identities = scene.federation.ids, scene.federation.identities
    signed = scene.client("Signed").state
    assert isinstance(signed, Registered)
    context = scene.client("Signed")._scheme(signed).round.context
    signer, _ = signatures[-1]
    for last, match in [
        ((), "m = 5 are needed"),
        (signatures[:1], "second time"),
        (((999, signatures[-1][1]),), "stranger"),
        (((signer, b"?" * 64),), "does not verify"),
        (((signer, signatures[0][1]),), "does not verify"),
        (
            ((signer, sum_statement(context, request(ids[:-1])).sign(identities[signer])),),
            "does not verify",
        ),
        (
            ((signer, sum_statement(b"C" * 32, request(ids)).sign(identities[signer])),),
            "does not verify",
        ),
    ]:
        client = scene.client("Signed")
        before = client.snapshot()
        with pytest.raises(RemoteProtocolError, match=match):
            scene.deliver(client, Certificate(0, (*signatures[:-1], *last)))
        assert client.snapshot() == before
    assert scene.deliver(scene.client("Signed"), Certificate(0, signatures))


def test_S05_more_than_m_signatures_are_welcome() -> None:
    scene = film()
    ids, identities = scene.federation.ids, scene.federation.identities
    signed = scene.client("Signed").state
    assert isinstance(signed, Registered)
    context = scene.client("Signed")._scheme(signed).round.context
    everybody = tuple((c, sum_statement(context, request(ids)).sign(identities[c])) for c in ids)
    assert scene.deliver(scene.client("Signed"), Certificate(0, everybody))


@pytest.mark.parametrize("owner", ["a stranger", "the client itself", "nobody"])
def test_S19_a_share_that_no_peer_can_have_sealed_is_refused(owner: str) -> None:
    scene = film()
    federation = scene.federation
    owners = {"a stranger": federation.ids[0] + 1, "the client itself": scene.me, "nobody": SERVER}
    share = replace(scene.shares[0], owner=owners[owner])
    client = scene.client("Sharing")
    before = client.snapshot()
    with pytest.raises(RemoteProtocolError, match="is not for client"):
        scene.deliver(client, share)
    assert client.snapshot() == before


@pytest.mark.parametrize(
    ("word", "extra", "serial", "reason"),
    [
        (0, 0, 0, None),
        (0, 0, 1, "serial 0"),
        (0, 4, 0, "bytes, not"),
        (0, -4, 0, "bytes, not"),
        (DEFAULT_MODULUS, 0, 0, "no field elements"),
    ],
    ids=["the control", "another mask", "too long", "too short", "not below q"],
)
def test_S19_a_share_that_opens_but_is_malformed_is_not_held(
    word: int, extra: int, serial: int, reason: str | None
) -> None:
    """Its owner sealed it, so nothing else gives it away."""
    federation = Federation(5, 1, 1, share_mode=PAPER)
    network = federation.network()
    network.train_at_once = False
    me, owner, *_ = federation.ids
    network.tamper = lambda sender, _recipient, message: (
        [] if sender == SERVER and isinstance(message, SealedShare | SharesClosed) else [message]
    )
    network.start().run()
    client, peer = network.clients[me], network.clients[owner]
    assert isinstance(peer.state, Registered)
    round_ = fix_round(federation.settings(), federation.allow_list, peer.state.roster)
    elements = np.full(round_.settings.shared_length + extra // 4, word, dtype=np.uint32)
    share = OutgoingShare(me, ShareKind.EXPLICIT, elements.tobytes())
    key = AgreementKey(peer.state.private_keys[0])
    client.receive(SERVER, whole(sealed_alone(round_, key, owner, share, serial)))
    assert (owner in kept_by(client)) == (reason is None)
    assert (reason or "") in client.refused_shares.get(owner, "")


@pytest.mark.parametrize("together", [True, False], ids=["in one bundle", "later"])
def test_S46_of_an_owner_one_header_counts_though_it_has_shared_two_masks(together: bool) -> None:
    """The first one that came: beside a share that is new, too, a second one changes nothing."""
    federation = Federation(5, 1, 1)
    network = federation.network()
    network.train_at_once = False
    me, owner, other, *_ = federation.ids
    network.tamper = lambda sender, _recipient, message: (
        [] if sender == SERVER and isinstance(message, SealedShare | SharesClosed) else [message]
    )
    network.start().run()
    client, peers = network.clients[me], {c: network.clients[c] for c in (owner, other)}
    assert isinstance(client.state, Registered)
    round_ = fix_round(federation.settings(), federation.allow_list, client.state.roster)

    def sealed(of: int, byte: int) -> SealedShare:
        share = OutgoingShare(me, ShareKind.SEED, bytes([byte]) * 32)
        key = AgreementKey(peers[of].state.private_keys[0])  # type: ignore[union-attr]
        return sealed_alone(round_, key, of, share)

    first, second, news = sealed(owner, 1), sealed(owner, 2), sealed(other, 3)
    bundles = [(first, second, news)] if together else [(first,), (second, news)]
    for bundle in bundles:
        client.receive(SERVER, ShareBundle(bundle))
    kept = kept_by(client)
    assert kept[owner] == bytes([1]) * 32
    assert kept[other] == bytes([3]) * 32
    assert len(kept) == 3


def test_S19_a_client_restored_twice_from_one_snapshot_never_seals_under_one_key_again() -> None:
    """Both copies are of the newest generation, so nothing stops them from sharing their masks."""
    scene = film()
    copies = [scene.client("Advertised") for _ in range(2)]
    bundles = [
        {
            share.recipient: share
            for output in copy.receive(SERVER, scene.genuine[Roster])
            if isinstance(output, Send) and isinstance(output.message, ShareBundle)
            for share in output.message.shares
        }
        for copy in copies
    ]
    assert bundles[0].keys() == bundles[1].keys()
    salts = [{share.salt for share in bundle.values()} for bundle in bundles]
    assert [len(of_one_mask) for of_one_mask in salts] == [1, 1]
    assert salts[0] != salts[1]


# -- S06, S07, S08: masks, updates and rounds are used once ---------------------------------------


def test_S06_a_mask_hides_one_input() -> None:
    scene = film()
    client = scene.client("Sharing")
    client.set_input(scene.federation.update(scene.me))
    with pytest.raises(MaskAlreadyUsed, match="would reveal their difference"):
        client.set_input(scene.federation.update(scene.me, 2))


def test_S08_an_update_of_another_version_is_not_masked_in_a_round() -> None:
    client = film().client("Sharing, closed")
    before = client.snapshot()
    with pytest.raises(LocalProtocolError, match="a round has one model, of version 0"):
        client.set_input(film().federation.update(film().me), 1)
    assert client.snapshot() == before


@pytest.mark.parametrize("step", ["Sharing", "Uploaded", "Signed", "Answered"])
def test_S06_a_round_has_one_mask_and_no_stock(step: str) -> None:
    client = film().client(step)
    before = client.snapshot()
    for act in (client.restock, partial(client.discard, [0]), partial(client.take_model, b"m")):
        with pytest.raises(LocalProtocolError, match="a round has one mask"):
            act()
    assert client.snapshot() == before


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S06_an_update_is_spent_once_it_was_signed_or_answered_for(
    threat_model: ThreatModel,
) -> None:
    federation = Federation(7, 1, 2, 4, threat_model)
    federation.network(1).start().finish().assert_exact(federation.ids)
    again = federation.network(2, max_attempts=9)
    again.inputs = {c: federation.update(c, 1) for c in federation.ids}
    with pytest.raises(MaskAlreadyUsed, match="spent"):
        again.start().finish()


@pytest.mark.parametrize(
    "disguise",
    [
        lambda update: Update(update.vector.astype(np.float32), update.samples),
        lambda update: Update(update.vector, update.samples + 1),
        lambda update: Update(np.where(update.vector == 0, -0.0, update.vector), 1),
        lambda update: Update(np.repeat(update.vector, 2)[::2], update.samples),
    ],
    ids=["precision", "samples", "negative zero", "strides"],
)
def test_S06_a_spent_update_stays_spent_in_disguise(disguise: object) -> None:
    federation = Federation(5, 1, 1)
    me = federation.ids[0]
    first = federation.network(1)
    first.inputs[me].vector[1] = 0.0
    spent = first.inputs[me]
    first.start().finish().assert_exact(federation.ids)
    second = federation.network(2)
    second.inputs[me] = disguise(spent)  # type: ignore[operator]
    with pytest.raises(MaskAlreadyUsed, match="spent"):
        second.start().finish()


def test_S06_an_update_that_was_only_uploaded_may_be_uploaded_again_under_a_fresh_mask() -> None:
    """An abort before the survivor set reveals nothing, so nothing is lost."""
    federation = Federation(5, 1, 1)
    first = federation.network(1)
    first.start().run(until=lambda: step_of(first.clients[2]) == "Uploaded")
    for client in first.clients.values():
        client.receive(SERVER, AbortRound("the server went away"))
    second = federation.network(2)
    second.inputs = first.inputs
    second.start().finish().assert_exact(federation.ids)
    uploads = [net.messages(MaskedUpload)[0].vector for net in (first, second)]
    assert not np.array_equal(*uploads)


def test_S06_at_most_max_attempts_uploads_for_one_global_model() -> None:
    federation = Federation(5, 1, 1)
    for number in (1, 2):
        federation.network(number).start().finish().assert_exact(federation.ids)
    with pytest.raises(RemoteProtocolError, match="the most that it allows"):
        federation.network(3).start().finish()
    model = hash_model(b"another model")
    another = federation.network(4, settings=federation.settings(4, model=model), model=model)
    another.start().finish().assert_exact(federation.ids)


def test_S06_a_server_that_names_new_models_does_not_evade_the_count() -> None:
    """Whatever the server calls it: the client counts for the model that it was given itself."""
    federation = Federation(5, 1, 1)
    for number in (1, 2):
        federation.network(number).start().finish().assert_exact(federation.ids)
    renamed = federation.settings(3, model=hash_model(b"a name that nobody was given"))
    with pytest.raises(RemoteProtocolError, match="global model other than"):
        federation.network(3, settings=renamed).start().finish()
    with pytest.raises(RemoteProtocolError, match="max_attempts = 2"):
        federation.network(3).start().finish()


def test_S44_a_server_cannot_open_rounds_without_end_from_one_model() -> None:
    """Each round ends before its uploads, so `max_attempts` never counts it."""
    federation = Federation(5, 1, 1)

    def open_only(number: int) -> None:
        network = federation.network(number, max_openings=3)
        network.start().run(until=lambda: len(network.messages(Advertise)) == 5)

    for number in (1, 2, 3):
        open_only(number)
    with pytest.raises(RemoteProtocolError, match=r"opened 3 rounds .* \(max_openings = 3\)"):
        open_only(4)
    model = hash_model(b"the next model")
    settings = federation.settings(5, model=model)
    after = federation.network(5, settings=settings, model=model, max_openings=3)
    after.start().finish().assert_exact(federation.ids)


def test_S01_every_setting_is_bounded_by_the_policy_or_said_to_be_free() -> None:
    """A new setting needs a decision: what may a server propose that a client cannot refuse?"""
    bounded = {"protocol", "threat_model", "share_mode", "session", "round", "allow_list", "model"}
    bounded |= {"clients", "privacy", "survivors", "dimension", "bound", "neighbours", "threshold"}
    bounded |= {"buffering", "point_rule", "instructions", "short_keys", "word_bits"}
    free = {"dropouts", "modulus", "weighted", "max_samples", "scale"}
    names = {field.name for field in msgspec.structs.fields(_Fields)}
    assert names == bounded | free


@pytest.mark.parametrize("kind", [Client, client_party])
def test_S06_no_party_is_made_without_the_memory_of_its_client(kind: Any) -> None:
    federation = Federation(5, 1, 1)
    with pytest.raises(TypeError, match="ledger"):
        kind(2, federation.identities[2], federation.policy())


def test_S06_a_stored_ledger_outlives_a_restart_and_a_volatile_one_does_not() -> None:
    federation = Federation(5, 1, 1)
    first = federation.network(1)
    first.start().finish().assert_exact(federation.ids)
    stored = {c: ledger.to_bytes() for c, ledger in federation.ledgers.items()}

    federation.ledgers = {c: Ledger.from_bytes(data) for c, data in stored.items()}
    second = federation.network(2)
    second.inputs = first.inputs
    with pytest.raises(MaskAlreadyUsed, match="spent"):
        second.start().finish()

    federation.ledgers = {c: Ledger.volatile() for c in federation.ids}
    third = federation.network(3)
    third.inputs = first.inputs
    third.start().finish().assert_exact(federation.ids)


def test_S06_a_party_is_not_copied() -> None:
    client = film().client("Uploaded")
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(LocalProtocolError, match="not copied"):
            duplicate(client)


def test_S06_a_forked_party_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = film()
    client = scene.client("Uploaded")
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    with pytest.raises(MaskAlreadyUsed, match="fork"):
        scene.deliver(client, scene.genuine[SumRequest])
    with pytest.raises(MaskAlreadyUsed, match="fork"):
        client.set_input(scene.federation.update(scene.me))
    with pytest.raises(MaskAlreadyUsed, match="fork"):
        client.snapshot()


def test_S07_a_round_that_was_aborted_answers_nothing_and_keeps_no_secret() -> None:
    scene = film()
    for step in STEPS[1:-1]:
        client = scene.client(step)
        (output,) = client.receive(SERVER, AbortRound("out of time"))
        assert output == RoundAborted("out of time")
        assert client.state == Closed("out of time")
        with pytest.raises(RemoteProtocolError, match="its secrets gone"):
            scene.deliver(client, scene.genuine[SumRequest])
        assert len(client.snapshot()) < 600


def test_S07_the_key_that_opens_shares_is_gone_with_the_phase_that_needs_it() -> None:
    federation = Federation(5, 1, 1)
    network = federation.network()
    network.train_at_once = False
    network.start().run()
    secrets: dict[int, list[bytes]] = {}
    for number, client in network.clients.items():
        assert _keys_of(client), "it opens shares until its upload"
        assert isinstance(client.state, Registered)
        assert client.state.contributor
        masks = (mask.secret for mask in client.state.contributor.stock.values())
        secrets[number] = [*client.state.private_keys, *masks]
        assert len(secrets[number]) == 2
        assert all(secret in client.snapshot() for secret in secrets[number])
    given_up, *others = federation.ids
    network.clients[given_up].abort("the driver gives up")
    for client in others:
        network.train(client)
    for number, party in network.clients.items():
        assert not _keys_of(party)
        secrets[number].append(network.inputs[number].vector.tobytes())
        assert not any(secret in party.snapshot() for secret in secrets[number])


def _keys_of(client: Client) -> list[AgreementKey]:
    return [value for value in vars(client).values() if isinstance(value, AgreementKey)]


def test_S07_an_update_is_forgotten_with_its_upload() -> None:
    client, update = film().client("Sharing, shares held"), film().federation.update(film().me)
    client.set_input(update)
    assert update.vector.tobytes() in client.snapshot(), "it waits until sharing is closed"
    film().deliver(client, film().closed(film().federation.ids))
    assert step_of(client) == "Uploaded"
    assert update.vector.tobytes() not in client.snapshot()


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S07_all_shares_are_gone_with_the_sum_also_of_those_who_are_not_in_it(
    threat_model: ThreatModel,
) -> None:
    scene = film(threat_model)
    client = scene.client("Uploaded")
    assert isinstance(client.state, Registered)
    assert client.state.holder
    assert client.state.holder.kept
    scene.deliver(client, request(scene.federation.ids[:-1]))
    assert isinstance(client.state, Registered)
    assert client.state.holder
    assert client.state.holder.kept == {}
    assert client.stored == 0


def test_S07_a_round_that_its_driver_gave_up_is_not_resumed_from_a_snapshot() -> None:
    scene = film()
    client = scene.client("Uploaded")
    before = client.snapshot()
    client.abort("the driver gives up")
    identity, policy = scene.federation.identities[scene.me], scene.federation.policy()
    with pytest.raises(MaskAlreadyUsed, match="older"):
        Client.restore(before, identity, policy, client.generation)


@pytest.mark.parametrize("number", [0, 1])
def test_S07_rounds_that_are_not_newer_are_refused(number: int) -> None:
    federation = Federation(5, 1, 1)
    federation.network(1).start().finish()
    with pytest.raises(RemoteProtocolError, match="already seen round 1"):
        federation.client(2).receive(SERVER, Opening(federation.settings(number).to_bytes()))


def test_S07_a_round_is_over_once_a_newer_one_is_open() -> None:
    """Two rounds at once could get the same update signed twice."""
    federation = Federation(5, 1, 1)
    first = federation.network(1)
    first.start().run(until=lambda: first.server.phase.value == "recover")
    old = first.clients[2]
    assert step_of(old) == "Uploaded"
    federation.network(2).start().run()
    with pytest.raises(RemoteProtocolError, match="round 1 is over"):
        old.receive(SERVER, request(federation.ids))
    sharing = Federation(5, 1, 1)
    slow = sharing.network(1)
    slow.train_at_once = False
    slow.start().run()
    sharing.network(2).start().run()
    with pytest.raises(RemoteProtocolError, match="round 1 is over"):
        slow.clients[2].set_input(slow.inputs[2])


@pytest.mark.parametrize("what", ["model", "instructions"])
def test_S08_clients_that_were_given_different_things_do_not_accept_each_other(what: str) -> None:
    federation = Federation(5, 1, 1)
    given = {c: hash_model(b"%d" % (c == federation.ids[0])) for c in federation.ids}
    network = federation.network()
    odd = federation.ids[0]
    for c in federation.ids:
        network.clients[c] = federation.client(c, **{what: given[c]})
    network.start()
    settings = {c: federation.settings(**{what: given[c]}) for c in federation.ids}
    advertised = {}
    for c, client in network.clients.items():
        (output,) = client.receive(SERVER, Opening(settings[c].to_bytes()))
        assert isinstance(output, Send)
        assert isinstance(output.message, Advertise)
        advertised[c] = Member(c, output.message.keys, output.message.signature)
    roster = Roster(tuple(advertised.values()))
    for c, client in network.clients.items():
        culprit = federation.ids[1] if c == odd else odd
        with pytest.raises(RemoteProtocolError, match=f"keys of client {culprit} refused"):
            client.receive(SERVER, roster)


@pytest.mark.parametrize("told", [b"", bytes(32)])
def test_S08_a_client_holds_the_server_to_the_instructions_that_it_was_given(told: bytes) -> None:
    federation = Federation(5, 1, 1)
    named = b"" if told else bytes(32)
    client = federation.client(federation.ids[0], instructions=told)
    with pytest.raises(RemoteProtocolError, match="other instructions for training"):
        client.receive(SERVER, Opening(federation.settings(instructions=named).to_bytes()))
    client.receive(SERVER, Opening(federation.settings(instructions=told).to_bytes()))


def test_instructions_have_one_encoding_and_the_length_of_a_hash() -> None:
    federation = Federation(5, 1, 1)
    settings = federation.settings(instructions=bytes(range(32)))
    assert Settings.from_bytes(settings.to_bytes()) == settings
    fields = msgspec.msgpack.decode(federation.settings().to_bytes())
    for more in ([b""], [bytes(32), b""]):
        with pytest.raises(DecodeError):
            Settings.from_bytes(msgspec.msgpack.encode(fields + more))
    with pytest.raises(ParameterError, match="instructions must be 32 bytes, or none"):
        federation.settings(instructions=bytes(31))


def test_S13_inputs_that_cannot_be_masked_are_refused_before_masking() -> None:
    scene = film()
    for vector, match in [
        (np.zeros(8), "shape"),
        (np.zeros((1, 7)), "shape"),
        (np.full(7, np.nan), "NaN"),
        (np.full(7, np.inf), "infinite"),
        (np.full(7, 1025.0), "beyond the bound"),
        (np.zeros(7, dtype=np.int64), "float"),
    ]:
        client = scene.client("Sharing")
        before = client.snapshot()
        with pytest.raises(InputRefused, match=match):
            client.set_input(Update(vector))
        assert client.snapshot() == before
    for step in ("Waiting", "Advertised", "Uploaded", "Signed", "Answered", "Closed"):
        match = "already set|not registered|is over"
        with pytest.raises(LocalProtocolError, match=match):
            scene.client(step).set_input(scene.federation.update(scene.me))


def test_S13_a_client_keeps_its_own_copy_of_the_input() -> None:
    federation = Federation(5, 1, 1)
    network = federation.network()
    network.train_at_once = False
    network.start().run(until=lambda: bool(network.waiting))
    vector = network.inputs[2].vector.copy()
    original = network.inputs[2]
    network.inputs[2] = Update(vector, original.samples)
    network.train(2)
    vector[:] = 0.0
    network.inputs[2] = original
    network.run()
    for c in sorted(network.waiting):
        network.train(c)
    network.finish().assert_exact(federation.ids)


# -- snapshots ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threat_model", "share_mode"), MODES)
def test_a_client_that_moves_to_a_new_process_after_every_call_does_the_same(
    threat_model: ThreatModel, share_mode: ShareMode
) -> None:
    sums, wires = [], []
    for moving in (False, True):
        federation = Federation(7, 1, 2, 4, threat_model, share_mode)
        network = federation.network()
        network.server = Server(
            federation.settings(), federation.allow_list, federation.ids, CountingEntropy("server")
        )
        sources = {c: CountingEntropy(f"client {c}") for c in federation.ids}
        for c in federation.ids:
            network.clients[c] = Client(
                c,
                federation.identities[c],
                federation.policy(),
                Ledger.volatile(sources[c]),
                sources[c],
            )
        network.start()
        while network.queue:
            recipient = network.queue[0][1]
            network.step()
            if moving and recipient != SERVER:
                party = network.clients[recipient]
                moved = Client.restore(
                    party.snapshot(),
                    federation.identities[recipient],
                    federation.policy(),
                    party.generation,
                    sources[recipient],
                )
                assert moved.snapshot() == party.snapshot()
                network.clients[recipient] = moved
        network.assert_exact(federation.ids)
        sums.append(network.result)
        wires.append(network.wire)
    assert wires[0] == wires[1], "bit for bit the same messages"


def test_a_seeded_snapshot_holds_seeds_from_which_the_mask_is_derived_again() -> None:
    """With U = N nobody is sent anything longer than a seed; the paper's mode keeps the mask."""
    sizes, uploads = {}, {}
    for share_mode in (SEEDED, PAPER):
        federation = Federation(5, 1, 0, 5, share_mode=share_mode, dimension=20_000)
        network = federation.network()
        network.train_at_once = False
        network.start().run()
        party = network.clients[2]
        sizes[share_mode] = len(party.snapshot())
        arguments = (federation.identities[2], federation.policy(), party.generation)
        moved = Client.restore(party.snapshot(), *arguments)
        update = Update(np.ones(20_000), 3)
        uploads[share_mode] = [each.set_input(update)[-1] for each in (party, moved)]
        assert not moved._contributor.masks.nbytes
    assert sizes[SEEDED] < 5_000
    assert sizes[PAPER] > 4 * 20_000
    for stayed, restored in uploads.values():
        assert stayed == restored, "the same mask, hence the same bytes"


def test_S06_an_older_snapshot_is_refused() -> None:
    scene = film()
    newest = scene.client("Answered").generation
    for step in STEPS[:7]:
        with pytest.raises(MaskAlreadyUsed, match="could answer twice"):
            Client.restore(
                scene.snapshots[step],
                scene.federation.identities[scene.me],
                scene.federation.policy(),
                newest,
            )


def test_S06_a_snapshot_from_before_the_input_does_not_mask_another_one() -> None:
    """The upload leaves with `set_input`; under the same mask, a second one would lie open."""
    scene = film()
    client = scene.client("Sharing, closed")
    before = client.snapshot()
    *_, upload = client.set_input(scene.federation.update(scene.me))
    assert isinstance(upload, Send)
    assert isinstance(upload.message, MaskedUpload)
    identity, policy = scene.federation.identities[scene.me], scene.federation.policy()
    with pytest.raises(MaskAlreadyUsed, match="could answer twice"):
        Client.restore(before, identity, policy, client.generation)


def test_S06_a_snapshot_of_an_earlier_round_is_older_than_any_of_this_round() -> None:
    federation = Federation(5, 1, 1)
    first = federation.network(1).start()
    first.run(until=lambda: step_of(first.clients[2]) == "Uploaded")
    old = first.clients[2].snapshot()
    first.finish()
    second = federation.network(2).start()
    second.run(until=lambda: second.server.phase.value == "share")
    client = second.clients[2]
    with pytest.raises(MaskAlreadyUsed, match="older"):
        Client.restore(old, federation.identities[2], federation.policy(), client.generation)


def test_malformed_snapshots_are_refused() -> None:
    scene = film()
    snapshot = scene.snapshots["Uploaded"]
    identity, policy = scene.federation.identities[scene.me], scene.federation.policy()
    rng = np.random.default_rng(1)
    for position in rng.integers(0, len(snapshot), 200):
        altered = bytearray(snapshot)
        altered[position] ^= 1 << int(rng.integers(8))
        with pytest.raises(DecodeError, match="malformed"):
            Client.restore(bytes(altered), identity, policy, 0)
    for length in (0, 1, 31, 32, 33, len(snapshot) - 1):
        with pytest.raises(DecodeError, match="malformed"):
            Client.restore(snapshot[:length], identity, policy, 0)
    with pytest.raises(DecodeError, match="malformed"):
        Client.restore(snapshot + b"\0", identity, policy, 0)


@needs_laboratory
def test_a_snapshot_belongs_to_its_protocol() -> None:
    scene = film()
    identity = scene.federation.identities[scene.me]
    policy = scene.federation.policy(protocols=("secagg",))
    with pytest.raises(DecodeError, match="a snapshot of lightsecagg"):
        Client.restore(scene.snapshots["Waiting"], identity, policy, 0)


def test_a_snapshot_belongs_to_its_client_its_allow_list_and_its_session() -> None:
    scene = film()
    snapshot, federation = scene.snapshots["Uploaded"], scene.federation
    with pytest.raises(ParameterError, match="not on the allow-list with this identity"):
        Client.restore(snapshot, federation.identities[federation.ids[1]], federation.policy(), 0)
    identity = federation.identities[scene.me]
    with pytest.raises(RemoteProtocolError, match="another session"):
        Client.restore(snapshot, identity, federation.policy(session=b"?" * 32), 0)
    fewer = AllowList({c: federation.allow_list[c] for c in federation.ids[:3]})
    with pytest.raises(RemoteProtocolError, match="another allow-list"):
        Client.restore(snapshot, identity, federation.policy(allow_list=fewer), 0)


def test_a_ledger_survives_storage_and_refuses_what_is_no_ledger() -> None:
    ledger = Ledger.volatile()
    ledger.open_round(4, b"m" * 32, 2)
    update = Update(np.arange(3.0))
    ledger.count_upload(b"m" * 32)
    ledger.spend(ledger.fingerprint(update))
    restored = Ledger.from_bytes(ledger.to_bytes())
    assert restored.to_bytes() == ledger.to_bytes()
    with pytest.raises(MaskAlreadyUsed):
        restored.check_unspent(restored.fingerprint(update))
    restored.check_unspent(restored.fingerprint(Update(np.arange(1.0, 4.0))))
    with pytest.raises(RemoteProtocolError):
        restored.open_round(4, b"n" * 32, 2)
    for data in (b"", b"\xc0", ledger.to_bytes()[:-1], ledger.to_bytes() + b"\0"):
        with pytest.raises(DecodeError, match="malformed ledger"):
            Ledger.from_bytes(data)
    with pytest.raises(DecodeError, match="malformed ledger"):
        Ledger.from_bytes(ledger.to_bytes().replace(b"last_round\x04", b"last_round\xf0"))


def test_fingerprints_are_keyed() -> None:
    """A stolen ledger must not confirm a guess of an update."""
    update = Update(np.arange(3.0))
    assert Ledger.volatile().fingerprint(update) != Ledger.volatile().fingerprint(update)


def test_a_fingerprint_is_that_of_the_numbers_however_many_and_however_they_lie() -> None:
    ledger = Ledger.volatile()
    numbers = np.random.default_rng(1).normal(size=70_001).astype(np.float32)
    numbers[40_000] = -0.0
    known = ledger.fingerprint(Update(numbers))
    assert ledger.fingerprint(Update(numbers.astype(np.float64))) == known
    assert ledger.fingerprint(Update(numbers + np.float32(0))) == known, "the sign of a zero"
    assert ledger.fingerprint(Update(np.repeat(numbers, 2)[::2])) == known
    numbers[-1] += 1
    assert ledger.fingerprint(Update(numbers)) != known


# -- S22: nothing secret is ever printed ----------------------------------------------------------


def printed_secrets(text: str, secrets: set[bytes]) -> list[bytes]:
    """Those that the text shows: in hex, as Python prints bytes, or as a list of elements."""

    def forms(secret: bytes) -> tuple[str, ...]:
        words = np.frombuffer(secret[: len(secret) // 4 * 4], dtype="<u4").tolist()
        return secret.hex(), repr(secret)[2:-1], str(words)[1:-1]

    return [secret for secret in secrets if any(form in text for form in forms(secret))]


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
def test_S22_no_secret_is_in_any_repr_or_exception(share_mode: ShareMode) -> None:
    entropy = CountingEntropy("canary")
    scene = Film(MALICIOUS, share_mode, entropy)
    identity = scene.federation.identities[scene.me]
    secrets = {piece for drawn in entropy.drawn for piece in (drawn, drawn[:16])}
    secrets.add(identity.private_bytes())
    secrets |= {*kept_by(scene.client("Uploaded")).values()}
    sharing, answered = scene.client("Sharing").state, scene.client("Answered").state
    assert isinstance(sharing, Registered)
    assert isinstance(answered, Registered)
    secrets.add(sharing.contributor.stock[0].secret)  # type: ignore[union-attr]
    secrets |= set(sharing.private_keys)
    secrets.add(bytes(answered.holder.answer))  # type: ignore[union-attr]
    assert len(secrets) > 10
    assert b"" not in secrets

    printed: list[str] = []
    for step in STEPS:
        client = scene.client(step)
        things: list[object] = [client, client.state, client.ledger, client.generation, identity]
        for kind in (*FROM_SERVER, *FROM_CLIENTS):
            for messages in (scene.genuine, scene.contradicting):
                if kind in messages:
                    things.append(messages[kind])
                    try:
                        things += scene.client(step).receive(SERVER, messages[kind])
                    except RemoteProtocolError as error:
                        things += [error, error.__cause__]
        try:
            client.set_input(Update(np.full(7, np.nan)))
        except (InputRefused, LocalProtocolError) as error:
            things.append(error)
        things.append(scene.federation.update(scene.me))
        for thing in things:
            printed += [repr(thing), str(thing), pretty_repr(thing)]
    text = "\n".join(printed)
    assert not printed_secrets(text, secrets)
    assert str(scene.federation.update(scene.me).vector[1]) not in text


def test_S22_the_control_finds_a_secret_that_is_printed() -> None:
    state = film().client("Uploaded").state
    assert isinstance(state, Registered)
    shares = set(kept_by(film().client("Uploaded")).values())
    kept = state.holder.kept  # type: ignore[union-attr]
    fields = [msgspec.structs.asdict(share) for of in kept.values() for share in of.values()]
    assert set(printed_secrets(repr(fields), shares)) == shares
    assert not printed_secrets(repr(state) + pretty_repr(state), shares)


# -- S16: nothing readable is on the wire ---------------------------------------------------------


@pytest.mark.parametrize(("threat_model", "share_mode"), MODES)
@pytest.mark.parametrize("modulus", [None, PAPER_MODULUS])
def test_S16_a_canary_model_leaves_no_canary_on_the_wire(
    threat_model: ThreatModel, share_mode: ShareMode, modulus: int | None
) -> None:
    federation = Federation(7, 1, 2, 4, threat_model, share_mode, dimension=64)
    if modulus is not None:
        federation.modulus = modulus
    network = federation.network()
    canary = 777.0
    samples = 61
    me = federation.ids[0]
    vector = np.full(64, canary)
    vector[0] = 1.0
    network.inputs[me] = Update(vector, samples)
    network.start().finish().assert_exact(federation.ids)
    capture = [data for _, _, data in network.wire]
    forms = {
        "float64": np.full(4, canary).tobytes(),
        "float32": np.full(4, canary, dtype=np.float32).tobytes(),
        "quantised": np.full(2, canary * samples, dtype="<u4").tobytes(),
        "integer": np.full(2, canary, dtype="<u4").tobytes(),
    }
    for name, form in forms.items():
        assert not any(form in data for data in capture), name
    upload = network.messages(MaskedUpload)[0]
    assert int(upload.vector[-1]) != samples, "the sample count is masked like everything else"


def test_S16_sizes_on_the_wire_do_not_depend_on_the_input() -> None:
    sizes = []
    for scale in (0.0, 1.0):
        federation = Federation(6, 1, 2, 4)
        network = federation.network()
        for c, update in network.inputs.items():
            network.inputs[c] = Update(update.vector * scale, 1 + int(63 * scale))
        network.start().finish()
        sizes.append([(s, r, len(data)) for s, r, data in network.wire])
    assert sizes[0] == sizes[1]


def test_S16_the_control_a_zero_mask_would_show_the_canary() -> None:
    class Unmasked(CodedMasksClient):
        def prepare(self, *arguments: Any) -> PreparedMask:
            return super().prepare(*arguments)._replace(expanded=None)

        def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
            return np.zeros(self.settings.length, dtype=np.uint32)

    federation = Federation(5, 1, 1, dimension=16)
    network = federation.network()
    for client in network.clients.values():
        client._scheme_class = Unmasked
    network.inputs[2] = Update(np.full(16, 777.0), 61)
    network.start().finish()
    form = np.full(2, 777 * 61, dtype="<u4").tobytes()
    assert any(form in data for _, _, data in network.wire)
