"""`lightsecagg client`: takes part in a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.options import ExecutesCode
from lightsecagg.cli.output import LogLevel, Quiet, last_line_of_log, level_of, print_json

app = typer.Typer(add_completion=False)


@app.command()
def client(
    config: Annotated[
        list[Path],
        typer.Option(help="client.toml; repeat it for several clients in one process."),
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, overrides the files.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the effective configuration and exit.")
    ] = False,
    understood: ExecutesCode = False,
    log_level: LogLevel = "info",
    quiet: Quiet = False,
) -> None:
    """Train (or contribute a vector) in every round until the federation ends.

    Exit codes: 0 the federation has finished, 1 the server cannot be reached or refuses this
    client, 2 configuration error, 3 the server gave up or has another version.
    """
    require("client", "grpc")
    from lightsecagg.drivers.federation.config import ClientConfig, load_config
    from lightsecagg.drivers.federation.observer import set_up_logging

    loaded = [load_config(ClientConfig, path, set_ or ()) for path in config]
    if print_config:
        print_json({"clients": [item.model_dump(mode="json") for item in loaded]})
        return
    if any(item.training is not None for item in loaded):
        require("a client that trains", "torch")
    set_up_logging(level_of(log_level, quiet=quiet))
    from lightsecagg.drivers.federation.programs import run_clients

    with last_line_of_log():
        run_clients(loaded, understood=understood)
