"""Hospitals that train a tumour classifier together: a task with its own loss and evaluation.

Each hospital has its own patients, and none of them may show the server its model. Run a plain
federation first, to see what accuracy to expect:

    python examples/own_task.py

then give the same task to any command: `--task examples/own_task.py:Hospitals`.
The data is scikit-learn's breast-cancer table, cut among the hospitals; yours would come from
`self.config.data_dir`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from lightsecagg.training import Examples, LocalConfig, Task, TaskConfig, federated_averaging

MALIGNANT = 0  # the label in the table


class Hospitals(Task):
    """Logistic regression on 30 measurements: is the tumour malignant?"""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        features, labels = load_breast_cancer(return_X_y=True)
        # Public reference ranges stand in for the mean and spread of everybody's patients.
        features = (features - features.mean(axis=0)) / features.std(axis=0)
        order = np.random.default_rng(config.seed).permutation(len(labels))
        self._features = torch.tensor(features[order], dtype=torch.float32)
        self._malignant = torch.tensor(labels[order] == MALIGNANT, dtype=torch.float32)

    def model(self) -> nn.Module:
        return nn.Linear(30, 1)

    def client_data(self, client: int) -> Examples:
        mine = slice(100 + client, None, self.config.clients)
        return Examples(self._features[mine], self._malignant[mine])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, malignant = batch
        # A missed tumour costs more than a false alarm.
        return nn.functional.binary_cross_entropy_with_logits(
            model(features).squeeze(1), malignant, pos_weight=torch.tensor(2.0)
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = model(self._features[:100]).squeeze(1) > 0
        ill = self._malignant[:100] > 0
        return {
            "accuracy": float((found == ill).float().mean()),
            "sensitivity": float(found[ill].float().mean()),
        }

    # What each hospital measures on its own patients; the server learns the mean over all of them.
    metrics: ClassVar = {"accuracy": (0, 1)}

    def measure(self, model: nn.Module, client: int) -> dict[str, float]:
        patients = self.client_data(client)
        found = model(patients.inputs).squeeze(1) > 0
        return {"accuracy": float((found == (patients.targets > 0)).float().mean())}


if __name__ == "__main__":
    hospitals = Hospitals(TaskConfig("examples/own_task.py:Hospitals", clients=8))
    for done in federated_averaging(hospitals, rounds=10, local=LocalConfig(batch_size=8)):
        figures = ", ".join(f"{name} {value:.3f}" for name, value in done.metrics.items())
        print(f"round {done.index}: {figures}")
