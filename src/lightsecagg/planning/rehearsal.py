"""A real round of a few parties in one process, metered: the yardstick of the forecasts.

Unit costs are taken from the parties themselves, not from formulas, so that they follow whatever
the implementation does per peer, per message and per element. Any clock will do: CPU seconds for
the planner, counts of operations for the complexity tables.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import Aborted
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    NeedInput,
    Output,
    Phase,
    Send,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    Certificate,
    Opening,
    Roster,
    SealedShare,
    SharesClosed,
    SurvivorSet,
)
from lightsecagg.protocol.registry import PARTIES
from lightsecagg.protocol.round_client import RoundClient, Sharing
from lightsecagg.protocol.settings import AllowList, Policy, Settings
from lightsecagg.protocol.wire import Codec

# Which phase's work a message of the server begins, at the client that receives it.
_PHASE_OF = {
    Opening: Phase.ADVERTISE,
    Roster: Phase.SHARE,
    SealedShare: Phase.SHARE,
    SharesClosed: Phase.UPLOAD,
    SurvivorSet: Phase.RECOVER,
    Certificate: Phase.RECOVER,
}

Clock = Callable[[], float]


@dataclass(slots=True)
class Rehearsal:
    """What a round took, by phase, in units of its clock, and the bytes that were sent."""

    client: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """The mean over all clients."""
    server: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    client_sent: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """Bytes, the mean over all clients."""
    server_received: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    stored: int = 0
    """Bytes of secrets and shares that a client holds when sharing is over, the most."""


def rehearse(
    settings: Settings,
    identities: list[IdentityKey],
    allow_list: AllowList,
    dropped: Collection[int] = (),
    clock: Clock = time.process_time,
) -> Rehearsal:
    """Run one round, in which the clients `dropped` vanish after sharing."""
    return _Run(settings, identities, allow_list, frozenset(dropped), clock).play()


class _Run:
    def __init__(
        self,
        settings: Settings,
        identities: list[IdentityKey],
        allow_list: AllowList,
        dropped: frozenset[int],
        clock: Clock,
    ) -> None:
        policy = Policy(
            allow_list=allow_list,
            session=settings.session,
            privacy=settings.parameters.privacy,
            threat_model=settings.parameters.threat_model,
            protocols=(settings.protocol,),
            dimension=settings.dimension,
            graph_security=0,
        )
        client_kind, server_kind = PARTIES[settings.protocol]
        self.clients = {
            c: client_kind(c, key, policy, Ledger.volatile()) for c, key in enumerate(identities)
        }
        self.server = server_kind(settings, allow_list)
        self.codec = Codec(settings.field)
        self.dropped, self.clock = dropped, clock
        self.vector = np.linspace(-0.5, 0.5, settings.dimension, dtype=np.float32)
        self.queue: deque[tuple[int, int, bytes]] = deque()
        self.found = Rehearsal()
        self.done = False

    def play(self) -> Rehearsal:
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._send(SERVER, self.server.start())
            while self.queue:
                sender, recipient, data = self.queue.popleft()
                if recipient == SERVER:
                    self._at_server(sender, data)
                else:
                    self._at_client(recipient, data)
        finally:
            if collecting:
                gc.enable()
        if not self.done:
            raise Aborted("the rehearsed round came to no result")
        for figures in (self.found.client, self.found.client_sent):
            for phase in figures:
                figures[phase] /= len(self.clients)
        return self.found

    def _send(self, sender: int, outputs: list[Output]) -> None:
        message, data = None, b""
        for output in outputs:
            if isinstance(output, Send):
                if output.message is not message:  # a broadcast is encoded once
                    message, data = output.message, self.codec.encode(output.message)
                self.queue.append((sender, output.to, data))
            self.done = self.done or isinstance(output, Aggregate)

    def _at_server(self, sender: int, data: bytes) -> None:
        phase, started = self.server.phase, self.clock()
        self._send(SERVER, self.server.receive(sender, self.codec.decode(data)))
        self.found.server[phase] += self.clock() - started
        self.found.client_sent[phase] += len(data)
        self.found.server_received[phase] += len(data)

    def _at_client(self, client: int, data: bytes) -> None:
        party, started = self.clients[client], self.clock()
        message = self.codec.decode(data)
        if isinstance(message, SharesClosed):
            self.found.stored = max(self.found.stored, _stored(party))
            if client in self.dropped:
                self._send(SERVER, self.server.drop(client))
                return
        if type(message) not in _PHASE_OF:  # it is told that the round goes on without it
            return
        outputs = party.receive(SERVER, message)
        self._send(client, outputs)
        now = self.clock()
        self.found.client[_PHASE_OF[type(message)]] += now - started
        if any(isinstance(output, NeedInput) for output in outputs):
            # The input waits in the party until sharing is closed; taking it belongs to the upload.
            self._send(client, party.set_input(Update(self.vector + np.float32(client * 1e-6))))
            self.found.client[Phase.UPLOAD] += self.clock() - now


def _stored(party: RoundClient) -> int:
    """Secrets and shares; the input, which waits in the same place, is not counted."""
    if not isinstance(party.state, Sharing):
        raise AssertionError("a client that is told of the end of sharing is sharing")
    return len(party.state.secret) + sum(len(share) for _, share in party.state.held.values())
