"""S61: what holds a secret is readable by its owner alone, and is written nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightsecagg.drivers.federation.administration import Administration
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.drivers.federation.dashboard.web import read_token
from lightsecagg.drivers.federation.durable import ProcessLock, write_synced
from lightsecagg.drivers.federation.jobs import VectorServer
from lightsecagg.drivers.federation.journal import Journal
from lightsecagg.drivers.federation.provisioning import load_identity, provision
from lightsecagg.drivers.federation.training_tables import VectorsTable
from lightsecagg.drivers.transport.tls import Credentials
from lightsecagg.errors import ConfigurationError, JournalError

SESSION = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a whole federation, with a ledger and a token."""
    made = provision(tmp_path / "federation", 3).directory
    ClientLedger(made / "clients/0/ledger", SESSION, 0).close()
    token = made / "server/token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    return made


def load_credentials(folder: Path) -> None:
    Credentials.load(folder / "ca.pem", folder / "server.pem", folder / "server.key")


LOADERS: dict[str, Callable[[Path], object]] = {
    "clients/0/identity.key": lambda folder: load_identity(folder / "clients/0/identity.key"),
    "server/server.key": lambda folder: load_credentials(folder / "server"),
    "clients/0/ledger": lambda folder: ClientLedger(
        folder / "clients/0/ledger", SESSION, 0
    ).close(),
    "server/token": lambda folder: read_token(folder / "server/token"),
    "authority/ca.key": lambda folder: Administration(folder).close(),
    "authority/allow-list.key": lambda folder: Administration(folder).close(),
}


@pytest.mark.unix
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o660])
def test_S61_a_secret_that_others_may_read_is_refused(folder: Path, name: str, mode: int) -> None:
    path, load = folder / name, LOADERS[name]
    load(folder)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"others may read .* run `chmod 600 {path}`"):
        load(folder)
    path.chmod(0o400)
    load(folder)


@pytest.mark.unix
def test_S61_the_group_may_read_a_secret_that_was_mounted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user reads what root has mounted for it by its group: Kubernetes, 0440."""
    path = folder / "clients/0/identity.key"
    stranger = path.stat().st_uid + 1
    path.chmod(0o440)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_identity(path)
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    load_identity(path)
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(ConfigurationError, match="chmod 440"):
            load_identity(path)


def test_S61_a_new_file_follows_no_link_and_no_crash_stands_in_its_way(tmp_path: Path) -> None:
    target, wanted = tmp_path / "somebody's", tmp_path / "ledger"
    target.write_bytes(b"precious")
    wanted.with_suffix(".tmp").symlink_to(target)
    write_synced(wanted, b"new")
    assert (target.read_bytes(), wanted.read_bytes()) == (b"precious", b"new")
    assert not wanted.is_symlink()
    wanted.with_suffix(".tmp").write_bytes(b"half of a")
    wanted.with_suffix(".tmp").chmod(0o644)
    write_synced(wanted, b"newer")
    assert wanted.read_bytes() == b"newer"
    assert wanted.stat().st_mode & 0o777 == 0o600, "not that of what was left"


def test_S61_a_new_file_follows_no_link_that_comes_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the removal of what was there, and before the file is made."""
    target, wanted = tmp_path / "somebody's", tmp_path / "ledger"
    target.write_bytes(b"precious")
    wanted.with_suffix(".tmp").symlink_to(target)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    with pytest.raises(FileExistsError):
        write_synced(wanted, b"new")
    assert target.read_bytes() == b"precious"


def test_S61_a_result_is_private_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `[vectors] output` names may lie in a folder that others may write to."""
    target, output = tmp_path / "somebody's", tmp_path / "result.npz"
    target.write_bytes(b"precious")
    server = VectorServer(VectorsTable(dimension=2, output=output))
    before = os.umask(0)
    try:
        for link in (output, tmp_path / "result.npz.new"):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            server.apply(np.array([1.0, 2.0]), 3, 1)
            assert target.read_bytes() == b"precious"
            assert not output.is_symlink()
            assert output.stat().st_mode & 0o777 == 0o600
            assert np.load(output)["result"].tolist() == [1.0, 2.0]
    finally:
        os.umask(before)
    (tmp_path / "result.npz.new").symlink_to(target)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    with pytest.raises(ConfigurationError, match="File exists"):
        server.apply(np.array([3.0, 4.0]), 3, 2)
    assert target.read_bytes() == b"precious"
    assert np.load(output)["result"].tolist() == [1.0, 2.0]


def test_S61_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "created")
    with pytest.raises(OSError, match="symbolic links"):
        ProcessLock(tmp_path / "lock", "taken")
    assert not (tmp_path / "created").exists()
    (tmp_path / "ledger.lock").symlink_to(tmp_path / "created")
    with pytest.raises(ConfigurationError, match="symbolic links"):
        ClientLedger(tmp_path / "ledger", SESSION, 0)


def test_S61_a_journal_follows_no_link(tmp_path: Path) -> None:
    target, folder = tmp_path / "elsewhere", tmp_path / "state"
    folder.mkdir()
    (folder / "journal.sqlite").symlink_to(target)
    with pytest.raises(JournalError, match="cannot open the journal"):
        Journal(folder, SESSION.hex())
    assert not target.exists()
    (folder / "journal.sqlite").unlink()
    Journal(folder, SESSION.hex()).close()


@pytest.mark.unix
@pytest.mark.parametrize("run", ["server", "clients"])
def test_S61_a_program_that_crashes_leaves_no_core(run: str) -> None:
    program = f"""
import resource
from lightsecagg.drivers.federation import programs

def look(*_, **__):
    print(resource.getrlimit(resource.RLIMIT_CORE))
    raise SystemExit

programs.build_server = programs.build_client = look
programs.run_{run}([None])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout.strip() == "(0, 0)", answer.stderr
