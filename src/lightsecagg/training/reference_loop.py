"""Federated averaging in one process, by default in the clear.

It shows which accuracy to expect, and the sum that secure aggregation must equal. `average`
replaces the plain average with another; everything else stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightsecagg.errors import ParameterError
from lightsecagg.training.config import LocalConfig, TaskConfig
from lightsecagg.training.server_optimizers import ServerConfig, ServerOptimizer
from lightsecagg.training.task import Task, as_task
from lightsecagg.training.trainer import evaluate, initial_model, local_update, model_layout
from lightsecagg.training.updates import AverageUpdate, LocalUpdate, Vector, weighted_average


@dataclass(frozen=True, slots=True)
class Round:
    """The global model after one round."""

    index: int
    """1, 2, ..."""
    model: Vector = field(repr=False)
    """Its vector."""
    metrics: dict[str, float]
    """The figures of the task's `evaluate`."""


def federated_averaging(
    task: Task | TaskConfig,
    rounds: int,
    local: LocalConfig | None = None,
    server: ServerConfig | None = None,
    *,
    seed: int = 0,
    clients_per_round: int | None = None,
    average: Callable[[Sequence[LocalUpdate]], AverageUpdate] = weighted_average,
) -> Iterator[Round]:
    """Train for `rounds` rounds; yields after each one, so the caller may stop early."""
    task, local = as_task(task), local or LocalConfig()
    clients = task.config.clients
    chosen = clients_per_round or clients
    if not 1 <= chosen <= clients:
        raise ParameterError(f"clients_per_round is {chosen}; there are {clients} clients")
    optimizer = ServerOptimizer(server or ServerConfig(), model_layout(task), local)
    model = initial_model(task, seed=seed)
    rng = np.random.default_rng([seed, clients])
    for index in range(1, rounds + 1):
        members = np.sort(rng.permutation(clients)[:chosen]).tolist()
        updates = [
            local_update(task, client, model, local, seed=seed, round_index=index)
            for client in members
        ]
        model = optimizer.step(model, average(updates))
        yield Round(index, model, evaluate(task, model))
