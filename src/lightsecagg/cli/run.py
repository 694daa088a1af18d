"""`lightsecagg run`: a real federation on this machine, from provisioning to the report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightsecagg.cli import demonstration, options
from lightsecagg.cli.by_mode import ByMode
from lightsecagg.cli.extras import require
from lightsecagg.cli.options import Mode
from lightsecagg.cli.output import warn
from lightsecagg.cli.task import parse_options
from lightsecagg.errors import Aborted, ConfigurationError
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import ProtocolName
from lightsecagg.training.config import LocalConfig, TaskConfig

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo import DemoResult
    from lightsecagg.drivers.federation.demo_config import DemoConfig

app = typer.Typer(add_completion=False)


class _ByMode(ByMode):
    """See `run_async`."""

    asynchronous = "lightsecagg.cli.run_async"


@app.command(cls=_ByMode)
def run(
    mode: Annotated[
        Mode, typer.Option(help="Rounds, or buffers: see run --mode async --help.")
    ] = Mode.SYNC,
    clients: options.ClientProcesses = 8,
    privacy: Annotated[
        int | None,
        typer.Option(help="T, how many may collude with the server.", show_default="3, or N/4"),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may vanish.", show_default="2, or N/4")
    ] = None,
    survivors: options.AnswersNeeded = 0,
    share_mode: options.HowShared = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 4,
    protocol: options.ProtocolChoice = ProtocolName.LIGHTSECAGG,
    threat_model: Annotated[
        ThreatModel | None,
        typer.Option(help="[default: malicious-server; honest-but-curious for secagg+ and plain]"),
    ] = None,
    task: options.TaskChoice = "digits",
    model: options.ModelChoice = None,
    data_dir: options.DataFolder = None,
    partition: options.Partitioning = "iid",
    dirichlet_alpha: Annotated[float, typer.Option(help="Label skew of dirichlet.")] = 0.5,
    classes: Annotated[int | None, typer.Option(help="Number of classes of your data.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of images in pixels.")] = None,
    task_option: options.TaskOptions = None,
    client_metrics: Annotated[
        bool,
        typer.Option("--client-metrics", help="Clients measure accuracy and loss too."),
    ] = False,
    dropout: Annotated[
        int | None, typer.Option(help="Clients killed per round, at most. [default: D]")
    ] = None,
    epochs: options.LocalEpochs = 5,
    batch_size: options.LocalBatches = 16,
    learning_rate: options.LocalRate = 0.1,
    bound: options.ClippedAt = 4.0,
    overlap: Annotated[
        demonstration.Overlap,
        typer.Option(help="Where clients train while they share their masks."),
    ] = demonstration.Overlap.THREAD,
    samples: options.Samples = None,
    seed: options.DemoSeed = 0,
    out: options.ReportFolder = Path("report"),
    save_model: options.SaveModel = None,
    dashboard: options.Dashboard = False,
    dashboard_port: options.DashboardPort = None,
    timeout: options.Timeout = 600.0,
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

    d = dropouts if dropouts is not None else (2 if clients == 8 else clients // 4)
    config = DemoConfig(
        clients=clients,
        privacy=privacy if privacy is not None else (3 if clients == 8 else max(1, clients // 4)),
        dropouts=d,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model or demonstration.strongest(protocol),
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
        dashboard_port=demonstration.page_port(dashboard, dashboard_port),
    )
    with demonstration.stage(config, check_demo, out, save_model) as (folder, ask):
        with demonstration.progress_bar(_describer(config.rounds)) as watch:
            result = run_demo(config, folder, watch, ask)
            document = _write_report(result, out)
        show = None if as_json else partial(_print, config, document)
        demonstration.conclude(config, result, document, save_model, show)
        if not document["matches_plain_average"]:
            raise Aborted(
                "the secure average differs from the plain average beyond the rounding bound"
            )
        demonstration.show_page(config, result.state, folder, ask)


def _describer(rounds: int) -> Callable[[str, int, int], str]:
    """For the progress bar: the round, and who has answered in its current phase."""
    number, last = 0, ""

    def describe(phase: str, done: int, expected: int) -> str:
        nonlocal number, last
        if phase in ("advertise", "upload") and last not in ("advertise", "share", phase):
            number += 1
        last = phase
        label = f"round {number}/{rounds}" if number else "connecting"
        return f"{label}: {phase} {done}/{expected}"

    return describe


def _write_report(result: DemoResult, out: Path) -> dict[str, Any]:
    from lightsecagg.drivers.federation.report import draw_timeline, phase_table, write_json

    records = [
        record | {"figures": demonstration.finite(record["figures"])} for record in result.records
    ]
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
        figures = demonstration.in_words(record["figures"])
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
