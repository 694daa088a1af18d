"""When rounds end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np


class Clock:
    """Notes the time after every round, and the model; the first look is before them."""

    def __init__(self) -> None:
        self.looks: list[float] = []
        self.models: list[dict[str, Any]] = []
        self.enrolment = 0.0

    def look(self, model: dict[str, Any]) -> None:
        self.looks.append(time.monotonic())
        self.models.append(model)

    def report(self, path: str) -> None:
        seconds = [end - begin for begin, end in zip(self.looks, self.looks[1:], strict=False)]
        total = sum(seconds)
        seconds[0] -= self.enrolment  # which is before the first round
        stacked = {name: np.stack([m[name] for m in self.models]) for name in self.models[0]}
        np.savez(Path(path).with_suffix(".npz"), **stacked)
        found = {
            "rounds": [round(s, 3) for s in seconds],
            "total": total,
            "enrolment": self.enrolment,
        }
        Path(path).write_text(json.dumps(found))
