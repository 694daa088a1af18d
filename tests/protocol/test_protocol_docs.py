"""docs/protocol.md shows the tables that the code has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_protocol_tables", ROOT / "scripts" / "make_protocol_tables.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tables: ModuleType) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.render(page) == page, "run scripts/make_protocol_tables.py"


def test_a_changed_table_is_noticed(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    fewer = dict(list(tables.TRANSITIONS.items())[:-1])
    monkeypatch.setattr(tables, "TRANSITIONS", fewer)
    assert tables.render(page) != page
