"""Early stopping: the federation ends when a figure has not improved for some rounds.

The rule sees completed rounds only, in their order, those before a restart included: it comes to
the same verdict whenever it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightsecagg.drivers.federation.training_tables import StoppingTable

CLIENTS = "clients."
"""Prefix of a figure that the clients measure."""


def figure_of(record: Mapping[str, Any], name: str) -> float | None:
    """The figure of this name in a round's record, if it has one."""
    if name.startswith(CLIENTS):
        metric = record.get("metrics", {}).get(name.removeprefix(CLIENTS))
        return None if metric is None else metric["mean"]
    value: float | None = record["figures"].get(name)
    return value


class EarlyStopping:
    """Counts the rounds since the figure was last better than ever before."""

    def __init__(self, table: StoppingTable) -> None:
        self._table = table
        self._best = math.inf
        self._since = 0

    def observe(self, record: Mapping[str, Any]) -> bool:
        """A round has ended, by `RoundRecord.to_json`; False if it should have the figure."""
        if record["aborted"] is not None:
            return True
        value = figure_of(record, self._table.figure)
        if value is None:
            return False
        loss = value if self._table.goal == "lower" else -value
        if loss < self._best - self._table.least_change:
            self._best, self._since = loss, 0
        else:  # a figure that is not a number is no better than any
            self._since += 1
        return True

    def reason(self, completed: int) -> str | None:
        """Why to stop after so many completed rounds; None to go on."""
        table = self._table
        if self._since < table.patience or completed < table.min_rounds:
            return None
        best = self._best if table.goal == "lower" else -self._best
        return (
            f"stopped early after {completed} rounds: {table.figure} has not improved on "
            f"{best:.6g} by more than {table.least_change:g} for {self._since} rounds"
        )
