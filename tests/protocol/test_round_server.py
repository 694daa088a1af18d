"""What a server takes in each phase, and what it refuses, ignores or counts (S29, R33)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from bundles import Part, whole
from disk import Disk
from driver import HONEST, MALICIOUS, Federation, Network

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffers import sum_statement
from lightsecagg.protocol.interface import SERVER, Phase, RoundAborted, Send
from lightsecagg.protocol.jobs import at_once
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
    Consent,
    MaskedUpload,
    Message,
    Opening,
    Refusal,
    Report,
    Reports,
    Roster,
    SealedShare,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Tag,
    UnmaskingShares,
)
from lightsecagg.protocol.server import Server

PHASES = tuple(Phase)
KINDS = (
    Advertise,
    ShareBundle,
    Reports,
    MaskedUpload,
    Consent,
    AggregatedShare,
    Refusal,
    UnmaskingShares,
)

# t: taken   i: ignored and counted   d: like a dropout   c: the certificate again   x: refused
GENUINE = {
    Phase.ADVERTISE: "t x x x x x x x",
    Phase.SHARE: "i t x x x x x x",
    Phase.UPLOAD: "i i t t x x d x",
    Phase.AGREE: "i i i i t x t x",
    Phase.RECOVER: "i i i i c t t x",
    Phase.DONE: "i i i i i i i i",
}
OF_PHASE = dict(
    zip(PHASES, (Advertise, ShareBundle, MaskedUpload, Consent, AggregatedShare), strict=False)
)


class Stage:
    """A server kept at the beginning of every phase, with the messages that clients send it."""

    def __init__(self, threat_model: ThreatModel = MALICIOUS) -> None:
        self.federation = Federation(7, 1, 2, 4, threat_model)
        network = self.federation.network()
        self.kept: dict[Phase, Server] = {}
        self.sent: dict[tuple[int, type], list[Message]] = {}

        def tamper(sender: int, recipient: int, message: Part) -> list[Part]:
            if recipient == SERVER:
                sent = whole(message)
                self.sent.setdefault((sender, type(sent)), []).append(sent)
            return [message]

        network.tamper = tamper
        network.start()
        self._keep(network)
        while network.queue:
            network.step()
            self._keep(network)
        network.assert_exact(self.federation.ids)

    def _keep(self, network: Network) -> None:
        if network.server.phase not in self.kept:
            self.kept[network.server.phase] = copy.deepcopy(network.server)

    def server(self, phase: Phase) -> Server:
        return copy.deepcopy(self.kept[phase])

    def message(self, client: int, kind: type) -> Message:
        if kind is Refusal:
            return Refusal(0, (client,))
        if kind is UnmaskingShares:
            return UnmaskingShares(b"", b"")
        return self.sent[client, kind][0]


def first_share(scene: Stage, owner: int) -> SealedShare:
    bundle = scene.message(owner, ShareBundle)
    assert isinstance(bundle, ShareBundle)
    return bundle.shares[0]


@cache
def stage(threat_model: ThreatModel = MALICIOUS) -> Stage:
    return Stage(threat_model)


def _is_part(value: object) -> bool:
    kind = type(value)
    named = kind.__module__.startswith("lightsecagg.protocol.") and not issubclass(kind, Enum)
    return named and (hasattr(value, "__dict__") or hasattr(kind, "__slots__"))


def _fields_of(value: object) -> dict[str, Any]:
    slots = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )


def everything(server: object, seen: tuple[int, ...] = ()) -> Any:
    """All that a server knows, comparable; what its parts know included."""
    if id(server) in seen:
        return "itself"
    return {
        name: everything(value, (*seen, id(server))) if _is_part(value) else repr(value)
        for name, value in _fields_of(server).items()
        # What is kept for speed is no state.
        if name
        not in (
            "late_messages",
            "_encoded",
            "_witness",
            "settings",
            "_settings",
            "_scheme",
            "scheme",
            "_round",
        )
    }


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda k: KINDS[k].__name__)
def test_S29_every_phase_has_an_answer_to_every_message(phase: Phase, kind: int) -> None:
    scene = stage()
    client = scene.federation.ids[0]
    server = scene.server(phase)
    message = scene.message(client, KINDS[kind])
    expected = GENUINE[phase].split()[kind]
    if phase is Phase.UPLOAD and KINDS[kind] is MaskedUpload:
        server.receive(client, scene.message(client, Reports))  # which come first
    before, pending = everything(server), server.pending
    if expected == "x":
        with pytest.raises(RemoteProtocolError, match=f"client {client}"):
            server.receive(client, message)
        assert everything(server) == before
        assert not server.late_messages
        return
    outputs = server.receive(client, message)
    if expected == "c":
        assert outputs == [Send(client, server.in_flight.flight.certificate)]
        assert everything(server) == before
        return
    assert outputs == []
    if expected == "i":
        assert everything(server) == before
        assert server.late_messages[KINDS[kind].__name__] == 1
    else:
        assert everything(server) != before
        assert not server.late_messages
        partial = KINDS[kind] in (ShareBundle, Reports)
        assert server.pending == (pending if partial else pending - {client})


@pytest.mark.parametrize("phase", PHASES[:-1])
@pytest.mark.parametrize(
    "message",
    [
        Opening(b""),
        Roster(()),
        SharesClosed(()),
        SumRequest(0, ()),
        Certificate(0, ()),
        AbortRound("by a client"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_S29_a_server_takes_no_message_that_servers_send(phase: Phase, message: Message) -> None:
    server = stage().server(phase)
    before = everything(server)
    with pytest.raises(RemoteProtocolError, match="sent"):
        server.receive(stage().federation.ids[0], message)
    assert everything(server) == before


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("sender", [0, 1, 999, SERVER, -1])
def test_S29_a_server_listens_to_invited_clients_only(phase: Phase, sender: int) -> None:
    server = stage().server(phase)
    with pytest.raises(RemoteProtocolError, match="was not invited"):
        server.receive(sender, Refusal(0, ()))


@pytest.mark.parametrize("phase", PHASES[:-1])
@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_S29_a_repeated_message_changes_nothing(phase: Phase, threat_model: ThreatModel) -> None:
    scene = stage(threat_model)
    if phase not in scene.kept:
        assert phase is Phase.AGREE
        return
    kind = OF_PHASE[phase]
    client = scene.federation.ids[0]
    server = scene.server(phase)
    if kind is MaskedUpload:
        server.receive(client, scene.message(client, Reports))
    server.receive(client, scene.message(client, kind))
    before = everything(server)
    assert server.receive(client, scene.message(client, kind)) == []
    assert everything(server) == before


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_S29_a_client_that_was_dropped_is_late_with_everything(phase: Phase) -> None:
    scene = stage()
    client = scene.federation.ids[0]
    server = scene.server(phase)
    assert server.drop(client) == []
    assert server.drop(client) == [], "twice is once"
    assert client not in server.pending
    kind = OF_PHASE[phase]
    assert server.receive(client, scene.message(client, kind)) == []
    assert server.late_messages[kind.__name__] == 1


def forged(scene: Stage) -> dict[str, tuple[Phase, Callable[[int], Message], str]]:
    ids = scene.federation.ids
    other = ids[1]
    share = first_share(scene, ids[0])
    upload = scene.message(ids[0], MaskedUpload)
    assert isinstance(upload, MaskedUpload)
    reports = scene.message(ids[0], Reports)
    assert isinstance(reports, Reports)

    def sealed(**changes: Any) -> Callable[[int], Message]:
        fields = {
            "owner": share.owner,
            "recipient": share.recipient,
            "kind": share.kind,
            "length": share.length,
            "salt": share.salt,
            "sealed": share.sealed,
            "serial": 0,
            "mac": share.mac,
        }
        return lambda _client: whole(SealedShare(**(fields | changes)))

    vector = upload.vector
    return {
        "another's keys": (
            Phase.ADVERTISE,
            lambda _c: scene.message(other, Advertise),
            "does not verify",
        ),
        "no keys": (Phase.ADVERTISE, lambda _c: Advertise((), b""), "takes 1"),
        "low-order key": (
            Phase.ADVERTISE,
            lambda _c: Advertise((bytes(32),), b"s" * 64),
            "low order",
        ),
        "another's share": (Phase.SHARE, lambda _c: scene.message(other, ShareBundle), "sent a"),
        "a share for itself": (Phase.SHARE, sealed(recipient=ids[0]), "sent a share"),
        "a share for a stranger": (Phase.SHARE, sealed(recipient=999), "sent a share"),
        "a second mask": (Phase.SHARE, sealed(serial=1), "sent a share"),
        "a Shamir share": (Phase.SHARE, sealed(kind=ShareKind.SHAMIR), "SHAMIR"),
        "a long share": (Phase.SHARE, sealed(length=share.length + 4), "bytes"),
        "a short upload": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(upload.tag, vector[:-1].copy()),
            "elements instead of 8",
        ),
        "another upload than its tag says": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(upload.tag, np.roll(vector, 1)),
            "not what its tag says",
        ),
        "another's upload": (
            Phase.UPLOAD,
            lambda _c: scene.message(other, MaskedUpload),
            "under another's tag",
        ),
        "another header": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(msgspec.structs.replace(upload.tag, header=bytes(32)), vector),
            "another header",
        ),
        "another model": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(msgspec.structs.replace(upload.tag, model=b"m" * 32), vector),
            "one mask and one model",
        ),
        "another mask's upload": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(msgspec.structs.replace(upload.tag, serial=1), vector),
            "one mask and one model",
        ),
        "an upload of another version": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(msgspec.structs.replace(upload.tag, version=1), vector),
            "a model of the future",
        ),
        "a signed upload": (
            Phase.UPLOAD,
            lambda _c: MaskedUpload(msgspec.structs.replace(upload.tag, signature=b"s"), vector),
            "one mask and one model",
        ),
        "an upload without reports": (
            Phase.UPLOAD,
            lambda _c: upload,
            "before it had reported",
        ),
        "a report twice": (
            Phase.UPLOAD,
            lambda _c: Reports((reports.reports[0], *reports.reports)),
            "twice on one share",
        ),
        "a report on a stranger": (
            Phase.UPLOAD,
            lambda _c: Reports((Report(999, 0, bytes(16)),)),
            "not of this round",
        ),
        "a report on another mask": (
            Phase.UPLOAD,
            lambda _c: Reports((Report(other, 1, bytes(16)),)),
            "not of this round",
        ),
        "a short report": (
            Phase.UPLOAD,
            lambda _c: Reports((Report(other, 0, bytes(12)),)),
            "not 4 elements",
        ),
        "a report beyond the field": (
            Phase.UPLOAD,
            lambda _c: Reports((Report(other, 0, b"\xff" * 16),)),
            "not 4 elements",
        ),
        "another's signature": (
            Phase.AGREE,
            lambda _c: scene.message(other, Consent),
            "does not verify",
        ),
        "an empty signature": (Phase.AGREE, lambda _c: Consent(0, b""), "does not verify"),
        "a long answer": (
            Phase.RECOVER,
            lambda _c: AggregatedShare(np.zeros(9, dtype=np.uint32)),
            "elements instead of",
        ),
    }


@pytest.mark.parametrize("name", forged(stage()))
def test_S29_a_forged_message_is_refused_and_changes_nothing(name: str) -> None:
    scene = stage()
    phase, forge, match = forged(scene)[name]
    client = scene.federation.ids[0]
    server = scene.server(phase)
    before = everything(server)
    with pytest.raises(RemoteProtocolError, match=match):
        server.receive(client, forge(client))
    assert everything(server) == before
    # The genuine message is still welcome.
    if phase is Phase.UPLOAD:
        server.receive(client, scene.message(client, Reports))
    kind = OF_PHASE[phase]
    server.receive(client, scene.message(client, kind))
    assert everything(server) != before


def test_two_sets_of_keys_or_two_shares_for_one_peer_are_refused() -> None:
    scene = stage()
    me = scene.federation.ids[0]
    server = scene.server(Phase.ADVERTISE)
    keys = scene.message(me, Advertise)
    assert isinstance(keys, Advertise)
    server.receive(me, keys)
    with pytest.raises(RemoteProtocolError, match="two sets of keys"):
        server.receive(me, Advertise(keys.keys, b"?" * 64))
    server = scene.server(Phase.SHARE)
    share = first_share(scene, me)
    server.receive(me, whole(share))
    altered = replace(share, sealed=bytes(b ^ 1 for b in share.sealed))
    with pytest.raises(RemoteProtocolError, match="two shares"):
        server.receive(me, whole(altered))


def silenced(kind: type) -> tuple[Network, int]:
    """A network in the phase after `kind`, of which the first one of one client was lost."""
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    network = federation.network()
    silent = federation.ids[3]
    lost: list[Message] = []

    def lose(sender: int, _recipient: int, message: Message) -> list[Message]:
        if sender == silent and isinstance(message, kind) and not lost:
            lost.append(message)
            return []
        return [message]

    network.tamper = lose
    network.start().run()
    network.call(SERVER, network.server.proceed)
    return network, silent


def test_S29_a_client_that_is_not_on_the_roster_shares_nothing() -> None:
    network, silent = silenced(Advertise)
    server, peer = network.server, network.federation.ids[0]
    assert server.phase is Phase.SHARE
    share = SealedShare(silent, peer, ShareKind.SEED, 32, bytes(16), bytes(48))
    before = everything(server)
    with pytest.raises(RemoteProtocolError, match=f"client {silent} is not on the roster"):
        server.receive(silent, whole(share))
    assert everything(server) == before


def test_S29_a_client_whose_shares_are_incomplete_uploads_nothing() -> None:
    """Nobody could take its mask away from the sum. Nor does it report on anything."""
    network, silent = silenced(SealedShare)
    server = network.server
    assert server.phase is Phase.UPLOAD
    upload = MaskedUpload(Tag(silent), np.zeros(server.settings.length, dtype=np.uint32))
    before = everything(server)
    with pytest.raises(RemoteProtocolError, match=f"client {silent} had not shared its mask"):
        server.receive(silent, upload)
    with pytest.raises(RemoteProtocolError, match=f"client {silent} has nothing to report on"):
        server.receive(silent, Reports(()))
    assert everything(server) == before


def test_S46_a_client_reports_once_and_the_same_again() -> None:
    """Who could add, leave out or change a report later would accuse with the others' in hand."""
    scene = stage()
    server, client = scene.server(Phase.UPLOAD), scene.federation.ids[0]
    said = scene.message(client, Reports)
    assert isinstance(said, Reports)
    first, *others = said.reports
    server.receive(client, Reports(tuple(others)))
    before = everything(server)
    changed = msgspec.structs.replace(others[0], values=first.values)
    for reports in (said.reports, others[1:], (changed, *others[1:]), ()):
        with pytest.raises(RemoteProtocolError, match="reported twice, and not the same"):
            server.receive(client, Reports(tuple(reports)))
    assert server.receive(client, Reports(tuple(reversed(others)))) == []
    assert everything(server) == before


def test_S29_whatever_is_reported_after_U1_is_late() -> None:
    """U1 follows from the reports before it."""
    scene = stage()
    server, client = scene.server(Phase.AGREE), scene.federation.ids[0]
    said = scene.message(client, Reports)
    assert isinstance(said, Reports)
    before = everything(server)
    assert server.receive(client, Reports(said.reports[1:])) == []
    assert server.late_messages["Reports"] == 1
    server.late_messages.clear()
    assert everything(server) == before


def test_S29_a_client_outside_U1_neither_uploads_nor_signs_nor_answers_nor_refuses() -> None:
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    network = federation.network()
    left_out = federation.ids[3]
    network.train_at_once = False
    network.start().run()
    for client in sorted(network.waiting - {left_out}):
        network.train(client)
    network.run()
    network.call(SERVER, network.server.proceed)
    server = network.server
    assert left_out not in server.asked
    network.train(left_out)
    late, before = network.lose(left_out, SERVER), everything(server)
    assert [packet.kind for packet in late] == [Reports, MaskedUpload]
    for packet in late:
        assert server.receive(left_out, federation.codec.decode(packet.data)) == []
        assert server.late_messages[packet.kind.__name__] == 1
    assert everything(server) == before
    context = server._registration.scheme.round.context
    identity = federation.identities[left_out]
    valid = Consent(0, sum_statement(context, server.in_flight.flight.request).sign(identity))
    answer = AggregatedShare(np.zeros(server.settings.share_length, dtype=np.uint32))
    for message, phase in ((valid, Phase.AGREE), (answer, Phase.RECOVER)):
        network.run(until=lambda phase=phase: server.phase is phase)
        before = everything(server)
        with pytest.raises(RemoteProtocolError, match=f"{left_out} is not (in|asked)"):
            server.receive(left_out, message)
        with pytest.raises(RemoteProtocolError, match=f"{left_out} is not asked"):
            server.receive(left_out, Refusal(0, ()))
        assert everything(server) == before
    network.run().assert_exact(set(federation.ids) - {left_out})


def test_S19_a_share_in_the_name_of_another_client_is_not_relayed() -> None:
    scene = stage()
    server = scene.server(Phase.SHARE)
    forger, owner, recipient, *_ = scene.federation.ids
    theirs = scene.sent[owner, ShareBundle]
    share = next(
        b for b in theirs if isinstance(b, ShareBundle) and b.shares[0].recipient == recipient
    )
    before = everything(server)
    with pytest.raises(RemoteProtocolError, match=f"client {forger} sent a share from {owner}"):
        server.receive(forger, share)
    assert everything(server) == before


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_R33_who_was_dropped_from_a_round_stays_out_when_it_is_back(phase: Phase) -> None:
    scene = stage()
    server, client = scene.server(phase), scene.federation.ids[0]
    server.drop(client)
    server.rejoin(client)
    assert client not in server.pending
    assert server.receive(client, scene.message(client, OF_PHASE[phase])) == []
    assert server.late_messages[OF_PHASE[phase].__name__] == 1


def test_S29_all_is_late_once_the_answers_are_collected() -> None:
    scene = stage()
    server = scene.server(Phase.RECOVER)
    *most, last = scene.federation.ids
    for client in most:
        server.receive(client, scene.message(client, AggregatedShare))
    server.proceed()
    before = everything(server)
    for kind in (Consent, Refusal, AggregatedShare):
        assert server.receive(last, scene.message(last, kind)) == []
        assert server.late_messages[kind.__name__] == 1
    assert everything(server) == before


def test_S29_who_has_answered_gets_no_certificate_for_another_consent() -> None:
    scene = stage()
    server, client = scene.server(Phase.RECOVER), scene.federation.ids[0]
    consent = scene.message(client, Consent)
    (again,) = server.receive(client, consent)
    assert isinstance(again, Send)
    assert isinstance(again.message, Certificate)
    server.receive(client, scene.message(client, AggregatedShare))
    assert server.receive(client, consent) == []


@pytest.mark.parametrize("kind", [Consent, AggregatedShare, Refusal])
def test_S29_what_names_the_time_of_a_buffer_is_not_taken_in_a_round(kind: type) -> None:
    scene = stage()
    phase, client = (
        Phase.RECOVER if kind is AggregatedShare else Phase.AGREE,
        scene.federation.ids[0],
    )
    server = scene.server(phase)
    before = everything(server)
    message = scene.message(client, kind)
    assert isinstance(message, Consent | AggregatedShare | Refusal)
    change = replace if kind is AggregatedShare else msgspec.structs.replace
    assert server.receive(client, change(message, time=1)) == []
    assert server.late_messages[kind.__name__] == 1
    assert everything(server) == before


@pytest.mark.parametrize("last", [0, -1])
def test_R35_a_refusal_is_an_answer_that_ends_the_wait(last: int) -> None:
    """Whoever is waited for last: nobody waits for a client that has said that it cannot."""
    scene = stage()
    server, ids = scene.server(Phase.AGREE), scene.federation.ids
    for client in ids:
        if client != ids[last]:
            server.receive(client, scene.message(client, Consent))
    assert server.pending == {ids[last]}
    server.receive(ids[last], Refusal(0, (ids[1],)))
    assert server.phase is Phase.RECOVER
    assert server.refusals == {ids[last]: (ids[1],)}


def test_S29_shares_that_come_again_after_they_were_relayed_are_not_relayed_again() -> None:
    scene = stage()
    server, me = scene.server(Phase.SHARE), scene.federation.ids[0]
    shares = scene.sent[me, ShareBundle]
    for share in shares:
        assert server.receive(me, share) == []
    before = everything(server)
    for share in shares:
        assert server.receive(me, share) == []
    assert everything(server) == before
    assert [*server._sums.owners] == [me]  # type: ignore[attr-defined]


def test_an_incomplete_mask_is_never_relayed_and_the_others_travel_together() -> None:
    scene = stage()
    *owners, late = scene.federation.ids
    server = scene.server(Phase.SHARE)
    for owner in owners:
        for bundle in scene.sent[owner, ShareBundle]:
            assert server.receive(owner, bundle) == []
    for bundle in scene.sent[late, ShareBundle][:-1]:
        assert server.receive(late, bundle) == []
    outputs = [output for output in server.proceed() if isinstance(output, Send)]
    relayed = {o.to: o.message for o in outputs if isinstance(o.message, ShareBundle)}
    assert relayed.keys() == set(scene.federation.ids)
    for recipient, bundle in relayed.items():
        assert [share.owner for share in bundle.shares] == [o for o in owners if o != recipient]
        assert {share.recipient for share in bundle.shares} == {recipient}
    kinds = [type(output.message) for output in outputs]
    assert kinds == [ShareBundle] * 7 + [SharesClosed] * 6 + [AbortRound], "shares come first"


def test_proceed_and_drop_after_the_end_do_nothing() -> None:
    server = stage().server(Phase.DONE)
    assert server.proceed() == []
    assert server.drop(stage().federation.ids[0]) == []
    assert server.pending == frozenset()


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_R30_proceed_with_nothing_received_is_a_clean_abort(phase: Phase) -> None:
    server = stage().server(phase)
    outputs = at_once(server, server.proceed())
    (end,) = (output for output in outputs if isinstance(output, RoundAborted))
    reasons = {
        Phase.ADVERTISE: "0 clients advertised their keys, at least 5 are needed",
        Phase.SHARE: "0 clients shared their masks, at least 5 are needed",
        Phase.UPLOAD: "0 clients uploaded their masked updates, at least 5 are needed",
        Phase.AGREE: "0 clients signed, m = 5 are needed",
        Phase.RECOVER: "0 clients answered, U = 4 are needed",
    }
    assert reasons[phase] in end.reason
    told = {o.to for o in outputs if isinstance(o, Send) and isinstance(o.message, AbortRound)}
    assert told == set(stage().federation.ids)
    assert server.phase is Phase.DONE


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_R30_a_round_that_everybody_leaves_ends_once(phase: Phase) -> None:
    server, ids = stage().server(phase), stage().federation.ids
    outputs = at_once(server, [output for client in ids for output in server.drop(client)])
    assert [type(output) for output in outputs].count(RoundAborted) == 1
    assert server.phase is Phase.DONE


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_an_announced_survivor_set_never_changes(threat_model: ThreatModel) -> None:
    """Uploads that arrive after the announcement are late, dropouts do not shrink U1."""
    scene = stage(threat_model)
    phase = Phase.AGREE if threat_model is MALICIOUS else Phase.RECOVER
    server = scene.server(phase)
    announced = server.asked
    for client in scene.federation.ids[:2]:
        server.drop(client)
        server.receive(client, scene.message(client, MaskedUpload))
    assert server.asked == announced == scene.federation.ids


def test_R31_a_resumed_server_announces_the_same_set_and_ends_with_the_same_sum() -> None:
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    network = federation.network()
    network.server = Server(
        federation.settings(), federation.allow_list, federation.ids, durable=True
    )
    network.disk = Disk()
    gone = federation.ids[3]
    network.train_at_once = False
    network.start().run()
    network.dead.add(gone)
    for client in sorted(network.waiting - {gone}):
        network.train(client)
    network.run()
    assert network.server.phase is Phase.UPLOAD
    assert network.disk is not None
    network.server = resumed = network.disk.restored(federation.allow_list)
    assert resumed.pending == {gone}
    network.send(SERVER, resumed.resume())
    for client in federation.ids:
        network.send(SERVER, resumed.rejoin(client))
    network.finish().assert_exact(set(federation.ids) - {gone})


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_R33_a_client_that_reconnects_is_asked_again_and_answers_the_same(
    threat_model: ThreatModel,
) -> None:
    """Everything that a phase asks for is asked once more, in every phase."""
    federation = Federation(7, 1, 2, 4, threat_model)
    network = federation.network().start()
    asked: set[Phase] = set()
    while network.queue:
        if network.server.phase not in asked:
            asked.add(network.server.phase)
            for client in federation.ids:
                network.send(SERVER, network.server.rejoin(client))
        network.step()
    assert asked >= set(PHASES[:-1]) - {Phase.AGREE}
    network.assert_exact(federation.ids)
    assert network.server.late_messages["Advertise"] == len(federation.ids)
    answers: dict[int, set[bytes]] = {}
    for sender, _, data in network.wire:
        if isinstance(federation.codec.decode(data), AggregatedShare):
            answers.setdefault(sender, set()).add(data)
    assert all(len(different) == 1 for different in answers.values())


@pytest.mark.parametrize("lost", [Opening, SharesClosed, SumRequest, Certificate])
def test_R33_what_a_client_has_not_heard_is_said_again(lost: type) -> None:
    """A message is lost with its connection; without it the round would go on without the client.

    It is the request for a client that has reconnected that brings it back, nothing else.
    """
    federation = Federation(7, 1, 2, 4, MALICIOUS)
    network = federation.network()
    client = federation.ids[3]
    losses: list[Message] = []

    def lose(_sender: int, recipient: int, message: Message) -> list[Message]:
        if recipient == client and isinstance(message, lost) and not losses:
            losses.append(message)
            return []
        return [message]

    network.tamper = lose
    network.start().run()
    assert network.server.pending == {client}
    outputs = network.server.rejoin(client)
    assert losses[0] in [output.message for output in outputs if isinstance(output, Send)]
    network.send(SERVER, outputs)
    network.run().assert_exact(federation.ids)


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_R33_a_client_is_asked_again_for_what_concerns_it_only(threat_model: ThreatModel) -> None:
    scene = stage(threat_model)
    certificate = [Certificate] if threat_model is MALICIOUS else []
    asked = {
        Phase.ADVERTISE: [Opening],
        Phase.SHARE: [],
        Phase.UPLOAD: [SharesClosed],
        Phase.AGREE: [SumRequest],
        Phase.RECOVER: [SumRequest, *certificate],
        Phase.DONE: [],
    }
    for phase in scene.kept:
        outputs = scene.server(phase).rejoin(scene.federation.ids[0])
        assert [type(o.message) for o in outputs if isinstance(o, Send)] == asked[phase]
        if phase is not Phase.ADVERTISE:
            assert scene.server(phase).rejoin(999) == []


def test_R33_sharing_is_not_closed_for_a_client_that_reconnects_while_others_share() -> None:
    """It would hear of other owners later, and refuse them."""
    scene = stage()
    server, client = scene.server(Phase.SHARE), scene.federation.ids[0]
    for bundle in scene.sent[client, ShareBundle]:
        server.receive(client, bundle)
    assert client not in server.pending
    assert server.rejoin(client) == []


def test_S01_a_server_is_made_for_its_protocol_and_its_allow_list() -> None:
    federation = Federation()
    with pytest.raises(ParameterError, match="protocol 'morse' is unknown"):
        replace(federation.settings(), protocol="morse")
    foreign = Federation(clients=7).allow_list
    with pytest.raises(ParameterError, match="another allow-list"):
        Server(federation.settings(), foreign, federation.ids)
