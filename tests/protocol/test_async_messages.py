"""S29 in the asynchronous mode: every message at every moment, duplicates, and bounded memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from async_driver import HONEST, MALICIOUS, AsyncFederation, change, model_of
from bundles import shares_in, whole

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import LocalProtocolError, ParameterError, RemoteProtocolError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol import holder
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import Rules, choose_updates, sum_statement
from lightsecagg.protocol.client import TRANSITIONS, Registered
from lightsecagg.protocol.client_machine import Advertised
from lightsecagg.protocol.interface import SERVER, Phase, Send, Update
from lightsecagg.protocol.kept_shares import AnyHolding
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
from lightsecagg.protocol.roster import sign_keys
from lightsecagg.protocol.server import Server

ME = 5
NOTHING = np.zeros(0, dtype=np.uint32)


def registered(**options: Any) -> AsyncFederation:
    fed = AsyncFederation(**options)
    fed.call(SERVER, fed.server.start)
    fed.settle()
    return fed


def shares_of(fed: AsyncFederation, owner: int) -> list[SealedShare]:
    return shares_in(fed.clients[owner].restock())


def share_beyond_the_cap(fed: AsyncFederation, owner: int) -> None:
    """What an owner does who does not care how many shares its peers keep."""
    change(fed.clients[owner], stock={}, outstanding=())
    fed.send(owner, fed.clients[owner].restock())
    fed.settle()


# -- a client at every moment ------------------------------------------------------------------

MOMENTS = ("new", "advertised", "registered", "signed", "answered", "closed")


def client_at(moment: str) -> tuple[AsyncFederation, dict[type, Message]]:
    """A federation whose client 5 has come this far, and a good message of each kind for it."""
    fed = AsyncFederation(threat_model=MALICIOUS, dropouts=2, survivors=4)
    messages: dict[type, Message] = {Opening: Opening(fed.settings.to_bytes())}
    messages[AbortRound] = AbortRound("over")
    messages[UploadDropped] = UploadDropped(0)
    if moment == "new":
        return fed, late_messages() | messages
    fed.call(SERVER, fed.server.start)
    for client in fed.clients:
        fed.step_down(client)
        fed.step_up(client)
    messages[Roster] = fed.under_way(SERVER, ME)[0]
    if moment == "advertised":
        return fed, late_messages() | messages
    fed.settle()
    for client, party in fed.clients.items():
        fed.send(client, party.restock(2))
    fed.settle()
    fresh = next(share for share in shares_of(fed, 0) if share.recipient == ME)
    messages[ShareBundle] = whole(fresh)
    messages[ReportsWanted] = ReportsWanted(((0, 1),))
    tags = tuple(fed.make_upload(client, 0).tag for client in (0, 1, 2, ME))
    buffer = messages[SumRequest] = SumRequest(0, tags)
    messages[Certificate] = Certificate(
        0,
        tuple(
            (
                c,
                sum_statement(fed.server._registration.scheme.round.context, buffer).sign(
                    fed.keys[c]
                ),
            )
            for c in range(4)
        ),
    )
    if moment in ("signed", "answered"):
        fed.tell(ME, buffer)
    if moment == "answered":
        fed.tell(ME, messages[Certificate])
    if moment == "closed":
        fed.tell(ME, AbortRound("over"))
    return fed, messages


def late_messages() -> dict[type, Message]:
    """Of another federation: nothing in them fits, and they are refused before that matters."""
    return client_at("registered")[1]


OK, IGNORED, REFUSED = "taken", "ignored and counted", "refused"
ANSWERS: dict[type, tuple[str, str, str, str, str, str]] = {
    Opening: (OK, OK, IGNORED, IGNORED, IGNORED, REFUSED),
    Roster: (REFUSED, OK, IGNORED, IGNORED, IGNORED, REFUSED),
    ShareBundle: (REFUSED, REFUSED, OK, OK, OK, REFUSED),
    SumRequest: (REFUSED, REFUSED, OK, OK, OK, REFUSED),
    Certificate: (REFUSED, REFUSED, REFUSED, OK, OK, REFUSED),
    ReportsWanted: (REFUSED, REFUSED, OK, OK, OK, REFUSED),
    UploadDropped: (IGNORED, IGNORED, OK, IGNORED, IGNORED, REFUSED),
    AbortRound: (OK, OK, OK, OK, OK, OK),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_S29_every_message_has_its_answer_at_every_moment(moment: str, kind: type) -> None:
    fed, messages = client_at(moment)
    party = fed.clients[ME]
    before = party.late_messages.total()
    expected = ANSWERS[kind][MOMENTS.index(moment)]
    if expected == REFUSED:
        with pytest.raises(RemoteProtocolError):
            fed.tell(ME, messages[kind])
    else:
        fed.tell(ME, messages[kind])
    assert party.late_messages.total() - before == (expected == IGNORED)


def test_S29_the_matrix_above_is_the_whole_table() -> None:
    """Every transition of the table is a cell that is not refused, and the other way round."""
    states = ("Waiting", "Advertised", "Holding", "Signed", "Answered", "Closed")
    allowed = {
        (state, kind.__name__)
        for kind, cells in ANSWERS.items()
        for state, cell in zip(states, cells, strict=True)
        if cell != REFUSED
    }
    taken = {(state.__name__, kind.__name__) for state, kind in holder.TRANSITIONS}
    for state, kind in TRANSITIONS:
        if state is not Registered:
            taken.add((state.__name__, kind.__name__))
        elif kind not in {SharesClosed} | {kind for _, kind in holder.TRANSITIONS}:  # of rounds
            taken.update((of.__name__, kind.__name__) for of in get_args(AnyHolding))
    assert allowed == taken


@pytest.mark.parametrize("moment", MOMENTS)
def test_S29_messages_that_are_not_for_a_client_are_refused(moment: str) -> None:
    fed, _ = client_at(moment)
    for message in (
        Advertise((), b""),
        SharesClosed(()),
        MaskedUpload(Tag(999), NOTHING),
        SumRequest(0, tuple(map(Tag, (0, 1, 2, ME)))),  # of a round
        Consent(0, b""),
        Refusal(0, ()),
        AggregatedShare(NOTHING),
        UnmaskingShares(b"", b""),
    ):
        with pytest.raises(RemoteProtocolError):
            fed.tell(ME, message)


def test_S29_a_client_listens_to_the_server_only() -> None:
    fed = AsyncFederation()
    with pytest.raises(RemoteProtocolError, match="only listens to the server"):
        fed.clients[0].receive(1, Opening(fed.settings.to_bytes()))


def test_S02_one_roster_and_one_opening_per_epoch() -> None:
    fed, messages = client_at("registered")
    roster = messages[Roster]
    assert isinstance(roster, Roster)
    with pytest.raises(RemoteProtocolError, match="different roster in one epoch"):
        fed.tell(ME, Roster(roster.members[::-1]))
    with pytest.raises(RemoteProtocolError, match="two epochs at once"):
        fed.tell(ME, Opening(replace(fed.settings, round=2).to_bytes()))
    new = AsyncFederation()
    with pytest.raises(RemoteProtocolError, match="Opening refused: malformed settings"):
        new.tell(ME, Opening(b"junk"))


# -- a client's memory -------------------------------------------------------------------------


def test_S28_a_server_that_drops_every_upload_costs_a_client_no_memory() -> None:
    fed = AsyncFederation(stock=2, max_attempts=1000).open(masks=1)
    party = fed.clients[0]
    for _ in range(6):
        tag = fed.upload(0)
        fed.tell(0, UploadDropped(tag.serial))
        party.restock()
    assert party.room == 1
    assert sorted(party.state.holder.kept[0]) == [5, 6]
    assert party.late_messages.total() == 0
    fed.tell(0, UploadDropped(0))  # again
    fed.tell(0, UploadDropped(6))  # is in stock, not uploaded: nothing to drop
    assert party.late_messages == {"UploadDropped": 2}
    assert party.stock == 1


def test_S28_models_are_remembered_for_as_long_as_updates_of_them_may_come() -> None:
    fed = AsyncFederation().open()
    for time in range(10):
        for owner in range(4):
            if not fed.clients[owner].stock:
                fed.send(owner, fed.clients[owner].restock())
                fed.settle()
            fed.upload(owner, time)
            fed.settle()
    assert len(fed.results) == 10
    tau_max = fed.buffering.table.max_staleness
    assert sorted(fed.clients[5].state.holder.models) == list(range(9 - tau_max, 10))
    assert sorted(fed.server.intake.queue.models.known) == list(range(9 - tau_max, 11))


# -- what travels ------------------------------------------------------------------------------


@pytest.mark.parametrize("share_mode", [ShareMode.PAPER, ShareMode.SEEDED])
def test_S16_the_wire_carries_no_canary(share_mode: ShareMode) -> None:
    """Neither the update's floats nor its quantised entries are in any message, of either way."""
    fed = AsyncFederation(share_mode=share_mode)
    wire: list[bytes] = []
    encode = fed.codec.encode

    def tapped(message: Message) -> bytes:
        data = encode(message)
        wire.append(data)
        return data

    fed.codec.encode = tapped  # type: ignore[method-assign]
    fed.open()
    canary = np.array([719, -613, 811, -997, 509, 601, -733, 877, 941, -557, 653], dtype=np.float64)
    (sent,) = fed.clients[0].set_input(Update(canary), 0, model_of(0))
    assert isinstance(sent, Send)
    fed.updates[0, 0] = (canary.astype(np.int64) % fed.field.modulus).astype(np.uint32)
    fed.send(0, [sent])
    for owner in (1, 2, 3):
        fed.upload(owner)
        fed.settle()
    fed.assert_exact()
    assert len(fed.results) == 1
    captured = b"|".join(wire)
    assert len(captured) > 5000
    for entry, quantised in zip(canary, fed.updates[0, 0], strict=True):
        assert entry.tobytes() not in captured
        assert np.float32(entry).tobytes() not in captured
        assert quantised.tobytes() not in captured


# -- the server: registration ------------------------------------------------------------------


def test_a_server_is_made_for_its_allow_list_protocol_and_guests() -> None:
    fed = AsyncFederation()
    keys = {client: IdentityKey.generate().public for client in range(6)}
    with pytest.raises(ParameterError, match="another allow-list"):
        Server(fed.settings, AllowList(keys), buffer_size=4)
    quantizer = replace(fed.settings.quantizer, summands=6)
    rounds = replace(fed.settings, buffering=None, quantizer=quantizer)
    with pytest.raises(ParameterError, match="buffers need settings with buffering"):
        Server(rounds, fed.allow_list, buffer_size=4)
    with pytest.raises(ParameterError, match="4 clients are invited; these parameters take 5"):
        Server(fed.settings, fed.allow_list, buffer_size=4, invited=range(4))
    fed.server.start()
    with pytest.raises(LocalProtocolError, match="started already"):
        fed.server.start()


def test_S29_keys_are_advertised_once_and_signed() -> None:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    fed.step_down(0)
    good = fed.under_way(0, SERVER)[0]
    assert isinstance(good, Advertise)
    with pytest.raises(RemoteProtocolError, match="keys of client 0 refused"):
        fed.server.receive(0, Advertise(good.keys, bytes(64)))
    assert fed.server.receive(0, good) == []
    assert fed.server.receive(0, good) == []
    other = IdentityKey.generate().public
    twice = Advertise((other,), sign_keys(fed.keys[0], fed.settings.context, 0, (other,)))
    with pytest.raises(RemoteProtocolError, match="advertised two sets of keys"):
        fed.server.receive(0, twice)
    fed.settle()
    fed.server.receive(0, good)
    assert fed.server.late_messages == {"Advertise": 3}  # one of them from the queue


def test_R30_a_client_that_was_away_when_the_roster_came_still_takes_part() -> None:
    fed = AsyncFederation(dropouts=0)
    fed.call(SERVER, fed.server.start)
    for client in fed.clients:
        fed.step_down(client)
    fed.step_up(5)
    fed.leave(5)
    fed.settle()
    for client in range(5):
        fed.send(client, fed.clients[client].restock())
    fed.settle()
    assert isinstance(fed.clients[5].state, Advertised)
    fed.lose(SERVER, 5)  # the roster was sent to nobody
    fed.rejoin(5)
    fed.settle()
    fed.send(5, fed.clients[5].restock())
    for owner in (0, 1, 2, 5):
        fed.upload(owner)
        fed.settle()
    assert [result.responders for result in fed.results] == [(0, 1, 2, 3, 4, 5)]
    fed.assert_exact()
    fed.leave(5)
    fed.rejoin(5)
    assert not fed.on(SERVER, 5)  # it has the roster: its shares say so


def test_R30_a_client_that_missed_the_opening_gets_it_on_return() -> None:
    fed = AsyncFederation()
    fed.call(SERVER, fed.server.start)
    fed.leave(5)
    assert fed.server.phase is Phase.ADVERTISE
    fed.rejoin(5)
    fed.settle()
    assert fed.server.phase is Phase.UPLOAD
    assert isinstance(fed.clients[5].state, Registered)


# -- the server: stock -------------------------------------------------------------------------


def test_S29_the_server_relays_good_shares_only() -> None:
    fed = registered()
    shares = shares_of(fed, 0)
    first = shares[0]
    for bad in (
        replace(first, owner=1),
        replace(first, recipient=0),
        replace(first, recipient=77),
        replace(first, length=first.length + 4),
    ):
        with pytest.raises(RemoteProtocolError, match=r"client 0 sent a share"):
            fed.server.receive(0, whole(bad))
    outputs = [
        output for share in (first, *shares) for output in fed.server.receive(0, whole(share))
    ]
    assert outputs == [], "shares wait for others that go to the same clients"
    outputs = fed.server.intake.relay()
    sent = [output for output in outputs if isinstance(output, Send)]
    assert {o.to for o in sent if isinstance(o.message, ShareBundle)} == {1, 2, 3, 4, 5}
    assert fed.server.late_messages == {"ShareBundle": 1}  # the first one again
    assert [fed.server.receive(0, whole(share)) for share in shares] == [[]] * 5  # the mask again
    assert fed.server.late_messages == {"ShareBundle": 6}


def test_S28_masks_that_were_cut_off_under_way_neither_pile_up_nor_block_the_next() -> None:
    fed = registered(stock=2)
    for serial in range(5):
        fed.clients[0].state.contributor.stock.clear()
        for share in shares_of(fed, 0)[:-1]:  # the connection breaks before the last one
            fed.server.receive(0, whole(share))
        assert fed.server.intake.stock.relay.begun[0][0] == serial
        assert len(fed.server.intake.stock.relay.begun[0][1]) == 4
    fed.clients[0].state.contributor.stock.clear()
    outputs = [
        output for share in shares_of(fed, 0) for output in fed.server.receive(0, whole(share))
    ]
    outputs += fed.server.intake.relay()
    relayed = [output.message for output in outputs if isinstance(output, Send)]
    assert [s.serial for b in relayed if isinstance(b, ShareBundle) for s in b.shares] == [5] * 5
    assert list(fed.server.intake.stock.shared[0]) == [5]
    assert fed.server.intake.stock.relay.begun[0] == (5, {})


def test_S28_an_owner_that_shares_without_end_costs_the_server_no_memory() -> None:
    fed = AsyncFederation(stock=2).open(masks=1)
    fed.leave(5)
    for _ in range(4):
        share_beyond_the_cap(fed, 0)
    assert sorted(fed.server.intake.stock.shared[0]) == [3, 4]
    assert sorted(fed.server.intake.mailbox.missed[5]) == [(0, 3), (0, 4)]
    for _ in range(4):
        share_beyond_the_cap(fed, 0)
        fed.upload(0)
        fed.settle()
    waiting = [w.tag.serial for w in fed.server.intake.queue.waiting]
    assert len(waiting) + len(fed.server.intake.stock.shared[0]) <= 2
    assert len(fed.server.intake.mailbox.missed[5]) <= 2
    fed.rejoin(5)
    fed.settle()
    assert set(fed.clients[5].state.holder.kept[0]) >= set(waiting)


def test_S29_an_owner_that_pushes_out_its_own_shares_spoils_no_buffer() -> None:
    """Peers have forgotten the mask of its upload; without it the buffer is recovered."""
    fed = AsyncFederation(stock=2).open(masks=1)
    fed.upload(4)
    fed.settle()
    for _ in range(2):
        share_beyond_the_cap(fed, 4)
    assert fed.server.intake.waiting == 0
    for owner in range(4):
        fed.upload(owner)
        fed.settle()
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    assert not fed.failures
    fed.assert_exact()


def test_skipped_masks_are_not_kept_for_absent_clients() -> None:
    fed = AsyncFederation().open(masks=1)
    fed.leave(5)
    fed.send(0, fed.clients[0].restock(2))
    fed.settle()
    for serial in (0, 1):
        fed.clients[0].state.contributor.stock.pop(serial)  # they expired at their owner
    assert fed.upload(0).serial == 2
    fed.settle()
    assert list(fed.server.intake.mailbox.missed[5]) == [(0, 2)]


def test_a_client_that_returns_gets_the_shares_of_a_buffer_before_the_buffer() -> None:
    fed = AsyncFederation(dropouts=0).open(masks=1)
    fed.leave(5)
    for owner in (0, 1, 2, 3):
        fed.send(owner, fed.clients[owner].restock())
        fed.settle()
        fed.clients[owner].state.contributor.stock.pop(0)  # 5 has no share of the other one
        fed.upload(owner)
        fed.step_up(owner)
    fed.rejoin(5)
    fed.settle()
    assert [result.responders for result in fed.results] == [(0, 1, 2, 3, 4, 5)]
    fed.assert_exact()


def test_newer_shares_do_not_push_out_those_of_a_buffer_in_flight() -> None:
    """5 keeps two shares per owner; the third, of a new mask, must come after the buffer."""
    fed = AsyncFederation(stock=2, dropouts=0).open()
    for owner in (0, 1, 2, 3):
        fed.upload(owner)
        fed.step_up(owner)
    fed.leave(5)  # the buffer is announced, and lost on its way to this client
    for client in range(5):
        fed.step_down(client)
    for owner in (0, 1, 2, 3):
        fed.send(owner, fed.clients[owner].restock())
        answer, *shares = fed.lose(owner, SERVER)  # the answer leaves first
        for share in shares:
            fed.deliver(share)
        fed.up.append(answer)  # keep the buffer in flight
    assert fed.server.phase is Phase.RECOVER
    fed.rejoin(5)
    fed.settle()
    assert [result.responders for result in fed.results] == [(0, 1, 2, 3, 4, 5)]
    fed.assert_exact()


def test_R30_an_owner_that_uploads_again_and_again_from_one_model_spoils_no_buffer() -> None:
    """Each upload but the first is dropped, but its shares push out those of the first.

    A buffer with it would be refused by everybody, and the others' updates lost. An owner of ours
    would share no mask that pushes out one that it needs; this one does.
    """
    fed = AsyncFederation().open(masks=1)
    first = fed.upload(5)
    fed.settle()
    with pytest.MonkeyPatch.context() as reckless:
        reckless.setattr(type(fed.clients[5]), "room", 1)
        for _ in range(fed.buffering.stock):
            fed.send(5, fed.clients[5].restock())
            fed.settle()
            fed.upload(5)
            fed.settle()
    assert all(first.serial not in party.state.holder.kept[5] for party in fed.clients.values())
    assert fed.server.intake.waiting == 0
    assert fed.clients[5].room == fed.buffering.stock, "it was told"
    for owner in (0, 1, 2, 3):
        fed.upload(owner)
        fed.settle()
    assert not fed.failures
    assert [result.owners for result in fed.results] == [(0, 1, 2, 3)]
    fed.assert_exact()


# -- the server: buffers -----------------------------------------------------------------------


def test_a_flush_that_is_refused_drops_nothing() -> None:
    """Else the owners of stale uploads would never be told."""
    fed = AsyncFederation().open()
    fed.upload(0, version=0)
    fed.settle()
    fed.skip_to(6)
    with pytest.raises(LocalProtocolError, match="0 of 1 waiting"):
        fed.server.flush()
    assert fed.server.intake.waiting == 1
    for owner in (1, 2, 3):
        fed.upload(owner, version=6)
        fed.settle()
    fed.call(SERVER, fed.server.flush)
    fed.settle()
    assert fed.clients[0].room == 3
    assert [result.owners for result in fed.results] == [(1, 2, 3)]


@pytest.mark.parametrize("threat_model", [HONEST, MALICIOUS])
def test_R30_refusals_end_a_buffer_without_a_deadline_and_name_the_owner(
    threat_model: ThreatModel,
) -> None:
    """Client 0 shared nothing that opens; everybody else refuses its buffer, and says why."""
    fed = AsyncFederation(threat_model=threat_model).open()
    for client in range(1, 6):
        fed.clients[client].state.holder.kept[0].clear()
    for owner in (0, 1, 2, 3):
        fed.upload(owner)
        fed.settle()
    assert not fed.results
    (failure,) = fed.failures
    assert failure.missing == (0,)
    assert fed.server.phase is Phase.UPLOAD
    # those that refused are told that their uploads are lost
    assert [fed.clients[client].room for client in (1, 2, 3)] == [3, 3, 3]


def test_S29_replies_that_nobody_asked_for_are_refused() -> None:
    fed = AsyncFederation().open()
    for owner in (0, 1, 2, 3):
        fed.upload(owner)
        fed.step_up(owner)
    buffer = fed.announced[0]
    with pytest.raises(RemoteProtocolError, match="nobody asked it for"):
        fed.server.receive(5, Refusal(0, (4,)))
    signature = sum_statement(fed.server._registration.scheme.round.context, buffer).sign(
        fed.keys[5]
    )
    with pytest.raises(RemoteProtocolError, match="nobody has to agree"):
        fed.server.receive(5, Consent(0, signature))
    assert not fed.server.refusals


def test_S29_the_first_answer_of_a_client_counts() -> None:
    fed = AsyncFederation().open()
    for owner in (0, 1, 2, 3):
        fed.upload(owner)
        fed.step_up(owner)
    fed.step_down(0)
    answer = fed.under_way(0, SERVER)[0]
    assert isinstance(answer, AggregatedShare)
    fed.step_up(0)
    with pytest.raises(RemoteProtocolError, match="client 0 gave two different answers"):
        fed.server.receive(0, AggregatedShare(np.zeros_like(answer.vector), 0))
    fed.server.receive(0, answer)
    assert fed.server.late_messages == {"AggregatedShare": 1}
    fed.settle()
    assert 0 in fed.results[0].responders
    fed.assert_exact()


@pytest.mark.parametrize("phase", ["advertise", "upload", "agree", "recover", "done"])
def test_S29_every_message_has_its_answer_in_every_phase_of_the_server(phase: str) -> None:
    """Refused, or ignored and counted; what is taken is tested elsewhere. Never a crash."""
    fed = AsyncFederation(threat_model=MALICIOUS, dropouts=2, survivors=4)
    fed.call(SERVER, fed.server.start)
    if phase == "done":
        fed.call(SERVER, fed.server.proceed)
    elif phase != "advertise":
        fed.settle()
        for client, party in fed.clients.items():
            fed.send(client, party.restock())
        fed.settle()
    if phase in ("agree", "recover"):
        for owner in (0, 1, 2, 3):
            fed.upload(owner)
            fed.step_up(owner)
    if phase == "recover":
        for client in range(4):
            fed.step_down(client)
            fed.step_up(client)
    assert fed.server.phase is Phase(phase)
    vector = np.zeros(fed.settings.share_length, dtype=np.uint32)
    upload = MaskedUpload(late_tag(), vector)
    for message in (
        Opening(b""),
        Roster(()),
        SharesClosed(()),
        MaskedUpload(Tag(999), vector),
        SumRequest(0, ()),
        Certificate(0, ()),
        UnmaskingShares(b"", b""),
        AbortRound("no"),
        UploadDropped(0),
        ReportsWanted(()),
        Reports((Report(0, 99, b""),)),
        SumRequest(0, ()),
        Certificate(0, ()),
        upload,
        Advertise((), b""),
        whole(SealedShare(0, 0, shares_of(registered(), 0)[0].kind, 0, bytes(16), b"")),
        Consent(9, b""),
        Refusal(9, ()),
        AggregatedShare(vector, 9),
    ):
        counted = fed.server.late_messages.total()
        try:
            outputs = fed.server.receive(0, message)
        except RemoteProtocolError:
            assert fed.server.late_messages.total() == counted
        else:
            assert outputs == []
            assert fed.server.late_messages.total() == counted + 1
        assert fed.server.phase is Phase(phase)


def late_tag() -> Any:
    return AsyncFederation().open().make_upload(0, 0).tag


# -- forming buffers ---------------------------------------------------------------------------


class Upload:
    def __init__(self, owner: int, version: int) -> None:
        self.owner, self.version = owner, version


@pytest.mark.parametrize("rules", [Rules(per_weight=3), Rules(per_model=3)])
@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ((5, 3), 6, [3, 3]),
        ((6, 3), 6, [6]),
        ((4, 4, 3), 10, [4, 3, 3]),
        ((3, 2), 6, [3]),
        ((2, 2), 6, []),
        ((9,), 4, [4]),
        ((4, 3), 5, [4]),
    ],
)
def test_strict_buffers_are_as_full_as_whole_classes_allow(
    sizes: tuple[int, ...], size: int, expected: list[int], rules: Rules
) -> None:
    waiting = [Upload(10 * v + k, v) for v, count in enumerate(sizes) for k in range(count)]
    chosen = choose_updates(waiting, size, lambda version: 1 + version, rules)
    versions = [upload.version for upload in chosen]
    assert [versions.count(v) for v in dict.fromkeys(versions)] == expected


def test_S56_updates_of_one_weight_and_different_models_are_no_company() -> None:
    waiting = [Upload(owner, owner % 2) for owner in range(5)]
    chosen = choose_updates(waiting, 5, lambda version: 1, Rules(per_model=3))
    assert [(upload.owner, upload.version) for upload in chosen] == [(0, 0), (2, 0), (4, 0)]


@pytest.mark.parametrize(
    ("uploads", "size", "expected"),
    [
        ([(0, 0), (0, 0), (1, 0)], 6, 0),  # two owners of one model, who have three updates
        ([(0, 0), (0, 0), (1, 0), (2, 0)], 6, 3),
        ([(0, 0), (1, 0), (2, 0), (0, 1), (3, 1), (4, 1)], 6, 3),  # 0 is of one class, not two
        ([(0, 0), (1, 0), (2, 0), (0, 1), (3, 1), (4, 1), (5, 1)], 6, 4),
        ([(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)], 5, 3),  # no class is cut to fit in
    ],
)
def test_S56_one_owner_counts_once_among_the_owners_of_a_class(
    uploads: list[tuple[int, int]], size: int, expected: int
) -> None:
    waiting = [Upload(*each) for each in uploads]
    chosen = choose_updates(waiting, size, lambda version: 1, Rules(per_model=3))
    assert len(chosen) == len({upload.owner for upload in chosen}) == expected
    assert min(Counter(upload.version for upload in chosen).values(), default=3) >= 3
