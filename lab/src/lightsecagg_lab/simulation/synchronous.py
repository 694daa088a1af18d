"""One synchronous round of N parties in one process, over the bytes that a network would carry.

Theory of operation. The parties are joined by a metered wire (`drivers.local`, `metering`). A
client's work of a phase begins with a message of the server (`_BEGINNINGS`); that is where a
client that drops vanishes. When nothing is on its way and the server still waits, its deadline
fires (`proceed`), so a round always ends: with an aggregate or an abort.

Clients are given their input when sharing is closed, as late as the protocol allows, so that one
vector at a time is in memory; `early_input` gives it to them as soon as they ask.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightsecagg.drivers.cohort import Cohort
from lightsecagg.drivers.local import Packet
from lightsecagg.errors import ParameterError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    ClientParty,
    NeedInput,
    Party,
    Phase,
    RoundAborted,
    ServerParty,
    Update,
)
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Certificate,
    MaskedUpload,
    Opening,
    Reports,
    Roster,
    ShareBundle,
    SharesClosed,
    SumRequest,
)
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg_lab.simulation.faults import Faults, Moment
from lightsecagg_lab.simulation.metering import PHASE_OF, Clock, Meter, MeteredWire, uncollected
from lightsecagg_lab.simulation.recording import largest_error, quantised
from lightsecagg_lab.simulation.sampling import Sample, StandIn

Inputs = Callable[[int], Update]
"""A client's update; called again when the result is checked, so it must repeat itself."""

Progress = Callable[[Phase], None]
"""Called when a client has done its work of a phase."""

_ORDER = tuple(Phase)
_BEGINNINGS = (Opening, Roster, SharesClosed, SumRequest, Certificate)


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What happened in one simulated round, and what it cost."""

    settings: Settings
    aggregate: Aggregate | None
    """None if the round was aborted."""
    aborted: str | None
    """Why the round was aborted."""
    exact: bool | None
    """Whether the recovered sum is, element for element, that of the included clients' quantised
    inputs; None if there is nothing to compare."""
    largest_error: int | None
    """By how many quanta an element is off, the most: with dithered decoding, up to Emax."""
    meter: Meter
    late: Counter[str]
    """Messages that the server ignored because their phase was over, by type."""
    refused: Counter[str]
    """Messages that a party refused, by the error."""
    stored: int
    """Bytes of secrets and shares that a client holds when sharing is over, the most."""


def simulate_round(
    cohort: Cohort,
    inputs: Inputs,
    faults: Faults | None = None,
    *,
    early_input: bool = False,
    sample: int | None = None,
    progress: Progress | None = None,
    clock: Clock = time.process_time,
    server_cores: int = 1,
) -> RoundReport:
    """Run the next round of `cohort` with these inputs and faults.

    With `sample`, only the first so many clients are real; see `sampling`. The server's jobs run
    on `server_cores` threads.
    """
    faults = Faults() if faults is None else faults
    if sample is not None and (faults.late or faults.duplicates):
        raise ParameterError("sampled clients can drop, but not be late or heard twice")
    run = _Run(cohort, inputs, faults, early_input, sample, progress, clock, server_cores)
    with uncollected():
        return run.play()


def _plainly(faults: Faults) -> Faults:
    """The same faults where there is no phase but the upload."""
    moments = {
        client: Moment.AFTER if phase in (Phase.AGREE, Phase.RECOVER) else Moment.BEFORE
        for client, (phase, moment) in faults.drops.items()
        if phase is not Phase.UPLOAD
    }
    drops = {client: (Phase.UPLOAD, moment) for client, moment in moments.items()}
    return replace(faults, drops={**faults.drops, **drops})


class _Run(MeteredWire):
    server: ServerParty

    def __init__(
        self,
        cohort: Cohort,
        inputs: Inputs,
        faults: Faults,
        early_input: bool,
        sample: int | None,
        progress: Progress | None,
        clock: Clock,
        server_cores: int,
    ) -> None:
        settings = cohort.next_round()
        self.settings = settings
        server = cohort.server(settings)
        self.sample = None if sample is None else Sample(cohort, settings, sample)
        real = cohort.clients if sample is None else cohort.clients[:sample]
        self.parties: dict[int, ClientParty] = {
            client: cohort.client(client, settings) for client in real
        }
        self.stand_ins: dict[int, StandIn] = {}
        if self.sample is not None:
            others = cohort.clients[len(real) :]
            self.stand_ins = {client: self.sample.stand_in(client) for client in others}
        malicious = settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        phases = {
            **PHASE_OF,
            Reports: Phase.UPLOAD,
            Opening: server.phase,  # plain summation begins with the upload
            SumRequest: Phase.AGREE if malicious else Phase.RECOVER,
        }
        clients: dict[int, Party] = {**self.parties, **self.stand_ins}
        codec = Codec(settings.group)
        super().__init__(
            server,
            clients,
            codec,
            phases,
            free=self.stand_ins,
            clock=clock,
            server_cores=server_cores,
        )
        self._inputs = inputs
        shared = Phase.SHARE in settings.traits.phases
        self._faults = faults if shared else _plainly(faults)
        self._early_input = early_input
        self._progress = progress
        self._held_back: list[tuple[Phase, Packet]] = []
        self._torn: list[Packet] | None = None
        self._gone: set[int] = set()
        self._want_input: set[int] = set()
        self._ledger = cohort.ledger
        self._stored = 0
        self._result: Aggregate | RoundAborted | None = None

    def play(self) -> RoundReport:
        self.call(SERVER, self.server.start)
        self.settle()
        while self.server.phase is not Phase.DONE:
            self.call(SERVER, self.server.proceed)
            self.settle()
        return self._report()

    def output(self, party: int, output: object) -> None:
        """Remember who wants its input, and the result."""
        match output:
            case NeedInput():
                self._want_input.add(party)
            case Aggregate() | RoundAborted() if party == SERVER:
                self._result = output
            case RoundAborted():
                self._want_input.discard(party)

    # -- what becomes of packets -------------------------------------------------------------

    def carry(self, packet: Packet) -> Iterable[Packet]:
        """What duplicates, delays and losses make of a packet."""
        up = packet.recipient == SERVER
        if up:
            self._observe(packet)
            if self._torn is not None:
                self._torn.append(packet)
                return ()
        elif packet.kind is ShareBundle and self._unread(packet.recipient):
            self.charge(packet)
            return ()
        client = packet.sender if up else packet.recipient
        copies = [packet] * (2 if client in self._faults.duplicates else 1)
        phase = self.phase_of(packet.kind)
        if up and self._faults.late.get(client) is phase:
            self._held_back += [(phase, copy) for copy in copies]
            return ()
        return copies

    def _observe(self, packet: Packet) -> None:
        client = packet.sender
        observed = packet.kind in (Reports, AggregatedShare)
        if observed and self.sample is not None and client in self.parties:
            self.sample.observe(client, self.codec.decode(packet.data))

    def _unread(self, client: int) -> bool:
        """Whether nobody would look at the shares that this client gets."""
        stand_in = self.stand_ins.get(client)
        return stand_in is not None and not stand_in.wants_shares

    def deliver(self, packet: Packet) -> None:
        """Let the recipient do its work of a phase, or vanish over it."""
        if packet.recipient == SERVER:
            super().deliver(packet)
        elif packet.recipient not in self._gone:
            self._to_client(packet.recipient, packet)

    def send(self, sender: int, outputs: Sequence[object]) -> None:
        """Send, and let go what was held back for a phase that is over."""
        super().send(sender, outputs)
        now = _ORDER.index(self.server.phase)
        waiting = self._held_back
        self._held_back = [late for late in waiting if _ORDER.index(late[0]) >= now]
        self.up.extend(packet for phase, packet in waiting if _ORDER.index(phase) < now)

    def _to_client(self, client: int, packet: Packet) -> None:
        phase = self.phase_of(packet.kind)
        begins = packet.kind in _BEGINNINGS
        when, moment = self._faults.drops.get(client, (None, None))
        drops = begins and when is phase
        if packet.kind is SharesClosed and client in self.parties:
            self._stored = max(self._stored, self.parties[client].stored)
        if drops and moment is Moment.BEFORE:
            self._vanish(client)
            return
        self._torn = [] if drops and moment is Moment.DURING else None
        super().deliver(packet)
        if client in self._want_input and (self._early_input or (begins and phase is Phase.UPLOAD)):
            self._want_input.remove(client)
            act = partial(self.parties[client].set_input, self._inputs(client))
            self.call(client, act, MaskedUpload)
        if drops:
            self._vanish(client)
        if begins and self._progress is not None:
            self._progress(phase)

    def _vanish(self, client: int) -> None:
        if self._torn is not None:
            torn, self._torn = self._torn, None
            half = len(torn) // 2
            cut = [packet._replace(data=packet.data[: len(packet.data) // 2]) for packet in torn]
            for packet in torn[:half] + cut[half : half + 1]:
                self.up.extend(self.carry(packet))
        self._gone.add(client)
        if client in self.parties:
            self.parties[client].abort("this client is gone")
        if not self._faults.silent:
            while self.up:  # its connection breaks after what it had sent
                self.deliver(self.up.popleft())
            self.call(SERVER, partial(self.server.drop, client))

    # -- the end -----------------------------------------------------------------------------

    def _report(self) -> RoundReport:
        aggregate = self._result if isinstance(self._result, Aggregate) else None
        aborted = self._result.reason if isinstance(self._result, RoundAborted) else None
        error = None if aggregate is None else self._largest_error(aggregate)
        return RoundReport(
            settings=self.settings,
            aggregate=aggregate,
            aborted=aborted,
            exact=None if error is None else error == 0,
            largest_error=error,
            meter=self.meter,
            late=self.server.late_messages,
            refused=self.refusals,
            stored=self._stored,
        )

    def _largest_error(self, aggregate: Aggregate) -> int | None:
        if self.sample is not None:
            return None
        expected = self.settings.group.sum(map(self._quantised, aggregate.included))
        return largest_error(self.settings, aggregate.total, expected)

    def _quantised(self, client: int) -> Elements:
        update, model = self._inputs(client), self.settings.model
        return quantised(self.settings, self._ledger(client), update, model)
