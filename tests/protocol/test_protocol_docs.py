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


@pytest.mark.parametrize("name", ["protocol.md"])
def test_the_page_is_up_to_date(tables: ModuleType, name: str) -> None:
    page = (tables.DOCS / name).read_text(encoding="utf-8")
    rendered = tables.render(page, tables.pages()[name])
    assert rendered == page, "run scripts/make_protocol_tables.py"


@pytest.mark.parametrize(
    ("party", "name"),
    [
        ("client", "protocol.md"),
        ("holder", "protocol.md"),
        ("server", "protocol.md"),
    ],
)
def test_a_changed_table_is_noticed(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, party: str, name: str
) -> None:
    page = (tables.DOCS / name).read_text(encoding="utf-8")
    module = getattr(tables, party)
    fewer = dict(list(module.TRANSITIONS.items())[:-1])
    monkeypatch.setattr(module, "TRANSITIONS", fewer)
    assert tables.render(page, tables.pages()[name]) != page
