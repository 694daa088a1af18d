"""Snapshots of a client in an epoch: wherever it is cut and restored, it does the same."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from async_driver import HONEST, MALICIOUS, AsyncFederation, model_of
from driver import CountingEntropy

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import (
    DecodeError,
    LocalProtocolError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol import kept_shares
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.client import Client, Registered
from lightsecagg.protocol.client_machine import SNAPSHOT_VERSION, Closed
from lightsecagg.protocol.interface import SERVER, Phase, Update
from lightsecagg.protocol.kept_shares import Signed
from lightsecagg.protocol.messages import Message, Report, Reports, ReportsWanted, SumRequest
from lightsecagg.protocol.settings import Settings

BOTH = pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])


class Travellers(AsyncFederation):
    """A reproducible federation, whose clients may move to a new process after every call."""

    def __init__(self, moving: bool, **options: Any) -> None:
        super().__init__(entropy=CountingEntropy, **options)
        self.moving = moving
        self.wire: list[bytes] = []
        self.seen: set[str] = set()

    def carry(self, packet: Packet) -> Any:
        self.wire.append(packet.data)
        return super().carry(packet)

    def deliver(self, packet: Packet) -> None:
        super().deliver(packet)
        self.move(packet.recipient)

    def upload(self, client: int, version: int = 0) -> Any:
        tag = super().upload(client, version)
        self.move(client)
        return tag

    def leave(self, client: int) -> None:
        super().leave(client)
        self.move(client)

    def restock(self, client: int) -> None:
        self.send(client, self.clients[client].restock())
        self.move(client)

    def move(self, client: int) -> None:
        if client == SERVER:
            return
        party = self.clients[client]
        self.seen.add(repr(party.state))
        if self.moving:
            moved = restore(self, client, party.snapshot(), party.generation)
            assert moved.snapshot() == party.snapshot()
            assert (moved.stock, moved.room, moved.time) == (party.stock, party.room, party.time)
            self.clients[client] = moved


def restore(
    fed: AsyncFederation, client: int, snapshot: bytes, generation: int = 0, **changes: Any
) -> Client:
    arguments = {
        "identity": fed.keys[client],
        "policy": fed.policy,
        "entropy": fed.sources[client],
    } | changes
    return Client.restore(snapshot, generation=generation, **arguments)


def history(fed: Travellers, seed: int) -> None:
    """Uploads, deliveries in any order, departures, returns, deadlines and early flushes."""
    rng = random.Random(seed)
    fed.open()
    for _ in range(80):
        client = rng.randrange(6)
        party = fed.clients[client]
        match rng.choice(["upload"] * 4 + ["deliver"] * 6 + ["leave", "rejoin", "time", "flush"]):
            case "upload" if client not in fed.away:
                if party.stock < 2 and party.room:
                    fed.restock(client)
                if fed.clients[client].stock:
                    fed.upload(client, max(0, fed.server.time - rng.randrange(4)))
            case "deliver":
                for _ in range(rng.randrange(1, 30)):
                    if links := fed.busy():
                        fed.deliver(fed.take(*rng.choice(links)))
            case "leave" if len(fed.away) < 2:
                fed.leave(client)
            case "rejoin":
                fed.rejoin(client)
            case "time" if fed.server.phase is not Phase.UPLOAD:
                fed.call(SERVER, fed.server.proceed)
            case "flush":
                with suppress(LocalProtocolError):
                    fed.call(SERVER, fed.server.flush)
    for client in sorted(fed.away):
        fed.rejoin(client)
    fed.settle()
    for client in range(6):  # whatever was lost before, now a buffer is recovered
        if not fed.clients[client].stock and fed.clients[client].room:
            fed.restock(client)
            fed.settle()
        if fed.clients[client].stock:
            fed.upload(client, fed.server.time)
            fed.settle()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
@BOTH
def test_R32_a_client_that_moves_to_a_new_process_after_every_call_does_the_same(
    threat_model: ThreatModel, share_mode: ShareMode, seed: int
) -> None:
    runs = []
    for moving in (False, True):
        fed = Travellers(moving, threat_model=threat_model, share_mode=share_mode)
        history(fed, seed)
        fed.assert_exact()
        runs.append(fed)
    stayed, moved = runs
    assert stayed.wire == moved.wire, "bit for bit the same messages"
    assert len(stayed.results) == len(moved.results) > 0
    assert stayed.refusals == moved.refusals
    assert {"Advertised", "Holding", "Answered"} <= stayed.seen


@pytest.mark.parametrize("share_mode", list(ShareMode))
def test_R32_a_client_that_keeps_no_masks_ahead_says_the_same(share_mode: ShareMode) -> None:
    wires = []
    for keeps in (True, False):
        fed = Travellers(False, share_mode=share_mode, scale=0.0, strict=True)
        for party in fed.clients.values():
            party.keeps_masks = keeps
        fed.open()
        expanded = [len(party._contributor.masks._masks) for party in fed.clients.values()]
        assert set(expanded) == {2 if keeps and share_mode is ShareMode.SEEDED else 0}
        for client in range(4):
            fed.upload(client)
        fed.settle()
        assert len(fed.results) == 1
        wires.append(fed.wire)
    assert wires[0] == wires[1], "bit for bit the same messages"


class TravellersWithParts(Travellers):
    """Their shares and answers stay on a shelf, from which the spent ones are taken away."""

    def __init__(self, moving: bool, **options: Any) -> None:
        super().__init__(moving, **options)
        self.shelves: dict[int, dict[bytes, bytes]] = {}
        self.put = 0

    def move(self, client: int) -> None:
        if client == SERVER or not self.moving:
            return
        party = self.clients[client]
        shelf = self.shelves.setdefault(client, {})
        content, parts, needed = party.snapshot_apart()
        assert not parts.keys() & shelf.keys(), "every part is stored once"
        self.put += len(parts)
        self.shelves[client] = {digest: (shelf | parts)[digest] for digest in needed}
        moved = restore(self, client, content, party.generation)
        assert moved.needed_parts == needed
        assert moved.snapshot_apart() == (content, {}, needed)
        moved.parts = self.shelves[client]
        self.clients[client] = moved


@BOTH
def test_R32_a_client_whose_shares_are_kept_apart_does_the_same(
    threat_model: ThreatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_shares, "SMALL", 8)  # a share of these short vectors is large
    runs = []
    for moving in (False, True):
        fed = TravellersWithParts(moving, threat_model=threat_model, share_mode=ShareMode.PAPER)
        history(fed, 0)
        fed.assert_exact()
        runs.append(fed)
    stayed, moved = runs
    assert stayed.wire == moved.wire, "bit for bit the same messages"
    assert len(moved.results) > 0
    assert moved.put > sum(map(len, moved.shelves.values())) > 0, "spent parts leave the shelf"


# -- one snapshot of each state ----------------------------------------------------------------

STATES = ("Waiting", "Advertised", "Holding", "Signed", "Answered", "Closed")


@cache
def scene() -> tuple[AsyncFederation, dict[str, bytes], dict[str, Message]]:
    """A federation, client 0's snapshots on the way, and the messages that led on."""
    fed = AsyncFederation(threat_model=MALICIOUS, dropouts=2, survivors=4)
    party, snapshots, messages = fed.clients[0], {}, {}
    snapshots["Waiting"] = party.snapshot()
    fed.call(SERVER, fed.server.start)
    while links := fed.busy():
        packet = fed.take(*links[0])
        fed.deliver(packet)
        snapshots.setdefault(repr(party.state), party.snapshot())
    for client in fed.clients:
        fed.send(client, fed.clients[client].restock(2))
    fed.settle()
    for client in range(4):
        fed.upload(client)
    snapshots["Holding"] = party.snapshot()
    while links := fed.busy():
        packet = fed.take(*links[0])
        if packet.recipient == 0:
            messages[packet.kind.__name__] = fed.codec.decode(packet.data)
        fed.deliver(packet)
        snapshots.setdefault(repr(party.state), party.snapshot())
    fed.assert_exact()
    assert len(fed.results) == 1
    party.abort("the test is over")
    snapshots["Closed"] = party.snapshot()
    assert set(snapshots) == set(STATES)
    return fed, snapshots, messages


@pytest.mark.parametrize("state", STATES)
def test_S06_an_older_snapshot_is_refused(state: str) -> None:
    fed, snapshots, _ = scene()
    newest = fed.clients[0].generation + 1
    with pytest.raises(MaskAlreadyUsed, match="could answer twice"):
        restore(fed, 0, snapshots[state], newest)
    restore(fed, 0, snapshots[state])


def test_S06_without_the_generation_a_rolled_back_client_would_answer_twice() -> None:
    """What the driver's order prevents: the old snapshot still holds the burnt shares."""
    fed, snapshots, messages = scene()
    first = messages["SumRequest"]
    assert isinstance(first, SumRequest)
    answered = restore(fed, 0, snapshots["Answered"])
    smaller = SumRequest(first.time + 1, first.tags[:-1])
    with pytest.raises(RemoteProtocolError):
        answered.receive(SERVER, SumRequest(first.time, first.tags[:-1]))
    assert answered.receive(SERVER, smaller)[0].message.missing  # type: ignore[union-attr]
    rolled_back = restore(fed, 0, snapshots["Holding"])
    rolled_back.receive(SERVER, SumRequest(first.time, first.tags[:-1]))
    assert isinstance(rolled_back.state.holder, Signed)  # type: ignore[union-attr], "a second, different buffer of one time"
    with pytest.raises(MaskAlreadyUsed, match="could answer twice"):
        restore(fed, 0, snapshots["Holding"], answered.generation)


def test_S06_a_mask_is_used_once_although_its_owner_was_restored() -> None:
    fed = AsyncFederation().open()
    party = fed.clients[0]
    before = party.snapshot()
    party.set_input(Update(np.ones(11)), 0, model_of(0))
    with pytest.raises(MaskAlreadyUsed, match="could answer twice"):
        restore(fed, 0, before, party.generation)
    moved = restore(fed, 0, party.snapshot(), party.generation)
    assert list(moved.state.contributor.stock) == [1]  # type: ignore[union-attr]
    with pytest.raises(MaskAlreadyUsed, match="spent"):
        moved.set_input(Update(np.ones(11)), 0, model_of(0))


def test_S46_a_restored_client_reports_the_same_again() -> None:
    fed = AsyncFederation().open()
    (mask,) = [ref for ref in fed.server.intake.stock.reports if ref == (1, 0)]
    said = fed.server.intake.stock.reports[mask][0]
    moved = restore(fed, 0, fed.clients[0].snapshot())
    (again,) = moved.receive(SERVER, ReportsWanted((tuple(mask),)))
    assert again.message == Reports((Report(1, 0, said.tobytes()),))  # type: ignore[union-attr]


@pytest.mark.parametrize("state", STATES)
def test_malformed_snapshots_are_refused(state: str) -> None:
    fed, snapshots, _ = scene()
    snapshot = snapshots[state]
    rng = np.random.default_rng(1)
    for position in rng.integers(0, len(snapshot), 100):
        altered = bytearray(snapshot)
        altered[position] ^= 1 << int(rng.integers(8))
        with pytest.raises(DecodeError, match="malformed"):
            restore(fed, 0, bytes(altered))
    for length in (0, 1, 31, 32, 33, len(snapshot) - 1):
        with pytest.raises(DecodeError, match="malformed"):
            restore(fed, 0, snapshot[:length])
    with pytest.raises(DecodeError, match="malformed"):
        restore(fed, 0, snapshot + b"\0")


def reseal(payload: bytes) -> bytes:
    """With a good checksum: whoever wrote it meant it."""
    return context_hash("client snapshot", payload) + payload


def test_S41_a_snapshot_that_holds_something_else_is_refused_whatever_its_checksum() -> None:
    fed, snapshots, _ = scene()
    payload = snapshots["Holding"][HASH_LENGTH:]
    with pytest.raises(DecodeError, match="malformed snapshot"):
        restore(fed, 0, reseal(payload[:-1]))
    with pytest.raises(DecodeError, match="malformed snapshot"):
        restore(fed, 0, reseal(b"\x91" * 5000))
    fields = msgspec.msgpack.decode(payload)
    for change_of in (
        {"state": {"type": "Sharing"}},
        {"state": fields["state"] | {"holder": fields["state"]["holder"] | {"time": "soon"}}},
        {"state": fields["state"] | {"more": 1}},
        {"ledger": b""},
    ):
        with pytest.raises(DecodeError, match="malformed"):
            restore(fed, 0, reseal(msgspec.msgpack.encode(fields | change_of)))


def test_R37_a_snapshot_of_another_version_is_refused_with_a_clear_message() -> None:
    fed, snapshots, _ = scene()
    fields = msgspec.msgpack.decode(snapshots["Holding"][HASH_LENGTH:])
    assert fields["version"] == SNAPSHOT_VERSION
    newer = msgspec.msgpack.encode(fields | {"version": SNAPSHOT_VERSION + 1})
    with pytest.raises(DecodeError, match="version 5 is not read by this release, which has 4"):
        restore(fed, 0, reseal(newer))


def test_a_snapshot_of_an_epoch_is_none_of_a_round() -> None:
    fed, snapshots, _ = scene()
    arguments = (fed.keys[0], replace(fed.policy, buffering=None), 0)
    with pytest.raises(RemoteProtocolError, match="other asynchronous settings"):
        Client.restore(snapshots["Holding"], *arguments)


def test_a_snapshot_belongs_to_its_client_its_policy_and_its_session() -> None:
    fed, snapshots, _ = scene()
    snapshot = snapshots["Signed"]
    with pytest.raises(ParameterError, match="not on the allow-list with this identity"):
        restore(fed, 0, snapshot, identity=fed.keys[1])
    with pytest.raises(ParameterError, match="not on the allow-list with this identity"):
        restore(fed, 0, snapshot, identity=IdentityKey.generate())
    with pytest.raises(RemoteProtocolError, match="another session"):
        restore(fed, 0, snapshot, policy=replace(fed.policy, session=b"?" * 32))
    fewer = AllowList({c: fed.allow_list[c] for c in range(3)})
    with pytest.raises(RemoteProtocolError, match="another allow-list"):
        restore(fed, 0, snapshot, policy=replace(fed.policy, allow_list=fewer))
    with pytest.raises(RemoteProtocolError, match="T = 1, this client demands 2"):
        restore(fed, 0, snapshot, policy=replace(fed.policy, privacy=2))
    with pytest.raises(RemoteProtocolError, match="other asynchronous settings"):
        restore(fed, 0, snapshot, policy=replace(fed.policy, buffering=None))
    with pytest.raises(DecodeError, match="a snapshot of lightsecagg"):
        restore(fed, 0, snapshot, policy=replace(fed.policy, protocols=("secagg",)))


def test_S07_an_epoch_that_was_given_up_leaves_no_secret_in_a_snapshot() -> None:
    fed, snapshots, _ = scene()
    party = restore(fed, 0, snapshots["Signed"])
    state = party.state
    assert isinstance(state, Registered)
    assert isinstance(state.holder, Signed)
    assert state.contributor is not None
    masks = [mask.secret for mask in state.contributor.stock.values()]
    secrets = [*state.private_keys, *masks, state.holder.answer]
    secrets += [kept.share[1] for of in state.holder.kept.values() for kept in of.values()]
    assert all(secret in party.snapshot() for secret in secrets)
    party.abort("enough")
    assert isinstance(party.state, Closed)
    assert not any(secret in party.snapshot() for secret in secrets)
    assert not party._contributor.masks.nbytes


def test_S22_a_restored_party_prints_nothing_secret() -> None:
    fed, snapshots, _ = scene()
    for state in STATES:
        party = restore(fed, 0, snapshots[state])
        assert repr(party) == f"Client(client=0, state={state})"
        if isinstance(party.state, Registered):
            assert {repr(k) for of in party.state.holder.kept.values() for k in of.values()} <= {
                f"KeptShare(since={since})" for since in (None, 0)
            }


# -- sizes -------------------------------------------------------------------------------------


def test_a_seeded_snapshot_holds_seeds_and_no_mask() -> None:
    """The peers' explicit shares, of which there are N - U, are all that grows with d."""
    sizes = {}
    for mode in (ShareMode.PAPER, ShareMode.SEEDED):
        fed = AsyncFederation(dimension=30_000, share_mode=mode, stock=2, survivors=5)
        sizes[mode] = len(fed.open().clients[0].snapshot())
        settings: Settings = fed.settings
    share, U = 4 * settings.shared_length, settings.parameters.survivors
    explicit = 2 * (6 - U)  # of the peers, and the own one, of two masks each
    assert sizes[ShareMode.SEEDED] < explicit * share + 10_000
    assert sizes[ShareMode.PAPER] > 2 * (4 * settings.length + 6 * share)


def test_a_snapshot_of_a_client_to_which_all_send_seeds_has_kilobytes_whatever_d() -> None:
    fed = AsyncFederation(dimension=100_000, dropouts=0, survivors=6).open()
    party = fed.clients[0]
    assert len(party.snapshot()) < 16_000
    moved = restore(fed, 0, party.snapshot())
    assert not moved._contributor.masks.nbytes
    update = Update(np.ones(100_000))
    one, two = (p.set_input(update, 0, model_of(0))[-1] for p in (party, moved))
    assert one == two, "the mask was derived from its seeds again"
