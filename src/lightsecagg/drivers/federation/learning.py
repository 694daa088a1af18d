"""What becomes of a sum: a step of the model, its figures, and whether it was the last.

A sum that cannot be averaged or applied (somebody uploaded what it must not) harms its round only:
the model stays what it was (S41). A model is stored before it is evaluated, so a failing evaluation
costs nothing but its figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightsecagg.drivers.federation.checkpoints import Checkpoints
from lightsecagg.drivers.federation.jobs import ServerJob
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.federation.stopping import EarlyStopping
from lightsecagg.errors import ConfigurationError, JournalError, LightSecAggError
from lightsecagg.foreign import explain, where
from lightsecagg.session.interface import Spoilt
from lightsecagg.session.record import RoundRecord

Learned = Callable[[RoundRecord, NDArray[np.float64]], None]
"""Told the record of a sum and the average, in code; no configuration names one."""


class Learning:
    """The job's model from sum to sum; slow work runs in threads."""

    def __init__(
        self,
        job: ServerJob,
        checkpoints: Checkpoints,
        stopping: EarlyStopping | None = None,
        learned: Learned | None = None,
    ) -> None:
        """`learned` hears of every sum that can be used, before the model is stored."""
        self._checkpoints, self._learned = checkpoints, learned
        self.job, self.stopping = job, stopping

    def restore(self, journal: Journal) -> int:
        """How many rounds are done; the job has their model."""
        stored = journal.load_model()
        if stored is None:
            return 0
        completed, data = stored
        try:
            self.job.load(data)
        except LightSecAggError:
            raise
        except Exception as error:
            raise JournalError(
                "the checkpoint is of another kind of job; use the old configuration or another "
                f"state folder ({where(error)})"
            ) from error
        return completed

    def look_back(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Early stopping counts the rounds before a restart too."""
        if self.stopping is not None:
            for record in records:
                self.stopping.observe(record)

    def enough(self, completed: int) -> str | None:
        """Why no other sum is wanted after so many, if so."""
        return None if self.stopping is None else self.stopping.reason(completed)

    async def step(
        self,
        record: RoundRecord,
        average: Callable[[], tuple[NDArray[np.float64], int]],
        summands: int,
        completed: int,
    ) -> bytes | memoryview | Spoilt:
        """The state after a sum of so many vectors; or, unchanged, why it cannot be used."""
        before = await asyncio.to_thread(self.job.save)
        try:
            mean, samples = await asyncio.to_thread(average)
            await asyncio.to_thread(self.job.apply, mean, samples, completed)
            rounding = (summands + record.noise) * record.quantisation_step / samples
            record.metrics = self.job.metrics(mean, rounding)
            after = await asyncio.to_thread(self.job.save)
        except (ConfigurationError, JournalError):
            raise  # nobody lied: whoever mends it and starts again resumes this round
        except Exception as error:
            self.job.load(before)
            foreign = not isinstance(error, LightSecAggError)
            text = "round %d: the sum is spoilt: it cannot be used: %s"
            log.error(text, record.round, explain(error), exc_info=foreign)
            return Spoilt(explain(error))
        record.samples = samples
        if self._learned is not None:
            self._learned(record, mean)
        return after

    async def note(self, record: RoundRecord, version: int) -> None:
        """A model is stored: how good it is, and whether it is to be kept."""
        await self._evaluate(record)
        await asyncio.to_thread(self._checkpoints.note, version, record.to_json())

    async def _evaluate(self, record: RoundRecord) -> None:
        """The figures of a model that is stored already; whatever fails here, the round is done."""
        try:
            figures = await asyncio.to_thread(self.job.evaluate)
            record.figures = {name: float(value) for name, value in figures.items()}
        except Exception:
            reason = "round %d is done and its model stored, but evaluating it failed"
            log.warning(reason, record.round, exc_info=True)

    def judge(self, record: RoundRecord, completed: int) -> None:
        """Whether this round is the last, by the rule of early stopping."""
        if self.stopping is None:
            return
        if not self.stopping.observe(record.to_json()):
            log.warning("round %d has no figure of [early_stopping] to judge by", record.round)
        record.stopped = self.enough(completed)
