"""CPU seconds and bytes, per party and phase, observed on the wire.

Work belongs to the phase of the message that is taken, made, encoded or decoded. A message of the
server belongs to the phase that it begins at the client: handling the roster is part of `share`.
The server takes the last upload in `upload`, so summing the uploads is part of that. What has no
phase of its own (a deadline, an abort) belongs to the one that the server is in, or was in last.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from lightsecagg.drivers.local import Packet, Wire
from lightsecagg.drivers.spreading import spread
from lightsecagg.errors import DecodeError, RemoteProtocolError
from lightsecagg.protocol import messages
from lightsecagg.protocol.interface import SERVER, Party, Phase, Server
from lightsecagg.protocol.jobs import Job, Result, at_once
from lightsecagg.protocol.messages import Message
from lightsecagg.protocol.wire import Codec
from lightsecagg_lab.planning.traffic import PHASES, PhaseTraffic
from lightsecagg_lab.planning.work import PhaseWork

Clock = Callable[[], float]
"""CPU seconds, or whatever else is to be counted."""

PHASE_OF: Mapping[type, Phase] = {
    messages.Opening: Phase.ADVERTISE,
    messages.Advertise: Phase.ADVERTISE,
    messages.Roster: Phase.SHARE,
    messages.ShareBundle: Phase.SHARE,
    messages.SharesClosed: Phase.UPLOAD,
    messages.MaskedUpload: Phase.UPLOAD,
    messages.Reports: Phase.SHARE,
    messages.ReportsWanted: Phase.SHARE,
    messages.UploadDropped: Phase.UPLOAD,
    messages.Consent: Phase.AGREE,
    messages.Certificate: Phase.RECOVER,
    messages.Refusal: Phase.RECOVER,
    messages.AggregatedShare: Phase.RECOVER,
    messages.UnmaskingShares: Phase.RECOVER,
}
"""To which phase a message belongs, as far as that does not depend on the settings."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is looked for: it would be charged to whoever happens to be at work."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
    spread_seconds: float = 0.0
    """The server's CPU for ranges of columns, which cores can share; part of `seconds`."""
    spread_wall_seconds: float = 0.0
    """How long these ranges took by the clock on the wall, on the threads that there were."""


@dataclass(slots=True)
class PhaseLoads:
    """What everybody did in one phase."""

    server: Load = field(default_factory=Load)
    clients: dict[int, Load] = field(default_factory=dict)

    def of(self, party: int) -> Load:
        """The load of one party; a client's is created when it is first asked for."""
        return self.server if party == SERVER else self.clients.setdefault(party, Load())

    @property
    def client_seconds(self) -> float:
        """CPU of all clients together."""
        return sum(load.seconds for load in self.clients.values())

    @property
    def uploaded(self) -> int:
        """Bytes that all clients together have sent."""
        return self.server.received + self.server.shares_received

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
            server_spread=self.server.spread_seconds,
        )


class Meter:
    """Adds up what a simulated round costs."""

    def __init__(self, clock: Clock = time.process_time) -> None:
        self.phases = {phase: PhaseLoads() for phase in PHASES}
        self._clock = clock

    @contextmanager
    def work(self, phase: Phase, party: int, relaying: bool = False) -> Iterator[None]:
        """Charge what the block takes to this party."""
        load = self.phases[phase].of(party)
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            load.seconds += seconds
            if relaying and party == SERVER:
                load.relay_seconds += seconds

    @contextmanager
    def spreading(self, phase: Phase) -> Iterator[None]:
        """Note what the block takes, which is charged to the server anyway, as work by columns."""
        load = self.phases[phase].server
        started, began = self._clock(), time.perf_counter()
        try:
            yield
        finally:
            load.spread_seconds += self._clock() - started
            load.spread_wall_seconds += time.perf_counter() - began

    def sent(self, phase: Phase, sender: int, recipient: int, size: int, is_share: bool) -> None:
        """Charge `size` bytes to both ends, one of which is the server."""
        one, other = self.phases[phase].of(sender), self.phases[phase].of(recipient)
        if is_share:
            one.shares_sent += size
            other.shares_received += size
        else:
            one.sent += size
            other.received += size

    def costs(self) -> dict[str, dict[str, float]]:
        """CPU seconds and bytes by phase: all clients together, and the server."""
        return {
            phase.value: {
                "client_seconds": loads.client_seconds,
                "server_seconds": loads.server.seconds,
                "upload_bytes": loads.uploaded,
                "download_bytes": loads.server.sent + loads.server.shares_sent,
            }
            for phase, loads in self.phases.items()
            if loads.clients or loads.server.seconds
        }


class PhasedParty(Server, Protocol):
    """A server, synchronous or not."""

    @property
    def phase(self) -> Phase:
        """What it is collecting at the moment."""


class MeteredWire(Wire):
    """A wire that charges work and bytes to parties and phases, and counts refusals."""

    server: PhasedParty

    def __init__(
        self,
        server: PhasedParty,
        clients: Mapping[int, Party],
        codec: Codec,
        phases: Mapping[type, Phase],
        *,
        free: Collection[int] = (),
        clock: Clock = time.process_time,
        server_cores: int = 1,
    ) -> None:
        """`phases`: to which phase messages belong; `free`: clients whose work is not charged.

        * `server_cores`: how many threads run the server's jobs.
        """
        super().__init__(server, clients, codec)
        self.meter = Meter(clock)
        self.refusals: Counter[str] = Counter()
        """Packets that a party refused, by the error."""
        self._phase = server.phase
        self._phases = phases
        self._free = free
        self._server_cores = server_cores
        self._charged = self._phase

    def phase_of(self, kind: type[Message] | None) -> Phase:
        """To which phase such a message, or a call without one, belongs now."""
        if self.server.phase is not Phase.DONE:
            self._phase = self.server.phase
        return self._phase if kind is None else self._phases.get(kind, self._phase)

    def work(self, party: int, kind: type[Message] | None) -> AbstractContextManager[None]:
        """Charge the work."""
        phase = self._charged = self.phase_of(kind)
        if party in self._free:
            return nullcontext()
        return self.meter.work(phase, party, relaying=kind is messages.ShareBundle)

    def compute(self, party: int, outputs: Sequence[object]) -> Sequence[object]:
        """Run the server's jobs on its cores; what they could share is charged as such."""
        return at_once(self.server, outputs, self._run) if party == SERVER else outputs

    def _run(self, job: Job) -> Result:
        return spread(job, self._server_cores, partial(self.meter.spreading, self._charged))

    def deliver(self, packet: Packet) -> None:
        """Charge the bytes: what never arrives costs nothing."""
        self.charge(packet)
        super().deliver(packet)

    def charge(self, packet: Packet) -> None:
        """Charge the bytes of a packet to both ends."""
        phase, is_share = self.phase_of(packet.kind), packet.kind is messages.ShareBundle
        self.meter.sent(phase, packet.sender, packet.recipient, len(packet.data), is_share)

    def refused(self, packet: Packet, error: DecodeError | RemoteProtocolError) -> None:
        """Count it; whoever sent it goes on."""
        self.refusals[type(error).__name__] += 1
