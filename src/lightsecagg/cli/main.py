"""`lightsecagg`: one table of commands, each module loaded only when its command is used.

A command module lives in `lightsecagg/cli/<name>.py` and defines `app`, a `typer.Typer`. Adding
a command is one line in `COMMANDS`. Other distributions, the laboratory among them, add commands
by entry points of the group `lightsecagg.commands`, each of which names an `app`.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lightsecagg import __version__
from lightsecagg.cli.output import exit_codes
from lightsecagg.errors import MissingLaboratory

# name -> (module, the line that `lightsecagg --help` shows)
COMMANDS = {
    "client": ("lightsecagg.cli.client", "Take part in a federation."),
    "dashboard": ("lightsecagg.cli.dashboard", "Show a federation's rounds in a browser."),
    "ledger": ("lightsecagg.cli.ledger", "Show what a client remembers, or make it forget."),
    "members": ("lightsecagg.cli.members", "Admit, revoke and renew in a federation that runs."),
    "model": ("lightsecagg.cli.model", "Take the trained model out of a federation."),
    "provision": ("lightsecagg.cli.provision", "Create the keys and files of a federation."),
    "run": ("lightsecagg.cli.run", "Demonstrate a federation on this machine."),
    "server": ("lightsecagg.cli.server", "Run the rounds of a federation."),
    "task": ("lightsecagg.cli.task", "Start, check and list learning tasks."),
}

GROUP = "lightsecagg.commands"
"""The group of entry points."""

LABORATORY = {
    "bench": "Measure the hot loops on this machine.",
    "experiments": "Regenerate the paper's tables and figures.",
    "plan": "Forecast what a federation will cost, and choose U.",
    "simulate": "Simulate rounds and what every phase costs.",
}
"""Commands of the laboratory and their lines of help, so that neither imports it."""


@cache
def added_commands() -> dict[str, EntryPoint]:
    """Commands of other distributions that are installed; none replaces one of ours."""
    return {each.name: each for each in entry_points(group=GROUP) if each.name not in COMMANDS}


def summaries() -> dict[str, str]:
    """Every command that can be used here, with its line of help."""
    found = {name: summary for name, (_, summary) in COMMANDS.items()}
    for name, point in added_commands().items():
        origin = f"Added by {point.dist.name}." if point.dist else ""
        found[name] = LABORATORY.get(name, origin)
    return dict(sorted(found.items()))


class LazyGroup(TyperGroup):
    """A command group that imports a command's module when the command is asked for.

    Contexts and formatters are `Any`: older typers have those of click, newer ones their own.
    """

    _only_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(summaries())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in (known := summaries()):
            if cmd_name in LABORATORY:
                raise MissingLaboratory(f"{cmd_name} is a command of the laboratory")
            return None
        if self._only_listing:
            return TyperCommand(cmd_name, short_help=known[cmd_name], help=known[cmd_name])
        if cmd_name in COMMANDS:
            own = importlib.import_module(COMMANDS[cmd_name][0]).app
        else:
            own = added_commands()[cmd_name].load()
        command = typer.main.get_command(own)
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
