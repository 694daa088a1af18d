"""A holder: which shares are for it, which open, and whose fault it is if one does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from bundles import sealed_alone
from driver import PAPER, Federation

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.protocol.holder import check_address, open_peer_share
from lightsecagg.protocol.messages import Member, Roster, SealedShare
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient
from lightsecagg.protocol.share_exchange import OutgoingShare

FEDERATION = Federation(4, 1, 1, 3, share_mode=PAPER)
ME, PEER, OTHER, _ = FEDERATION.ids
KEYS = {client: AgreementKey(bytes([client]) * 32) for client in FEDERATION.ids}
ROUND = fix_round(
    FEDERATION.settings(),
    FEDERATION.allow_list,
    Roster(tuple(Member(c, (key.public,), b"") for c, key in KEYS.items())),
)
SCHEME = CodedMasksClient(ROUND, ME)
GOOD = bytes(4 * FEDERATION.settings().shared_length)


def sealed(plaintext: bytes = GOOD, kind: ShareKind = ShareKind.EXPLICIT) -> SealedShare:
    """From the peer, for me."""
    share = OutgoingShare(ME, kind, plaintext)
    return sealed_alone(ROUND, KEYS[PEER], PEER, share, 7)


def test_a_share_of_a_peer_opens_for_whom_it_was_sealed_and_as_often_as_needed() -> None:
    share = sealed()
    check_address(SCHEME, share)
    for _ in range(2):
        assert open_peer_share(SCHEME, KEYS[ME], share) == (ShareKind.EXPLICIT.value, GOOD)


@pytest.mark.parametrize(
    ("owner", "recipient"), [(PEER, OTHER), (ME, ME), (999, ME), (999, 999), (ME, PEER)]
)
def test_S12_a_share_that_is_not_from_a_peer_to_this_client_is_the_server_s_fault(
    owner: int, recipient: int
) -> None:
    with pytest.raises(
        RemoteProtocolError,
        match=f"from client {owner} to client {recipient} is not for client {ME}",
    ):
        check_address(SCHEME, replace(sealed(), owner=owner, recipient=recipient))


Change = Callable[[SealedShare], SealedShare]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda share: sealed(bytes(32), ShareKind.SEED), "no shares of kind SEED"),
        (lambda share: sealed(GOOD[4:]), "bytes, not"),
        (lambda share: sealed(b"\xff" * len(GOOD)), "holds no field elements"),
        (lambda share: replace(share, salt=b"short"), "a salt has 16 bytes, not 5"),
        (lambda share: replace(share, salt=bytes(16)), "not bound"),
        (lambda share: replace(share, serial=8), "not bound"),
        (lambda share: replace(share, owner=OTHER), "not bound"),
        (lambda share: replace(share, root=bytes(32)), "not bound"),
        (lambda share: replace(share, mac=bytes(16)), "not bound"),
        (lambda share: replace(share, sealed=bytes(share.sealed)[:-1]), "bytes instead of"),
        (lambda share: replace(share, sealed=bytes(len(share.sealed))), "does not"),
    ],
    ids=[
        "kind",
        "length",
        "elements",
        "salt",
        "salts",
        "serial",
        "owner",
        "root",
        "mac",
        "cut",
        "altered",
    ],
)
def test_S12_a_share_that_is_of_no_use_is_its_owner_s_fault(change: Change, match: str) -> None:
    """`CryptoError` whatever is wrong: the message it came in is taken, the share is not held."""
    with pytest.raises(CryptoError, match=match):
        open_peer_share(SCHEME, KEYS[ME], change(sealed()))


def test_S12_nobody_else_s_key_opens_a_share() -> None:
    with pytest.raises(CryptoError, match="not bound"):
        open_peer_share(SCHEME, KEYS[OTHER], sealed())
