"""Configuration: file, environment, flags; and errors that name the key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.jobs import make_client_job, make_server_job
from lightsecagg.errors import ConfigurationError

FEDERATION = f"""
[federation]
session = "{"ab" * 32}"
authority = "{"cd" * 32}"
allow_list = "allow-list.json"
"""
SERVER = f"""{FEDERATION}
[aggregation]
clients = 5
privacy = 1
dropouts = 1
[vectors]
dimension = 3
"""
CLIENT = f"""{FEDERATION}
[client]
id = 2
bound = 1.0
identity = "identity.key"
[training.task]
task = "npz"
data_dir = "data"
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(SERVER)
    return path


@pytest.fixture
def client(tmp_path: Path) -> Path:
    path = tmp_path / "client.toml"
    path.write_text(CLIENT)
    return path


def load(path: Path, *overrides: str, **environment: str) -> ServerConfig:
    return load_config(ServerConfig, path, overrides, environment)


def test_a_flag_overrides_the_environment_which_overrides_the_file(server: Path) -> None:
    server.write_text(SERVER + "[rounds]\nnumber = 3\nsettle = 7\ngrace = 8\n")
    config = load(
        server,
        "rounds.number=5",
        LIGHTSECAGG_ROUNDS__NUMBER="4",
        LIGHTSECAGG_ROUNDS__SETTLE="6.5",
    )
    assert (config.rounds.number, config.rounds.settle, config.rounds.grace) == (5, 6.5, 8.0)


def test_the_environment_reaches_nested_keys_and_plain_strings(client: Path) -> None:
    environment = {
        "LIGHTSECAGG_TRAINING__TASK__TASK": "digits",
        "LIGHTSECAGG_CLIENT__OVERLAP": "off",
        "LIGHTSECAGG_ROUNDS__NUMBER": "5",  # the server's: a client on this machine ignores it
        "LIGHTSECAGG_NATIVE": "unrelated",
    }
    config = load_config(ClientConfig, client, (), environment)
    assert config.training is not None
    assert config.training.task["task"] == "digits"
    assert config.client.overlap == "off"


def test_paths_are_relative_to_the_file(server: Path, client: Path) -> None:
    config = load(server, 'server.state="journal"', 'tls.ca="/etc/ca.pem"')
    assert config.server.state == server.parent / "journal"
    assert config.federation.allow_list == server.parent / "allow-list.json"
    assert config.tls.ca == Path("/etc/ca.pem")
    other = load_config(ClientConfig, client, (), {})
    assert other.training is not None
    assert other.training.task["data_dir"] == str(client.parent / "data")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds.nmber=5", r"rounds\.nmber is not a key; known here: number, min_clients,"),
        ("nonsense.key=1", r"nonsense is not a key; known here: federation, aggregation,"),
        ("rounds.number=0", r"rounds\.number = 0: .*greater than or equal to 1"),
        ("rounds.number=many", r"rounds\.number = 'many': .*integer"),
        ("rounds.upload=-1", r"rounds\.upload = -1: .*greater than 0"),
        ("rounds.min_clients=6", r"rounds\.min_clients = 6 exceeds aggregation\.clients N = 5"),
        ("aggregation.protocol=x", r"aggregation\.protocol = 'x': .*'lightsecagg'"),
        ("aggregation.threat_model=x", r"'honest-but-curious' or 'malicious-server'"),
        ("aggregation.field=x", r"aggregation\.field = 'x': .*'default' or 'paper'"),
        ("federation.session=abc", r"federation\.session = 'abc': .*pattern"),
        ("rounds=3", r"rounds = 3: .*RoundsTable"),
        ("rounds.number.x=3", r"rounds\.number = .*integer"),
        ("rounds.number", r"--set rounds\.number: write table\.key=value"),
        ("vectors.dimension.x=1", r"--set vectors\.dimension\.x: dimension is not a table"),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(
    server: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(server, override)


def test_no_key_makes_a_party_write_down_what_is_plain(server: Path, client: Path) -> None:
    """A demonstration's processes watch their parties in code."""
    with pytest.raises(ConfigurationError, match=r"server\.trace is not a key"):
        load(server, 'server.trace="averages"')
    with pytest.raises(ConfigurationError, match=r"client\.trace is not a key"):
        load_config(ClientConfig, client, ['client.trace="updates"'], {})


def test_all_mistakes_are_named_at_once(server: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(server, "rounds.number=0", "aggregation.bound=0", "server.prot=1")
    assert all(key in str(error.value) for key in ("rounds.number", "aggregation.bound", "prot"))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(FEDERATION)
    with pytest.raises(ConfigurationError, match="aggregation is missing"):
        load(path)


def test_an_unknown_environment_variable_is_an_error(server: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"LIGHTSECAGG_ROUND__NUMBER: no table \[round\]"):
        load(server, LIGHTSECAGG_ROUND__NUMBER="4")


@pytest.mark.parametrize("content", ["[federation", "a = ", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_an_error(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "server.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError, match=r"server\.toml: "):
        load(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`lightsecagg provision` writes one"):
        load(tmp_path / "server.toml")


def test_exactly_one_job(server: Path) -> None:
    config = load(server)
    with pytest.raises(ConfigurationError, match=r"exactly one of \[training\] and \[vectors\]"):
        make_server_job(None, None, 1.0)
    with pytest.raises(ConfigurationError, match=r"exactly one of \[training\] and \[vectors\]"):
        make_client_job(None, None, 0, bytes(32))
    with pytest.raises(ConfigurationError, match=r"\[vectors\] input must name"):
        make_client_job(None, config.vectors, 0, bytes(32))


@pytest.mark.parametrize(
    "content", [b"no array", b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00 cut short"]
)
def test_a_vector_that_cannot_be_read_is_an_error(server: Path, content: bytes) -> None:
    vector = server.parent / "vector.npy"
    vector.write_bytes(content)
    config = load(server, 'vectors.input="vector.npy"')
    with pytest.raises(ConfigurationError, match=r"vector\.npy is not an \.npy or \.npz file"):
        make_client_job(None, config.vectors, 0, bytes(32))


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "federation.md").read_text()
    section = page[page.index("## Configuration") : page.index("## When something breaks")]
    for kind in (ServerConfig, ClientConfig):
        for table, info in kind.model_fields.items():
            model = next(
                each
                for each in (info.annotation, *get_args(info.annotation))
                if isinstance(each, type) and issubclass(each, BaseModel)
            )
            for key in model.model_fields:
                named = (f"`{table}.{key}`", f"`{key}`")
                assert any(name in section for name in named), f"{table}.{key}"


# -- [training.*] ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("training.local.epoch=3", r"\[training.local\] epoch is not a key; .* epochs, batch_size"),
        ("training.local.epochs=0", r"\[training.local\] epochs is 0; it must be at least 1"),
        ("training.local.epochs=many", r"\[training.local\] epochs = 'many': .* integer"),
        ("training.local.learning_rate=nan", r"learning_rate is nan; it must lie in \(0, inf\)"),
        ("training.task.partition=fair", r"\[training.task\] partition = 'fair': .* 'dirichlet'"),
        ("training.task.options=3", r"\[training.task\] options = 3: "),
        ("training.server.rate=3", r"\[training.server\] rate is not a key; .* learning_rate"),
    ],
)
def test_a_wrong_key_or_value_of_training_is_named_with_what_is_allowed(
    server: Path, override: str, complaint: str
) -> None:
    pytest.importorskip("torch")
    server.write_text(SERVER.replace("[vectors]\ndimension = 3", "[training]"))
    config = load(server, override)
    with pytest.raises(ConfigurationError, match=complaint):
        make_server_job(config.training, None, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        '[training.task.options]\nclasses = 3\nscaled = true\nname = "x"',
        '[training.task]\noptions = [["classes", "3"], ["scaled", "true"], ["name", "x"]]',
    ],
)
def test_the_options_of_an_own_task_are_a_table_or_pairs(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "options_task.py").write_text(
        "from torch import nn\n"
        "from lightsecagg.training import Task\n"
        "class Mine(Task):\n"
        "    def model(self):\n"
        "        assert self.options == {'classes': '3', 'scaled': 'true', 'name': 'x'}\n"
        "        return nn.Linear(2, int(self.options['classes']))\n"
        "    def client_data(self, client):\n"
        "        raise NotImplementedError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server.write_text(SERVER.replace("[vectors]\ndimension = 3", options))
    config = load(server, "training.task.task=options_task:Mine")
    assert make_server_job(config.training, None, 1.0).dimension == 9
