"""What a client writes down for a demonstration: when it did what, and its plain updates.

No real client does that: only where the configuration names a folder (`client.trace`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from lightsecagg.protocol.interface import Update
from lightsecagg.session.envelope import name_of
from lightsecagg.session.interface import Effect, Event, Post, Received

_PHASES = {
    "Opening": "advertise",
    "Roster": "share",
    "ShareBundle": "share",
    "MaskedUpload": "upload",
    "BufferedUpload": "upload",
    "MaskReport": "share",
    "Consent": "agree",
    "AggregatedShare": "recover",
    "UnmaskingShares": "recover",
}
"""To which phase it counts what a message costs."""


class ClientTrace:
    """Of one client; without a folder it does nothing."""

    def __init__(self, folder: Path | None, client: int) -> None:
        self._folder, self._client = folder, client
        self._spans: list[dict[str, Any]] = []

    def begin(self) -> None:
        """A round has begun."""
        self._spans = []

    def note(self, phase: str, start: float) -> None:
        """It did this from `start` until now."""
        if self._folder is not None:
            self._spans.append({"phase": phase, "start": start, "end": time.time()})

    def note_step(self, event: Event, effects: Iterable[Effect], start: float) -> None:
        """A step of its session, from `start` until now."""
        if self._folder is None:
            return
        messages = [each.data for each in (*effects, event) if isinstance(each, Post | Received)]
        phases = [_PHASES[kind] for kind in map(name_of, messages) if kind in _PHASES]
        if phases:
            self.note(phases[0], start)

    def write_spans(self, number: int) -> None:
        """What it did in this round."""
        self._write(f"spans-{number}-{self._client}.json", json.dumps(self._spans).encode())

    def write_update(self, number: int, update: Update) -> None:
        """The plain update, in the clear."""
        if self._folder is not None:
            file = BytesIO()
            np.savez(file, vector=update.vector, samples=update.samples)
            self._write(f"update-{number}-{self._client}.npz", file.getvalue())

    def _write(self, name: str, data: bytes) -> None:
        if self._folder is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = self._folder / f"{name}.new"  # a client that is killed leaves no half of a file
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            file.write(data)
        beside.replace(self._folder / name)
