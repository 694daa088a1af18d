"""`lightsecagg task`: start, check and list learning tasks."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.training.config import LocalConfig, Partition, TaskConfig

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Write, check and list learning tasks."
)


@app.command()
def template(
    output: Annotated[Path, typer.Argument(help="The file to write.")] = Path("my_task.py"),
) -> None:
    """Write a working task as a start for your own."""
    text = resources.files("lightsecagg.training").joinpath("task_template.py").read_text("utf-8")
    if not output.stem.isidentifier() or output.suffix != ".py":
        raise ParameterError(
            f"{output.name} is not the name of a Python module, such as my_task.py"
        )
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text.replace("my_task", output.stem))
    except FileExistsError as error:
        raise ConfigurationError(f"{output} exists; choose another name or remove it") from error
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from error
    typer.echo(f"Wrote {output}. Check it with: lightsecagg task check {output}:MyTask")


@app.command("list")
def list_tasks(
    as_json: AsJson = False,
) -> None:
    """List the built-in tasks and models."""
    require("task list", "torch")
    from lightsecagg.training.builtin_tasks import DEFAULT_MODELS, PAPER_MODELS
    from lightsecagg.training.datasets import DATASETS
    from lightsecagg.training.models import MODELS

    synthetic = {f"synthetic-{name}": paper for name, paper in PAPER_MODELS.items()}
    if as_json:
        tasks: dict[str, Any] = {
            name: {"model": DEFAULT_MODELS[name], "data": about} for name, about in DATASETS.items()
        }
        for name, paper in synthetic.items():
            tasks[name] = {"model": paper.model, "data": "random", "parameters": paper.parameters}
        print_json({"tasks": tasks, "models": list(MODELS)})
        return
    for name, about in DATASETS.items():
        typer.echo(f"{name:24}{DEFAULT_MODELS[name]:20}{about}")
    for name, paper in synthetic.items():
        shape = "x".join(map(str, paper.shape))
        typer.echo(f"{name:24}{paper.model:20}random {shape}, d = {paper.parameters:,}")
    typer.echo(f"\nModels (--model): {', '.join(MODELS)}")


@app.command()
def check(
    task: Annotated[str, typer.Argument(help="A built-in task, or package.module:Task.")],
    clients: Annotated[int, typer.Option(help="How many clients.")] = 20,
    client: Annotated[int, typer.Option(help="The client to train.")] = 0,
    model: Annotated[str | None, typer.Option(help="Another model.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data is.")] = None,
    partition: Annotated[str, typer.Option(help=" | ".join(get_args(Partition)))] = "iid",
    dirichlet_alpha: Annotated[float, typer.Option(help="Label skew of dirichlet.")] = 0.5,
    writer_ids: Annotated[Path | None, typer.Option(help="npz file with the writers.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes of your data.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of images in pixels.")] = None,
    samples_per_client: Annotated[
        int | None, typer.Option(help="Examples per client, at most.")
    ] = None,
    task_option: Annotated[list[str] | None, typer.Option(help="key=value, repeatable.")] = None,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Batch size.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Local learning rate.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    evaluate: Annotated[bool, typer.Option(help="Evaluate too; needs test data.")] = True,
    as_json: AsJson = False,
) -> None:
    """Build a task, train one client twice, evaluate, and report what would be federated."""
    require("task check", "torch")
    config = TaskConfig(
        task=task,
        clients=clients,
        model=model,
        data_dir=data_dir,
        partition=partition,  # type: ignore[arg-type]  # TaskConfig refuses what it does not know
        dirichlet_alpha=dirichlet_alpha,
        writer_ids=writer_ids,
        classes=classes,
        image_size=image_size,
        samples_per_client=samples_per_client,
        seed=seed,
        options=parse_options(task_option or []),
    )
    local = LocalConfig(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
    report = check_task(config, local, client, evaluate=evaluate)
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        typer.echo(f"{name.replace('_', ' '):24}{_shown(value)}")


def parse_options(pairs: list[str]) -> tuple[tuple[str, str], ...]:
    """`["key=value", ...]` as `TaskConfig.options`."""
    options: list[tuple[str, str]] = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ParameterError(f"--task-option {pair!r} must have the form key=value")
        options.append((key, value))
    if len({key for key, _ in options}) != len(options):
        raise ParameterError("--task-option: a key is given twice")
    return tuple(options)


def check_task(
    config: TaskConfig, local: LocalConfig, client: int, *, evaluate: bool = True
) -> dict[str, Any]:
    """What `lightsecagg task check` reports; raises where the task would fail in a federation."""
    from lightsecagg import training

    task = training.load_task(config)
    layout = training.model_layout(task)
    model = training.initial_model(task, seed=config.seed)
    update = training.local_update(task, client, model, local, seed=config.seed)
    # The second run is the one to time: the first also pays for what torch loads on first use.
    started = time.perf_counter()
    again = training.local_update(task, client, model, local, seed=config.seed)
    seconds = time.perf_counter() - started
    if again.delta.tobytes() != update.delta.tobytes() or again.samples != update.samples:
        raise ConfigurationError(
            f"{config.task} trains differently each time under one seed; draw randomness from "
            "torch's global generator, which is seeded for you, or from your own seeded one"
        )
    if not update.delta.any():
        raise ConfigurationError(
            f"{config.task}: training client {client} changed nothing; is every parameter frozen?"
        )
    largest = float(abs(update.delta).max())
    report: dict[str, Any] = {
        "task": config.task,
        "parameters": layout.parameters,
        "averaged_buffers": layout.size - layout.parameters,
        "vector_length": layout.size,
        "layout": layout.digest().hex()[:16],
        "client": client,
        "samples": update.samples,
        "seconds": round(seconds, 3),
        "largest_change": largest,
        "suggested_bound": _room_above(largest),
    }
    metrics = training.task_metrics(task)
    if metrics:
        measured = training.measure(task, client, model)
        report["metrics"] = {m.name: m.from_extra(measured[m.name]) for m in metrics}
    if evaluate:
        report["before"] = training.evaluate(task, model)
        report["after"] = training.evaluate(task, model + update.delta)
    return report


def _room_above(largest: float) -> float:
    """Twice as much, in two digits: other clients and later rounds may change a model more."""
    return float(f"{2 * largest:.1e}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(number)}" for name, number in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
