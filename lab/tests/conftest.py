"""Lets the laboratory's tests import the helpers of the product's tests.

Pytest's importlib mode leaves `sys.path` alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2] / "tests"
for folder in ("protocol", "protocol/schemes", "drivers/federation", "fuzz", "session"):
    if str(_TESTS / folder) not in sys.path:
        sys.path.append(str(_TESTS / folder))
