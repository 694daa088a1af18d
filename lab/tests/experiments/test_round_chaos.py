"""`bench chaos` over rounds: what its oracle sees, and that a federation bears all of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.params import Parameters
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.settings import Settings
from lightsecagg_lab.experiments.campaign import Campaign
from lightsecagg_lab.experiments.chaos_plan import KINDS, Findings, RoundChaos, Schedule
from lightsecagg_lab.experiments.round_audit import (
    DROPPED,
    RepeatingVectors,
    RoundAudit,
    Sum,
    audit,
    check_sum,
    edition,
)
from lightsecagg_lab.experiments.state_damage import Memory, memory_of, settle
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

N = 3


# -- the oracle: three clients, whose vectors of round 4 make one sum -----------------------------


def done(number: int, *included: int, resumed: bool = False) -> dict[str, Any]:
    return {"round": number, "included": list(included), "aborted": None, "resumed": resumed}


def failed(number: int, why: str) -> dict[str, Any]:
    return {"round": number, "included": [], "aborted": why, "resumed": False}


def exact(number: int, *included: int) -> Sum:
    return Sum(number, included, exact=True)


def notes(number: int, *included: int, said: str = "signed") -> list[dict[str, Any]]:
    """All of them have uploaded, heard that it is stored, and signed for the same set."""
    about = {"round": number, "set": list(included)}
    return [
        {"client": client, "what": what, "digest": f"{what} {client}", **about}
        for client in included
        for what in ("uploaded", "stored", "asked", said)
    ]


def found(
    records: Sequence[dict[str, Any]], sums: Sequence[Sum], told: Sequence[dict[str, Any]]
) -> RoundAudit:
    return audit(records, sums, told, N)


def test_a_round_is_right_if_one_exact_sum_is_of_those_who_were_announced() -> None:
    right = found([done(4, 0, 1, 2, resumed=True)], [exact(4, 0, 1, 2)] * 2, notes(4, 0, 1, 2))
    assert right.clean
    assert (right.finished, right.resumed, right.acknowledged, right.failed) == (1, 1, 3, {})
    told = notes(4, 0, 1, 2)
    for sums in ([], [Sum(4, (0, 1, 2), exact=False)], [exact(4, 0, 1)], [exact(5, 0, 1, 2)]):
        assert found([done(4, 0, 1, 2)], sums, told).wrong == 1
    assert found([done(4, 0, 1)], [exact(4, 0, 1)], told).wrong == 1, "others were announced"


def test_R31_an_acknowledged_upload_is_in_the_sum_or_in_a_failed_round_or_lost() -> None:
    told = notes(4, 0, 1, 2)
    assert found([done(4, 0, 1)], [exact(4, 0, 1)], told).lost == 1
    assert found([], [], told).lost == 3, "the server has forgotten the round"
    assert found([failed(4, DROPPED)], [], told).lost == 3, "it says that it had no upload"
    excused = found([failed(4, "only 2 of 3 clients answered")], [], told)
    assert (excused.lost, excused.in_failed_rounds) == (0, 3)
    assert excused.failed == {"only # of # clients answered": 1}


def test_what_is_done_twice_is_seen() -> None:
    # Round 6 finds client 0 with the vector of round 5.
    assert edition(0, 6, N) == edition(0, 5, N) == 5
    both = [exact(5, 0, 1), exact(6, 0, 1)]
    twice = found([done(5, 0, 1), done(6, 0, 1)], both, [*notes(5, 0, 1), *notes(6, 0, 1)])
    assert (twice.twice, twice.wrong) == (1, 0)
    sets = found([], [], [*notes(4, 0, 1), *notes(4, 0, 1, 2)])
    assert (sets.two_sets, sets.changed) == (2, 1)
    for what in ("answered", "uploaded"):
        told = [
            {"client": 0, "what": what, "round": 4, "set": [0, 1], "digest": digest}
            for digest in ("a", "a", "b")
        ]
        audited = found([], [], told)
        assert [audited.two_answers, audited.two_uploads].count(1) == 1
        assert not audited.clean
    assert not twice.clean
    assert not sets.clean


def test_sums_are_compared_with_the_vectors_themselves() -> None:
    record = {"round": 6, "included": [0, 2], "quantisation_step": 1e-6}
    total = np.sum([RepeatingVectors(i, 5, N).compute(b"", 6, 1.0).vector for i in (0, 2)], axis=0)
    assert check_sum(record, total.astype(np.float64), 5, N).exact
    assert not check_sum(record | {"included": [0, 1]}, total.astype(np.float64), 5, N).exact
    assert not check_sum(record, total + 1e-4, 5, N).exact


CLEAN = found([done(4, 0, 1, 2)], [exact(4, 0, 1, 2)], notes(4, 0, 1, 2))


def is_clean(findings: Findings) -> bool:
    clean: bool = findings.to_json(RoundChaos(), 1.0, interrupted=False)["clean"]
    return clean


def test_one_campaign_that_is_not_clean_is_enough() -> None:
    findings = Findings(audits=[CLEAN, CLEAN])
    assert is_clean(findings)
    assert findings.to_json(RoundChaos(), 1.0, interrupted=False)["finished"] == 2
    assert not is_clean(Findings(audits=[CLEAN, replace(CLEAN, lost=1)]))
    assert not is_clean(Findings(audits=[CLEAN], surprises=["the server failed"]))


@pytest.mark.parametrize("what", ["unnoticed", "accepted", "hangs", "orphans"])
def test_what_must_not_come_of_a_fault(what: str) -> None:
    found = Findings(audits=[CLEAN], outcomes=Counter({what: 1}))
    assert (is_clean(found), found.faults_found) == (False, 1)
    borne = Findings(audits=[CLEAN], outcomes=Counter({"refused_flips": 1}))
    assert (is_clean(borne), borne.faults_found) == (True, 0)


KNOWN = Memory((2, b"model"), 4, {1: None, 2: "too few"}, {1: (0, 1)}, {(3, 0): b"upload"})


@pytest.mark.parametrize(
    "forgotten",
    [
        {"completed": (1, b"model")},
        {"completed": (2, b"another")},
        {"next_round": 3},
        {"ended": {1: None}},
        {"announced": {}},
        {"announced": {1: (0, 2)}},
        {"uploads": {}},
        {"uploads": {(3, 0): b"another"}},
    ],
)
def test_R36_a_state_folder_that_has_forgotten_anything_is_told_from_one_that_has_not(
    forgotten: dict[str, Any],
) -> None:
    assert not KNOWN.survived_in(replace(KNOWN, **forgotten))
    assert KNOWN.survived_in(replace(KNOWN, ended={**KNOWN.ended, 3: DROPPED}))
    chosen = {**KNOWN.announced, 3: (0, 1)}
    assert KNOWN.survived_in(replace(KNOWN, announced=chosen)), "a resumed round goes on"


def test_a_change_that_was_not_marked_yet_is_known_to_be_nobodys(tmp_path: Path) -> None:
    """Damage may take it, and no server would notice; so it is marked before there is any."""
    state, session, copy = tmp_path / "state", "00", tmp_path / "copy"
    state.mkdir()
    mark = state / "journal.mark"
    parameters = Parameters(clients=5, privacy=1, dropouts=1)
    settings = Settings(
        protocol=ProtocolName.LIGHTSECAGG,
        parameters=parameters,
        quantizer=make_quantizer(parameters, 10, 1.0),
        dimension=10,
        session=bytes(32),
        round=1,
        allow_list=bytes(32),
    )
    journal = Journal(state, session)
    journal.open_round(settings)
    marked = mark.read_bytes()
    journal.abandon(1, "too few")
    journal.close()
    assert not memory_of(state, session, copy).unheard
    mark.write_bytes(marked)  # as if killed between the change and its mark
    assert memory_of(state, session, copy).unheard
    settle(state, session)
    assert not memory_of(state, session, copy).unheard


def test_the_server_that_is_killed_is_the_one_that_runs_after_the_last_look() -> None:
    """A full disk may have ended one, and two at once would each spoil what the other stores."""
    ended, running = Mock(), Mock()
    campaign = Campaign.__new__(Campaign)
    campaign._parties = Mock(serving=ended)

    def look() -> None:
        campaign._parties.serving = running  # type: ignore[misc]

    campaign._look = look  # type: ignore[method-assign, assignment]
    campaign._kill_serving()
    running.kill.assert_called_once()
    ended.kill.assert_not_called()


def test_faults_are_as_many_as_planned_or_go_on_for_a_time() -> None:
    planned = RoundChaos(**dict.fromkeys(KINDS, 2))
    schedule = Schedule(planned, random.Random(1))
    taken = []
    while not schedule.over:
        taken.append(schedule.take())
    assert sorted(taken) == sorted(2 * KINDS)
    endless = Schedule(replace(planned, seconds=3600.0, flips=0), random.Random(1))
    assert {endless.take() for _ in range(200)} == set(KINDS) - {"flips"}
    assert not endless.over


# -- a real federation ---------------------------------------------------------------------------

COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()", "bench", "chaos"]


def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and so would everything that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments, "--dim", "20", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=heed_interrupts,
    )


@pytest.mark.slow
def test_R31_R32_R33_R36_a_federation_bears_whatever_happens(tmp_path: Path) -> None:
    planned = dict(zip(KINDS, (5, 2, 1, 1, 1, 3, 1), strict=True))
    counts = [
        each for kind, n in planned.items() for each in (f"--{kind.replace('_', '-')}", str(n))
    ]
    with start(tmp_path, *counts, "--pause", "0.6", "--keep", str(tmp_path / "kept")) as run:
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err + out
    report = json.loads(out)
    assert {kind: report[kind] for kind in KINDS} == planned
    never = ("wrong", "lost", "twice", "two_sets", "two_answers", "two_uploads", "changed")
    assert {report[what] for what in (*never, "unnoticed", "accepted", "hangs", "orphans")} == {0}
    assert report["finished"] >= 3
    assert report.get("refused_flips", 0) + report.get("harmless_flips", 0) == 3
    assert report.get("refused_changes", 0) + report.get("allowed_changes", 0) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_R40_an_interrupted_chaos_reports_and_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "--seconds", "600", "--pause", "0.2") as run:
        assert run.stderr is not None
        assert run.stderr.readline() == "a federation of 6 clients runs\n"
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 130, err
    report = json.loads(out)
    assert (report["interrupted"], report["clean"], report["orphans"]) == (True, True, 0)
    assert report["seconds"] < 600
    assert not list(tmp_path.iterdir())
