"""N parties in one process: exact results, and CPU and bytes per phase."""

from __future__ import annotations

from lightsecagg.drivers.cohort import Cohort
from lightsecagg_lab.simulation.faults import Drop, Faults, Moment, choose_faults
from lightsecagg_lab.simulation.synchronous import RoundReport, simulate_round

__all__ = [
    "Cohort",
    "Drop",
    "Faults",
    "Moment",
    "RoundReport",
    "choose_faults",
    "simulate_round",
]
