"""What a user chooses about a task and about local training; validated once, frozen, torch-free.

Both classes are hashable and picklable, so that a child process can be told what to train on
without being sent a model or a data set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lightsecagg.errors import ParameterError

Partition = Literal["iid", "dirichlet", "shards", "natural", "local"]
Algorithm = Literal["fedavg", "fedprox", "fednova"]
Optimizer = Literal["sgd", "adam", "adamw"]


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ParameterError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ParameterError(f"{name} is {value}; it must be at least {least}")


def _between(name: str, value: float, low: float, high: float, *, low_excluded: bool) -> None:
    """Refuse a value outside [low, high), or (low, high) when `low_excluded`; NaN included."""
    above = value > low if low_excluded else value >= low
    if not (above and value < high):
        bracket = "(" if low_excluded else "["
        raise ParameterError(f"{name} is {value}; it must lie in {bracket}{low:g}, {high:g})")


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Which task, on which data, cut how among how many clients."""

    task: str = "digits"
    """A built-in task (`lightsecagg task list`) or an import path `package.module:Task`."""
    clients: int = 20
    """N, the number of clients the data is cut into."""
    model: str | None = None
    """A model of `lightsecagg task list`; None is the task's own choice."""
    data_dir: Path | None = None
    """Where the files are; digits and synthetic need none."""
    partition: Partition = "iid"
    """How examples are dealt; `local` means that everything in `data_dir` is this client's own."""
    dirichlet_alpha: float = 0.5
    """Label skew of the dirichlet partition: small is skewed, large is iid."""
    shards_per_client: int = 2
    """How many label-sorted shards a client gets in the shards partition."""
    writer_ids: Path | None = None
    """An npz file whose array `train` names the writer of each training example."""
    classes: int | None = None
    """Number of classes of the user's own data; None counts the labels that are there."""
    image_size: int | None = None
    """Side in pixels to which image folders are resized, and of synthetic images."""
    samples_per_client: int | None = None
    """The most examples per client (the exact number, if synthetic)."""
    seed: int = 0
    """Seed of the partition and of synthetic data; all clients of a federation share it."""
    client_metrics: bool = False
    """Clients measure accuracy and loss of each global model, for the means over all of them."""
    options: tuple[tuple[str, str], ...] = ()
    """Key-value pairs for the user's own task; the built-in tasks refuse any."""

    def __post_init__(self) -> None:
        _at_least("clients", self.clients, 1)
        _one_of("partition", self.partition, get_args(Partition))
        _between("dirichlet_alpha", self.dirichlet_alpha, 0, math.inf, low_excluded=True)
        _at_least("shards_per_client", self.shards_per_client, 1)
        _at_least("seed", self.seed, 0)
        if self.classes is not None:
            _at_least("classes", self.classes, 2)
        if self.image_size is not None:
            _at_least("image_size", self.image_size, 8)
        if self.samples_per_client is not None:
            _at_least("samples_per_client", self.samples_per_client, 1)
        if self.partition != "natural" and self.writer_ids is not None:
            raise ParameterError(
                f"writer_ids is given but partition is {self.partition!r}; "
                "writer ids are used by the natural partition only"
            )


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """How each client trains between download and upload; the same for every client."""

    epochs: int = 1
    """E, passes over the client's data (the paper uses 5)."""
    batch_size: int = 32
    """Examples per step."""
    optimizer: Optimizer = "sgd"
    """The local optimiser; its state starts afresh in every round."""
    learning_rate: float = 0.05
    """Step size of the local optimiser."""
    momentum: float = 0.0
    """Heavy-ball momentum of sgd."""
    weight_decay: float = 0.0
    """L2 penalty (decoupled in adamw)."""
    algorithm: Algorithm = "fedavg"
    """What is optimised (fedprox) and what is uploaded (fednova)."""
    proximal_mu: float = 0.0
    """FedProx's mu: the pull (mu / 2) |w - w_global|^2 towards the global model."""
    step_limit: int = 1000
    """FedNova's unit: the extra `local_steps` is the effective steps divided by this."""

    def __post_init__(self) -> None:
        _at_least("epochs", self.epochs, 1)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("step_limit", self.step_limit, 1)
        _one_of("optimizer", self.optimizer, get_args(Optimizer))
        _one_of("algorithm", self.algorithm, get_args(Algorithm))
        _between("learning_rate", self.learning_rate, 0, math.inf, low_excluded=True)
        _between("momentum", self.momentum, 0, 1, low_excluded=False)
        _between("weight_decay", self.weight_decay, 0, math.inf, low_excluded=False)
        _between("proximal_mu", self.proximal_mu, 0, math.inf, low_excluded=False)
        if self.momentum and self.optimizer != "sgd":
            raise ParameterError(
                f"momentum is {self.momentum} but optimizer is {self.optimizer!r}; "
                "momentum belongs to sgd"
            )
        if (self.algorithm == "fedprox") != (self.proximal_mu > 0):
            raise ParameterError(
                f"proximal_mu is {self.proximal_mu} with algorithm {self.algorithm!r}; "
                "fedprox needs a positive proximal_mu and the others need 0"
            )
        if self.algorithm == "fednova" and self.optimizer != "sgd":
            raise ParameterError(
                f"fednova normalises by the step coefficients of sgd; optimizer is "
                f"{self.optimizer!r}"
            )

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the extra masked scalars that every client uploads beside its delta."""
        return ("local_steps",) if self.algorithm == "fednova" else ()
