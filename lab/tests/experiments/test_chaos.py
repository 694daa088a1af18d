"""`bench chaos`: what it counts, and that a federation whose processes are killed is clean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.demo import DemoResult, with_history
from lightsecagg.drivers.federation.demo_audit import Comparison, audit
from lightsecagg.drivers.federation.demo_config import SERVER, DemoConfig
from lightsecagg.errors import ParameterError
from lightsecagg.params import ThreatModel
from lightsecagg_lab.experiments.chaos import unleash
from lightsecagg_lab.experiments.chaos_plan import BufferChaos, plan_kills

CURIOUS = ThreatModel.HONEST_BUT_CURIOUS
COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()", "bench", "chaos"]


@pytest.mark.slow
def test_R31_R32_nothing_is_lost_or_used_twice_by_a_federation_that_is_killed(
    tmp_path: Path,
) -> None:
    small = ["--clients", "5", "--privacy", "1", "--dropouts", "1", "--buffer", "3", "--dim", "20"]
    kills = ["--server-kills", "3", "--client-kills", "2", "--pause", "1", "--timeout", "200"]
    command = [*COMMAND, "--mode", "async", *small, *kills, "--keep", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert (found["server_kills"], found["client_kills"], found["hangs"], found["orphans"]) == (
        3,
        2,
        0,
        0,
    )
    never = ("left_behind", "lost", "wrong", "summed_twice", "masks_used_twice", "changed")
    assert {found[what] for what in (*never, "orphans")} == {0}
    assert found["sums"] > 3
    fates = ("summed", "dropped", "in_failed_buffers", "stranded", "waiting")
    assert found["acknowledged"] == sum(found[fate] for fate in fates)
    assert found["summed"] + found["unheard"] >= 3 * found["sums"], "T + 2 owners each"
    assert "5 of 5 kills" in done.stderr


@pytest.mark.slow
def test_R31_R32_where_any_updates_share_a_buffer_no_acknowledged_one_is_dropped() -> None:
    small = {"clients": 5, "privacy": 1, "dropouts": 1, "buffer": 3, "dimension": 20}
    chaos = BufferChaos(server_kills=3, client_kills=2, pause=1.0, threat_model=CURIOUS, **small)
    found = unleash(chaos)
    assert found["clean"], found
    assert found["dropped"] == 0


def test_kills_follow_from_the_seed_alone() -> None:
    chaos = BufferChaos(server_kills=20, client_kills=10)
    assert plan_kills(chaos) == plan_kills(chaos)
    assert plan_kills(chaos) != plan_kills(BufferChaos(server_kills=20, client_kills=10, seed=1))
    assert sum(kill.victim == SERVER for kill in plan_kills(chaos)) == 20
    assert len(plan_kills(chaos)) == 30


# -- what the audit sees: three owners, whose updates of version 0 make the sum of version 1 -----

EXACT = Comparison(0.0, 1.0, exact=True)


def record(number: int, *owners: int, version: int = 0) -> dict[str, Any]:
    versions = [version] * len(owners)
    return {"round": number, "epoch": 1, "included": list(owners), "versions": versions}


def upload(client: int, serial: int = 0, digest: str = "a", version: int = 0) -> dict[str, Any]:
    about = {"epoch": 1, "serial": serial, "version": version, "digest": digest}
    return {"client": client, "what": "upload", **about}


def note(what: str, client: int = 0, **about: Any) -> dict[str, Any]:
    return {"client": client, "what": what, "epoch": 1, **about}


def stored(client: int, serial: int = 0) -> list[dict[str, Any]]:
    return [upload(client, serial, version=serial), note("stored", client, serial=serial)]


def uploads(*clients: int, serial: int = 0) -> list[dict[str, Any]]:
    return [each for client in clients for each in stored(client, serial)]


OVER = note("over", aborted=None)
NEXT = {"client": 0, "what": "over", "epoch": 2, "aborted": None}


def test_an_update_is_summed_waits_or_was_left_behind() -> None:
    notes = [*uploads(0, 1, 2), *uploads(0, 1, serial=1)]
    fates = audit([record(1, 0, 1, 2)], [EXACT], notes, least=3)
    assert (fates.acknowledged, fates.summed, fates.waiting) == (5, 3, 2)
    ended = audit([record(1, 0, 1, 2)], [EXACT], [*notes, OVER, NEXT], least=3)
    assert (ended.left_behind, ended.waiting, ended.lost) == (2, 0, 0)
    assert fates.clean
    assert not ended.clean
    told_later = note("over", aborted="that epoch is over")
    for notes_of_the_end in ([OVER, told_later], [told_later]):
        again = audit([record(1, 0, 1, 2)], [EXACT], [*notes, *notes_of_the_end, NEXT], least=3)
        assert (again.left_behind, again.stranded) == (2, 0)


def test_what_was_never_acknowledged_may_be_summed_or_refused_and_is_counted_apart() -> None:
    notes = [*uploads(0, 1), upload(2), upload(3), note("dropped", 3, serial=0), upload(4)]
    fates = audit([record(1, 0, 1, 2)], [EXACT], notes, least=3)
    assert (fates.acknowledged, fates.summed, fates.unheard, fates.refused) == (2, 2, 1, 1)
    assert fates.dropped == 0


def test_R31_updates_that_could_have_been_summed_are_lost() -> None:
    notes = [*uploads(0, 1, 2), OVER, NEXT]
    assert audit([], [], notes, least=3).lost == 3
    dropped = [note("dropped", client, serial=0) for client in range(3)]
    excused = audit([], [], [*notes, *dropped], least=3)
    assert (excused.lost, excused.dropped) == (0, 3)
    aborted = [*uploads(0, 1, 2), note("over", aborted="too few"), NEXT]
    fates = audit([], [], aborted, least=3)
    assert (fates.stranded, fates.left_behind) == (3, 0)
    assert fates.clean


@pytest.mark.parametrize("drops", [True, False])
def test_S56_who_was_killed_may_not_have_heard_that_its_update_was_dropped(drops: bool) -> None:
    notes = [*uploads(0, 1), OVER, NEXT]
    fates = audit([], [], notes, least=3, drops=drops)
    assert (fates.dropped, fates.left_behind) == ((1, 1) if drops else (0, 2))
    back = {"client": 0, "what": "started", "time": 1.0}
    both = audit([], [], [*notes, back], least=3, drops=drops)
    assert (both.dropped, both.left_behind) == ((2, 0) if drops else (0, 2))


def test_a_sum_that_a_killed_server_knew_counts_though_its_successor_lost_the_buffer() -> None:
    known, other = record(1, 0, 1, 2), record(2, 0, 1, 3, version=1)
    lost = {"round": 1, "epoch": 1, "included": [], "versions": [], "aborted": "too few"}
    told = [lost, other | {"aborted": None, "samples": 3}]
    assert with_history([known, other], told) == [known, told[1]]


def test_what_is_done_twice_is_seen() -> None:
    two = audit([record(1, 0, 1), record(2, 0, 2)], [EXACT] * 2, [], least=3)
    assert two.summed_twice == 1
    masks = audit([], [], [upload(0, digest="a"), upload(0, digest="b")], least=3)
    assert masks.masks_used_twice == 1
    assert audit([], [], [upload(0), upload(0)], least=3).masks_used_twice == 0, "sent again"
    asked = [note("announced", client, at=0, terms=[[0, 0], [1, client]]) for client in (1, 2)]
    assert audit([], [], asked, least=3).changed == 1
    wrong = audit([record(1, 0)], [Comparison(2.0, 1.0, exact=False)], [], least=3)
    assert wrong.wrong == 1
    assert not any(found.clean for found in (two, masks, wrong))


@pytest.mark.parametrize("hung", [True, False])
def test_a_federation_that_went_wrong_is_kept_and_no_other(
    hung: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(config: DemoConfig, folder: Path, *_: object) -> DemoResult:
        (folder / "server.log").write_text("why")
        found = audit([], [], [], least=3)
        empty: tuple[list[Any], ...] = ([], [], [], [], [], [])
        return DemoResult(*empty, found, None, folder, 1.0, hung=hung, interrupted=None)

    monkeypatch.setattr("lightsecagg_lab.experiments.chaos.run_demo", ran)
    assert unleash(BufferChaos(), keep=tmp_path)["clean"] is not hung
    kept = tmp_path / "federation" / "server.log"
    assert kept.exists() == hung


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_folder_in_use_is_refused_before_anything_is_killed(mode: str, tmp_path: Path) -> None:
    (tmp_path / "of another run").touch()
    command = [*COMMAND, "--mode", mode, "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "must be a new or an empty folder" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--mode", "async", "--flips", "1"], "--flips belongs to the synchronous mode"),
        (["--buffer", "4"], "--buffer belongs to the asynchronous mode"),
    ],
)
def test_an_option_of_the_other_mode_is_refused_by_name(arguments: list[str], refusal: str) -> None:
    result = CliRunner().invoke(app, ["bench", "chaos", *arguments])
    assert isinstance(result.exception, ParameterError)
    assert str(result.exception).startswith(refusal)
