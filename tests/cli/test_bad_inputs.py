"""Whatever is wrong with a command, it says so in one paragraph: what, the limit, the remedy.

The inputs that a new user gave wrongly when the software was reviewed, and their like. No process
is started and nothing is written before they are found.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightsecagg.cli import main
from lightsecagg.cli.main import LABORATORY, app
from lightsecagg.cli.output import exit_codes

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("grpc")

from lightsecagg.drivers.federation.provisioning import provision

SERVER = "server --config fed/server/server.toml"
CLIENT = "client --config fed/clients/0/client-0.toml"
USAGE, FAILURE = 2, 1
RUN = {
    "run --task nosuch": "there is no task 'nosuch'; choose one of digits",
    "run --task nosuch:Task": "there is no module 'nosuch'",
    "run --task own_tasks_of_run:Missing": "defines no 'Missing'",
    "run --task own_tasks_of_run:NotATask": "NotATask is not a subclass of lightsecagg",
    "run --task own_tasks_of_run:Unfinished": "Unfinished lacks client_data",
    "run --task own_tasks_of_run:Broken": "fails with KeyError at own_tasks_of_run.py",
    "run --task own_tasks_of_run:Unbounded": "the metric 'mae' needs two finite bounds",
    "run --task own_tasks_of_run:Empty": "no example for client 0",
    "run --task mnist": "mnist needs --data-dir",
    "run --task csv --data-dir nowhere": "does not exist; it must hold train.csv",
    "run --task folder --data-dir .": "folder needs --image-size",
    "run --task-option slope": "must have the form key=value",
    "run --task-option slope=2": "takes no --task-option",
    "run --partition fair": "choose one of iid, dirichlet",
    "run --model foo": "there is no model 'foo'; choose one of logistic",
    "run --epochs 0": "epochs is 0; it must be at least 1",
    "run --batch-size 0": "batch_size is 0",
    "run --learning-rate -1": "learning_rate is -1.0",
    "run --learning-rate nan": "learning_rate is nan",
    "run --seed -1": "--seed = -1 must be at least 0",
    "run --samples -4": "samples_per_client is -4",
    "run --survivors 99": "survivors U = 99 is out of reach",
    "run --privacy 9": "lower privacy (T) or dropouts (D)",
    "run --dropouts -1": "--dropouts -1",
    "run --dropout 7": "--dropout 7 must be 0 to D = 2",
    "run --rounds 0": "--rounds = 0 must be at least 1",
    "run --bound 0": "--bound 0",
    "run --bound nan": "--bound nan",
    "run --bound inf": "bound = inf",
    "run --clients -3": "clients N = -3 must be at least 3",
    "run --clients 100000": "`lightsecagg simulate` holds many more",
    "run --timeout 0": "--timeout 0 must be a positive",
    "run --out /proc/x": "--out /proc/x cannot be written",
    "run --save-model model.doc": "must end in one of .pt, .safetensors, .npz",
    "run --save-model nowhere/model.pt": "cannot be written",
}
LIBRARY = {
    "task check nosuch": "there is no task 'nosuch'; choose one of digits",
    "task check own_tasks_of_run:NotATask": "NotATask is not a subclass",
    "task check own_tasks_of_run:Unfinished": "Unfinished lacks client_data",
    "task template my-task.py": "is not the name of a Python module",
    "model export --out model.pt": "give --config server.toml",
    "model export --config fed/server/server.toml --out m.pt": "has a round been completed",
    "ledger show --config fed/clients/0/client-0.toml": "start the client once",
    "members list --federation nowhere": "there is no nowhere/authority/members.json",
    "members revoke 9 --federation fed": "clients 9 are no members; there are: 0-3",
    "members revoke 3 --federation fed": "3 clients would remain, too few for rounds",
    "provision --clients 2 --out new": "clients N = 2 must be at least 3",
    "provision --clients 4 --out fed": "fed exists; its keys would be lost",
    "provision --clients 4 --out new --task nosuch": "there is no task 'nosuch'",
    "provision --clients 4 --out new --privacy 3": "lower privacy (T) or dropouts (D)",
    "provision --clients 4 --out new --vectors 3 --task digits": "not both",
    "provision --clients 4 --out new --bound 0": "bound = 0.0 must be positive",
    "provision --clients 4 --out /proc/new": "/proc/new cannot be written",
}
PROGRAMS = {
    "server --config nowhere.toml": "no configuration file nowhere.toml",
    "client --config nowhere.toml": "no configuration file nowhere.toml",
    "server --config fed/server/server.key": "malformed TOML",
    f"{SERVER} --set nonsense": "--set nonsense: write table.key=value",
    f"{SERVER} --set rounds.numbr=3": "rounds.numbr is not a key; known here: number",
    f"{SERVER} --set rounds.number=0": "rounds.number = 0: Input should be",
    f"{SERVER} --set rounds.min_clients=9": "no round would ever start",
    f"{SERVER} --set aggregation.privacy=9": "lower privacy (T) or dropouts (D)",
    f"{SERVER} --set aggregation.protocol=nosuch": "Input should be one of 'lightsecagg'",
    f"{SERVER} --set training.local.epoch=3": "epoch is not a key; known here: ",
    f"{SERVER} --set training.local.epochs=0": "epochs is 0; it must be at least 1",
    f"{SERVER} --set training.local.learning_rate=nan": "learning_rate is nan",
    f"{SERVER} --set training.task.task=nosuch": "there is no task 'nosuch'",
    f"{SERVER} --set training.task.options=3": "options = 3",
    f"{SERVER} --set training.server.algorithm=magic": "[training.server] ",
    f"{SERVER} --set checkpoints.figure=rmse": "give both figure and goal",
    f"{SERVER} --set early_stopping.figure=rmse": "early_stopping.goal is missing",
    f"{SERVER} --set federation.allow_list=nowhere.json": "nowhere.json cannot be read",
    f"{SERVER} --set federation.authority={'0' * 64}": "fetch the newest",
    f"{SERVER} --set federation.session={'0' * 64}": "signed for another session",
    f"{SERVER} --set tls.key=../clients/0/client.key": "is not the key of the certificate",
    f"{SERVER} --set tls.ca=nowhere.pem": "nowhere.pem cannot be read",
    f"{SERVER} --set tls.ca=server.toml": "server.toml is not a certificate in PEM",
    f"{SERVER} --set server.address=here": "'here' must have the form host:port",
    f"{SERVER} --set tls.insecure=true --set server.address=0.0.0.0:7700": "is refused: anybody",
    f"{SERVER} --log-level loud": "must be one of debug, info, warning, error",
    f"{CLIENT} --set client.id=2": "is the certificate of client 0, but this is client 2",
    f"{CLIENT} --set client.identity=../1/identity.key": "is not the key that the allow-list names",
    f"{CLIENT} --set client.identity=client.toml": "cannot be read",
    f"{CLIENT} --set client.max_attempts=3": "client.max_attempts = 3: Input should be less than",
    f"{CLIENT} --set client.bound=0": "client.bound = 0",
    f"{CLIENT} --set training.local.epoch=3": "epoch is not a key; known here: ",
    f"{CLIENT} --set tls.certificate=ca.pem": "is not the key of the certificate",
}
# An identity that no server will accept: trying again would not mend it.
REFUSED = {f"{CLIENT} --set client.id=2"}
USAGE_OF_FLAGS = {
    "run --nosuch": "No such option",
    "provision --out new": "--clients",
    "nosuch": "No such command",
}


@pytest.fixture
def place(own_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with tasks and a federation, in which no process is ever started."""

    def never(*arguments: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("lightsecagg.drivers.federation.demo.run_demo", never)
    monkeypatch.setattr("lightsecagg.drivers.federation.client.FederationClient.run", never)
    monkeypatch.setattr("lightsecagg.drivers.federation.server.FederationServer.run", never)
    provision(own_tasks / "fed", 4)
    log = logging.getLogger("lightsecagg")
    before = (log.handlers[:], log.level, log.propagate)
    yield own_tasks
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


def tell(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and stderr; nothing is ever written to stdout."""
    with pytest.raises(SystemExit) as end, exit_codes():
        app(command.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return end.value.code, err


@pytest.mark.parametrize("command", [*RUN, *LIBRARY, *PROGRAMS])
def test_what_is_wrong_is_said_in_one_paragraph_before_anything_starts(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = tell(command, capsys)
    assert code == (FAILURE if command in REFUSED else USAGE)
    if command in REFUSED:  # by the program itself, which has a log by then
        err = f"error: {json.loads(err)['message']}\n"
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert {**RUN, **LIBRARY, **PROGRAMS}[command] in err
    assert tempfile.gettempdir() not in err.replace(str(place), ""), "a file of its own making"
    assert not (place / "new").exists()


@pytest.mark.parametrize("command", LABORATORY)
def test_a_command_of_the_laboratory_says_in_one_line_what_to_install(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the laboratory is installed here or not."""
    monkeypatch.setattr(main, "added", lambda group: {})
    assert tell(f"{command} --clients 5", capsys) == (
        USAGE,
        f"error: {command} is a command of the laboratory, lightsecagg-lab; "
        "in the repository, run: pip install -c constraints.txt ./lab\n",
    )


@pytest.mark.parametrize("command", USAGE_OF_FLAGS)
def test_a_wrong_flag_is_named_with_the_way_to_the_help(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = tell(command, capsys)
    assert code == USAGE
    assert "Usage: " in err
    assert USAGE_OF_FLAGS[command] in err
