"""Which shares a round of LightSecAgg has (S12, S19)."""

from __future__ import annotations

import numpy as np
import pytest
from driver import PAPER, SEEDED, CountingEntropy, Federation

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.prg import SEED_LENGTH
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ShareMode
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.mask_sharing import SharedMask, check_share_length, draw_mask
from lightsecagg.protocol.messages import Member, Roster, SealedShare
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.share_exchange import OutgoingShare


def round_of(federation: Federation, number: int) -> Round:
    keys = {c: (AgreementKey(bytes([c]) * 32).public,) for c in federation.ids}
    roster = Roster(tuple(Member(client, keys[client], b"") for client in federation.ids))
    return fix_round(federation.settings(number), federation.allow_list, roster)


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
def test_S06_masks_differ_by_round_and_serial_though_the_entropy_repeats_itself(
    share_mode: ShareMode,
) -> None:
    """A cloned machine draws the same bytes in two rounds, with the same keys of all clients.

    Under one mask the difference of two uploads would be that of the updates.
    """
    federation = Federation(share_mode=share_mode, dimension=500)
    owner, other, *_ = federation.ids
    field = federation.settings().field

    def mask(number: int, client: int = owner, serial: int = 0) -> Elements:
        entropy = CountingEntropy("the same bytes again")
        return draw_mask(round_of(federation, number), client, serial, entropy).mask

    naive = [
        prg.draw_uniform(500, field.modulus, CountingEntropy("the same bytes again"))
        for _ in range(2)
    ]
    assert (naive[0] == naive[1]).all()
    masks = [mask(1), mask(2), mask(1, serial=1), mask(1, client=other)]
    for index, one in enumerate(masks):
        for another in masks[:index]:
            assert (one == another).sum() < 3
    assert (mask(1) == masks[0]).all()


@pytest.mark.parametrize("share_mode", [PAPER, SEEDED])
@pytest.mark.parametrize("kind", ShareKind)
def test_S12_a_share_has_the_length_of_its_kind_and_a_kind_of_the_rounds_mode(
    share_mode: ShareMode, kind: ShareKind
) -> None:
    settings = Federation(share_mode=share_mode, dimension=40).settings()
    lengths = {ShareKind.EXPLICIT: 4 * settings.share_length}
    if share_mode is SEEDED:
        lengths[ShareKind.SEED] = SEED_LENGTH
    for length in (0, SEED_LENGTH, 4 * settings.share_length, 4 * settings.share_length + 4):
        if lengths.get(kind) == length:
            check_share_length(settings, kind, length)
        else:
            with pytest.raises(CryptoError, match=f"kind {kind.name}"):
                check_share_length(settings, kind, length)


def test_S19_a_server_relays_no_seed_where_all_shares_are_explicit() -> None:
    federation = Federation(share_mode=PAPER)
    network = federation.network()
    network.start().run(until=lambda: network.server.phase is Phase.SHARE)
    owner, recipient, *_ = federation.ids
    seed = SealedShare(
        owner, recipient, ShareKind.SEED, SEED_LENGTH, bytes(16), bytes(SEED_LENGTH + 16)
    )
    with pytest.raises(RemoteProtocolError, match="no shares of kind SEED in paper mode"):
        network.server.receive(owner, seed)


def test_S22_a_shared_mask_shows_neither_the_mask_nor_a_share() -> None:
    mask = np.array([4711, 4712], dtype=np.uint32)
    shared = SharedMask(mask, (1, b"own share"), [OutgoingShare(1, ShareKind.SEED, b"peer share")])
    assert repr(shared) == "SharedMask(length=2, outgoing=1)"
