"""`lightsecagg run`: a real federation on this machine, from provisioning to the report."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import print_json, warn
from lightsecagg.errors import Aborted
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.settings import ProtocolName

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo import DemoConfig, DemoResult

app = typer.Typer(add_completion=False)


class Overlap(StrEnum):
    """`client.overlap` of the configuration."""

    PROCESS = "process"
    THREAD = "thread"
    OFF = "off"


@app.command()
def run(
    clients: Annotated[int, typer.Option(help="N: client processes.")] = 8,
    privacy: Annotated[int | None, typer.Option(help="T. [default: 3, or N/4]")] = None,
    dropouts: Annotated[int | None, typer.Option(help="D. [default: 2, or N/4]")] = None,
    survivors: Annotated[int, typer.Option(help="U; 0 for N - D.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 4,
    protocol: Annotated[ProtocolName, typer.Option(help="Which protocol.")] = (
        ProtocolName.LIGHTSECAGG
    ),
    threat_model: Annotated[
        ThreatModel | None,
        typer.Option(help="[default: malicious-server; honest-but-curious for secagg+ and plain]"),
    ] = None,
    task: Annotated[str, typer.Option(help="Built-in task or package.module:Task.")] = "digits",
    model: Annotated[str | None, typer.Option(help="Model of the built-in task.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the task's data is.")] = None,
    dropout: Annotated[
        int | None, typer.Option(help="Clients killed per round, at most. [default: D]")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Local learning rate.")] = 0.1,
    bound: Annotated[float, typer.Option(help="Largest entry of an update.")] = 4.0,
    overlap: Annotated[
        Overlap, typer.Option(help="Where clients train while they share their masks.")
    ] = Overlap.THREAD,
    samples: Annotated[
        int | None, typer.Option(help="Examples per client, at most (exactly, if synthetic).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Steers data, training and kills; never a mask.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    timeout: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Start a server and N clients as processes over loopback TLS, train, kill some, and report.

    Needs no download: the default task is scikit-learn's digits. For the final check the demo's
    clients ALSO write their plain updates to a temporary folder, which no real client does.
    """
    require("run", "grpc", "torch")
    from lightsecagg.drivers.federation.demo import DemoConfig, run_demo

    weak = protocol in (ProtocolName.SECAGG_PLUS, ProtocolName.PLAIN)
    d = dropouts if dropouts is not None else (2 if clients == 8 else clients // 4)
    config = DemoConfig(
        clients=clients,
        privacy=privacy if privacy is not None else (3 if clients == 8 else max(1, clients // 4)),
        dropouts=d,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model
        or (ThreatModel.HONEST_BUT_CURIOUS if weak else ThreatModel.MALICIOUS_SERVER),
        rounds=rounds,
        dropout=d if dropout is None else dropout,
        task={
            "task": task,
            **({} if model is None else {"model": model}),
            **({} if samples is None else {"samples_per_client": samples}),
            **({} if data_dir is None else {"data_dir": str(data_dir.resolve())}),
        },
        local={"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate},
        bound=bound,
        overlap=overlap,
        seed=seed,
        timeout=timeout,
    )
    warn(
        "demo: to check the result, its clients also write their plain updates to a temporary "
        "folder; no real client does that"
    )
    with tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder, _progress(config) as watch:
        result = run_demo(config, Path(folder), watch)
        document = _write_report(result, out)
    if as_json:
        print_json(document)
    else:
        _print(config, document)
    if not document["matches_plain_average"]:
        raise Aborted("the secure average differs from the plain average beyond the rounding bound")


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

    def _watch(self, phase: str, done: int, expected: int, _completed: int) -> None:
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
    from lightsecagg.errors import ConfigurationError

    out.mkdir(parents=True, exist_ok=True)
    done = [record for record in result.records if record["aborted"] is None]
    document: dict[str, Any] = {
        "accuracy": done[-1]["figures"].get("accuracy") if done else None,
        "rounds": len(done),
        "seconds": result.seconds,
        "matches_plain_average": result.matches,
        "max_abs_difference": result.max_abs_difference,
        "quantisation_bound": result.quantisation_bound,
        "dropped": result.killed,
        "phases": phase_table(result.records),
        "records": result.records,
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
        outcome = record["aborted"] or (
            f"{len(record['included'])} of {len(record['invited'])} included"
            f", accuracy {record['figures'].get('accuracy', float('nan')):.3f}"
        )
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
