"""The global model as a file that other programs read: a plain state dict."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightsecagg.errors import ConfigurationError, MissingExtra
from lightsecagg.training.config import TaskConfig
from lightsecagg.training.model_vector import Layout, restore
from lightsecagg.training.task import Task, as_task
from lightsecagg.training.trainer import new_model
from lightsecagg.training.updates import Vector


def state_dict(task: Task | TaskConfig, model: Vector, *, seed: int = 0) -> dict[str, Tensor]:
    """What `task.model().load_state_dict` takes: the model with this vector.

    Entries that are not federated (integer buffers, a frozen backbone) are as a new model has them.
    """
    task = as_task(task)
    network = new_model(task, seed=seed)
    return restore(model, Layout.of(network, task.shared), network.state_dict())


def check_target(path: Path) -> None:
    """Refuse a file that `save_state` could not write, before there is anything to write."""
    if path.suffix not in _WRITERS:
        raise ConfigurationError(
            f"{path} must end in one of {', '.join(_WRITERS)}: the ending chooses the format"
        )
    if path.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise MissingExtra("writing .safetensors needs safetensors", "torch")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written: is {path.parent} a folder of yours?")


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict, whole or not at all, in the format that the ending names."""
    check_target(path)
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    try:
        _WRITERS[path.suffix]({name: t.detach().cpu() for name, t in state.items()}, partial)
        partial.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_torch(state: Mapping[str, Tensor], path: Path) -> None:
    torch.save(dict(state), path)


def _write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    # The format has no tied entries: each name gets its own copy.
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)


def _write_npz(state: Mapping[str, Tensor], path: Path) -> None:
    arrays: dict[str, Any] = {
        # NumPy has no bfloat16; float32 holds it exactly.
        name: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
        for name, tensor in state.items()
    }
    np.savez(path, **arrays)


_WRITERS: dict[str, Callable[[Mapping[str, Tensor], Path], None]] = {
    ".pt": _write_torch,
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
}
