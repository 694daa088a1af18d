"""The relay: what of an owner's shares is passed on, what waits, what is past, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from bundles import relayed
from driver import PAPER, Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.sealing import MAC_LENGTH, ShareKind
from lightsecagg.crypto.transcript import HASH_LENGTH
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.protocol.interface import Send
from lightsecagg.protocol.messages import (
    MAX_SERIAL,
    Member,
    Roster,
    SealedShare,
    ShareBundle,
    UploadDropped,
)
from lightsecagg.protocol.roles.relay import Mailbox, Outbox, Relay
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksServer
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.share_exchange import BUNDLE_BYTES, HEADER

FEDERATION = Federation(4, 1, 1, 3, share_mode=PAPER)
ME, *PEERS = FEDERATION.ids
LENGTH = 4 * FEDERATION.settings().shared_length


def relay(single: bool = False) -> Relay:
    members = [Member(c, (AgreementKey(bytes([c]) * 32).public,), b"") for c in FEDERATION.ids]
    roster = Roster(tuple(members))
    round_ = fix_round(FEDERATION.settings(), FEDERATION.allow_list, roster)
    scheme = CodedMasksServer(round_, system_entropy)
    return Relay(scheme, single=True) if single else Relay(scheme)


def share(recipient: int, serial: int = 0, owner: int = ME, salt: bytes = b"s") -> SealedShare:
    mac = bytes(MAC_LENGTH)
    return SealedShare(owner, recipient, ShareKind.EXPLICIT, LENGTH, salt, b"sealed", serial, mac)


A, B, C = PEERS
ALL_0 = tuple(share(peer) for peer in PEERS)
ALL_1 = tuple(share(peer, 1) for peer in PEERS)
OTHER_0, OTHER_1 = share(A, 0, salt=b"t"), share(A, 1, salt=b"t")

STATES: dict[str, tuple[SealedShare, ...]] = {
    "nothing has come": (),
    "mask 0 has begun": (share(A),),
    "mask 0 is complete": ALL_0,
    "mask 1 has begun": (*ALL_0, share(A, 1)),
    "mask 0 is lost": (share(A), share(A, 1)),
}
MESSAGES: dict[str, tuple[SealedShare, ...]] = {
    "a share of mask 0": (share(A),),
    "another for the same peer": (OTHER_0,),
    "all of mask 0": ALL_0,
    "a share of mask 1": (share(A, 1),),
    "another of mask 1": (OTHER_1,),
    "all of mask 1": ALL_1,
    "both masks": (*ALL_0, *ALL_1),
}
PAST, WAITS, REFUSED = "past", "waits", "refused"
Outcome = str | tuple[SealedShare, ...]
"""Past, waiting, refused, or what is passed on."""

TABLE: dict[str, Sequence[Outcome]] = {
    "nothing has come": (WAITS, WAITS, ALL_0, WAITS, WAITS, ALL_1, (*ALL_0, *ALL_1)),
    "mask 0 has begun": (PAST, REFUSED, ALL_0, WAITS, WAITS, ALL_1, (*ALL_0, *ALL_1)),
    "mask 0 is complete": (PAST, PAST, PAST, WAITS, WAITS, ALL_1, ALL_1),
    "mask 1 has begun": (PAST, PAST, PAST, PAST, REFUSED, ALL_1, ALL_1),
    "mask 0 is lost": (PAST, PAST, PAST, PAST, REFUSED, ALL_1, ALL_1),
}


def test_the_table_has_a_cell_for_every_state_and_message() -> None:
    assert {state: len(cells) for state, cells in TABLE.items()} == dict.fromkeys(
        STATES, len(MESSAGES)
    )


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("state", STATES)
def test_what_becomes_of_shares_in_every_state(state: str, message: str) -> None:
    server, bundle = relay(), ShareBundle(MESSAGES[message])
    for before in STATES[state]:
        server.take(ME, ShareBundle((before,)))
    known = dict(server.complete), dict(server.begun)
    outcome = TABLE[state][list(MESSAGES).index(message)]
    match outcome:
        case "refused":
            with pytest.raises(RemoteProtocolError, match=f"client {ME} sent two shares to {A}"):
                server.take(ME, bundle)
            assert (server.complete, server.begun) == known
        case "past":
            assert server.take(ME, bundle) is None
            assert (server.complete, server.begun) == known
        case "waits":
            assert server.take(ME, bundle) == []
            assert server.complete == known[0]
            assert server.begun[ME] == (bundle.shares[0].serial, {A: bundle.shares[0]})
        case passed_on:
            taken = server.take(ME, bundle)
            assert taken is not None
            plain = [replace(one, root=b"") for one in taken]
            assert sorted(plain, key=lambda s: s.serial) == list(passed_on)
            assert all(len(one.root) == HASH_LENGTH for one in taken)
            newest = max(one.serial for one in taken)
            assert server.complete == {ME: newest}
            assert server.begun == {ME: (newest, {})}
            assert server.take(ME, bundle) is None, "nothing is passed on twice"


def test_a_mask_is_complete_with_its_last_share_whatever_the_order_and_the_bundles() -> None:
    server = relay()
    assert not server.has_begun(ME)
    assert server.take(ME, ShareBundle((share(C), share(A)))) == []
    assert server.has_begun(ME)
    assert not server.has_begun(A)
    taken = server.take(ME, ShareBundle((share(A), share(B))))
    assert taken == relayed([share(C), share(A), share(B)])
    assert server.take(ME, ShareBundle((share(B), share(B, 1)))) == []
    assert server.begun == {ME: (1, {B: share(B, 1)})}
    assert server.complete == {ME: 0}


def test_owners_do_not_get_in_each_other_s_way() -> None:
    server = relay()
    server.take(ME, ShareBundle(ALL_1))
    theirs = [share(peer, owner=A) for peer in (ME, B, C)]
    assert server.take(A, ShareBundle(tuple(theirs))) == relayed(theirs)
    assert server.complete == {ME: 1, A: 0}


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (share(B, owner=A), f"sent a share from {A} to {B}"),
        (share(ME), f"sent a share from {ME} to {ME}"),
        (share(999), f"sent a share from {ME} to 999"),
        (share(B, MAX_SERIAL + 1), f"to {B}, of its mask {MAX_SERIAL + 1}"),
        (replace(share(B), kind=ShareKind.SEED, length=32), "no shares of kind SEED in paper mode"),
        (replace(share(B), length=LENGTH - 4), f"has {LENGTH} bytes, not {LENGTH - 4}"),
        (replace(share(B), mac=b""), "not bound as it must"),
        (replace(share(B), root=bytes(32)), "not bound as it must"),
        (share(B, salt=b"t"), "two salts"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_S12_a_bundle_with_one_bad_share_is_refused_as_a_whole(
    bad: SealedShare, match: str, first: bool
) -> None:
    server = relay()
    shares = (bad, share(A)) if first else (share(A), bad)
    with pytest.raises(RemoteProtocolError, match=match):
        server.take(ME, ShareBundle(shares))
    assert not server.begun


def test_S12_a_contradiction_late_in_a_bundle_takes_nothing_of_it() -> None:
    server = relay()
    server.take(ME, ShareBundle((share(A),)))
    with pytest.raises(RemoteProtocolError, match="sent two shares"):
        server.take(ME, ShareBundle((share(B), OTHER_0)))
    assert server.begun == {ME: (0, {A: share(A)})}


def test_a_round_has_one_mask_of_each_owner() -> None:
    with pytest.raises(RemoteProtocolError, match="of its mask 1"):
        relay(single=True).take(ME, ShareBundle((share(A, 1),)))
    assert relay(single=True).take(ME, ShareBundle((share(A),))) == []
    assert relay().take(ME, ShareBundle((share(A, 1),))) == []


# -- the outbox ------------------------------------------------------------------------------------


def sized(recipient: int, size: int, serial: int = 0) -> SealedShare:
    return replace(share(recipient, serial), sealed=bytes(size))


def test_shares_wait_until_they_are_worth_a_message() -> None:
    outbox = Outbox()
    half = BUNDLE_BYTES // 2 - HEADER
    assert outbox.put(sized(A, half)) == []
    assert outbox.put(sized(B, half)) == [], "each recipient's by themselves"
    assert outbox.put(sized(A, half, 1)) == []
    whole = ShareBundle((sized(A, half), sized(A, half, 1)))
    assert outbox.put(sized(A, 1, 2)) == [Send(A, whole)]
    assert outbox.put(sized(A, half, 3)) == [], "the count begins anew"
    assert outbox.flush() == [
        Send(A, ShareBundle((sized(A, 1, 2), sized(A, half, 3)))),
        Send(B, ShareBundle((sized(B, half),))),
    ]
    assert outbox.flush() == []
    assert outbox.put(sized(B, half)) == []


# -- the mailbox -----------------------------------------------------------------------------------


def test_shares_are_kept_until_they_are_reported_on_and_notices_until_they_are_read() -> None:
    mailbox = Mailbox()
    first, second = share(ME, 0, owner=A), share(ME, 1, owner=A)
    for message in (first, UploadDropped(3), second):
        mailbox.put(ME, message)
    assert mailbox.lacking == {MaskRef(A, 0): [ME], MaskRef(A, 1): [ME]}
    assert mailbox.read(ME, ()) == ([], [ShareBundle((first, second)), UploadDropped(3)])
    assert mailbox.read(ME, ()) == ([], [ShareBundle((first, second))])
    mailbox.delivered(ME, MaskRef(A, 0))
    mailbox.delivered(B, MaskRef(A, 1))
    mailbox.delivered(ME, MaskRef(C, 7))
    assert mailbox.read(ME, ()) == ([], [ShareBundle((second,))])


def test_a_report_on_an_own_mask_takes_no_notice_away() -> None:
    mailbox = Mailbox()
    mailbox.put(ME, UploadDropped(3))
    mailbox.delivered(ME, MaskRef(ME, 3))
    assert mailbox.read(ME, ()) == ([], [UploadDropped(3)])


def test_what_is_urgent_comes_first_and_the_older_masks_of_its_owner_with_it() -> None:
    """They would be refused behind it."""
    mailbox = Mailbox()
    old, asked, new = (share(ME, serial, owner=A) for serial in range(3))
    other = share(ME, 0, owner=B)
    for message in (old, other, asked, new):
        mailbox.put(ME, message)
    urgent, others = mailbox.read(ME, [MaskRef(A, 1), MaskRef(C, 9)])
    assert urgent == [ShareBundle((old, asked))]
    assert others == [ShareBundle((other, new))]


def test_what_concerns_a_mask_that_is_past_is_forgotten_for_everybody() -> None:
    mailbox = Mailbox()
    for client in (ME, B):
        mailbox.put(client, share(client, 0, owner=A))
        mailbox.put(client, share(client, 1, owner=A))
    mailbox.put(A, UploadDropped(0))
    mailbox.forget(MaskRef(A, 0))
    mailbox.forget(MaskRef(C, 0))  # of which nobody has missed anything
    for client in (ME, B):
        assert mailbox.read(client, ()) == ([], [ShareBundle((share(client, 1, owner=A),))])
    assert mailbox.read(A, ()) == ([], [])


def test_a_kept_share_does_not_keep_the_bundle_it_came_in() -> None:
    mailbox, bundle = Mailbox(), bytearray(100)
    mailbox.put(ME, replace(share(ME, owner=A), sealed=memoryview(bundle)[:10]))
    bundle.extend(b"!")  # refused while anybody has a view of it
    (kept,) = mailbox.missed[ME].values()
    assert isinstance(kept, SealedShare)
    assert kept.sealed == bytes(10)
