"""What a round and an epoch of a server session have in common while they are on their way.

greeting with its number        the client goes on where it was
greeting with another number    the client was restarted: it is out
withdrawal                      it is out
a message that is refused       it is cut and out; the same if what it did here was not foreseen
a job of the party              is an effect; events and deadlines go on meanwhile

`round` and `epoch` say the rest: what is asked again, how long it is waited for whom, and what
becomes of results.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeVar

from lightsecagg.foreign import explain, shown
from lightsecagg.protocol.interface import Output, Persist, Phase, Send, ServerParty
from lightsecagg.protocol.jobs import Compute, Job
from lightsecagg.protocol.messages import Message
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.wire import Codec
from lightsecagg.session import interface as session
from lightsecagg.session.envelope import Fetch, RoundOver, Withdraw, pack_protocol
from lightsecagg.session.peers import Greeted, Misbehaved, Peers, Spoke
from lightsecagg.session.plan import COMEBACK, Plan
from lightsecagg.session.record import PhaseRecord, RoundRecord

GOES_ON = "the {mode} goes on without this client"
"""What a client is told that is out of a round or an epoch."""
IS_OVER = "that {mode} is over"
"""What a client is told that was away when it ended."""

AnyParty = TypeVar("AnyParty", bound=ServerParty)
Happening = (
    Greeted | Spoke | Misbehaved | session.Disconnected | session.Computed | session.ComputeFailed
)


class InProgress(ABC, Generic[AnyParty]):
    """Drives one party for its session; see the module."""

    mode: ClassVar[str]
    """What it is: round or epoch."""

    def __init__(
        self,
        party: AnyParty,
        settings: Settings,
        members: Iterable[int],
        plan: Plan,
        peers: Peers,
        emit: Callable[[session.Effect], None],
        now: float,
        *,
        resumed: bool,
    ) -> None:
        self.number, self.settings, self.members = settings.round, settings, list(members)
        self._party: AnyParty = party
        self._plan, self._peers, self._emit, self._resumed = plan, peers, emit, resumed
        self._codec = Codec(settings.group)
        self._jobs: list[Job] = []
        self._failed = False
        self._refusals: Counter[str] = Counter()
        self._dropped: dict[str, list[int]] = {}
        self._withdrawn: dict[str, list[int]] = {}
        self._phase: Phase | None = None
        self._phases: dict[str, PhaseRecord] = {}
        self._traffic = (peers.bytes_in, peers.bytes_out)
        self._now = self._phase_began = self._deadline = now
        self._enough_since = -session.NEVER
        """When so many were last away that all had to be waited for."""
        self._next_look = session.NEVER

    # -- what the session asks -----------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When it wants its next tick."""
        return self._next_look

    def begin(self, outputs: list[Output], now: float) -> None:
        """With what the party's `start` returned, or its resumption."""
        self._guard(lambda: self._release(outputs), now)

    # -- events --------------------------------------------------------------------------------

    def take(self, event: Happening, now: float) -> None:
        """Something has happened that concerns it."""
        self._guard(lambda: self._on(event), now)

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Give it up."""

    @abstractmethod
    def _guard(self, step: Callable[[], None], now: float) -> None:
        """What nobody foresaw ends the round or the epoch, not the server."""

    def _on(self, event: Happening) -> None:
        match event:
            case Greeted(client, number):
                self._on_greeting(client, number)
            case Misbehaved(client, reason):
                self._drop(client, reason, session.Leave.REFUSED)
            case Spoke(client, Withdraw(number, reason)):
                if number == self.number and self._is_in(client):
                    self._withdrawn.setdefault(shown(reason), []).append(client)
                    self._drop(
                        client, f"it withdraws: {shown(repr(reason))}", session.Leave.WITHDRAWN
                    )
            case Spoke(client, Fetch(version)):
                self._on_fetch(client, version)
            case Spoke(client, (number, body)):
                if number != self.number:
                    self._party.late_messages[f"other {self.mode}"] += 1
                else:
                    self._receive(client, body)
            case session.Disconnected(client):
                self._on_disconnection(client)
            case session.Computed(job, result):
                self._jobs = [mine for mine in self._jobs if mine is not job]
                self._release(self._party.computed(job, result))
            case session.ComputeFailed(job, reason) if any(job is mine for mine in self._jobs):
                self.fail(reason)  # a file is gone, say: there will be no sum

    # -- clients -------------------------------------------------------------------------------

    @abstractmethod
    def _on_disconnection(self, client: int) -> None:
        """Its stream has ended."""

    @abstractmethod
    def _is_in(self, client: int) -> bool:
        """Whether it takes part, and has not left."""

    @abstractmethod
    def _is_out(self, client: int) -> bool:
        """Whether what it says is not listened to any more."""

    @abstractmethod
    def _go_on_with(self, client: int) -> None:
        """It has reconnected, with its memory."""

    @abstractmethod
    def _acknowledge(self, client: int, message: Message) -> None:
        """What it has just sent is taken."""

    def _on_fetch(self, client: int, version: int) -> None:
        """It wants a newer model; rounds bring theirs."""

    def _on_greeting(self, client: int, number: int) -> None:
        if number not in (-1, self.number):
            self._peers.tell(client, RoundOver(number, IS_OVER.format(mode=self.mode)))
        if number != self.number:
            self._drop(client, f"restarted, its secrets of this {self.mode} are gone")
        elif not self._is_in(client):  # it still waits for what goes on without it
            self._peers.tell(client, RoundOver(number, GOES_ON.format(mode=self.mode)))
        else:
            self._go_on_with(client)

    def _receive(self, client: int, body: memoryview) -> None:
        if self._is_out(client):
            self._party.late_messages["after a dropout"] += 1
            return
        try:
            message = self._codec.decode(body)
            outputs = self._party.receive(client, message)
        except Exception as error:  # at most its sender is harmed by a message (S41)
            self._peers.cut(client, error)
            self._drop(client, explain(error), session.Leave.REFUSED)
            return
        self._release(outputs)
        self._acknowledge(client, message)

    def _drop(self, client: int, why: str, how: session.Leave = session.Leave.DROPPED) -> None:
        """Wait for it, and listen to it, no more; what it has delivered stays."""
        if self._is_in(client):
            self._give_up(client, why, how)
            self._release(self._party.drop(client))

    def _give_up(self, client: int, why: str, how: session.Leave = session.Leave.DROPPED) -> None:
        phase = str(self._party.phase)
        self._dropped.setdefault(phase, []).append(client)
        self._log(logging.INFO, "client %d dropped in phase %s: %s", client, phase, why)
        self._emit(session.ClientLeft(client, phase, how, shown(why)))

    @property
    def _patience(self) -> float:
        """Seconds for those who have not come since the server was started."""
        return max(self._plan.grace, COMEBACK if self._resumed else 0.0)

    def _end_of_patience(self, client: int) -> float:
        """When one that is away will be given up."""
        grace = self._plan.grace
        if not self._peers.is_known(client):
            return max(self._phase_began + self._patience, self._enough_since + grace)
        gone_since = self._peers.gone_since(client)
        return session.NEVER if gone_since is None else max(gone_since, self._enough_since) + grace

    # -- outputs -------------------------------------------------------------------------------

    def _release(self, outputs: list[Output]) -> None:
        """Do what the party asks for; its records come before what depends on them."""
        encoded: dict[int, bytes] = {}
        for output in outputs:
            match output:
                case Send(client, message):
                    self._peers.post(client, self._encode(message, encoded))
                case Persist(record):
                    self._persist(record)
                case Compute(job):
                    self._jobs.append(job)
                    self._emit(output)
                case _:
                    self._note(output)

    @abstractmethod
    def _persist(self, record: session.AnyRecord) -> None:
        """Have a promise stored."""

    @abstractmethod
    def _note(self, output: Output) -> None:
        """A result, or that there is none."""

    def _encode(self, message: Message, cache: dict[int, bytes]) -> bytes:
        """The same message to many clients is encoded once."""
        key = id(message)
        if key not in cache:
            cache[key] = pack_protocol(self.number, self._codec.encode(message))
        return cache[key]

    # -- the record ----------------------------------------------------------------------------

    def _open_phase(self, phase: Phase, now: float) -> float:
        """A phase begins; how many seconds it may take."""
        entry = self._phases[str(phase)] = PhaseRecord(0.0)
        self._emit(session.PhaseBegan(entry))
        seconds: float = getattr(self._plan, str(phase))
        self._deadline = now + seconds
        return seconds

    def _close_phase(self, now: float) -> None:
        entry = self._phases.get(str(self._phase))
        if entry is None:
            return
        traffic, self._traffic = self._traffic, (self._peers.bytes_in, self._peers.bytes_out)
        entry.seconds += now - self._phase_began
        entry.bytes_in += self._traffic[0] - traffic[0]
        entry.bytes_out += self._traffic[1] - traffic[1]

    def _new_record(self, number: int, clients: Iterable[int]) -> RoundRecord:
        record = RoundRecord(number, str(self.settings.protocol), list(clients))
        record.quantisation_step = 1.0 / self.settings.quantizer.scale
        record.noise = self.settings.quantizer.residue
        record.resumed = self._resumed
        return record

    def _complete(self, record: RoundRecord) -> None:
        """What it tells of messages that were not taken."""
        self._refusals.update(self._peers.refusals)
        self._peers.refusals.clear()
        record.refusals, self._refusals = dict(self._refusals), Counter()
        record.late = dict(self._party.late_messages)

    def _log(self, level: int, message: str, *arguments: object) -> None:
        self._emit(session.Log(level, f"{self.mode} %d: {message}", (self.number, *arguments)))
