"""The training engine: PyTorch models, data, partitions and optimisers (extra: torch).

    task = load_task(TaskConfig("digits", clients=20))
    model = initial_model(task, seed=1)
    update = local_update(task, client=3, model=model, seed=1)

Names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightsecagg.errors import MissingExtra

if TYPE_CHECKING:
    from lightsecagg.training.builtin_tasks import PAPER_MODELS, PaperModel
    from lightsecagg.training.config import LocalConfig, TaskConfig
    from lightsecagg.training.export import check_target, save_state, state_dict
    from lightsecagg.training.metrics import Metric
    from lightsecagg.training.model_vector import Layout, load_vector, restore, vectorize
    from lightsecagg.training.reference_loop import Round, federated_averaging
    from lightsecagg.training.server_optimizers import ServerConfig, ServerOptimizer
    from lightsecagg.training.task import Examples, Task, load_task
    from lightsecagg.training.trainer import (
        evaluate,
        initial_model,
        local_update,
        measure,
        model_layout,
        task_metrics,
        use_one_thread,
    )
    from lightsecagg.training.updates import (
        AverageUpdate,
        LocalUpdate,
        pack,
        unpack,
        weighted_average,
    )
    from lightsecagg.training.worker import training_pool

_HOME = {
    "AverageUpdate": "updates",
    "Examples": "task",
    "Layout": "model_vector",
    "LocalConfig": "config",
    "LocalUpdate": "updates",
    "Metric": "metrics",
    "PAPER_MODELS": "builtin_tasks",
    "PaperModel": "builtin_tasks",
    "Round": "reference_loop",
    "ServerConfig": "server_optimizers",
    "ServerOptimizer": "server_optimizers",
    "Task": "task",
    "TaskConfig": "config",
    "check_target": "export",
    "evaluate": "trainer",
    "federated_averaging": "reference_loop",
    "initial_model": "trainer",
    "load_task": "task",
    "load_vector": "model_vector",
    "local_update": "trainer",
    "measure": "trainer",
    "model_layout": "trainer",
    "pack": "updates",
    "restore": "model_vector",
    "save_state": "export",
    "state_dict": "export",
    "task_metrics": "trainer",
    "training_pool": "worker",
    "unpack": "updates",
    "use_one_thread": "trainer",
    "vectorize": "model_vector",
    "weighted_average": "updates",
}

__all__ = [
    "PAPER_MODELS",
    "AverageUpdate",
    "Examples",
    "Layout",
    "LocalConfig",
    "LocalUpdate",
    "Metric",
    "PaperModel",
    "Round",
    "ServerConfig",
    "ServerOptimizer",
    "Task",
    "TaskConfig",
    "check_target",
    "evaluate",
    "federated_averaging",
    "initial_model",
    "load_task",
    "load_vector",
    "local_update",
    "measure",
    "model_layout",
    "pack",
    "restore",
    "save_state",
    "state_dict",
    "task_metrics",
    "training_pool",
    "unpack",
    "use_one_thread",
    "vectorize",
    "weighted_average",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("training needs torch", "torch") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
