"""What a federation will cost before it runs: bytes, seconds and memory, and the best U.

plan(Federation(clients=200, privacy=100, dropouts=20, dimension=1_206_590))
"""

from __future__ import annotations

from lightsecagg_lab.planning.network import Network, Topology
from lightsecagg_lab.planning.planner import Federation, Plan, plan
from lightsecagg_lab.planning.unit_costs import STATED, UnitCosts

__all__ = ["STATED", "Federation", "Network", "Plan", "Topology", "UnitCosts", "plan"]
