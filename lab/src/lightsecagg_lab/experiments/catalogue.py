"""The experiments by name; each is a list of cells and a report made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightsecagg.errors import ParameterError
from lightsecagg_lab.experiments import (
    ablations,
    breakdown,
    complexity,
    forecasts,
    gains,
    growth,
    impact_of_u,
    links,
    links_report,
    overhead,
    regimes,
    transport,
)
from lightsecagg_lab.experiments.cells import Cell, Results
from lightsecagg_lab.experiments.report import Report
from lightsecagg_lab.experiments.setups import Profile


@dataclass(frozen=True, slots=True)
class Experiment:
    """A table or figure."""

    cells: Callable[[Profile], list[Cell]]
    """What must be measured."""
    report: Callable[[Profile, Results], Report]
    """What it comes to."""
    draws: bool = False
    """Whether the report has pictures."""

    def extras(self, profile: Profile) -> set[str]:
        """The extras of this package that it takes."""
        needed = {extra for cell in self.cells(profile) for extra in cell.extras}
        return needed | ({"report"} if self.draws else set())


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(complexity.count_cells, complexity.table1_report),
    "table2": Experiment(gains.table2_cells, gains.table2_report),
    "table3": Experiment(gains.table3_cells, gains.table3_report),
    "table4": Experiment(breakdown.table4_cells, breakdown.table4_report),
    "table5": Experiment(complexity.count_cells, complexity.table5_report),
    "table6": Experiment(complexity.table6_cells, complexity.table6_report),
    "figure5": Experiment(breakdown.figure5_cells, breakdown.figure5_report, draws=True),
    **{
        name: Experiment(
            partial(growth.growth_cells, name), partial(growth.growth_report, name), draws=True
        )
        for name in growth.FIGURES
    },
    "impact-of-u": Experiment(impact_of_u.impact_cells, impact_of_u.impact_report, draws=True),
    "overhead": Experiment(overhead.overhead_cells, overhead.overhead_report),
    "regimes": Experiment(regimes.regime_cells, regimes.regime_report, draws=True),
    "ablations": Experiment(ablations.ablation_cells, ablations.ablation_report),
    "planner": Experiment(forecasts.forecast_cells, forecasts.forecast_report),
    "links": Experiment(links.links_cells, links_report.links_report, draws=True),
    "transport": Experiment(transport.transport_cells, transport.transport_report),
}


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in EXPERIMENTS:
        raise ParameterError(
            f"there is no experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]
