"""Each distribution stays within its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What there was when the laboratory moved out, rounded up. The goal is 31,500 and 15,500.
LINES = {"src/lightsecagg": 38_200, "lab/src/lightsecagg_lab": 15_000}


@pytest.mark.parametrize("package", LINES)
def test_a_distribution_has_no_more_lines_than_allowed(package: str) -> None:
    files = (ROOT / package).rglob("*.py")
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= LINES[package]
