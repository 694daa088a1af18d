"""A contributor: its mask's shares are sealed once, its update is checked and hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bundles import relayed, shares_in
from driver import Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.drivers.transport.framing import PAYLOAD
from lightsecagg.errors import CryptoError, InputRefused
from lightsecagg.protocol.contributor import check_input, hide, send_shares
from lightsecagg.protocol.holder import open_peer_share
from lightsecagg.protocol.interface import SERVER, Update
from lightsecagg.protocol.messages import Member, Roster, SealedShare
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient
from lightsecagg.protocol.share_exchange import (
    BUNDLE_BYTES,
    bundles,
    header_of,
    mask_header,
    root_of,
    seal_shares,
)
from lightsecagg.protocol.wire import Codec
from lightsecagg.session.envelope import protocol_head

FEDERATION = Federation(4, 1, 1, 3, dimension=5)
ME, *PEERS = FEDERATION.ids
SETTINGS = FEDERATION.settings()
KEYS = {client: AgreementKey(bytes([client]) * 32) for client in FEDERATION.ids}
ROUND = fix_round(
    SETTINGS,
    FEDERATION.allow_list,
    Roster(tuple(Member(c, (key.public,), b"") for c, key in KEYS.items())),
)


def test_every_peer_opens_its_share_of_the_mask_and_no_two_are_sealed_alike() -> None:
    scheme = CodedMasksClient(ROUND, ME)
    mask = scheme.prepare(3, (), system_entropy)
    header, shares = seal_shares(ROUND, KEYS[ME], ME, mask.outgoing, 3)
    assert [(share.owner, share.recipient, share.serial) for share in shares] == [
        (ME, peer, 3) for peer in PEERS
    ]
    assert len({bytes(share.sealed) for share in shares}) == len(PEERS)
    for share, outgoing in zip(relayed(shares), mask.outgoing, strict=True):
        assert header_of(ROUND, share) == header
        peer = CodedMasksClient(ROUND, share.recipient)
        opened = open_peer_share(peer, KEYS[share.recipient], share)
        assert opened == (outgoing.kind.value, outgoing.plaintext)


def test_shares_go_to_the_server_together() -> None:
    scheme = CodedMasksClient(ROUND, ME)
    mask = scheme.prepare(0, (), system_entropy)
    shares = seal_shares(ROUND, KEYS[ME], ME, mask.outgoing).shares
    (send,) = send_shares(shares)
    assert send.to == SERVER
    assert shares_in([send]) == shares
    half = [replace(share, sealed=bytes(BUNDLE_BYTES // 2 - 112)) for share in shares]
    sends = send_shares(half)
    assert [len(shares_in([send])) for send in sends] == [2, 1]
    assert shares_in(sends) == half
    large = [replace(share, sealed=bytes(2 * BUNDLE_BYTES)) for share in shares]
    assert [len(shares_in([send])) for send in send_shares(large)] == [1, 1, 1]


@pytest.mark.parametrize("sealed", [48, 3000, 53_660])
def test_a_bundle_fits_a_chunk_however_long_its_shares_are(sealed: int) -> None:
    share = SealedShare(ME, PEERS[0], ShareKind.SEED, sealed - 16, bytes(16), bytes(sealed))
    relayed = replace(share, mac=bytes(16), root=bytes(32))
    for one in (share, relayed):
        bundle = next(bundles([one] * 6000))
        message = Codec(SETTINGS.field).encode(bundle, protocol_head(2**64 - 1))
        assert 0.55 * PAYLOAD < len(message) <= PAYLOAD
    assert len(message) > 0.8 * PAYLOAD


BAD = {
    "shape": (np.zeros(4), "shape .4,., but vectors of 5 entries"),
    "two dimensions": (np.zeros((5, 1)), "vectors of 5 entries are summed"),
    "not a number": (np.array([0.0, np.nan, 0, 0, 0]), "NaN"),
    "infinite": (np.array([0.0, 0, np.inf, 0, 0]), "infinite"),
    "over range": (np.array([0.0, 0, 0, 0, 1025]), "1024"),
}


@pytest.mark.parametrize("vector", BAD)
def test_S13_an_update_that_could_not_be_masked_is_refused(vector: str) -> None:
    update, match = BAD[vector]
    with pytest.raises(InputRefused, match=match):
        check_input(SETTINGS, Update(update))


def test_S13_what_lies_at_the_bound_is_taken_and_no_samples_are_not() -> None:
    update = Update(np.full(5, -1024.0), 64)
    check_input(SETTINGS, update)
    with pytest.raises(InputRefused, match="0"):
        check_input(SETTINGS, replace(update, samples=0))


def test_hidden_is_the_quantised_update_and_the_mask() -> None:
    field, update = SETTINGS.field, Update(np.array([1.0, -2, 3, 0, 1024]), 3)
    mask = np.arange(SETTINGS.length, dtype=np.uint32)
    hidden = hide(SETTINGS, update, bytes(32), mask.copy())
    plain = [3, -6, 9, 0, 3072, 3]  # the weight is summed, too
    expected = [(int(m) + x) % field.modulus for m, x in zip(mask, plain, strict=True)]
    assert hidden.tolist() == expected


def test_S06_the_rounding_is_a_function_of_its_seed() -> None:
    """A repeated upload of one update must be the same: the difference would tell of it."""
    fine = replace(SETTINGS.quantizer, scale=0.5)
    settings = replace(SETTINGS, quantizer=fine)
    update = Update(np.full(5, 0.999), 1)
    zero = np.zeros(settings.length, dtype=np.uint32)
    said = {
        tuple(hide(settings, update, bytes([seed]) * 32, zero.copy()).tolist())
        for seed in (1, 1, 2, 3, 4)
    }
    assert 1 < len(said) <= 4
    once, again = (hide(settings, update, bytes([1]) * 32, zero.copy()) for _ in range(2))
    assert (once == again).all()


def test_S46_the_same_shares_are_the_same_bytes_and_others_have_another_header() -> None:
    """A client that is restored twice, or draws the same again, is checked by one r."""
    mask = CodedMasksClient(ROUND, ME).prepare(0, (), system_entropy)
    once = seal_shares(ROUND, KEYS[ME], ME, mask.outgoing)
    assert seal_shares(ROUND, KEYS[ME], ME, mask.outgoing) == once
    for position, share in enumerate(mask.outgoing):
        altered = list(mask.outgoing)
        last = share.plaintext[-1] ^ 1
        altered[position] = share._replace(plaintext=share.plaintext[:-1] + bytes([last]))
        other = seal_shares(ROUND, KEYS[ME], ME, altered)
        assert other.header != once.header
        assert all(a.sealed != b.sealed for a, b in zip(once.shares, other.shares, strict=True))
    assert seal_shares(ROUND, KEYS[ME], ME, mask.outgoing, 1).header != once.header


CHANGES: list[dict[str, Any]] = [
    {"recipient": PEERS[0] - 1},
    {"kind": ShareKind.SHAMIR},
    {"length": 33},
    {"sealed": b"other bytes"},
]


def test_S46_a_header_is_of_one_epoch_owner_serial_salt_and_set_of_shares() -> None:
    """Else an owner would have the r of a mask before it shares that mask."""
    mask = CodedMasksClient(ROUND, ME).prepare(3, (), system_entropy)
    shares = seal_shares(ROUND, KEYS[ME], ME, mask.outgoing).shares
    usual: list[Any] = [b"C" * 32, ME, 3, b"s" * 16, root_of(shares)]
    others: list[Any] = [b"D" * 32, PEERS[0], 4, b"t" * 16, root_of(shares[:-1])]
    headers = {mask_header(*usual)}
    for place, other in enumerate(others):
        headers.add(mask_header(*usual[:place], other, *usual[place + 1 :]))
    assert len(headers) == 1 + len(others)
    first, *rest = shares
    swapped = [replace(first, sealed=rest[0].sealed), replace(rest[0], sealed=first.sealed)]
    roots = {root_of(shares), root_of([*swapped, *rest[1:]]), root_of(rest)}
    roots |= {root_of([replace(first, **change), *rest]) for change in CHANGES}
    assert len(roots) == 3 + len(CHANGES)
    assert root_of(reversed(shares)) == root_of(shares)


def test_S46_control_a_share_of_another_header_of_the_same_mask_is_not_taken() -> None:
    """An owner cannot show one header to one holder and another to the next."""
    mask = CodedMasksClient(ROUND, ME).prepare(0, (), system_entropy)
    first, *others = mask.outgoing
    changed = first._replace(plaintext=first.plaintext[:-1] + bytes([first.plaintext[-1] ^ 1]))
    once = relayed(seal_shares(ROUND, KEYS[ME], ME, mask.outgoing).shares)
    other = relayed(seal_shares(ROUND, KEYS[ME], ME, [changed, *others]).shares)
    mine = once[0].recipient
    holder = CodedMasksClient(ROUND, mine)
    open_peer_share(holder, KEYS[mine], once[0])
    open_peer_share(holder, KEYS[mine], other[0])
    for mixed in (replace(once[0], root=other[0].root), replace(once[0], mac=other[0].mac)):
        with pytest.raises(CryptoError, match="not bound"):
            open_peer_share(holder, KEYS[mine], mixed)
