"""`lightsecagg experiments`: regenerate the paper's figures from measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import print_json
from lightsecagg.errors import ParameterError
from lightsecagg_lab.commands import laboratory

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Regenerate the paper's tables and figures."
)


@app.callback()
def _group() -> None:
    """Regenerate the paper's tables and figures."""


@app.command("async")
def asynchronous(
    out: Annotated[Path, typer.Option(help="Folder for JSON, PNG and Markdown.")] = Path(
        "async-results"
    ),
    task: Annotated[str, typer.Option(help="mnist or cifar10 (LeNet-5), or digits.")] = "mnist",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set is.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs per curve.")] = 3,
    sweep: Annotated[
        str,
        typer.Option(metavar="BITS", help="log2 of each c_l of the sweep, e.g. 0,8,16; none: ''."),
    ] = "0,4,8,12,16,20,24,28,30,31",
    sweep_seeds: Annotated[int, typer.Option(min=1, help="Runs per point of the sweep.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(help="Buffers per run.", show_default="the task's")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the clients' steps.", show_default="the task's")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Of the clients' steps.", show_default="the task's")
    ] = None,
    server_rate: Annotated[
        float | None, typer.Option(help="eta_g, the server's step.", show_default="the task's")
    ] = None,
    annealing: Annotated[
        str | None,
        typer.Option(help="Of eta_g: constant, or cosine, down to 0.", show_default="the task's"),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Buffers from one evaluation to the next.", show_default="the task's"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="20 clients on digits, one seed: minutes.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one processor each.")] = 1,
    finished: Annotated[
        bool, typer.Option("--finished", help="Report the finished runs; compute none.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Compare FedBuff and asynchronous LightSecAgg on the same seeds, and sweep over c_l.

    Finished runs are kept in OUT/cells and not computed again.
    """
    require("experiments async", "torch", "report")
    from lightsecagg.training import use_one_thread
    from lightsecagg_lab.experiments import async_report as report
    from lightsecagg_lab.experiments import asynchronous as experiment
    from lightsecagg_lab.experiments.statistics import as_document

    try:
        bits = [int(part) for part in sweep.split(",") if part]
    except ValueError as error:
        raise ParameterError(f"--sweep {sweep!r} is not a list of whole numbers") from error
    setup = experiment.QUICK if quick else experiment.setup_of(task)
    chosen: dict[str, Any] = {
        "rounds": rounds,
        "learning_rate": learning_rate,
        "momentum": momentum,
        "server_rate": server_rate,
        "annealing": annealing,
        "evaluate_every": evaluate_every,
    }
    setup = replace(setup, **{name: value for name, value in chosen.items() if value is not None})
    cells = experiment.convergence_cells(1 if quick else seeds)
    cells += experiment.sweep_cells(bits, seeds=sweep_seeds)
    if finished:
        cells = [cell for cell in cells if cell.path(out).exists()]
    use_one_thread()

    def progress(cell: experiment.Cell, needed: bool) -> None:
        typer.echo(f"{cell.name}: {'running' if needed else 'done before'}", err=True)

    documents = experiment.run_cells(setup, cells, out, data_dir, progress, jobs)
    summary = report.summarise(documents)
    document = as_document(summary)
    (out / "summary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    figures = report.plot(setup, documents, out)
    page = report.to_markdown(setup, summary, figures)
    (out / "README.md").write_text(page, encoding="utf-8")
    if as_json:
        print_json(document)
        return
    typer.echo(report.to_markdown(setup, summary))
    for path in figures:
        typer.echo(f"wrote {path}")


@app.command()
def accuracy(
    out: laboratory.Out = Path("results"),
    task: Annotated[str, typer.Option(help="digits, or mnist (LeNet-5).")] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set is.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 3,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of each run.", show_default="20")
    ] = None,
    as_json: laboratory.AsJson = False,
) -> None:
    """Accuracy through the masks (seeded, short keys exact and dithered) and in the clear."""
    require("experiments accuracy", "torch")
    from lightsecagg_lab.experiments.accuracy import accuracy_cells, accuracy_report

    command = f"lightsecagg experiments accuracy --task {task} --seeds {seeds}"
    command += f" --rounds {rounds}" if rounds else ""
    cells = accuracy_cells(task, data_dir, seeds, rounds)
    results = laboratory.measure("accuracy", cells, out)
    report = accuracy_report(task, results)
    laboratory.show(report, results, command, out, as_json=as_json)
    if as_json:
        print_json(report.document())


@app.command()
def stability(
    first: Annotated[Path, typer.Argument(help="A folder of reports.")],
    second: Annotated[Path, typer.Argument(help="Another, of the same experiments.")],
    out: Annotated[Path, typer.Option(help="Folder for the comparison.")] = Path("results"),
    as_json: laboratory.AsJson = False,
) -> None:
    """Whether two recordings agree: each median within the other's interquartile range."""
    from lightsecagg_lab.experiments.stability import stability_report

    report = stability_report(first, second)
    command = f"lightsecagg experiments stability {first} {second}"
    laboratory.show(report, {}, command, out, as_json=as_json)
    if as_json:
        print_json(report.document())


laboratory.register(app)
for _name, _summary in laboratory.ASYNCHRONOUS.items():
    app.command(_name, help=_summary)(asynchronous)
