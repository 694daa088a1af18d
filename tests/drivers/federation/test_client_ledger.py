"""A client's ledger on disk: what was spent stays spent, and nothing leaves unaccounted for."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_federation import Federation

from lightsecagg.drivers.federation import client_ledger as module
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.client_ledger import ClientLedger
from lightsecagg.errors import (
    ConfigurationError,
    JournalError,
    MaskAlreadyUsed,
    RemoteProtocolError,
)
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.ledger import Ledger

SESSION = bytes(32)
UPDATE = Update(np.arange(5.0))


def test_S06_a_restart_forgets_nothing(tmp_path: Path) -> None:
    ledger = ClientLedger(tmp_path / "ledger", SESSION, 3)
    ledger.open_round(7, b"model", 2)
    ledger.count_upload(b"model")
    ledger.count_upload(b"model")
    ledger.spend(ledger.fingerprint(UPDATE))
    ledger.store(ledger.to_bytes())
    ledger.close()
    again = ClientLedger(tmp_path / "ledger", SESSION, 3)
    with pytest.raises(MaskAlreadyUsed, match="is spent"):
        again.check_unspent(again.fingerprint(UPDATE))
    again.check_unspent(again.fingerprint(Update(np.arange(6.0))))
    with pytest.raises(RemoteProtocolError, match="uploaded 2 updates for global model 6d6f64656c"):
        again.open_round(8, b"model", 2)
    with pytest.raises(RemoteProtocolError, match="already seen round 7"):
        again.open_round(7, b"another", 2)
    assert stat.S_IMODE((tmp_path / "ledger").stat().st_mode) == 0o600


def test_S44_a_restart_forgets_no_opening(tmp_path: Path) -> None:
    for number in (1, 2):
        ledger = ClientLedger(tmp_path / "ledger", SESSION, 3)
        ledger.open_round(number, b"model", 2)
        ledger.count_opening(b"model", 2)
        ledger.store(ledger.to_bytes())
        ledger.close()
    again = ClientLedger(tmp_path / "ledger", SESSION, 3)
    with pytest.raises(RemoteProtocolError, match="opened 2 rounds from this global model"):
        again.count_opening(b"model", 2)
    again.count_opening(b"another", 2)


def test_S06_one_process_at_a_time(tmp_path: Path) -> None:
    first = ClientLedger(tmp_path / "ledger", SESSION, 3)
    with pytest.raises(ConfigurationError, match="another process runs as client 3"):
        ClientLedger(tmp_path / "ledger", SESSION, 3)
    first.close()
    ClientLedger(tmp_path / "ledger", SESSION, 3)


def test_S06_nothing_is_written_over_what_the_next_holder_wrote(tmp_path: Path) -> None:
    """A write that was under way in a thread when its client was cancelled comes too late."""
    first = ClientLedger(tmp_path / "ledger", SESSION, 3)
    late = first.to_bytes()
    first.close()
    second = ClientLedger(tmp_path / "ledger", SESSION, 3)
    second.spend(second.fingerprint(UPDATE))
    second.store(second.to_bytes())
    with pytest.raises(JournalError, match="is closed; nothing is written"):
        first.store(late)
    second.close()
    third = ClientLedger(tmp_path / "ledger", SESSION, 3)
    with pytest.raises(MaskAlreadyUsed, match="is spent"):
        third.check_unspent(third.fingerprint(UPDATE))


def test_S06_a_client_that_has_run_lets_another_have_its_ledger(tmp_path: Path) -> None:
    federation = Federation(tmp_path / "state", 5, privacy=1, dropouts=1)
    federation.ledgers[3] = ClientLedger(tmp_path / "ledger", SESSION, 3)
    (record,) = asyncio.run(federation.run())
    assert 3 in record.included
    with pytest.raises(RemoteProtocolError, match="already seen round 1"):
        ClientLedger(tmp_path / "ledger", SESSION, 3).open_round(1, b"another", 2)


@pytest.mark.parametrize(("session", "client"), [(b"\1" * 32, 3), (SESSION, 4)])
def test_a_ledger_of_somebody_else_is_refused(tmp_path: Path, session: bytes, client: int) -> None:
    ClientLedger(tmp_path / "ledger", SESSION, 3).close()
    with pytest.raises(ConfigurationError, match=r"is the ledger of client 3 .* check \[client\]"):
        ClientLedger(tmp_path / "ledger", session, client)


def test_R36_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = ClientLedger(path, SESSION, 3)
    ledger.spend(ledger.fingerprint(UPDATE))
    ledger.store(ledger.to_bytes())
    ledger.close()
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        for damaged in (bytes(flipped), whole[:position]):
            path.write_bytes(damaged)
            with pytest.raises(JournalError, match="is damaged"):
                ClientLedger(path, SESSION, 3)
    path.write_bytes(whole)
    ClientLedger(path, SESSION, 3)


def test_S06_a_client_with_a_ledger_to_keep_and_no_file_to_keep_it_in_is_refused(
    tmp_path: Path,
) -> None:
    federation = Federation(tmp_path / "state", 5, privacy=1, dropouts=1)
    federation.ledgers[0] = Ledger()
    with pytest.raises(ConfigurationError, match="keeps its ledger in a file"):
        federation.client(0)


def test_a_ledger_that_cannot_be_kept_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ledger .* cannot be kept: No such file"):
        ClientLedger(tmp_path / "missing" / "ledger", SESSION, 3)


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_R36_a_client_whose_disk_is_full_sends_nothing_that_a_restart_would_forget(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    writes: int,
) -> None:
    """Full after one write, it sends no keys; after two, no upload; after three, no signature.

    The others go on.
    """
    federation = Federation(tmp_path / "state", 5, privacy=1, dropouts=1)
    original, done = module.write_synced, 0

    def write(path: Path, data: bytes) -> None:
        nonlocal done
        done += 1
        if done > writes:
            raise OSError(28, "No space left on device")
        original(path, data)

    monkeypatch.setattr(module, "write_synced", write)
    ledger = ClientLedger(tmp_path / "ledger", SESSION, 2)

    def kind(*arguments: Any) -> FederationClient:
        return FederationClient(*arguments[:-1], ledger)

    async def scenario() -> Any:
        clients = [federation.client(i, *((kind,) if i == 2 else ())) for i in range(5)]
        async with federation.connected(clients):
            return await asyncio.wait_for(federation.server(upload=600, agree=600).run(), 30)

    (record,) = asyncio.run(scenario())
    assert "cannot be written: No space left on device; nothing was sent" in caplog.text
    assert record.dropped == {("advertise", "upload", "agree")[writes - 1]: [2]}
    assert (2 in record.included) == (writes == 3), "uploaded, but not signed for"
    assert 2 not in record.responders
    federation.check(record)
