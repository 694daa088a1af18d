"""The Grafana dashboard asks only for metrics and labels that the server exposes."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from test_trackers import a_round

from lightsecagg.drivers.federation.observer import Metrics

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Metric -> its labels, as scraped."""
    metrics = Metrics()
    metrics.expires = {"server": 2e9}
    metrics.serve(0)
    try:
        record = a_round()
        record.late = {"MaskedUpload": 1}
        metrics.record(record)
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as page:
            text = page.read().decode()
    finally:
        metrics.close()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(lightsecagg_\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_the_dashboard_names_only_metrics_that_exist(exposed: dict[str, set[str]]) -> None:
    asked = set(re.findall(r"lightsecagg_\w+", json.dumps(DASHBOARD)))
    assert asked <= set(exposed)
    families = {name for name in exposed if not name.endswith("_created")}
    assert {re.sub(r"_(sum|count|bucket)$", "", name) for name in asked} == {
        re.sub(r"_(sum|count|bucket)$", "", name) for name in families
    }, "every metric has a place"


@pytest.mark.parametrize("query", QUERIES)
def test_queries_group_by_labels_that_their_metric_has(
    query: str, exposed: dict[str, set[str]]
) -> None:
    """Prometheus adds `job` to whatever it scrapes."""
    for labels, name in re.findall(r"by \(([^)]*)\)[^{]*?(lightsecagg_\w+)\{", query):
        assert set(re.findall(r"\w+", labels)) <= exposed[name] | {"job"}, query
    for name, matchers in re.findall(r"(lightsecagg_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)=", matchers)) <= exposed[name] | {"job"}, query
    assert query.count("(") == query.count(")")


def test_alarms_ask_for_metrics_that_exist(exposed: dict[str, set[str]]) -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((ROOT / "examples" / "prometheus-rules.yml").read_text())["groups"]
    for rule in group["rules"]:
        named = set(re.findall(r"lightsecagg_\w+", rule["expr"]))
        assert named
        assert named <= set(exposed), rule["alert"]
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert labels <= set().union(*(exposed[name] for name in named)), rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert place["x"] + place["w"] <= 24
