"""TensorBoard and MLflow: what they were told is read back with their own readers."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation
from small_federation import Federation

from lightsecagg.drivers.federation import trackers
from lightsecagg.drivers.federation.callbacks import Callbacks
from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_server
from lightsecagg.drivers.federation.trackers import MLflow, TensorBoard, scalars
from lightsecagg.errors import MissingExtra
from lightsecagg.session.record import MetricMean, PhaseRecord, RoundRecord
from memory_transport import MemoryServer


def with_extra(name: str) -> pytest.MarkDecorator:
    lacking = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(lacking, reason=f"the extra [{name}] is not installed")


def a_round(number: int = 3) -> RoundRecord:
    return RoundRecord(
        number,
        "lightsecagg",
        invited=[0, 1, 2, 3, 4],
        included=[0, 1, 2],
        dropped={"share": [3], "upload": [4]},
        withdrawn={"FOREIGN WORDS": [4]},
        refusals={"late": 2, "malformed": 1},
        phases={
            "share": PhaseRecord(1e9, seconds=0.5, bytes_in=1000, bytes_out=2000),
            "upload": PhaseRecord(1e9, seconds=1.5, bytes_in=4000, bytes_out=10),
        },
        figures={"accuracy": 0.75, "top-5 (%)": 90.0},
        metrics={"loss": MetricMean(0.25, 1e-4)},
    )


TOLD = {
    "round/done": 1,
    "round/seconds": 2.0,
    "round/invited": 5,
    "round/included": 3,
    "round/dropped": 2,
    "round/withdrawn": 1,
    "round/refusals": 3,
    "seconds/share": 0.5,
    "bytes_in/share": 1000,
    "bytes_out/share": 2000,
    "seconds/upload": 1.5,
    "bytes_in/upload": 4000,
    "bytes_out/upload": 10,
    "server/accuracy": 0.75,
    "server/top-5 ___": 90.0,
    "clients/loss": 0.25,
}


def event_files(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: {event.step: float(make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)}
        for tag in events.Tags()["tensors"]
    }


def test_S22_trackers_are_told_numbers_of_the_record_and_no_word_of_a_client() -> None:
    assert scalars(a_round()) == TOLD
    assert "FOREIGN" not in str(scalars(a_round()))
    assert scalars(RoundRecord(4, "lightsecagg", [0, 1], aborted="too few"))["round/done"] == 0


@with_extra("tensorboard")
def test_tensorboard_reads_the_rounds_of_a_federation_over_a_restart(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "state", 4, privacy=1, dropouts=1)

    def run(rounds: int) -> list[RoundRecord]:
        federation.transport = MemoryServer(range(4))

        async def scenario() -> list[RoundRecord]:
            server = federation.server(number=rounds, upload=60, agree=60, recover=60)
            server._callbacks = Callbacks([TensorBoard(tmp_path / "events")])
            async with federation.connected([federation.client(i) for i in range(4)]):
                return await asyncio.wait_for(server.run(), 120)

        return asyncio.run(scenario())

    records = [*run(2), *run(3)]
    assert [record.round for record in records] == [1, 2, 3]
    read = event_files(tmp_path / "events")
    assert read["round/included"] == {1: 4.0, 2: 4.0, 3: 4.0}
    for record in records:
        for name, value in scalars(record).items():
            assert read[name][record.round] == pytest.approx(value)


@with_extra("mlflow")
def test_mlflow_has_one_run_per_federation_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(os, "environ", os.environ | {})  # what the tracker adds goes with the test
    address = (tmp_path / "mlruns").as_uri()

    def tracker(session: str) -> MLflow:
        return MLflow(address, "hospitals", session, {"clients": 5, "protocol": "lightsecagg"})

    before = tracker("ab" * 32)
    before.round_ended(a_round(3))
    after = tracker("ab" * 32)
    after.round_ended(a_round(4))
    after.finished("the federation has finished")
    tracker("cd" * 32).round_ended(a_round(1))

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("hospitals")
    assert experiment is not None
    runs = {
        run.data.tags[trackers.SESSION][:2]: run
        for run in client.search_runs([experiment.experiment_id])
    }
    assert set(runs) == {"ab", "cd"}
    first = runs["ab"]
    assert first.data.metrics == TOLD
    assert first.data.params == {"clients": "5", "protocol": "lightsecagg"}
    assert (first.info.status, runs["cd"].info.status) == ("FINISHED", "RUNNING")
    history = client.get_metric_history(first.info.run_id, "server/accuracy")
    assert [(point.step, point.value) for point in history] == [(3, 0.75), (4, 0.75)]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@with_extra("tensorboard")
def test_trackers_are_named_in_the_configuration(tmp_path: Path) -> None:
    federation = NetworkFederation(tmp_path, 4)
    override = ['tracking.tensorboard="events"']
    config = load_config(ServerConfig, federation.made.server, override)
    assert config.tracking.tensorboard == federation.made.server.parent / "events"
    (made,) = trackers.make_trackers(config)
    made.round_ended(a_round())
    made.finished("done")
    assert event_files(federation.made.server.parent / "events")["clients/loss"] == {3: 0.25}


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_before_a_socket_is_opened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = NetworkFederation(tmp_path, 4)
    config = load_config(ServerConfig, federation.made.server, [f"tracking.{name}=somewhere"])
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(MissingExtra, match=rf"\[tracking\] {name} needs {name}.*\[{name}\]"):
        build_server(config)


@with_extra("mlflow")
def test_a_tracking_server_that_is_away_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    told: list[Any] = []

    class Next(TensorBoard):
        def __init__(self) -> None:
            pass

        def round_ended(self, record: RoundRecord) -> None:
            told.append(record.round)

    with caplog.at_level(logging.WARNING, "lightsecagg"):
        callbacks = Callbacks([MLflow("http://127.0.0.1:9", "away", "ab" * 32, {}), Next()])
        callbacks.tell("round_ended", a_round())
        callbacks.close(patience=120)
    assert told == [3]
    assert "the callback MLflow.round_ended failed; nothing else is harmed" in caplog.text
