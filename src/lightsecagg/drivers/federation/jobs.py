"""What a federation computes: PyTorch training, or plain vectors without torch.

A server job owns the global state and digests the recovered aggregate; a client job turns the
global model into an update. Both are plain synchronous objects; the managers decide where they run.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from lightsecagg.crypto.transcript import derive_key
from lightsecagg.drivers.federation.durable import new_file
from lightsecagg.drivers.federation.steering import adopt, differences, scheduled
from lightsecagg.drivers.federation.stopping import CLIENTS
from lightsecagg.drivers.federation.training_tables import TrainingTable, VectorsTable
from lightsecagg.errors import (
    ConfigurationError,
    JournalError,
    LightSecAggError,
    RemoteProtocolError,
)
from lightsecagg.foreign import member, reading, shown, where
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.settings import hash_model
from lightsecagg.session.instructions import Instructions, of_metrics
from lightsecagg.session.record import MetricMean
from lightsecagg.training.config import LocalConfig, TaskConfig
from lightsecagg.training.metrics import Metric

Reals = NDArray[np.float64]


class ServerJob(Protocol):
    """The server's side of the work."""

    dimension: int
    """Entries of an update."""
    weighted: bool
    """Whether updates are averaged by sample count, or summed."""

    def model(self) -> bytes:
        """What clients start from; empty if there is nothing to train."""

    def instructions(self, completed: int) -> Instructions | None:
        """How clients are to train in the round after so many completed ones; None: not at all."""

    def apply(self, aggregate: Reals, samples: int, completed: int) -> None:
        """Take the average (or sum) of a round."""

    def renew(self) -> None:
        """Another model that is as good as the same: no update led to it (S42)."""

    def metrics(self, aggregate: Reals, rounding: float) -> dict[str, MetricMean]:
        """What clients measured, on average; `rounding` bounds the error of an entry."""

    def evaluate(self) -> dict[str, float]:
        """Figures to report of what there is now; slow."""

    def reports(self, figure: str) -> bool:
        """Whether rounds may have this figure, or metric of the clients, by its full name."""

    def save(self) -> bytes | memoryview:
        """The state to checkpoint; a view of it, if that will not change."""

    def load(self, data: bytes | memoryview) -> None:
        """The inverse of `save`."""


class ClientJob(Protocol):
    """A client's side of the work."""

    @property
    def dimension(self) -> int | None:
        """Entries of an update, if that is known before the first model arrives."""

    def instructed(self, instructions: Instructions) -> ClientJob:
        """The job of a round with these instructions; `RemoteProtocolError` if it refuses them."""

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        """Train, or read the vector; slow."""


def make_server_job(
    training: TrainingTable | None, vectors: VectorsTable | None, bound: float
) -> ServerJob:
    """The job that a server's configuration asks for."""
    if (training is None) == (vectors is None):
        raise ConfigurationError("configure exactly one of [training] and [vectors]")
    if training is not None:
        return TrainingServer(training, bound)
    assert vectors is not None  # noqa: S101 - one of the two
    return VectorServer(vectors)


def make_client_job(
    training: TrainingTable | None, vectors: VectorsTable | None, client: int, secret: bytes
) -> ClientJob:
    """The job that a client's configuration asks for; `secret` seeds its training."""
    if (training is None) == (vectors is None):
        raise ConfigurationError("configure exactly one of [training] and [vectors]")
    if training is not None:
        # Refused here, before a connection is made, and not in every round.
        task_of(training)
        _build(LocalConfig, "local", training.local)
        return TrainingClient(training, client, secret)
    assert vectors is not None  # noqa: S101
    return VectorClient(vectors)


# -- plain vectors -----------------------------------------------------------------------------


class VectorServer:
    """Sums or averages plain vectors; each round's result is written to `output`."""

    def __init__(self, table: VectorsTable) -> None:
        if table.dimension < 1:
            raise ConfigurationError("[vectors] dimension must be at least 1 on the server")
        self.dimension = table.dimension
        self.weighted = table.weighted
        self._output = table.output
        self.result: Reals | None = None
        """The latest sum or average."""

    def model(self) -> bytes:
        """Nothing to train from."""
        return b""

    def instructions(self, completed: int) -> Instructions | None:
        """Nothing to train."""
        return None

    def metrics(self, aggregate: Reals, rounding: float) -> dict[str, MetricMean]:
        """Nothing is measured."""
        return {}

    def apply(self, aggregate: Reals, samples: int, completed: int) -> None:
        """Keep and write the result."""
        self.result = aggregate
        if self._output is not None:
            try:
                _write_whole(self._output, result=aggregate, samples=samples, round=completed)
            except OSError as error:
                raise ConfigurationError(
                    f"[vectors] output {self._output} cannot be written: {error}"
                ) from error

    def renew(self) -> None:
        """Nothing to train from: every version is its own."""

    def evaluate(self) -> dict[str, float]:
        """The norm of the latest result."""
        return {} if self.result is None else {"norm": float(np.linalg.norm(self.result))}

    def reports(self, figure: str) -> bool:
        """The norm, and nothing else."""
        return figure == "norm"

    def save(self) -> bytes | memoryview:
        """The latest result, not copied."""
        return b"" if self.result is None else self.result.view(np.uint8).data

    def load(self, data: bytes | memoryview) -> None:
        """The inverse of `save`."""
        self.result = np.frombuffer(data, dtype=np.float64) if data else None
        if self.result is not None:
            _check_checkpoint(self.result.size, self.dimension)


def _write_whole(path: Path, **arrays: Any) -> None:
    """As .npz; a crash or a full disk leaves the file of before."""
    path = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")
    beside = path.with_name(f"{path.name}.new")
    try:
        with new_file(beside) as file:
            np.savez(file, **arrays)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


class VectorClient:
    """Contributes a vector from a file; a new file content is a new contribution."""

    def __init__(self, table: VectorsTable) -> None:
        if table.input is None:
            raise ConfigurationError("[vectors] input must name this client's .npy or .npz file")
        self._input = table.input
        self.dimension: int | None = _read_vector(self._input)[0].size

    def instructed(self, instructions: Instructions) -> VectorClient:
        """A server that trains is another kind of federation."""
        raise RemoteProtocolError("the server trains a model; this client's file has [vectors]")

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        """Read the file."""
        vector, samples = _read_vector(self._input)
        return Update(vector, samples)


def _read_vector(path: Path) -> tuple[NDArray[Any], int]:
    if not path.exists():
        raise ConfigurationError(
            f"[vectors] input {path} does not exist; write this client's vector there, as .npy, or "
            "as .npz with `vector` and optionally `samples`"
        )
    with reading(path, "an .npy or .npz file of plain arrays"), path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            vector, samples = loaded, 1
        elif "vector" in loaded:
            vector = member(loaded, "vector")
            samples = int(member(loaded, "samples")) if "samples" in loaded else 1
        else:
            raise ConfigurationError(f"{path} has no array named 'vector'")
    if vector.dtype not in (np.float32, np.float64) or vector.ndim != 1:
        raise ConfigurationError(
            f"{path}: expected a one-dimensional float array, got {vector.dtype} {vector.shape}"
        )
    return vector, samples


# -- training ----------------------------------------------------------------------------------


class TrainingServer:
    """Holds the global model and the server optimiser."""

    weighted = True

    def __init__(self, table: TrainingTable, bound: float) -> None:
        from lightsecagg import training

        self._training = training
        self._task = training.load_task(task_of(table))
        self._local = _build(LocalConfig, "local", table.local)
        self._optimizer = training.ServerOptimizer(
            _build(training.ServerConfig, "server", table.server),
            training.model_layout(self._task),
            local=self._local,
        )
        self._bound, self._table = bound, table
        self._vector = training.initial_model(self._task, seed=table.seed)
        self._metrics = training.task_metrics(self._task)
        self._extras = (*self._local.extras, *(metric.name for metric in self._metrics))
        self.dimension = self._vector.size + len(self._extras)

    def model(self) -> bytes:
        """The global model, float32, little-endian."""
        return self._vector.astype("<f4", copy=False).tobytes()

    def instructions(self, completed: int) -> Instructions:
        """What [training.local] names and the schedule says, and the metrics of the task."""
        named = {name: getattr(self._local, name) for name in self._table.local}
        changing = scheduled(self._table.schedule, self._local, completed)
        return Instructions(named | changing, of_metrics(self._metrics))

    def apply(self, aggregate: Reals, samples: int, completed: int) -> None:
        """Step the server optimiser."""
        average = self._training.unpack(
            aggregate.astype(np.float32), self._extras, bound=self._bound
        )
        self._vector = self._optimizer.step(self._vector, average)

    def renew(self) -> None:
        """Move one entry by its last bit: another hash, and other seeds of training (S42)."""
        vector = self._vector.copy()
        vector[0] = np.nextafter(vector[0], np.float32(np.inf))
        self._vector = vector

    def metrics(self, aggregate: Reals, rounding: float) -> dict[str, MetricMean]:
        """The last coordinates, in the task's own units."""
        tail = aggregate[aggregate.size - len(self._metrics) :] / self._bound
        return {
            metric.name: MetricMean(
                metric.from_extra(float(mean)), metric.error(rounding / self._bound)
            )
            for metric, mean in zip(self._metrics, tail, strict=True)
        }

    def evaluate(self) -> dict[str, float]:
        """The task's figures; none where it has no test data, as at many a server."""
        if not self._task.can_evaluate:
            return {}
        return self._training.evaluate(self._task, self._vector)

    def reports(self, figure: str) -> bool:
        """Metrics are named by the task; what `evaluate` returns is not known before it does."""
        if figure.startswith(CLIENTS):
            return figure.removeprefix(CLIENTS) in [metric.name for metric in self._metrics]
        return self._task.can_evaluate

    def save(self) -> bytes:
        """Model and optimiser state, as npz."""
        file = io.BytesIO()
        arrays: dict[str, Any] = {"model": self._vector, **self._optimizer.state()}
        np.savez(file, **arrays)
        return file.getvalue()

    def load(self, data: bytes | memoryview) -> None:
        """The inverse of `save`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            state = {name: arrays[name] for name in arrays.files}
        vector = state.pop("model")
        _check_checkpoint(vector.size, self._vector.size)
        self._vector = vector
        self._optimizer.load_state(state)


@dataclass(frozen=True, slots=True)
class TrainingClient:
    """Trains one client's model; picklable, so that it can run in a child process."""

    table: TrainingTable
    client: int
    secret: bytes = field(repr=False)
    """`Ledger.training_secret`"""
    dimension: int | None = None
    instructions: Instructions | None = None
    """Of the server, accepted; None leaves this client to its own settings."""

    @property
    def local(self) -> LocalConfig:
        """The settings to train with."""
        if self.instructions is None:
            return self._own
        return adopt(self.instructions, self._own, self.table.accept)

    @property
    def set_by_server(self) -> str:
        """Which settings are not this client's own, in words; empty if all are."""
        return differences(self.local, self._own)

    @property
    def _own(self) -> LocalConfig:
        own: LocalConfig = _build(LocalConfig, "local", self.table.local)
        return own

    def instructed(self, instructions: Instructions) -> TrainingClient:
        """The same with the server's settings, if this client's file accepts them."""
        adopt(instructions, self._own, self.table.accept)
        return replace(self, instructions=instructions)

    def prepare(self) -> None:
        """Load torch, the task and this client's data; `ConfigurationError` if that fails."""
        check_task(task_of(self.table), self.client)

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        """Local training from the global model; the same model gives the same update (S42)."""
        from lightsecagg import training

        task, vector = task_of(self.table), np.frombuffer(model, dtype="<f4")
        self._check_metrics(training.task_metrics(task))
        update = training.local_update(
            task,
            self.client,
            vector,
            self.local,
            seed=int.from_bytes(derive_key(self.secret, hash_model(model), "seed of training")),
        )
        extras = {**update.extras, **training.measure(task, self.client, vector)}
        update = replace(update, extras=extras)
        return Update(training.pack(update, bound=bound), update.samples)

    def _check_metrics(self, metrics: tuple[Metric, ...]) -> None:
        """Coordinates that the server would read otherwise must not be uploaded."""
        if self.instructions is not None and self.instructions.metrics != of_metrics(metrics):
            raise ConfigurationError(
                f"this client's task measures {of_metrics(metrics)}, the server's "
                f"{shown(self.instructions.metrics)}: (name, least, largest); use the same task"
            )


def _check_checkpoint(found: int, expected: int) -> None:
    if found != expected:
        raise JournalError(
            f"the checkpoint has {found} entries, the configured task {expected}; "
            "use the old configuration or another state folder"
        )


def check_task(config: TaskConfig, client: int) -> None:
    """Load the task, build its model and read the data of a client, once per process."""
    from lightsecagg import training
    from lightsecagg.training.task import as_task

    try:
        task = as_task(config)
        layout = training.model_layout(task)
        training.task_metrics(task)
        if not len(task.client_data(client)):
            raise ConfigurationError(f"the task {config.task} has no example for client {client}")
    except LightSecAggError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the task {config.task} fails with {where(error)}; "
            f"`lightsecagg task check {config.task}` shows all of it"
        ) from error
    if not layout.size:
        raise ConfigurationError(f"the task {config.task} shares no parameter of its model")


def task_of(table: TrainingTable) -> TaskConfig:
    """What is trained, by the table [training.task]."""
    config: TaskConfig = _build(TaskConfig, "task", table.task)
    return config


def _build(kind: Any, name: str, values: dict[str, Any]) -> Any:
    """A configuration class of `training` from a table of the file."""
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"[training.{name}] {key} is not a key; known here: {', '.join(known)}"
            )
    if "options" in values:
        values = {**values, "options": _pairs(values["options"])}
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        wrong = "; ".join(_wrong(dict(item)) for item in error.errors())
        raise ConfigurationError(f"[training.{name}] {wrong}") from error


def _wrong(item: dict[str, Any]) -> str:
    """One mistake: the classes of `training` name the key themselves, pydantic does not."""
    message = str(item["msg"])
    if item["type"] == "value_error":
        return message.removeprefix("Value error, ")
    return f"{item['loc'][0]} = {item['input']!r}: {message}"


def _pairs(options: Any) -> Any:
    """A table of options, `classes = 3`, as `--task-option classes=3` would give them."""
    if not isinstance(options, dict):
        return options
    return [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in options.items()
    ]
