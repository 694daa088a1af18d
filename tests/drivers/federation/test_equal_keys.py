"""Two clients that advertise one key, over real sockets: the others' rounds go on (S45, R30)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation

from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.errors import Aborted
from lightsecagg.protocol.roles import registration
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_client import RoundClientSession


class CollusiveSession(RoundClientSession):
    """Every round of it begins with the same key pair as its accomplice's."""

    def _make_party(self, *arguments: Any) -> Any:
        party: Any = super()._make_party(*arguments)
        agreed = [b"the key that these two agreed on"]
        party._entropy = lambda count: agreed.pop() if agreed else system_entropy(count)
        return party


class Colluder(FederationClient):
    """The client of such a session."""

    session_type = CollusiveSession


def run(folder: Path, **rounds: Any) -> tuple[NetworkFederation, list[RoundRecord]]:
    federation = NetworkFederation(folder, clients=8, privacy=1, dropouts=2)

    async def scenario() -> list[RoundRecord]:
        kinds = {client: Colluder if client < 2 else FederationClient for client in range(8)}
        clients = [
            asyncio.create_task(federation.client(client, kind).run())
            for client, kind in kinds.items()
        ]
        try:
            return await asyncio.wait_for(federation.server(**rounds).run(), 100)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    return federation, asyncio.run(scenario())


def test_S45_R30_without_the_servers_check_two_colluders_stop_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "check_fresh", lambda *_: None)
    with pytest.raises(Aborted, match="only 0 clients shared their masks"):
        run(tmp_path)


def test_S45_R30_two_colluders_with_one_key_do_not_stop_the_rounds_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        federation, records = run(tmp_path, number=2)
    assert [record.aborted for record in records] == [None, None]
    assert "advertised a key that another client has advertised before" in caplog.text
    for record in records:
        assert set(record.included) >= set(range(2, 8)), "no honest client is lost"
        assert not {0, 1} <= set(record.included)
    federation.check(records[-1])
