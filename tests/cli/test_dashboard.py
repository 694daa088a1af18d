"""`lightsecagg dashboard`: a state folder in a browser, until a signal comes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightsecagg import system
from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.session.record import RoundRecord

COMMAND = [sys.executable, "-c", "from lightsecagg.cli.main import main; main()", "dashboard"]


def test_it_shows_the_folder_as_it_changes_and_a_signal_ends_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "00" * 32)
    history = History(tmp_path / "rounds.json")
    history.put(RoundRecord(1, "lightsecagg", [0, 1], included=[0, 1]))
    command = [*COMMAND, "--state", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"dashboard on (http://\S+)", process.stderr.readline())
        assert found is not None
        with urllib.request.urlopen(f"{found[1]}events", timeout=60) as page:  # noqa: S310
            first = events(page)
            assert [each["round"] for each in first["history"]] == [1]
            history.put(RoundRecord(2, "lightsecagg", [0, 1], aborted="too few"))
            while "history" not in (later := events(page)):
                pass
        assert [each["aborted"] for each in later["history"]] == ["too few"]
        process.send_signal(system.STOP[0])
        process.communicate(timeout=60)
    assert process.returncode == 0
    journal.close()


def events(page: object) -> dict[str, list[dict[str, object]]]:
    for line in page:  # type: ignore[attr-defined]
        if line.startswith(b"data: "):
            parts: dict[str, list[dict[str, object]]] = json.loads(line[6:])
            return parts
    raise EOFError


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_folder_without_a_journal_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["dashboard", "--state", str(tmp_path / name)])
    assert done.exit_code != 0
    assert "is no state folder" in str(done.exception)
