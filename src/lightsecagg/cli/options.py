"""Options that several commands share, so that one word means the same in all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lightsecagg.errors import ParameterError
from lightsecagg.params import Decoding, ShareMode
from lightsecagg.protocol.schemes.traits import protocols, traits_of


class Mode(StrEnum):
    """How updates meet."""

    SYNC = "sync"
    ASYNC = "async"


def protocol_named(name: str) -> str:
    """A protocol that is registered, by its name."""
    try:
        return traits_of(name).name
    except ParameterError as error:
        raise typer.BadParameter(str(error)) from error


ProtocolChoice = Annotated[
    str,
    typer.Option(
        parser=protocol_named, metavar="NAME", help=f"Which protocol: {', '.join(protocols())}."
    ),
]
HowToDecode = Annotated[
    Decoding | None,
    typer.Option(
        metavar="NAME",
        help="Short keys: exact removes the noise from a sum, dithered leaves it in.",
        show_default="exact where it leaves 8 bits per entry",
    ),
]

ExecutesCode = Annotated[
    bool,
    typer.Option(
        "--unsafe-transport",
        help="Allow PyTorch RPC, which executes what peers send, beyond this machine.",
    ),
]

AnswersNeeded = Annotated[int, typer.Option(help="U, the answers needed; 0 for N - D.")]
HowShared = Annotated[
    ShareMode,
    typer.Option(metavar="NAME", help="How masks are shared: paper, seeded or short-key."),
]
Timeout = Annotated[float, typer.Option(help="Give up after this many seconds.")]

SYNC_ONLY, ASYNC_ONLY = "Options of rounds", "Options of --mode async"
"""Panels of the help; an option in one of them is refused in the other mode."""


def refuse_other_mode(ctx: typer.Context, mode: Mode) -> None:
    """Refuse an option that somebody has given and that does nothing in this mode."""
    panel, name, way = (
        (SYNC_ONLY, "synchronous", "leave out --mode async")
        if mode is Mode.ASYNC
        else (ASYNC_ONLY, "asynchronous", "add --mode async")
    )
    for each in ctx.command.params:
        source = ctx.get_parameter_source(each.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and getattr(each, "rich_help_panel", None) == panel:
            raise ParameterError(f"{each.opts[0]} belongs to the {name} mode; {way}")


def split_names(names: str) -> list[str]:
    """`berlin,london` as a list."""
    return [name.strip() for name in names.split(",")] if names else []
