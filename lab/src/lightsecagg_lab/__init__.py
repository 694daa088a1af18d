"""The laboratory: what simulates, forecasts and measures LightSecAgg, and the paper's experiments.

The product, `lightsecagg`, never imports it; entry points of this distribution add its commands.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"
