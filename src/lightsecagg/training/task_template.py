"""My federated task: run it with `--task my_task:MyTask`.

    lightsecagg task check my_task:MyTask

Every party builds the task from the same configuration; `client_data` runs on client i alone.
"""

from __future__ import annotations

import torch
from torch import nn

from lightsecagg.training import Examples, Task

FEATURES, CLASSES = 4, 3


class MyTask(Task):
    """Replace the model and the data; delete what you do not need."""

    def model(self) -> nn.Module:
        # Any torch module in float32, float16 or bfloat16. Do not seed it: the caller does.
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def client_data(self, client: int) -> Examples:
        # What client 0, 1, ... trains on. Read it from self.config.data_dir; `self.options` holds
        # the --task-option pairs. Any torch Dataset will do as well.
        return self._clouds(seed=client + 1, samples=60)

    def test_data(self) -> Examples:
        # What the global model is evaluated on.
        return self._clouds(seed=0, samples=300)

    # The loss is cross-entropy and evaluation reports accuracy and loss. Override
    #     loss(self, model, batch) -> Tensor        and
    #     evaluate(self, model) -> dict[str, float]
    # for anything else.

    # Name what every client shall measure on its own data, with its bounds, and the server learns
    # the means, no single value:
    #     metrics = {"accuracy": (0, 1), "loss": (0, 10)}

    def _clouds(self, seed: int, samples: int) -> Examples:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(CLASSES, (samples,), generator=generator)
        centres = 3.0 * torch.eye(CLASSES, FEATURES)
        noise = torch.randn(samples, FEATURES, generator=generator)
        return Examples(centres[labels] + noise, labels)
