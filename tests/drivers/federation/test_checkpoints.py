"""The server keeps the models of the latest rounds, and of the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import SESSION, Federation

from lightsecagg.drivers.federation.checkpoints import BEST, Checkpoints, load_best
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.models import read_model
from lightsecagg.drivers.federation.training_tables import CheckpointsTable, StoppingTable
from lightsecagg.errors import ConfigurationError
from lightsecagg.session.record import MetricMean, RoundRecord


class State:
    """A server's state folder, filled round by round."""

    def __init__(self, folder: Path) -> None:
        self.settings = Federation(folder / "unused").server()._settings
        self.folder = folder / "state"
        self.journal = Journal(self.folder, SESSION.hex())
        self.completed = 0

    def complete(self, checkpoints: Checkpoints, figures: dict[str, float], **more: Any) -> None:
        self.completed = number = self.completed + 1
        self.journal.open_round(replace(self.settings, round=number))
        self.journal.complete(number, number, b"model %d" % number)
        record = RoundRecord(number, "lightsecagg", [], **more)
        record.figures = figures
        checkpoints.note(number, record.to_json())

    @property
    def kept(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.folder / "models").glob("*.npz"))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    made = State(tmp_path)
    yield made
    made.journal.close()


def test_the_latest_and_the_best_are_kept_over_restarts(state: State) -> None:
    table = CheckpointsTable(keep=2, figure="accuracy", goal="higher")
    checkpoints = Checkpoints(state.journal, table)
    for accuracy in (0.5, 0.8, 0.7, 0.6):
        state.complete(checkpoints, {"accuracy": accuracy, "loss": 1 - accuracy})
    assert state.kept == [2, 3, 4]
    again = Checkpoints(state.journal, table)
    state.complete(again, {"accuracy": 0.75})
    assert state.kept == [2, 4, 5]
    state.complete(again, {"accuracy": 0.9})
    assert state.kept == [5, 6]
    best = load_best(state.folder / "models")
    assert best is not None
    assert (best.rounds, best.figure, best.value) == (6, "accuracy", 0.9)


@pytest.mark.parametrize(
    ("table", "stopping", "best"),
    [
        (CheckpointsTable(), None, 2),  # the loss, where nothing is said
        (CheckpointsTable(figure="accuracy", goal="higher"), None, 3),
        (CheckpointsTable(figure="accuracy", goal="lower"), None, 1),
        (CheckpointsTable(), StoppingTable(figure="clients.rmse", goal="lower"), 4),
        (
            CheckpointsTable(figure="accuracy", goal="higher"),
            StoppingTable(figure="clients.rmse", goal="lower"),
            3,
        ),
        (CheckpointsTable(figure="nobody's", goal="lower"), None, None),
    ],
)
def test_the_figure_that_judges_can_be_chosen(
    state: State, table: CheckpointsTable, stopping: StoppingTable | None, best: int | None
) -> None:
    checkpoints = Checkpoints(state.journal, table, stopping)
    rows = [(0.1, 9.0, 3.0), (0.3, 1.0, 4.0), (0.9, 5.0, 2.0), (0.2, 4.0, 1.0)]
    for accuracy, loss, rmse in rows:
        metrics = {"rmse": MetricMean(rmse, 0.0)}
        state.complete(checkpoints, {"accuracy": accuracy, "loss": loss}, metrics=metrics)
    found = load_best(state.folder / "models")
    assert (None if found is None else found.rounds) == best
    assert state.kept == sorted({3, 4, best or 4})


def test_a_model_without_a_number_is_never_the_best(state: State) -> None:
    checkpoints = Checkpoints(state.journal)
    for loss in (float("nan"), 2.0, float("-inf"), float("nan")):
        state.complete(checkpoints, {"loss": loss})
    assert state.kept == [2, 3, 4]
    state.complete(checkpoints, {})
    assert state.kept == [2, 4, 5]


def test_what_cannot_be_read_or_written_costs_no_round(
    state: State, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.complete(Checkpoints(state.journal), {"loss": 1.0})
    (state.folder / "models" / BEST).write_bytes(b"[")
    with pytest.raises(ConfigurationError, match="is not a note of the best model"):
        load_best(state.folder / "models")
    checkpoints = Checkpoints(state.journal)
    assert "the best model is looked for anew" in caplog.text

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lightsecagg.drivers.federation.checkpoints.write_synced", disk_full)
        state.complete(checkpoints, {"loss": 3.0})
    assert "which models to keep cannot be noted" in caplog.text
    assert state.kept == [1, 2]
    state.complete(checkpoints, {"loss": 2.0})
    found = load_best(state.folder / "models")
    assert found is not None
    assert found.rounds == 3


def test_a_figure_wants_a_goal() -> None:
    with pytest.raises(ValueError, match="give both figure and goal"):
        CheckpointsTable(figure="rmse")


def test_another_file_beside_the_models_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("3.npz", "copy of 4.npz", "best.npz"):
        np.savez(tmp_path / "models" / name, model=np.zeros(2, dtype=np.float32))
    assert read_model(tmp_path)[0] == 3


def test_a_checkpoint_of_another_kind_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    np.savez(tmp_path / "models" / "3.npz", model=np.array(["not", "numbers"]))
    with pytest.raises(ConfigurationError, match=r"3\.npz is not a checkpoint: .* of shape \(2,\)"):
        read_model(tmp_path)
