"""Options that several commands of the laboratory share, next to those of the product.

Defaults stay with the commands: the simulator's links have no latency, the planner's have.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from lightsecagg.cli.options import protocol_named
from lightsecagg.errors import ParameterError
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, ThreatModel
from lightsecagg.protocol.schemes.traits import protocols
from lightsecagg_lab.planning import Topology
from lightsecagg_lab.schemes.baselines import all_traits


class Field(StrEnum):
    """The prime of the field."""

    DEFAULT = "default"
    PAPER = "paper"

    @property
    def modulus(self) -> int:
        """q"""
        return DEFAULT_MODULUS if self is Field.DEFAULT else PAPER_MODULUS


ALL = "all"
"""What `--protocol` takes for every protocol there is."""


def protocol_or_all(name: str) -> str:
    """A protocol that is registered, or all."""
    return ALL if name == ALL else protocol_named(name)


FEDBUFF = "fedbuff"
"""What `--protocol` takes for plain sums in the asynchronous simulator."""


def buffered_or_fedbuff(name: str) -> str:
    """A protocol that is registered, protects and has an asynchronous mode, or FedBuff."""
    if name not in (able := [*_buffered(), FEDBUFF]):
        raise typer.BadParameter(f"protocol {name!r}: choose one of {', '.join(able)}")
    return name


def _buffered() -> list[str]:
    return [traits.name for traits in all_traits() if traits.buffered and traits.protected]


_NAMES = ", ".join(protocols())

ProtocolOrAll = Annotated[
    str,
    typer.Option(
        parser=protocol_or_all, metavar="NAME", help=f"Which protocol: {_NAMES} or {ALL}."
    ),
]
BufferedProtocol = Annotated[
    str,
    typer.Option(
        parser=buffered_or_fedbuff,
        metavar="NAME",
        help=f"Protected ({', '.join(_buffered())}), or unprotected ({FEDBUFF}).",
    ),
]
Protocols = Annotated[
    list[str] | None,
    typer.Option(
        parser=protocol_named,
        metavar="NAME",
        help=f"Which protocol: {_NAMES}. Repeatable.",
        show_default="plain and lightsecagg",
    ),
]
Clients = Annotated[int, typer.Option(help="N, the clients.")]
Privacy = Annotated[int, typer.Option(help="T, how many may collude with the server.")]


def whole_number(text: str) -> int:
    """1206590, 1_206_590 and 1.2e6 alike."""
    try:
        value = float(text)
    except ValueError:
        raise ParameterError(f"{text!r} is not a number") from None
    if not value.is_integer():
        raise ParameterError(f"{text} is not a whole number")
    return int(value)


Dimension = Annotated[
    int,
    typer.Option(
        parser=whole_number, metavar="NUMBER", help="d, the length of the vectors, such as 1e6."
    ),
]
DefendAgainst = Annotated[
    ThreatModel,
    typer.Option(
        metavar="NAME", help="The server to protect against: honest-but-curious, malicious-server."
    ),
]
FieldChoice = Annotated[Field, typer.Option(help="default: 2^31 - 2^19 + 1; paper: 2^32 - 5.")]
Bandwidth = Annotated[float, typer.Option(help="Of a client, in Mbit/s each way.")]
ServerBandwidth = Annotated[float, typer.Option(help="Of the server, in Mbit/s each way.")]
ServerCores = Annotated[int, typer.Option(min=1, help="Cores that share the server's work.")]
Latency = Annotated[float, typer.Option(metavar="MS", help="One way, in milliseconds.")]
SharesTravel = Annotated[Topology, typer.Option(help="Through the server, or client to client.")]
TrainingSeconds = Annotated[float, typer.Option(help="How long training takes.")]
NoOverlap = Annotated[
    bool, typer.Option("--no-overlap", help="Train after the offline phase, not during it.")
]
