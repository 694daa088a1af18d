"""A user's first hour, from an empty machine to a revoked client, in one go.

What the documents tell a newcomer to type, typed into a fresh environment that pip has filled as
it likes (no constraints.txt). PyTorch, half a gigabyte of it, is the one of the tests.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from newcomer import Newcomer, ten_lines, wheel_of_this_tree

pytest.importorskip("torch")
pytest.importorskip("sklearn")

SETTINGS = "--set training.local.epochs=10 --set training.local.learning_rate=0.2"

# In plain torch: nothing of ours is imported.
LOAD = """
import sys
import torch
from torch import nn

network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
network.load_state_dict(torch.load("model.pt", weights_only=True))
torch.manual_seed(1)
labels = torch.randint(3, (600,))
inputs = 3 * torch.eye(3, 4)[labels] + torch.randn(600, 4)
assert "lightsecagg" not in sys.modules
print((network(inputs).argmax(1) == labels).float().mean().item())
"""


class FirstHour(Newcomer):
    """A newcomer who trains on data of its own, in the folder of each client."""

    fed = "fed"

    def does(self, command: str) -> str:
        """What a command that must work prints."""
        done = self.lightsecagg(command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def write_task(self) -> None:
        """The template, with the data of whoever runs it, and without test data."""
        path = self.folder / "my_task.py"
        text = path.read_text()
        text = text.replace(
            "return self._clouds(seed=client + 1, samples=60)",
            'stored = np.load(self.config.data_dir / "patients.npz")\n'
            '        return Examples.from_arrays(stored["x"], stored["y"])',
        )
        text = re.sub(r"    def test_data\(self\).*?\n\n", "", text, flags=re.DOTALL)
        assert "test_data" not in text
        path.write_text(text.replace("import torch\n", "import numpy as np\nimport torch\n", 1))

    def give_data(self, client: int) -> None:
        """Client's own patients, in its own folder, which its configuration names."""
        folder = self.folder / self.fed / "clients" / str(client)
        rng = np.random.default_rng(client)
        labels = rng.integers(3, size=80)
        inputs = 3 * np.eye(3, 4)[labels] + rng.normal(size=(80, 4))
        np.savez(folder / "patients.npz", x=inputs.astype(np.float32), y=labels)
        path = folder / f"client-{client}.toml"
        text = path.read_text()
        path.write_text(text.replace("[training.task]", '[training.task]\ndata_dir = "."'))

    def server(self, rounds: int) -> subprocess.Popen[str]:
        command = f"server --config {self.fed}/server/server.toml --json {SETTINGS}"
        waits = "--set rounds.min_clients=4 --set rounds.wait_for_clients=800"
        options = f"{command} {waits} --set rounds.number={rounds}".split()
        return self.start("-m", "lightsecagg", *options)

    def clients(self, *clients: int) -> subprocess.Popen[str]:
        """In one process, which trains by itself: each would load torch once more."""
        files = [f"--config {self.fed}/clients/{client}/client-{client}.toml" for client in clients]
        command = f"client {' '.join(files)} {SETTINGS}"
        options = f"{command} --set client.overlap=thread --set client.reconnect=800.0".split()
        return self.start("-m", "lightsecagg", *options)

    def federate(self, server: subprocess.Popen[str], clients: list[int]) -> list[list[int]]:
        """Server and clients to their end; who was included in each round of this run."""
        running = [self.clients(*clients[:-1]), self.clients(clients[-1])]
        out, err = server.communicate()
        assert server.returncode == 0, err
        for process in running:
            _, said = process.communicate()
            assert process.returncode == 0, (said, err)
        records = json.loads(out)["rounds"]
        assert all(record["figures"] == {} for record in records), "the server has no test data"
        return [record["included"] for record in records]

    def accuracy(self) -> float:
        """Of the model that is exported now."""
        self.does(f"model export --config {self.fed}/server/server.toml --out model.pt")
        done = self.run("-c", LOAD)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[FirstHour]:
    made = FirstHour(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three minutes on a machine that has nothing else to do
@pytest.mark.skipif("LIGHTSECAGG_OFFLINE" in os.environ, reason="LIGHTSECAGG_OFFLINE is set")
def test_the_first_hour(newcomer: FirstHour, tmp_path: Path) -> None:
    newcomer.install(f"{wheel_of_this_tree(tmp_path)}[grpc]")
    for package in ("torch", "sklearn"):
        newcomer.borrow(package)

    # Ten lines, and a whole federation on this machine.
    assert newcomer.run("-c", ten_lines()).stdout.startswith("(0, 1, 2, 3, 5) 1270")
    run = "run --clients 4 --rounds 1 --epochs 1 --dropout 0 --overlap thread --json"
    report = json.loads(newcomer.does(f"{run} --timeout 800 --out report"))
    assert report["matches_plain_average"] is True

    # A task of one's own.
    newcomer.does("task template my_task.py")
    assert "accuracy" in newcomer.does("task check my_task:MyTask")
    newcomer.write_task()

    # Provision; a server without test data, and four clients with data of their own.
    port = free_port()
    newcomer.does(f"provision --clients 4 --task my_task:MyTask --port {port} --out fed")
    for client in range(4):
        newcomer.give_data(client)
    assert newcomer.federate(newcomer.server(1), [0, 1, 2, 3]) == [[0, 1, 2, 3]]

    # One client leaves, another comes, and it goes on where it ended.
    newcomer.does("members add --federation fed")
    newcomer.does("members revoke 3 --federation fed")
    newcomer.give_data(4)
    server = newcomer.server(3)
    revoked = newcomer.clients(3)
    _, said = revoked.communicate()
    assert revoked.returncode == 1
    assert "client 3 is not on the allow-list" in said
    assert newcomer.federate(server, [0, 1, 2, 4]) == [[0, 1, 2, 4]] * 2
    history = json.loads((tmp_path / "fed/server/state/rounds.json").read_text())
    assert [record["round"] for record in history] == [1, 2, 3]
    assert newcomer.accuracy() > 0.7
