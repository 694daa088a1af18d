"""R34: random histories of rounds and of epochs, by one generator over the same roles.

Coins decide what the network, the machines and the clock do. Messages are delivered in any order of
the links, twice, late or never; in a rough history also out of order, again much later, or forged.
Clients train when they like, leave, come back, go on from a snapshot or without one; the server
crashes and goes on from what it had asked to be stored; jobs are cut into ranges and take their
time; deadlines fire. Whatever happens:

* a finished sum is the plain sum of the announced set, which never changes;
* nobody answers for two sets, nor twice differently;
* no mask hides two uploads;
* a refused message, and a forged one whether refused or ignored, changes nothing;
* no error and no `repr` shows a secret;
* the next round or epoch, undisturbed, works and includes everybody.

A history is a function of its seed. `LIGHTSECAGG_HISTORIES=1000` runs so many of each kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from epoch_history import Epochs
from history import MALICIOUS, PAPER, SEEDED, SHORT, History, Kind
from round_history import Rounds

from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, ThreatModel
from lightsecagg.protocol.schemes.traits import protocols, traits_of

COUNT = int(os.environ.get("LIGHTSECAGG_HISTORIES", "4"))

KINDS = [
    *(
        Kind(mode, "lightsecagg", threat_model, share_mode, modulus)
        for mode in ("round", "epoch")
        for threat_model in ThreatModel
        for share_mode, modulus in ((SEEDED, DEFAULT_MODULUS), (PAPER, PAPER_MODULUS))
    ),
    Kind("round", share_mode=SHORT),
    Kind("epoch", share_mode=SHORT),
]
if len(protocols()) > 1:  # the laboratory is installed
    KINDS += [
        Kind("round", "plain"),
        Kind("round", "secagg"),
        Kind("round", "secagg", MALICIOUS),
        Kind("round", "secagg+", neighbours=4, threshold=3),
    ]


MODES: dict[str, Callable[[Kind, int], History]] = {"round": Rounds, "epoch": Epochs}


def test_every_scheme_of_the_registry_has_histories_in_every_mode_it_has() -> None:
    wanted = {
        (mode, name, share_mode)
        for name in protocols()
        for traits in [traits_of(name)]
        for mode in ("round", "epoch")
        for share_mode in traits.share_modes or (SEEDED,)
        if mode == "round" or (traits.buffered and traits.protected)
    }
    assert {(kind.mode, kind.protocol, kind.share_mode) for kind in KINDS} == wanted


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_R34_random_histories_end_in_exact_sums_or_aborts(kind: Kind) -> None:
    for seed in range(COUNT):
        MODES[kind.mode](kind, seed).live()
