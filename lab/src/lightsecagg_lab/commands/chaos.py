"""`lightsecagg bench chaos`: whatever can happen to a federation, at random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lightsecagg.cli.by_mode import ByMode
from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.options import Mode
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.params import ShareMode
from lightsecagg_lab.commands import lab_options


class ByModeOfChaos(ByMode):
    """See `chaos_async`."""

    asynchronous = "lightsecagg_lab.commands.chaos_async"


def bench_chaos(
    mode: Annotated[
        Mode, typer.Option(help="Rounds, or buffers: see bench chaos --mode async --help.")
    ] = Mode.SYNC,
    server_kills: Annotated[int, typer.Option(help="kill -9 of the server.", min=0)] = 240,
    client_kills: Annotated[int, typer.Option(help="kill -9 of clients.", min=0)] = 80,
    stops: Annotated[int, typer.Option(help="SIGSTOP of either, for a while.", min=0)] = 30,
    partitions: Annotated[int, typer.Option(help="Clients are cut off a while.", min=0)] = 20,
    disks: Annotated[int, typer.Option(help="The server's disk is full a while.", min=0)] = 15,
    flips: Annotated[int, typer.Option(help="Bytes changed in state or ledgers.", min=0)] = 20,
    changes: Annotated[int, typer.Option(help="Other parameters of the server.", min=0)] = 10,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Go on for so long; the numbers above then say how often each comes.", min=1
        ),
    ] = None,
    clients: Annotated[int, typer.Option(help="N, the clients.", min=4)] = 6,
    privacy: Annotated[
        int, typer.Option(help="T, how many may collude with the server.", min=1)
    ] = 1,
    dropouts: Annotated[int, typer.Option(help="D, how many may be away.", min=1)] = 2,
    dim: Annotated[int, typer.Option(help="d, the length of the vectors.", min=1)] = 100,
    share_mode: lab_options.ShareModeChoice = ShareMode.SEEDED,
    pause: Annotated[float, typer.Option(help="Seconds between two faults, at most.")] = 1.0,
    patience: Annotated[
        float, typer.Option(help="Seconds without a finished round that are a hang.")
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="Steers what happens; never a mask.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the files of federations that went wrong.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Harm a real federation in every way, at random, and account for every vector.

    Fails if a sum is wrong, an acknowledged upload is lost, a vector is summed twice, a client
    speaks for two sets, damage goes unnoticed, nothing goes on, or anything is left behind. Ctrl-C
    ends it, and it reports what there is (exit code 130).
    """
    require("bench chaos", "grpc")
    check_keep(keep)
    from lightsecagg_lab.experiments.chaos_plan import RoundChaos
    from lightsecagg_lab.experiments.round_chaos import unleash_rounds

    chaos = RoundChaos(
        server_kills=server_kills,
        client_kills=client_kills,
        stops=stops,
        partitions=partitions,
        disks=disks,
        flips=flips,
        changes=changes,
        seconds=seconds,
        clients=clients,
        privacy=privacy,
        dropouts=dropouts,
        dimension=dim,
        share_mode=share_mode,
        pause=pause,
        patience=patience,
        seed=seed,
    )
    with deferred_signals() as ask:
        found = unleash_rounds(chaos, lambda line: typer.echo(line, err=True), ask, keep)
        report(found, as_json=as_json)


def check_keep(keep: Path | None) -> None:
    """Refuse a folder that is in use now, and not when there is something to keep in it."""
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise ConfigurationError(f"--keep {keep} must be a new or an empty folder")


def report(found: Mapping[str, Any], *, as_json: bool) -> None:
    """What was found; `Aborted` if something must not have happened."""
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            if name != "plan":
                typer.echo(f"{name.replace('_', ' ')}: {value}")
    if not found["clean"]:
        raise Aborted("something has happened that must not: see above")
