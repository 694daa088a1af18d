"""Each distribution stays within its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What there is, rounded up; modules still move. The goal is 31,500 and 15,500. The last rises:
# what an operator sees (gauges, absent members, names, `status`), checks in the Flower plug-in;
# packing, ranges, rotation and their loops (900); all of a party in its interface (100);
# contributor, holder and the parts of the server as machines of their own (400, until rounds run
# on them too); statistics of tables: plan, columns, what to hide (700), their demonstration (290);
# what Windows offers in place of what Unix has (150); in the laboratory stand-ins that write tags
# and reports (50).
LINES = {"src/lightsecagg": 39_500, "lab/src/lightsecagg_lab": 17_000}


@pytest.mark.parametrize("package", LINES)
def test_a_distribution_has_no_more_lines_than_allowed(package: str) -> None:
    files = (ROOT / package).rglob("*.py")
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= LINES[package]
