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
    """[training.accept] client: which settings of local training the server may choose.

    Least and largest value; without a range, the client's own value only.
    """

    epochs: Range[int] | None = None
    batch_size: Range[int] | None = None
    learning_rate: Range[float] | None = None


class DecayTable(Table):
    """[training.schedule.decay] server: the learning rate falls as rounds are completed."""

    factor: float = Field(gt=0, le=1)
    every: int = Field(default=1, ge=1)
    """Completed rounds between two steps."""
    least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """It falls no further than this."""


class ScheduleTable(Table):
    """[training.schedule] server: settings of local training that change with the rounds.

    `{1 = 5, 20 = 1}` is 5 from the first and 1 from the twentieth completed round on; before the
    first that is named, the value of [training.local] holds.
    """

    epochs: dict[PositiveInt, PositiveInt] = Field(default={})
    batch_size: dict[PositiveInt, PositiveInt] = Field(default={})
    learning_rate: dict[PositiveInt, PositiveFinite] = Field(default={})
    decay: DecayTable | None = None
    """Of the learning rate, whichever of the two tables it comes from."""


class StoppingTable(Table):
    """[early_stopping] end the federation when a figure has stopped improving."""

    figure: str = Field(min_length=1)
    """One that the task's `evaluate` reports, or `clients.NAME`: one that the clients measure."""
    goal: Literal["lower", "higher"]
    """Which values are better."""
    patience: int = Field(default=5, ge=1)
    """Rounds in a row that do not improve it."""
    least_change: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What is no more than this is no improvement."""
    min_rounds: int = Field(default=1, ge=1)
    """Completed rounds before which it never stops."""


class CheckpointsTable(Table):
    """[checkpoints] which models stay in the state folder, beside the best."""

    keep: int = Field(default=2, ge=1)
    """The models of so many latest rounds."""
    figure: str | None = Field(default=None, min_length=1)
    """By which the best is judged: one that `evaluate` reports, or `clients.NAME`. Left out, that
    of [early_stopping], or else `loss` (lower) or `accuracy` (higher) if there is one."""
    goal: Literal["lower", "higher"] | None = None
    """Which values are better."""

    @model_validator(mode="after")
    def _check_goal(self) -> Self:
        if (self.figure is None) != (self.goal is None):
            raise ValueError("give both figure and goal (lower or higher), or neither")
        return self


class TrainingTable(Table):
    """[training] a PyTorch task; the same on the server and on every client."""

    task: dict[str, Any] = Field(default_factory=lambda: {"task": "digits"})
    """`TaskConfig`: task, clients, data_dir, partition, seed, ..."""
    local: dict[str, Any] = Field(default_factory=dict)
    """`LocalConfig`: epochs, batch_size, learning_rate, algorithm, ... What the server names here
    it tells its clients, who refuse a round that asks for anything but their own, or accepted,
    value."""
    accept: AcceptTable = AcceptTable()
    """Ranges in which the server may choose (client only)."""
    schedule: ScheduleTable = ScheduleTable()
    """What changes from round to round (server only)."""
    server: dict[str, Any] = Field(default_factory=dict)
    """`ServerConfig`: algorithm, learning_rate, ... (server only)"""
    seed: int = 0


class VectorsTable(Table):
    """[vectors] aggregation without training: sum (or average) plain vectors."""

    dimension: int = Field(default=0, ge=0)
    """Entries of a vector; a client takes it from its input."""
    weighted: bool = False
    """Average by sample counts instead of summing."""
    input: Path | None = None
    """Client: .npy, or .npz with `vector` and optionally `samples`."""
    output: Path | None = None
    """Server: where the result of each round is written, as .npz."""
