"""Lets the tests of this folder import their common helpers, `small_federation` among them.

Pytest's importlib mode leaves `sys.path` alone, so a helper beside a test is not importable.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture(autouse=True)
def logging_as_found() -> Iterator[None]:
    """Programs set up logging for themselves; the next test must not inherit it."""
    log = logging.getLogger("lightsecagg")
    before = (log.handlers[:], log.level, log.propagate)
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])
