"""The command table: lazy, complete, and honest about version and usage errors."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lightsecagg import __version__, plugins
from lightsecagg.cli import main
from lightsecagg.cli.main import COMMANDS, LABORATORY, app
from lightsecagg.errors import MissingExtra
from lightsecagg.field import kernels


def test_help_lists_every_command_without_loading_it() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)
    code = (
        "import sys\n"
        "from lightsecagg.cli.main import main\n"
        "sys.argv = ['lightsecagg', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"assert not set(sys.modules) & { ({module for module, _ in COMMANDS.values()})!r}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()


def other_distribution(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if another distribution that is installed had these commands."""
    value = "lightsecagg.cli.task:app"
    points = {name: EntryPoint(name, value, main.GROUP) for name in names}
    real = plugins.entry_points

    def entry_points(group: str) -> Iterable[EntryPoint]:
        return points.values() if group == main.GROUP else real(group=group)

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(main, "added", plugins.added.__wrapped__)


def test_another_distribution_adds_commands_by_entry_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_distribution(monkeypatch, "more")
    assert "more" in CliRunner().invoke(app, ["--help"]).output
    assert "digits" in CliRunner().invoke(app, ["more", "list"]).output
    assert CliRunner().invoke(app, ["simulate"]).exit_code != 0


def test_another_distribution_replaces_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    other_distribution(monkeypatch, "provision")
    assert "template" not in CliRunner().invoke(app, ["provision", "--help"]).output


def test_a_command_and_its_subcommand_run() -> None:
    result = CliRunner().invoke(app, ["task", "list"])
    assert result.exit_code == 0
    assert "digits" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()])
def test_every_command_of_the_table_exists(module: str) -> None:
    assert isinstance(importlib.import_module(module).app, typer.Typer)


def test_version_names_the_active_kernels(backend: str) -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"lightsecagg {__version__} ({backend} kernels)\n"
    assert kernels.backend() == backend


@pytest.mark.parametrize("command", [[], ["run"], ["task", "check"]])
def test_the_short_form_of_help_works_everywhere(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "-h"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert "completion" not in result.output


def test_help_breaks_sentences_where_the_terminal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    help_ = CliRunner().invoke(app, ["server", "-h"]).output
    lines = [line.strip() for line in help_.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("Ctrl-C"))
    paragraph = lines[begin : lines.index("", begin)]
    assert len(paragraph) > 2
    assert all(len(line) > 65 for line in paragraph[:-1]), paragraph


@pytest.mark.parametrize("command", [*LABORATORY, *COMMANDS])
def test_help_cuts_nothing_at_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich ends in an ellipsis what is too long for its column, and takes [text] for a style."""
    monkeypatch.setenv("COLUMNS", "80")
    if command in LABORATORY:
        pytest.importorskip("lightsecagg_lab")

    def check(path: list[str], found: Any) -> None:
        assert "…" not in CliRunner().invoke(app, [*path, "--help"]).output, path
        for each in found.params:
            assert "[default" not in (each.help or ""), f"{path}: {each.name}: use show_default"
            # Old typers lose the help of arguments with click 8.5, so constraints.txt stays below.
            assert each.help, f"{path}: {each.name}"
        for name, child in getattr(found, "commands", {}).items():
            check([*path, name], child)

    root: Any = typer.main.get_command(app)
    context = root.make_context("lightsecagg", [], resilient_parsing=True)
    check([command], root.get_command(context, command))


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightsecagg", "--version"], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith(b"lightsecagg ")


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (["run"], "torch", "torch"),
        (["run"], "pydantic", "grpc"),
        (["server", "--config", "nowhere.toml"], "grpc", "grpc"),
    ],
)
def test_a_command_that_lacks_an_extra_names_it_before_anything_else(
    command: list[str], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, MissingExtra)
    assert f"needs {package}" in str(error)
    assert str(error).endswith(f"'.[{extra}]'")


def test_no_command_at_all_shows_the_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "Usage" in result.output
    assert all(name in result.output for name in COMMANDS)
