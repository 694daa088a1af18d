"""The documents: their links lead somewhere, their claims of coverage are true."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

COVERAGE = re.compile(
    r"^\| (?P<id>[SR]\d\d) \| (?P<priority>\d) \| .* \| (?P<tests>[^|]*) \|$", re.M
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http:", "https:", "#")):
            assert (page.parent / link.split("#")[0]).exists(), link


def test_the_paper_map_names_only_what_exists() -> None:
    """Every `module.name` in the map is importable; every test file is there."""
    text = read("docs/paper-map.md")
    names = re.findall(r"`((?:field|masks|crypto|protocol|params|training|lab)\.[\w.]+)`", text)
    assert len(names) > 20
    for name in names:
        if not name.startswith("lab."):
            resolve(f"lightsecagg.{name}")
        elif find_spec("lightsecagg_lab") is not None:
            resolve(f"lightsecagg_{name}")
    for test in re.findall(r"`((?:lab/)?tests/[\w/]+\.py)`", text):
        assert (ROOT / test).is_file(), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_and_names_in_documents_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it speaks of the past too
    for name in re.findall(r"`(lightsecagg(?:_lab)?(?:\.\w+)+)`", page.read_text("utf-8")):
        if find_spec(name.split(".")[0]) is not None:
            resolve(name)


def test_the_page_on_upgrades_names_the_numbers_of_formats() -> None:
    from lightsecagg.drivers.federation import journal, membership
    from lightsecagg.drivers.flower import parcels
    from lightsecagg.protocol import ledger, wire
    from lightsecagg.session import envelope

    page = read("docs/upgrading.md")
    for what, number in {
        "messages between server and clients": envelope.VERSION,
        "the protocol's messages inside them": wire.VERSION,
        "the server's journal": int(journal._VERSION),
        "a client's ledger": ledger._VERSION,
        "the signed allow-list": membership._VERSION,
        "Flower: parcels": parcels.PROTOCOL,
    }.items():
        assert f"| {what} | {number} |" in page, what


def test_the_list_of_documents_is_complete() -> None:
    readme = read("README.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in readme, page.name


def resolve(name: str) -> object:
    """Import the longest prefix that is a module, then follow attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"{name} does not exist")


def requirements_with_tests() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    tests = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "lab/tests").rglob("test_*.py")]
    for file in tests:
        for identifier in re.findall(r"def test_([SR]\d\d)_", file.read_text(encoding="utf-8")):
            found.setdefault(identifier, set()).add(file.relative_to(ROOT).as_posix())
    return found


def test_requirements_that_are_said_to_be_tested_are() -> None:
    rows = list(COVERAGE.finditer(read("docs/security.md")))
    assert len(rows) > 30
    assert len({row["id"] for row in rows}) == len(rows)
    existing = requirements_with_tests()
    for row in rows:
        claimed = set(re.findall(r"`((?:lab/)?tests/[^`]+)`", row["tests"]))
        assert claimed or row["tests"].strip() == "none yet", row["id"]
        assert claimed <= existing.get(row["id"], set()), row["id"]


def test_tests_name_only_requirements_that_are_listed() -> None:
    listed = {row["id"] for row in COVERAGE.finditer(read("docs/security.md"))}
    assert set(requirements_with_tests()) <= listed


def test_the_version_to_cite_is_the_version_that_is_built() -> None:
    def version(name: str, pattern: str) -> str:
        found = re.search(pattern, read(name), re.M)
        assert found is not None
        return found[1]

    built = version("pyproject.toml", r'^version = "(.*)"$')
    assert version("CITATION.cff", r"^version: (.*)$") == built
    assert version("lab/pyproject.toml", r'^version = "(.*)"$') == built
    assert version("lab/pyproject.toml", r'"lightsecagg==(.*?)"') == built
    for package in ("src/lightsecagg", "lab/src/lightsecagg_lab"):
        assert version(f"{package}/__init__.py", r'^__version__ = "(.*)"$') == built
