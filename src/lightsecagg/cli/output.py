"""What every command shares: JSON on stdout, everything else on stderr, and exit codes.

Exit codes: 0 success, 2 usage (bad flags, parameters, configuration or input), 3 a protocol
abort, 130 Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Annotated, Any

import typer

from lightsecagg.errors import (
    Aborted,
    ConfigurationError,
    InputRefused,
    LightSecAggError,
    ParameterError,
    RecoveryError,
)

EXIT_FAILURE, EXIT_USAGE, EXIT_ABORTED, EXIT_INTERRUPTED = 1, 2, 3, 130

LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Warnings and errors only, and no progress bar.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_USAGE = (ParameterError, ConfigurationError, InputRefused)
_ABORT = (Aborted, RecoveryError)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout, where nothing else is ever printed under --json."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def warn(message: str) -> None:
    """Say something to the person at the terminal without touching stdout."""
    typer.secho(message, fg=typer.colors.YELLOW, err=True)


def level_of(log_level: str, *, quiet: bool) -> str:
    """What `--log-level` and `--quiet` mean together; info is the default of the former."""
    if not quiet:
        return log_level
    if log_level != "info":
        raise ConfigurationError(f"give either --quiet or --log-level {log_level}")
    return "warning"


@contextmanager
def phase_bar(*, wanted: bool) -> Iterator[Callable[[str, int, int], None]]:
    """On a terminal, how many have answered in the phase under way: told (phase, done, expected).

    What is written to `sys.stderr` inside appears above the bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    last, shown = "", wanted and sys.stderr.isatty()
    console = Console(file=sys.stderr)

    class Above(io.TextIOBase):
        """Unlike rich's own stand-in it leaves the folding of long lines to the terminal."""

        def write(self, text: str) -> int:
            console.print(Text(text), end="", soft_wrap=True)
            return len(text)

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not shown,
    ) as bar:
        task = bar.add_task("", total=None)

        def watch(phase: str, done: int, expected: int) -> None:
            nonlocal last
            if phase != last:  # the time is that of the phase
                bar.reset(task, description=phase, total=expected)
                last = phase
            bar.update(task, completed=done, total=expected)

        with redirect_stderr(Above()) if shown else nullcontext():
            yield watch


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the package's exceptions into one line on stderr and the documented exit code."""
    try:
        yield
    except LightSecAggError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(_code(error)) from error


@contextmanager
def last_line_of_log() -> Iterator[None]:
    """As `exit_codes`, for programs with a log: where it has JSON lines, the error is one too.

    What is wrong with flags and files is found before anything starts, and stays plain.
    """
    try:
        yield
    except LightSecAggError as error:
        if sys.stderr.isatty() or isinstance(error, _USAGE):
            raise
        logging.getLogger("lightsecagg").error("%s", error)
        raise SystemExit(_code(error)) from error


def _code(error: LightSecAggError) -> int:
    if isinstance(error, _USAGE):
        return EXIT_USAGE
    return EXIT_ABORTED if isinstance(error, _ABORT) else EXIT_FAILURE
