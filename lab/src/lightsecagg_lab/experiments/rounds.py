"""Looks up rounds and trainings among the results: what tables and figures of time share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightsecagg.params import ShareMode
from lightsecagg_lab.experiments.cells import Cell, Document, Results, RoundCell
from lightsecagg_lab.experiments.setups import SECURE, LearningTask, Profile
from lightsecagg_lab.experiments.timing import TimedRounds, timed_rounds
from lightsecagg_lab.planning import Network
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

LIGHT, SECAGG, SECAGG_PLUS, PLAIN = ProtocolName

SHORT_KEYS = "LightSecAgg, short keys"
"""Their label."""

TABLE_RATE = 0.3
"""p of Tables 2 and 3 and of Figure 5, see `paper_values`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a profile."""

    profile: Profile
    results: Results

    def trainings(self, task: LearningTask) -> list[float]:
        """Seconds of each local training."""
        seconds: list[float] = self.results[self.profile.training(task).key]["seconds"]
        return seconds

    def round(self, cell: RoundCell) -> Document:
        """What was measured in the rounds of a cell."""
        return self.results[cell.key]

    def times(
        self,
        protocol: ProtocolName,
        task: LearningTask,
        rate: float,
        on: Network,
        mode: ShareMode = ShareMode.SEEDED,
    ) -> TimedRounds:
        """How long rounds of the largest N take on these links."""
        cell = self.profile.round(protocol, self.profile.largest, rate, task.dimension, mode=mode)
        return timed_rounds(self.round(cell), on, self.trainings(task))


def round_cells(
    profile: Profile,
    tasks: Sequence[LearningTask],
    rates: Sequence[float],
    clients: Sequence[int] = (),
    protocols: Sequence[ProtocolName] = SECURE,
) -> list[Cell]:
    """Trainings and rounds for all combinations, and LightSecAgg's with short keys."""
    found: list[Cell] = [profile.training(task) for task in tasks]
    for task in tasks:
        for N in clients or (profile.largest,):
            for rate in rates:
                found += [profile.round(p, N, rate, task.dimension) for p in protocols]
                found.append(short_key_round(profile, N, rate, task.dimension))
    return found


def short_key_round(profile: Profile, clients: int, rate: float, dimension: int) -> RoundCell:
    """LightSecAgg with short keys, which every table and figure of time has a row of."""
    return profile.round(LIGHT, clients, rate, dimension, mode=ShareMode.SHORT_KEY)
