"""What the servers of both modes are: phases, registration, and one sum after the other.

Theory of operation. A server collects one kind of message per phase; `RoundServer` is the machine
of a synchronous round, `EpochServer` that of an epoch of the asynchronous mode. Both begin alike,
by registration, and both find a sum alike (`roles.recovery`):

    advertise   keys, from every invited client; then the roster is fixed
    ...
    agree       malicious-server mode: signatures on the sum that is in flight
    recover     answers for it
    done        too few were there; of a round also: it has its result

A message that came before, or too late, is ignored and counted. Anything else that a phase does not
name is refused with `RemoteProtocolError` and changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable
from typing import ClassVar

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.errors import LocalProtocolError, RecoveryError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Output, Phase, RoundAborted, Send
from lightsecagg.protocol.jobs import Job, Result
from lightsecagg.protocol.messages import AbortRound, Message
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.roles.registration import Away, Registration
from lightsecagg.protocol.schemes.interface import Findings, ServerScheme
from lightsecagg.protocol.settings import Settings


class ServerMachine(ABC):
    """A server with phases; see the module and `interface`."""

    mode: ClassVar[str]
    """What it calls the time between opening and end: round or epoch."""
    after_roster: ClassVar[Phase]
    """The phase that follows registration."""

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        invited: Iterable[int] | None,
        entropy: Entropy,
        *,
        durable: bool,
    ) -> None:
        """A `durable` server asks for what it must remember to be stored (`Persist`)."""
        self.settings = settings
        self._phase = Phase.ADVERTISE
        self.late_messages: Counter[str] = Counter()
        """Messages that came again or too late and were ignored, by type."""
        self._durable, self._started = durable, False
        self._registration = Registration(settings, allow_list, invited, entropy)
        self._away = Away()
        self._witness: tuple[Phase, int | None] = (Phase.DONE, None)
        self._findings = Findings()

    # -- the driver's side -------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """See `AnyServerParty.phase`."""
        return self._phase

    @property
    def pending(self) -> frozenset[int]:
        """Clients whose messages the current phase still waits for."""
        expected, delivered = self._exchange()
        return frozenset(expected).difference(delivered, self.refusals, self._away.gone)

    @property
    def refusals(self) -> dict[int, tuple[int, ...]]:
        """Clients that refused the sum in flight, and whose shares they lack."""
        return {} if self._flight is None else self._flight.agreement.refusals

    def start(self) -> list[Output]:
        """Tell everybody who is invited."""
        if self._started:
            raise LocalProtocolError(f"the {self.mode} was started already")
        self._started = True
        return [*self._registration.open(), *self._advance()]

    @property
    def can_proceed(self) -> bool:
        """See `AnyServerParty.can_proceed`."""
        match self.phase:
            case Phase.AGREE:
                return self._in_flight.agreement.reached
            case Phase.RECOVER:
                flight = self._in_flight
                enough = self._scheme.suffice(flight.asked, flight.good_answers.keys())
                return flight.collected or enough
            case Phase.DONE:
                return False
            case _:
                return len(self._exchange()[1]) >= self.settings.minimum

    def computed(self, job: Job, result: Result) -> list[Output]:
        """Take the result of a job; one that nobody waits for any more changes nothing."""
        flight = self._flight
        if flight is None or not flight.asked_for(job):
            return []
        if isinstance(result, RecoveryError):
            return self._lose(str(result))
        more = flight.summed(result)
        return self._finish(flight, result) if more is None else [*more]

    # -- what each mode does in its own way --------------------------------------------------

    @property
    @abstractmethod
    def _flight(self) -> Recovery | None:
        """The sum that was announced last."""

    @abstractmethod
    def _advance(self) -> list[Output]:
        """Go on where nothing is awaited any more."""

    @abstractmethod
    def _finish(self, flight: Recovery, total: Elements) -> list[Output]:
        """The sum is found."""

    @abstractmethod
    def _lose(self, reason: str) -> list[Output]:
        """The sum cannot be found."""

    # -- phases ------------------------------------------------------------------------------

    def _exchange(self) -> tuple[Collection[int], Collection[int]]:
        """Who has to send something in this phase, and who has sent all of it.

        The former are the same from the first message of a phase to the last.
        """
        match self.phase:
            case Phase.ADVERTISE:
                return self._registration.invited, self._registration.advertised
            case Phase.AGREE:
                return self._in_flight.clients, self._in_flight.agreement.signatures
            case Phase.RECOVER if not self._in_flight.collected:
                return self._in_flight.clients, self._in_flight.answers
            case _:
                return (), ()

    def _is_waiting(self) -> bool:
        """Whether anybody is pending.

        It is enough to know one client that is. Building `pending` for every message would make
        a phase quadratic in N, and the recovery of small models slower than its arithmetic.
        """
        phase, client = self._witness
        known = phase is self.phase and client is not None
        left = client in self._away.gone or client in self.refusals
        if not known or left or client in self._exchange()[1]:
            self._witness = (self.phase, max(self.pending, default=None))
        return self._witness[1] is not None

    def _check_started(self, what: str) -> None:
        if not self._started:
            raise LocalProtocolError(f"start the {self.mode} before {what}")

    def _on_late(self, sender: int, message: Message) -> list[Output]:
        """A message that has done its work before, or can no longer do it."""
        self.late_messages[type(message).__name__] += 1
        return []

    def _unexpected(self, sender: int, message: Message) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"client {sender} sent {type(message).__name__} in phase {self.phase}"
        )

    def _close_advertise(self) -> list[Output]:
        """Fix the roster of those who came in time, if they are enough."""
        if abort := self._too_few(len(self._registration.advertised), "advertised their keys"):
            return abort
        outputs = self._registration.close()
        self._begin()
        return [*outputs]

    def _begin(self) -> None:
        """The roster is fixed."""
        self._phase = self.after_roster

    @property
    def _scheme(self) -> ServerScheme:
        return self._registration.scheme

    @property
    def members(self) -> tuple[int, ...]:
        """Whoever is on the roster, in its order; nobody before there is one."""
        return self._registration.members

    @property
    def _in_flight(self) -> Recovery:
        if self._flight is None:
            raise AssertionError("no sum is in flight")
        return self._flight

    def _too_few(self, count: int, what: str) -> list[Output]:
        least = self.settings.minimum
        if count >= least:
            return []
        return self._abort(f"only {count} clients {what}, at least {least} are needed")

    def _abort(self, reason: str) -> list[Output]:
        told = self.members or self._registration.invited
        self._phase = Phase.DONE
        accused = tuple(sorted(self._findings.accused))
        return [
            *(Send(client, AbortRound(reason)) for client in told),
            RoundAborted(reason, self._findings.named, accused),
        ]
