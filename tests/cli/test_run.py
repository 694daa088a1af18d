"""`lightsecagg run`: the whole demonstration, and nothing left behind when it is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.demo import plan_deaths
from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.demo_processes import Processes
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.errors import ConfigurationError, ParameterError

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()", "run"]
SMALL = ["--clients", "5", "--rounds", "2", "--epochs", "1", "--timeout", "900"]


def processes_of(session: int) -> list[int]:
    """Every live process of a session, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[3]) == session and stat[0] != "Z":
                found.append(int(entry.name))
    return found


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """A page that nobody ends is shown for ever."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # on a busy machine the run's own --timeout ends it, and says so
def test_run_trains_kills_compares_reports_and_shows_its_page_until_it_is_told_to_end(
    tmp_path: Path,
) -> None:
    work = tmp_path.parent / "w"  # the name of a socket has at most 107 bytes
    work.mkdir()
    command = [*COMMAND, *SMALL, "--json", "--dashboard", "--out", str(tmp_path / "report")]
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(work)},
        ) as process,
        ended(process),
    ):
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if "Ctrl-C ends it" in line:
                break
        addresses = re.findall(r"dashboard on (http://127\.0\.0\.1:\d+/)", told)
        assert len(addresses) == 2, told
        assert addresses[0] == addresses[1], "a page that was open goes on"
        with urllib.request.urlopen(f"{addresses[0]}rounds/2", timeout=300) as page:  # noqa: S310
            assert json.load(page)["aborted"] is None
        left = {path.name for path in work.rglob("*") if path.is_file()}
        assert "rounds.json" in left
        assert not [name for name in left if name.endswith((".key", ".pem"))]
        assert not [name for name in left if name.startswith(("update-", "notes-", "client-"))]
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert not list(work.glob("lightsecagg-*"))
    document = json.loads(stdout)
    assert document["rounds"] == 2
    assert 0.3 < document["figures"]["accuracy"] <= 1
    assert document["seconds"] > 0
    assert document["matches_plain_average"] is True
    assert 0 < document["max_abs_difference"] <= document["quantisation_bound"] < 1e-4
    assert set(document["phases"]) == {"advertise", "share", "upload", "agree", "recover"}
    for phase in document["phases"].values():
        assert phase["seconds"] > 0
        assert phase["client_upload_bytes"] > 0
    planned = plan_deaths(DemoConfig(clients=5, privacy=1, dropouts=1, dropout=1, rounds=2))
    killed = {(death["client"], death["round"], death["phase"]) for death in document["dropped"]}
    assert killed == {(c, r, phase) for c, deaths in planned.items() for r, phase in deaths.items()}
    assert killed, "a demonstration without a dropout shows little"
    report = tmp_path / "report"
    assert document["report"] == str(report)
    assert (report / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((report / "run.json").read_text()) == document
    assert "no real client does that" in told


class Interrupted:
    """A run in a session of its own, with temporary folders that only it uses."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.temporary, self.report = folder / "tmp", folder / "report"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--out", str(self.report)],
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background job ignores SIGINT, and so would everything that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def folders(self) -> list[Path]:
        """What holds keys and plain updates."""
        return list(self.temporary.glob("lightsecagg-*"))

    def reached(self, moment: str) -> bool:
        if moment == "a folder":
            return bool(self.folders())
        if moment == "its processes":
            return len(processes_of(self.process.pid)) >= 5
        return any((folder / "notes" / "average-1.npz").exists() for folder in self.folders())

    def wait_for(self, moment: str) -> None:
        while not self.reached(moment):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def everything_is_gone(self) -> None:
        while processes_of(self.process.pid) or self.folders():
            time.sleep(0.1)  # the test's own timeout ends this


LONG = [*SMALL, "--rounds", "500"]


@pytest.fixture
def interrupted(request: pytest.FixtureRequest) -> Iterator[Interrupted]:
    # Not pytest's folder: with a test's name in it, its path is too long for the sockets inside.
    with tempfile.TemporaryDirectory() as folder:
        run = Interrupted(Path(folder), getattr(request, "param", LONG))
        yield run
        for pid in processes_of(run.process.pid):
            os.kill(pid, signal.SIGKILL)
        run.process.wait()
        assert run.process.stderr is not None
        run.process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("a folder", signal.SIGINT),
        ("its processes", signal.SIGINT),
        ("a round", signal.SIGINT),
        ("a round", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_run_cleanly_at_any_moment(
    interrupted: Interrupted, moment: str, number: signal.Signals
) -> None:
    interrupted.wait_for(moment)
    # A terminal sends Ctrl-C to every process of the group, a supervisor SIGTERM to one.
    (os.killpg if number is signal.SIGINT else os.kill)(interrupted.process.pid, number)
    _, errors = interrupted.process.communicate()
    assert interrupted.process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert "Error" not in errors
    interrupted.everything_is_gone()


ASYNC = ["--mode", "async", "--clients", "5", "--slow", "1", "--epochs", "1", "--timeout", "900"]


@pytest.mark.slow
@pytest.mark.parametrize("threat_model", ["malicious-server", "honest-but-curious"])
def test_R31_R32_asynchronous_sums_are_exact_though_clients_and_the_server_are_killed(
    tmp_path: Path, threat_model: str
) -> None:
    kills = ["--flushes", "7", "--client-kills", "1", "--server-kills", "1"]
    kind = ["--threat-model", threat_model, "--json", "--out", str(tmp_path / "report")]
    command = [*COMMAND, *ASYNC, *kills, *kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["flushes"]) >= 7
    for flush in document["flushes"]:
        assert flush["exact"] is True
        assert 0 < flush["difference"] <= flush["rounding"] < 1e-4
        assert len(flush["owners"]) == len(flush["staleness"]) >= 3
    killed = [kill["who"] for kill in document["kills"]]
    assert len(killed) == 2
    assert "server" in killed
    assert max(kill["after"] for kill in document["kills"]) < len(document["flushes"])
    (straggler,) = document["stragglers"]
    if threat_model == "honest-but-curious":
        assert straggler["max_staleness"] > 2
    else:  # three share a model (S56), and so a staleness
        assert all(len(set(flush["staleness"])) == 1 for flush in document["flushes"])
    fates = document["audit"]
    never = ("lost", "wrong", "summed_twice", "masks_used_twice", "changed")
    assert {fates[what] for what in never} == {0}
    assert fates["acknowledged"] >= fates["summed"] > 0
    owners = sum(len(flush["owners"]) for flush in document["flushes"])
    assert sum(document["staleness"].values()) == owners
    assert 0.1 < document["figures"]["accuracy"] <= 1
    report = tmp_path / "report"
    assert (report / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((report / "run.json").read_text()) == document


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [[*ASYNC, "--flushes", "500"]], indirect=True)
def test_R40_ctrl_c_ends_an_asynchronous_run_with_a_report_and_no_process(
    interrupted: Interrupted,
) -> None:
    interrupted.wait_for("a round")
    os.killpg(interrupted.process.pid, signal.SIGINT)
    _, errors = interrupted.process.communicate()
    assert interrupted.process.returncode == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors
    document = json.loads((interrupted.report / "run.json").read_text())
    assert document["interrupted"] is True
    assert all(flush["exact"] for flush in document["flushes"])
    interrupted.everything_is_gone()


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_neither_processes_nor_keys(interrupted: Interrupted) -> None:
    interrupted.wait_for("a round")
    interrupted.process.kill()
    interrupted.everything_is_gone()


@pytest.mark.slow
def test_an_own_task_is_told_its_options_reports_by_its_own_names_and_its_model_is_kept(
    own_tasks: Path,
) -> None:
    torch = pytest.importorskip("torch")
    command = [*COMMAND, *SMALL, "--dropout", "0", "--task", "own_tasks_of_run:House"]
    options = ["--task-option", "slope=2", "--save-model", "house.pt"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    document = json.loads((own_tasks / "report" / "run.json").read_text())
    assert list(document["figures"]) == ["rmse"]
    assert f"rmse {document['figures']['rmse']:.4g}" in done.stdout
    mean, error = (document["metrics"]["mae"][key] for key in ("mean", "error"))
    assert f"clients' mae {mean:.4g} \u00b1 {error:.1g}" in done.stdout
    assert 0.1 < mean < 10
    assert "house.pt" in done.stdout
    state = torch.load(own_tasks / "house.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "weight": (1, 3),
        "bias": (1,),
    }
    assert document["figures"]["rmse"] < 2
    assert state["weight"].mean() > 0.5, "it has learned some of the slope"


def test_more_kills_than_dropouts_are_a_usage_error() -> None:
    with pytest.raises(ConfigurationError, match=r"--dropout 3 must be 0 to D = 2"):
        plan_deaths(DemoConfig(dropouts=2, dropout=3))
    result = CliRunner().invoke(app, ["run", "--dropout", "7"])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigurationError)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--mode", "async", "--rounds", "3"], "--rounds belongs to the synchronous mode"),
        (["--buffer=3"], "--buffer belongs to the asynchronous mode; add --mode async"),
        (["--mode", "async", "--slow", "7"], "--slow 7 must be 0 to N - K = 4"),
    ],
)
def test_an_option_that_does_not_fit_the_mode_is_refused_by_name(
    arguments: list[str], refusal: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["run", *arguments, "--out", str(tmp_path)])
    assert isinstance(result.exception, ParameterError | ConfigurationError)
    assert str(result.exception).startswith(refusal)


def test_the_time_a_demonstration_takes_decides_nothing_before_its_timeout(tmp_path: Path) -> None:
    """On a busy machine a round began before a killed client was back, and lost one too many."""
    processes = Processes.__new__(Processes)
    processes.config = DemoConfig(clients=5, timeout=777.0)
    made = provision(tmp_path / "federation", 5)
    rounds = load_config(ServerConfig, made.server, processes._overrides(), environment={}).rounds
    assert rounds.min_clients == 5
    waits = [rounds.wait_for_clients, rounds.advertise, rounds.share, rounds.upload]
    assert {*waits, rounds.agree, rounds.recover} == {777.0}


def test_who_is_killed_follows_from_the_seed_alone() -> None:
    config = DemoConfig(rounds=30, seed=5)
    assert plan_deaths(config) == plan_deaths(config)
    assert plan_deaths(config) != plan_deaths(DemoConfig(rounds=30, seed=6))
    per_round = [
        sum(number in deaths for deaths in plan_deaths(config).values()) for number in range(1, 31)
    ]
    assert 0 < max(per_round) <= config.dropouts
