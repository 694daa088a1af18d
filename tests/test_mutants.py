"""The tool that changes the code: what it changes, and that tests notice."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from subprocess import run
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "mutate"
FOLDERS = (
    "src/lightsecagg/protocol/roles",
    "src/lightsecagg/protocol/schemes",
    "lab/src/lightsecagg_lab/schemes",
)


@pytest.fixture(scope="module")
def mutate() -> Any:
    loader = SourceFileLoader("mutate", str(SCRIPT))
    spec = spec_from_loader("mutate", loader)
    assert spec is not None
    module = sys.modules["mutate"] = module_from_spec(spec)  # its dataclasses look there
    loader.exec_module(module)
    yield module
    del sys.modules["mutate"]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        (
            "def f(x: int) -> None:\n    if x < 2:\n        raise E('no')\n    g(x)\n    h(x)",
            {
                "def f(x: int) -> None:\n    pass",
                "    if False:",
                "    if True:",
                "    if x <= 2:",
                "    if x < 3:",
                "        pass\n    g(x)",
                "raise E('no')\n    pass\n    h(x)",
            },
        ),
        ("a = b and c", {"a = c", "a = b"}),
        ("a = not b", {"a = not not b"}),
        ("a = x if y else z", {"a = z if y else x"}),
        ("a = [x for x in y if x]", {"a = [x for x in y]"}),
        ("for x in y:\n    x.z = 1", {"    x.z = 1\n    break", "    pass", "    x.z = 2"}),
        ("a = 1 <= x < 5", {"1 < x < 5", "1 <= x <= 5", "1 > x < 5", "1 <= x >= 5"}),
        ("a = min(x) + True", {"max(x) + True", "min(x) - True", "min(x) + False"}),
        ("def f():\n    while x:\n        return 1\n    return 2", {"        pass", "return 3"}),
        ("a: int = f'{1}'", set()),
        ("if x:\n    raise AssertionError('never')", set()),
        ("zip(a, b, strict=True)", {"pass"}),
    ],
)
def test_what_is_changed(mutate: ModuleType, code: str, changes: set[str]) -> None:
    _, found = mutate.places(code, "file.py")
    texts = [mutate.mutated(code, mutant.number) for mutant in found.mutants]
    assert len(texts) == len(set(texts)), "no two mutants are the same"
    for change in changes:
        assert any(change in text for text in texts), (change, texts)
    assert bool(texts) == bool(changes)


def test_mutants_of_one_line_can_be_told_apart(mutate: ModuleType) -> None:
    _, found = mutate.places("a = x + 1 + 1", "file.py")
    assert len({(m.where, m.change, m.code) for m in found.mutants}) == len(found.mutants) == 4


def test_what_is_said_to_change_nothing_is_there(mutate: ModuleType) -> None:
    files = mutate.chosen_files([ROOT / folder for folder in FOLDERS])
    every = [m for f in files for m in mutate.places((ROOT / f).read_text(), f)[1].mutants]
    assert len(every) > 600
    for entry in mutate.equivalents():
        assert any(entry.fits(mutant) for mutant in every), entry
        assert entry.reason


def test_a_check_that_is_gone_is_noticed() -> None:
    """Both operands of the condition under which an opening without a model counts."""
    command = [sys.executable, str(SCRIPT), "--all", "--only", "operand removed"]
    done = run(
        [*command, str(ROOT / FOLDERS[0] / "registration.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "2 tried, 2 noticed, 0 survive" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
