"""`lightsecagg run`: a real federation on this machine, from provisioning to the report."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import typer

from lightsecagg.cli import demonstration, options, statistics
from lightsecagg.cli.extras import require
from lightsecagg.cli.options import Mode, refuse_other_mode
from lightsecagg.cli.output import AsJson
from lightsecagg.cli.task import parse_options
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import LIGHTSECAGG
from lightsecagg.training.config import LocalConfig, Partition, TaskConfig

app = typer.Typer(add_completion=False)
_of_rounds = partial(typer.Option, rich_help_panel=options.SYNC_ONLY)
_of_buffers = partial(typer.Option, rich_help_panel=options.ASYNC_ONLY)
_of_statistics = partial(typer.Option, rich_help_panel=statistics.OPTIONS)
_USUAL, _USUAL_PRIVACY = 8, 3
"""Clients of a demonstration in rounds, and the T for as many."""
_STALE = 3
"""Versions by which an update of every straggler is to be behind, if they are slow enough."""
_LEAST_TRAINING = 0.1
"""Seconds; without it a straggler would be ten times slower than nothing."""


@app.command()
def run(
    ctx: typer.Context,
    mode: Annotated[Mode, typer.Option(help="Rounds, or buffers of stale updates.")] = Mode.SYNC,
    clients: Annotated[int, typer.Option(help="N: client processes.")] = 8,
    privacy: Annotated[
        int | None,
        typer.Option(
            help="T, how many may collude with the server.", show_default="N/4; 3 for 8 in rounds"
        ),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="D, how many may vanish.", show_default="N/4")
    ] = None,
    survivors: options.AnswersNeeded = 0,
    share_mode: options.HowShared = ShareMode.SEEDED,
    decoding: options.HowToDecode = None,
    protocol: options.ProtocolChoice = LIGHTSECAGG,
    threat_model: Annotated[
        ThreatModel | None,
        typer.Option(
            metavar="NAME",
            help="The server to protect against: honest-but-curious or malicious-server.",
            show_default="malicious-server; honest-but-curious for secagg+ and plain",
        ),
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
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Local learning rate.")] = 0.1,
    bound: Annotated[
        float, typer.Option(help="Largest entry of an update; larger ones are clipped.")
    ] = 4.0,
    overlap: Annotated[
        demonstration.Overlap,
        typer.Option(
            metavar="NAME", help="Where clients train while they share masks: process, thread, off."
        ),
    ] = demonstration.Overlap.THREAD,
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
    timeout: options.Timeout = 600.0,
    as_json: AsJson = False,
    rounds: Annotated[int, _of_rounds(help="Rounds of training.")] = 4,
    dropout: Annotated[
        int | None,
        _of_rounds(help="Clients killed per round, at most.", show_default="D"),
    ] = None,
    client_metrics: Annotated[
        bool,
        _of_rounds(
            "--client-metrics",
            help="Clients measure accuracy and loss too.",
        ),
    ] = False,
    buffer: Annotated[
        int | None,
        _of_buffers(
            help="K, the updates in a buffer.",
            show_default="N/2, or T + 2",
        ),
    ] = None,
    flushes: Annotated[
        int,
        _of_buffers(
            min=1,
            help="Buffers to recover; more until those who are killed are back.",
        ),
    ] = 24,
    staleness: Annotated[Staleness, _of_buffers(help="s(tau).")] = Staleness.CONSTANT,
    tau_max: Annotated[int, _of_buffers(help="Updates staler than this are dropped.")] = 20,
    slow: Annotated[int, _of_buffers(help="How many clients are stragglers.")] = 2,
    slowdown: Annotated[float, _of_buffers(help="How many times as long they train.")] = 10.0,
    client_kills: Annotated[int, _of_buffers(min=0, help="SIGKILLs of clients.")] = 2,
    server_kills: Annotated[int, _of_buffers(min=0, help="SIGKILLs of the server.")] = 1,
    server_rate: Annotated[
        float,
        _of_buffers(help="eta_g, the server's learning rate."),
    ] = 0.5,
    table: Annotated[
        Path | None,
        _of_statistics(
            "--statistics",
            metavar="TABLE.CSV",
            help="Train nothing: divide the rows among the clients, and compute statistics.",
        ),
    ] = None,
    column_range: Annotated[
        list[str] | None,
        _of_statistics("--range", metavar="COLUMN=LOW:HIGH", help="Numbers; repeatable."),
    ] = None,
    category: Annotated[
        list[str] | None,
        _of_statistics(metavar="COLUMN=A,B,...", help="Categories of a column; repeatable."),
    ] = None,
    cross: Annotated[
        list[str] | None,
        _of_statistics(metavar="COLUMN,COLUMN", help="Tabulate two columns; repeatable."),
    ] = None,
    minimum_cell: Annotated[int, _of_statistics(help="Hide smaller counts.")] = 10,
) -> None:
    """Start a server and N clients as processes over loopback TLS, train, kill some, and report.

    With `--mode async` some clients are slow, and the server is killed too. Needs no download: the
    default task is scikit-learn's digits.

    For the final check the clients of this demonstration ALSO write their plain updates to a
    temporary folder, which no real client does. Ctrl-C ends it; in the asynchronous mode with a
    report of what there is.

    With `--statistics TABLE.CSV` there is no training and no kill, and no client writes its plain
    vector anywhere but where a real one has it. See docs/statistics.md.
    """
    refuse_other_mode(ctx, mode)
    statistics.refuse_others(ctx, wanted=table is not None)
    require("run", "grpc", *(["torch"] if table is None else []))
    from lightsecagg.drivers.federation.demo import plan_kills
    from lightsecagg.drivers.federation.demo_config import DemoConfig

    quarter, usual = clients // 4, mode is Mode.SYNC and clients == _USUAL
    t = privacy if privacy is not None else (_USUAL_PRIVACY if usual else max(1, quarter))
    d = quarter if dropouts is None else dropouts
    threat_model = threat_model or demonstration.strongest(protocol)
    config = DemoConfig(
        mode=mode.value,
        clients=clients,
        privacy=t,
        dropouts=d,
        survivors=survivors,
        protocol=protocol,
        threat_model=threat_model,
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
    if table is not None:
        declared = column_range or [], category or [], cross or []
        statistics.run_statistics(config, table, *declared, minimum_cell, as_json=as_json)
        return
    kills = (0, 0)
    if mode is Mode.ASYNC:
        # A straggler is alone with its version: it counts only where one owner of a model is
        # enough.
        alone_counts = threat_model is not ThreatModel.MALICIOUS_SERVER
        config = replace(
            config,
            rounds=flushes,
            dropout=0,
            buffer=max(t + 2, clients // 2) if buffer is None else buffer,
            staleness=staleness,
            tau_max=tau_max,
            server_rate=server_rate,
            slow=slow,
            slowdown=slowdown,
            least_training=_LEAST_TRAINING,
            least_staleness=min(_STALE, int(slowdown) // _STALE) if alone_counts else None,
        )
        kills = client_kills, server_kills
    with demonstration.stage(config, out, save_model) as (folder, ask):
        config = replace(config, kills=plan_kills(config, *kills))
        demonstration.show(config, folder, out, save_model, ask, as_json=as_json)
