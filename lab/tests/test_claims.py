"""Measured figures in documents are those that are recorded, and where is told."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from lightsecagg.protocol.interface import Phase
from lightsecagg_lab.planning import Federation, plan
from lightsecagg_lab.planning.planner import SEEDED, SHORT_KEY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("claims", str(ROOT / "scripts" / "claims"))
    spec = importlib.util.spec_from_loader("claims", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    importlib.sys.modules["claims"] = module  # type: ignore[attr-defined]
    loader.exec_module(module)
    return module


def test_pages_say_what_is_recorded(claims: ModuleType) -> None:
    assert claims.differences() == [], "scripts/claims --update writes it into the pages"
    assert len(claims.claims()) >= 7


def test_the_index_of_results_is_up_to_date(claims: ModuleType) -> None:
    assert claims.INDEX.read_text("utf-8") == claims.index(), "scripts/claims --update"


def test_every_recorded_result_is_in_the_index(claims: ModuleType) -> None:
    text = claims.INDEX.read_text("utf-8")
    for page in claims.RESULTS.glob("*.md"):
        assert page == claims.INDEX or f"]({page.name})" in text
    for picture in claims.RESULTS.glob("*.png"):
        assert f"]({picture.name})" in text


def test_a_wrong_figure_is_found_and_corrected(claims: ModuleType) -> None:
    for claim in claims.claims():
        text = (ROOT / claim.page).read_text("utf-8")
        start, end = claim.found(text).span(1)
        wrong = text[:start] + "123.4" + text[end:]
        assert claim.stated(wrong)[0] == "123.4" != claim.values[0]
        assert claim.corrected(wrong) == text


def test_a_sentence_that_is_gone_is_noticed(claims: ModuleType) -> None:
    claim = claims.claims()[0]
    with pytest.raises(SystemExit, match="says 0 times"):
        claim.found("nothing of the kind")


def test_a_misspelt_claim_is_noticed(
    claims: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "claims.toml").write_text('[[claim]]\n[[claims]]\npage = "README.md"\n', "utf-8")
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="has claims, which nobody compares"):
        claims.claims()


def test_a_figure_has_its_sign(claims: ModuleType) -> None:
    found = re.findall(claims.NUMBER, "+0.14 ± 0.20, -0.62 of 1,024")
    assert found == ["+0.14", "0.20", "-0.62", "1,024"]


def test_a_figure_of_repeated_rounds_is_their_median(
    claims: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.json").write_text('{"a": [{"median": 2.5, "low": 2, "high": 3}, 7]}', "utf-8")
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    assert claims.look_up("x.json", "a", 0) == 2.5
    assert claims.look_up("x.json", "a", 1) == 7


def test_what_short_keys_save_is_what_the_planner_counts() -> None:
    """Bytes are exact, so they need no recording."""
    made = plan(Federation(200, 100, 98, 1_206_590))
    sent = {
        name: made.protocols[name].phases[Phase.SHARE].traffic.client_upload
        for name in (SHORT_KEY, SEEDED)
    }
    short, seeded = f"{sent[SHORT_KEY] / 1e3:.0f} kB", f"{sent[SEEDED] / 1e6:.0f} MB"
    for page in ("README.md", "docs/short-keys.md"):
        text = re.sub(r"\s+", " ", (ROOT / page).read_text("utf-8"))
        assert short in text, page
        assert seeded in text, page
