"""What every server does, whatever it sums: phases, registration, and one sum after the other.

Theory of operation. A server collects one kind of message per phase:

    advertise   keys, from every invited client; then the roster is fixed
    share       of a round: sealed shares, from every roster member
    upload      masked updates
    agree       malicious-server mode: signatures on the sum that is in flight
    recover     answers for it
    done        too few were there; of a round also: it has its result

A message that came before, or too late, is ignored and counted. Anything else that a phase does not
name is refused with `RemoteProtocolError` and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from lightsecagg.errors import LocalProtocolError
from lightsecagg.protocol.interface import Output, Phase, RoundAborted, Send
from lightsecagg.protocol.messages import AbortRound, Message
from lightsecagg.protocol.roles.registration import Away, Registration
from lightsecagg.protocol.schemes.interface import Findings
from lightsecagg.protocol.settings import Settings


@dataclass(slots=True)
class Course:
    """Where a server is, until there is a sum in flight, and how it ends."""

    settings: Settings
    registration: Registration
    away: Away = field(default_factory=Away)
    phase: Phase = Phase.ADVERTISE
    findings: Findings = field(default_factory=Findings)
    """Of a round: who lied about shares, by the reports."""

    @property
    def members(self) -> tuple[int, ...]:
        """Whoever is on the roster, in its order; nobody before there is one."""
        return self.registration.members

    def too_few(self, count: int, what: str) -> list[Output]:
        """The end, if so many are not enough."""
        least = self.settings.minimum
        if count >= least:
            return []
        return self.abort(f"only {count} clients {what}, at least {least} are needed")

    def abort(self, reason: str) -> list[Output]:
        """The end, of which everybody hears."""
        told = self.members or self.registration.invited
        self.phase = Phase.DONE
        accused = tuple(sorted(self.findings.accused))
        return [
            *(Send(client, AbortRound(reason)) for client in told),
            RoundAborted(reason, self.findings.named, accused),
        ]


class Waiting:
    """Whether anybody is pending.

    It is enough to know one client that is. Building the set of them for every message would make
    a phase quadratic in N, and the recovery of small models slower than its arithmetic.
    """

    def __init__(self) -> None:
        self._witness: tuple[Phase, int | None] = (Phase.DONE, None)

    def for_anybody(
        self,
        phase: Phase,
        expected: Collection[int],
        delivered: Collection[int],
        *excused: Collection[int],
    ) -> bool:
        """Whether somebody who is expected has neither delivered nor an excuse.

        Who is expected is the same from the first message of a phase to the last.
        """
        known, client = self._witness
        if known is phase and client is not None:
            done = client in delivered or any(client in each for each in excused)
            if not done:
                return True
        pending = frozenset(expected).difference(delivered, *excused)
        self._witness = (phase, max(pending, default=None))
        return self._witness[1] is not None


class ServerMachine:
    """What a server counts and refuses; see the module and `interface`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.late_messages: Counter[str] = Counter()
        """Messages that came again or too late and were ignored, by type."""
        self.mode = "round" if settings.one_sum else "epoch"
        """What it calls the time between opening and end."""
        self._started = False

    def _check_started(self, what: str) -> None:
        if not self._started:
            raise LocalProtocolError(f"start the {self.mode} before {what}")

    def _on_late(self, sender: int, message: Message) -> list[Output]:
        """A message that has done its work before, or can no longer do it."""
        self.late_messages[type(message).__name__] += 1
        return []
