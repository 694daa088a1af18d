"""Options that several commands share, so that one word means the same in all of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer

from lightsecagg.errors import ParameterError
from lightsecagg.params import Decoding, ShareMode
from lightsecagg.protocol.schemes.traits import TRAITS, traits_of
from lightsecagg.training.config import Partition


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


_NAMES = "|".join(TRAITS)

ProtocolChoice = Annotated[
    str, typer.Option(parser=protocol_named, metavar=f"[{_NAMES}]", help="Which protocol.")
]
HowToDecode = Annotated[
    Decoding | None,
    typer.Option(
        help="Short keys: remove the noise from a sum, or round by it.",
        show_default="exact where it leaves 8 bits per entry",
    ),
]

ExecutesCode = Annotated[
    bool,
    typer.Option(
        "--i-understand-torch-rpc-executes-code",
        help="Let server.transport = torch-rpc leave this machine.",
    ),
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
