"""Tasks that people write for themselves, good and bad, in the folder that tests work in."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN_TASKS = """
import torch
from torch import nn
from lightsecagg.training import Examples, Task

class House(Task):
    def model(self):
        return nn.Linear(3, 1)

    def client_data(self, client):
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(client))
        return Examples(inputs, inputs.sum(1, keepdim=True) * float(self.options["slope"]))

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model):
        data = self.client_data(99)
        return {"rmse": nn.functional.mse_loss(model(data.inputs), data.targets).item() ** 0.5}

    metrics = {"mae": (0, 50)}

    def measure(self, model, client):
        data = self.client_data(client)
        return {"mae": nn.functional.l1_loss(model(data.inputs), data.targets).item()}

class Unbounded(House):
    metrics = {"mae": (0, float("inf"))}

class NotATask:
    pass

class Unfinished(Task):
    def model(self):
        return nn.Linear(3, 1)

class Broken(House):
    def model(self):
        return {}["not here"]

class Empty(House):
    def client_data(self, client):
        return Examples(torch.zeros(0, 3), torch.zeros(0, 1))
"""


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_tasks_of_run.py").write_text(OWN_TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
