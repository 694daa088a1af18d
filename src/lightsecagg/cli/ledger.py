"""`lightsecagg ledger`: what a client remembers, and the ways out that its operator alone has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightsecagg.cli.output import AsJson, print_json, warn
from lightsecagg.errors import ConfigurationError, ParameterError

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.client_ledger import ClientLedger

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Show what a client remembers, or make it forget. Stop the client first.",
)

Config = Annotated[Path, typer.Option(help="The client's client-<id>.toml.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command()
def show(config: Config, as_json: AsJson = False) -> None:
    """Show the latest round, and how often this client uploaded for each global model."""
    with _ledger(config) as ledger:
        uploads, last_round = ledger.uploads(), ledger.last_round
    if as_json:
        print_json({"last_round": last_round, "uploads": uploads})
        return
    latest = "no round yet" if last_round < 0 else f"latest round {last_round}"
    typer.echo(f"{latest}, {len(uploads)} global models")
    for model, count in sorted(uploads.items()):
        typer.echo(f"  {model}: {count} uploads")


@app.command()
def forgive(
    model: Annotated[
        str, typer.Argument(help="The model's hash, or its first digits, from the client's log.")
    ],
    config: Config,
    yes: Yes = False,
) -> None:
    """Let this client take part again from a global model whose rounds have failed.

    A client uploads twice for one model at most, and enters sums over one set of clients only: a
    rerun without one client would reveal that client's update. If rounds fail after the uploads,
    all clients refuse and the model cannot change. The federation then stands still until the
    operators of at least max(U, m, T + 2) clients run this, each for its own client.
    """
    with _ledger(config) as ledger:
        found = [known for known in ledger.uploads() if known.startswith(model.lower())]
        if len(found) != 1:
            raise ParameterError(
                f"{len(found)} models of the ledger begin with {model!r}, expected one; see "
                "`lightsecagg ledger show`"
            )
        warn(
            "This reduces protection. If the server has, or gets, the sum of an earlier round "
            f"from model {found[0][:16]}..., and now a sum over other clients, it learns the "
            "difference: with one client more or less, that client's update. Go on only if you "
            "have evidence, not from the server alone, that those rounds failed."
        )
        _confirm(yes)
        ledger.forgive(found[0])
        ledger.store(ledger.to_bytes())
    typer.echo(f"Forgotten. The client may upload again for model {found[0][:16]}...")


@app.command("accept-loss")
def accept_loss(
    config: Config,
    round_number: Annotated[
        int, typer.Option("--round", min=0, help="The round in the client's message.")
    ],
    yes: Yes = False,
) -> None:
    """Continue with a new ledger, or an older copy, because the newest is lost for good."""
    with _ledger(config) as ledger:
        warn(
            "This reduces protection: the client forgets what the lost ledger held. An earlier "
            "round may then be repeated with this client and other clients, which reveals "
            "differences. If there is a newer copy of the file, restore it instead."
        )
        _confirm(yes)
        ledger.accept_loss(round_number)
        ledger.store(ledger.to_bytes())
    typer.echo(f"The client takes part in rounds after {round_number}.")


def _confirm(yes: bool) -> None:
    if not yes:
        typer.confirm("Go on?", abort=True, err=True)


@contextmanager
def _ledger(path: Path) -> Iterator[ClientLedger]:
    from lightsecagg.drivers.federation.client_ledger import ClientLedger
    from lightsecagg.drivers.federation.config import ClientConfig, load_config

    config = load_config(ClientConfig, path, ())
    file, session = config.client.ledger, bytes.fromhex(config.federation.session)
    if not file.exists():
        raise ConfigurationError(f"there is no ledger {file}; start the client once to create it")
    ledger = ClientLedger(file, session, config.client.id)
    try:
        yield ledger
    finally:
        ledger.close()
