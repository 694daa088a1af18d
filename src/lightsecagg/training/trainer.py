"""Local training: one call from the global model's vector to a client's update (Section 2).

Nothing here changes the caller's random state: all randomness (batch order, dropout, initial
weights) is drawn from generators seeded by the arguments, and torch's global generator, which
dropout layers use, is forked. The same arguments give the same bits on the same machine with the
same number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightsecagg.errors import ConfigurationError, InputRefused, ParameterError
from lightsecagg.training.config import LocalConfig, TaskConfig
from lightsecagg.training.metrics import Metric, metrics_of, to_extras
from lightsecagg.training.model_vector import Layout, load_vector, vectorize
from lightsecagg.training.task import Data, Task, as_task, make_batch
from lightsecagg.training.updates import LocalUpdate, Vector

# First word of each seed, so that no two purposes ever share a stream.
_INITIAL, _LOCAL = 0, 1


def use_one_thread() -> None:
    """For worker processes: several clients on one machine must not fight over its cores."""
    torch.set_num_threads(1)


def model_layout(task: Task | TaskConfig) -> Layout:
    """The layout of the task's model: d, and which coordinate is what."""
    task = as_task(task)
    with _seeded(0):
        return Layout.of(task.model(), task.shared)


def initial_model(task: Task | TaskConfig, *, seed: int = 0) -> Vector:
    """x(0): the vector of a freshly drawn model."""
    task = as_task(task)
    model = new_model(task, seed=seed)
    return vectorize(model.state_dict(), Layout.of(model, task.shared))


def new_model(task: Task, *, seed: int = 0) -> nn.Module:
    """A freshly drawn model."""
    with _seeded(_mix(_INITIAL, seed)):
        return task.model()


def evaluate(task: Task | TaskConfig, model: Vector) -> dict[str, float]:
    """The task's figures for the model with this vector."""
    task = as_task(task)
    with _seeded(0), torch.no_grad():
        network = task.model()
        load_vector(network, model, Layout.of(network, task.shared))
        network.eval()
        return task.evaluate(network)


def task_metrics(task: Task | TaskConfig) -> tuple[Metric, ...]:
    """What clients measure, in the order in which it rides behind an update."""
    return metrics_of(as_task(task).metrics)


def measure(task: Task | TaskConfig, client: int, model: Vector) -> dict[str, float]:
    """One client's metrics of the global model, as extras in [-1, 1]: secret, they ride masked."""
    task = as_task(task)
    metrics = task_metrics(task)
    if not metrics:
        return {}
    with _seeded(0), torch.no_grad():
        network = task.model()
        load_vector(network, model, Layout.of(network, task.shared))
        network.eval()
        return to_extras(metrics, task.measure(network, client))


def local_update(
    task: Task | TaskConfig,
    client: int,
    model: Vector,
    config: LocalConfig | None = None,
    *,
    seed: int = 0,
    round_index: int = 0,
) -> LocalUpdate:
    """Train the global model on one client's data and return the difference.

    * `task`: the task, or its configuration (cheap to send to a child process).
    * `model`: the global model's vector; it is not changed.
    * `seed`, `round_index` and `client` together seed batch order and dropout.

    A model with batch-norm layers skips a last batch of one example, on which it cannot train.
    A loss or a result that is not finite raises `InputRefused`: it must not reach the mask.
    """
    task, config = as_task(task), config or LocalConfig()
    if not 0 <= client < task.config.clients:
        raise ParameterError(f"there is no client {client} among {task.config.clients}")
    data = task.client_data(client)
    with _seeded(_mix(_LOCAL, seed, round_index, client)):
        network = task.model()
        layout = Layout.of(network, task.shared)
        load_vector(network, model, layout)
        steps = _train(task, network, data, config, client, _mix(_LOCAL, seed, round_index, client))
    trained = vectorize(network.state_dict(), layout)
    if not np.isfinite(trained).all():
        raise InputRefused(
            f"client {client}: {np.count_nonzero(~np.isfinite(trained))} of {layout.size} numbers "
            "of the trained model are not finite; lower the learning rate or check the data"
        )
    delta = trained - model
    if config.algorithm != "fednova":
        return LocalUpdate(delta, len(data))
    effective = effective_steps(steps, config.momentum)
    if effective > config.step_limit:
        raise ParameterError(
            f"client {client} took {effective:g} effective steps, more than step_limit = "
            f"{config.step_limit}; raise step_limit on all parties"
        )
    delta[: layout.parameters] /= np.float32(effective)
    extras = {"local_steps": effective / config.step_limit}
    return LocalUpdate(delta, len(data), extras)


def effective_steps(steps: int, momentum: float) -> float:
    """FedNova's |a_i|_1: how many plain gradient steps a client's movement amounts to.

    With heavy-ball momentum rho, the gradient of step k moves the model by
    1 + rho + ... + rho^(steps - k), in units of the learning rate; this is the sum over k. (Wang
    et al., "Tackling the Objective Inconsistency Problem", 2020, Section 4.)
    """
    return math.fsum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))


def _train(
    task: Task, network: nn.Module, data: Data, config: LocalConfig, client: int, seed: int
) -> int:
    """Train in place; returns the number of steps taken."""
    smallest = 2 if any(isinstance(module, _BatchNorm) for module in network.modules()) else 1
    if len(data) < smallest or config.batch_size < smallest:
        raise ConfigurationError(
            f"client {client} has {len(data)} example(s) in batches of {config.batch_size}; "
            + ("a model with batch-norm needs two or more" if smallest == 2 else "it needs data")
        )
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    anchors = [weight.detach().clone() for weight in weights] if config.proximal_mu else []
    optimizer = _optimizer(weights, config)
    order = torch.Generator().manual_seed(seed)
    network.train()
    steps = 0
    for _ in range(config.epochs):
        shuffled: list[int] = torch.randperm(len(data), generator=order).tolist()
        for start in range(0, len(data), config.batch_size):
            indices = shuffled[start : start + config.batch_size]
            if len(indices) < smallest:
                continue
            optimizer.zero_grad()
            loss = task.loss(network, make_batch(data, indices))
            if not bool(torch.isfinite(loss)):
                raise InputRefused(
                    f"client {client}: the loss is not finite after {steps} steps; lower the "
                    "learning rate or check the data"
                )
            torch.autograd.backward(loss)
            _pull_towards(anchors, weights, config.proximal_mu)
            optimizer.step()
            steps += 1
    return steps


def _pull_towards(anchors: list[Tensor], weights: list[nn.Parameter], mu: float) -> None:
    """FedProx: add mu (w - w_global), the gradient of (mu / 2) |w - w_global|^2."""
    for anchor, weight in zip(anchors, weights, strict=False):
        if weight.grad is not None:
            weight.grad.add_(weight.detach() - anchor, alpha=mu)


def _optimizer(weights: list[nn.Parameter], config: LocalConfig) -> torch.optim.Optimizer:
    rate, decay = config.learning_rate, config.weight_decay
    match config.optimizer:
        case "sgd":
            return torch.optim.SGD(weights, rate, momentum=config.momentum, weight_decay=decay)
        case "adam":
            return torch.optim.Adam(weights, rate, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(weights, rate, weight_decay=decay)


def _mix(*words: int) -> int:
    """One 63-bit seed for several words; different words, different streams."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Run with torch's global generator seeded, and leave it as it was found."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
