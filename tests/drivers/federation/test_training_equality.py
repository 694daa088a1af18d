"""Secure training is plain training, up to rounding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import Federation

from laboratory import needs_laboratory
from lightsecagg.drivers.federation import jobs
from lightsecagg.drivers.federation.jobs import TrainingClient, TrainingServer
from lightsecagg.drivers.federation.training_tables import TrainingTable
from lightsecagg.errors import JournalError
from lightsecagg.params import ThreatModel
from lightsecagg.session.record import RoundRecord

pytest.importorskip("torch")
pytest.importorskip("sklearn")

CLIENTS, ROUNDS, BOUND = 5, 5, 2.0
TABLE = TrainingTable(
    task={"task": "digits", "clients": CLIENTS, "model": "logistic"},
    local={"epochs": 1, "learning_rate": 0.1, "batch_size": 16},
    seed=11,
)


class Averages:
    """A server job that keeps every round's average and model, for comparison."""

    weighted = True

    def __init__(self) -> None:
        self._job = TrainingServer(TABLE, BOUND)
        self.dimension = self._job.dimension
        self.models: list[np.ndarray[Any, Any]] = []
        self.averages: list[np.ndarray[Any, Any]] = []

    def model(self) -> bytes:
        return self._job.model()

    def apply(self, aggregate: Any, samples: int, completed: int) -> None:
        self.averages.append(aggregate.copy())
        self._job.apply(aggregate, samples, completed)
        self.models.append(np.frombuffer(self._job.model(), "<f4").astype(np.float64))

    def instructions(self, completed: int) -> None:
        return None

    def metrics(self, aggregate: Any, rounding: float) -> dict[str, Any]:
        return {}

    def evaluate(self) -> dict[str, float]:
        return self._job.evaluate()

    def save(self) -> bytes:
        return self._job.save()

    def load(self, data: bytes) -> None:
        self._job.load(data)


class Remembered:
    """A client's job that also keeps its updates, for comparison."""

    def __init__(self, client: int) -> None:
        self._job = TrainingClient(TABLE, client, client.to_bytes(32))
        self.dimension = None
        self.given: dict[int, Any] = {}

    def compute(self, model: bytes, round_number: int, bound: float) -> Any:
        self.given[round_number] = self._job.compute(model, round_number, bound)
        return self.given[round_number]


def train(folder: Path, protocol: str, threat_model: ThreatModel) -> tuple[Any, list[RoundRecord]]:
    federation = Federation(
        folder,
        CLIENTS,
        protocol=protocol,
        threat_model=threat_model,
        privacy=1,
        dropouts=1,
        bound=BOUND,
        max_samples=1000,
    )
    federation.job = Averages()
    federation.jobs = {i: Remembered(i) for i in range(CLIENTS)}
    records = asyncio.run(federation.run(number=ROUNDS, settle=5, upload=100))
    return federation, records


@needs_laboratory
def test_training_equality_secure_and_plain_differ_only_by_quantisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 rounds of secure and plain FedAvg on the same seeds and the same included clients.

    Round by round, the secure average is the plain float64 average of the very updates that the
    included clients trained, up to n steps of 1 / c_l spread over the total sample count. The
    two federations' models then differ by the accumulated rounding errors, which the local
    training of later rounds passes on: with step size 0.1, one epoch and a convex model it
    does not amplify them, and we grant it a factor of 2 per round.
    """
    # Batches follow the model's hash, and the two models differ in their last bits.
    monkeypatch.setattr(jobs, "hash_model", lambda model: bytes(32))
    secure, records = train(tmp_path / "secure", "lightsecagg", ThreatModel.MALICIOUS_SERVER)
    plain, others = train(tmp_path / "plain", "plain", ThreatModel.HONEST_BUT_CURIOUS)
    assert [r.included for r in records] == [r.included for r in others]
    assert [r.included for r in records] == [list(range(CLIENTS))] * ROUNDS
    accumulated = 0.0
    for index, record in enumerate(records):
        updates = [secure.jobs[i].given[record.round] for i in record.included]
        samples = sum(update.samples for update in updates)
        expected = sum(u.samples * u.vector.astype(np.float64) for u in updates) / samples
        step = len(updates) * record.quantisation_step / samples
        assert record.samples == samples
        assert np.abs(secure.job.averages[index] - expected).max() <= step
        # Both federations round, each by at most `step`; the models are float32.
        model, other = secure.job.models[index], plain.job.models[index]
        accumulated = 2 * accumulated + 2 * step + 2 * np.spacing(np.float32(np.abs(model).max()))
        difference = np.abs(model - other).max()
        assert 0 < difference <= accumulated
    assert accumulated < 1e-3
    final = records[-1].figures["accuracy"]
    assert final > 0.8
    assert abs(final - others[-1].figures["accuracy"]) <= 0.005


def test_S42_the_same_model_gives_the_same_update_and_only_the_client_knows_how() -> None:
    model = TrainingServer(TABLE, BOUND).model()
    other = (np.frombuffer(model, "<f4") + np.float32(0.5)).tobytes()

    def trained(model: bytes, round_number: int, secret: bytes) -> np.ndarray[Any, Any]:
        return TrainingClient(TABLE, 1, secret).compute(model, round_number, BOUND).vector

    first = trained(model, 1, bytes(32))
    np.testing.assert_array_equal(first, trained(model, 2, bytes(32)))
    assert not np.array_equal(first, trained(model, 1, b"x" * 32)), "batches are not the server's"
    assert not np.array_equal(first, trained(other, 1, bytes(32)))
    assert "xxx" not in repr(TrainingClient(TABLE, 1, b"x" * 32))


def test_a_checkpoint_of_another_task_is_refused() -> None:
    job = TrainingServer(TABLE, BOUND)
    other = TABLE.model_copy(update={"task": {"task": "digits", "clients": 5, "model": "mlp"}})
    with pytest.raises(JournalError, match=r"the checkpoint has .* entries, the configured task"):
        TrainingServer(other, BOUND).load(job.save())


NO_TEST_DATA = """
import torch
from lightsecagg.training import Examples, Task


class Blind(Task):
    def model(self):
        return torch.nn.Linear(3, 2)

    def client_data(self, client):
        return Examples(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
"""


def test_a_task_without_test_data_has_no_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blind.py").write_text(NO_TEST_DATA)
    table = TrainingTable(task={"task": f"{tmp_path / 'blind.py'}:Blind", "clients": 4})
    federation = Federation(tmp_path / "state", 4, privacy=1, dropouts=1, bound=BOUND)
    federation.job = TrainingServer(table, BOUND)
    federation.jobs = {i: TrainingClient(table, i, bytes([i]) * 32) for i in range(4)}
    records = asyncio.run(federation.run(number=2, settle=5, upload=100))
    assert [(record.aborted, record.figures) for record in records] == [(None, {})] * 2
    assert "evaluating it failed" not in caplog.text
