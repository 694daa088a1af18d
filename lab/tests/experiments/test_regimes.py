"""The regime map: the winner is named in every setting, also where it is not LightSecAgg."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from lightsecagg.params import ShareMode
from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.experiments import regimes
from lightsecagg_lab.experiments.cells import Document, Results, RoundCell
from lightsecagg_lab.experiments.regimes import CORES, LINKS, TRAININGS
from lightsecagg_lab.experiments.setups import RATES, Profile
from lightsecagg_lab.experiments.timing import timed_rounds
from lightsecagg_lab.planning import Network
from lightsecagg_lab.planning.traffic import PhaseTraffic
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

LIGHT, SECAGG, SECAGG_PLUS, PLAIN = ProtocolName
TINY = Profile("quick", (8, 12), sample=2, repeats=1)
MEGABYTES = 10**6

# server's seconds of recovery, megabytes of shares through the server
COSTS = {LIGHT: (0.1, 200), SECAGG: (8.0, 0), SECAGG_PLUS: (16.0, 0), PLAIN: (0.0, 0)}


def document(cell: RoundCell) -> Document:
    recovery, shares = COSTS[cell.protocol]
    if cell.share_mode is ShareMode.SHORT_KEY:
        shares = 0
    loads: dict[str, dict[str, float]] = {}
    for phase in (each for each in Phase if each is not Phase.DONE):
        names = ("client_seconds", "server_seconds")
        names += ("server_relay_seconds", "server_spread_seconds")
        loads[phase.value] = {**dict.fromkeys(names, 0.0), **asdict(PhaseTraffic())}
    for name in ("server_seconds", "server_spread_seconds"):
        loads["upload"][name] = 1.0
        loads["recover"][name] = recovery
    if shares:
        loads["share"]["client_shares_sent"] = MEGABYTES
        loads["share"]["server_shares_received"] = shares * MEGABYTES
    repeats = {"repeats": 1}
    rounds = {
        phase: {name: [value] for name, value in found.items()} for phase, found in loads.items()
    }
    return {"cell": repeats, "cold": loads, "rounds": rounds}


@pytest.fixture(scope="module")
def results() -> Results:
    cells = regimes.regime_cells(TINY)
    return {cell.key: document(cell) for cell in cells if isinstance(cell, RoundCell)}


def test_every_setting_names_its_winner_who_need_not_be_ours(results: Results) -> None:
    figures = regimes.regime_report(TINY, results).figures
    settings = [name for name in figures if name.startswith("N = ")]
    assert len(settings) == 2 * len(RATES) * len(TRAININGS) * len(CORES) * len(LINKS)

    def fastest(cores: int, gigabits: int, training: int = 0) -> tuple[str, float]:
        found = figures[
            f"N = 12, p = 30%, training {training} s, {cores} core{'s' * (cores > 1)}, "
            f"{gigabits} Gbit/s"
        ]
        return found["fastest"]["name"], found["gain_over_best_baseline"].median

    name, gain = fastest(1, 100)
    assert name == "LightSecAgg"
    assert 2 < gain < 9 / 1.1, "8 s of masks against 0.1 s of decoding and what 200 MB take"
    name, gain = fastest(8, 1)
    assert name == "SecAgg"
    assert gain < 1, "1.6 s of shares on the link against 1 s of masks"
    assert fastest(8, 1, training=60)[0] == "LightSecAgg", "training hides what shares take"
    assert sum(figures["won"].values()) == len(settings)
    free = figures["free transport"]["N = 12, p = 30%, training 0 s, 1 core, 100 Gbit/s"]
    # 1 s of summing and 8 s of masks, against 0.1 s of decoding and 1.6 Gbit over 100 Gbit/s
    assert free["gain_over_best_baseline"].median == pytest.approx(
        9 / (1.1 + 0.02 + 0.025), rel=0.03
    )


def test_short_keys_are_compared_and_never_named(results: Results) -> None:
    report = regimes.regime_report(TINY, results)
    slow = report.figures["N = 12, p = 30%, training 0 s, 8 cores, 1 Gbit/s"]
    assert slow["winner_over_short_keys"].median > 5
    assert set(report.figures["won"]) == {"LightSecAgg", "SecAgg"}


def test_cores_share_what_is_done_to_vectors_and_nothing_else(results: Results) -> None:
    cell = TINY.round(SECAGG, 12, 0.3, 1_206_590)
    one, eight = (timed_rounds(results[cell.key], Network(), [0.0], k) for k in (1, 8))
    assert one.cold_phases[Phase.RECOVER].server == 8.0
    assert eight.cold_phases[Phase.RECOVER].server == 1.0
    assert eight.warm[0][Phase.UPLOAD].server == 1 / 8
    for phase in one.cold_phases:
        same = replace(eight.warm[0][phase], server=one.warm[0][phase].server)
        assert same == one.warm[0][phase]
