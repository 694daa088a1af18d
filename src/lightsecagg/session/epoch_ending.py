"""How an epoch ends without leaving an acknowledged update behind.

An upload is in a sum of its epoch or in none: its owner cannot know that it is in no sum, and never
gives that update again (S42). So an epoch that is to end goes on until nothing waits:

    begun     buffers are formed as ever, and of T + 2 or more as soon as one takes all that waits.
              Where T + 2 must share a model (S56), fewer from an older one are dropped with the
              next buffer, and their owners told: nobody trains from it any more.
              Whose update waits gets no newer model before it is summed. Whose updates wait
              once fit into one buffer; no more are taken than that
    closed    nothing waits, but what is in flight: clients are told, and an upload that was on its
              way is refused instead of acknowledged. Who has trained keeps its update for the next
              epoch; the epoch is over when the buffer in flight has landed
"""

from __future__ import annotations

from lightsecagg.protocol.interface import BufferedServerParty, Phase
from lightsecagg.session.interface import NEVER


class Ending:
    """Whether an epoch is to end, and whether it can."""

    def __init__(self, party: BufferedServerParty, seconds: float) -> None:
        """`seconds`: for how long updates that are too few for a buffer wait for others."""
        self._party, self._seconds = party, seconds
        self.least = party.settings.parameters.privacy + 2
        self.until = NEVER
        """When they have waited for long enough."""
        self.closed = False

    @property
    def begun(self) -> bool:
        """Whether the epoch is to end."""
        return self.until < NEVER

    def begin(self, now: float) -> None:
        """The epoch is to end."""
        if not self.begun:
            self.until = now + self._seconds
            self._party.intake.closing = True

    @property
    def wanted(self) -> int:
        """Updates that make a buffer."""
        return self.least if self.begun else self._party.buffer_size

    @property
    def is_ripe(self) -> bool:
        """Whether a buffer that is formed now is the last one."""
        return self.begun and self._party.takes_all

    def holds_back(self, client: int) -> bool:
        """Whether a client gets no newer model before a buffer has landed.

        Else uploads would wait in ever longer lines, and the last buffer would not take them all.
        """
        flies = self._party.phase is not Phase.UPLOAD
        if self.begun and flies and self._party.intake.waiting >= self.least:
            return True
        return (self.begun or flies) and self._party.intake.has_waiting(client)

    def close_if_nothing_waits(self) -> bool:
        """Whether the epoch closes now."""
        party = self._party
        if self.closed or not self.begun or party.intake.waiting > party.buffer_size:
            return False
        self.closed = not party.intake.waiting
        party.intake.most_waiting = 0 if self.closed else party.buffer_size
        return self.closed
