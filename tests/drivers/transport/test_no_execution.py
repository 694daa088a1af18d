"""S21: nothing in the drivers can run what a peer sends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightsecagg.drivers

ROOT = Path(next(iter(lightsecagg.drivers.__path__)))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}
SOURCES = sorted(ROOT.rglob("*.py"))


def findings(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [n.name for n in node.names if n.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            names = {(module, alias.name) for alias in node.names}
            found += [module] if module in FORBIDDEN_MODULES or names & FORBIDDEN_METHODS else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in FORBIDDEN_CALLS else []
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (node.value.id, node.attr)
            found += [".".join(pair)] if pair in FORBIDDEN_METHODS else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            safe = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if safe else ["allow_pickle"]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_S21_no_reader_that_executes(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "from torch import load",
        "eval('1')",
        "import numpy as np; np.load('x', allow_pickle=True)",
    ],
)
def test_S21_the_search_finds_what_it_looks_for(source: str) -> None:
    assert findings(source)
