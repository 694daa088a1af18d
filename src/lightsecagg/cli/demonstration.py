"""What both modes of `lightsecagg run` do around a demonstration: check, watch, keep and show."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from lightsecagg.cli.dashboard import serve_folder
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.output import print_json, warn
from lightsecagg.errors import ConfigurationError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.schemes.traits import traits_of

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo import DemoResult
    from lightsecagg.drivers.federation.demo_config import DemoConfig
    from lightsecagg.drivers.federation.demo_processes import Ask, Watch
    from lightsecagg.drivers.federation.epoch_demo import EpochDemoResult

_PLAIN_UPDATES = (
    "demo: to check the result, its clients also write their plain updates to a temporary folder; "
    "no real client does that"
)

Config = TypeVar("Config", bound="DemoConfig")


class Overlap(StrEnum):
    """`client.overlap` of the configuration."""

    PROCESS = "process"
    THREAD = "thread"
    OFF = "off"


def strongest(protocol: str) -> ThreatModel:
    """The strongest server that the protocol defends against."""
    weak = traits_of(protocol).weakness
    return ThreatModel.HONEST_BUT_CURIOUS if weak else ThreatModel.MALICIOUS_SERVER


def page_port(dashboard: bool, port: int | None) -> int | None:
    """Where the page is to be, if anywhere."""
    from lightsecagg.drivers.federation.provisioning import free_port

    return port or (free_port() if dashboard else None)


@contextmanager
def stage(
    config: Config, check: Callable[[Config], None], out: Path, save_model: Path | None
) -> Iterator[tuple[Path, Ask]]:
    """Refuse what would fail later; inside, there is a folder, and signals wait to be asked for."""
    _check_folder(out)
    check(config)
    if save_model is not None:
        from lightsecagg.training import check_target

        check_target(save_model)
    warn(_PLAIN_UPDATES)
    if config.dashboard_port is not None:
        typer.echo(f"dashboard on http://127.0.0.1:{config.dashboard_port}/", err=True)
    with (
        deferred_signals() as ask,
        tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder,
    ):
        yield Path(folder), ask


def _check_folder(out: Path) -> None:
    """A report that cannot be written would be lost with all the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}") from error


@contextmanager
def progress_bar(describe: Callable[[str, int, int], str | None]) -> Iterator[Watch]:
    """On stderr; shows what `describe` makes of (phase, done, expected), or nothing of None."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting processes", total=None)

        def watch(phase: str, done: int, expected: int) -> None:
            if text := describe(phase, done, expected):
                bar.update(task, description=text, completed=done, total=expected)

        yield watch


def conclude(
    config: DemoConfig,
    result: DemoResult | EpochDemoResult,
    document: dict[str, Any],
    save_model: Path | None,
    show: Callable[[], None] | None,
) -> None:
    """Keep the model and tell of the result: by `show`, or as JSON."""
    for complaint in result.complaints:
        warn(complaint)
    if save_model is not None and result.model is not None:
        from lightsecagg.training import save_state, state_dict

        save_state(state_dict(config.own_task, result.model, seed=config.seed), save_model)
    if show is None:
        print_json(document)
        return
    show()
    if save_model is not None and result.model is not None:
        typer.echo(f"the model is in {save_model}")


def show_page(config: DemoConfig, state: Path, folder: Path, ask: Ask) -> None:
    """Until Ctrl-C, if there is to be one."""
    if config.dashboard_port is not None:
        sys.stdout.flush()
        serve_folder(_without_secrets(state, folder), config.dashboard_port, None, ask)


def _without_secrets(state: Path, folder: Path) -> Path:
    """The state alone is left: no key and no plain update waits for somebody's Ctrl-C."""
    moved = state.rename(folder / "state")
    for each in folder.iterdir():
        if each.is_file():
            each.unlink()
        elif each != moved:
            shutil.rmtree(each)
    return moved


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def in_words(figures: dict[str, float | None]) -> list[str]:
    """Such as "accuracy 0.93"."""
    return [
        f"{name} {'not finite' if value is None else f'{value:.4g}'}"
        for name, value in figures.items()
    ]
