"""The wire in memory: its order, its hooks, and a whole round on it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest

from lightsecagg import aggregate
from lightsecagg.drivers.cohort import Cohort
from lightsecagg.drivers.local import Packet, Wire, run_round
from lightsecagg.errors import DecodeError, InputRefused, RemoteProtocolError
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.field.quantization import Quantizer
from lightsecagg.params import Parameters
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    ClientParty,
    NeedInput,
    Phase,
    RoundAborted,
    Send,
    ServerParty,
    Update,
)
from lightsecagg.protocol.messages import AbortRound, Advertise, Message, Opening, Refusal, Roster
from lightsecagg.protocol.schemes.traits import protocols, traits_of
from lightsecagg.protocol.wire import Codec

CODEC = Codec(DEFAULT_FIELD)
DIMENSION = 5


def parties(
    protocol: str = "lightsecagg", clients: int = 6
) -> tuple[ServerParty, dict[int, ClientParty]]:
    parameters = Parameters(clients, 1, 2)
    group = traits_of(protocol).group(parameters)
    quantizer = Quantizer(group, 100.0, clients, scale=1.0)
    neighbours = clients - 1 if protocol == "secagg+" else 0
    cohort = Cohort(protocol, parameters, quantizer, DIMENSION, neighbours, graph_security=0)
    settings = cohort.next_round()
    return cohort.server(settings), {c: cohort.client(c, settings) for c in cohort.clients}


def update(client: int) -> Update:
    """A power of two, exactly quantised: a client that is missing or counted twice shows."""
    return Update(np.full(DIMENSION, 2.0**client))


# -- the wire ------------------------------------------------------------------------------------


class Echo:
    """A party that notes what it takes, and answers as it is told."""

    def __init__(self, *answers: Send) -> None:
        self.taken: list[tuple[int, str]] = []
        self._answers = answers

    def receive(self, sender: int, message: Message) -> list[object]:
        assert isinstance(message, AbortRound)
        self.taken.append((sender, message.reason))
        return list(self._answers)


def said(to: int, text: str) -> Send:
    return Send(to, AbortRound(text))


def test_links_are_first_in_first_out_and_the_server_comes_first() -> None:
    server = Echo()
    clients = {0: Echo(said(SERVER, "zero")), 1: Echo(said(SERVER, "one"))}
    wire = Wire(server, clients, CODEC)
    wire.send(SERVER, [said(0, "a"), said(1, "b"), said(0, "c")])
    packet = wire.step()
    assert packet is not None
    assert (packet.sender, packet.recipient, packet.kind) == (SERVER, 0, AbortRound)
    assert not server.taken
    wire.step()
    assert server.taken == [(0, "zero")]
    assert not clients[1].taken
    wire.settle()
    assert clients[0].taken == [(SERVER, "a"), (SERVER, "c")]
    assert clients[1].taken == [(SERVER, "b")]
    assert server.taken == [(0, "zero"), (1, "one"), (0, "zero")]
    assert wire.step() is None


def test_everything_travels_as_bytes_and_a_broadcast_is_encoded_once() -> None:
    wire = Wire(Echo(), {0: Echo(), 1: Echo()}, CODEC)
    message = AbortRound("to everybody")
    wire.send(SERVER, [Send(0, message), Send(1, message)])
    one, other = wire.down
    assert one.data == CODEC.encode(message)
    assert one.data is other.data


class Tapped(Wire):
    """Uses every hook."""

    def __init__(self, server: Echo, clients: dict[int, Echo]) -> None:
        super().__init__(server, clients, CODEC)
        self.at_work: list[tuple[int, type | None]] = []
        self.refusals: list[tuple[int, type]] = []
        self.outputs: list[tuple[int, object]] = []

    def work(self, party: int, kind: type[Message] | None) -> AbstractContextManager[None]:
        @contextmanager
        def noted() -> Iterator[None]:
            self.at_work.append((party, kind))
            yield

        return noted()

    def carry(self, packet: Packet) -> Iterable[Packet]:
        match self.codec.decode(packet.data):
            case AbortRound("drop"):
                return ()
            case AbortRound("double"):
                return (packet, packet)
            case AbortRound("cut"):
                return (packet._replace(data=packet.data[:-1]),)
        return (packet,)

    def refused(self, packet: Packet, error: DecodeError | RemoteProtocolError) -> None:
        self.refusals.append((packet.recipient, type(error)))

    def output(self, party: int, output: object) -> None:
        self.outputs.append((party, output))


def test_hooks_observe_tamper_and_drop() -> None:
    server, client = Echo(), Echo()
    wire = Tapped(server, {0: client})
    wire.call(SERVER, lambda: [said(0, text) for text in ("drop", "double", "cut", "keep")])
    wire.call(0, lambda: [NeedInput()], Refusal)
    assert wire.at_work == [(SERVER, None), *[(SERVER, AbortRound)] * 4, (0, Refusal)]
    wire.settle()
    assert [text for _, text in client.taken] == ["double", "double", "keep"]
    assert wire.refusals == [(0, DecodeError)]
    assert wire.outputs == [(0, NeedInput())]
    assert wire.at_work[6:] == [(0, AbortRound)] * 4


def test_a_refusal_that_nobody_expects_is_raised() -> None:
    server, clients = parties()
    wire = Wire(server, clients, CODEC)
    wire.send(SERVER, [Send(0, Roster(()))])
    with pytest.raises(RemoteProtocolError, match="Roster"):
        wire.settle()


def test_a_round_can_be_stopped_and_looked_at_between_two_packets() -> None:
    server, clients = parties()
    wire = Wire(server, clients, CODEC)
    wire.call(SERVER, server.start)
    kinds = []
    while server.phase is Phase.ADVERTISE:
        packet = wire.step()
        assert packet is not None
        kinds.append(packet.kind)
    assert kinds == [Opening, Advertise] * 6


# -- a round -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", protocols())
def test_R30_a_round_sums_those_that_have_an_input(protocol: str) -> None:
    server, clients = parties(protocol)
    asked: list[int] = []

    def inputs(client: int) -> Update | None:
        asked.append(client)
        return None if client in (1, 4) else update(client)

    result = run_round(server, clients, Codec(server.settings.group), inputs)
    assert isinstance(result, Aggregate)
    assert result.included == (0, 2, 3, 5)
    assert result.total.tolist() == [1 + 4 + 8 + 32] * DIMENSION
    assert sorted(asked) == list(range(6))


def test_R30_a_round_with_too_few_inputs_is_aborted_and_everybody_is_told() -> None:
    server, clients = parties()
    result = run_round(server, clients, CODEC, lambda client: update(0) if client < 3 else None)
    assert isinstance(result, RoundAborted)
    assert "only 3 clients uploaded" in result.reason
    assert all(party.stored == 0 for party in clients.values())


def test_an_input_that_is_refused_ends_the_round() -> None:
    server, clients = parties()
    with pytest.raises(InputRefused, match="bound"):
        run_round(server, clients, CODEC, lambda client: Update(np.full(DIMENSION, 101.0)))


def test_aggregate_leaves_the_garbage_collector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the process of whoever calls; only measurements switch it off."""

    def touched() -> None:
        raise AssertionError("the garbage collector was switched")

    for name in ("disable", "enable", "collect", "freeze"):
        monkeypatch.setattr(gc, name, touched)
    vectors = [np.full(3, 0.5)] * 4
    np.testing.assert_allclose(aggregate(vectors, privacy=1, bound=1.0).sum, 2.0, atol=1e-6)
