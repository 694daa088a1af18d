"""`lightsecagg bench chaos`: whatever can happen to a federation, at random."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lightsecagg.cli import options
from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.options import Mode, refuse_other_mode
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.params import ShareMode

_of_rounds = partial(typer.Option, rich_help_panel=options.SYNC_ONLY, min=0)
_of_buffers = partial(typer.Option, rich_help_panel=options.ASYNC_ONLY)


def bench_chaos(
    ctx: typer.Context,
    mode: Annotated[
        Mode, typer.Option(help="Rounds and every fault, or buffers and kills.")
    ] = Mode.SYNC,
    server_kills: Annotated[
        int | None, typer.Option(help="kill -9 of the server.", min=0, show_default="240; 200")
    ] = None,
    client_kills: Annotated[
        int | None, typer.Option(help="kill -9 of clients.", min=0, show_default="80; 100")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="N, the clients.", min=4, show_default="6; 8")
    ] = None,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", min=1, show_default="1; 2"),
    ] = None,
    dropouts: Annotated[int, typer.Option(help="D, how many may be away.", min=1)] = 2,
    dim: Annotated[
        int | None,
        typer.Option(help="d, the length of the vectors.", min=1, show_default="100; 1000"),
    ] = None,
    share_mode: options.HowShared = ShareMode.SEEDED,
    pause: Annotated[
        float | None,
        typer.Option(help="Seconds between two faults, at most.", show_default="1; 3"),
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds without a sum that are a hang.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Steers what happens; never a mask.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the files of federations that went wrong.")
    ] = None,
    as_json: AsJson = False,
    stops: Annotated[int, _of_rounds(help="SIGSTOP of either, for a while.")] = 30,
    partitions: Annotated[int, _of_rounds(help="Clients are cut off a while.")] = 20,
    disks: Annotated[int, _of_rounds(help="The server's disk is full a while.")] = 15,
    flips: Annotated[int, _of_rounds(help="Bytes changed in state or ledgers.")] = 20,
    changes: Annotated[int, _of_rounds(help="Other parameters of the server.")] = 10,
    seconds: Annotated[
        float | None,
        _of_rounds(help="Go on for this long; the numbers are then proportions.", min=1),
    ] = None,
    buffer: Annotated[int, _of_buffers(help="K, the updates in a buffer.")] = 4,
    timeout: Annotated[float, _of_buffers(help="Give up after this many seconds.")] = 3600.0,
) -> None:
    """Damage a real federation at random, in many ways, and account for every vector.

    Of two defaults, the second is for `--mode async`. Fails if a sum is wrong, an acknowledged
    upload is lost, a vector is summed twice, a client speaks for two sets, damage goes unnoticed,
    it hangs, or anything is left behind. Ctrl-C ends it and reports the results so far (exit code
    130).
    """
    refuse_other_mode(ctx, mode)
    require("bench chaos", "grpc")
    _check_keep(keep)
    from lightsecagg_lab.experiments.chaos import unleash
    from lightsecagg_lab.experiments.chaos_plan import BufferChaos, RoundChaos

    given: dict[str, Any] = {
        "server_kills": server_kills,
        "client_kills": client_kills,
        "clients": clients,
        "privacy": privacy,
        "dropouts": dropouts,
        "dimension": dim,
        "share_mode": share_mode,
        "pause": pause,
        "patience": patience,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}

    chaos: RoundChaos | BufferChaos
    if mode is Mode.ASYNC:
        chaos = BufferChaos(**given, buffer=buffer, timeout=timeout)
    else:
        given |= {"stops": stops, "partitions": partitions, "disks": disks, "flips": flips}
        chaos = RoundChaos(**given, changes=changes, seconds=seconds)
    with deferred_signals() as ask:
        found = unleash(chaos, lambda line: typer.echo(line, err=True), ask, keep)
        _report(found, as_json=as_json)


def _check_keep(keep: Path | None) -> None:
    """Refuse a folder that is in use now, and not when there is something to keep in it."""
    if keep is not None and keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise ConfigurationError(f"--keep {keep} must be a new or an empty folder")


def _report(found: Mapping[str, Any], *, as_json: bool) -> None:
    """What was found; `Aborted` if something must not have happened."""
    if as_json:
        print_json(found)
    else:
        for name, value in found.items():
            if name != "plan":
                typer.echo(f"{name.replace('_', ' ')}: {value}")
    if not found["clean"]:
        raise Aborted("a check has failed: see above")
