"""Options that several commands share, so that one word means the same in all of them.

Defaults stay with the commands: the simulator's links have no latency, the planner's have.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer

from lightsecagg.errors import ParameterError
from lightsecagg.params import DEFAULT_MODULUS, PAPER_MODULUS, Decoding, ShareMode, ThreatModel
from lightsecagg.planning import Topology
from lightsecagg.protocol.schemes.traits import TRAITS, traits_of
from lightsecagg.training.config import Partition


class Field(StrEnum):
    """The prime of the field."""

    DEFAULT = "default"
    PAPER = "paper"

    @property
    def modulus(self) -> int:
        """q"""
        return DEFAULT_MODULUS if self is Field.DEFAULT else PAPER_MODULUS


class Mode(StrEnum):
    """How updates meet."""

    SYNC = "sync"
    ASYNC = "async"


ALL = "all"
"""What `--protocol` takes for every protocol there is."""


def protocol_named(name: str) -> str:
    """A protocol that is registered, by its name."""
    try:
        return traits_of(name).name
    except ParameterError as error:
        raise typer.BadParameter(str(error)) from error


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
    return [traits.name for traits in TRAITS.values() if traits.buffered and traits.protected]


_NAMES = "|".join(TRAITS)

ProtocolChoice = Annotated[
    str, typer.Option(parser=protocol_named, metavar=f"[{_NAMES}]", help="Which protocol.")
]
ProtocolOrAll = Annotated[
    str, typer.Option(parser=protocol_or_all, metavar=f"[{_NAMES}|{ALL}]", help="Which protocol.")
]
BufferedProtocol = Annotated[
    str,
    typer.Option(
        parser=buffered_or_fedbuff,
        metavar=f"[{'|'.join([*_buffered(), FEDBUFF])}]",
        help="Protected, or FedBuff without any protection.",
    ),
]
Protocols = Annotated[
    list[str] | None,
    typer.Option(
        parser=protocol_named,
        metavar=f"[{_NAMES}]",
        help="Repeatable. [default: plain and lightsecagg]",
    ),
]
Clients = Annotated[int, typer.Option(help="N, the clients.")]
Privacy = Annotated[int, typer.Option(help="T, how many may collude with the server.")]
Dropouts = Annotated[int, typer.Option(help="D, how many may drop.")]


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
DefendAgainst = Annotated[ThreatModel, typer.Option(help="Whom the clients defend against.")]
HowToDecode = Annotated[
    Decoding | None,
    typer.Option(
        help="Short keys: remove the noise from a sum, or round by it.",
        show_default="exact where it leaves 8 bits per entry",
    ),
]
FieldChoice = Annotated[Field, typer.Option(help="default: 2^31 - 2^19 + 1; paper: 2^32 - 5.")]

ExecutesCode = Annotated[
    bool,
    typer.Option(
        "--i-understand-torch-rpc-executes-code",
        help="Let server.transport = torch-rpc leave this machine.",
    ),
]

Bandwidth = Annotated[float, typer.Option(help="Of a client, Mbit/s each way.")]
ServerBandwidth = Annotated[float, typer.Option(help="Of the server, Mbit/s each way.")]
ServerCores = Annotated[int, typer.Option(min=1, help="That share the server's work by columns.")]
Latency = Annotated[float, typer.Option(metavar="MS", help="One way, milliseconds.")]
ShareModeChoice = Annotated[
    ShareMode, typer.Option(help="LightSecAgg: what is shared, and how shares are made.")
]
SharesTravel = Annotated[Topology, typer.Option(help="How shares travel.")]
TrainingSeconds = Annotated[float, typer.Option(help="How long training takes.")]
Overlap = Annotated[
    bool, typer.Option("--overlap/--no-overlap", help="Train during the offline phase.")
]
AnswersNeeded = Annotated[int, typer.Option(help="U, the answers needed; 0 for N - D.")]
HowShared = Annotated[ShareMode, typer.Option(help="LightSecAgg: how shares are made.")]
Timeout = Annotated[float, typer.Option(help="Give up after this many seconds.")]

# -- of `run`, in both modes -----------------------------------------------------------------------

ClientProcesses = Annotated[int, typer.Option(help="N: client processes.")]
TaskChoice = Annotated[
    str, typer.Option(help="A built-in task, see `lightsecagg task list`, or module:Task.")
]
ModelChoice = Annotated[str | None, typer.Option(help="Another model for a built-in task.")]
DataFolder = Annotated[Path | None, typer.Option(help="Where the task's data is.")]
Partitioning = Annotated[str, typer.Option(help=" | ".join(get_args(Partition)))]
TaskOptions = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="For your own task; repeatable.")
]
Samples = Annotated[
    int | None, typer.Option(help="Examples per client, at most (exactly, if synthetic).")
]
LocalEpochs = Annotated[int, typer.Option(help="Local epochs.")]
LocalBatches = Annotated[int, typer.Option(help="Local batch size.")]
LocalRate = Annotated[float, typer.Option(help="Local learning rate.")]
ClippedAt = Annotated[
    float, typer.Option(help="Largest entry of an update; larger ones are clipped.")
]
DemoSeed = Annotated[int, typer.Option(help="Steers data, training and kills; never a mask.")]
ReportFolder = Annotated[Path, typer.Option(help="Folder for the report.")]
SaveModel = Annotated[
    Path | None, typer.Option(help="Keep the final model: a .pt, .safetensors or .npz file.")
]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Show it in a browser, until Ctrl-C.")]
DashboardPort = Annotated[
    int | None,
    typer.Option(help="The page's port, instead of any free one; implies --dashboard."),
]
