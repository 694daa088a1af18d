"""What `lightsecagg run` does around a demonstration: check, watch, keep and show."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lightsecagg.cli.dashboard import serve_folder
from lightsecagg.cli.interruption import deferred_signals
from lightsecagg.cli.output import print_json, warn
from lightsecagg.cli.run_report import judge, print_report, write_report
from lightsecagg.errors import ConfigurationError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.schemes.traits import traits_of

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.demo_config import DemoConfig
    from lightsecagg.drivers.federation.demo_processes import Ask, Watch

_PLAIN_UPDATES = (
    "demo: to check the result, its clients also write their plain updates to a temporary folder; "
    "no real client does that"
)


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
def stage(config: DemoConfig, out: Path, save_model: Path | None) -> Iterator[tuple[Path, Ask]]:
    """Refuse what would fail later; inside, there is a folder, and signals wait to be asked for."""
    from lightsecagg.drivers.federation.demo import check_demo

    _check_folder(out)
    check_demo(config)
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


def show(
    config: DemoConfig, folder: Path, out: Path, save_model: Path | None, ask: Ask, *, as_json: bool
) -> None:
    """Run it, keep its model, tell of it, and show its page; `Aborted` if it has gone wrong."""
    from lightsecagg.drivers.federation.demo import run_demo

    with _progress_bar(_describer(config)) as watch:
        result = run_demo(config, folder, watch, ask)
        document = write_report(config, result, out)
    for complaint in result.complaints:
        warn(complaint)
    kept = save_model is not None and result.model is not None
    if save_model is not None and result.model is not None:
        from lightsecagg.training import save_state, state_dict

        save_state(state_dict(config.own_task, result.model, seed=config.seed), save_model)
    if as_json:
        print_json(document)
    else:
        print_report(config, document)
        if kept:
            typer.echo(f"the model is in {save_model}")
    judge(config, result)
    if config.dashboard_port is not None and result.interrupted is None:
        sys.stdout.flush()
        serve_folder(_without_secrets(result.state, folder), config.dashboard_port, None, ask)


def _check_folder(out: Path) -> None:
    """A report that cannot be written would be lost with all the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}") from error


@contextmanager
def _progress_bar(describe: Callable[[str, int, int], str | None]) -> Iterator[Watch]:
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


def _describer(config: DemoConfig) -> Callable[[str, int, int], str | None]:
    """How many buffers are recovered; or the round, and who has answered in its phase."""
    number, last = 0, ""

    def describe(phase: str, done: int, expected: int) -> str | None:
        nonlocal number, last
        if config.mode == "async" or phase == "sums":
            counted = config.mode == "async" and phase == "sums"
            return f"{done} of {expected} buffers" if counted else None
        if phase in ("advertise", "upload") and last not in ("advertise", "share", phase):
            number += 1
        last = phase
        label = f"round {number}/{config.rounds}" if number else "connecting"
        return f"{label}: {phase} {done}/{expected}"

    return describe


def _without_secrets(state: Path, folder: Path) -> Path:
    """The state alone is left: no key and no plain update waits for somebody's Ctrl-C."""
    moved = state.rename(folder / "state")
    for each in folder.iterdir():
        if each.is_file():
            each.unlink()
        elif each != moved:
            shutil.rmtree(each)
    return moved
