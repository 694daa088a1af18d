"""Which models a server keeps: the latest, and the best by one figure.

`models/<rounds done>.npz` are the models; `models/best.json` says which is the best, and why. Like
`rounds.json` it is a report: a round is done before anybody asks how good its model is, and a
file that cannot be written costs no round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from lightsecagg.drivers.federation.durable import write_synced
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.federation.stopping import figure_of
from lightsecagg.drivers.federation.training_tables import CheckpointsTable, StoppingTable
from lightsecagg.errors import ConfigurationError, LightSecAggError
from lightsecagg.foreign import reading

BEST: Final = "best.json"
_USUAL: Final = {"loss": "lower", "accuracy": "higher"}
"""What is looked for where no figure was named."""


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best model so far."""

    rounds: int
    """Completed rounds after which it was the model."""
    figure: str
    value: float


_decoder = msgspec.json.Decoder(Best)


def load_best(models: Path) -> Best | None:
    """Which model of a state folder's models/ is the best; None if none was judged."""
    path = models / BEST
    if not path.exists():
        return None
    with reading(path, "a note of the best model"):
        return _decoder.decode(path.read_bytes())


class Checkpoints:
    """Keeps the models of the latest rounds, and of the best."""

    def __init__(
        self,
        journal: Journal,
        table: CheckpointsTable | None = None,
        stopping: StoppingTable | None = None,
    ) -> None:
        """`stopping` names the figure if `table` does not."""
        self._journal, self._models = journal, journal.folder / "models"
        self._table = table or CheckpointsTable()
        self._goals: Mapping[str, str] = _USUAL
        for each in (stopping, self._table):
            if each is not None and each.figure is not None and each.goal is not None:
                self._goals = {each.figure: each.goal}
        try:
            self._best = load_best(self._models)
        except ConfigurationError as error:
            log.warning("%s; the best model is looked for anew", error)
            self._best = None

    def note(self, completed: int, record: Mapping[str, Any]) -> None:
        """The model after so many rounds has these figures (`RoundRecord.to_json`)."""
        try:
            self._judge(completed, record)
            latest = range(completed - self._table.keep + 1, completed + 1)
            self._journal.keep_models({*latest, *([self._best.rounds] if self._best else ())})
        except (OSError, LightSecAggError) as error:
            log.warning("which models to keep cannot be noted: %s", error)

    def _judge(self, completed: int, record: Mapping[str, Any]) -> None:
        found = self._figure(record)
        if found is None or (self._best is not None and not self._improves(found)):
            return
        name, value = found
        best = Best(completed, name, value)
        write_synced(self._models / BEST, msgspec.json.encode(best))
        self._best = best

    def _figure(self, record: Mapping[str, Any]) -> tuple[str, float] | None:
        for name in self._goals:
            value = figure_of(record, name)
            if value is not None and math.isfinite(value):
                return name, value
        return None

    def _improves(self, found: tuple[str, float]) -> bool:
        """Whether it is better than the best; another figure than before begins anew."""
        name, value = found
        if self._best is None or self._best.figure != name:
            return True
        higher = value > self._best.value
        return higher if self._goals[name] == "higher" else value < self._best.value
