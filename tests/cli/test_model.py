"""`lightsecagg model export`: the global model as a file of other programs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.errors import ConfigurationError, LightSecAggError, MissingExtra

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from lightsecagg import training  # noqa: E402
from lightsecagg.drivers.federation.config import ServerConfig, load_config  # noqa: E402
from lightsecagg.drivers.federation.jobs import TrainingServer  # noqa: E402
from lightsecagg.drivers.federation.provisioning import provision  # noqa: E402

DIGITS = training.TaskConfig("digits", clients=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's folder of a federation that has completed two rounds."""
    made = provision(tmp_path_factory.mktemp("model") / "fed", 3)
    models = made.server.parent / "state" / "models"
    models.mkdir(parents=True)
    config = load_config(ServerConfig, made.server)
    assert config.training is not None
    job = TrainingServer(config.training, 1.0)
    for completed in (1, 2):
        job.apply(np.full(job.dimension, 0.25), samples=9, completed=completed)
        (models / f"{completed}.npz").write_bytes(job.save())
    return made.server.parent


def export(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["model", "export", *arguments])
    if isinstance(result.exception, LightSecAggError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def expected(rounds: int) -> dict[str, Any]:
    vector = training.initial_model(DIGITS, seed=0) + np.float32(0.25 * rounds)
    return training.state_dict(DIGITS, vector)


def same(state: dict[str, Any], rounds: int) -> bool:
    wanted = expected(rounds)
    return list(state) == list(wanted) and all(
        np.array_equal(np.asarray(state[name]), wanted[name].numpy()) for name in wanted
    )


def test_the_latest_model_is_a_state_dict_that_torch_loads_without_trust(
    server: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model.pt"
    text = export("--config", str(server / "server.toml"), "--out", str(out))
    assert "after 2 rounds" in text
    state = torch.load(out, weights_only=True)
    assert same(state, 2)
    training.load_task(DIGITS).model().load_state_dict(state)


def test_the_state_folder_is_enough_and_an_earlier_round_can_be_had_as_npz(
    server: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model.npz"
    text = export("--state", str(server / "state"), "--which", "1", "--out", str(out), "--json")
    document = json.loads(text)
    assert document["rounds"] == 1
    with np.load(out, allow_pickle=False) as stored:
        assert same(dict(stored), 1)
    assert list(tmp_path.iterdir()) == [out]


def test_the_best_model_is_the_one_that_the_server_noted(server: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(server / "state", state)
    (state / "models" / "best.json").write_text('{"rounds": 1, "figure": "loss", "value": 0.5}')
    config, out = str(server / "server.toml"), tmp_path / "best.pt"
    text = export("--config", config, "--state", str(state), "--which", "best", "--out", str(out))
    assert "after 1 rounds" in text
    assert same(torch.load(out, weights_only=True), 1)
    (state / "models" / "1.npz").unlink()
    with pytest.raises(ConfigurationError, match="no model after 1 rounds is kept; there are: 2"):
        export("--config", config, "--state", str(state), "--which", "best", "--out", str(out))


def test_safetensors_are_written_where_the_library_is(server: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    out = tmp_path / "model.safetensors"
    export("--state", str(server / "state"), "--out", str(out))
    state = safetensors.load_file(out)
    assert same({name: state[name] for name in expected(2)}, 2)


def test_without_the_library_safetensors_are_refused_in_one_line(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtra, match="needs safetensors"):
        export("--state", str(server / "state"), "--out", str(tmp_path / "model.safetensors"))


def test_tied_and_half_precision_entries_survive(tmp_path: Path) -> None:
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    state = {"a": weight, "b": weight, "count": torch.tensor(7)}
    for suffix in (".pt", ".npz"):
        training.save_state(state, tmp_path / f"m{suffix}")
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert torch.equal(loaded["b"], weight)
    with np.load(tmp_path / "m.npz") as arrays:
        assert arrays["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["count"] == 7


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--out", "m.pt"], "give --config"),
        (["--state", "STATE", "--out", "m.doc"], "must end in one of .pt"),
        (["--state", "STATE", "--out", "nowhere/m.pt"], "cannot be written"),
        (["--state", "STATE", "--out", "m.pt", "--which", "9"], "there are: 1, 2"),
        (["--state", "STATE", "--out", "m.pt", "--which", "worst"], "'worst' is no model"),
        (["--state", "STATE", "--out", "m.pt", "--which", "best"], "no figure to judge by"),
        (["--state", "nowhere/state", "--out", "m.pt"], "no configuration file"),
        (["--config", "CONFIG", "--state", "nowhere", "--out", "m.pt"], "holds no model"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    server: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"STATE": str(server / "state"), "CONFIG": str(server / "server.toml")}
    with pytest.raises(ConfigurationError, match=complaint):
        export(*(places.get(argument, argument) for argument in arguments))


def test_another_task_than_the_models_is_refused(server: Path, tmp_path: Path) -> None:
    other = tmp_path / "server.toml"
    text = (server / "server.toml").read_text()
    other.write_text(text.replace('task = "digits"', 'task = "digits"\nmodel = "logistic"'))
    with pytest.raises(ConfigurationError, match="is the configuration the one"):
        export(
            "--config",
            str(other),
            "--state",
            str(server / "state"),
            "--out",
            str(tmp_path / "m.pt"),
        )
