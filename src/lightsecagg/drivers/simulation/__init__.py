"""N parties in one process: exact results, CPU and bytes per phase, and a model of the links."""

from __future__ import annotations

from lightsecagg.drivers.simulation.cohort import Cohort
from lightsecagg.drivers.simulation.faults import Drop, Faults, Moment, choose_faults
from lightsecagg.drivers.simulation.links import Links, Span, Topology, timeline
from lightsecagg.drivers.simulation.synchronous import RoundReport, simulate_round

__all__ = [
    "Cohort",
    "Drop",
    "Faults",
    "Links",
    "Moment",
    "RoundReport",
    "Span",
    "Topology",
    "choose_faults",
    "simulate_round",
    "timeline",
]
