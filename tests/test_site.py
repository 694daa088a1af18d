"""The documentation site: it builds strictly, no link leads astray, no other host is asked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import lightsecagg
from lightsecagg.cli.main import summaries
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig

ROOT = Path(__file__).parents[1]
TOOLS = ("mkdocs", "material", "mkdocstrings")

pytest.importorskip("lightsecagg_lab", reason="pages show the laboratory too")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(tool) is None for tool in TOOLS),
        reason="the extra [docs] is not installed",
    ),
]
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
"""What a browser fetches without being asked."""


class Page(HTMLParser):
    """Anchors, links, and what is fetched with the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.pictures: list[str] = []
        self.classes: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            value = value or ""
            if name in ("id", "name"):
                self.anchors.add(value)
            elif name == "class":
                self.classes.update(value.split())
            elif (tag, name) in LOADS:
                self.loads.append(value)
                if tag == "img":
                    self.pictures.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def build(configuration: Path, target: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet: MkDocs is then no longer strict.
    options = ["--config-file", str(configuration), "--site-dir", str(target)]
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *options],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", target)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    assert len(found) > 40
    return found


def test_every_link_and_anchor_of_the_built_pages_leads_somewhere(
    site: Path, pages: dict[Path, Page]
) -> None:
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of whatever serves it
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if target in pages:
                anchor = unquote(parts.fragment)
                assert anchor in pages[target].anchors, f"{path.relative_to(site)}: {link}"
            checked += 1
    assert checked > 5000


def test_no_page_asks_another_host(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert not [load for load in page.loads if urlsplit(load).netloc], path
        # The theme would fetch the library for diagrams, and the stars of a repository.
        assert not page.classes & {"mermaid", "md-source"}, path
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "@import" not in text, sheet
        assert "url(http" not in text, sheet
        assert "url(//" not in text, sheet


def test_every_picture_leads_to_its_full_size(pages: dict[Path, Page]) -> None:
    pictures = [(picture, page.links) for page in pages.values() for picture in page.pictures]
    assert len(pictures) > 20
    for picture, links in pictures:
        assert picture in links, picture


def test_titles_in_the_menu_fit_on_one_line() -> None:
    import yaml

    def titles(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for title, inside in entry.items() if isinstance(entry, dict) else ():
                yield title
                if isinstance(inside, list):
                    yield from titles(inside)

    found = list(titles(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert len(found) > 60
    assert not [title for title in found if len(title) > 25]


def test_search_knows_pages_that_were_written_and_pages_that_were_made(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "mathematics.html" in text
    assert any("lightsecagg_rounds_total" in entry for entry in text.values())


def test_the_reference_is_complete(site: Path) -> None:
    def page(name: str) -> str:
        return (site / "reference" / f"{name}.html").read_text(encoding="utf-8")

    api, cli, configuration = page("api"), page("cli"), page("configuration")
    for name in lightsecagg.__all__:
        home = lightsecagg._HOME_OF.get(name)
        assert home is None or f'id="{home}.{name}"' in api, name
    for command in summaries():
        assert f"lightsecagg {command}<" in cli, command
    for kind in (ServerConfig, ClientConfig):
        for table in kind.model_fields:
            assert f": [{table}]" in configuration, table
    assert "Undefined" not in configuration
    assert "honest-but-curious or malicious-server" in configuration
    assert "lightsecagg_phase_seconds" in page("metrics")
    assert "SumRequest" in page("messages")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[nowhere](nowhere.md)", "nowhere.md"),
        ("[no anchor](#nowhere)", "#nowhere"),
        ("::: lightsecagg.nowhere", "lightsecagg.nowhere"),
    ],
)
def test_a_broken_link_anchor_or_name_fails(tmp_path: Path, text: str, complaint: str) -> None:
    """With the settings of the real site, and a page of its own."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{text}\n", encoding="utf-8")
    configuration = tmp_path / "mkdocs.yml"
    configuration.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: []\nnav: [index.md]\n"
    )
    built = build(configuration, tmp_path / "site")
    assert built.returncode != 0
    assert complaint in built.stderr
