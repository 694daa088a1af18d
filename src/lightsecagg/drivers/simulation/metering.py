"""CPU seconds and bytes, per party and phase.

The phase of a client's work is the phase of the message that it produces: handling the roster
belongs to `share`, masking the update to `upload`. The phase of the server's work is the one that
it is in when the message arrives, so that summing the uploads belongs to `upload`. Encoding and
decoding belong to the phase of the message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightsecagg.planning.traffic import PHASES, PhaseTraffic
from lightsecagg.planning.work import PhaseWork
from lightsecagg.protocol.interface import Phase


@dataclass(slots=True)
class Load:
    """What one party did in one phase."""

    seconds: float = 0.0
    """CPU."""
    sent: int = 0
    """Bytes that it sent, other than shares."""
    received: int = 0
    """Bytes that it received, other than shares."""
    shares_sent: int = 0
    """Bytes of sealed shares that it sent (a client) or relayed (the server)."""
    shares_received: int = 0
    """Bytes of sealed shares that it received."""
    relay_seconds: float = 0.0
    """The server's CPU for relaying shares; part of `seconds`."""


@dataclass(slots=True)
class PhaseLoads:
    """What everybody did in one phase."""

    server: Load = field(default_factory=Load)
    clients: dict[int, Load] = field(default_factory=dict)

    def client(self, client: int) -> Load:
        """The load of one client, created when it is first asked for."""
        return self.clients.setdefault(client, Load())

    @property
    def traffic(self) -> PhaseTraffic:
        """The busiest client's bytes and the server's: what the planner forecasts."""
        clients, server = self.clients.values(), self.server
        return PhaseTraffic(
            client_sent=max((load.sent for load in clients), default=0),
            client_received=max((load.received for load in clients), default=0),
            client_shares_sent=max((load.shares_sent for load in clients), default=0),
            client_shares_received=max((load.shares_received for load in clients), default=0),
            server_sent=server.sent,
            server_received=server.received,
            server_shares_sent=server.shares_sent,
            server_shares_received=server.shares_received,
        )

    @property
    def work(self) -> PhaseWork:
        """The slowest client's CPU seconds and the server's: what the planner forecasts."""
        return PhaseWork(
            client=max((load.seconds for load in self.clients.values()), default=0.0),
            server=self.server.seconds,
            server_relaying=self.server.relay_seconds,
        )


class Meter:
    """Adds up what a simulated round costs."""

    def __init__(self) -> None:
        self.phases = {phase: PhaseLoads() for phase in PHASES}

    @contextmanager
    def server_cpu(self, phase: Phase, relaying: bool = False) -> Iterator[None]:
        """Charge the CPU time of the block to the server."""
        load = self.phases[phase].server
        started = time.process_time()
        try:
            yield
        finally:
            seconds = time.process_time() - started
            load.seconds += seconds
            if relaying:
                load.relay_seconds += seconds

    @contextmanager
    def client_cpu(self, phase: Phase, client: int) -> Iterator[None]:
        """Charge the CPU time of the block to a client."""
        load = self.phases[phase].client(client)
        started = time.process_time()
        try:
            yield
        finally:
            load.seconds += time.process_time() - started

    def client_sent(self, phase: Phase, client: int, size: int, is_share: bool) -> None:
        """A client sent `size` bytes to the server."""
        server, load = self.phases[phase].server, self.phases[phase].client(client)
        if is_share:
            load.shares_sent += size
            server.shares_received += size
        else:
            load.sent += size
            server.received += size

    def server_sent(self, phase: Phase, client: int, size: int, is_share: bool) -> None:
        """The server sent `size` bytes to a client."""
        server, load = self.phases[phase].server, self.phases[phase].client(client)
        if is_share:
            load.shares_received += size
            server.shares_sent += size
        else:
            load.received += size
            server.sent += size
