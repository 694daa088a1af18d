"""How the sums of a roster come about at the server: what it takes in, and when it asks.

A roster serves one sum (`one_sum`) or one buffer after another (`buffer_sums`). Registration before
it, and the sum in flight after it, are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar, NamedTuple

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.in_flight import InFlight
from lightsecagg.protocol.interface import Output, Phase, Promised
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import AnyFact, Recall, RecallShares
from lightsecagg.protocol.messages import MaskedUpload, Reports, ShareBundle
from lightsecagg.protocol.promises import Promises
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.server_machine import Course
from lightsecagg.protocol.settings import Settings


class Parts(NamedTuple):
    """What all of a server shares."""

    settings: Settings
    allow_list: AllowList
    entropy: Entropy
    course: Course
    promises: Promises
    in_flight: InFlight
    durable: bool


class Sums(ABC):
    """See the module."""

    after_roster: ClassVar[Phase]
    """The phase that follows registration."""
    awaits_all: ClassVar[bool]
    """Whether all who are asked for a sum are waited for, or as many as it takes."""

    @abstractmethod
    def begin(self, scheme: ServerScheme) -> None:
        """The roster is fixed."""

    @abstractmethod
    def fixed(self) -> list[AnyFact]:
        """What is promised with the roster."""

    @abstractmethod
    def exchange(self) -> tuple[Collection[int], Collection[int]]:
        """While shares and uploads come: who has to send something, and who has sent all of it."""

    @property
    @abstractmethod
    def unsummed(self) -> list[MaskRef]:
        """The masks of uploads that wait."""

    @property
    @abstractmethod
    def uploaders(self) -> frozenset[int]:
        """Whose uploads it has taken."""

    @abstractmethod
    def on_shares(self, sender: int, message: ShareBundle) -> list[Output] | None:
        """Take shares; None if all are past."""

    @abstractmethod
    def on_reports(self, sender: int, message: Reports) -> list[Output] | None:
        """Take reports; None if all come again or too late."""

    @abstractmethod
    def on_upload(self, sender: int, message: MaskedUpload) -> list[Output] | None:
        """Take an upload; None if it came before. A durable server's counts when it is stored."""

    @abstractmethod
    def advance(self, is_waiting: Callable[[], bool]) -> list[Output]:
        """While shares and uploads come: go on, perhaps to a sum, where nothing is awaited."""

    @property
    @abstractmethod
    def can_proceed(self) -> bool:
        """While shares and uploads come: whether `proceed` leads on."""

    @abstractmethod
    def proceed(self) -> list[Output]:
        """While shares and uploads come: await nobody any more."""

    @abstractmethod
    def stored(self, record: Promised, upload: Upload | None) -> bool:
        """This record is durable; whether an upload counts now."""

    @abstractmethod
    def unstored(self, record: Promised) -> list[Output]:
        """This record `can_fail`, and has."""

    @abstractmethod
    def again(self, client: int) -> list[Output]:
        """What a client that is back may lack."""

    @abstractmethod
    def land(self, total: Elements) -> list[Output]:
        """The sum in flight is known."""

    @abstractmethod
    def fail(self, reason: str) -> list[Output]:
        """The sum in flight cannot be known."""

    @abstractmethod
    def replay(self, fact: AnyFact) -> bool:
        """What has happened before a crash happens again, in memory; False out of order."""

    @abstractmethod
    def restored(self, recall: Recall, recall_shares: RecallShares) -> None:
        """After all facts: the uploads are read where they are stored."""
