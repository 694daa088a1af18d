"""When rounds end."""

from __future__ import annotations

import json
import time
from pathlib import Path


class Clock:
    """Notes the time after every round; the first look is before them."""

    def __init__(self) -> None:
        self.looks: list[float] = []
        self.enrolment = 0.0

    def look(self) -> None:
        self.looks.append(time.monotonic())

    def report(self, path: str, **more: object) -> None:
        seconds = [end - begin for begin, end in zip(self.looks, self.looks[1:], strict=False)]
        total = sum(seconds)
        seconds[0] -= self.enrolment  # which is before the first round
        found = {
            "rounds": [round(s, 3) for s in seconds],
            "total": total,
            "enrolment": self.enrolment,
            **more,
        }
        Path(path).write_text(json.dumps(found))
