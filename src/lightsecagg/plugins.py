"""What other distributions add by entry points: commands, transports and schemes."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

COMMANDS: Final = "lightsecagg.commands"
"""Each names a `typer.Typer`."""
TRANSPORTS: Final = "lightsecagg.transports"
"""Each names a `drivers.transport.communicator.Transport`."""
SCHEMES: Final = "lightsecagg.schemes"
"""Each names a function that registers the protocol of its name (`schemes.registry.register`)."""


@cache
def added(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; nothing is loaded."""
    return {each.name: each for each in entry_points(group=group)}
