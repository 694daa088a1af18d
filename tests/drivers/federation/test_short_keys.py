"""S49 over real sockets: a provisioned federation with short keys, and clients that want none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from network_federation import NetworkFederation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, ServerConfig, load_config
from lightsecagg.drivers.federation.server import FederationServer
from lightsecagg.errors import Aborted
from lightsecagg.params import ShareMode
from lightsecagg.session.record import RoundRecord

CLIENTS = 5


async def together(server: FederationServer, clients: list[FederationClient]) -> list[RoundRecord]:
    running = [asyncio.ensure_future(client.run()) for client in clients]
    try:
        return await asyncio.wait_for(server.run(), 120)
    finally:
        await asyncio.wait(running, timeout=30)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("decoding", ["exact", "dithered"])
def test_S49_a_federation_with_short_keys_finds_the_sum(tmp_path: Path, decoding: str) -> None:
    federation = NetworkFederation(tmp_path, CLIENTS, share_mode=ShareMode.SHORT_KEY)
    server_config = load_config(ServerConfig, federation.made.server)
    assert server_config.aggregation.share_mode is ShareMode.SHORT_KEY
    server = federation.server(settings=[f"aggregation.decoding={decoding}"], number=2)
    clients = [federation.client(k) for k in range(CLIENTS)]
    records = asyncio.run(together(server, clients))
    assert [record.aborted for record in records] == [None, None]
    assert (records[-1].noise > 0) is (decoding == "dithered")
    federation.check(records[-1])


def test_S49_clients_that_do_not_name_short_keys_take_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = NetworkFederation(tmp_path, CLIENTS)
    own = load_config(ClientConfig, federation.made.clients[0])
    assert own.client.share_mode is None
    server = federation.server(settings=["aggregation.share_mode=short-key"])
    clients = [federation.client(k) for k in range(CLIENTS)]
    with pytest.raises(Aborted):
        asyncio.run(together(server, clients))
    assert not federation.output.exists()
    assert "short keys, which rest on ring-LWE" in caplog.text
