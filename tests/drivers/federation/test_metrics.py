"""Metrics of the clients over real sockets: the server learns their means, and no single value."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laboratory import needs_laboratory
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.jobs import TrainingServer
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.programs import build_client, build_server
from lightsecagg.drivers.federation.provisioning import free_port, provision
from lightsecagg.drivers.federation.training_tables import TrainingTable
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import DEFAULT_MODULUS
from lightsecagg.session.record import RoundRecord
from lightsecagg.training.metrics import Metric

torch = pytest.importorskip("torch")

CLIENTS, BOUND, MAX_SAMPLES = 4, 2.0, 100
METRICS = (Metric("recall", 0.0, 1.0), Metric("delay", -5.0, 40.0))
VALUES = {client: (0.1234567 + 0.171828 * client, 3.1415926 * client) for client in range(CLIENTS)}
SAMPLES = {client: 3 + 5 * client for client in range(CLIENTS)}

TASK = """
import torch
from lightsecagg.training import Examples, Task


class Measured(Task):
    metrics = {"recall": (0, 1), "delay": (-5, 40)}

    def model(self):
        return torch.nn.Linear(3, 2)

    def client_data(self, client):
        size = 3 + 5 * client
        return Examples(torch.ones(size, 3), torch.arange(size) % 2)

    def measure(self, model, client):
        return {"delay": 3.1415926 * client, "recall": 0.1234567 + 0.171828 * client}


class Unmeasured(Measured):
    metrics = {}


class Swapped(Measured):
    metrics = {"delay": (-5, 40), "recall": (0, 1)}


class Undefined(Measured):
    def measure(self, model, client):
        return super().measure(model, client) | ({"recall": float("nan")} if client == 3 else {})
"""


class Run:
    """A federation over sockets, and every byte that its server has stored or logged."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, protocol: str = "lightsecagg"
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "own.py").write_text(TASK)
        self.folder, self.protocol = folder, protocol
        self.stored = b""
        self.made = provision(
            folder / "federation",
            CLIENTS,
            privacy=1,
            dropouts=1,
            bound=BOUND,
            port=free_port(),
        )
        store = Journal.store_all

        def store_and_look(journal: Journal, *arguments: Any) -> Any:
            results = store(journal, *arguments)
            self.stored += self._files()
            return results

        monkeypatch.setattr(Journal, "store_all", store_and_look)

    def _files(self) -> bytes:
        state = self.made.server.parent / "state"
        return b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())

    def _task(self, name: str) -> str:
        return f'training.task={{task = "{self.folder / "own.py"}:{name}", clients = {CLIENTS}}}'

    def __call__(self, server: str, clients: Iterable[str]) -> RoundRecord:
        plain = self.protocol == "plain"
        threat = "honest-but-curious" if plain else "malicious-server"
        config = load_config(
            ServerConfig,
            self.made.server,
            [
                self._task(server),
                f'aggregation.protocol="{self.protocol}"',
                f'aggregation.threat_model="{threat}"',
                f"aggregation.max_samples={MAX_SAMPLES}",
                *("rounds.number=1", "rounds.settle=30", "rounds.retries=0"),
            ],
        )
        overrides = [
            'client.overlap="thread"',
            f'client.protocols=["{self.protocol}"]',
            f'client.threat_model="{threat}"',
        ]
        configs = [
            load_config(ClientConfig, self.made.clients[i], [*overrides, self._task(name)])
            for i, name in enumerate(clients)
        ]

        async def scenario() -> RoundRecord:
            federated = build_server(config)
            tasks = [asyncio.create_task(build_client(config).run()) for config in configs]
            records = await asyncio.wait_for(federated.run(), 300)
            await asyncio.wait_for(asyncio.gather(*tasks), 300)
            self.stored += self._files()
            return records[0]

        return asyncio.run(scenario())


def mean(index: int, clients: Iterable[int]) -> float:
    present = list(clients)
    total = sum(SAMPLES[client] for client in present)
    return sum(SAMPLES[client] * VALUES[client][index] for client in present) / total


def traces(client: int) -> list[bytes]:
    """What the values of one client look like: as text, as numbers, scaled, rounded for upload."""
    values = np.array(VALUES[client])
    scaled = np.array([m.to_extra(v) for m, v in zip(METRICS, values, strict=True)])
    found = [f"{value:.7g}"[:7].encode() for value in (*values, *scaled) if value]
    for vector in (values, scaled, scaled * BOUND, scaled * BOUND * SAMPLES[client]):
        found += [vector.astype(kind).tobytes() for kind in ("<f4", ">f4", "<f8", ">f8")]
    field = PrimeField(DEFAULT_MODULUS)
    quantizer = Quantizer(field, BOUND, CLIENTS, MAX_SAMPLES, weighted=True)
    exact = scaled.astype(np.float32).astype(np.float64) * BOUND * SAMPLES[client] * quantizer.scale
    for rounded in itertools.product(*((math.floor(x), math.ceil(x)) for x in exact)):
        found.append(np.array([x % field.modulus for x in rounded], dtype="<u4").tobytes())
    return found


@needs_laboratory
def test_S22_the_server_learns_the_means_of_metrics_and_stores_and_logs_no_single_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Control: where updates are summed in the clear, the same search finds every client's."""
    caplog.set_level(logging.DEBUG)
    naive = Run(tmp_path / "plain", monkeypatch, "plain")
    naive("Measured", ["Measured"] * CLIENTS)
    for client in range(CLIENTS):
        assert any(trace in naive.stored for trace in traces(client)), client
    caplog.clear()

    ours = Run(tmp_path / "ours", monkeypatch)
    record = ours("Measured", ["Measured"] * CLIENTS)
    assert record.included == list(range(CLIENTS))
    for index, metric in enumerate(METRICS):
        measured = record.metrics[metric.name]
        assert 0 < abs(measured.mean - mean(index, range(CLIENTS))) <= measured.error
        assert measured.error < 1e-4 * (metric.high - metric.low)
    stored = json.loads((ours.made.server.parent / "state" / "rounds.json").read_text())
    assert list(stored[0]["metrics"]) == ["recall", "delay"]
    assert stored[0]["metrics"]["recall"]["mean"] == record.metrics["recall"].mean
    assert f"clients' recall {record.metrics['recall'].mean:.4g} before training" in caplog.text
    everything = ours.stored + caplog.text.encode()
    assert b"recall" in everything
    for client in range(CLIENTS):
        assert not any(trace in everything for trace in traces(client)), client


def test_a_task_that_names_no_metric_pays_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    length = {
        name: TrainingServer(
            TrainingTable(task={"task": f"{tmp_path / 'own.py'}:{name}"}), BOUND
        ).dimension
        for name in ("Unmeasured", "Measured")
    }
    assert length == {"Unmeasured": 8, "Measured": 10}


def test_S44_a_metric_that_is_not_a_number_keeps_the_update_back_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "run", monkeypatch)
    record = run("Measured", ["Measured"] * 3 + ["Undefined"])
    assert record.included == [0, 1, 2]
    assert record.withdrawn == {"it has no update to upload": [3]}
    measured = record.metrics["recall"]
    assert abs(measured.mean - mean(0, range(3))) <= measured.error
    assert "client 3 sits round 1 out: the metric 'recall' is not a number" in caplog.text


@pytest.mark.parametrize("other", ["Unmeasured", "Swapped"])
def test_a_client_with_other_metrics_than_the_server_sits_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    run = Run(tmp_path / "run", monkeypatch)
    record = run("Measured", [other, *["Measured"] * 3])
    assert record.included == [1, 2, 3]
    assert "client 0 sits round 1 out: this client's task measures" in caplog.text
    assert abs(record.metrics["delay"].mean - mean(1, range(1, 4))) <= record.metrics["delay"].error
