"""What a server's driver has kept of the rounds and epochs before, and a party brought back (R31).

A party is a function of the facts that it has promised: replayed, they make the same one again,
with the uploads that were acknowledged and the sum that was announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightsecagg.errors import JournalError
from lightsecagg.foreign import explain
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import BufferedServerParty
from lightsecagg.protocol.journal_facts import Recall, RecallShares
from lightsecagg.protocol.registry import restored_server_party
from lightsecagg.protocol.settings import Settings


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A round or epoch that a crash cut short, or an epoch that a server left when it stopped."""

    settings: Settings
    facts: Sequence[bytes] = field(repr=False)
    """What it has promised, in order; empty if nothing."""
    recall: Recall
    """Where its uploads are stored."""
    recall_shares: RecallShares
    """Where the shares of its masks are."""
    allow_list: AllowList | None
    """The one that it began with; None if that is lost, and the round with it."""
    has_uploads: bool = True
    """Whether an upload was acknowledged; a round without one may be dropped."""

    @property
    def number(self) -> int:
        """Of the round or epoch."""
        return self.settings.round


@dataclass(frozen=True, slots=True)
class Past:
    """What the driver has kept of the rounds before."""

    next_round: int = 1
    """A number that was never used."""
    completed: int = 0
    uploaders: dict[int, int] = field(default_factory=dict)
    """Client -> the latest round that is over and in which its upload was stored."""
    summed: dict[int, int] = field(default_factory=dict)
    """The same, of those whose upload is in that round's sum."""
    announced: tuple[int, ...] | None = None
    """The latest U1, if it was for the current model and its round has failed."""
    unfinished: Sequence[Unfinished] = ()
    enough: str | None = None
    """Why no other round is wanted, if so."""


def bring_back(left: Unfinished, allow_list: AllowList) -> BufferedServerParty:
    """The party of a round or epoch that a crash cut short."""
    number, mode = left.number, "round" if left.settings.one_sum else "epoch"
    try:
        return restored_server_party(left.facts, allow_list, left.recall, left.recall_shares)
    except JournalError as error:
        raise JournalError(
            f"{error}; restore it, or give the {mode} up with --abandon-round"
        ) from error
    except Exception as error:  # what nobody foresaw, too: the operator hears what to do (S41)
        raise JournalError(
            f"{mode} {number} of the journal is damaged: {explain(error)}; restore the journal, or "
            f"give the {mode} up with --abandon-round"
        ) from error
