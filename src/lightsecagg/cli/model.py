"""`lightsecagg model`: take the trained model out of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightsecagg.cli.extras import require
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.errors import ConfigurationError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Export the trained model of a federation."
)


@app.callback()
def _group() -> None:
    """Export the trained model of a federation."""


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The file to write: .pt, .safetensors or .npz.")],
    config: Annotated[
        Path | None, typer.Option(help="server.toml.", show_default="the one next to --state")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="The server's state folder.", show_default="--config's")
    ] = None,
    which: Annotated[
        str, typer.Option(help="best, last, or a number of rounds whose model was kept.")
    ] = "last",
    as_json: AsJson = False,
) -> None:
    """Write the global model as a plain state dict for `model.load_state_dict`.

    It only reads, so it also works while the server runs.
    """
    require("model export", "grpc", "torch")
    from lightsecagg.drivers.federation.config import ServerConfig, load_config
    from lightsecagg.drivers.federation.models import export_model
    from lightsecagg.training import check_target

    if config is None:
        if state is None:
            raise ConfigurationError(
                "give --config server.toml, or --state with server.toml next to it"
            )
        config = state.resolve().parent / "server.toml"
    loaded = load_config(ServerConfig, config)
    check_target(out)
    made = export_model(loaded, state or loaded.server.state, out, which)
    if as_json:
        print_json({"file": str(out), "rounds": made.rounds, "parameters": made.parameters})
    else:
        typer.echo(
            f"Wrote the model after {made.rounds} rounds, {made.parameters:,} numbers: {out}"
        )
