"""What a call of the server promises: it is stored before any output of the call leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightsecagg.protocol.interface import Persist, Promised
from lightsecagg.protocol.journal_facts import (
    AnyFact,
    Reported,
    SharesTaken,
    UploadsDropped,
    UploadWaits,
)
from lightsecagg.protocol.messages import MaskedUpload, SealedShare
from lightsecagg.protocol.schemes.interface import MaskRef


@dataclass(slots=True)
class Promises:
    """What the call under way promises; see the module."""

    one_sum: bool
    """Whether they are those of a round."""
    facts: list[AnyFact] = field(default_factory=list)
    upload: MaskedUpload | None = None
    shares: list[SealedShare] = field(default_factory=list)
    past: list[MaskRef] = field(default_factory=list)
    """Masks whose upload and shares nobody needs any more; they wait for the next facts."""

    def forget(self) -> None:
        """There is no disk."""
        self.facts, self.upload, self.shares, self.past = [], None, [], []

    def hand_out(self) -> list[Persist]:
        """The record to be stored, if anything is promised."""
        if not self.facts:
            return []
        past = tuple((mask.owner, mask.serial) for mask in self.past)
        record = Promised(
            tuple(self.facts), self.upload, tuple(self.shares), past, one_sum=self.one_sum
        )
        self.forget()
        return [Persist(record)]

    def take_back(self, record: Promised) -> None:
        """A record could not be stored: all but what had just come is promised again."""
        news = SharesTaken | UploadWaits | UploadsDropped | Reported
        self.facts += [fact for fact in record.facts if not isinstance(fact, news)]
        self.past += [MaskRef(*mask) for mask in record.past]
