"""`lightsecagg server` and `lightsecagg client` as programs: real processes, sockets and TLS."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import socket
import subprocess
import termios
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from typer.testing import CliRunner

from lightsecagg import system
from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.programs import build_client
from lightsecagg.drivers.federation.provisioning import free_port, provision
from lightsecagg.drivers.transport.certificates import Authority, Validity
from lightsecagg.drivers.transport.grpc import GrpcClient
from lightsecagg.drivers.transport.tls import Credentials
from lightsecagg.errors import ConfigurationError, TransportError
from lightsecagg.protocol.interface import Update
from programs import CLIENTS, COMMAND, DIMENSION, Programs, fetch, poll


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.close()


def test_aggregation_without_training_from_files_to_a_file(programs: Programs) -> None:
    server = programs.server("rounds.number=1", "rounds.settle=20", flags=("--json",))
    clients = programs.clients(*range(CLIENTS))
    code, out, err = programs.finish(server)
    assert code == 0, err
    (record,) = json.loads(out)["rounds"]
    assert record["included"] == list(range(CLIENTS))
    assert programs.finish(clients)[0] == 0
    with np.load(programs.made.server.parent / "result.npz") as stored:
        result = stored["result"]
        assert int(stored["samples"]) == CLIENTS
    expected = np.sum([programs.vector(i) for i in range(CLIENTS)], axis=0)
    np.testing.assert_allclose(result, expected, atol=CLIENTS * record["quantisation_step"])
    report = json.loads((programs.made.server.parent / "state" / "rounds.json").read_text())
    assert report == [record]
    # Off a terminal every line of the log is one JSON object.
    lines = [json.loads(line) for line in err.splitlines()]
    said = [line["message"] for line in lines]
    assert f"listening on 127.0.0.1:{programs.port}" in said[:2]  # on Windows, a warning first
    assert any(line.startswith("round 1 is done after ") for line in said)
    assert said.index("goodbye to 5 clients: the federation has finished") > 0
    assert all(datetime.fromisoformat(line["time"]).utcoffset() is not None for line in lines)


@pytest.mark.parametrize("role", ["server", "client"])
def test_a_transport_that_is_not_installed_is_named_with_those_that_are(
    programs: Programs, role: str
) -> None:
    path = programs.made.server if role == "server" else programs.made.clients[0]
    command = [role, "--config", str(path), "--set", "server.transport=pigeons"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, ConfigurationError)
    assert "'pigeons' is not installed; there are: grpc" in str(refused.exception)


def test_a_client_takes_its_leave_at_SIGTERM(programs: Programs) -> None:
    """As the first process of a container too, whom no signal ends by default."""
    server = programs.server("rounds.min_clients=5", "rounds.wait_for_clients=600")
    client = programs.clients(0, 1)
    poll(lambda: programs.log(server).count("connected (") == 2, 120)
    client.send_signal(system.STOP[0])
    code, _, err = programs.finish(client)
    stop = system.STOP[0]
    assert (code, f"{stop.name}: left" in err) == (128 + stop, True)
    poll(lambda: programs.log(server).count("disconnected: closed by the peer") == 2)


@pytest.mark.unix  # on Windows there is a warning about secrets
def test_quiet_programs_leave_the_log_empty(programs: Programs) -> None:
    server = programs.server("rounds.settle=20", flags=("--quiet",))
    poll(lambda: is_listening(programs.port))
    configs = [
        option for path in programs.made.clients.values() for option in ("--config", str(path))
    ]
    clients = programs.start("client", *configs, "--quiet")
    assert programs.finish(server) == (0, "", "")
    assert programs.finish(clients) == (0, "", "")
    code, _, err = programs.finish(programs.server(flags=("--quiet", "--log-level", "debug")))
    assert code == 2
    assert "give either --quiet or --log-level debug" in err


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.unix  # on Windows there is a warning about secrets
def test_a_terminal_shows_lines_and_below_them_the_phase_under_way(
    programs: Programs, quiet: bool
) -> None:
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 200))
    command = [*COMMAND, "server", "--config", str(programs.made.server), *["--quiet"] * quiet]
    command += ["--set", f"rounds.min_clients={CLIENTS}"]  # who came too late would hear no goodbye
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    try:
        clients = programs.clients(*range(CLIENTS))
        shown = bytearray()
        while True:
            try:
                shown += os.read(master, 65536)
            except OSError:  # EIO: the last process that had the terminal is gone
                break
        assert server.communicate()[0] == b""
    finally:
        server.kill()
        server.wait()
        os.close(master)
    assert server.returncode == 0
    assert programs.finish(clients)[0] == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n")
    if quiet:
        assert text == ""
        return
    assert re.search(r"^\d{4}-\d\d-\d\dT[\d:.+-]+ INFO    listening on 127", text, re.MULTILINE)
    assert re.search(r"INFO    round 1 is done after .* s: [45] of 5 clients", text)
    assert re.search(r"connect .*━.* \d/5", text)
    assert '"message"' not in text


def test_S06_clients_that_were_restarted_do_not_sum_a_vector_twice(programs: Programs) -> None:
    """A second sum without client 4 would reveal its vector as the difference."""
    clients = programs.clients(*range(CLIENTS))
    assert programs.finish(programs.server("rounds.min_clients=5"))[0] == 0
    assert programs.finish(clients)[0] == 0
    before = (programs.made.server.parent / "result.npz").read_bytes()
    clients = programs.clients(*range(CLIENTS - 1))
    code, _, err = programs.finish(programs.server("rounds.number=2", "rounds.retries=0"))
    assert code == 3, err
    code, _, err = programs.finish(clients)
    assert code == 3
    for client in range(CLIENTS - 1):
        assert f"client {client} sits round 2 out: this update is spent" in err
    assert (programs.made.server.parent / "result.npz").read_bytes() == before


def test_vectors_provisioned_by_the_command_are_averaged_over_sockets(tmp_path: Path) -> None:
    """Nothing but what `lightsecagg provision` wrote, and every client's file."""
    out, port = tmp_path / "fed", free_port()
    command = ["provision", "--clients", "4", "--privacy", "1", "--dropouts", "1", "--port"]
    command += [str(port), "--vectors", "6", "--weighted", "--bound", "100", "--out", str(out)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert f"{out}/clients/0/vector.npz: put client 0's 6 numbers there" in shown.output
    vectors = np.random.default_rng(0).uniform(-100, 100, (4, 6))
    samples = np.array([1, 2, 3, 40])
    clients = [out / "clients" / str(i) / f"client-{i}.toml" for i in range(4)]
    options = [option for path in clients for option in ("--config", str(path))]
    missing = subprocess.run(
        [*COMMAND, "client", *options], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "vector.npz does not exist; write this client's vector there" in missing.stderr
    for path, vector, count in zip(clients, vectors, samples, strict=True):
        np.savez(path.parent / "vector.npz", vector=vector, samples=count)
    serve = [*COMMAND, "server", "--config", str(out / "server/server.toml"), "--json"]
    serve += ["--set", "rounds.min_clients=4"]
    take_part = subprocess.Popen([*COMMAND, "client", *options])
    try:
        served = subprocess.run(serve, capture_output=True, text=True, timeout=60, check=False)
        assert (served.returncode, take_part.wait(30)) == (0, 0), served.stderr
    finally:
        take_part.kill()
        take_part.wait()
    (record,) = json.loads(served.stdout)["rounds"]
    assert record["included"] == [0, 1, 2, 3]
    with np.load(out / "server/result.npz") as stored:
        assert int(stored["samples"]) == samples.sum()
        tolerance = 4 * record["quantisation_step"] / samples.sum()
        expected = samples @ vectors / samples.sum()
        np.testing.assert_allclose(stored["result"], expected, atol=tolerance)


class Patient:
    """A client's job that lasts until it is told to end."""

    dimension = DIMENSION

    def __init__(self, vector: np.ndarray[Any, Any]) -> None:
        self.vector, self.started, self.go = vector, threading.Event(), threading.Event()

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        self.started.set()
        assert self.go.wait(60)
        return Update(self.vector)


def test_R40_sigterm_finishes_the_round_and_metrics_tell_of_it(programs: Programs) -> None:
    """The signal comes while one client trains; the round goes on to its end, then exit code 0."""
    port = free_port()
    server = programs.server(
        "rounds.number=1000", "rounds.min_clients=5", f"server.metrics_port={port}"
    )
    programs.clients(0, 1, 2, 3)
    job = Patient(programs.vector(4))
    config = load_config(ClientConfig, programs.made.clients[4], ["client.overlap=thread"])

    async def scenario() -> None:
        client = asyncio.create_task(build_client(config, job=job).run())
        assert await asyncio.to_thread(job.started.wait, 60)
        health = json.loads(await asyncio.to_thread(fetch, port, "health") or b"{}")
        assert (health["state"], health["rounds_done"]) == ("running", 0)
        server.send_signal(system.STOP[0])
        await asyncio.to_thread(poll, lambda: "finishing the current round" in programs.log(server))
        assert server.poll() is None
        job.go.set()
        code, _, err = await asyncio.to_thread(programs.finish, server)
        assert code == 0, err
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)

    asyncio.run(scenario())
    report = json.loads((programs.made.server.parent / "state" / "rounds.json").read_text())
    assert [record["included"] for record in report] == [list(range(CLIENTS))]


@pytest.mark.parametrize("second", [signal.SIGINT, system.STOP[0]])
def test_R40_a_second_signal_of_either_kind_ends_the_server_at_once(
    programs: Programs, second: signal.Signals
) -> None:
    """Though the round cannot end: one of its clients trains for as long as it likes."""
    server = programs.server("rounds.min_clients=5", "rounds.upload=600")
    programs.clients(0, 1, 2, 3)
    job = Patient(programs.vector(4))
    config = load_config(ClientConfig, programs.made.clients[4], ["client.overlap=thread"])

    async def scenario() -> None:
        client = asyncio.create_task(build_client(config, job=job).run())
        assert await asyncio.to_thread(job.started.wait, 60)
        server.send_signal(system.STOP[0])
        await asyncio.to_thread(poll, lambda: "finishing the current round" in programs.log(server))
        server.send_signal(second)
        code, _, err = await asyncio.to_thread(programs.finish, server)
        assert code in (128 + second, -second), err
        assert "Traceback" not in err
        job.go.set()
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)

    asyncio.run(scenario())


def test_metrics_and_health_after_a_round(programs: Programs) -> None:
    port = free_port()
    # The vectors are spent after the first round: the later ones are aborted, again and again.
    programs.server(
        "rounds.number=2", "rounds.settle=20", "rounds.retries=9999", f"server.metrics_port={port}"
    )
    programs.clients(*range(CLIENTS))
    poll(lambda: json.loads(fetch(port, "health") or b"{}").get("rounds_aborted", 0) >= 1)
    health = json.loads(fetch(port, "health") or b"{}")
    assert (health["status"], health["rounds_done"], health["rounds_wanted"]) == ("ok", 1, 2)
    assert health["connected"] == health["admitted"] == CLIENTS
    assert set(health["certificates"]) == {"server", "authority"}
    metrics = fetch(port, "metrics") or b""
    assert b'lightsecagg_rounds_total{outcome="done"} 1.0' in metrics
    assert b'lightsecagg_rounds_total{outcome="aborted"}' in metrics
    assert b"lightsecagg_dropouts_total{phase=" in metrics
    for phase in (b"advertise", b"share", b"upload", b"agree", b"recover"):
        assert b'lightsecagg_phase_seconds_count{phase="%s"}' % phase in metrics
        assert b'lightsecagg_bytes_total{direction="in",phase="%s"}' % phase in metrics
    assert fetch(port, "secrets") is None


def test_R40_sigterm_while_nobody_is_there_ends_at_once(programs: Programs) -> None:
    server = programs.server("rounds.wait_for_clients=600")
    poll(lambda: is_listening(programs.port))
    server.send_signal(system.STOP[0])
    assert programs.finish(server, timeout=20)[0] == 0


def test_R35_a_server_without_clients_gives_up_with_exit_code_3(programs: Programs) -> None:
    code, _, err = programs.finish(programs.server("rounds.wait_for_clients=0.5"))
    assert code == 3
    assert "only 0 clients connected within 0.5 s, 4 are needed" in err


def test_a_second_server_on_the_same_state_is_refused(programs: Programs) -> None:
    port = free_port()
    programs.server("rounds.wait_for_clients=600", f"server.metrics_port={port}")
    poll(lambda: fetch(port, "health"))
    code, _, err = programs.finish(programs.server('server.address="127.0.0.1:0"'))
    assert code == 2
    assert "another server uses the state folder" in err


def test_print_config_shows_the_effective_configuration(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSECAGG_ROUNDS__NUMBER", "7")
    code, out, _ = programs.finish(programs.server("rounds.settle=2.5", flags=("--print-config",)))
    assert code == 0
    shown = json.loads(out)
    assert (shown["rounds"]["number"], shown["rounds"]["settle"]) == (7, 2.5)
    assert shown["aggregation"]["share_mode"] == "seeded"
    path = str(programs.made.clients[2])
    code, out, _ = programs.finish(programs.start("client", "--config", path, "--print-config"))
    assert code == 0
    assert json.loads(out)["clients"][0]["client"]["id"] == 2


# -- who may not take part (S24) -----------------------------------------------------------------


def issue(programs: Programs, client: int, validity: Validity, folder: str) -> tuple[Path, Path]:
    """A certificate of the federation's own authority, as its owner could issue it."""
    home = programs.made.directory / "authority"
    authority = Authority(
        load_pem_private_key((home / "ca.key").read_bytes(), None),  # type: ignore[arg-type]
        load_pem_x509_certificate((home / "ca.pem").read_bytes()),
        validity,
    )
    issued = authority.issue_client(client)
    target = programs.folder / folder
    target.mkdir()
    (target / "own.pem").write_bytes(issued.certificate)
    (target / "own.key").write_bytes(issued.key)
    (target / "own.key").chmod(0o600)
    return target / "own.pem", target / "own.key"


def test_S24_clients_that_may_not_take_part_hear_why(programs: Programs) -> None:
    server = programs.server("rounds.wait_for_clients=600")
    other = provision(programs.folder / "other", 4, port=programs.port)
    elsewhere = other.clients[0].parent
    home = programs.made.clients
    yesterday = datetime.now(UTC) - timedelta(days=1)
    expired = issue(programs, 0, Validity(yesterday - timedelta(days=3), yesterday), "expired")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (
            (f'tls.certificate="{expired[0]}"', f'tls.key="{expired[1]}"'),
            1,
            "own.pem expired on",
        ),
        (
            (
                f'tls.certificate="{elsewhere / "client.pem"}"',
                f'tls.key="{elsewhere / "client.key"}"',
            ),
            1,
            "was not issued by the authority",
        ),
        (
            (
                f'tls.ca="{elsewhere / "ca.pem"}"',
                f'tls.certificate="{elsewhere / "client.pem"}"',
                f'tls.key="{elsewhere / "client.key"}"',
            ),
            1,
            "ca.pem: check [tls] ca, [server] address, and that both sides were provisioned",
        ),
        (
            (
                f'tls.certificate="{home[1].parent / "client.pem"}"',
                f'tls.key="{home[1].parent / "client.key"}"',
            ),
            1,
            "is the certificate of client 1, but this is client 0",
        ),
        ((f'client.identity="{home[1].parent / "identity.key"}"',), 2, "[client] identity is not"),
        (("client.id=99",), 1, "is the certificate of client 0, but this is client 99"),
        ((f'tls.key="{home[1].parent / "client.key"}"',), 2, "is not the key of the certificate"),
        (
            ('server.address="127.0.0.1:1"', "client.reconnect=0.5"),
            1,
            "gives up after 0.5 s: no server listens at 127.0.0.1:1",
        ),
        (('server.name="elsewhere.example"',), 1, "[server] name to it (it is elsewhere.example"),
        (
            (f'federation.allow_list="{elsewhere / "allow-list.json"}"',),
            2,
            "allow-list.json is refused",
        ),
    ]
    poll(lambda: is_listening(programs.port))
    # But for the one that could be mended by waiting, all end long before they would give up.
    patient = "client.reconnect=3600"
    # One identity in several processes at once: each gets a ledger of its own.
    started = [
        programs.clients(
            0, settings=(patient, f'client.ledger="{programs.folder / str(n)}"', *settings)
        )
        for n, (settings, _, _) in enumerate(cases)
    ]
    for process, (_, code, message) in zip(started, cases, strict=True):
        found, out, err = programs.finish(process)
        assert (found, message in err) == (code, True), (message, err)
        assert out == ""
        assert "Traceback" not in err
    assert server.poll() is None, "nothing of this disturbs the server"


def test_a_client_waits_for_a_server_that_is_merely_down(programs: Programs) -> None:
    clients = programs.clients(*range(CLIENTS), settings=("client.reconnect=60",))
    poll(lambda: "is the server running?" in programs.log(clients))
    server = programs.server("rounds.number=1", "rounds.settle=20")
    assert programs.finish(server)[0] == 0
    assert programs.finish(clients)[0] == 0


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_S24_the_server_logs_why_it_refused(programs: Programs) -> None:
    server = programs.server("rounds.wait_for_clients=600")
    poll(lambda: is_listening(programs.port))
    now = datetime.now(UTC)
    validity = Validity(now - timedelta(hours=1), now + timedelta(days=1))
    certificate, key = issue(programs, 99, validity, "stranger")
    authority = programs.made.clients[0].parent / "ca.pem"

    async def knock() -> None:
        address = f"127.0.0.1:{programs.port}"
        client = GrpcClient(address, 99, Credentials.load(authority, certificate, key))
        with pytest.raises(TransportError, match="client 99 is not on the allow-list"):
            await client.connect()

    asyncio.run(knock())
    server.send_signal(system.STOP[0])
    code, _, err = programs.finish(server)
    assert code == 0
    assert "refused a stream (unknown client): client 99 is not on the allow-list" in err


def test_without_certificates_nothing_starts(programs: Programs) -> None:
    path = programs.made.clients[0]
    text = path.read_text()
    path.write_text(text[: text.index("[tls]")] + "[vectors]\ninput = 'vector.npy'\n")
    code, _, err = programs.finish(programs.clients(0))
    assert code == 2
    assert "[tls] needs ca, certificate and key" in err


@pytest.mark.parametrize("level", ["loud", "DEBUGG"])
def test_an_unknown_log_level_is_a_usage_error(programs: Programs, level: str) -> None:
    arguments = ("--config", str(programs.made.server), "--log-level", level)
    code, _, err = programs.finish(programs.start("server", *arguments))
    assert code == 2
    assert f"log level '{level}' must be one of debug, info, warning, error" in err
