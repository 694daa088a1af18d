"""gRPC over real loopback sockets: who gets in, what is cut, and every wait's end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lightsecagg.drivers.transport.certificates import Authority, Validity
from lightsecagg.drivers.transport.communicator import (
    Connected,
    Disconnected,
    Event,
    Limits,
    Received,
)
from lightsecagg.drivers.transport.framing import MAX_CHUNK, PAYLOAD, chunks
from lightsecagg.drivers.transport.stream_server import StreamServer
from lightsecagg.drivers.transport.tls import Credentials
from lightsecagg.errors import ConfigurationError, PeerGone, Refused, TransportError

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc.aio")

from lightsecagg.drivers.transport.grpc import GrpcClient, GrpcServer  # noqa: E402

Run = Callable[[Callable[[], Awaitable[None]]], None]
Save = Callable[..., Credentials]

LIMITS = Limits(connect_timeout=5, stall_timeout=5, close_timeout=3)
SHORT = replace(LIMITS, stall_timeout=0.3, queue=2)
EXPIRED = Validity(datetime.now(UTC) - timedelta(days=2), datetime.now(UTC) - timedelta(days=1))
METHOD = "/lightsecagg.v2.Transport/Stream"


@asynccontextmanager
async def serving(
    credentials: Credentials | None = None, limits: Limits = LIMITS, clients: int = 8
) -> AsyncIterator[tuple[GrpcServer, AsyncIterator[Event]]]:
    server = GrpcServer(
        "127.0.0.1:0", range(clients), credentials, plaintext=credentials is None, limits=limits
    )
    await server.start()
    try:
        yield server, server.events()
    finally:
        await server.close()


def lab_client(server: GrpcServer, client: int, limits: Limits = LIMITS) -> GrpcClient:
    return GrpcClient(server.address, client, None, plaintext=True, limits=limits)


@asynccontextmanager
async def raw_stream(server: GrpcServer, client: int = 0, **options: Any) -> AsyncIterator[Any]:
    """A peer that speaks gRPC but not our framing."""
    unlimited = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(server.address, unlimited) as channel:
        call = channel.stream_stream(METHOD)(
            metadata=(("lightsecagg-client", str(client)),), **options
        )
        yield call
        call.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event announces; the scenario's deadline bounds it."""
    while not condition():
        await asyncio.sleep(0.01)


async def next_cut(events: AsyncIterator[Event]) -> str:
    async for event in events:
        if isinstance(event, Disconnected):
            return event.reason
    raise AssertionError("the events ended")


# -- carrying -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [True, False])
def test_messages_arrive_whole_and_in_order_both_ways(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials, tls: bool
) -> None:
    messages = [b"a", bytes(3 * PAYLOAD + 5), b"b"]

    async def scenario() -> None:
        async with serving(server_credentials if tls else None) as (server, events):
            if tls:
                credentials = save(authority.issue_client(3))
                client = GrpcClient(server.address, 3, credentials, limits=LIMITS)
            else:
                client = lab_client(server, 3)
            await client.connect()
            assert await anext(events) == Connected(3)
            server.set_budget(3, 4 * PAYLOAD)

            async def send_all() -> None:
                for message in messages:
                    await client.send(message)
                    await server.send(3, message)

            sending = asyncio.create_task(send_all())
            assert [await anext(events) for _ in messages] == [Received(3, m) for m in messages]
            assert [await client.receive() for _ in messages] == messages
            await sending
            await client.close()
            assert await anext(events) == Disconnected(3, "closed by the peer")
            assert server.stats.total == client.traffic
            assert server.stats.refused == {}
            assert server.stats.handshakes == int(tls)

    run(scenario)


def test_many_clients_of_one_process_keep_their_identities(run: Run) -> None:
    async def scenario() -> None:
        async with serving(clients=20) as (server, events):
            clients = [lab_client(server, number) for number in range(20)]
            await asyncio.gather(*(client.connect() for client in clients))
            await asyncio.gather(*(c.send(bytes([n + 1])) for n, c in enumerate(clients)))
            seen: dict[int, bytes] = {}
            while len(seen) < 20:
                event = await anext(events)
                if isinstance(event, Received):
                    seen[event.client] = event.data
            assert seen == {number: bytes([number + 1]) for number in range(20)}
            await asyncio.gather(*(client.close() for client in clients))

    run(scenario)


def test_close_lets_queued_messages_leave_and_tells_why(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as (server, events):
            client = lab_client(server, 0)
            await client.connect()
            for number in range(5):
                await server.send(0, bytes([number + 1]) * PAYLOAD)
            closing = asyncio.create_task(server.close())
            for number in range(5):
                assert await client.receive() == bytes([number + 1]) * PAYLOAD
            with pytest.raises(PeerGone, match="the server closed the stream"):
                await client.receive()
            await closing
            kinds = [type(event) async for event in events]
            assert kinds == [Connected, Disconnected]
            with pytest.raises(TransportError, match="no server listens"):
                await client.connect()
            await client.close()

    run(scenario)


def test_a_client_that_sends_and_closes_loses_nothing(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as (server, events):
            server.set_budget(0, 10 * PAYLOAD)
            client = lab_client(server, 0)
            await client.connect()
            for number in range(5):
                await client.send(bytes([number + 1]) * PAYLOAD)
            closing = asyncio.create_task(client.close())
            received = [event async for event in events_until_gone(events)]
            await closing
            assert received == [Received(0, bytes([n + 1]) * PAYLOAD) for n in range(5)]

    run(scenario)


async def events_until_gone(events: AsyncIterator[Event]) -> AsyncIterator[Received]:
    async for event in events:
        if isinstance(event, Disconnected):
            return
        if isinstance(event, Received):
            yield event


def test_newer_stream_of_an_identity_replaces_the_older(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as (server, events):
            older, newer = lab_client(server, 1), lab_client(server, 1)
            await older.connect()
            await newer.connect()
            reason = "replaced by a newer stream of the same identity"
            expected = [Connected(1), Disconnected(1, reason), Connected(1)]
            assert [await anext(events) for _ in range(3)] == expected
            with pytest.raises(PeerGone, match="the server cut the stream: replaced by a newer"):
                await older.receive()
            await newer.send(b"still here")
            assert await anext(events) == Received(1, b"still here")
            await asyncio.gather(older.close(), newer.close())

    run(scenario)


def test_a_cut_client_learns_why(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as (server, events):
            client = lab_client(server, 1)
            await client.connect()
            assert await anext(events) == Connected(1)
            server.disconnect(1, "its third invalid message")
            assert await anext(events) == Disconnected(1, "its third invalid message")
            with pytest.raises(PeerGone, match="cut the stream: its third invalid message"):
                await client.receive()
            with pytest.raises(PeerGone, match="its third invalid message"):
                await client.send(b"x")
            await client.close()

    run(scenario)


# -- S24: who gets in ---------------------------------------------------------------------------


class Careless(Credentials):
    """Credentials whose owner does not look at them: what the other side alone must refuse."""

    __slots__ = ()

    def check_client(self, client: int, now: datetime | None = None) -> None:
        pass

    def check_server(self, now: datetime | None = None) -> None:
        pass


def careless(given: Credentials) -> Credentials:
    return Careless(
        given.authority_file,
        given.certificate_file,
        given.key_file,
        given.authority,
        given.certificate,
        given.key,
    )


@pytest.mark.parametrize("case", ["wrong authority", "expired", "server's"])
def test_S24_bad_client_certificates_are_refused_on_both_sides(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials, case: str
) -> None:
    issued, reason = {
        "wrong authority": (
            Authority.create(Validity.for_days(1)).issue_client(1),
            "not issued by the authority",
        ),
        "expired": (authority.issue_client(1, EXPIRED), "expired on"),
        "server's": (authority.issue_server("localhost"), "names no client"),
    }[case]
    limits = replace(LIMITS, connect_timeout=1)

    async def scenario() -> None:
        async with serving(server_credentials, limits) as (server, _events):
            credentials = save(issued)
            with pytest.raises(Refused, match=reason):
                await GrpcClient(server.address, 1, credentials, limits=limits).connect()
            assert server.stats.handshakes == 0
            client = GrpcClient(server.address, 1, careless(credentials), limits=limits)
            with pytest.raises(TransportError, match="refused this client's certificate"):
                await client.connect()
            await until(lambda: server.stats.refused["TLS handshake"] > 0)
            assert server.stats.clients == {}

    run(scenario)


def test_S24_no_certificate_no_stream(run: Run, server_credentials: Credentials) -> None:
    with pytest.raises(ConfigurationError, match="mutual TLS needs"):
        GrpcClient("127.0.0.1:1", 1, None)

    async def scenario() -> None:
        limits = replace(LIMITS, connect_timeout=1)
        async with serving(server_credentials, limits) as (server, _events):
            tls = grpc.ssl_channel_credentials(server_credentials.authority)
            async with grpc.aio.secure_channel(server.address, tls) as channel:
                call = channel.stream_stream(METHOD)(metadata=(("lightsecagg-client", "1"),))
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
            plain = GrpcClient(server.address, 1, None, plaintext=True, limits=limits)
            with pytest.raises(TransportError, match="cannot connect"):
                await plain.connect()
            await until(lambda: server.stats.refused["TLS handshake"] > 0)
            assert server.stats.clients == {}

    run(scenario)


def test_S24_a_client_verifies_its_server(run: Run, save: Save, authority: Authority) -> None:
    stranger = Authority.create(Validity.for_days(1))

    async def refused(server_credentials: Credentials, reason: str, **name: str) -> None:
        async with serving(server_credentials) as (server, _events):
            credentials = save(authority.issue_client(1))
            client = GrpcClient(server.address, 1, credentials, limits=LIMITS, **name)
            with pytest.raises(Refused, match=reason):
                await client.connect()

    async def scenario() -> None:
        impostor = save(stranger.issue_server("localhost"), stranger)
        await refused(impostor, "server's certificate was refused: .*issuer")
        expired = careless(save(authority.issue_server("localhost", EXPIRED)))
        await refused(expired, "server's certificate was refused: certificate has expired")
        elsewhere = save(authority.issue_server("other.example"))
        await refused(elsewhere, r"server's certificate was refused: .*127\.0\.0\.1")
        here = save(authority.issue_server("localhost"))
        await refused(here, "name to it .it is other.example", server_name="other.example")
        another_client = careless(save(authority.issue_client(2)))
        await refused(another_client, "server's certificate was refused")

    run(scenario)


def test_S24_only_a_client_that_was_never_let_in_is_refused_for_good(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials
) -> None:
    """An impostor at the server's address ends a misconfigured client, not one that was inside."""
    stranger = Authority.create(Validity.for_days(1))
    impostor = save(stranger.issue_server("localhost"), stranger)
    credentials = save(authority.issue_client(1))

    async def scenario() -> None:
        async with serving(server_credentials) as (server, _events):
            address = server.address
            inside = GrpcClient(address, 1, credentials, limits=LIMITS)
            await inside.connect()
            await inside.close()
        with pytest.raises(TransportError, match="no server listens") as down:
            await GrpcClient(address, 1, credentials, limits=LIMITS).connect()
        assert not isinstance(down.value, Refused)
        false = GrpcServer(address, range(2), impostor, limits=LIMITS)
        await false.start()
        with pytest.raises(Refused, match=r"not issued by .*ca\.pem: check \[tls\] ca"):
            await GrpcClient(address, 1, credentials, limits=LIMITS).connect()
        with pytest.raises(TransportError, match="certificate was refused") as refused:
            await inside.connect()
        assert not isinstance(refused.value, Refused)
        await false.close()
        true = GrpcServer(address, range(2), server_credentials, limits=LIMITS)
        await true.start()
        await inside.connect()
        await inside.close()
        await true.close()

    run(scenario)


def test_S24_a_server_that_is_closing_refuses_nobody_for_good(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials
) -> None:
    async def scenario() -> None:
        async with serving(server_credentials) as (server, _events):
            client = GrpcClient(server.address, 1, save(authority.issue_client(1)), limits=LIMITS)
            await StreamServer.close(server)  # the socket still listens
            with pytest.raises(TransportError, match="the server is closing") as refused:
                await client.connect()
            assert not isinstance(refused.value, Refused)

    run(scenario)


def test_S24_a_server_examines_its_own_files(run: Run, save: Save, authority: Authority) -> None:
    async def scenario() -> None:
        for credentials, reason in (
            (save(authority.issue_server("localhost", EXPIRED)), "expired on"),
            (save(authority.issue_client(2)), "not issued to a server"),
            (save(Authority.create(Validity.for_days(1)).issue_server("a")), "not issued by"),
        ):
            with pytest.raises(TransportError, match=reason):
                await GrpcServer("127.0.0.1:0", range(2), credentials).start()

    run(scenario)


def test_S24_the_certificate_decides_who_a_client_is(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials
) -> None:
    async def scenario() -> None:
        async with serving(server_credentials) as (server, _events):
            own = save(authority.issue_client(2))
            with pytest.raises(Refused, match="certificate of client 2, but this is cl"):
                await GrpcClient(server.address, 3, own, limits=LIMITS).connect()
            with pytest.raises(Refused, match="certificate of client 2 calls itself cl"):
                await GrpcClient(server.address, 3, careless(own), limits=LIMITS).connect()
            assert server.stats.refused == {"identity mismatch": 1}
            unknown = save(authority.issue_client(99))
            with pytest.raises(Refused, match="client 99 is not on the allow-list"):
                await GrpcClient(server.address, 99, unknown, limits=LIMITS).connect()
            assert server.stats.refused["unknown client"] == 1
            assert server.stats.clients == {}

    run(scenario)


def test_S24_plaintext_is_explicit_and_stays_on_loopback(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials
) -> None:
    with pytest.raises(ConfigurationError, match="mutual TLS needs"):
        GrpcServer("127.0.0.1:0", range(2), None)
    for host in ("0.0.0.0", "10.1.2.3", "server.example"):  # noqa: S104
        with pytest.raises(ConfigurationError, match=f"plaintext to or on {host} is refused"):
            GrpcServer(f"{host}:0", range(2), None, plaintext=True)
        with pytest.raises(ConfigurationError, match=f"plaintext to or on {host} is refused"):
            GrpcClient(f"{host}:1", 1, None, plaintext=True)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        GrpcServer("127.0.0.1:0", range(2), server_credentials, plaintext=True)

    async def scenario() -> None:
        async with serving() as (server, _events):
            credentials = save(authority.issue_client(1))
            with pytest.raises(TransportError, match=r"does not speak TLS|does expect TLS"):
                await GrpcClient(server.address, 1, credentials, limits=LIMITS).connect()
            for announced in ("", "x", "01", "-1", "99999999999"):
                async with grpc.aio.insecure_channel(server.address) as channel:
                    call = channel.stream_stream(METHOD)(
                        metadata=(("lightsecagg-client", announced),)
                    )
                    assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert server.stats.refused == {"no identity": 5}

    run(scenario)


# -- S25: sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (struct.pack("!BBHI", 2, 0, 0, 2 << 30) + bytes(PAYLOAD), "2147483648 bytes, 65536 are"),
        (struct.pack("!BBHI", 2, 0, 0, 2 << 30), "a chunk has 9 to 262144 bytes"),
        (bytes(MAX_CHUNK + 1), "a chunk has 9 to 262144 bytes, this one 262145"),
        (next(chunks(bytes(65537))), "65537 bytes, 65536 are left of its budget"),
    ],
)
def test_S25_oversized_claims_and_chunks_are_cut(run: Run, chunk: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with serving() as (server, events), raw_stream(server) as call:
            await call.write(chunk)
            assert reason in await next_cut(events)
            assert await call.code() is grpc.StatusCode.ABORTED
            assert reason in await call.details()
            assert server.stats.total.messages_in == 0

    run(scenario)


def test_S25_grpc_refuses_a_huge_chunk_by_its_announced_length(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as (server, events), raw_stream(server) as call:
            await call.write(bytes(64 << 20))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await next_cut(events)
            assert server.stats.total.bytes_in == 0

    run(scenario)


@pytest.mark.parametrize("algorithm", ["Gzip", "Deflate"])
def test_S25_compressed_requests_are_refused(run: Run, algorithm: str) -> None:
    async def scenario() -> None:
        async with serving() as (server, _events):
            compression = grpc.Compression[algorithm]
            async with raw_stream(server, compression=compression) as call:
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "is disabled" in await call.details()
            await until(lambda: server.stats.refused["ended early"] == 1)
            assert server.stats.clients == {}

    run(scenario)


# -- S26, S27, S28: slow, greedy and mad peers --------------------------------------------------


def test_S26_a_peer_that_stalls_inside_a_message_is_cut(run: Run) -> None:
    async def scenario() -> None:
        async with serving(limits=SHORT) as (server, events), raw_stream(server) as call:
            server.set_budget(0, 4 * PAYLOAD)
            await call.write(next(chunks(bytes(2 * PAYLOAD))))
            assert await next_cut(events) == "the peer stalled inside a message for 0.3 s"

    run(scenario)


def test_S27_a_flood_waits_for_the_consumer(run: Run) -> None:
    async def scenario() -> None:
        async with serving(limits=replace(LIMITS, queue=2)) as (server, events):
            server.set_budget(0, 1 << 30)
            client = lab_client(server, 0, replace(LIMITS, queue=2))
            await client.connect()
            sent = 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    await client.send(bytes(PAYLOAD))
                    sent += 1

            flooding = asyncio.create_task(flood())
            # Three reach this side of the socket: two as events, one that waits for their room.
            await until(lambda: server.stats.total.messages_in == 3)
            assert await anext(events) == Connected(0)
            for number in range(10):
                await anext(events)
                assert server.stats.total.messages_in <= number + 5
            flooding.cancel()
            assert sent < 1000
            server.disconnect(0, "enough")
            await client.close()

    run(scenario)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def test_R60_connections_that_open_no_stream_leave_room_for_others(
    run: Run, save: Save, authority: Authority, server_credentials: Credentials
) -> None:
    """Of a peer with a certificate, which may be revoked: its handshake is good."""
    mine, other = save(authority.issue_client(0)), save(authority.issue_client(1))
    tls = ssl.create_default_context(cafile=mine.authority_file)
    tls.load_cert_chain(mine.certificate_file, mine.key_file)
    tls.set_alpn_protocols(["h2"])
    few = replace(LIMITS, connections=4, connect_timeout=1)

    async def idle(host: str, port: str) -> Any:
        """A connection of HTTP/2, which says all that it must, and nothing else."""
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=tls, server_hostname="localhost"
        )
        writer.write(PREFACE)
        await reader.readexactly(9)  # the server's settings: the connection is whole
        return reader, writer

    async def scenario() -> None:
        async with serving(server_credentials, few) as (server, events):
            held = [await idle(*server.address.split(":")) for _ in range(few.connections)]
            for reader, writer in held:
                await reader.read()  # until the server ends it
                writer.transport.abort()
            client = GrpcClient(server.address, 1, other, limits=few)
            await client.connect()
            assert await anext(events) == Connected(1)
            await client.close()

    run(scenario)


def request(stream: int) -> bytes:
    """A frame of HTTP/2 that opens a stream of our method, without saying for which client."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": METHOD.encode(),
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    block = b"".join(
        bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items()
    )
    return len(block).to_bytes(3, "big") + bytes([1, 4]) + stream.to_bytes(4, "big") + block


def test_R60_a_connection_whose_streams_are_refused_does_not_live_for_ever(run: Run) -> None:
    """It is never idle for long: it opens one stream after the other."""
    few = replace(LIMITS, connections=2, connect_timeout=1, keepalive=2)

    async def refused_for_ever(server: GrpcServer) -> int:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(PREFACE + bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))  # it takes our settings
        opened, ended = 0, asyncio.create_task(reader.read())
        while not ended.done() and opened < 100:
            writer.write(request(2 * opened + 1))
            opened += 1
            await asyncio.wait([ended], timeout=0.3)
        writer.transport.abort()
        ended.cancel()
        return opened

    async def scenario() -> None:
        async with serving(limits=few) as (server, events):
            client = lab_client(server, 1, few)
            await client.connect()
            assert await anext(events) == Connected(1)
            assert 2 <= await refused_for_ever(server) < 100
            assert server.stats.refused["no identity"] >= 2
            await client.send(b"a stream that was let in goes on")
            assert isinstance(await anext(events), Received)
            await client.close()

    run(scenario)


def test_S28_fuzzed_streams_end_with_a_reason_and_harm_nobody(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    generator = random.Random(28)

    async def fuzz(server: GrpcServer) -> None:
        async with raw_stream(server, client=generator.randrange(1, 8)) as call:
            await call.initial_metadata()
            try:
                for _ in range(generator.randrange(1, 6)):
                    chunk = bytearray(next(chunks(generator.randbytes(50))))
                    for _ in range(generator.randrange(4)):
                        chunk[generator.randrange(len(chunk))] = generator.randrange(256)
                    await call.write(bytes(chunk[: generator.randrange(len(chunk) + 1)]))
                if generator.random() < 0.5:
                    await call.done_writing()
                    await call.code()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass

    async def scenario() -> None:
        async with serving() as (server, events):
            honest = lab_client(server, 0)
            await honest.connect()
            reasons: list[str] = []
            done = asyncio.Event()

            async def consume() -> None:
                async for event in events:
                    if isinstance(event, Disconnected):
                        reasons.append(event.reason)
                    elif event == Received(0, b"still here"):
                        done.set()

            consuming = asyncio.create_task(consume())
            for _ in range(20):
                await asyncio.gather(*(fuzz(server) for _ in range(4)))
            host, _, port = server.address.rpartition(":")
            for _ in range(20):
                _reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(generator.randbytes(200))
                await writer.drain()
                writer.transport.abort()
            await honest.send(b"still here")
            await done.wait()
            await server.send(0, b"so are you")
            assert await honest.receive() == b"so are you"
            await honest.close()
            await server.close()
            await consuming
            assert len(reasons) == 81
            assert any("chunk" in reason for reason in reasons)

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# -- R35: every wait ends -----------------------------------------------------------------------


def test_R35_connecting_to_a_silent_host_ends(run: Run) -> None:
    async def scenario() -> None:
        async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await stop.wait()
            finally:
                writer.transport.abort()  # the loop may end first, and cancel the wait

        stop = asyncio.Event()
        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        limits = replace(LIMITS, connect_timeout=0.3)
        client = GrpcClient(f"127.0.0.1:{port}", 0, None, plaintext=True, limits=limits)
        with pytest.raises(TransportError, match=r"did not answer within 0\.3 s"):
            await client.connect()
        stop.set()
        listener.close()

    run(scenario)


def test_R35_connecting_to_nobody_ends(run: Run, save: Save, authority: Authority) -> None:
    async def scenario() -> None:
        async with serving() as (server, _events):
            address = server.address
        credentials = save(authority.issue_client(0))
        for client in (
            GrpcClient(address, 0, None, plaintext=True, limits=LIMITS),
            GrpcClient(address, 0, credentials, limits=LIMITS),
        ):
            with pytest.raises(
                TransportError, match=r"no server listens at .* is the server running"
            ):
                await client.connect()

    run(scenario)


def test_R35_a_handshake_that_never_comes_ends(run: Run, server_credentials: Credentials) -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, connect_timeout=0.3)
        async with serving(server_credentials, limits) as (server, _events):
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b""
            writer.close()
            await until(lambda: server.stats.refused["TLS handshake"] == 1)

    run(scenario)


def test_R35_sending_to_a_peer_that_does_not_read_ends(run: Run) -> None:
    async def scenario() -> None:
        async with serving(limits=SHORT) as (server, events), raw_stream(server) as call:
            await call.initial_metadata()

            async def flood() -> None:
                while True:
                    await server.send(0, bytes(4 * PAYLOAD))

            with pytest.raises(PeerGone, match=r"the peer took no data for 0\.3 s"):
                await flood()
            assert await next_cut(events) == "the peer took no data for 0.3 s"

    run(scenario)


def test_R35_closing_does_not_wait_for_a_peer_that_does_not_read(run: Run) -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, close_timeout=0.3)
        async with serving(limits=limits) as (server, events), raw_stream(server) as call:
            await call.initial_metadata()
            for _ in range(limits.queue):
                await server.send(0, bytes(4 * PAYLOAD))
            await server.close()
            assert await next_cut(events) == "closed by this side"

    run(scenario)


def test_R35_closing_a_client_does_not_wait_for_a_server_that_does_not_read(run: Run) -> None:
    async def scenario() -> None:
        async with serving(limits=replace(LIMITS, queue=1)) as (server, events):
            server.set_budget(0, 1 << 30)
            client = lab_client(server, 0, replace(LIMITS, close_timeout=0.3))
            await client.connect()
            for _ in range(LIMITS.queue):
                await client.send(bytes(4 * PAYLOAD))
            await client.close()
            async for event in events:
                if isinstance(event, Disconnected):
                    break

    run(scenario)


def test_a_second_server_on_the_same_port_is_refused(run: Run) -> None:
    async def scenario() -> None:
        async with serving() as (server, _events):
            rival = GrpcServer(server.address, range(2), None, plaintext=True)
            with pytest.raises(TransportError, match=r"cannot listen on .* another server"):
                await rival.start()

    run(scenario)


def test_R37_another_version_is_refused_with_a_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving() as (server, _events):
            service = "lightsecagg.v1.Transport"
            monkeypatch.setattr("lightsecagg.drivers.transport.grpc._SERVICE", service)
            with pytest.raises(Refused, match="speaks another version"):
                await lab_client(server, 0).connect()

    run(scenario)


def test_a_port_in_use_is_said_once_and_by_us() -> None:
    """In a process of its own: what the library itself prints passes pytest by."""
    program = """
import asyncio, socket
from lightsecagg.drivers.transport.grpc import GrpcServer
from lightsecagg.errors import TransportError

async def main():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        try:
            await GrpcServer(address, {0}, None, plaintext=True).start()
        except TransportError as error:
            print(error)

asyncio.run(main())
"""
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=kept, check=False
    )
    assert "is another server running there?" in done.stdout
    assert done.stderr == ""
