"""`lightsecagg`: one table of commands, each module loaded only when its command is used.

A command module lives in `lightsecagg/cli/<name>.py` and defines `app`, a `typer.Typer`. Adding
a command is one line in `COMMANDS`. Other distributions, the laboratory among them, add commands
by entry points of the group `lightsecagg.commands`, each of which names an `app`.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lightsecagg import __version__
from lightsecagg.cli.output import exit_codes
from lightsecagg.errors import MissingLaboratory
from lightsecagg.plugins import COMMANDS as GROUP
from lightsecagg.plugins import added

# name -> (module, the line that `lightsecagg --help` shows)
COMMANDS = {
    "client": ("lightsecagg.cli.client", "Take part in a federation."),
    "dashboard": ("lightsecagg.cli.dashboard", "Show a federation's rounds in a browser."),
    "ledger": ("lightsecagg.cli.ledger", "Show what a client remembers, or make it forget."),
    "members": ("lightsecagg.cli.members", "Admit, revoke and renew the clients of a federation."),
    "model": ("lightsecagg.cli.model", "Export the trained model of a federation."),
    "provision": ("lightsecagg.cli.provision", "Create the keys and files of a federation."),
    "run": ("lightsecagg.cli.run", "Demonstrate a federation on this machine."),
    "server": ("lightsecagg.cli.server", "Run the rounds of a federation."),
    "status": ("lightsecagg.cli.status", "Print how a federation is."),
    "task": ("lightsecagg.cli.task", "Write, check and list learning tasks."),
}

LABORATORY = {
    "bench": "Measure the hot loops, and whole federations.",
    "experiments": "Regenerate the paper's tables and figures.",
    "plan": "Forecast what a federation will cost, and choose U.",
    "simulate": "Simulate rounds and report what each phase costs.",
}
"""Commands of the laboratory and their lines of help, so that neither imports it."""


def summaries() -> dict[str, str]:
    """Every command that can be used here, with its line of help."""
    found: dict[str, str] = {}
    for name, point in added(GROUP).items():
        origin = f"Added by {point.dist.name}." if point.dist else ""
        found[name] = LABORATORY.get(name, origin)
    found |= {name: summary for name, (_, summary) in COMMANDS.items()}  # none replaces ours
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
            own = added(GROUP)[cmd_name].load()
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
