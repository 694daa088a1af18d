"""Certificates for the transport's tests: one authority, and what each test wants it to issue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightsecagg.drivers.transport.certificates import Authority, Issued, Validity
from lightsecagg.drivers.transport.tls import Credentials

Save = Callable[..., Credentials]


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority.create(Validity.for_days(2))


@pytest.fixture
def save(tmp_path: Path, authority: Authority) -> Save:
    """Writes what was issued to files and loads them, as a party that trusts `trusted` would."""

    def save_files(issued: Issued, trusted: Authority = authority) -> Credentials:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        files = (folder / "ca.pem", folder / "own.pem", folder / "own.key")
        contents = (trusted.own_files().certificate, issued.certificate, issued.key)
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
            file.chmod(0o600)
        return Credentials.load(*files)

    return save_files


@pytest.fixture
def server_credentials(save: Save, authority: Authority) -> Credentials:
    return save(authority.issue_server("localhost"))
