"""`lightsecagg bench chaos --mode async`: kills, and what becomes of every update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.output import AsJson
from lightsecagg.params import ShareMode
from lightsecagg_lab.commands import lab_options
from lightsecagg_lab.commands.chaos import check_keep, report

app = typer.Typer(add_completion=False)


@app.command()
def bench_chaos(
    server_kills: Annotated[int, typer.Option(help="kill -9 of the server.", min=0)] = 200,
    client_kills: Annotated[int, typer.Option(help="kill -9 of clients.", min=0)] = 100,
    clients: Annotated[int, typer.Option(help="N, the clients.", min=4)] = 8,
    privacy: Annotated[int, typer.Option(help="T, how many may collude with the server.")] = 2,
    dropouts: Annotated[int, typer.Option(help="D, how many may be away.")] = 2,
    buffer: Annotated[int, typer.Option(help="K, the updates in a buffer.")] = 4,
    dim: Annotated[int, typer.Option(help="d, the length of the vectors.", min=1)] = 1000,
    share_mode: lab_options.ShareModeChoice = ShareMode.SEEDED,
    pause: Annotated[float, typer.Option(help="Seconds between two kills, at most.")] = 3.0,
    patience: Annotated[
        float, typer.Option(help="Seconds without a recovered buffer that are a hang.")
    ] = 120.0,
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Steers who is killed when; never a mask.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the files of a federation that went wrong.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Kill the server and clients of a real federation at random, and account for every update.

    Fails if a sum is wrong, an acknowledged update is lost, anything is used twice, or nothing goes
    on. Ctrl-C ends it, and it reports what there is (exit code 130).
    """
    require("bench chaos", "grpc")
    check_keep(keep)
    from lightsecagg_lab.experiments.chaos import Chaos, unleash

    chaos = Chaos(
        server_kills=server_kills,
        client_kills=client_kills,
        clients=clients,
        privacy=privacy,
        dropouts=dropouts,
        buffer=buffer,
        dimension=dim,
        share_mode=share_mode,
        pause=pause,
        patience=patience,
        timeout=timeout,
        seed=seed,
    )
    with deferred_signals() as ask:
        found = unleash(chaos, lambda line: typer.echo(line, err=True), ask, keep)
        report(found, as_json=as_json)
