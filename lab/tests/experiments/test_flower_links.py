"""Flower over shaped links: what is refused, what is compared with what, and who is ended."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightsecagg.errors import ConfigurationError
from lightsecagg_lab.experiments import namespaces
from lightsecagg_lab.experiments.cells import Cell, Results
from lightsecagg_lab.experiments.links import LinkCell, RawLinkCell
from lightsecagg_lab.schemes.baseline_traits import ProtocolName

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "flower"))

import deployment
import fedml_cell
import flower_links
import vector_task

BENCHMARK = Path(flower_links.__file__).parent
DIMENSION = 50


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """What the command says when it ends with exit code 2."""

    def ask(*arguments: str) -> str:
        words = ["links", "--busy-anyway", "--out", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", [str(BENCHMARK), *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCHMARK), run_name="__main__")
        assert end.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return ask


def test_without_iproute2_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert "error: shaped links need ip and tc, which this machine does not have" in refused()


def test_without_flower_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr(flower_links, "check_namespaces", lambda: None)
    monkeypatch.setattr(RawLinkCell, "check", lambda self: None)
    monkeypatch.setattr(flower_links, "PROGRAMS", tmp_path)
    said = refused()
    assert "Flower is not installed" in said
    assert "pip install 'lightsecagg[flower]'" in said


def test_a_contestant_that_does_not_exist_is_named(refused: Callable[..., str]) -> None:
    assert "secagg: Flower's contestants are plain, secagg+, lightsecagg" in refused(
        "--only", "secagg"
    )


def test_a_python_without_fedml_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for kind in (RawLinkCell, flower_links.FlowerCell):
        monkeypatch.setattr(kind, "check", lambda self: None)
    monkeypatch.setattr(fedml_cell, "check_namespaces", lambda: None)
    assert "pip install 'fedml[grpc]' there" in refused("--fedml", sys.executable)
    assert "is no Python to be used" in refused("--fedml", str(tmp_path / "python"))


def test_the_command_is_told_without_its_users_folders() -> None:
    given = "links --nodes 4 8 --out /home/me/results --json --fedml /home/me/bin/python"
    assert flower_links._command(given.split()) == (
        "python benchmarks/flower links --nodes 4 8 --fedml PYTHON"
    )


def test_the_apps_get_vectors_of_the_length_that_was_asked_for() -> None:
    module: dict[str, Any] = {"__file__": vector_task.__file__, "__name__": "task"}
    exec(vector_task.source(DIMENSION, 0.0), module)  # noqa: S102 - as Flower imports it
    model = module["new_model"]()
    trained = module["train"](model, *module["load"](3, 4))
    assert trained["vector"].shape == (DIMENSION,)
    assert np.allclose(trained["vector"] - model["vector"], vector_task.change(3, DIMENSION))


def test_an_average_without_one_of_the_nodes_is_no_measurement() -> None:
    first = np.zeros(DIMENSION, dtype=np.float32)
    mean = np.mean([vector_task.change(node, DIMENSION) for node in range(4)], axis=0)
    wrong = np.mean([vector_task.change(node, DIMENSION) for node in range(3)], axis=0)
    right = [{"vector": first}, {"vector": first + mean}]
    for name in deployment.CONTESTANTS:
        cell = flower_links.FlowerCell(name, 4, 98.0, DIMENSION, 1)
        cell.checked(vector_task.error(right, 4))
        with pytest.raises(ConfigurationError, match="is no measurement"):
            cell.checked(vector_task.error([*right, {"vector": first + mean + wrong}], 4))
        with pytest.raises(ConfigurationError, match="is no measurement"):
            cell.checked(float("nan"))


def test_a_wrong_average_of_fedml_is_no_measurement() -> None:
    cell = flower_links.FedMLCell(sys.executable, 4, 98.0, DIMENSION, 1)
    first = np.zeros(DIMENSION)
    mean = np.linspace(-0.05, 0.05, DIMENSION) + 1.5 / 256
    assert cell._error([first, first + mean]) < 1e-9
    with pytest.raises(ConfigurationError, match="is no measurement"):
        cell._error([first, first + mean, first + mean])


FLOWER = {"plain": 10.0, "secagg+": 35.0, "lightsecagg": 15.0}


def made_up(cells: list[Cell]) -> Results:
    """As if every round of a contestant took the same."""
    results: Results = {}
    for cell in cells:
        if isinstance(cell, flower_links.FlowerCell):
            seconds = FLOWER[cell.contestant]
            results[cell.key] = {"cold": 2 * seconds, "rounds": [seconds] * 3, "enrolment": 0.0}
        elif isinstance(cell, flower_links.FedMLCell):
            results[cell.key] = {"cold": 9.0, "rounds": [8.0, 7.0, 9.0], "fedml": "0.9"}
        elif isinstance(cell, LinkCell):
            upload = 0.5 if cell.protocol is ProtocolName.PLAIN else 0.75
            cold = {"upload": upload, "recover": 0.5, "server_cpu": 9.0, "client_cpu": 9.0}
            results[cell.key] = {
                "cold": cold,
                "rounds": {name: [value] * 3 for name, value in cold.items()},
            }
        else:
            results[cell.key] = {"seconds": [1.0] * 5}
    return results


def test_each_system_is_compared_with_its_own_plain() -> None:
    cells = flower_links.links_cells([4], [98.0], 3, DIMENSION)
    report = flower_links.links_report(cells, made_up(cells))
    found = report.document()["rounds"]["N4-98mbit"]
    assert found["Flower: SecAgg+"]["times_plain"]["median"] == 3.5
    assert found["Flower: LightSecAgg (our mod)"]["times_plain"]["median"] == 1.5
    assert found["Flower: FedAvg"]["times_plain"] is None
    assert found["lightsecagg: SecAgg"]["seconds"]["median"] == 1.25
    assert found["lightsecagg: SecAgg"]["times_plain"]["median"] == 1.25
    assert "takes 10.0 times as long as ours" in report.paragraphs[0]
    assert "with the 1.00 s that TCP alone takes for it, 5.0 times" in report.paragraphs[0]
    assert "Of Flower's 10.00 s, TCP alone takes 2.00 s" in report.paragraphs[0]
    assert [row[0] for row in report.tables[0].rows] == ["Flower"] * 3 + ["lightsecagg"] * 4


def test_without_plain_rounds_there_is_no_ratio() -> None:
    cells = flower_links.links_cells([4], [98.0], 3, DIMENSION, ["secagg+"])
    report = flower_links.links_report(cells, made_up(cells))
    assert report.figures["rounds"]["N4-98mbit"]["Flower: SecAgg+"]["times_plain"] is None
    assert "Without protection" not in report.paragraphs[0]


def test_fedml_stands_beside_them_where_it_was_measured() -> None:
    cells = flower_links.links_cells([4], [98.0], 3, DIMENSION, fedml=sys.executable)
    report = flower_links.links_report(cells, made_up(cells))
    found = report.document()["rounds"]["N4-98mbit"]["FedML: LightSecAgg"]
    assert found["seconds"] == {"median": 8.0, "low": 7.5, "high": 8.5}
    assert found["times_plain"] is None
    assert "FedML: LightSecAgg 8.00 s" in report.paragraphs[0]
    assert "FedML 0.9:" in report.paragraphs[-1]


def test_every_cell_has_a_file_of_its_own() -> None:
    cells = flower_links.links_cells([4, 8], [98.0, 802.0], 3, DIMENSION)
    assert len({cell.key for cell in cells}) == len(cells) == 2 * (1 + 2 * (3 + 4))
    assert all(cell.expected_seconds > 0 for cell in cells)


def test_processes_in_sessions_of_their_own_end_with_the_deployment(tmp_path: Path) -> None:
    deployed = deployment.Deployment(tmp_path, 1, lambda line: None)
    grandchild = "import time; time.sleep(3600)"
    child = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
        f"{grandchild!r}], start_new_session=True); time.sleep(3600)"
    )
    deployed._spawn("child", sys.executable, "-c", child)
    bystander = subprocess.Popen(
        [sys.executable, "-c", grandchild],
        env={**os.environ, "FLWR_HOME": str(tmp_path / "flwr-of-another")},
    )
    try:
        deadline = time.monotonic() + 60
        while len(deployed._left()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(deployed._left()) == 2
        deployed._stop()
        assert deployed._left() == []
        assert bystander.poll() is None
    finally:
        deployed._stop()
        bystander.kill()
        bystander.wait()


def test_an_interrupt_while_they_end_by_themselves_leaves_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deployed = deployment.Deployment(tmp_path, 1, lambda line: None)
    deployed._spawn("child", sys.executable, "-c", "import time; time.sleep(3600)")
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deployed._stop(30.0)
    assert deployed._left() == []
