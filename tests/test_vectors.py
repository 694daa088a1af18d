"""S20: the published test vectors, most of which must be refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from laboratory import baseline

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "vectors"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> list[dict[str, Any]]:
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert content["version"] == 4
    vectors: list[dict[str, Any]] = content["vectors"]
    return vectors


def load_script() -> ModuleType:
    path = ROOT / "scripts" / "make_vectors.py"
    spec = importlib.util.spec_from_file_location("make_vectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


VECTORS = [(name, vector) for name in FILES for vector in load(name)]
BASELINES = ("pairwise",)


@pytest.mark.parametrize(
    ("name", "vector"),
    [baseline(*each) if each[0] in BASELINES else each for each in VECTORS],
    ids=[f"{name}: {vector['name']}" for name, vector in VECTORS],
)
def test_S20_vector(script: ModuleType, name: str, vector: dict[str, Any]) -> None:
    outcome = script.run(vector["operation"], vector["inputs"])
    expected = {key: vector[key] for key in ("result", "error") if key in vector}
    assert len(expected) == 1
    assert outcome == expected


def test_S20_there_are_enough_vectors_and_most_are_negative() -> None:
    negative = [vector for _, vector in VECTORS if "error" in vector]
    assert len(VECTORS) >= 150
    assert len(negative) >= 0.7 * len(VECTORS)


def test_S20_results_of_one_operation_differ_where_inputs_do() -> None:
    """A changed context, owner or order changes the outcome: equal results would be a collision."""
    for operation in (
        "share.expand",
        "context.settings",
        "context.roster",
        "check.report",
        "prg.expand",
    ):
        results = [
            json.dumps(vector["result"])
            for _, vector in VECTORS
            if vector["operation"] == operation and vector.get("result")
        ]
        assert len(results) > 1
        assert len(set(results)) == len(results)


@pytest.mark.parametrize("name", [baseline(name) if name in BASELINES else name for name in FILES])
def test_S20_names_are_unique_and_files_are_what_the_script_writes(
    script: ModuleType, name: str
) -> None:
    names = [vector["name"] for vector in load(name)]
    assert len(set(names)) == len(names)
    written = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert script.render(name) == written, "a change of the wire format; was it meant?"


def test_S20_every_file_is_listed(script: ModuleType) -> None:
    assert set(FILES) == set(script.FILES)
