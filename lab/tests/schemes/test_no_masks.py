"""Plain summation's scheme by itself: nothing hidden, nothing shared, nothing asked."""

from __future__ import annotations

import pytest
from secagg_driver import Federation

from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.protocol.messages import AggregatedShare, Roster
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.interface import MaskSum
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.no_masks import NoMasksClient, NoMasksServer


def test_there_is_no_mask_no_share_and_no_answer() -> None:
    federation = Federation(ProtocolName.PLAIN)
    round_ = fix_round(federation.settings, federation.allow_list, Roster(()))
    client, server = NoMasksClient(round_, 11), NoMasksServer(round_, system_entropy)
    assert client.peers == frozenset()
    assert client.prepare(0, (), system_entropy) == (b"", (0, b""), [], None)
    assert not client.mask(b"", ()).any()
    for kind in ShareKind:
        with pytest.raises(CryptoError, match="plain FedAvg has no shares"):
            client.admit(kind, 32)
        with pytest.raises(CryptoError, match="has no shares"):
            client.check(kind, bytes(32))
    with pytest.raises(RemoteProtocolError, match="no masks to recover"):
        client.answer({}, (), ())
    with pytest.raises(RemoteProtocolError, match="client 11 answered"):
        server.check_answer(MaskSum(()), 11, AggregatedShare(client.mask(b"", ())))
    assert server.choose((), {48: frozenset(), 11: frozenset()}) == (11, 48)
    mask, suspects = server.recover(MaskSum(()), {})
    assert mask.shape == (federation.settings.length,)
    assert not mask.any()
    assert suspects == ()
