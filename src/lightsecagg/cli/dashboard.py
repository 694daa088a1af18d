"""`lightsecagg dashboard`: the page of a federation, from its state folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.interruption import deferred_signals

app = typer.Typer(add_completion=False)

_LOOK = 1.0
"""Seconds between two looks into the folder."""


@app.command()
def dashboard(
    state: Annotated[Path, typer.Option(help="The server's state folder, `server.state`.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 for any free port.")] = 7780,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token that a browser must give.")
    ] = None,
) -> None:
    """Show the rounds of a federation in a browser, while its server runs or after it ended.

    It only reads: of the current round it shows what is in the journal. `server.dashboard_port`
    shows more of that round. Ctrl-C ends it.
    """
    require("dashboard", "grpc")
    with deferred_signals() as ask:
        serve_folder(state, port, token_file, ask)


def serve_folder(state: Path, port: int, token_file: Path | None, ask: Callable[[], None]) -> None:
    """Until a signal comes, which ends it as it should."""
    from lightsecagg.drivers.federation.dashboard.folder import FolderBoard
    from lightsecagg.drivers.federation.dashboard.web import PageServer, read_token

    token = None if token_file is None else read_token(token_file)
    board = FolderBoard(state)
    board.look()
    pages = PageServer(board, port, token=token)
    pages.start()
    typer.echo(f"dashboard on {pages.url} (Ctrl-C ends it)", err=True)
    try:
        while True:
            ask()
            time.sleep(_LOOK)
            board.look()
    except SystemExit:
        raise typer.Exit from None
    finally:
        pages.close()
