"""Lets the tests of this folder import their helpers, and keeps Flower offline and quiet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr.serverapp.strategy", reason="needs the extra flower")

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
