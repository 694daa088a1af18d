"""What a scheme gets for nothing: the defaults of both sides, shown by one that has little else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driver import Federation
from toy import PadsClient, PadsServer

from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError
from lightsecagg.protocol.messages import AggregatedShare, Roster
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.schemes.interface import Answer, Findings, MaskRef, MaskSum, Term

FEDERATION = Federation(6, 1, 2, 4)
ME, PEER, *_ = FEDERATION.ids


def a_round() -> Round:
    empty = fix_round(FEDERATION.settings(), FEDERATION.allow_list, Roster(()))
    return replace(empty, members=FEDERATION.ids)


def test_a_mask_is_of_serial_0_and_has_weight_1_unless_it_is_said() -> None:
    term = Term(MaskRef(ME))
    assert (term.ref.serial, term.weight) == (0, 1)
    assert MaskSum((term, Term(MaskRef(PEER, 3), 2))).in_sum == (ME, PEER)


def test_a_scheme_admits_the_shares_that_its_traits_foretell() -> None:
    scheme = PadsClient(a_round(), ME)
    shares = scheme.settings.traits.shares(scheme.settings)
    for kind in ShareKind:
        if kind not in shares:
            with pytest.raises(CryptoError, match=f"of kind {kind.name} in seeded mode"):
                scheme.admit(kind, 32)
            continue
        length = shares[kind].length
        scheme.admit(kind, length)
        for other in (length - 1, length + 1):
            with pytest.raises(CryptoError, match=f"has {length} bytes, not {other}"):
                scheme.admit(kind, other)
    scheme.check_elements(bytes(8))
    for bad in (b"\xff" * 8, bytes(7)):
        with pytest.raises(CryptoError, match="holds no field elements"):
            scheme.check_elements(bad)


def test_a_client_shares_with_everybody_and_answers_with_a_share_of_every_mask() -> None:
    scheme = PadsClient(a_round(), ME)
    assert scheme.peers == set(FEDERATION.ids) - {ME}
    least = scheme.settings.minimum
    assert scheme.suffices(range(least), ())
    assert not scheme.suffices(range(least - 1), FEDERATION.ids)
    held = {MaskRef(ME): (2, b""), MaskRef(PEER, 1): (2, b"")}
    terms = [Term(MaskRef(ME)), Term(MaskRef(PEER)), Term(MaskRef(PEER, 1))]
    assert scheme.missing(held, terms) == (PEER,)
    scheme.accept(())
    assert scheme.report(MaskRef(ME), (2, b""), b"").shape == (0,)


def test_a_server_lets_members_share_with_each_other_and_accuses_nobody() -> None:
    server = PadsServer(a_round(), system_entropy)
    assert server.entropy is system_entropy
    assert server.are_peers(ME, PEER)
    assert not server.are_peers(ME, ME)
    assert not server.are_peers(ME, 999)
    assert server.examine({ME: {PEER: np.zeros(2, np.uint32)}}) == Findings(frozenset(), ())
    asked = MaskSum(())
    enough = server.settings.sharing_threshold
    assert server.suffice(asked, range(enough))
    assert not server.suffice(asked, range(enough - 1))


def test_a_recovery_in_one_piece_is_cut_by_columns_once_it_is_open() -> None:
    server = PadsServer(a_round(), system_entropy)
    length = server.settings.length
    right, wrong = np.arange(length, dtype=np.uint32), np.zeros(length, dtype=np.uint32)
    said = {ME: right, PEER: wrong}
    answers: dict[int, Answer] = {c: AggregatedShare(vector) for c, vector in said.items()}
    job = server.recovery(MaskSum(()), answers)
    assert job.columns == length
    job.open()
    assert job.suspects == (PEER,)
    left = np.full(length, 10, dtype=np.uint32)
    for start, stop in ((3, length), (0, 3)):
        job.take_away(left, start, job.run(start, stop))
    assert (left == 10 - right).all()
    assert (job.finish(left) == left).all()
