"""Several clients in one process, and what a server says before it listens."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightsecagg.drivers.federation import programs
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.provisioning import provision
from lightsecagg.errors import ConfigurationError, Refused, RemoteProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters, ShareMode
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.settings import Settings


def test_a_client_that_fails_is_reported_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finished: list[str] = []

    class Client:
        def __init__(self, name: str, *, understood: bool) -> None:
            self.name = name

        async def run(self) -> None:
            if self.name == "refused":
                raise Refused("the certificate is another client's")
            async with asyncio.timeout(10):
                while "another client's" not in caplog.text:
                    await asyncio.sleep(0.01)
            finished.append(self.name)

    monkeypatch.setattr(programs, "build_client", Client)
    configs: Any = ["patient", "refused", "patient too"]
    with pytest.raises(Refused, match="another client's"):
        programs.run_clients(configs)
    assert sorted(finished) == ["patient", "patient too"]


def test_no_full_collection_of_garbage_falls_into_a_round() -> None:
    """Half a million objects are more than a round of 200 clients has under way."""
    program = """
import gc
from lightsecagg.drivers.federation.programs import prepare_to_serve
prepare_to_serve()
before = gc.get_stats()[2]["collections"]
shares = [(i, [i]) for i in range(250_000)]
print(gc.get_stats()[2]["collections"] - before, gc.isenabled())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.split() == ["0", "True"]


def test_torch_is_loaded_before_the_server_waits_for_a_client(tmp_path: Path) -> None:
    """Loaded on the loop in the first round, it would cost a client on a busy machine the round."""
    made = provision(tmp_path / "federation", 3, privacy=1, dropouts=0)
    program = """
import sys
from pathlib import Path
from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.programs import build_client
config = load_config(ClientConfig, Path(sys.argv[1]))
before = "torch" in sys.modules
build_client(config)
print(before, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(made.clients[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(("max_samples", "coarse"), [(100_000, True), (1_000, False)])
def test_a_coarse_rounding_is_mentioned(
    caplog: pytest.LogCaptureFixture, max_samples: int, coarse: bool
) -> None:
    quantizer = Quantizer(DEFAULT_FIELD, 1.0, 200, max_samples, weighted=True)
    settings = Settings("lightsecagg", Parameters(200, 1, 1), quantizer, 3, bytes(32), 1, bytes(32))
    programs._mind_the_rounding(settings)
    assert ("lower aggregation.max_samples = 100000" in caplog.text) is coarse


def test_S49_a_server_says_how_short_keys_are_decoded_and_what_they_assume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = Parameters(200, 1, 1, share_mode=ShareMode.SHORT_KEY)
    quantizer = make_quantizer(parameters, 3, 1.0)
    settings = Settings("lightsecagg", parameters, quantizer, 3, bytes(32), 1, bytes(32))
    programs._mind_the_rounding(settings)
    assert "exact decoding; short keys are experimental" in caplog.text


@pytest.mark.unix
def test_a_server_that_may_not_open_enough_files_says_so_before_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provision(tmp_path / "federation", 60, vectors=5, privacy=10, dropouts=10)
    config = load_config(ServerConfig, made.server)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (56, 56))
    wanted = r"may open 56 files and 60 clients need 184: .* raise the hard limit of RLIMIT_NOFILE"
    with pytest.raises(ConfigurationError, match=wanted):
        programs.build_server(config)
    assert not (made.server.parent / "state").exists()


@pytest.mark.unix
@pytest.mark.parametrize(
    ("page", "needed"), [("metrics_port", 184 + 16), ("dashboard_port", 184 + 64)]
)
def test_R60_the_connections_of_pages_are_left_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, needed: int
) -> None:
    made = provision(tmp_path / "federation", 60, vectors=5, privacy=10, dropouts=10)
    config = load_config(ServerConfig, made.server, [f"server.{page}=7780"])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (56, 56))
    with pytest.raises(ConfigurationError, match=f"60 clients need {needed}: "):
        programs.build_server(config)


@pytest.mark.parametrize("output", ["nowhere/result.npz", "."])
def test_an_output_that_cannot_be_written_is_found_before_the_round(
    tmp_path: Path, output: str
) -> None:
    made = provision(tmp_path / "federation", 3, vectors=5, privacy=1, dropouts=0)
    config = load_config(ServerConfig, made.server, [f'vectors.output="{output}"'])
    with pytest.raises(ConfigurationError, match=r"\[vectors\] output .* cannot be written: name"):
        programs.build_server(config)


@pytest.mark.parametrize(
    ("max_dimension", "accepted"), [(2**26, 2**30), (2**28, 2**30 + 2**20), (2**40, 2**32 - 1)]
)
def test_a_client_that_expects_a_larger_model_accepts_the_message_that_carries_it(
    tmp_path: Path, max_dimension: int, accepted: int
) -> None:
    made = provision(tmp_path / "federation", 3, vectors=5, privacy=1, dropouts=0)
    np.save(made.clients[0].with_name("vector.npy"), np.zeros(5))
    overrides = [f"client.max_dimension={max_dimension}"]
    client = programs.build_client(load_config(ClientConfig, made.clients[0], overrides))
    transport: Any = client._communicator
    transport._accept(accepted)
    with pytest.raises(RemoteProtocolError, match=r"larger models raises its max_dimension"):
        transport._accept(accepted + 1)


@pytest.mark.parametrize(("survivors", "warned"), [("0", True), ("3", False)])
def test_R59_a_server_that_one_liar_can_stop_warns_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, survivors: str, warned: bool
) -> None:
    made = provision(tmp_path / "federation", 6, vectors=5)
    config = load_config(ServerConfig, made.server, [f"aggregation.survivors={survivors}"])
    programs.build_server(config)
    assert ("one client that lies about its shares can stop every round" in caplog.text) is warned
