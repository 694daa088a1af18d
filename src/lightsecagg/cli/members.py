"""`lightsecagg members`: who takes part in a federation, changed by whoever holds its authority."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightsecagg.cli.options import split_names
from lightsecagg.cli.output import AsJson, print_json, warn
from lightsecagg.errors import ParameterError

if TYPE_CHECKING:
    from lightsecagg.drivers.federation.administration import Administration, Member

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Admit, revoke and renew the clients of a federation. Needs its authority/ folder.",
)

Federation = Annotated[
    Path,
    typer.Option(help="The folder that `lightsecagg provision` made; not on the server's machine."),
]
Days = Annotated[int, typer.Option(help="How long the certificates are valid.")]


@app.command("list")
def list_members(federation: Federation, as_json: AsJson = False) -> None:
    """List everybody ever admitted, and when their certificates expire."""
    with _administration(federation) as administration:
        register, members = administration.register, administration.members()
        ends = {"authority": administration.expires, "server": administration.server_expires}
    if as_json:
        print_json(
            {
                "allow_list": register.number,
                "expires": {name: _iso(end) for name, end in ends.items()},
                "clients": [
                    {
                        "id": member.client,
                        "name": member.name,
                        "member": not member.revoked_in,
                        "revoked_in": member.revoked_in or None,
                        "expires": _iso(member.expires),
                    }
                    for member in members
                ],
            }
        )
        return
    count = len(register.members)
    typer.echo(f"allow-list number {register.number}: {count} members")
    rows = [(name, f"certificate until {_day(end)}") for name, end in ends.items()]
    for member in members:
        state = f"revoked by allow-list number {member.revoked_in}"
        if not member.revoked_in:
            state = f"certificate until {_day(member.expires)}"
        rows.append((_called(member), state))
    width = max(len(called) for called, _ in rows)
    for called, state in rows:
        typer.echo(f"  {called:{width}}  {state}")


@app.command()
def add(
    federation: Federation,
    count: Annotated[
        int | None, typer.Option(help="How many.", show_default="1, or as many as names")
    ] = None,
    names: Annotated[str, typer.Option(help="Names for people, separated by commas.")] = "",
    days: Days = 365,
    as_json: AsJson = False,
) -> None:
    """Admit new clients, with ids that were never used.

    Give each new folder to its client, over a channel you trust, and the new allow-list to
    the server.
    """
    called = split_names(names)
    with _administration(federation) as administration:
        files = administration.add(len(called) or 1 if count is None else count, days, called)
        register, new_list = administration.register, administration.allow_list
    clients, members = int(register.parameters["clients"]), len(register.members)
    if as_json:
        document = {"allow_list": register.number, "file": str(new_list)}
        print_json({**document, "clients": [str(path) for path in files]})
        return
    for path in files:
        typer.echo(f"  {path.parent}: give it to the new client")
    _say_what_to_do(register.number, new_list)
    if called:
        typer.echo("Add the names to [server.names] in server.toml, for the log and the page:")
        for client, name in zip(list(register.members)[-len(called) :], called, strict=True):
            typer.echo(f"  {client} = {json.dumps(name)}")
    if members > clients:
        typer.echo(
            f"Rounds invite at most N = {clients} of the {members} members ([aggregation] clients "
            "of the server). T must bound the corrupt clients among all members: check it."
        )


@app.command()
def revoke(
    clients: Annotated[list[int], typer.Argument(help="The ids of the clients.")],
    federation: Federation,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Revoke even if too few remain for T and D.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove clients and all their certificates for good; their ids are never used again."""
    with _administration(federation) as administration:
        before = len(administration.register.members)
        after = administration.revoke(clients, anyway=anyway)
        register, new_list = administration.register, administration.allow_list
        revoked = [_called(each) for each in administration.members() if each.client in clients]
    if as_json:
        print_json({"allow_list": register.number, "file": str(new_list), "revoked": clients})
        return
    typer.echo(f"Revoked: {', '.join(revoked)}. {len(register.members)} members remain.")
    _say_what_to_do(register.number, new_list)
    if after is None:
        warn("Too few remain for T and D: the server exits until you change [aggregation].")
    elif after.clients < min(before, int(register.parameters["clients"])):
        typer.echo(
            f"Rounds take N = {after.clients} clients from now on, with T = {after.privacy}, D = "
            f"{after.dropouts} and U = {after.survivors}."
        )


@app.command()
def renew(
    federation: Federation,
    clients: Annotated[
        list[int] | None, typer.Argument(help="The ids of clients.", show_default="everybody")
    ] = None,
    server: Annotated[
        bool, typer.Option("--server", help="Renew the server's certificate.")
    ] = False,
    authority: Annotated[
        bool,
        typer.Option(
            "--authority", help="Renew the authority's own; all members then need the new ca.pem."
        ),
    ] = False,
    days: Days = 365,
    revoke_old: Annotated[
        bool,
        typer.Option(
            "--revoke-old", help="A key was stolen: refuse the clients' old certificates."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Issue new certificates before the old ones expire; by default, for everybody.

    Old certificates stay valid until they expire, so you can replace files one by one.
    """
    everybody = not clients and not server and not authority
    if revoke_old and not clients:
        raise ParameterError("--revoke-old is for the certificates of clients; give their ids")
    with _administration(federation) as administration:
        number = administration.register.number
        files = administration.renew(
            list(administration.register.members) if everybody else clients or (),
            server=server or everybody,
            authority=authority or everybody,
            days=days,
            revoke_old=revoke_old,
        )
        register, new_list = administration.register, administration.allow_list
    if as_json:
        print_json({"allow_list": register.number, "files": [str(path) for path in files]})
        return
    for path in files:
        key = "" if path.name == "ca.pem" else ", with the .key next to it"
        typer.echo(f"  {path}: give it to its owner, to replace the old one{key}")
    typer.echo("Programs read their certificates when they start.")
    if register.number != number:
        _say_what_to_do(register.number, new_list)


def _say_what_to_do(number: int, path: Path) -> None:
    typer.echo(
        f"  {path}: allow-list number {number}. Copy it over the server's allow-list.json; the "
        "next round uses it, and clients get it from the server."
    )


def _called(member: Member) -> str:
    return f"client {member.client}" + (f" ({member.name})" if member.name else "")


def _day(end: datetime | None) -> str:
    return "unknown: its folder is not here" if end is None else f"{end:%Y-%m-%d}"


def _iso(end: datetime | None) -> str | None:
    return None if end is None else end.isoformat()


@contextmanager
def _administration(folder: Path) -> Iterator[Administration]:
    from lightsecagg.drivers.federation.administration import Administration

    administration = Administration(folder)
    try:
        yield administration
    finally:
        administration.close()
