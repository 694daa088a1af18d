from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from lightsecagg.cli.main import COMMANDS, app


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


def test_a_command_and_its_subcommand_run() -> None:
    result = CliRunner().invoke(app, ["task", "list"])
    assert result.exit_code == 0
    assert "digits" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2
