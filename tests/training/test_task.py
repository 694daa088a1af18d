from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lightsecagg.training as training
from lightsecagg.cli.task import app, check_task, parse_options
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.training import LocalConfig, Task, TaskConfig, load_task

ROOT = Path(__file__).parents[2]
TEMPLATE = "lightsecagg.training.task_template:MyTask"


def run(*arguments: str) -> Any:
    from typer.testing import CliRunner

    return CliRunner().invoke(app, list(arguments))


def test_the_names_of_the_package_are_the_declared_ones() -> None:
    assert sorted(training._HOME) == sorted(training.__all__)
    assert all(not isinstance(getattr(training, name), ModuleType) for name in training.__all__)
    assert dir(training) == sorted(training.__all__)
    with pytest.raises(AttributeError):
        _ = training.nonsense


def test_importing_the_package_and_its_configuration_does_not_import_torch() -> None:
    code = (
        "import sys, lightsecagg.training, lightsecagg.cli.task\n"
        "from lightsecagg.training import LocalConfig, ServerOptimizer, TaskConfig, pack\n"
        "import lightsecagg.training.partition\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sklearn', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "lightsecagg.training.trainer", raising=False)
    with pytest.raises(ConfigurationError, match=r"training needs torch; .* '\.\[torch\]'"):
        _ = training.local_update


def test_a_task_is_loaded_by_import_path_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(load_task(TaskConfig(TEMPLATE))).__name__ == "MyTask"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert run("template", "fresh_task.py").exit_code == 0
    for name in ("fresh_task:MyTask", "fresh_task.py:MyTask", f"{tmp_path}/fresh_task.py:MyTask"):
        assert isinstance(load_task(TaskConfig(name)), Task)
    sys.modules.pop("fresh_task")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "Task", "defines no 'Task'"),
        ("Task = 3", "Task", "defines no 'Task'"),
        ("def make(config): return 3", "make", "returned a int, not a subclass"),
        (
            "from lightsecagg.training.task_template import MyTask\n"
            "class Silent(MyTask):\n    def __init__(self, config): pass",
            "Silent",
            r"must call super\(\).__init__\(config\)",
        ),
    ],
)
def test_a_file_without_a_proper_task_is_explained(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(source)
    with pytest.raises(ConfigurationError, match=message):
        load_task(TaskConfig(f"{path}:{name}"))


def test_modules_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no module 'no_such_module_at_all'"):
        load_task(TaskConfig("no_such_module_at_all:Task"))
    with pytest.raises(ConfigurationError, match=r"nothing.py does not exist"):
        load_task(TaskConfig(f"{tmp_path}/nothing.py:Task"))
    # A module that exists but lacks one of its own imports must show that one.
    (tmp_path / "needy.py").write_text("import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_task(TaskConfig(f"{tmp_path}/needy.py:Task"))


def test_a_bound_with_room_is_suggested() -> None:
    report = check_task(
        TaskConfig("synthetic-mnist", clients=2, samples_per_client=3), LocalConfig(), 0
    )
    room = report["suggested_bound"] / report["largest_change"]
    assert 1.9 < room < 2.1
    assert len(f"{report['suggested_bound']:g}".replace(".", "").strip("0").split("e")[0]) <= 2


def test_unknown_built_in_tasks_and_settings_are_refused() -> None:
    with pytest.raises(ParameterError, match="there is no task 'imagenet'; choose one of digits"):
        load_task(TaskConfig("imagenet"))
    with pytest.raises(ParameterError, match="choose one of synthetic-mnist"):
        load_task(TaskConfig("synthetic"))
    with pytest.raises(ParameterError, match="takes no --task-option"):
        load_task(TaskConfig("digits", options=(("a", "b"),)))
    with pytest.raises(ParameterError, match="synthetic data has no partition"):
        load_task(TaskConfig("synthetic-mnist", partition="shards"))


@pytest.mark.parametrize("name", list(training.PAPER_MODELS))
def test_synthetic_tasks_have_the_papers_shapes(name: str) -> None:
    paper = training.PAPER_MODELS[name]
    task = load_task(TaskConfig(f"synthetic-{name}", clients=2, samples_per_client=3))
    data: Any = task.client_data(1)
    assert tuple(data.inputs.shape) == (3, *paper.shape)
    assert training.model_layout(task).parameters == paper.parameters
    assert torch.equal(data.inputs, task.client_data(1).inputs)  # type: ignore[attr-defined]
    assert not torch.equal(data.inputs, task.client_data(0).inputs)  # type: ignore[attr-defined]


def test_a_synthetic_mobilenet_trains_at_32_pixels() -> None:
    task = TaskConfig("synthetic-cifar10", clients=2, samples_per_client=5)
    model = training.initial_model(task)
    update = training.local_update(task, 0, model, LocalConfig(batch_size=4, learning_rate=0.01))
    assert update.delta.shape == (3_111_462 + 12_144,)


def test_evaluating_without_test_data_says_so() -> None:
    class Blind(load_task(TaskConfig(TEMPLATE)).__class__):  # type: ignore[misc]
        def test_data(self) -> Any:
            return Task.test_data(self)

    task = Blind(TaskConfig("blind"))
    with pytest.raises(ConfigurationError, match="'blind' has no test data"):
        training.evaluate(task, training.initial_model(task))


# --- the command --------------------------------------------------------------------------------


def test_the_template_is_written_once_and_passes_its_own_check(tmp_path: Path) -> None:
    path = tmp_path / "tumours.py"
    written = run("template", str(path))
    assert written.exit_code == 0
    assert f"task check {path}:MyTask" in written.output
    assert "--task tumours:MyTask" in path.read_text()
    again = run("template", str(path))
    assert isinstance(again.exception, ConfigurationError)
    checked = run("check", f"{path}:MyTask", "--epochs", "5", "--json")
    assert checked.exit_code == 0, checked.output
    report = json.loads(checked.output)
    assert report["vector_length"] == report["parameters"] == 4 * 16 + 16 + 16 * 3 + 3
    assert report["samples"] == 60
    assert report["after"]["accuracy"] > report["before"]["accuracy"]


@pytest.mark.parametrize("name", ["my-task.py", "my_task.txt"])
def test_the_template_needs_a_module_name(tmp_path: Path, name: str) -> None:
    assert isinstance(run("template", str(tmp_path / name)).exception, ParameterError)
    assert isinstance(run("template", str(tmp_path / "no" / "a.py")).exception, ConfigurationError)


def test_check_reports_to_people_too() -> None:
    result = run("check", "digits", "--partition", "dirichlet", "--no-evaluate")
    assert result.exit_code == 0
    assert "vector length           4,810" in result.output
    assert "accuracy" not in result.output


def test_check_finds_randomness_that_no_seed_controls(tmp_path: Path) -> None:
    path = tmp_path / "dice.py"
    path.write_text(
        "import os, torch\n"
        "from lightsecagg.training.task_template import MyTask\n"
        "class Dice(MyTask):\n"
        "    def loss(self, model, batch):\n"
        "        return super().loss(model, batch) * (1 + os.urandom(1)[0])\n"
        "class Idle(MyTask):\n"
        "    def loss(self, model, batch):\n"
        "        return super().loss(model, batch) * 0\n"
    )
    with pytest.raises(ConfigurationError, match="trains differently each time"):
        check_task(TaskConfig(f"{path}:Dice"), LocalConfig(epochs=5), 0)
    with pytest.raises(ConfigurationError, match="changed nothing"):
        check_task(TaskConfig(f"{path}:Idle"), LocalConfig(), 0)


def test_list_names_every_task_and_model() -> None:
    listed = json.loads(run("list", "--json").output)
    assert {"digits", "csv", "synthetic-gld23k"} <= set(listed["tasks"])
    assert "efficientnet-b0" in listed["models"]
    text = run("list").output
    assert all(name in text for name in (*listed["tasks"], *listed["models"]))


def test_options_are_pairs() -> None:
    assert parse_options(["a=1", "b=x=y"]) == (("a", "1"), ("b", "x=y"))
    for bad in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ParameterError, match="--task-option"):
            parse_options(bad)


# --- the example --------------------------------------------------------------------------------


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_task.py"), run_name="__main__")
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("round 10: accuracy")
    assert float(last.split("accuracy ")[1].split(",")[0]) > 0.9
