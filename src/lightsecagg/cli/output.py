"""What every command shares: JSON on stdout, everything else on stderr, and exit codes.

Exit codes: 0 success, 2 usage (bad flags, parameters, configuration or input), 3 a protocol
abort, 130 Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the package's exceptions into one line on stderr and the documented exit code."""
    try:
        yield
    except LightSecAggError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        if isinstance(error, _USAGE):
            raise SystemExit(EXIT_USAGE) from error
        raise SystemExit(EXIT_ABORTED if isinstance(error, _ABORT) else EXIT_FAILURE) from error
