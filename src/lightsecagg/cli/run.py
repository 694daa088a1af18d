"""`lightsecagg run`: a real federation on this machine, from provisioning to the report."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lightsecagg.cli import options
from lightsecagg.cli.by_mode import ByMode
from lightsecagg.cli.dashboard import serve_folder
from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.options import Mode
from lightsecagg.cli.output import print_json, warn
from lightsecagg.cli.task import parse_options
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import ProtocolName, traits_of
from lightsecagg.training.config import LocalConfig, Partition, TaskConfig

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo import DemoResult
    from lightsecagg.drivers.federation.demo_config import DemoConfig

app = typer.Typer(add_completion=False)

PLAIN_UPDATES = (
    "demo: to check the result, its clients also write their plain updates to a temporary folder; "
    "no real client does that"
)


class Overlap(StrEnum):
    """`client.overlap` of the configuration."""

    PROCESS = "process"
    THREAD = "thread"
    OFF = "off"


class _ByMode(ByMode):
    """See `run_async`."""

    asynchronous = "lightsecagg.cli.run_async"


@app.command(cls=_ByMode)
def run(
    mode: Annotated[
        Mode, typer.Option(help="Rounds, or buffers: see run --mode async --help.")
    ] = Mode.SYNC,
    clients: Annotated[int, typer.Option(help="N: client processes.")] = 8,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", show_default="3, or N/4"),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may vanish.", show_default="2, or N/4")
    ] = None,
    survivors: Annotated[int, typer.Option(help="U, the answers needed; 0 for N - D.")] = 0,
    share_mode: Annotated[
        ShareMode, typer.Option(help="LightSecAgg: how shares are made.")
    ] = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 4,
    protocol: options.ProtocolChoice = ProtocolName.LIGHTSECAGG,
    threat_model: Annotated[
        ThreatModel | None,
        typer.Option(help="[default: malicious-server; honest-but-curious for secagg+ and plain]"),
    ] = None,
    task: Annotated[
        str, typer.Option(help="A built-in task, see `lightsecagg task list`, or module:Task.")
    ] = "digits",
    model: Annotated[str | None, typer.Option(help="Another model for a built-in task.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the task's data is.")] = None,
    partition: Annotated[str, typer.Option(help=" | ".join(get_args(Partition)))] = "iid",
    dirichlet_alpha: Annotated[float, typer.Option(help="Label skew of dirichlet.")] = 0.5,
    classes: Annotated[int | None, typer.Option(help="Number of classes of your data.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of images in pixels.")] = None,
    task_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For your own task; repeatable.")
    ] = None,
    client_metrics: Annotated[
        bool,
        typer.Option("--client-metrics", help="Clients measure accuracy and loss too."),
    ] = False,
    dropout: Annotated[
        int | None, typer.Option(help="Clients killed per round, at most. [default: D]")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Local learning rate.")] = 0.1,
    bound: Annotated[
        float, typer.Option(help="Largest entry of an update; larger ones are clipped.")
    ] = 4.0,
    overlap: Annotated[
        Overlap, typer.Option(help="Where clients train while they share their masks.")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Start a server and N clients as processes over loopback TLS, train, kill some, and report.

    Needs no download: the default task is scikit-learn's digits.

    For the final check the clients of this demonstration ALSO write their plain updates to a
    temporary folder, which no real client does.
    """
    require("run", "grpc", "torch")
    from lightsecagg.drivers.federation.demo import check_demo, run_demo
    from lightsecagg.drivers.federation.demo_config import DemoConfig
    from lightsecagg.drivers.federation.provisioning import free_port

    weak = bool(traits_of(protocol).weakness)
    d = dropouts if dropouts is not None else (2 if clients == 8 else clients // 4)
    config = DemoConfig(
        clients=clients,
        privacy=privacy if privacy is not None else (3 if clients == 8 else max(1, clients // 4)),
        dropouts=d,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model
        or (ThreatModel.HONEST_BUT_CURIOUS if weak else ThreatModel.MALICIOUS_SERVER),
        share_mode=share_mode,
        decoding=decoding,
        rounds=rounds,
        dropout=d if dropout is None else dropout,
        task=TaskConfig(
            task=task,
            model=model,
            data_dir=None if data_dir is None else data_dir.resolve(),
            partition=partition,  # type: ignore[arg-type]  # TaskConfig refuses what is unknown
            dirichlet_alpha=dirichlet_alpha,
            classes=classes,
            image_size=image_size,
            samples_per_client=samples,
            client_metrics=client_metrics,
            options=parse_options(task_option or []),
        ),
        local=LocalConfig(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate),
        bound=bound,
        overlap=overlap,
        seed=seed,
        timeout=timeout,
        dashboard_port=dashboard_port or (free_port() if dashboard else None),
    )
    check_folder(out)
    check_demo(config)
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
            result = run_demo(config, Path(folder), watch, ask)
            document = _write_report(result, out)
            for complaint in result.complaints:
                warn(complaint)
        if save_model is not None:
            from lightsecagg.training import save_state, state_dict

            save_state(state_dict(config.own_task, result.model, seed=config.seed), save_model)
        if as_json:
            print_json(document)
        else:
            _print(config, document)
            if save_model is not None:
                typer.echo(f"the model is in {save_model}")
        if not document["matches_plain_average"]:
            raise Aborted(
                "the secure average differs from the plain average beyond the rounding bound"
            )
        if config.dashboard_port is not None:
            sys.stdout.flush()
            state = without_secrets(result.state, Path(folder))
            serve_folder(state, config.dashboard_port, None, ask)


def without_secrets(state: Path, folder: Path) -> Path:
    """The state alone is left: no key and no plain update waits for somebody's Ctrl-C."""
    moved = state.rename(folder / "state")
    for each in folder.iterdir():
        if each.is_file():
            each.unlink()
        elif each != moved:
            shutil.rmtree(each)
    return moved


def check_folder(out: Path) -> None:
    """A report that cannot be written would be lost with all the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}") from error


class _progress:  # noqa: N801 - used like a function
    """A progress bar on stderr: rounds, and who has answered in the current phase."""

    def __init__(self, config: DemoConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._config = config
        self._round, self._last = 0, ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Any:
        self._progress.start()
        self._task = self._progress.add_task("starting processes", total=None)
        return self._watch

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def _watch(self, phase: str, done: int, expected: int) -> None:
        if phase in ("advertise", "upload") and self._last not in ("advertise", "share", phase):
            self._round += 1
        self._last = phase
        label = f"round {self._round}/{self._config.rounds}" if self._round else "connecting"
        self._progress.update(
            self._task,
            description=f"{label}: {phase} {done}/{expected}",
            completed=done,
            total=expected,
        )


def _write_report(result: DemoResult, out: Path) -> dict[str, Any]:
    from lightsecagg.drivers.federation.report import draw_timeline, phase_table, write_json

    records = [record | {"figures": finite(record["figures"])} for record in result.records]
    done = [record for record in records if record["aborted"] is None]
    document: dict[str, Any] = {
        "figures": done[-1]["figures"] if done else {},
        "metrics": done[-1]["metrics"] if done else {},
        "rounds": len(done),
        "seconds": result.seconds,
        "matches_plain_average": result.matches,
        "max_abs_difference": result.max_abs_difference,
        "quantisation_bound": result.quantisation_bound,
        "dropped": result.killed,
        "phases": phase_table(records),
        "records": records,
        "report": str(out),
    }
    write_json(document, out / "run.json")
    shown = max(  # where most went missing; of these the last, when everything was warm
        done, key=lambda r: (len(r["invited"]) - len(r["included"]), r["round"])
    )
    try:
        draw_timeline(shown, result.spans, result.killed, out / "timeline.png")
    except ConfigurationError as error:
        warn(str(error))
    return document


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _print(config: DemoConfig, document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{config.protocol}, {config.threat_model}: mean over rounds")
    for column in ("phase", "seconds", "bytes from clients", "bytes to clients"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, row in document["phases"].items():
        table.add_row(
            phase,
            f"{row['seconds']:.2f}",
            f"{row['client_upload_bytes']:,.0f}",
            f"{row['client_download_bytes']:,.0f}",
        )
    console.print(table)
    for record in document["records"]:
        dead = [
            f"client {item['client']} killed in {item['phase']}"
            for item in document["dropped"]
            if item["round"] == record["round"]
        ]
        included = f"{len(record['included'])} of {len(record['invited'])} included"
        figures = [
            f"{name} {'not finite' if value is None else f'{value:.4g}'}"
            for name, value in record["figures"].items()
        ]
        figures += [
            f"clients' {name} {metric['mean']:.4g} \u00b1 {metric['error']:.1g}"
            for name, metric in record["metrics"].items()
        ]
        outcome = record["aborted"] or ", ".join([included, *figures])
        console.print(f"round {record['round']}: {outcome}" + "".join(f"; {d}" for d in dead))
    verdict = "equals" if document["matches_plain_average"] else "DIFFERS FROM"
    console.print(
        f"the secure average {verdict} the plain average of the included clients: "
        f"largest difference {document['max_abs_difference']:.2e}, "
        f"rounding bound {document['quantisation_bound']:.2e}"
    )
    console.print(
        f"{document['rounds']} rounds in {document['seconds']:.1f} s; "
        f"report in {document['report']}"
    )
