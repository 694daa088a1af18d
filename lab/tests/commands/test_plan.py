"""`lightsecagg plan`: an answer for those who know N and d only, readable at 80 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.errors import LightSecAggError, ParameterError
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg_lab.planning.proposals import propose


def run(*arguments: str, columns: int = 80) -> str:
    command = ["plan", *arguments, "--stated"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": str(columns)})
    if isinstance(result.exception, LightSecAggError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def document(*arguments: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return made


def page(name: str) -> str:
    return (Path(__file__).parents[3] / "docs" / name).read_text("utf-8")


def test_the_first_page_has_the_seconds_that_its_commands_print() -> None:
    text = page("get-started.md")
    commands = re.findall(r"^lightsecagg plan (.*) --stated$", text, re.MULTILINE)
    few, many = (document(*command.split())["round_seconds"] for command in commands)
    assert f"{few['lightsecagg-seeded']:.2f} s, 1.14 times unprotected" in text
    assert f"SecAgg+ takes {few['secagg+']:.2f} s" in text
    assert f"{many['lightsecagg-seeded']:.2f} s beside {many['secagg+']:.2f} s" in text
    assert f"would take {many['lightsecagg-short-key']:.2f} s" in text


def test_the_costs_of_room_for_a_liar_are_those_of_the_planner() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\d+), (\d+) \| (\d+), .* \| (.* MB) \| (.* s) \| (.*) \|$",
        page("how-to-choose.md"),
        re.MULTILINE,
    )
    assert len(rows) == 9
    for clients, privacy, dropouts, survivors, *stated in rows:
        found = []
        for each in (survivors, str(int(clients) - int(dropouts))):
            made = document(
                *("--clients", clients, "--privacy", privacy, "--dropouts", dropouts),
                *("--dim", "1e6", "--survivors", each),
            )
            seconds = made["round_seconds"]["lightsecagg-seeded"]
            phases = made["protocols"]["lightsecagg-seeded"].values()
            sent = sum(phase["client_upload_bytes"] for phase in phases if isinstance(phase, dict))
            found += [f"{sent / 1e6:.1f} MB", f"{seconds:.2f} s"]
        assert [*found[:2], ", ".join(found[2:])] == stated, clients


@pytest.mark.parametrize("threat_model", list(ThreatModel))
@pytest.mark.parametrize("clients", [4, 5, 6, 7, 10, 33, 50, 200])
def test_every_proposal_can_be_used(clients: int, threat_model: ThreatModel) -> None:
    balanced, private, robust = propose(clients, threat_model)
    for each in (balanced, private, robust):
        Parameters(clients, each.privacy, each.dropouts, threat_model=threat_model)
        assert each.privacy >= 1
    assert private.privacy >= balanced.privacy >= robust.privacy
    assert private.dropouts <= balanced.dropouts <= robust.dropouts


def test_clients_and_dimension_are_enough() -> None:
    made = document("--clients", "50", "--dim", "1e6", "--training-seconds", "10")
    assert [each["name"] for each in made["proposals"]] == ["balanced", "private", "robust"]
    assert made["settings"]["dim"] == 1_000_000
    for each in made["proposals"]:
        assert "may collude with the server" in each["buys"]
        assert each["round_seconds"]["lightsecagg-seeded"] > 0
        assert each["verdict"].startswith("choose lightsecagg-seeded, because ")
        assert each["choice"]["protocol"] == "lightsecagg-seeded"
    assert made["settings"]["privacy"] == made["proposals"][0]["privacy"]


def test_a_plan_defends_against_what_provisioning_does(tmp_path: Any) -> None:
    made = document("--clients", "12", "--dim", "100")
    assert made["settings"]["threat_model"] == ThreatModel.MALICIOUS_SERVER
    settings = made["settings"]
    federation = provision(
        tmp_path / "fed", 12, privacy=settings["privacy"], dropouts=settings["dropouts"], vectors=3
    )
    text = federation.server.read_text()
    assert f"privacy = {settings['privacy']}\n" in text
    assert f'threat_model = "{settings["threat_model"]}"' in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--clients", "200", "--dim", "1206590"),
        ("--clients", "200", "--dim", "1206590", "--privacy", "50", "--dropouts", "40"),
        ("--clients", "20", "--dim", "5288548", "--verbose"),
        ("--clients", "50", "--dim", "1e6", "--threat-model", "honest-but-curious", "--verbose"),
    ],
)
def test_tables_fit_into_80_columns_uncut(arguments: tuple[str, ...]) -> None:
    narrow, wide = run(*arguments), run(*arguments, columns=200)
    assert "\u2026" not in narrow
    for name in ("lightsecagg-seeded", "lightsecagg-paper", "secagg "):
        assert name in narrow
    cells = [line.split() for line in narrow.splitlines()]
    assert sum(len(line) for line in cells) == sum(len(line.split()) for line in wide.splitlines())


def test_the_last_line_is_a_verdict() -> None:
    text = run(
        *("--clients", "20", "--dim", "1e6", "--threat-model", "honest-but-curious"),
        *("--training-seconds", "10"),
    )
    last = text.strip().splitlines()[-1]
    assert last.startswith("verdict choose lightsecagg-seeded, because its round takes ")
    assert "times unprotected" in last
    assert "; secagg" in last


def test_one_of_t_and_d_is_enough_too() -> None:
    assert (
        document("--clients", "40", "--dim", "10", "--privacy", "20")["settings"]["dropouts"] == 9
    )
    assert (
        document("--clients", "40", "--dim", "10", "--dropouts", "18")["settings"]["privacy"] == 3
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--privacy", "2", "--dropouts", "2", "--liars", "5"], "lower E, T or D"),
        (["--privacy", "9", "--dropouts", "2"], "T . 2 = 11 .* lower privacy"),
        (["--privacy", "3", "--dropouts", "4"], r"needs T \+ 2D < N, but T = 3, D = 4, N = 10"),
        (["--dropouts", "12"], "dropouts D = 12 of N = 10 clients leave nobody"),
    ],
)
def test_errors_speak_of_what_was_given(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ParameterError, match=complaint) as caught:
        run("--clients", "10", "--dim", "100", *arguments)
    assert "U =" not in str(caught.value)


@pytest.mark.parametrize("dim", ["1.5", "many", "nan"])
def test_a_dimension_that_is_no_whole_number_is_a_usage_error(dim: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--clients", "10", "--dim", dim])
    assert result.exit_code == 2
    assert "number" in result.output
