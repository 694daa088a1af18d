"""The same node with one mod."""

from __future__ import annotations

from bench.plain_client import make_app

from lightsecagg.flower import lightsecagg_mod

app = make_app([lightsecagg_mod])
