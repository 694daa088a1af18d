"""Lets the tests of this folder import their common helpers, such as `native_vectors`.

Pytest's importlib mode leaves `sys.path` alone, so a helper beside a test is not importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
