"""The authority's work: admit, revoke, renew; ids and numbers are given out once."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightsecagg.cli.main import app
from lightsecagg.drivers.federation.administration import Administration
from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.membership import Membership, load_membership
from lightsecagg.drivers.federation.provisioning import Provisioned, load_identity, provision
from lightsecagg.drivers.federation.register import load_register
from lightsecagg.drivers.transport.certificates import Authority, Validity
from lightsecagg.drivers.transport.tls import Credentials, fingerprint_of_pem
from lightsecagg.errors import ConfigurationError, ParameterError


@pytest.fixture
def made(tmp_path: Path) -> Provisioned:
    return provision(tmp_path / "federation", 5, privacy=1, dropouts=1, task="digits")


def newest(made: Provisioned, place: str = "server") -> Membership:
    path = made.directory / place / "allow-list.json"
    return load_membership(path, made.authority_key, made.session)


def credentials_in(folder: Path, name: str) -> Credentials:
    return Credentials.load(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def test_a_new_client_has_all_that_a_provisioned_one_has(made: Provisioned) -> None:
    administration = Administration(made.directory)
    (path,) = administration.add()
    old = made.clients[4]
    assert {p.name.replace("5", "4") for p in path.parent.iterdir()} == {
        p.name for p in old.parent.iterdir()
    }
    for file in (path.parent, *path.parent.iterdir()):
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600)
    assert path.read_text() == (
        old.read_text().replace("id = 4", "id = 5").replace("clients = 5", "clients = 6")
    )
    config = load_config(ClientConfig, path)
    credentials_in(path.parent, "client").check_client(5)
    for place in ("authority", "server", "clients/0", "clients/5"):
        members = newest(made, place)
        assert (members.number, members.allow_list.clients) == (2, (0, 1, 2, 3, 4, 5))
    assert members.allow_list[5] == load_identity(config.client.identity).public


def test_S06_nobody_gets_the_id_of_a_revoked_client(made: Provisioned) -> None:
    """Its peers' ledgers know the id, its own would be empty: it could upload another update."""
    administration = Administration(made.directory)
    administration.revoke([4])
    pem = (made.clients[4].parent / "client.pem").read_bytes()
    assert newest(made).revoked == {fingerprint_of_pem(pem)}
    assert [path.name for path in administration.add(2)] == ["client-5.toml", "client-6.toml"]
    assert newest(made).allow_list.clients == (0, 1, 2, 3, 5, 6)
    administration.revoke([6])
    assert administration.add()[0].name == "client-7.toml"
    with pytest.raises(ParameterError, match="clients 4, 6 are no members; there are: 0-3, 5, 7"):
        administration.revoke([0, 4, 6])
    # A revoked client's folder is left as it was: it gets no list that it is not on.
    assert newest(made, "clients/4").number == 1


def test_a_number_is_taken_before_a_list_can_leave(
    made: Provisioned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, the authority must not give the same number to another list."""
    administration = Administration(made.directory)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Administration, "_publish", killed)
        with pytest.raises(Killed):
            administration.revoke([4])
    administration.close()
    assert newest(made).number == 1
    assert load_register(made.directory / "authority").number == 2
    again = Administration(made.directory)  # finishes what was begun
    assert (newest(made).number, newest(made).allow_list.clients) == (2, (0, 1, 2, 3))
    again.add()
    assert newest(made).number == 3


def test_one_command_at_a_time(made: Provisioned) -> None:
    first = Administration(made.directory)
    with pytest.raises(ConfigurationError, match="another command is changing"):
        Administration(made.directory)
    first.close()
    Administration(made.directory).close()


def test_renewed_certificates_and_old_ones_are_good_side_by_side(made: Provisioned) -> None:
    """Files are replaced one after the other, while the federation runs."""
    old = {name: (made.server.parent / name).read_bytes() for name in ("ca.pem", "server.pem")}
    before = (made.clients[0].parent / "client.pem").read_bytes()
    administration = Administration(made.directory)
    files = administration.renew([0], server=True, authority=True, days=3000)
    names = {str(path.relative_to(made.directory)) for path in files}
    assert {"server/server.pem", "clients/0/client.pem", "clients/4/ca.pem"} <= names
    until = datetime.now(UTC) + timedelta(days=2999)
    credentials_in(made.server.parent, "server").check_server(until)
    credentials_in(made.clients[0].parent, "client").check_client(0, until)
    # Old under new, new under old.
    mixed = made.server.parent / "mixed.pem"
    mixed.write_bytes(old["ca.pem"])
    key = made.server.parent / "server.key"
    Credentials.load(mixed, made.server.parent / "server.pem", key).check_server()
    credentials_in(made.clients[1].parent, "client").check_client(1)
    assert newest(made).number == 1
    # The register knows both, so that a revocation names both.
    administration.revoke([0])
    after = (made.clients[0].parent / "client.pem").read_bytes()
    assert newest(made).revoked == {fingerprint_of_pem(before), fingerprint_of_pem(after)}


def test_what_is_issued_ends_with_the_authority(made: Provisioned) -> None:
    administration = Administration(made.directory)
    administration.add(days=3000)
    assert administration.members()[-1].expires == administration.expires
    soon = Authority.load(
        (made.directory / "authority" / "ca.pem").read_bytes(),
        (made.directory / "authority" / "ca.key").read_bytes(),
    ).renewed(Validity(datetime.now(UTC) - timedelta(days=9), datetime.now(UTC)))
    (made.directory / "authority" / "ca.pem").write_bytes(soon.own_files().certificate)
    administration.close()
    administration = Administration(made.directory)
    with pytest.raises(ConfigurationError, match="the authority's own certificate ends on"):
        administration.add()
    administration.renew(authority=True)
    administration.add()


def test_the_commands(made: Provisioned) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["members", *arguments, "--federation", str(made.directory)])
        assert done.exit_code == 0, (done.output, done.exception)
        for path in made.directory.rglob("*.key"):
            assert path.read_text().strip() not in done.output
        return done.output

    assert "allow-list number 1: 5 members" in run("list")
    assert "Rounds invite at most N = 5 of the 6 members" in run("add")
    assert json.loads(run("add", "--json"))["allow_list"] == 3
    assert "Rounds take" not in run("revoke", "6", "5")
    output = run("revoke", "4")
    assert "Revoked: client 4. 4 members remain." in output
    assert "Rounds take N = 4 clients from now on, with T = 1, D = 1 and U = 2." in output
    assert "Too few remain for T and D" in run("revoke", "3", "--anyway")
    assert "allow-list number" not in run("renew", "--server")
    assert "allow-list number 7" in run("renew", "0", "--revoke-old")
    rows = json.loads(run("list", "--json"))
    assert [row["id"] for row in rows["clients"] if row["member"]] == [0, 1, 2]
    assert "revoked by allow-list number 5" in run("list")
    assert len(json.loads(run("renew", "--json"))["files"]) == 4 + 1 + 3
    for wrong, reason in {
        ("renew", "--revoke-old"): "give their ids",
        ("add", "--days", "0"): "1 to 3650 days",
        ("add", "--count", "0"): "0 clients cannot be added",
        ("revoke", "17"): "clients 17 are no members",
    }.items():
        done = CliRunner().invoke(app, ["members", *wrong, "--federation", str(made.directory)])
        assert isinstance(done.exception, ParameterError)
        assert reason in str(done.exception)
    done = CliRunner().invoke(app, ["members", "list", "--federation", str(made.server.parent)])
    assert isinstance(done.exception, ConfigurationError)
    assert "`lightsecagg provision` made" in str(done.exception)
