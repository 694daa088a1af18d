"""Rounds where experiments are watched: TensorBoard and MLflow, named in `[tracking]`.

Both are callbacks of the server, so no round waits for them and a tracker that fails is a warning.
They are told numbers of the round's record, which `rounds.json` has too, and nothing else (S22).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.callbacks import ServerCallback
from lightsecagg.drivers.federation.config import ServerConfig
from lightsecagg.errors import MissingExtra
from lightsecagg.session.record import RoundRecord

SESSION = "federation.session"
"""The tag by which a restarted server finds its run again."""
_MANNERS = {
    # By itself MLflow would report its use to its makers,
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # and try for minutes to reach a server that is away, with all other callbacks waiting.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round, by the names under which trackers show them."""
    found: dict[str, float] = {
        "round/done": float(record.aborted is None),
        "round/seconds": record.seconds,
        "round/invited": len(record.invited),
        "round/included": len(record.included),
        "round/dropped": sum(map(len, record.dropped.values())),
        "round/withdrawn": sum(map(len, record.withdrawn.values())),
        "round/refusals": sum(record.refusals.values()),
    }
    for name, phase in record.phases.items():
        found[f"seconds/{name}"] = phase.seconds
        found[f"bytes_in/{name}"] = phase.bytes_in
        found[f"bytes_out/{name}"] = phase.bytes_out
    found |= {f"server/{name}": value for name, value in record.figures.items()}
    found |= {f"clients/{name}": metric.mean for name, metric in record.metrics.items()}
    # MLflow takes no other characters; a task may name its figures as it likes.
    return {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in found.items()}


class TensorBoard(ServerCallback):
    """Writes event files into a folder; a restarted server adds a file."""

    def __init__(self, folder: Path) -> None:
        _need("tensorboard")
        self._folder = folder
        self._writer: Any = None

    def round_ended(self, record: RoundRecord) -> None:
        """The round's number is the step."""
        if self._writer is None:
            from tensorboard.summary import Writer

            self._writer = Writer(str(self._folder))
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, step=record.round)
        self._writer.flush()

    def finished(self, reason: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(ServerCallback):
    """Logs one run per federation to a tracking server, or wherever the address leads."""

    def __init__(
        self, address: str, experiment: str, session: str, parameters: Mapping[str, Any]
    ) -> None:
        _need("mlflow")
        self._address = address
        self._experiment = experiment
        self._session = session
        self._parameters = parameters
        self._client: Any = None
        self._run = ""

    def round_ended(self, record: RoundRecord) -> None:
        """The round's number is the step."""
        if self._client is None:
            self._client, self._run = self._connect()
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = scalars(record).items()
        metrics = [Metric(name, value, now, record.round) for name, value in values]
        self._client.log_batch(self._run, metrics=metrics)

    def finished(self, reason: str) -> None:
        """Close the run."""
        if self._client is not None:
            self._client.set_terminated(self._run)

    def _connect(self) -> tuple[Any, str]:
        for name, value in _MANNERS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self._address)
        found = client.get_experiment_by_name(self._experiment)
        home = found.experiment_id if found else client.create_experiment(self._experiment)
        earlier = client.search_runs([home], f"tags.`{SESSION}` = '{self._session}'")
        if earlier:
            return client, earlier[0].info.run_id
        name, tags = f"federation {self._session[:8]}", {SESSION: self._session}
        run = client.create_run(home, run_name=name, tags=tags).info.run_id
        parameters = [Param(key, str(value)) for key, value in self._parameters.items()]
        client.log_batch(run, params=parameters)
        return client, run


def make_trackers(config: ServerConfig) -> list[ServerCallback]:
    """What `[tracking]` names; `MissingExtra` if it cannot be had."""
    table = config.tracking
    trackers: list[ServerCallback] = []
    if table.tensorboard is not None:
        trackers.append(TensorBoard(table.tensorboard))
    if table.mlflow is not None:
        parameters = config.aggregation.model_dump(mode="json")
        session = config.federation.session
        trackers.append(MLflow(table.mlflow, table.experiment, session, parameters))
    return trackers


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise MissingExtra(f"[tracking] {package} needs {package}", package)
