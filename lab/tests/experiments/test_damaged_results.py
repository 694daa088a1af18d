"""The laboratory's readers of local files: damage is refused, and the file is named (S41)."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzz_mutation import mutant
from fuzz_targets import readers

import lightsecagg_lab
from lightsecagg_lab.experiments.asynchronous import PAPER_MNIST, Cell, read_cell
from lightsecagg_lab.experiments.cells import measure_cells
from lightsecagg_lab.experiments.stability import _spreads
from sound_files import RUBBISH, Reader, refuses

SOURCE = Path(lightsecagg_lab.__file__).parent
COVERS = {
    "cell": "experiments/cells.py:measure_cells",
    "report": "experiments/stability.py:_spreads",
    "run": "experiments/asynchronous.py:_read",
}
NO_FILES = {
    "schemes/fedbuff.py:PlainUpload.from_bytes",
    "transport/torch_rpc.py:TorchRpcServer._serve",
}
"""Readers of messages, which the tests of these modules damage."""


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Reader]:
    """One sound file of each kind."""

    def put(name: str, document: object) -> Path:
        (tmp_path / name).write_text(json.dumps(document))
        return tmp_path / name

    cell: Any = SimpleNamespace(key="cell")
    finished = put("cell.json", {"seconds": [1.0, 2.0]})
    report = put("report.json", {"figures": {"median": 2.0, "low": 1.5, "high": 2.5}})
    trained = Cell("fedbuff", "poly", 0)
    run = put("run.json", {"setup": asdict(PAPER_MNIST), "cell": asdict(trained)})
    return {
        "cell": (finished, lambda: measure_cells([cell], tmp_path, lambda *_: None)),
        "report": (report, lambda: _spreads(report)),
        "run": (run, lambda: read_cell(run, PAPER_MNIST, trained)),
    }


def test_S41_every_reader_of_the_laboratory_is_here(sources: dict[str, Reader]) -> None:
    found = {
        f"{path.relative_to(SOURCE).as_posix()}:{name}"
        for path in SOURCE.rglob("*.py")
        for name in readers(path.read_text("utf-8"))
    }
    assert found == set(COVERS.values()) | NO_FILES
    assert set(sources) == set(COVERS)
    for _, read in sources.values():
        read()


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("name", COVERS)
def test_rubbish_is_refused_and_the_file_is_named(
    sources: dict[str, Reader], name: str, rubbish: str
) -> None:
    assert refuses(sources[name], RUBBISH[rubbish])


@pytest.mark.parametrize("name", COVERS)
def test_S41_a_damaged_file_is_read_or_refused(sources: dict[str, Reader], name: str) -> None:
    sound = sources[name][0].read_bytes()
    coins = random.Random(name)
    bred = [mutant(coins, [sound]) for _ in range(150)]
    bred += [sound[:cut] for cut in range(0, len(sound), 7)]
    refused = [refuses(sources[name], content) for content in bred]
    assert any(refused)
