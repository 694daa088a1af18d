"""`lightsecagg server`: runs the rounds of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.options import ExecutesCode
from lightsecagg.cli.output import (
    LogLevel,
    Quiet,
    last_line_of_log,
    level_of,
    phase_bar,
    print_json,
)

app = typer.Typer(add_completion=False)


@app.command()
def server(
    config: Annotated[Path, typer.Option(help="server.toml, made by `lightsecagg provision`.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, overrides the file.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the effective configuration and exit.")
    ] = False,
    abandon_round: Annotated[
        bool,
        typer.Option(
            "--abandon-round",
            help="Give up the round that a crash interrupted, instead of resuming it.",
        ),
    ] = False,
    understood: ExecutesCode = False,
    log_level: LogLevel = "info",
    quiet: Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the report of this run's rounds as JSON at the end."),
    ] = False,
) -> None:
    """Serve a federation until its rounds are done; after a crash, resume it.

    Ctrl-C or SIGTERM ends after the current round, a second one at once. Exit codes: 0 done or
    stopped, 2 configuration error, 3 a round was aborted for good, 1 anything else.
    """
    require("server", "grpc")
    from lightsecagg.drivers.federation.config import ServerConfig, load_config
    from lightsecagg.drivers.federation.observer import set_up_logging

    loaded = load_config(ServerConfig, config, set_ or ())
    if print_config:
        print_json(loaded.model_dump(mode="json"))
        return
    if loaded.training is not None:
        require("a server that trains", "torch")
    set_up_logging(level_of(log_level, quiet=quiet))
    from lightsecagg.drivers.federation.programs import run_server

    with last_line_of_log(), phase_bar(wanted=not quiet) as progress:
        records = run_server(loaded, progress, abandon=abandon_round, understood=understood)
    if as_json:
        print_json({"rounds": [record.to_json() for record in records]})
