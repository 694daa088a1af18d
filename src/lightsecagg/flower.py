"""Secure aggregation in Flower: two changed lines.

    from lightsecagg.flower import LightSecAgg, lightsecagg_mod

    strategy = LightSecAgg(FedAvg(...), privacy=0.2, dropouts=0.3, bound=1.0)     # server
    app = ClientApp(mods=[lightsecagg_mod])                                       # client

`docs/flower.md` says what this protects from, and what a node's operator can pin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightsecagg.errors import MissingExtra

try:
    import flwr.serverapp.strategy as _  # noqa: F401 - asks whether it is there
except ImportError as error:
    raise MissingExtra("lightsecagg.flower needs flwr 1.41 or newer", "flower") from error

from lightsecagg.drivers.flower.mod import lightsecagg_mod
from lightsecagg.drivers.flower.strategy import LightSecAgg

if TYPE_CHECKING:
    from lightsecagg.drivers.flower.legacy import LightSecAggWorkflow

__all__ = ["LightSecAgg", "LightSecAggWorkflow", "lightsecagg_mod"]


def __getattr__(name: str) -> Any:
    """The older API's workflow is loaded where it is asked for: most apps need none of it."""
    if name != "LightSecAggWorkflow":
        raise AttributeError(f"module 'lightsecagg.flower' has no attribute {name!r}")
    from lightsecagg.drivers.flower.legacy import LightSecAggWorkflow

    return LightSecAggWorkflow
