"""Provisioning: a complete, private, signed set of files; and refusals of anything tampered."""

from __future__ import annotations

import json
import re
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.federation.aggregation import make_settings
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.membership import load_membership, sign_membership
from lightsecagg.drivers.federation.provisioning import (
    Provisioned,
    describe_liars,
    free_port,
    load_identity,
    provision,
)
from lightsecagg.drivers.federation.register import load_register
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.transport.tls import Credentials, client_of
from lightsecagg.errors import ConfigurationError, ParameterError
from lightsecagg.params import ShareMode
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.training.config import LocalConfig, TaskConfig

AUTHORITY = ("ca.key", "ca.pem", "allow-list.key", "allow-list.json", "members.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision(tmp_path_factory.mktemp("made") / "federation", 4)


def test_layout_and_modes_keep_secrets_with_their_owner(made: Provisioned) -> None:
    names = {str(path.relative_to(made.directory)) for path in made.directory.rglob("*")}
    client_files = {"ca.pem", "client.pem", "client.key", "identity.key", "allow-list.json"}
    expected = {"authority", "server", "clients"}
    expected |= {f"authority/{name}" for name in AUTHORITY}
    expected |= {
        f"server/{name}"
        for name in ("server.toml", "ca.pem", "server.pem", "server.key", "allow-list.json")
    }
    for client in range(4):
        expected.add(f"clients/{client}")
        expected |= {f"clients/{client}/{name}" for name in client_files}
        expected.add(f"clients/{client}/client-{client}.toml")
    assert names == expected
    for path in (made.directory, *made.directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    # What can admit clients is nowhere but in authority/.
    secrets = [
        (made.directory / "authority" / name).read_bytes() for name in ("ca.key", "allow-list.key")
    ]
    for path in made.directory.rglob("*"):
        if path.is_file() and path.parent.name != "authority":
            assert not any(secret.strip() in path.read_bytes() for secret in secrets)


def test_every_party_gets_certificates_that_the_others_accept(made: Provisioned) -> None:
    server = made.server.parent
    Credentials.load(server / "ca.pem", server / "server.pem", server / "server.key").check_server()
    for client, config in made.clients.items():
        folder = config.parent
        files = (folder / "ca.pem", folder / "client.pem", folder / "client.key")
        Credentials.load(*files).check_client(client)
        certificate = x509.load_pem_x509_certificate((folder / "client.pem").read_bytes())
        assert client_of(certificate) == client


def test_configuration_files_are_what_server_and_client_read(made: Provisioned) -> None:
    config = pytest.importorskip("lightsecagg.drivers.federation.config")
    server = config.load_config(config.ServerConfig, made.server, environment={})
    assert server.server.address == "127.0.0.1:7700"
    aggregation = server.aggregation
    assert (aggregation.clients, aggregation.privacy, aggregation.dropouts) == (4, 1, 1)
    for client, path in made.clients.items():
        own = config.load_config(config.ClientConfig, path, environment={})
        assert own.client.id == client
        assert own.client.privacy == 1
        assert (own.client.bound, own.client.clip) == (aggregation.bound, True)
        assert own.server.address == server.server.address
        assert bytes.fromhex(own.federation.session) == made.session
        authority = bytes.fromhex(own.federation.authority)
        allow_list = load_membership(own.federation.allow_list, authority, made.session).allow_list
        assert allow_list.clients == (0, 1, 2, 3)
        assert allow_list[client] == load_identity(own.client.identity).public
        Credentials.load(own.tls.ca, own.tls.certificate, own.tls.key).check_client(client)


def test_a_job_is_training_or_vectors(tmp_path: Path) -> None:
    def configs(folder: str, **job: Any) -> tuple[ServerConfig, ClientConfig]:
        made = provision(tmp_path / folder, 3, **job)
        server = load_config(ServerConfig, made.server, environment={})
        return server, load_config(ClientConfig, made.clients[1], environment={})

    server, client = configs("training", task="cifar10")
    assert server.training is not None
    assert server.training == client.training
    assert server.training.task == {"task": "cifar10", "clients": 3}
    assert (server.vectors, client.vectors, server.aggregation.bound) == (None, None, 1.0)
    server, client = configs("sum", vectors=1000, bound=2.5)
    assert (server.training, client.training) == (None, None)
    assert server.vectors is not None
    assert (server.vectors.dimension, server.vectors.weighted) == (1000, False)
    assert server.vectors.output == tmp_path / "sum/server/result.npz"
    # A vector is spent by its first sum.
    assert (server.rounds.number, server.aggregation.bound, client.client.bound) == (1, 2.5, 2.5)
    assert client.vectors is not None
    assert client.vectors.input == tmp_path / "sum/clients/1/vector.npy"
    server, client = configs("average", vectors=7, weighted=True)
    assert server.vectors is not None
    assert server.vectors.weighted
    assert client.vectors is not None
    assert client.vectors.input == tmp_path / "average/clients/1/vector.npz"


def test_S49_short_keys_are_in_the_files_of_all_or_of_nobody(tmp_path: Path) -> None:
    config = pytest.importorskip("lightsecagg.drivers.federation.config")
    for mode in (None, ShareMode.SHORT_KEY):
        made = provision(tmp_path / str(mode), 4, share_mode=mode)
        server = config.load_config(config.ServerConfig, made.server, environment={})
        assert server.aggregation.share_mode is (mode or ShareMode.SEEDED)
        for path in made.clients.values():
            own = config.load_config(config.ClientConfig, path, environment={})
            assert own.client.share_mode is mode


def test_two_federations_share_nothing(made: Provisioned, tmp_path: Path) -> None:
    other = provision(tmp_path / "other", 4)
    assert other.session != made.session
    assert other.authority_key != made.authority_key
    with pytest.raises(ConfigurationError, match="does not verify"):
        load_membership(other.server.parent / "allow-list.json", made.authority_key)


def test_S24_server_cannot_change_the_allow_list(made: Provisioned, tmp_path: Path) -> None:
    genuine = json.loads((made.server.parent / "allow-list.json").read_text())
    intruder = IdentityKey.generate().public.hex()

    def refused(change: dict[str, object], reason: str) -> None:
        path = tmp_path / "allow-list.json"
        path.write_text(json.dumps(genuine | change))
        with pytest.raises(ConfigurationError, match=reason):
            load_membership(path, made.authority_key, made.session)

    clients = genuine["clients"]
    refused({"clients": [*clients, {"id": 9, "key": intruder}]}, "does not verify")
    refused({"clients": [{"id": 0, "key": intruder}, *clients[1:]]}, "does not verify")
    refused({"clients": clients[1:]}, "does not verify")
    refused({"clients": [*clients, clients[0]]}, "names a client twice")
    refused({"clients": [*clients, {"id": 9, "key": clients[0]["key"]}]}, "share an identity key")
    refused({"session": "00" * 32}, "does not verify")
    refused({"signature": "00" * 64}, "does not verify")
    refused({"number": 2}, "does not verify")
    refused({"number": -1}, "must be in")
    refused({"revoked_certificates": ["00" * 32]}, "does not verify")
    refused({"version": 3}, "version 3")
    refused({"extra": 1}, "not an allow-list")
    refused({"signature": "zz"}, "not an allow-list")
    (tmp_path / "allow-list.json").write_text("[1")
    with pytest.raises(ConfigurationError, match="not an allow-list"):
        load_membership(tmp_path / "allow-list.json", made.authority_key)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_membership(tmp_path / "none.json", made.authority_key)


def test_a_genuine_list_of_another_session_is_refused(tmp_path: Path) -> None:
    authority = IdentityKey.generate()
    allow_list = AllowList({7: IdentityKey.generate().public})
    path = tmp_path / "allow-list.json"
    path.write_bytes(sign_membership(authority, b"a" * 32, 1, allow_list))
    assert load_membership(path, authority.public).allow_list.digest == allow_list.digest
    with pytest.raises(ConfigurationError, match="another session"):
        load_membership(path, authority.public, b"b" * 32)


@pytest.mark.parametrize("content", [b"", b"zz" * 32, b"00" * 31, b"\xff" * 64])
def test_S22_a_bad_identity_file_is_refused_without_quoting_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(
        ConfigurationError, match="is not an identity key of 64 hexadecimal digits"
    ) as caught:
        load_identity(path)
    assert caught.value.__cause__ is None
    assert "zz" not in str(caught.value)


def test_an_existing_directory_is_never_overwritten(made: Provisioned) -> None:
    before = made.server.read_bytes()
    with pytest.raises(ConfigurationError, match="exists; its keys would be lost"):
        provision(made.directory, 4)
    assert made.server.read_bytes() == before


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(ConfigurationError, match="No space left"):
        provision(tmp_path / "federation", 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"clients": 2}, "clients N = 2 must be at least 3"),
        ({"privacy": 3}, r"T \+ 2"),
        ({"clients": 7, "dropouts": 3}, r"T \+ 2D < N"),
        ({"days": 0}, "1 to 3650 days"),
        ({"port": 70000}, "port 70000"),
        ({"server_name": 'a"b'}, "not a host name"),
        ({"vectors": 0}, "vectors: their length = 0 must be at least 1"),
        ({"vectors": 2**30}, "1073741824 is too large: an upload has at most 1073741823 elements"),
        ({"vectors": 2**30 - 1, "weighted": True}, "1073741823 is too large"),
        ({"vectors": 10, "task": "digits"}, r"trains a task \(digits\) or sums vectors, not both"),
        ({"weighted": True}, "weighted is for vectors"),
        ({"bound": 0.0}, "bound = 0.0 must be positive"),
        ({"names": ["a", "b", "c"]}, "3 names were given for 4 clients"),
        ({"names": ["a", "b", "c", "a"]}, "two clients have one name"),
        ({"names": ["a", "b", "c", ""]}, "'' is no name"),
        ({"names": ["a", "b", "c", "d\n"]}, "is no name: give 1 to 40 printable"),
        ({"names": ["a", "b", "c", "d" * 41]}, "is no name"),
    ],
)
def test_impossible_arguments_are_named(
    tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ParameterError, match=reason):
        provision(tmp_path / "federation", **({"clients": 4} | arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "listen", "dial"),
    [
        ("localhost", "127.0.0.1:7700", "127.0.0.1:7700"),
        ("::1", "[::1]:7700", "[::1]:7700"),
        ("server.example", "0.0.0.0:7700", "server.example:7700"),
    ],
)
def test_addresses_follow_the_server_name(
    tmp_path: Path, name: str, listen: str, dial: str
) -> None:
    made = provision(tmp_path / "federation", 3, server_name=name)
    assert f'address = "{listen}"' in made.server.read_text()
    assert f'address = "{dial}"' in made.clients[2].read_text()


@pytest.mark.parametrize("clients", range(3, 40))
def test_default_parameters_are_feasible_for_any_number_of_clients(clients: int) -> None:
    from lightsecagg.drivers.federation.provisioning import _parameters

    parameters = _parameters(clients, None, None, None)
    assert parameters.privacy >= 1
    assert parameters.privacy + 2 * parameters.dropouts < clients


@pytest.mark.parametrize(
    ("clients", "chosen", "missing"),
    [
        (4, (1, 1, 2), 0),
        (5, (1, 1, 3), 0),
        (6, (1, 1, 3), 1),
        (7, (1, 1, 4), 1),
        (8, (2, 2, 5), 1),
        (9, (2, 2, 5), 2),
        (10, (2, 2, 6), 2),
        (11, (2, 2, 7), 2),
        (12, (3, 3, 7), 3),
    ],
)
def test_R59_defaults_locate_one_liar_beside_as_many_dropouts_as_possible(
    tmp_path: Path, clients: int, chosen: tuple[int, int, int], missing: int
) -> None:
    made = provision(tmp_path / "federation", clients)
    parameters = made.parameters
    assert (parameters.privacy, parameters.dropouts, parameters.survivors) == chosen
    table = load_config(ServerConfig, made.server, environment={}).aggregation
    assert (table.privacy, table.dropouts, table.survivors) == chosen
    assert load_register(made.directory / "authority").parameters_for(clients) == parameters
    assert parameters.liars(missing) == 1
    for survivors in range(parameters.privacy + 1, clients - parameters.dropouts + 1):
        other = replace(parameters, survivors=survivors)
        if survivors > parameters.survivors:
            assert not other.liars(missing), "a larger U would do, with fewer bytes"
        if missing < parameters.dropouts:
            assert not other.liars(missing + 1), "another U would do more"
    assert "can stop every round" not in describe_liars(parameters)
    # Of N uploads m + 2 must be left when it and the peer that it cheated give no signature.
    silent = "one that also refuses to sign stops rounds while it stays"
    assert (silent in describe_liars(parameters)) == (clients - missing < parameters.quorum + 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["3"], r"N = 3 and U = 3 leave too few .*takes N >= T \+ 3 = 4 clients"),
        (["5", "--survivors", "4"], r"N = 5 and U = 4 .*a U of 3 or less leaves room"),
        (["7", "--survivors", "0"], r"N = 7 and U = 6 .*a U of 5 or less leaves room"),
        (["5", "--privacy", "3", "--dropouts", "0"], r"takes N >= T \+ 3 = 6 clients"),
        (
            ["5", "--privacy", "2"],
            r"D = 1, U = 3: one client may lie .* while nobody else is missing",
        ),
        (["8"], r"D = 2, U = 5: one client may lie .* while one other is missing"),
        (["10"], r"D = 2, U = 6: one client may lie .* while up to 2 others are missing"),
        (["10", "--dropouts", "0"], r"U = 8: one client may lie .* while nobody else is missing"),
    ],
)
def test_R59_the_command_states_what_one_liar_can_do(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    command = ["provision", "--out", str(tmp_path / "fed"), "--clients", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert re.search(sentence, result.output)
    assert ("can stop every round" in result.output) is ("too few" in result.output)


def test_R59_fewer_members_leave_as_many_spare_uploads(tmp_path: Path) -> None:
    made = provision(tmp_path / "federation", 10, vectors=3)
    register = load_register(made.directory / "authority")
    table = load_config(ServerConfig, made.server, environment={}).aggregation
    job = VectorServer(VectorsTable(dimension=3))
    for members in range(7, 13):
        keys = {i: IdentityKey.generate().public for i in range(members)}
        settings = make_settings(table, job, made.session, AllowList(keys))
        assert settings.parameters == register.parameters_for(members)
        assert settings.parameters.clients == min(10, members)
        assert settings.parameters.clients - settings.parameters.survivors == 4


def test_command_prints_json_without_secrets_and_refuses_a_second_time(tmp_path: Path) -> None:
    out = tmp_path / "federation"
    result = CliRunner().invoke(app, ["provision", "--clients", "3", "--out", str(out), "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert Path(document["server"]).is_file()
    assert set(document["clients"]) == {"0", "1", "2"}
    for path in out.rglob("*.key"):
        assert path.read_text().strip() not in result.output
    again = CliRunner().invoke(app, ["provision", "--clients", "3", "--out", str(out)])
    assert isinstance(again.exception, ConfigurationError)
    shown = CliRunner().invoke(app, ["provision", "--clients", "3", "--out", f"{out}2"])
    assert "keep offline" in shown.output


def test_names_are_in_the_servers_file_and_in_the_list_of_members(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    out = str(tmp_path / "fed")
    run("provision", "--names", "Charité, ucl,upenn", "--out", out)
    server = load_config(ServerConfig, tmp_path / "fed" / "server" / "server.toml")
    assert server.server.names == {0: "Charité", 1: "ucl", 2: "upenn"}
    assert server.aggregation.clients == 3
    added = run("members", "add", "--names", "sinai,karolinska", "--federation", out)
    assert '\n  3 = "sinai"\n  4 = "karolinska"\n' in added
    rows = run("members", "list", "--federation", out).splitlines()
    assert "  client 4 (karolinska)  certificate until 2" in rows[-1]
    assert len({row.index("  certificate") for row in rows[1:]}) == 1  # aligned
    clients = json.loads(run("members", "list", "--federation", out, "--json"))["clients"]
    assert [client["name"] for client in clients][:2] == ["Charité", "ucl"]
    for wrong in (["--names", "ucl"], ["--names", "a,b", "--count", "3"]):
        done = CliRunner().invoke(app, ["members", "add", *wrong, "--federation", out])
        assert isinstance(done.exception, ParameterError)
    neither = CliRunner().invoke(app, ["provision", "--out", f"{out}2"])
    assert neither.exit_code == 2
    assert "give --clients, or --names" in neither.output


@pytest.mark.parametrize("job", [{}, {"vectors": 3, "weighted": True}])
def test_the_keys_behind_a_mark_are_the_defaults_and_can_be_uncommented(
    tmp_path: Path, job: dict[str, Any]
) -> None:
    made = provision(tmp_path / "federation", 4, **job)
    kinds: list[tuple[type[Any], Path]] = [
        (ServerConfig, made.server),
        (ClientConfig, made.clients[0]),
    ]
    for kind, path in kinds:
        commented = path.read_text()
        before = load_config(kind, path)
        first, *lines = commented.splitlines()
        path.write_text("\n".join([first, *(line.removeprefix("# ") for line in lines)]))
        after = load_config(kind, path)
        table = before.training
        if table is not None:
            assert after.training.task == {**table.task, "partition": TaskConfig().partition}
            local = LocalConfig()
            assert after.training.local == {
                key: getattr(local, key)
                for key in ("epochs", "batch_size", "learning_rate", "optimizer")
            }
        assert after.model_copy(update={"training": None}) == before.model_copy(
            update={"training": None}
        )
    assert "# [rounds]" in commented or "[rounds]" in made.server.read_text()


def test_a_built_in_task_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="no task 'nosuch'; choose one of digits"):
        provision(tmp_path / "federation", 4, task="nosuch")
    provision(tmp_path / "federation", 4, task="somewhere_else:Task")


def test_a_free_port_is_none_that_a_connection_may_be_given() -> None:
    """While a killed server is away, its clients' own connections must not take its port."""
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 15
    assert all(port < 32_768 for port in ports)
    with socket.create_server(("127.0.0.1", ports.pop())):
        pass
