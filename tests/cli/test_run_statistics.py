"""`lightsecagg run --statistics`: a table, divided among processes, and its statistics."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.cli.output import exit_codes

pytest.importorskip("grpc")

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()", "run"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    lines = ["name,age,sex,ward"]
    for row in range(200):
        age = "" if row % 20 == 0 else rng.integers(18, 95)
        lines.append(f"Patient {row},{age},{rng.choice(['f', 'm'])},{rng.choice(['a', 'b'])}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines))
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--clients", "5", "--timeout", "250", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.slow
def test_the_statistics_of_a_table_over_sockets(table: Path) -> None:
    declared = ["--range", "age=0:120", "--category", "sex=f,m", "--category", "ward=a,b"]
    done = run("--statistics", str(table), *declared, "--cross", "sex,ward", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    ages = [int(row[1]) for row in rows if row[1]]
    assert (document["clients"], document["rows"]) == (5, 200)
    assert document["included"] == [0, 1, 2, 3, 4]
    assert document["equals_plain_statistics"] is True
    age = document["numbers"]["age"]
    assert (age["count"], age["missing"]) == (190, 10)
    assert age["sum"]["value"] == sum(ages)
    assert age["std"]["value"] == pytest.approx(statistics.stdev(ages))
    pairs = [(row[2], row[3]) for row in rows]
    expected = [[pairs.count((sex, ward)) for ward in "ab"] for sex in "fm"]
    assert document["tables"][0]["counts"] == expected
    assert document["plan"]["minimum_cell"] == 10
    assert "Patient" not in done.stdout + done.stderr


@pytest.mark.slow
def test_without_declarations_they_are_guessed_with_a_warning(table: Path) -> None:
    done = run("--statistics", str(table), "--minimum-cell", "60")
    assert done.returncode == 0, done.stderr
    assert "column 'name' is left out" in done.stderr
    assert "which in real use would reveal them: declare them beforehand" in done.stderr
    assert "5 of 5 clients, 200 rows" in done.stdout
    assert "the secure statistics equal those of the same rows in the clear" in done.stdout
    assert "hidden; fewer than 60 rows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--range", "age=0:120"], "--range belongs to --statistics; name a table with it"),
        (["--statistics", "T", "--rounds", "2"], "--rounds is of training; leave it out"),
        (["--statistics", "T", "--mode", "async"], "--mode is of training; leave it out"),
        (["--statistics", "T", "--range", "age"], "'age' must have the form column=..."),
        (["--statistics", "T", "--range", "age=9"], "'9' is no range; write low:high"),
        (["--statistics", "T", "--range", "age=9:x"], "'9:x' is no range; write low:high"),
        (["--statistics", "T", "--range", "sex=0:1"], "column 'sex', line 2 of patients.csv"),
        (["--statistics", "T", "--range", "height=0:1"], "has no column 'height'; it has 'name'"),
        (["--statistics", "T", "--cross", "sex,height"], "needs categories of 'height'"),
        (["--statistics", "T", "--privacy", "4"], r"lower privacy (T) or dropouts (D)"),
        (["--statistics", "T", "--clients", "2"], "clients N = 2 must be at least 3"),
        (["--statistics", "nowhere.csv"], "nowhere.csv cannot be read: No such file"),
    ],
)
def test_what_cannot_work_is_refused_before_a_process_starts(
    arguments: list[str],
    reason: str,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("lightsecagg.drivers.federation.demo_vectors.sum_vectors", never)
    words = [str(table) if word == "T" else word for word in arguments]
    with pytest.raises(SystemExit) as end, exit_codes():
        app(["run", *words], standalone_mode=False)
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_wrong_statistics_are_an_error(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last(_: Any, vectors: Any, *rest: Any) -> Any:
        return np.sum(vectors[:-1], axis=0), {"included": [*range(len(vectors))]}

    monkeypatch.setattr("lightsecagg.drivers.federation.demo_vectors.sum_vectors", without_the_last)
    result = CliRunner().invoke(app, ["run", "--statistics", str(table)])
    assert "the secure statistics DIFFER FROM those of the same rows" in result.output
    assert "the secure statistics differ" in str(result.exception)


@pytest.mark.slow
def test_the_example_of_a_federation() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "hospital_statistics.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    hospitals = int(lines[0].split()[0])
    assert lines[0] == f"{hospitals} hospitals, {60 * hospitals} patients"
    assert hospitals in (4, 5), "one may come too late"
    assert lines[1].startswith("age: mean ")
    assert lines[-1] == "equal to the same in the clear: True"
