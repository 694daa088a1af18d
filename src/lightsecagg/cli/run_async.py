"""`lightsecagg run --mode async`: a real federation with stragglers and kills, and its report."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lightsecagg.cli import options
from lightsecagg.cli.dashboard import serve_folder
from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.output import AsJson, print_json, warn
from lightsecagg.cli.run import PLAIN_UPDATES, Overlap, check_folder, finite, without_secrets
from lightsecagg.cli.task import parse_options
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import ProtocolName, traits_of
from lightsecagg.training.config import LocalConfig, Partition, TaskConfig

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.epoch_demo import EpochDemoConfig, EpochDemoResult

app = typer.Typer(add_completion=False)


@app.command()
def run(
    clients: Annotated[int, typer.Option(help="N: client processes.")] = 8,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", show_default="N/4"),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may vanish.", show_default="N/4")
    ] = None,
    survivors: Annotated[int, typer.Option(help="U, the answers needed; 0 for N - D.")] = 0,
    buffer: Annotated[
        int | None,
        typer.Option(help="K, the updates in a buffer.", show_default="N/2, or T + 2"),
    ] = None,
    flushes: Annotated[int, typer.Option(min=1, help="Buffers to recover.")] = 24,
    staleness: Annotated[Staleness, typer.Option(help="s(tau).")] = Staleness.CONSTANT,
    tau_max: Annotated[int, typer.Option(help="Updates staler than this are dropped.")] = 20,
    slow: Annotated[int, typer.Option(help="How many clients are stragglers.")] = 2,
    slowdown: Annotated[float, typer.Option(help="How many times as long they train.")] = 10.0,
    client_kills: Annotated[int, typer.Option(min=0, help="SIGKILLs of clients.")] = 2,
    server_kills: Annotated[int, typer.Option(min=0, help="SIGKILLs of the server.")] = 1,
    share_mode: Annotated[
        ShareMode, typer.Option(help="LightSecAgg: how shares are made.")
    ] = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    protocol: options.ProtocolChoice = ProtocolName.LIGHTSECAGG,
    threat_model: Annotated[
        ThreatModel | None,
        typer.Option(help="[default: malicious-server; honest-but-curious for plain]"),
    ] = None,
    task: Annotated[
        str, typer.Option(help="A built-in task, see `lightsecagg task list`, or module:Task.")
    ] = "digits",
    model: Annotated[str | None, typer.Option(help="Another model for a built-in task.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the task's data is.")] = None,
    partition: Annotated[str, typer.Option(help=" | ".join(get_args(Partition)))] = "iid",
    task_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For your own task; repeatable.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Local learning rate.")] = 0.1,
    server_rate: Annotated[float, typer.Option(help="eta_g, the server's learning rate.")] = 0.5,
    bound: Annotated[
        float, typer.Option(help="Largest entry of an update; larger ones are clipped.")
    ] = 4.0,
    overlap: Annotated[
        Overlap, typer.Option(help="Where clients train while they share masks and answer.")
    ] = Overlap.THREAD,
    samples: Annotated[
        int | None, typer.Option(help="Examples per client, at most (exactly, if synthetic).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Steers data, training and kills; never a mask.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    save_model: Annotated[
        Path | None, typer.Option(help="Keep the final model: a .pt, .safetensors or .npz file.")
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show it in a browser, until Ctrl-C.")
    ] = False,
    dashboard_port: Annotated[
        int | None,
        typer.Option(help="The page's port, instead of any free one; implies --dashboard."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Train in the asynchronous mode: stragglers, killed clients, a killed server, over TLS.

    Needs no download: the default task is scikit-learn's digits.

    For the final check the clients of this demonstration ALSO write their plain updates to a
    temporary folder, which no real client does. Ctrl-C ends it with a report of what there is.
    """
    require("run", "grpc", "torch")
    from lightsecagg.drivers.federation.demo import check_demo
    from lightsecagg.drivers.federation.epoch_demo import (
        EpochDemoConfig,
        check_epoch_demo,
        plan_kills,
        run_epochs,
    )
    from lightsecagg.drivers.federation.provisioning import free_port

    weak = bool(traits_of(protocol).weakness)
    t = privacy if privacy is not None else max(1, clients // 4)
    config = EpochDemoConfig(
        clients=clients,
        privacy=t,
        dropouts=dropouts if dropouts is not None else clients // 4,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model
        or (ThreatModel.HONEST_BUT_CURIOUS if weak else ThreatModel.MALICIOUS_SERVER),
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
        dashboard_port=dashboard_port or (free_port() if dashboard else None),
        buffer=max(t + 2, clients // 2) if buffer is None else buffer,
        staleness=staleness,
        tau_max=tau_max,
        server_rate=server_rate,
        slow=slow,
        slowdown=slowdown,
    )
    config = replace(config, kills=plan_kills(config, client_kills, server_kills))
    check_folder(out)
    check_demo(config)
    check_epoch_demo(config)
    if save_model is not None:
        from lightsecagg.training import check_target

        check_target(save_model)
    warn(PLAIN_UPDATES)
    if config.dashboard_port is not None:
        typer.echo(f"dashboard on http://127.0.0.1:{config.dashboard_port}/", err=True)
    with (
        deferred_signals() as ask,
        tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder,
    ):
        with _progress(config) as watch:
            result = run_epochs(config, Path(folder), watch, ask)
            document = _write_report(config, result, out)
        for complaint in result.complaints:
            warn(complaint)
        if save_model is not None and result.model is not None:
            from lightsecagg.training import save_state, state_dict

            save_state(state_dict(config.own_task, result.model, seed=config.seed), save_model)
        if as_json:
            print_json(document)
        else:
            _print(config, document)
        _judge(result)
        if config.dashboard_port is not None and result.interrupted is None:
            sys.stdout.flush()
            state = without_secrets(result.state, Path(folder))
            serve_folder(state, config.dashboard_port, None, ask)


def _judge(result: EpochDemoResult) -> None:
    """A demonstration of anything but exact sums has failed."""
    if not result.audit.clean:
        raise Aborted(f"this must not happen: {asdict(result.audit)}")
    if result.hung:
        raise Aborted("no buffer was recovered for a long time; the report tells of those before")


class _progress:  # noqa: N801 - used like a function
    """A progress bar on stderr: buffers, and how many updates wait for the next."""

    def __init__(self, config: EpochDemoConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._config = config
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Any:
        self._progress.start()
        self._task = self._progress.add_task("starting processes", total=self._config.rounds)
        return self._watch

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def _watch(self, phase: str, done: int, expected: int) -> None:
        if phase == "sums":
            self._progress.update(
                self._task, description=f"{done} of {expected} buffers", completed=done
            )


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
            "figures": finite(record["figures"]),
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


def _print(config: EpochDemoConfig, document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for flush in document["flushes"]:
        figures = [
            f"{name} {'not finite' if value is None else f'{value:.4g}'}"
            for name, value in flush["figures"].items()
        ]
        owners = ", ".join(map(str, flush["owners"]))
        verdict = "exact" if flush["exact"] else "WRONG"
        stale = f"up to {max(flush['staleness'])} versions behind"
        text = ", ".join([f"clients {owners}", stale, verdict, *figures])
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
