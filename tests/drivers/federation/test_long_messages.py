"""R53: rounds whose uploads are so long that the server keeps them in files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.framing import PAYLOAD
from lightsecagg.session.envelope import name_of
from lightsecagg.session.peers import Peers
from memory_transport import MemoryServer

LONG = PAYLOAD // 4 + 1


def federation_of(folder: Path, clients: int = 4) -> Federation:
    transport = MemoryServer(range(clients), Limits(folder=folder))
    return Federation(folder, clients, dimension=LONG, privacy=1, dropouts=1, transport=transport)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Of which kind the uploads are that the session is given."""
    kinds: list[type] = []
    received = Peers.received

    def watched(peers: Peers, client: int, data: bytes | memoryview) -> Any:
        if name_of(data) == "MaskedUpload":
            kinds.append(type(data))
        return received(peers, client, data)

    monkeypatch.setattr(Peers, "received", watched)
    return kinds


def test_R53_uploads_in_files_are_summed_exactly(tmp_path: Path, seen: list[type]) -> None:
    federation = federation_of(tmp_path)
    (record,) = asyncio.run(federation.run())
    assert record.included == [0, 1, 2, 3]
    assert seen == [memoryview] * 4
    federation.check(record)


class Garbling(FederationClient):
    """Uploads elements that are not below q."""

    async def _post(self, data: bytes) -> None:
        if name_of(data) == "MaskedUpload":
            data = data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2)
        await super()._post(data)


def test_R53_a_long_message_that_is_refused_harms_its_sender_only(
    tmp_path: Path, seen: list[type]
) -> None:
    federation = federation_of(tmp_path)

    async def scenario() -> Any:
        kinds = {3: Garbling}
        clients = [federation.client(i, kinds.get(i, FederationClient)) for i in range(4)]
        async with federation.connected(clients):
            return await asyncio.wait_for(federation.server().run(), 60)

    (record,) = asyncio.run(scenario())
    assert record.included == [0, 1, 2]
    assert memoryview in seen
    federation.check(record)
