"""One wire in memory between a server and its clients: the shortest complete driver.

Theory of operation. A party never sends: it takes a call or a message and returns what is to be
done. The wire does it. Every `Send` is encoded and queued as bytes, so that the parties share
nothing but what a network would carry; jobs are run on the spot, as part of the call that asked for
them; every other output goes to `output`. A step takes the oldest packet from its queue, decodes
it, hands it to its recipient and queues what that returns.
`settle` does so until nothing is on its way.

There are two queues, up to the server and down to the clients, so every link is first in, first
out. Packets on their way up go first: then the shares of one client are relayed before the next
client makes its own, and at most one client's messages wait in front of the server.

Nothing happens by itself beyond that. Whoever holds the wire decides when a client trains, when
one is gone and when a deadline fires, and makes it so with `call`. `run_round` is such a holder,
for a round in which nothing goes wrong but clients without an input; a simulation, or a test,
overrides the hooks `work`, `compute`, `carry`, `refused` and `output` to observe, tamper and drop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

from lightsecagg.errors import DecodeError, RemoteProtocolError
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    ClientParty,
    NeedInput,
    Party,
    RoundAborted,
    Send,
    Server,
    ServerParty,
    Update,
)
from lightsecagg.protocol.jobs import at_once
from lightsecagg.protocol.messages import Message
from lightsecagg.protocol.wire import Codec


class Packet(NamedTuple):
    """Bytes on their way."""

    sender: int
    recipient: int
    data: bytes
    kind: type[Message]
    """What the bytes were when they were sent."""


class Wire:
    """FIFO links between a server and its clients; see the theory of operation."""

    def __init__(self, server: Server, clients: Mapping[int, Party], codec: Codec) -> None:
        self.server = server
        self.clients = clients
        self.codec = codec
        self.up: deque[Packet] = deque()
        """On their way to the server."""
        self.down: deque[Packet] = deque()
        """On their way to the clients."""

    def call(
        self,
        party: int,
        act: Callable[[], Sequence[object]],
        kind: type[Message] | None = None,
    ) -> None:
        """Let a party do something of its own accord, and send what it returns.

        * `kind`: the message that this makes, if it is one; for those who observe `work`.
        """
        with self.work(party, kind):
            outputs = self.compute(party, act())
        self.send(party, outputs)

    def send(self, sender: int, outputs: Sequence[object]) -> None:
        """Do what the outputs of a party ask for."""
        message, data = None, b""
        for output in outputs:
            if not isinstance(output, Send):
                self.output(sender, output)
                continue
            if output.message is not message:  # a broadcast is encoded once
                message = output.message
                with self.work(sender, type(message)):
                    data = self.codec.encode(message)
            queue = self.up if output.to == SERVER else self.down
            queue.extend(self.carry(Packet(sender, output.to, data, type(message))))

    def deliver(self, packet: Packet) -> None:
        """Hand a packet to its recipient, and send what that returns."""
        to = packet.recipient
        party = self.server if to == SERVER else self.clients[to]
        with self.work(to, packet.kind):
            try:
                received = party.receive(packet.sender, self.codec.decode(packet.data))
                outputs = self.compute(to, received)
            except (DecodeError, RemoteProtocolError) as error:
                outputs = []
                self.refused(packet, error)
        self.send(to, outputs)

    def step(self) -> Packet | None:
        """Deliver the oldest packet, those for the server first; None if there is none."""
        queue = self.up or self.down
        if not queue:
            return None
        packet = queue.popleft()
        self.deliver(packet)
        return packet

    def settle(self) -> None:
        """Deliver until nothing is on its way."""
        while self.step():
            pass

    # -- hooks: these leave everything as it is ------------------------------------------------

    def work(self, party: int, kind: type[Message] | None) -> AbstractContextManager[None]:
        """Observe: entered while a party takes, makes or encodes a message of this kind."""
        return nullcontext()

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """Run the server's jobs; what is to be done instead of these outputs."""
        return at_once(self.server, outputs) if party == SERVER else outputs

    def carry(self, packet: Packet) -> Iterable[Packet]:
        """Tamper and drop: the packets that travel instead of this one."""
        return (packet,)

    def refused(self, packet: Packet, error: DecodeError | RemoteProtocolError) -> None:
        """The recipient refused this packet, and is as it was before."""
        raise error

    def output(self, party: int, output: object) -> None:
        """A party returned something other than a message."""


def run_round(
    server: ServerParty,
    clients: Mapping[int, ClientParty],
    codec: Codec,
    inputs: Callable[[int], Update | None],
) -> Aggregate | RoundAborted:
    """Run one round from its opening to its result.

    * `inputs`: a client's update, or None for a client that is gone once it has shared its mask.
      It is asked when nothing else is left to do, so that one update at a time is in memory.
    """
    wire = _Round(server, clients, codec)
    wire.call(SERVER, server.start)
    while True:
        wire.settle()
        if wire.result is not None:
            return wire.result
        if not wire.training:
            wire.call(SERVER, server.proceed)  # its deadline: nobody will say any more
            continue
        client = wire.training.popleft()
        update = inputs(client)
        if update is None:
            wire.call(SERVER, partial(server.drop, client))
        else:
            wire.call(client, partial(clients[client].set_input, update))


class _Round(Wire):
    """Remembers who was asked for its input, and the result."""

    def __init__(
        self, server: ServerParty, clients: Mapping[int, ClientParty], codec: Codec
    ) -> None:
        super().__init__(server, clients, codec)
        self.training: deque[int] = deque()
        self.result: Aggregate | RoundAborted | None = None

    def output(self, party: int, output: object) -> None:
        match output:
            case NeedInput():
                self.training.append(party)
            case Aggregate() | RoundAborted() if party == SERVER:
                self.result = output
