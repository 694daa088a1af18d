"""Secure aggregation in Flower: two changed lines.

    from lightsecagg.flower import LightSecAgg, lightsecagg_mod

    strategy = LightSecAgg(FedAvg(...), privacy=0.2, dropouts=0.3, bound=1.0)     # server
    app = ClientApp(mods=[lightsecagg_mod])                                       # client

`docs/flower.md` says what this protects from, and what a node's operator can pin.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightsecagg.errors import MissingExtra

if find_spec("flwr") is None or find_spec("flwr.serverapp.strategy") is None:
    raise MissingExtra("lightsecagg.flower needs flwr 1.41 or newer", "flower")

if TYPE_CHECKING:
    from lightsecagg.drivers.flower.mod import lightsecagg_mod
    from lightsecagg.drivers.flower.strategy import LightSecAgg

__all__ = ["LightSecAgg", "lightsecagg_mod"]

_HOMES = {"LightSecAgg": "strategy", "lightsecagg_mod": "mod"}


def __getattr__(name: str) -> Any:
    """Each name is loaded where it is asked for: a node is a process per message."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lightsecagg.flower' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"lightsecagg.drivers.flower.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
