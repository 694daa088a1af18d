"""`lightsecagg provision`: the keys, certificates and configuration files of a new federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightsecagg.cli.options import Mode, split_names
from lightsecagg.cli.output import AsJson, print_json
from lightsecagg.field.staleness import Staleness
from lightsecagg.params import ShareMode

app = typer.Typer(add_completion=False)


@app.command()
def provision(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="The directory to create.")],
    clients: Annotated[
        int | None,
        typer.Option(
            help="N: how many clients; their ids are 0 to N-1.", show_default="as many as names"
        ),
    ] = None,
    names: Annotated[
        str, typer.Option(help="Names for people, one per client, such as berlin,london,paris.")
    ] = "",
    privacy: Annotated[
        int | None,
        typer.Option(help="T: how many clients may collude with the server.", show_default="N/4"),
    ] = None,
    dropouts: Annotated[
        int | None,
        typer.Option(help="D: how many clients may drop out of a round.", show_default="N/4"),
    ] = None,
    survivors: Annotated[
        int | None,
        typer.Option(
            help="U: answers needed; 0 for N - D, with the fewest bytes.",
            show_default="leaves room for one liar",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="What to learn; see `lightsecagg task`.", show_default="digits"),
    ] = None,
    vectors: Annotated[
        int | None,
        typer.Option(help="Train nothing: sum vectors of this many entries, one per client."),
    ] = None,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Average the vectors by sample counts instead.")
    ] = False,
    bound: Annotated[
        float, typer.Option(help="Largest entry of an update or vector; larger ones are clipped.")
    ] = 1.0,
    share_mode: Annotated[
        ShareMode | None,
        typer.Option(
            metavar="NAME",
            help="How masks are shared: paper, seeded, or short-key (experimental).",
            show_default="seeded; clients also take paper",
        ),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="sync: rounds; async: buffers of updates as they come.")
    ] = Mode.SYNC,
    buffer: Annotated[
        int | None, typer.Option(help="K: updates per buffer, async.", show_default="N/2")
    ] = None,
    staleness: Annotated[
        Staleness | None,
        typer.Option(
            metavar="NAME", help="s(tau), async: constant, poly or hinge.", show_default="constant"
        ),
    ] = None,
    server_name: Annotated[str, typer.Option(help="Host name that clients dial.")] = "localhost",
    port: Annotated[int, typer.Option(help="The server's port.")] = 7700,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Create a federation: authority, certificates, identities, allow-list and configuration.

    Keep DIR/authority offline. Give DIR/server to the server, DIR/clients/<id> to client <id>.
    """
    from lightsecagg.drivers.federation.provisioning import describe_liars
    from lightsecagg.drivers.federation.provisioning import provision as create

    called = split_names(names)
    if clients is None and not called:
        raise typer.BadParameter("give --clients, or --names", ctx=context)
    clients = len(called) if clients is None else clients
    made = create(
        out,
        clients,
        names=called,
        privacy=privacy,
        dropouts=dropouts,
        survivors=survivors,
        task=task,
        vectors=vectors,
        weighted=weighted,
        bound=bound,
        share_mode=share_mode,
        mode=mode.value,
        buffer=buffer,
        staleness=staleness,
        server_name=server_name,
        port=port,
        days=days,
    )
    parameters, liars = made.parameters, describe_liars(made.parameters)
    if as_json:
        print_json(
            {
                "directory": str(made.directory),
                "session": made.session.hex(),
                "authority": made.authority_key.hex(),
                "server": str(made.server),
                "privacy": parameters.privacy,
                "dropouts": parameters.dropouts,
                "survivors": parameters.survivors,
                "liars": liars,
                "clients": {str(client): str(path) for client, path in made.clients.items()},
            }
        )
        return
    typer.echo(f"Provisioned {clients} clients in {out}.")
    typer.echo(
        f"  N = {clients}, T = {parameters.privacy}, D = {parameters.dropouts}, "
        f"U = {parameters.survivors}: {liars}"
    )
    typer.echo(f"  {out / 'authority'}: keep offline; it can admit clients")
    if vectors is not None:
        content = "an .npz with `vector` and `samples`" if weighted else "an .npy"
        name = made.clients[0].parent / ("vector.npz" if weighted else "vector.npy")
        typer.echo(f"  {name}: put client 0's {vectors} numbers there, {content}; and so on")
    typer.echo(f"  lightsecagg server --config {made.server}")
    typer.echo(f"  lightsecagg client --config {made.clients[0]}  # and so on")
