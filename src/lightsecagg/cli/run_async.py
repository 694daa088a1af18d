"""`lightsecagg run --mode async`: a real federation with stragglers and kills, and its report."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightsecagg.cli import demonstration, options
from lightsecagg.cli.extras import require
from lightsecagg.cli.output import AsJson, warn
from lightsecagg.cli.task import parse_options
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import ProtocolName
from lightsecagg.training.config import LocalConfig, TaskConfig

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.epoch_demo import EpochDemoConfig, EpochDemoResult

app = typer.Typer(add_completion=False)
_STALE = 3
"""Versions by which an update of every straggler is to be behind, if they are slow enough."""


@app.command()
def run(
    clients: options.ClientProcesses = 8,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", show_default="N/4"),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may vanish.", show_default="N/4")
    ] = None,
    survivors: options.AnswersNeeded = 0,
    buffer: Annotated[
        int | None,
        typer.Option(help="K, the updates in a buffer.", show_default="N/2, or T + 2"),
    ] = None,
    flushes: Annotated[
        int,
        typer.Option(min=1, help="Buffers to recover; more until those who are killed are back."),
    ] = 24,
    staleness: Annotated[Staleness, typer.Option(help="s(tau).")] = Staleness.CONSTANT,
    tau_max: Annotated[int, typer.Option(help="Updates staler than this are dropped.")] = 20,
    slow: Annotated[int, typer.Option(help="How many clients are stragglers.")] = 2,
    slowdown: Annotated[float, typer.Option(help="How many times as long they train.")] = 10.0,
    client_kills: Annotated[int, typer.Option(min=0, help="SIGKILLs of clients.")] = 2,
    server_kills: Annotated[int, typer.Option(min=0, help="SIGKILLs of the server.")] = 1,
    share_mode: options.HowShared = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    protocol: options.ProtocolChoice = ProtocolName.LIGHTSECAGG,
    threat_model: Annotated[
        ThreatModel | None,
        typer.Option(help="[default: malicious-server; honest-but-curious for plain]"),
    ] = None,
    task: options.TaskChoice = "digits",
    model: options.ModelChoice = None,
    data_dir: options.DataFolder = None,
    partition: options.Partitioning = "iid",
    task_option: options.TaskOptions = None,
    epochs: options.LocalEpochs = 5,
    batch_size: options.LocalBatches = 16,
    learning_rate: options.LocalRate = 0.1,
    server_rate: Annotated[float, typer.Option(help="eta_g, the server's learning rate.")] = 0.5,
    bound: options.ClippedAt = 4.0,
    overlap: Annotated[
        demonstration.Overlap,
        typer.Option(help="Where clients train while they share masks and answer."),
    ] = demonstration.Overlap.THREAD,
    samples: options.Samples = None,
    seed: options.DemoSeed = 0,
    out: options.ReportFolder = Path("report"),
    save_model: options.SaveModel = None,
    dashboard: options.Dashboard = False,
    dashboard_port: options.DashboardPort = None,
    timeout: options.Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Train in the asynchronous mode: stragglers, killed clients, a killed server, over TLS.

    Needs no download: the default task is scikit-learn's digits.

    For the final check the clients of this demonstration ALSO write their plain updates to a
    temporary folder, which no real client does. Ctrl-C ends it with a report of what there is.
    """
    require("run", "grpc", "torch")
    from lightsecagg.drivers.federation.epoch_demo import (
        EpochDemoConfig,
        check_epoch_demo,
        plan_kills,
        run_epochs,
    )

    t = privacy if privacy is not None else max(1, clients // 4)
    threat_model = threat_model or demonstration.strongest(protocol)
    # A straggler is alone with its version: it counts only where one owner of a model is enough.
    alone_counts = threat_model is not ThreatModel.MALICIOUS_SERVER
    config = EpochDemoConfig(
        clients=clients,
        privacy=t,
        dropouts=dropouts if dropouts is not None else clients // 4,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model,
        share_mode=share_mode,
        decoding=decoding,
        rounds=flushes,
        dropout=0,
        task=TaskConfig(
            task=task,
            model=model,
            data_dir=None if data_dir is None else data_dir.resolve(),
            partition=partition,  # type: ignore[arg-type]  # TaskConfig refuses what is unknown
            samples_per_client=samples,
            options=parse_options(task_option or []),
        ),
        local=LocalConfig(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate),
        bound=bound,
        overlap=overlap,
        seed=seed,
        timeout=timeout,
        dashboard_port=demonstration.page_port(dashboard, dashboard_port),
        buffer=max(t + 2, clients // 2) if buffer is None else buffer,
        staleness=staleness,
        tau_max=tau_max,
        server_rate=server_rate,
        slow=slow,
        slowdown=slowdown,
        least_staleness=min(_STALE, int(slowdown) // _STALE) if alone_counts else None,
    )
    with demonstration.stage(config, check_epoch_demo, out, save_model) as (folder, ask):
        config = replace(config, kills=plan_kills(config, client_kills, server_kills))
        with demonstration.progress_bar(_describe) as watch:
            result = run_epochs(config, folder, watch, ask)
            document = _write_report(config, result, out)
        show = None if as_json else partial(_print, document)
        demonstration.conclude(config, result, document, save_model, show)
        _judge(result)
        if result.interrupted is None:
            demonstration.show_page(config, result.state, folder, ask)


def _judge(result: EpochDemoResult) -> None:
    """A demonstration of anything but exact sums has failed."""
    if not result.audit.clean:
        raise Aborted(f"this must not happen: {asdict(result.audit)}")
    if result.hung:
        raise Aborted("no buffer was recovered for a long time; the report tells of those before")


def _describe(phase: str, done: int, expected: int) -> str | None:
    """For the progress bar: how many buffers are recovered."""
    return f"{done} of {expected} buffers" if phase == "sums" else None


def _write_report(config: EpochDemoConfig, result: EpochDemoResult, out: Path) -> dict[str, Any]:
    from lightsecagg.drivers.federation.epoch_report import draw_epochs, histogram, staleness_of
    from lightsecagg.drivers.federation.report import write_json

    flushes = [
        {
            "version": record["round"],
            "epoch": record["epoch"],
            "exact": compared.exact,
            "difference": compared.difference,
            "rounding": compared.bound,
            "owners": record["included"],
            "staleness": staleness_of(record),
            "weights": record["weights"],
            "figures": demonstration.finite(record["figures"]),
        }
        for record, compared in zip(result.records, result.compared, strict=True)
    ]
    measured = [flush["figures"] for flush in flushes if flush["figures"]]
    document: dict[str, Any] = {
        "exact": all(flush["exact"] for flush in flushes),
        "figures": measured[-1] if measured else {},
        "flushes": flushes,
        "staleness": histogram(result.records),
        "stragglers": _stragglers(config, flushes),
        "kills": [{"who": kill["who"], "after": kill["after"]} for kill in result.killed],
        "failed_buffers": [record["aborted"] for record in result.lost_buffers],
        "audit": asdict(result.audit),
        "seconds": result.seconds,
        "interrupted": result.interrupted is not None,
        "report": str(out),
    }
    write_json(document, out / "run.json")
    title = (
        f"{config.protocol}, asynchronous: {len(flushes)} buffers of K = {config.buffer}, "
        f"{config.slow} of {config.clients} clients {config.slowdown:g} times slower"
    )
    try:
        drawn = (config.clients, result.records, result.notes, result.killed, title)
        draw_epochs(*drawn, out / "timeline.png")
    except ConfigurationError as error:
        warn(str(error))
    return document


def _stragglers(config: EpochDemoConfig, flushes: list[dict[str, Any]]) -> list[dict[str, int]]:
    """How stale the updates of the slow clients were."""
    found = []
    for client in range(config.clients - config.slow, config.clients):
        stale = [
            tau
            for flush in flushes
            for owner, tau in zip(flush["owners"], flush["staleness"], strict=True)
            if owner == client
        ]
        found.append(
            {"client": client, "updates": len(stale), "max_staleness": max(stale, default=0)}
        )
    return found


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for flush in document["flushes"]:
        owners = ", ".join(map(str, flush["owners"]))
        verdict = "exact" if flush["exact"] else "WRONG"
        stale = f"up to {max(flush['staleness'])} versions behind"
        text = ", ".join(
            [f"clients {owners}", stale, verdict, *demonstration.in_words(flush["figures"])]
        )
        console.print(f"buffer {flush['version']}: {text}", highlight=False)
    table = Table(title="staleness of the updates")
    for column in ("versions behind", "updates", ""):
        table.add_column(column, justify="left" if not column else "right")
    most = max(document["staleness"].values())
    for tau, count in document["staleness"].items():
        table.add_row(str(tau), str(count), "#" * round(40 * count / most))
    console.print(table)
    for kill in document["kills"]:
        who = "the server" if kill["who"] == "server" else f"client {kill['who']}"
        console.print(f"{who} was killed after {kill['after']} buffers", highlight=False)
    exact = sum(flush["exact"] for flush in document["flushes"])
    console.print(
        f"{exact} of {len(document['flushes'])} sums equal the plain weighted sum of the announced "
        f"updates; {document['audit']['acknowledged']} uploads were acknowledged, "
        f"{document['audit']['lost']} lost",
        highlight=False,
    )
    console.print(f"{document['seconds']:.1f} s; report in {document['report']}", highlight=False)
