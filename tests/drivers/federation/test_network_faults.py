"""R33: a network that delays, holds back, reorders, cuts and so duplicates, under real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation

from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.transport.grpc import GrpcClient
from lightsecagg.drivers.transport.tls import Credentials
from lightsecagg.errors import PeerGone, TransportError
from lightsecagg.session.envelope import VERSION, Hello, pack_control, pack_protocol
from lightsecagg.session.record import RoundRecord


def cut_everybody(proxy: Any) -> None:
    proxy.cut_all()


def cut_one(proxy: Any) -> None:
    proxy.connections[2].cut()


def hold_half(proxy: Any) -> None:
    """Three of six connections stand still for a while: the others' messages overtake theirs."""
    held = proxy.connections[::2]
    for connection in held:
        connection.hold()
    loop = asyncio.get_running_loop()
    for connection in held:
        loop.call_later(0.3, connection.release)


def slow_down(proxy: Any) -> None:
    proxy.delay = 0.03


def break_every_upload(proxy: Any) -> None:
    """New connections break again after a few kilobytes, in the middle of something."""
    proxy.cut_after = 6_000
    proxy.cut_all()
    asyncio.get_running_loop().call_later(1.0, setattr, proxy, "cut_after", None)


FAULTS = [cut_everybody, cut_one, hold_half, slow_down, break_every_upload]


@pytest.mark.parametrize("phase", ["share", "upload", "agree", "recover"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_R33_faults_in_any_phase_end_in_the_exact_sum(
    tmp_path: Path, fault_proxy: Any, fault: Callable[[Any], None], phase: str
) -> None:
    federation = NetworkFederation(tmp_path)

    async def scenario() -> list[RoundRecord]:
        proxy = fault_proxy(federation.address)
        await proxy.start()
        done = False

        def strike(now: str, answered: int, expected: int) -> None:
            nonlocal done
            if now == phase and not done:
                done = True
                fault(proxy)

        server = federation.server(strike, retries=2, grace=20, upload=25, agree=15, recover=15)
        clients = [
            asyncio.create_task(federation.client(i, address=proxy.address).run()) for i in range(6)
        ]
        try:
            return await asyncio.wait_for(server.run(), 90)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await proxy.close()

    *aborted, last = asyncio.run(scenario())
    federation.check(last)
    # An attempt that failed, failed cleanly: it said why and summed nothing.
    assert all(record.aborted and not record.included for record in aborted)
    # Only shares cannot be sent again, and some may be on their way when the upload phase begins.
    # Later, nobody is even dropped.
    if phase in ("agree", "recover"):
        assert [record.aborted for record in aborted] == []
        assert last.included == list(range(6))
        assert last.dropped == {}


@pytest.mark.parametrize("phase", ["agree", "recover"])
def test_R31_no_network_at_the_server_loses_no_round_that_a_crash_would_not(
    tmp_path: Path, fault_proxy: Any, phase: str
) -> None:
    """Nobody can reach it for four times as long as the grace; the phase lasts longer."""
    federation = NetworkFederation(tmp_path)
    grace = 0.5

    async def scenario() -> list[RoundRecord]:
        proxy = fault_proxy(federation.address)
        await proxy.start()
        done = False

        def strike(now: str, answered: int, expected: int) -> None:
            nonlocal done
            if now == phase and not done:
                done = proxy.refusing = True
                proxy.cut_all()
                asyncio.get_running_loop().call_later(4 * grace, setattr, proxy, "refusing", False)

        server = federation.server(strike, grace=grace, agree=60, recover=60)
        clients = [
            asyncio.create_task(federation.client(i, address=proxy.address).run()) for i in range(6)
        ]
        try:
            return await asyncio.wait_for(server.run(), 120)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await proxy.close()

    (record,) = asyncio.run(scenario())
    federation.check(record)
    assert record.included == list(range(6))


def test_S25_a_flood_over_the_network_is_cut_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = NetworkFederation(tmp_path)

    async def flood() -> None:
        config = load_config(ClientConfig, federation.made.clients[5])
        tls = config.tls
        assert tls.ca is not None
        assert tls.certificate is not None
        assert tls.key is not None
        credentials = Credentials.load(tls.ca, tls.certificate, tls.key)
        client = GrpcClient(config.server.address, 5, credentials)
        while True:
            try:
                await client.connect()
                break
            except TransportError:
                await asyncio.sleep(0.05)
        await client.send(pack_control(Hello(VERSION, -1)))
        with suppress(PeerGone):
            while True:
                await client.send(pack_protocol(1, bytes(1 << 20)))
        await client.close()

    async def scenario() -> RoundRecord:
        server = federation.server(settle=1, advertise=5)
        clients = [asyncio.create_task(federation.client(i).run()) for i in range(5)]
        flooding = asyncio.create_task(flood())
        try:
            (record,) = await asyncio.wait_for(server.run(), 40)
            await asyncio.wait_for(flooding, 10)
            return record
        finally:
            for task in (*clients, flooding):
                task.cancel()
            await asyncio.gather(*clients, flooding, return_exceptions=True)

    with caplog.at_level("INFO"):
        record = asyncio.run(scenario())
    assert "client 5 disconnected: client 5 announced a message of 1048585 bytes" in caplog.text
    assert "are left of its budget for this phase" in caplog.text
    assert record.included == list(range(5))
    federation.check(record)
