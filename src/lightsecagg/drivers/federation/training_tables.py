"""The tables of what a federation learns: training, its steering, its end, and plain vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from lightsecagg.drivers.federation.tables import Table

Number = TypeVar("Number", int, float)


def _ordered(bounds: tuple[Number, Number]) -> tuple[Number, Number]:
    if not bounds[0] <= bounds[1]:
        raise ValueError("write [least, largest]")
    return bounds


Range = Annotated[tuple[Number, Number], AfterValidator(_ordered)]
PositiveFinite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AcceptTable(Table):
    """[training.accept] Client: ranges in which the server may choose settings of local training.

    [least, largest]; without a range, only the client's own value is accepted.
    """

    epochs: Range[int] | None = None
    batch_size: Range[int] | None = None
    learning_rate: Range[float] | None = None


class DecayTable(Table):
    """[training.schedule.decay] Server: the learning rate falls as rounds are completed."""

    factor: float = Field(gt=0, le=1)
    """Multiplies the learning rate at each step."""
    every: int = Field(default=1, ge=1)
    """Completed rounds between two steps."""
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """It falls no further than this."""


class ScheduleTable(Table):
    """[training.schedule] Server: settings of local training that change with the rounds.

    `{1 = 5, 20 = 1}` is 5 from the first completed round on, and 1 from the twentieth. Before the
    first step, the value in [training.local] holds.
    """

    epochs: dict[PositiveInt, PositiveInt] = Field(default={})
    batch_size: dict[PositiveInt, PositiveInt] = Field(default={})
    learning_rate: dict[PositiveInt, PositiveFinite] = Field(default={})
    decay: DecayTable | None = None
    """Decay of the learning rate, from either table."""


class StoppingTable(Table):
    """[early_stopping] End the federation when a figure has stopped improving."""

    figure: str = Field(min_length=1)
    """A figure of the task's `evaluate`, or `clients.NAME`, a metric of the clients."""
    goal: Literal["lower", "higher"]
    """Which values are better."""
    patience: int = Field(default=5, ge=1)
    """How many rounds in a row without an improvement end the federation."""
    least_change: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smaller changes do not count as an improvement."""
    min_rounds: int = Field(default=1, ge=1)
    """The federation never ends before this many completed rounds."""


class CheckpointsTable(Table):
    """[checkpoints] Which models stay in the state folder, beside the best."""

    keep: int = Field(default=2, ge=1)
    """How many of the latest models."""
    figure: str | None = Field(default=None, min_length=1)
    """The figure that decides which is best: of `evaluate`, or `clients.NAME`. By default that of
    [early_stopping], or else `loss` (lower) or `accuracy` (higher) if there is one."""
    goal: Literal["lower", "higher"] | None = None
    """Which values are better."""

    @model_validator(mode="after")
    def _check_goal(self) -> Self:
        if (self.figure is None) != (self.goal is None):
            raise ValueError("give both figure and goal (lower or higher), or neither")
        return self


class TrainingTable(Table):
    """[training] A PyTorch task; the same on the server and on every client."""

    task: dict[str, Any] = Field(default_factory=lambda: {"task": "digits"})
    """`TaskConfig`: task, clients, data_dir, partition, seed, ..."""
    local: dict[str, Any] = Field(default_factory=dict)
    """`LocalConfig`: epochs, batch_size, learning_rate, algorithm, ... The server sends its values
    to the clients, which accept only their own values and those within [training.accept]."""
    accept: AcceptTable = AcceptTable()
    """Ranges in which the server may choose (client only)."""
    schedule: ScheduleTable = ScheduleTable()
    """What changes from round to round (server only)."""
    server: dict[str, Any] = Field(default_factory=dict)
    """`ServerConfig`: algorithm, learning_rate, ... (server only)"""
    seed: int = 0
    """Steers the initial model."""


class VectorsTable(Table):
    """[vectors] Aggregation without training: the sum or average of plain vectors."""

    dimension: int = Field(default=0, ge=0)
    """Entries of a vector; a client takes it from its input."""
    weighted: bool = False
    """Average by sample counts instead of summing."""
    input: Path | None = None
    """Client: .npy, or .npz with `vector` and optionally `samples`."""
    output: Path | None = None
    """Server: the file, .npz, for the latest result."""
