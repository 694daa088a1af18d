"""`lightsecagg status`: what a server answers, what a folder shows, and neither."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.cli.status import _lines, read_health
from lightsecagg.drivers.federation.history import History
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import Metrics
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.errors import ConfigurationError, DecodeError, TransportError
from lightsecagg.session.record import PhaseRecord, RoundRecord


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    made.expires = {"server": 4e9}
    made.serve(0)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two rounds, of which the second failed."""
    state = tmp_path / "fed" / "server" / "state"
    provision(tmp_path / "fed", 4, vectors=3)
    Journal(state, "00" * 32).close()
    done = RoundRecord(1, "lightsecagg", [0, 1], included=[0, 1])
    done.phases = {"upload": PhaseRecord(1000.0, 5.0)}
    History(state / "rounds.json").put(
        done, RoundRecord(2, "lightsecagg", [0, 1], aborted="too few")
    )
    return state


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["status", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_server_that_runs_is_asked(metrics: Metrics) -> None:
    metrics.done, metrics.wanted, metrics.round, metrics.admitted, metrics.needed = 30, 60, 31, 6, 4
    metrics.here = {0, 2}
    url = f"http://127.0.0.1:{metrics.port}"
    for given in (url, f"{url}/", f"{url}/metrics"):
        shown = run("--url", given)
        assert shown.startswith(f"running ({given})\n")
        assert "30 of 60 done, 31 is under way" in shown
        assert "2 of 6 connected, 4 needed" in shown
        assert "until 2096-10-02" in shown
    document = json.loads(run("--url", url, "--json"))
    assert (document["source"], document["connected"], document["round"]) == (url, 2, 31)


def test_a_folder_shows_the_rounds_and_not_the_clients(folder: Path) -> None:
    shown = run("--state", str(folder))
    assert "1 done, 1 aborted" in shown
    assert "1970-01-01 00:16 UTC" in shown
    assert "connected" not in shown


def test_a_configuration_leads_to_the_server_or_else_to_its_folder(
    folder: Path, metrics: Metrics
) -> None:
    config = folder.parent / "server.toml"
    assert "rounds    1 of 1 done, 1 aborted" in run("--config", str(config))
    text = config.read_text()
    config.write_text(text.replace("[server]", f"[server]\nmetrics_port = {metrics.port}"))
    assert f"(http://127.0.0.1:{metrics.port})" in run("--config", str(config))
    metrics.close()
    shown = run("--config", str(config))
    assert f"({folder}; http://127.0.0.1:{metrics.port}/health does not answer: " in shown


def test_a_page_that_answers_something_else_is_named(metrics: Metrics) -> None:
    with pytest.raises(TransportError, match="answers 404 Not Found: it is no health page"):
        run("--url", f"http://127.0.0.1:{metrics.port}/other")


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ([], ConfigurationError, "give one of"),
        (["--url", "http://x", "--state", "y"], ConfigurationError, "give one of"),
        (["--url", "file:///etc/passwd"], ConfigurationError, "must begin with http"),
        (["--url", "http://127.0.0.1:1"], TransportError, "does not answer: .*refused"),
        (["--state", "nothing"], ConfigurationError, "is no state folder"),
    ],
)
def test_what_cannot_be_asked_is_named(
    arguments: list[str], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        run(*arguments)


def test_another_page_is_refused_and_its_words_are_harmless() -> None:
    sound: dict[str, Any] = {"state": "\x1b[2J", "rounds_done": 1}
    found = read_health(json.dumps(sound).encode())
    assert "\x1b" not in "".join(_lines(found, "here", 0.0))
    for wrong in ({}, {"state": 1, "rounds_done": 1}, sound | {"last_success": 1e300}):
        with pytest.raises(DecodeError, match="health page"):
            read_health(json.dumps(wrong).encode())
