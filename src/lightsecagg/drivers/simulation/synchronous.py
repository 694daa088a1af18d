"""One synchronous round of N parties in one process, over the bytes that a network would carry.

Theory of operation. Messages travel as encoded bytes through two queues, up to the server and down
to the clients, so every link is first in, first out. Those on their way up are delivered first:
then a client's shares are relayed before the next client makes its own. A client's work of a
phase begins with a message of the server (`_BEGINS`); that is where a client that drops vanishes.
When nothing is on its way and the server still waits, its deadline fires (`proceed`), so a round
always ends: with an aggregate or an abort.

Clients are given their input when sharing is closed, as late as the protocol allows, so that one
vector at a time is in memory; `early_input` gives it to them as soon as they ask.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lightsecagg.drivers.simulation.cohort import Cohort
from lightsecagg.drivers.simulation.faults import Faults, Moment
from lightsecagg.drivers.simulation.metering import Meter
from lightsecagg.drivers.simulation.recording import RecordingEntropy, quantised
from lightsecagg.drivers.simulation.sampling import Sample, StandIn
from lightsecagg.errors import DecodeError, ParameterError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.interface import (
    SERVER,
    Aggregate,
    NeedInput,
    Output,
    Phase,
    RoundAborted,
    Send,
    Update,
)
from lightsecagg.protocol.messages import (
    Certificate,
    MaskedUpload,
    Message,
    Opening,
    Roster,
    SealedShare,
    SharesClosed,
    SurvivorSet,
)
from lightsecagg.protocol.settings import ProtocolName, Settings
from lightsecagg.protocol.wire import Codec

Inputs = Callable[[int], Update]
"""A client's update; called again when the result is checked, so it must repeat itself."""

Progress = Callable[[Phase], None]
"""Called when a client has done its work of a phase."""

_ORDER = tuple(Phase)

# Which phase's work a message of the server begins, at the client that receives it.
_BEGINS: dict[type, Phase] = {
    Roster: Phase.SHARE,
    SharesClosed: Phase.UPLOAD,
    Certificate: Phase.RECOVER,
}


class _Packet(NamedTuple):
    """Bytes on their way."""

    sender: int
    recipient: int
    data: bytes
    phase: Phase
    is_share: bool
    begins: bool
    """Whether it begins the recipient's work of `phase`."""


class _Disconnect(NamedTuple):
    """The server's end of a vanished client's connection closes, after what it had sent."""

    client: int


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
    meter: Meter
    late: Counter[str]
    """Messages that the server ignored because their phase was over, by type."""
    refused: Counter[str]
    """Messages that a party refused, by type."""


def simulate_round(
    cohort: Cohort,
    inputs: Inputs,
    faults: Faults | None = None,
    *,
    early_input: bool = False,
    sample: int | None = None,
    progress: Progress | None = None,
) -> RoundReport:
    """Run the next round of `cohort` with these inputs and faults.

    With `sample`, only the first so many clients are real; see `sampling`.
    """
    faults = Faults() if faults is None else faults
    if sample is not None and (faults.late or faults.duplicates):
        raise ParameterError("sampled clients can drop, but not be late or heard twice")
    run = _Run(cohort, inputs, faults, early_input, sample, progress)
    # Collecting garbage at random moments would be charged to whoever is at work.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return run.play()
    finally:
        if collecting:
            gc.enable()


def _plainly(faults: Faults) -> Faults:
    """The same faults where there is no phase but the upload."""
    moments = {
        client: Moment.AFTER if phase in (Phase.AGREE, Phase.RECOVER) else Moment.BEFORE
        for client, (phase, moment) in faults.drops.items()
        if phase is not Phase.UPLOAD
    }
    drops = {client: (Phase.UPLOAD, moment) for client, moment in moments.items()}
    return replace(faults, drops={**faults.drops, **drops})


class _Run:
    def __init__(
        self,
        cohort: Cohort,
        inputs: Inputs,
        faults: Faults,
        early_input: bool,
        sample: int | None,
        progress: Progress | None,
    ) -> None:
        self.settings = cohort.next_round()
        self.server = cohort.server(self.settings)
        self.sample = None if sample is None else Sample(cohort, self.settings, sample)
        real = cohort.clients if sample is None else cohort.clients[:sample]
        self.coins = {client: RecordingEntropy() for client in real}
        self.parties = {
            client: cohort.client(client, self.settings, coins)
            for client, coins in self.coins.items()
        }
        self.stand_ins: dict[int, StandIn] = {}
        if self.sample is not None:
            others = cohort.clients[len(real) :]
            self.stand_ins = {client: self.sample.stand_in(client) for client in others}
        self.codec = Codec(self.settings.field)
        self.meter = Meter()
        self.refused: Counter[str] = Counter()
        self._inputs = inputs
        self._faults = faults if cohort.protocol is not ProtocolName.PLAIN else _plainly(faults)
        self._early_input = early_input
        self._progress = progress
        self._up: deque[_Packet | _Disconnect] = deque()
        self._down: deque[_Packet] = deque()
        self._held_back: list[_Packet] = []
        self._gone: set[int] = set()
        self._want_input: set[int] = set()
        self._rounding: dict[int, bytes] = {}
        self._phase = self.server.phase
        self._result: Aggregate | RoundAborted | None = None
        malicious = self.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        self._begins = {
            **_BEGINS,
            Opening: self._phase,  # plain summation begins with the upload
            SurvivorSet: Phase.AGREE if malicious else Phase.RECOVER,
        }

    def play(self) -> RoundReport:
        self._call_server(self.server.start)
        while self._up or self._down or self.server.phase is not Phase.DONE:
            if self._up:
                self._to_server(self._up.popleft())
            elif self._down:
                self._to_client(self._down.popleft())
            else:
                self._call_server(self.server.proceed)
        return self._report()

    # -- the server's side -------------------------------------------------------------------

    def _call_server(self, call: Callable[[], list[Output]]) -> None:
        with self.meter.server_cpu(self._phase):
            outputs = call()
        self._from_server(outputs)

    def _to_server(self, packet: _Packet | _Disconnect) -> None:
        if isinstance(packet, _Disconnect):
            self._call_server(partial(self.server.drop, packet.client))
            return
        size = len(packet.data)
        self.meter.client_sent(packet.phase, packet.sender, size, packet.is_share)
        with self.meter.server_cpu(self._phase, relaying=packet.is_share):
            try:
                message = self.codec.decode(packet.data)
                outputs = self.server.receive(packet.sender, message)
            except (DecodeError, RemoteProtocolError) as error:
                self.refused[type(error).__name__] += 1
                outputs = []
        self._from_server(outputs)

    def _from_server(self, outputs: list[Output]) -> None:
        message: Message | None = None
        data = b""
        for output in outputs:
            match output:
                case Send():
                    is_share = isinstance(output.message, SealedShare)
                    phase = self._phase_of(output.message)
                    if output.message is not message:  # a broadcast is encoded once
                        message = output.message
                        with self.meter.server_cpu(phase, relaying=is_share):
                            data = self.codec.encode(message)
                    begins = type(message) in self._begins
                    self._post(_Packet(SERVER, output.to, data, phase, is_share, begins))
                case Aggregate() | RoundAborted():
                    self._result = output
                case NeedInput():
                    raise AssertionError("a server needs no input")
        if self.server.phase is not Phase.DONE:
            self._phase = self.server.phase
        self._release_late()

    def _phase_of(self, message: Message) -> Phase:
        if isinstance(message, SealedShare):
            return Phase.SHARE
        return self._begins.get(type(message), self._phase)

    def _release_late(self) -> None:
        """Deliver what was held back for a phase that is over."""
        now = _ORDER.index(self.server.phase)
        waiting = self._held_back
        self._held_back = [packet for packet in waiting if _ORDER.index(packet.phase) >= now]
        self._up.extend(packet for packet in waiting if _ORDER.index(packet.phase) < now)

    # -- the clients' side -------------------------------------------------------------------

    def _to_client(self, packet: _Packet) -> None:
        client, phase = packet.recipient, packet.phase
        if client in self._gone:
            return
        moment = self._moment(packet)
        if moment is Moment.BEFORE:
            self._vanish(client)
            return
        self.meter.server_sent(phase, client, len(packet.data), packet.is_share)
        party = self.stand_ins.get(client) or self.parties[client]
        with self._client_cpu(phase, client):
            try:
                message = self.codec.decode(packet.data)
                outputs = party.receive(SERVER, message)
            except (DecodeError, RemoteProtocolError) as error:
                self.refused[type(error).__name__] += 1
                outputs = []
        outputs = self._give_input(client, packet, outputs)
        self._from_client(client, phase, outputs, half=moment is Moment.DURING)
        if moment is not None:
            self._vanish(client)
        if packet.begins and self._progress is not None:
            self._progress(phase)

    def _client_cpu(self, phase: Phase, client: int) -> AbstractContextManager[None]:
        """Charge a client's work to it; stand-ins work for free."""
        if client in self.stand_ins:
            return nullcontext()
        return self.meter.client_cpu(phase, client)

    def _moment(self, packet: _Packet) -> Moment | None:
        """When its recipient vanishes in the phase that the packet begins, if it does."""
        phase, moment = self._faults.drops.get(packet.recipient, (None, None))
        return moment if packet.begins and phase is packet.phase else None

    def _give_input(self, client: int, packet: _Packet, outputs: list[Output]) -> list[Output]:
        if any(isinstance(output, NeedInput) for output in outputs):
            self._want_input.add(client)
        ready = self._early_input or (packet.begins and packet.phase is Phase.UPLOAD)
        if client not in self._want_input or not ready:
            return outputs
        self._want_input.remove(client)
        if any(isinstance(output, RoundAborted) for output in outputs):
            return outputs
        update = self._inputs(client)
        with self._client_cpu(Phase.UPLOAD, client):
            return outputs + self.parties[client].set_input(update)

    def _from_client(
        self, client: int, phase: Phase, outputs: list[Output], half: bool = False
    ) -> None:
        sends = [output for output in outputs if isinstance(output, Send)]
        whole = len(sends) // 2 if half else len(sends)
        for index, output in enumerate(sends):
            if isinstance(output.message, MaskedUpload) and client in self.coins:
                self._rounding[client] = self.coins[client].latest
            if self.sample is not None and client in self.sample.real:
                self.sample.observe(client, output.message)
            if index > whole:
                break
            is_share = isinstance(output.message, SealedShare)
            with self._client_cpu(phase, client):
                data = self.codec.encode(output.message)
            if index == whole:
                data = data[: len(data) // 2]
            self._post(_Packet(client, SERVER, data, phase, is_share, begins=False))

    def _post(self, packet: _Packet) -> None:
        up = packet.recipient == SERVER
        if not up and packet.is_share and self._unread(packet.recipient):
            size = len(packet.data)
            self.meter.server_sent(packet.phase, packet.recipient, size, is_share=True)
            return
        client = packet.sender if up else packet.recipient
        copies = [packet]
        if client in self._faults.duplicates:
            copies.append(packet._replace(begins=False))
        if not up:
            self._down.extend(copies)
        elif self._faults.late.get(client) is packet.phase:
            self._held_back += copies
        else:
            self._up.extend(copies)

    def _unread(self, client: int) -> bool:
        """Whether nobody would look at the shares that this client gets."""
        stand_in = self.stand_ins.get(client)
        return stand_in is not None and not stand_in.wants_shares

    def _vanish(self, client: int) -> None:
        self._gone.add(client)
        if client in self.parties:
            self.parties[client].abort("this client is gone")
        if not self._faults.silent:
            self._up.append(_Disconnect(client))

    # -- the end -----------------------------------------------------------------------------

    def _report(self) -> RoundReport:
        aggregate = self._result if isinstance(self._result, Aggregate) else None
        aborted = self._result.reason if isinstance(self._result, RoundAborted) else None
        return RoundReport(
            settings=self.settings,
            aggregate=aggregate,
            aborted=aborted,
            exact=None if aggregate is None else self._is_exact(aggregate),
            meter=self.meter,
            late=self.server.late_messages,
            refused=self.refused,
        )

    def _is_exact(self, aggregate: Aggregate) -> bool | None:
        if self.sample is not None:
            return None
        expected = self.settings.field.sum(map(self._quantised, aggregate.included))
        return bool(np.array_equal(aggregate.total, expected))

    def _quantised(self, client: int) -> Elements:
        return quantised(self.settings, self._inputs(client), self._rounding[client])
