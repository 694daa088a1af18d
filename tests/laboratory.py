"""For tests of the product that need the laboratory: left out where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

needs_laboratory = pytest.mark.skipif(
    find_spec("lightsecagg_lab") is None, reason="the baselines are in the laboratory, lab/"
)


def baseline(*values: Any) -> Any:
    """Parameters of a test that need a baseline."""
    return pytest.param(*values, marks=needs_laboratory)
