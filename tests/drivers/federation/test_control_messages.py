"""What the managers do with peers that say the wrong thing, too much, too late or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from peer_view import PeerView
from small_federation import Federation

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.transport.communicator import Connected, Disconnected, Limits, Received
from lightsecagg.errors import Aborted, PeerGone, TransportError
from lightsecagg.field.prime import PrimeField
from lightsecagg.protocol import messages
from lightsecagg.protocol.messages import MaskedUpload, Opening
from lightsecagg.protocol.wire import Codec
from lightsecagg.session import peers as peers_module
from lightsecagg.session.envelope import (
    VERSION,
    Goodbye,
    Hello,
    RoundModel,
    RoundOver,
    UploadStored,
    Withdraw,
    name_of,
    pack_control,
    pack_protocol,
    unpack,
)
from lightsecagg.session.record import RoundRecord
from memory_transport import MemoryClient, MemoryServer

HELLO = pack_control(Hello(VERSION, -1))

# What a stranger with a valid certificate may say, in place of or after its hello.
SPEECHES: dict[str, list[bytes]] = {
    "nothing": [],
    "garbage": [b"\xff\xfe\xfd"],
    "an empty control message": [b"\x00"],
    "a control message cut short": [HELLO[:-1]],
    "a protocol message before hello": [pack_protocol(1, b"\x05" * 40)],
    "hello twice": [HELLO, HELLO],
    "a goodbye": [HELLO, pack_control(Goodbye("bye", finished=True))],
    "a model": [HELLO, pack_control(RoundModel(1, b"", 1.0))],
    "an acknowledgement": [HELLO, pack_control(UploadStored(1))],
    "the end of a round": [HELLO, pack_control(RoundOver(1))],
    "a withdrawal of another round": [HELLO, pack_control(Withdraw(77, "why not"))],
    "a withdrawal of every round": [HELLO, *(pack_control(Withdraw(n, "\n")) for n in range(9))],
    "a huge excuse": [
        HELLO,
        b"\x00" + msgspec.msgpack.encode({"type": "Withdraw", "round": 1, "reason": "x" * 501}),
    ],
    "a negative round": [pack_control(Hello(VERSION, -(2**63)))],
    "a round of the future": [pack_control(Hello(VERSION, 2**63))],
    "a message of another round": [HELLO, pack_protocol(12345, b"\x01")],
    "garbage in this round": [HELLO, pack_protocol(1, bytes(range(64)))],
    "an empty protocol message": [HELLO, pack_protocol(1, b"")],
}


class Odd:
    """A client that says what it is told to, listens, and may answer to the first message."""

    def __init__(
        self, communicator: MemoryClient, speech: list[bytes], answer: bytes | None = None
    ) -> None:
        self.communicator, self.speech, self.answer = communicator, speech, answer
        self.heard: list[Any] = []
        self.cut: str | None = None

    async def run(self) -> None:
        while True:
            try:
                await self.communicator.connect()
                break
            except TransportError:
                await asyncio.sleep(0.02)
        try:
            for data in self.speech:
                await self.communicator.send(data)
            while True:
                self.heard.append(unpack(await self.communicator.receive()))
                if self.answer is not None and len(self.heard) == 1:
                    await self.communicator.send(self.answer)
        except PeerGone as error:
            self.cut = str(error)


async def with_odd_client(
    federation: Federation, odd: Odd, **rounds: Any
) -> tuple[RoundRecord, ...]:
    """Clients 0 to 6 behave, 7 does not.

    The odd one may be among the first seven to greet, or never advertise: the server waits long
    enough for the others even if they get little of the processor.
    """
    federation.awaited = 7
    rounds = {"settle": 1.0, "advertise": 2.0} | rounds
    clients: list[Any] = [*(federation.client(i) for i in range(7)), odd]
    async with federation.connected(clients):
        return tuple(await asyncio.wait_for(federation.server(**rounds).run(), 30))


@pytest.mark.parametrize("speech", SPEECHES, ids=lambda name: name.replace(" ", "-"))
def test_S29_whatever_one_client_says_the_others_sum(tmp_path: Path, speech: str) -> None:
    federation = Federation(tmp_path)
    odd = Odd(federation.transport.client(7), SPEECHES[speech])
    (record,) = asyncio.run(with_odd_client(federation, odd))
    assert record.included == list(range(7))
    federation.check(record)


@pytest.mark.parametrize(
    ("speech", "reason"),
    [
        ("garbage", "neither a control nor a protocol message"),
        ("a protocol message before hello", "client 7 spoke before its hello"),
        ("hello twice", "client 7 said hello twice on one stream"),
        ("a goodbye", "client 7 sent Goodbye, which only servers send"),
        ("a huge excuse", "malformed control message"),
    ],
)
def test_S29_a_client_that_is_cut_hears_why(tmp_path: Path, speech: str, reason: str) -> None:
    federation = Federation(tmp_path)
    odd = Odd(federation.transport.client(7), SPEECHES[speech])
    (record,) = asyncio.run(with_odd_client(federation, odd))
    assert odd.cut is not None
    assert reason in odd.cut
    assert sum(record.refusals.values()) == 1


ANSWERS = {
    "garbage": (pack_protocol(1, bytes(range(64))), "DecodeError"),
    "nothing at all": (pack_protocol(1, b""), "DecodeError"),
    "a roster": (pack_protocol(1, Codec(PrimeField(5)).encode(messages.Roster(()))), None),
    "a refusal": (pack_protocol(1, Codec(PrimeField(5)).encode(messages.Refusal(0, (1,)))), None),
    "an upload": (
        pack_protocol(
            1, Codec(PrimeField(5)).encode(MaskedUpload(messages.Tag(1), np.zeros(3, np.uint32)))
        ),
        None,
    ),
    "false keys": (
        pack_protocol(1, Codec(PrimeField(5)).encode(messages.Advertise((bytes(32),), bytes(64)))),
        None,
    ),
}


@pytest.mark.parametrize("name", ANSWERS, ids=lambda name: name.replace(" ", "-"))
def test_S29_a_wrong_answer_ends_the_round_for_its_sender_only(tmp_path: Path, name: str) -> None:
    answer, error = ANSWERS[name]
    federation = Federation(tmp_path)
    odd = Odd(federation.transport.client(7), [HELLO], answer)
    (record,) = asyncio.run(with_odd_client(federation, odd, settle=5, advertise=600))
    assert record.dropped == {"advertise": [7]}
    assert record.refusals == {error or "RemoteProtocolError": 1}
    assert odd.cut is not None
    assert odd.cut.startswith("the server cut the stream: ")
    federation.check(record)


def test_R37_another_version_is_turned_away_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightsecagg.session.client.VERSION", VERSION + 1)
    federation = Federation(tmp_path)
    future = federation.client(7)

    async def scenario() -> Any:
        everybody: list[Any] = [Impostor(federation, i) for i in range(7)]
        async with federation.connected([future, *everybody]) as (task, *_):
            with pytest.raises(Aborted):
                await federation.server(wait_for_clients=1.0).run()
            return (await asyncio.gather(task, return_exceptions=True))[0]

    error = asyncio.run(scenario())
    # It ended by itself, at the first answer.
    assert isinstance(error, Aborted)
    assert f"this server speaks version {VERSION}" in str(error)
    assert f"the client version {VERSION + 1}" in str(error)
    assert "client 7 is turned away" in caplog.text
    assert caplog.text.count("turned away") == 1


class Impostor:
    """Connects and says nothing: makes the server wait."""

    def __init__(self, federation: Federation, client: int) -> None:
        self._odd = Odd(federation.transport.client(client), [])

    async def run(self) -> None:
        await self._odd.run()


def test_R35_a_stream_that_never_greets_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "GREETING_DEADLINE", 0.2)
    federation = Federation(tmp_path)
    odd = Odd(federation.transport.client(7), [])
    asyncio.run(with_odd_client(federation, odd, settle=1.5))
    assert odd.cut is not None
    assert "it did not say hello within 0.2 s" in odd.cut


class Silent(FederationClient):
    """Stays connected, but stops answering in one phase."""

    kind = ""

    async def _post(self, data: bytes) -> None:
        if name_of(data) != self.kind:
            await super()._post(data)


SILENCES = ["Advertise", "ShareBundle", "MaskedUpload", "Consent", "AggregatedShare"]


def silent_at(name: str) -> Callable[..., FederationClient]:
    return type(f"SilentAt{name}", (Silent,), {"kind": name})


@pytest.mark.parametrize("name", SILENCES)
@pytest.mark.parametrize("count", [2, 3])
def test_R35_silence_in_any_phase_ends_at_its_deadline(
    tmp_path: Path, name: str, count: int
) -> None:
    """D = 2 silent clients are survived; one more ends in an explained abort, never in a hang."""
    federation = Federation(tmp_path)
    deadlines = dict.fromkeys(("advertise", "share", "upload", "agree", "recover"), 2.0)

    async def scenario() -> list[RoundRecord]:
        kinds = [silent_at(name)] * count + [FederationClient] * (8 - count)
        clients = [federation.client(i, kind) for i, kind in enumerate(kinds)]
        async with federation.connected(clients):
            server = federation.server(**deadlines)
            if count == 2:
                return await asyncio.wait_for(server.run(), 30)
            with pytest.raises(Aborted, match=r"1 attempts at round 1: .* needed"):
                await asyncio.wait_for(server.run(), 30)
            return server.records

    (record,) = asyncio.run(scenario())
    if count == 2:
        federation.check(record)
    else:
        assert record.aborted is not None
        assert record.included == []
        assert federation.job.result is None


def test_S25_a_client_that_floods_is_cut_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path)
    odd = Odd(federation.transport.client(7), [HELLO, *[pack_protocol(9, bytes(60_000))] * 4])
    (record,) = asyncio.run(with_odd_client(federation, odd))
    assert odd.cut is not None
    assert "are left of its budget for this phase" in odd.cut
    federation.check(record)
    assert record.included == list(range(7))


def test_a_client_that_takes_no_data_is_cut_before_memory_fills(tmp_path: Path) -> None:
    async def scenario() -> None:
        transport = MemoryServer(range(2), Limits(queue=2))
        peers = PeerView(transport)
        await peers.start()
        deaf, attentive = transport.client(0), transport.client(1)
        for client in (deaf, attentive):
            await client.connect()
            await client.send(HELLO)
        while len(peers.ready()) < 2:
            await peers.next(1.0)
        transport.set_backlog(5_000)
        told, gone = 0, None
        while not isinstance(gone, Disconnected):
            for client in (0, 1):
                peers.post(client, bytes(1000))
            told += 1
            await attentive.receive()
            gone = await peers.next(0.01)
        # Room for five messages in its queue, and for a few in what carries the chunks.
        assert peers.ready() == [1]
        assert told < 20
        assert gone.client == 0
        assert "it takes its data too slowly: 5000 bytes wait for it" in gone.reason
        await attentive.close()
        await peers.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


# -- clients that come back ----------------------------------------------------------------------


class Memory:
    """The transport of a client that can be cut from outside, as by a broken network."""

    def __init__(self, inner: MemoryClient) -> None:
        self._inner = inner
        self.vanish = inner.vanish
        self.connect, self.receive, self.close = inner.connect, inner.receive, inner.close
        self.sent: list[Any] = []

    async def send(self, data: bytes) -> None:
        self.sent.append(unpack(data))
        await self._inner.send(data)


class Flaky(FederationClient):
    """Loses its connection right after it has sent a message of one kind, once."""

    after = ""
    happened = False

    async def _post(self, data: bytes) -> None:
        if name_of(data) != self.after or self.happened:
            await super()._post(data)
            return
        self.happened = True
        if name_of(data) != "MaskedUpload":
            await super()._post(data)
        self._communicator.vanish()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["MaskedUpload", "Consent", "AggregatedShare"])
def test_a_client_that_lost_its_connection_is_asked_again(tmp_path: Path, name: str) -> None:
    """Within `grace`, and its update is in the sum: nothing was lost but the connection."""
    federation = Federation(tmp_path)
    kind = type("Flaky1", (Flaky,), {"after": name})
    network = Memory(federation.transport.client(7))

    async def scenario() -> RoundRecord:
        clients = [federation.client(i) for i in range(7)]
        clients.append(federation.client(7, kind, network))
        async with federation.connected(clients):
            # A network that loses what was queued: nobody drops out, although grace is long.
            (record,) = await asyncio.wait_for(federation.server(grace=20.0, upload=25).run(), 30)
            return record

    record = asyncio.run(scenario())
    assert record.included == list(range(8))
    assert record.dropped == {}
    federation.check(record)


@pytest.mark.parametrize("name", ["ShareBundle", "MaskedUpload", "Consent"])
def test_R32_a_restarted_client_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """It is back within `grace` and stays connected, but its secrets of this round are gone."""
    federation = Federation(tmp_path)

    class Dies(FederationClient):
        async def _post(self, data: bytes) -> None:
            if name_of(data) == name:
                self._communicator.vanish()  # type: ignore[attr-defined]
                raise Killed
            await super()._post(data)

    class Restarts:
        async def run(self) -> None:
            with pytest.raises(Killed):
                await federation.client(7, Dies, Memory(federation.transport.client(7))).run()
            await federation.client(7).run()

    async def scenario() -> list[RoundRecord]:
        clients: list[Any] = [*(federation.client(i) for i in range(7)), Restarts()]
        async with federation.connected(clients):
            slow = dict.fromkeys(("advertise", "share", "upload", "agree", "recover", "grace"), 60)
            server = federation.server(number=2, min_clients=8, **slow)
            return await asyncio.wait_for(server.run(), 30)

    first, second = asyncio.run(scenario())
    assert list(first.dropped.values()) == [[7]]
    assert (7 in first.included) == (name == "Consent")
    assert second.included == list(range(8))
    federation.check(second)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the client's code catches it."""


def test_a_client_with_an_old_round_is_told_that_it_is_over(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    odd = Odd(federation.transport.client(7), [pack_control(Hello(VERSION, 41))])
    asyncio.run(with_odd_client(federation, odd))
    assert odd.heard[0] == RoundOver(41, "that round is over")


# -- what a server may say to a client -----------------------------------------------------------

OPENING = pack_protocol(1, b"\x01" + bytes(40))

SERVER_SPEECHES: dict[str, list[bytes]] = {
    "garbage": [b"\xff", b"\x00", b"\x00\xc1", b"\x01"],
    "hello": [HELLO],
    "withdraw": [pack_control(Withdraw(1, ""))],
    "an acknowledgement of nothing": [pack_control(UploadStored(1))],
    "the end of no round": [pack_control(RoundOver(1)), pack_control(RoundOver(-5, "x"))],
    "a message of no round": [pack_protocol(1, b"\x01"), OPENING],
    "no opening": [pack_control(RoundModel(1, b"", 1.0)), pack_protocol(1, bytes(99))],
    "a malformed opening": [pack_control(RoundModel(1, b"", 1.0)), OPENING],
    "a model of nonsense": [pack_control(RoundModel(2**62, b"\x00" * 3, float("nan")))],
    "the same model thrice": [pack_control(RoundModel(1, b"", 1.0))] * 3,
    "impossible settings": [
        pack_control(RoundModel(1, b"", 1.0)),
        pack_protocol(1, Codec(PrimeField(3)).encode(Opening(b"\x95" + b"\x01" * 5))),
    ],
}


@pytest.mark.parametrize("speech", SERVER_SPEECHES, ids=lambda name: name.replace(" ", "-"))
def test_S29_whatever_a_server_says_a_client_goes_on(tmp_path: Path, speech: str) -> None:
    """It survives the speech, then hears the goodbye."""
    federation = Federation(tmp_path)

    async def scenario() -> None:
        await federation.transport.start()
        client = federation.client(0)
        async with federation.connected([client]) as (task,):
            events = federation.transport.events()
            async for event in events:
                if isinstance(event, Received) and isinstance(unpack(event.data), Hello):
                    break
            goodbye = pack_control(Goodbye("enough", finished=True))
            for data in [*SERVER_SPEECHES[speech], goodbye]:
                await federation.transport.send(0, data)
            await asyncio.wait_for(task, 10)
        await federation.transport.close()

    asyncio.run(scenario())


def test_R35_a_client_gives_up_a_server_that_says_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path)

    async def scenario() -> None:
        await federation.transport.start()
        with pytest.raises(Aborted, match=r"the server said nothing for 0\.3 s"):
            await asyncio.wait_for(federation.client(0, patience=0.3).run(), 10)
        await federation.transport.close()

    asyncio.run(scenario())


def test_R37_a_client_that_is_cut_again_and_again_backs_off_and_gives_up(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    streams = 0

    async def scenario() -> None:
        nonlocal streams
        await federation.transport.start()
        client = federation.client(0, reconnect=1.0)
        async with federation.connected([client]) as (task,):

            async def cut_everybody() -> None:
                nonlocal streams
                async for event in federation.transport.events():
                    if isinstance(event, Connected):
                        streams += 1
                        federation.transport.disconnect(0, "no reason given")

            cutter = asyncio.create_task(cut_everybody())
            with pytest.raises(TransportError, match=r"gives up after 1 s.*no reason given"):
                await asyncio.wait_for(asyncio.shield(task), 20)
            cutter.cancel()
        await federation.transport.close()

    asyncio.run(scenario())
    # Pauses double from 0.1 s: a handful of attempts, not thousands.
    assert 2 <= streams < 12
