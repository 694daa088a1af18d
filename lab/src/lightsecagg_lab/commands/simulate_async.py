"""`lightsecagg simulate --mode async`: buffers of stale updates, on random vectors or a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from lightsecagg.cli import options
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.errors import Aborted, ParameterError
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import Staleness, StalenessTable
from lightsecagg.params import Decoding, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg_lab.commands import lab_options
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.fedbuff import FedBuffServer
from lightsecagg_lab.simulation.async_fedbuff import PlainFederation
from lightsecagg_lab.simulation.async_federation import Federation, Flush
from lightsecagg_lab.simulation.async_lightsecagg import AsyncConfig, ProtectedFederation
from lightsecagg_lab.simulation.asynchronous import AsyncReport, simulate_async
from lightsecagg_lab.simulation.schedule import EventQueue, Fleet, Schedule, UniformStaleness
from lightsecagg_lab.simulation.workload import RandomVectors, Workload

app = typer.Typer(add_completion=False)

# Random streams that never meet; batches are seeded by the training engine.
_SCHEDULE, _ROUNDING = 1, 2


class Arrivals(StrEnum):
    """Where staleness comes from."""

    UNIFORM = "uniform"
    """The paper's setting: staleness uniform on [0, tau_max]."""
    QUEUE = "queue"
    """Clients of different speed on a virtual clock."""


@app.command()
def simulate(
    clients: lab_options.Clients,
    privacy: lab_options.Privacy,
    dropouts: Annotated[int, typer.Option(help="D, how many may be away.")],
    buffer: Annotated[int, typer.Option(help="K, the updates in a buffer; at least T + 2.")],
    dim: Annotated[int, typer.Option(help="d, the length of random vectors; not with --task.")] = 0,
    task: Annotated[
        str | None, typer.Option(help="Train: a built-in task or package.module:Task.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the built-in task.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the task's data is.")] = None,
    flushes: Annotated[int, typer.Option(min=1, help="Buffers to recover.")] = 10,
    protocol: lab_options.BufferedProtocol = ProtocolName.LIGHTSECAGG,
    survivors: Annotated[
        int, typer.Option(help="U, the answers needed.", show_default="N - D")
    ] = 0,
    share_mode: Annotated[ShareMode, typer.Option(help="How shares are made.")] = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    threat_model: lab_options.DefendAgainst = ThreatModel.HONEST_BUT_CURIOUS,
    field: lab_options.FieldChoice = lab_options.Field.DEFAULT,
    staleness: Annotated[
        Staleness, typer.Option(metavar="NAME", help="s(tau): constant, poly or hinge.")
    ] = Staleness.POLY,
    staleness_alpha: Annotated[float, typer.Option(help="Exponent of poly, slope of hinge.")] = 1.0,
    hinge_at: Annotated[int, typer.Option(help="Where hinge begins.")] = 3,
    tau_max: Annotated[int, typer.Option(help="Updates staler than this are dropped.")] = 10,
    local_scale: Annotated[
        float | None,
        typer.Option(
            help="c_l; the bound is then the largest that cannot wrap around.",
            show_default="the finest for --bound",
        ),
    ] = None,
    bound: Annotated[
        float, typer.Option(help="Largest entry of an update, without --local-scale.")
    ] = 1.0,
    staleness_scale: Annotated[int, typer.Option(help="c_g.")] = 64,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Demand T + 2 owners per weight. Against a malicious server T + 2 share each "
            "model, and with it a weight, anyway.",
        ),
    ] = False,
    stock: Annotated[int, typer.Option(help="Masks that a client shares ahead of time.")] = 2,
    arrivals: Annotated[
        Arrivals, typer.Option(help="uniform: the paper's staleness; queue: a virtual clock.")
    ] = Arrivals.UNIFORM,
    compute: Annotated[float, typer.Option(help="queue: median seconds of training.")] = 10.0,
    spread: Annotated[float, typer.Option(help="queue: how much clients differ (log).")] = 0.5,
    bandwidth: Annotated[float, typer.Option(help="queue: a client's Mbit/s.")] = 20.0,
    straggling: Annotated[
        float, typer.Option(help="queue: how often training is 10x slow.")
    ] = 0.05,
    dropout: Annotated[float, typer.Option(help="queue: how often a client leaves.")] = 0.0,
    absence: Annotated[float, typer.Option(help="queue: mean seconds until it is back.")] = 60.0,
    concurrency: Annotated[
        int, typer.Option(help="queue: clients that train at a time.", show_default="all")
    ] = 0,
    flush_after: Annotated[
        float | None, typer.Option(help="queue: flush early after this many seconds.")
    ] = None,
    departures: Annotated[
        float, typer.Option(help="How often a client vanishes while a buffer is in flight.")
    ] = 0.0,
    epochs: Annotated[int, typer.Option(help="Task: local epochs E.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Task: local batch size.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Task: local learning rate.")] = 0.05,
    server_rate: Annotated[float, typer.Option(help="Task: eta_g.")] = 0.3,
    seed: Annotated[
        int, typer.Option(help="Seed of data, schedule, rounding; never of a mask.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate buffered-asynchronous aggregation in one process, and check every sum."""
    modulus = field.modulus
    function = staleness.function(staleness_alpha, hinge_at)
    table = StalenessTable.from_function(function, staleness_scale, tau_max)
    if buffer > clients:
        raise ParameterError(
            f"--buffer K = {buffer} must be at most N = {clients}: a buffer holds updates of "
            "different clients"
        )
    if (task is None) == (dim < 1):
        raise ParameterError("give either --dim, for random vectors, or --task")
    if task is None:
        workload: Workload = RandomVectors(dim, bound, seed)
    else:
        workload = _training(
            task,
            model,
            data_dir,
            clients,
            epochs,
            batch_size,
            learning_rate,
            server_rate,
            tau_max,
            seed,
        )
    generator = np.random.default_rng((seed, _SCHEDULE))
    schedule: Schedule
    if arrivals is Arrivals.UNIFORM:
        schedule = UniformStaleness(clients, tau_max, generator)
    else:
        fleet = Fleet(compute, spread, bandwidth, straggling, dropout, absence, concurrency)
        schedule = EventQueue(clients, 4 * workload.dimension, fleet, generator)
    evaluations: list[dict[str, float]] = []
    federation: Federation
    with _progress_bar(clients, flushes) as progress:
        if protocol == lab_options.FEDBUFF:
            server = FedBuffServer(workload.dimension, buffer, function, tau_max)
            federation = PlainFederation(clients, server)
        else:
            parameters = Parameters(
                clients, privacy, dropouts, survivors, threat_model, share_mode, modulus
            )
            buffering = Buffering(table, max_updates=buffer, strict=strict, stock=stock + 2)
            config = AsyncConfig(
                parameters=parameters,
                buffering=buffering,
                quantizer=_quantizer(
                    parameters, buffering, workload.dimension, bound, local_scale, decoding
                ),
                dimension=workload.dimension,
                buffer_size=buffer,
                stock=stock,
                protocol=protocol,
                departures=departures,
            )
            rounding = np.random.default_rng((seed, _ROUNDING))
            federation = ProtectedFederation(config, rounding, progress.stocked)

        def note(flush: Flush) -> None:
            if flush.lost is not None:
                return
            progress.flushed()
            if task is not None:
                evaluations.append({"flush": flush.time, **workload.evaluate()})  # type: ignore[attr-defined]

        report = simulate_async(
            federation,
            workload,
            schedule,
            flushes,
            max_staleness=tau_max,
            flush_after=flush_after,
            on_flush=note,
        )
    document = _document(protocol, report, federation, workload, evaluations)
    if as_json:
        print_json(document)
    else:
        _show(document)
    if report.exact is False:
        raise Aborted("a recovered sum is wrong")


def _quantizer(
    parameters: Parameters,
    buffering: Buffering,
    dimension: int,
    bound: float,
    scale: float | None,
    decoding: Decoding | None,
) -> Quantizer:
    """The finest for this bound, or with a given c_l, the one with the largest bound."""

    def make(bound: float, scale: float = 0.0) -> Quantizer:
        return make_quantizer(
            parameters, dimension, bound, scale=scale, buffering=buffering, decoding=decoding
        )

    return make(bound) if scale is None else make(make(1.0).budget / scale, scale)


class _Progress(NamedTuple):
    """What moves the two bars."""

    stocked: Callable[[], None]
    flushed: Callable[[], None]


@contextmanager
def _progress_bar(clients: int, flushes: int) -> Iterator[_Progress]:
    """Bars on stderr: clients that have shared their first masks, and recovered buffers."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        masks = bar.add_task("masks shared ahead", total=clients)
        buffers = bar.add_task("buffers recovered", total=flushes, start=False)

        def stocked() -> None:
            bar.advance(masks)

        def flushed() -> None:
            bar.start_task(buffers)
            bar.advance(buffers)

        yield _Progress(stocked, flushed)


def _training(
    task: str,
    model: str | None,
    data_dir: Path | None,
    clients: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    server_rate: float,
    max_staleness: int,
    seed: int,
) -> Workload:
    from lightsecagg.training import LocalConfig, ServerConfig, TaskConfig
    from lightsecagg_lab.simulation.async_training import TrainingWorkload

    return TrainingWorkload(
        TaskConfig(task, clients, model, data_dir, seed=seed),
        LocalConfig(epochs, batch_size, learning_rate=learning_rate),
        ServerConfig(learning_rate=server_rate),
        max_staleness=max_staleness,
        seed=seed,
    )


def _document(
    protocol: str,
    report: AsyncReport,
    federation: Federation,
    workload: Workload,
    evaluations: list[dict[str, float]],
) -> dict[str, Any]:
    phases = federation.meter.costs()
    lost = [asdict(flush) for flush in report.flushes if flush.lost is not None]
    document: dict[str, Any] = {
        "mode": "async",
        "protocol": protocol,
        "dimension": workload.dimension,
        "exact": report.exact,
        "flushes": report.recovered,
        "lost": [{"time": flush["time"], "reason": flush["lost"]} for flush in lost],
        "uploads": report.uploads,
        "too_stale": report.too_stale,
        "held_back": report.held_back,
        "departures": report.departures,
        "virtual_seconds": report.clock,
        "mean_staleness": fmean(tau for flush in report.flushes for tau in flush.staleness),
        "buffers": [
            {
                "time": flush.time,
                "owners": len(flush.owners),
                "staleness": list(flush.staleness),
                "responders": flush.responders,
                "exact": flush.exact,
            }
            for flush in report.flushes
            if flush.lost is None
        ],
        "phases": phases,
        "bytes": sum(int(p["upload_bytes"] + p["download_bytes"]) for p in phases.values()),
        "seconds": sum(p["client_seconds"] + p["server_seconds"] for p in phases.values()),
    }
    if isinstance(federation, ProtectedFederation):
        document |= federation.protection
    if evaluations:
        document["evaluations"] = evaluations
    return document


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{document['protocol']}, {document['flushes']} buffers, d = "
        f"{document['dimension']:,}",
        caption="CPU seconds and bytes of the whole run; all clients together",
    )
    table.add_column("phase")
    for column in ("clients", "server", "up", "down"):
        table.add_column(column, justify="right")
    for phase, cost in document["phases"].items():
        table.add_row(
            phase,
            f"{cost['client_seconds']:.2f} s",
            f"{cost['server_seconds']:.2f} s",
            f"{cost['upload_bytes'] / 1e6:.2f} MB",
            f"{cost['download_bytes'] / 1e6:.2f} MB",
        )
    console = Console()
    console.print(table)
    dithered = document.get("decoding") == Decoding.DITHERED
    how = "right up to the noise of dithered decoding" if dithered else "exact, element for element"
    verdict = {
        True: f"[green]every recovered sum is {how}[/green]",
        False: "[red]A RECOVERED SUM IS WRONG[/red]",
        None: "[yellow]unprotected: the server has seen every update[/yellow]",
    }[document["exact"]]
    console.print(
        f"{document['uploads']} uploads, mean staleness {document['mean_staleness']:.2f}, "
        f"{len(document['lost'])} buffers lost, {document['too_stale']} updates too stale; "
        f"{verdict}",
        highlight=False,
        soft_wrap=True,
    )
    if len(document["lost"]) > document["flushes"]:
        console.print(
            "[yellow]more buffers were lost than recovered: fewer than U = N - D clients were "
            "there to answer; raise --dropouts[/yellow]",
            highlight=False,
            soft_wrap=True,
        )
    if "strict" in document:
        strict = "strict" if document["strict"] else "not strict"
        console.print(
            f"{document['threat_model']}, buffers {strict}, c_l = {document['scale']:g}",
            highlight=False,
        )
    if document.get("evaluations"):
        console.print(f"last evaluation: {document['evaluations'][-1]}", highlight=False)
