"""The models in a server's state folder, read from outside, while it runs or afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.checkpoints import load_best
from lightsecagg.drivers.federation.config import ServerConfig
from lightsecagg.drivers.federation.jobs import task_of
from lightsecagg.errors import ConfigurationError
from lightsecagg.foreign import member, reading


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    rounds: int
    """Rounds after which the model is this one."""
    parameters: int
    """Numbers that were federated."""


def export_model(config: ServerConfig, state: Path, out: Path, which: str = "last") -> Exported:
    """Write the `last` or `best` model, or that after so many rounds, as a state dict."""
    from lightsecagg import training

    if config.training is None:
        raise ConfigurationError(
            "this federation sums vectors and has no model; [vectors] output names its result"
        )
    task = training.load_task(task_of(config.training))
    rounds, vector = read_model(state, which)
    size = training.model_layout(task).size
    if vector.size != size:
        raise ConfigurationError(
            f"the model in {state} has {vector.size:,} numbers, the task {task.config.task} "
            f"{size:,}: is the configuration the one that it was trained with?"
        )
    training.save_state(training.state_dict(task, vector, seed=config.training.seed), out)
    return Exported(rounds, vector.size)


def read_model(state: Path, which: str = "last") -> tuple[int, NDArray[np.float32]]:
    """The rounds done, and the vector of the model after them; `which` as for `export_model`."""
    paths = (state / "models").glob("*.npz")
    found = {int(path.stem): path for path in paths if re.fullmatch("[0-9]+", path.stem)}
    if not found:
        raise ConfigurationError(
            f"{state} holds no model: has a round been completed, and is it the state folder?"
        )
    rounds = max(found) if which == "last" else _rounds(state, which)
    if rounds not in found:
        kept = ", ".join(map(str, sorted(found)))
        raise ConfigurationError(f"no model after {rounds} rounds is kept; there are: {kept}")
    path = found[rounds]
    # NumPy leaves a damaged file open that it has opened itself.
    with (
        reading(path, "a checkpoint"),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        model: NDArray[np.float32] = member(stored, "model")
    if model.ndim != 1 or model.dtype.kind != "f":
        raise ConfigurationError(
            f"{path} is not a checkpoint: its model is an array of {model.dtype} of shape "
            f"{model.shape}, not a vector of floats"
        )
    return rounds, model


def _rounds(state: Path, which: str) -> int:
    if which == "best":
        best = load_best(state / "models")
        if best is None:
            raise ConfigurationError(
                "no model was judged the best: the rounds have no figure to judge by; see "
                "[checkpoints] figure, or take the last"
            )
        return best.rounds
    if not which.isascii() or not which.isdecimal():
        raise ConfigurationError(f"{which!r} is no model; write best, last or a number of rounds")
    return int(which)
