"""A client that shares garbage, over real sockets: the sums are right, and it is named (S46)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.errors import Aborted
from lightsecagg.protocol.schemes.coded_masks import CodedMasksClient, CodedMasksServer
from lightsecagg.protocol.schemes.interface import Findings, PreparedMask
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round_client import RoundClientSession

CLIENTS = 8
LIAR = 3


class Garbage(CodedMasksClient):
    """Sends two of its peers zeros: as a seed or as a share they are not what its mask needs."""

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        mask = super().prepare(serial, private_keys, entropy)
        spoilt = [share._replace(plaintext=bytes(len(share.plaintext))) for share in mask.outgoing]
        return mask._replace(outgoing=[*spoilt[:2], *mask.outgoing[2:]])


class LyingSession(RoundClientSession):
    """Follows the protocol but for its shares."""

    def _make_party(self, *arguments: Any) -> Any:
        party: Any = super()._make_party(*arguments)
        party._scheme_class = Garbage
        return party


class Liar(FederationClient):
    """The client of such a session."""

    session_type = LyingSession


def run(folder: Path, **rounds: Any) -> tuple[NetworkFederation, list[RoundRecord]]:
    """U = N - D = 6 of eight: the reports tell one liar."""
    federation = NetworkFederation(folder, clients=CLIENTS, privacy=1, dropouts=2)

    async def scenario() -> list[RoundRecord]:
        clients = [
            asyncio.create_task(federation.client(i, Liar if i == LIAR else FederationClient).run())
            for i in range(CLIENTS)
        ]
        try:
            return await asyncio.wait_for(federation.server(**rounds).run(), 100)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    return federation, asyncio.run(scenario())


def test_S46_a_server_that_examines_nothing_is_stopped_by_one_liar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodedMasksServer, "examine", lambda self, reports: Findings())
    with pytest.raises(Aborted, match="contradict each other and cannot be told apart"):
        run(tmp_path)


def test_S46_one_liar_stops_nobody_and_is_named_in_the_record(tmp_path: Path) -> None:
    federation, records = run(tmp_path, number=2)
    for record in records:
        assert record.aborted is None
        assert record.included == record.responders == [i for i in range(CLIENTS) if i != LIAR]
        assert record.suspects == [LIAR]
        assert {owner for owner, _ in record.accused} == {LIAR}
    federation.check(records[-1])
