"""`lightsecagg`: one table of commands, each module loaded only when its command is used.

A command module lives in `lightsecagg/cli/<name>.py` and defines `app`, a `typer.Typer`. Adding
a command is one line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lightsecagg import __version__
from lightsecagg.cli.output import exit_codes

# name -> (module, the line that `lightsecagg --help` shows)
COMMANDS = {
    "bench": ("lightsecagg.cli.bench", "Measure the hot loops on this machine."),
    "client": ("lightsecagg.cli.client", "Take part in a federation."),
    "dashboard": ("lightsecagg.cli.dashboard", "Show a federation's rounds in a browser."),
    "experiments": ("lightsecagg.cli.experiments", "Regenerate the paper's tables and figures."),
    "ledger": ("lightsecagg.cli.ledger", "Show what a client remembers, or make it forget."),
    "members": ("lightsecagg.cli.members", "Admit, revoke and renew in a federation that runs."),
    "model": ("lightsecagg.cli.model", "Take the trained model out of a federation."),
    "plan": ("lightsecagg.cli.plan", "Forecast what a federation will cost, and choose U."),
    "provision": ("lightsecagg.cli.provision", "Create the keys and files of a federation."),
    "run": ("lightsecagg.cli.run", "Demonstrate a federation on this machine."),
    "server": ("lightsecagg.cli.server", "Run the rounds of a federation."),
    "simulate": ("lightsecagg.cli.simulate", "Simulate rounds and what every phase costs."),
    "task": ("lightsecagg.cli.task", "Start, check and list learning tasks."),
}


class LazyGroup(TyperGroup):
    """A command group that imports a command's module when the command is asked for.

    Contexts and formatters are `Any`: older typers have those of click, newer ones their own.
    """

    _only_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if self._only_listing:
            return TyperCommand(cmd_name, short_help=summary, help=summary)
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        return _flowing(command)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, from the table alone: no command's module is imported for it."""
        self._only_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._only_listing = False


def _flowing(command: Any) -> Any:
    """With each paragraph of its help on one line: typer breaks them where the source does."""
    if command.help:
        paragraphs = command.help.split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    for each in getattr(command, "commands", {}).values():
        _flowing(each)
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Secure aggregation for federated learning.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from lightsecagg.field import kernels

        typer.echo(f"lightsecagg {__version__} ({kernels.backend()} kernels)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    with exit_codes():
        app()
