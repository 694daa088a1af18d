"""The laboratory's commands on the product's command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from lightsecagg.cli.main import LABORATORY, app
from lightsecagg.errors import MissingExtra
from lightsecagg.plugins import COMMANDS, added


def test_the_product_knows_the_commands_of_the_laboratory() -> None:
    ours = [name for name, point in added(COMMANDS).items() if "lightsecagg_lab" in point.value]
    assert sorted(ours) == sorted(LABORATORY)
    for name in ours:
        assert isinstance(added(COMMANDS)[name].load(), typer.Typer)


def test_help_lists_them_without_loading_them() -> None:
    code = (
        "import sys\n"
        "from lightsecagg.cli.main import main\n"
        "sys.argv = ['lightsecagg', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'lightsecagg_lab' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert all(summary in run.stdout for summary in LABORATORY.values())


@pytest.mark.parametrize("name", LABORATORY)
def test_the_short_form_of_help_works(name: str) -> None:
    result = CliRunner().invoke(app, [name, "-h"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_command_that_lacks_an_extra_names_it_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = CliRunner().invoke(app, ["experiments", "figure5"]).exception
    assert isinstance(error, MissingExtra)
    assert "needs matplotlib" in str(error)
    assert str(error).endswith("'.[report]'")
