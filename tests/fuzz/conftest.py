"""Lets the fuzz targets import each other, and the small federations of the other tests.

Pytest's importlib mode leaves `sys.path` alone, so a helper beside a test is not importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
for _folder in (_TESTS, _TESTS / "fuzz", _TESTS / "protocol", _TESTS / "session"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
