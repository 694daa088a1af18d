"""A federation over PyTorch RPC, found by its entry point: real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.errors import ConfigurationError
from programs import CLIENTS, Programs


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.close()


def test_a_federation_over_pytorch_rpc(programs: Programs) -> None:
    transport = "server.transport=torch-rpc"
    server = programs.server(transport, "rounds.settle=120", flags=("--json",))
    clients = [programs.clients(*ids, settings=(transport,)) for ids in ((0, 1, 2), (3, 4))]
    code, out, err = programs.finish(server, timeout=240)
    assert code == 0, err
    assert "with PyTorch RPC: no TLS, and anybody who reaches it can execute code" in err
    (record,) = json.loads(out)["rounds"]
    assert record["included"] == list(range(CLIENTS))
    assert [programs.finish(process, timeout=240)[0] for process in clients] == [0, 0]
    with np.load(programs.made.server.parent / "result.npz") as stored:
        result = stored["result"]
    expected = np.sum([programs.vector(i) for i in range(CLIENTS)], axis=0)
    np.testing.assert_allclose(result, expected, atol=CLIENTS * record["quantisation_step"])


@pytest.mark.parametrize("role", ["server", "client"])
def test_S21_pytorch_rpc_leaves_the_machine_only_if_the_user_understands(
    programs: Programs, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--unsafe-transport"
    path = programs.made.server if role == "server" else programs.made.clients[0]
    command = [role, "--config", str(path), "--set", "server.transport=torch-rpc"]
    command += ["--set", "server.address=192.0.2.1:7700"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, ConfigurationError)
    assert flag in str(refused.exception)
    seen: list[bool] = []
    program = {"server": "run_server", "client": "run_clients"}[role]
    monkeypatch.setattr(
        f"lightsecagg.drivers.federation.programs.{program}",
        lambda *_, understood, **__: seen.append(understood),
    )
    for flags in ([], [flag]):
        assert CliRunner().invoke(app, command + flags).exit_code == 0
    assert seen == [False, True]
