"""Bytes that no decoder likes, and text that no terminal should see (S41, S48), over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peer_view import PeerView
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.peer_log import BURST
from lightsecagg.drivers.transport.communicator import Received
from lightsecagg.drivers.transport.grpc import GrpcClient, GrpcServer
from lightsecagg.errors import Aborted, PeerGone, TransportError
from lightsecagg.field.prime import PrimeField
from lightsecagg.protocol.messages import AbortRound, Opening
from lightsecagg.protocol.server import Server
from lightsecagg.protocol.settings import Settings, version_hash
from lightsecagg.protocol.wire import Codec
from lightsecagg.session import client as client_module
from lightsecagg.session import envelope
from lightsecagg.session import peers as peers_module
from lightsecagg.session.envelope import (
    VERSION,
    Goodbye,
    Hello,
    RoundModel,
    Withdraw,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.record import RoundRecord
from lightsecagg.session.round import RoundInProgress
from lightsecagg.session.round_client import RoundClientSession

CLIENTS = 8
HELLO = pack_control(Hello(VERSION, -1))
TAIL = msgspec.msgpack.encode("deep") + b"\x91" * 1100 + b"\xc0"


def deep(message: Any) -> bytes:
    """A control message in front of whose tag stands one unknown key, full of arrays in arrays."""
    encoded = msgspec.msgpack.encode(message)
    return b"\x00" + bytes([encoded[0] + 1]) + TAIL + encoded[1:]


def deep_settings(settings: Settings) -> bytes:
    """Settings whose last field but one, the asynchronous mode's table, is a map full of arrays."""
    encoded = settings.to_bytes()
    assert encoded.endswith(b"\xc0\x00")
    return encoded[:-2] + b"\x81" + TAIL + b"\x00"


def naive_unpack(data: bytes) -> Any:
    """As it was: only the errors that msgspec documents are expected."""
    if data[:1] == b"\x00":
        return envelope._decoder.decode(memoryview(data)[1:])
    return unpack(data)


def network(folder: Path) -> Federation:
    transport: Any = GrpcServer("127.0.0.1:0", range(CLIENTS), None, plaintext=True)
    return Federation(folder, CLIENTS, transport=transport)


def stream(federation: Federation, client: int) -> GrpcClient:
    address = federation.transport.address  # type: ignore[attr-defined]
    return GrpcClient(address, client, None, plaintext=True)


async def say(federation: Federation, *speech: bytes) -> str:
    """Client 7 says this; returns what it hears when it is cut."""
    odd = stream(federation, CLIENTS - 1)
    await odd.connect()
    try:
        for data in speech:
            await odd.send(data)
        while True:
            await odd.receive()
    except PeerGone as error:
        return str(error)
    finally:
        await odd.close()


async def round_with_hostile_client(federation: Federation, *speech: bytes) -> RoundRecord:
    """Clients 0 to 6 behave; 7 has spoken, and was cut, before they come."""
    listening, start = asyncio.Event(), federation.transport.start

    async def started() -> None:
        await start()
        listening.set()

    federation.transport.start = started  # type: ignore[method-assign]
    federation.awaited = CLIENTS - 1
    server = federation.server(wait_for_clients=60, settle=0, advertise=30, upload=30)
    serving = asyncio.create_task(server.run())
    try:
        await asyncio.wait_for(listening.wait(), 30)
        await asyncio.wait_for(say(federation, *speech), 30)
        honest = [
            federation.client(i, communicator=stream(federation, i), reconnect=60)
            for i in range(CLIENTS - 1)
        ]
        async with federation.connected(honest):
            (record,) = await asyncio.wait_for(serving, 120)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return record


@pytest.mark.parametrize("speech", [[deep(Hello(VERSION, -1))], [HELLO, deep(Withdraw(1, ""))]])
@pytest.mark.parametrize("decoder", [unpack, naive_unpack])
def test_S41_deep_nesting_from_a_client_ends_its_own_stream_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    decoder: Callable[[bytes], Any],
    speech: list[bytes],
) -> None:
    """Even if the decoder lets the `RecursionError` through, which the naive one does."""
    with pytest.raises(RecursionError):
        naive_unpack(speech[-1])
    monkeypatch.setattr(peers_module, "unpack", decoder)
    federation = network(tmp_path)
    record = asyncio.run(round_with_hostile_client(federation, *speech))
    assert record.included == list(range(CLIENTS - 1))
    assert record.refusals == {"DecodeError" if decoder is unpack else "RecursionError": 1}
    federation.check(record)


def test_S41_a_message_that_breaks_the_party_ends_its_senders_round_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some handler divides by zero for one client's upload: a fault that nobody has foreseen."""
    federation = Federation(tmp_path)
    receive = Server.receive

    def faulty(party: Any, client: int, message: Any) -> Any:
        if client == 7 and type(message).__name__ == "MaskedUpload":
            return 1 // 0
        return receive(party, client, message)

    monkeypatch.setattr(Server, "receive", faulty)
    (record,) = asyncio.run(federation.run(grace=5, upload=60))
    assert record.included == list(range(7))
    assert record.refusals == {"ZeroDivisionError": 1}
    assert record.dropped == {"upload": [7]}
    federation.check(record)


def test_S41_a_fault_that_no_message_caused_ends_the_round_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path)
    look, faults = RoundInProgress._look, iter([1])

    def faulty(round_: Any, now: float) -> None:
        if next(faults, None):
            raise KeyError("a secret")
        look(round_, now)

    monkeypatch.setattr(RoundInProgress, "_look", faulty)
    broken, record = asyncio.run(federation.run(retries=1))
    assert broken.aborted is not None
    assert broken.aborted.startswith("unforeseen KeyError at test_hostile_bytes.py:")
    federation.check(record)


# -- a server's bytes ------------------------------------------------------------------------------


@asynccontextmanager
async def lying_server(
    federation: Federation, **table: Any
) -> AsyncIterator[tuple[asyncio.Task[None], AsyncIterator[Any]]]:
    """A client's task, connected to a server that says what the test makes it say, and events."""
    await federation.transport.start()
    client = federation.client(0, communicator=stream(federation, 0), reconnect=30, **table)
    async with federation.connected([client]) as (task,):
        events = federation.transport.events()
        async for event in events:
            if isinstance(event, Received) and isinstance(unpack(event.data), Hello):
                break
        yield task, events
    await federation.transport.close()


@pytest.mark.parametrize("decoder", [unpack, naive_unpack])
def test_S41_deep_nesting_from_a_server_costs_a_client_a_round_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: Callable[[bytes], Any]
) -> None:
    monkeypatch.setattr(client_module, "unpack", decoder)
    federation = network(tmp_path)
    settings = federation.server()._settings

    async def scenario() -> Withdraw:
        async with lying_server(federation) as (task, events):
            opening = Codec(PrimeField(3)).encode(Opening(deep_settings(settings)))
            for data in (
                deep(RoundModel(1, b"", 1.0)),
                pack_control(RoundModel(1, b"", 1.0)),
                pack_protocol(1, opening),
            ):
                await federation.transport.send(0, data)
            event = await asyncio.wait_for(anext(events), 30)
            await federation.transport.send(0, pack_control(Goodbye("enough", finished=True)))
            await asyncio.wait_for(task, 30)  # it lived to hear the goodbye
            withdrawal = unpack(event.data)
            assert isinstance(withdrawal, Withdraw)
            return withdrawal

    withdrawal = asyncio.run(scenario())
    assert withdrawal.round == 1
    assert "malformed settings: maximum recursion depth" in withdrawal.reason


def test_S41_a_fault_of_the_party_costs_a_client_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server learns that the client does not follow, not why."""
    federation = Federation(tmp_path)
    make_party, faults = RoundClientSession._make_party, iter([1])

    def faulty(session: Any, *arguments: Any) -> Any:
        if session.client == 3 and next(faults, None):
            raise KeyError("a secret")
        return make_party(session, *arguments)

    monkeypatch.setattr(RoundClientSession, "_make_party", faulty)
    with caplog.at_level("INFO"):
        first, second = asyncio.run(federation.run(number=2, grace=5))
    assert first.included == [0, 1, 2, 4, 5, 6, 7]
    assert second.included == list(range(8))
    assert "client 3: cannot follow the server: unforeseen KeyError at" in caplog.text
    assert "it withdraws: 'this client cannot follow'" in caplog.text
    assert "a secret" not in caplog.text


# -- text ------------------------------------------------------------------------------------------

CLEAR = "\x1b[2J\x1b]0;owned\x07"
FORGED = f"{CLEAR}\n2026-01-01 00:00:00 ERROR   forged\u202e{'x' * 5000}"


def is_tame(text: str) -> bool:
    return text.isprintable() and len(text) < 500


def test_S48_a_client_that_comes_back_forever_cannot_fill_the_servers_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = b"\x00" + msgspec.msgpack.encode({"type": "Hello", FORGED: 1})
    with pytest.raises(msgspec.ValidationError) as naive:
        naive_unpack(hostile)
    assert CLEAR in str(naive.value)
    visits = 3 * BURST
    federation = network(tmp_path)

    async def scenario() -> None:
        peers = PeerView(federation.transport)
        await peers.start()

        async def watch() -> None:
            while True:
                await peers.next(0.1)

        watching = asyncio.create_task(watch())
        for _ in range(visits):
            heard = await asyncio.wait_for(say(federation, hostile), 30)
            assert "malformed control message" in heard
            assert is_tame(heard)
        watching.cancel()
        await peers.close()
        assert peers.refusals == {"DecodeError": visits}

    with caplog.at_level("INFO", "lightsecagg"):
        asyncio.run(scenario())
    lines = [r.getMessage() for r in caplog.records if "client 7" in r.getMessage()]
    cuts = [line for line in lines if line.startswith("client 7 cut: ")]
    told = [line for line in lines if line.endswith("lines about client 7 were left out here")]
    # How many it gets beyond the burst depends on how long the visits take.
    assert BURST <= len(cuts) < visits
    assert sum(int(line.split()[0]) for line in told) + len(lines) - len(told) == 2 * visits
    assert all(is_tame(line) for line in lines)


def test_S48_an_excuse_is_shown_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(tmp_path)

    class Excuse(RoundClientSession):
        def _withdraw(self, round_: Any, reason: str) -> None:
            super()._withdraw(round_, f"{CLEAR}\n{reason}{'x' * 400}")

    class Excused(FederationClient):
        session_type = Excuse

    federation.jobs[7].fail_in = 1

    async def scenario() -> Any:
        clients = [*(federation.client(i) for i in range(7)), federation.client(7, Excused)]
        async with federation.connected(clients):
            return await asyncio.wait_for(federation.server(grace=5).run(), 60)

    with caplog.at_level("INFO", "lightsecagg"):
        (record,) = asyncio.run(scenario())
    assert record.included == list(range(7))
    lines = [r.getMessage() for r in caplog.records if "withdraws" in r.getMessage()]
    assert len(lines) == 1
    assert is_tame(lines[0])
    assert r"\x1b[2J" in lines[0]


def test_S48_a_servers_words_are_shown_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its abort, its goodbye, and the reason for which it cuts a stream."""
    federation = network(tmp_path)
    settings = replace(federation.server()._settings, round=1, model=version_hash(b"", 1))

    async def scenario() -> str:
        async with lying_server(federation) as (task, events):
            federation.transport.disconnect(0, FORGED)
            async for event in events:
                if isinstance(event, Received):
                    break
            codec = Codec(PrimeField(3))
            for data in (
                pack_control(RoundModel(1, b"", 1.0)),
                pack_protocol(1, codec.encode(Opening(settings.to_bytes()))),
                pack_protocol(1, codec.encode(AbortRound(FORGED))),
                pack_control(Goodbye(FORGED, finished=False)),
            ):
                with suppress(PeerGone):
                    await federation.transport.send(0, data)
            with pytest.raises(Aborted) as caught:
                await asyncio.wait_for(asyncio.shield(task), 30)
            return str(caught.value)

    with caplog.at_level("INFO", "lightsecagg"):
        goodbye = asyncio.run(scenario())
    assert is_tame(goodbye)
    assert "forged" in goodbye
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("client 0: ")]
    assert all(is_tame(line) for line in lines)
    cut, aborted = (line for line in lines if "forged" in line)
    assert "trying again" in cut
    assert "round 1: " in aborted


def test_S48_a_name_in_a_refusal_is_shown_harmless(tmp_path: Path) -> None:
    federation = network(tmp_path)

    async def scenario() -> None:
        await federation.transport.start()
        refuse = federation.transport._refuse
        federation.transport._admit = lambda client: (_ for _ in ()).throw(  # type: ignore[method-assign]
            refuse("test", FORGED)
        )
        with pytest.raises(TransportError) as caught:
            await stream(federation, 0).connect()
        assert is_tame(str(caught.value))
        assert "forged" in str(caught.value)
        await federation.transport.close()

    asyncio.run(scenario())
