"""What a masking scheme does for the parties that hold it.

A party knows the steps of a round or an epoch: whom to trust, what to sign, when to answer, what to
forget. A scheme knows masks: how they are drawn and shared, what an answer is, how the server finds
the sum of the masks. One object of a scheme serves one party and one roster; it keeps no secret,
so that all that a party must remember or forget is in the party's hands.

    client   prepare   draws a mask and the shares of it               (offline phase)
             report    combines a share it holds under a blind         (offline phase)
             mask      expands it, if `prepare` has not                (upload)
             answer    sums what is held for the masks of a sum        (recovery)
    server   examine   who lied, by the reports
             choose    whose updates can be summed
             recovery  the sum of the masks, from the answers, as a job

A mask is named by its owner and a serial, 0 in synchronous rounds. A sum is a list of terms: masks
with integer weights, all 1 in synchronous rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, FieldError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.protocol.jobs import RecoverMasks
from lightsecagg.protocol.messages import AggregatedShare, UnmaskingShares
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.share_exchange import OutgoingShare, Share

Answer = AggregatedShare | UnmaskingShares
"""What clients answer with; in the asynchronous mode, with sums of shares alone."""


class MaskRef(NamedTuple):
    """Which mask: no two masks of a round or epoch have the same."""

    owner: int
    serial: int = 0


class Term(NamedTuple):
    """A mask in a sum."""

    ref: MaskRef
    weight: int = 1


class PreparedMask(NamedTuple):
    """A fresh mask at its owner."""

    secret: bytes
    """What `mask` needs to expand it; to be forgotten with the upload."""
    own: Share
    """The owner's own share."""
    outgoing: list[OutgoingShare]
    """The peers' shares, to be sealed."""
    expanded: Elements | None = None
    """What `mask` would make of the secret were all shares complete, where that takes time;
    `finish_mask` makes it right for those that are."""

    def __repr__(self) -> str:
        return f"PreparedMask(outgoing={len(self.outgoing)})"


@dataclass(frozen=True)
class MaskSum:
    """The masks that a server wants the sum of, and what it knows of their shares."""

    terms: tuple[Term, ...]
    owners: frozenset[int] = frozenset()
    """Everybody whose shares are complete, in the sum or not."""
    held: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Uploader -> owners whose shares have reached it, as its upload said."""

    @cached_property
    def in_sum(self) -> tuple[int, ...]:
        """The owners of the masks."""
        return tuple(term.ref.owner for term in self.terms)


class Findings(NamedTuple):
    """What a server concludes from the reports on shares (S46)."""

    accused: frozenset[Pair] = frozenset()
    """Pairs (owner, holder) of which one lied: no sum may rest on such a share."""
    named: tuple[int, ...] = ()
    """Who must have lied if as few did as the spare reports can tell. A suspicion, never proof."""


class Scheme:
    """What the two sides of a scheme have in common: the round, and which shares it has."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.settings = round_.settings
        self._shares = round_.settings.traits.shares(round_.settings)

    def admit(self, kind: ShareKind, length: int) -> None:
        """Raise `CryptoError` unless the round has shares of this kind and this many bytes."""
        expected = self._shares.get(kind)
        traits = self.settings.traits
        if expected is None:
            mode = f" in {self.settings.parameters.share_mode} mode" if traits.share_modes else ""
            raise CryptoError(f"{traits.label} has no shares of kind {kind.name}{mode}")
        if length != expected.length:
            raise CryptoError(
                f"a share of kind {kind.name} has {expected.length} bytes, not {length}"
            )

    def check_elements(self, plaintext: bytes) -> None:
        """Raise `CryptoError` unless a share holds field elements."""
        try:
            self.settings.field.check_bytes(plaintext)
        except FieldError as error:
            raise CryptoError(f"the share holds no field elements: {error}") from error


class ClientScheme(Scheme, ABC):
    """One client's side, once the roster is fixed.

    The defaults are those of a scheme in which everybody shares with everybody and an answer
    takes a share of every mask in the sum.
    """

    def __init__(self, round_: Round, client: int) -> None:
        super().__init__(round_)
        self.client = client
        self.expands_ahead = True
        """Whether `prepare` expands the mask too, for an upload of the same process."""
        self.peers = self._find_peers()
        """With whom this client exchanges shares."""

    def _find_peers(self) -> frozenset[int]:
        return frozenset(self.round.members) - {self.client}

    @abstractmethod
    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        """Draw a mask and make the shares of it.

        * `private_keys`: of the advertised pairs; the first one seals shares.
        """

    @abstractmethod
    def check(self, kind: ShareKind, plaintext: bytes) -> None:
        """Raise `CryptoError` unless an opened share, which was admitted, is well-formed."""

    def suffices(self, held: Collection[int], owners: Sequence[int]) -> bool:
        """Whether a sum could exist for which this client can answer, once sharing is over.

        * `held`: whose shares are here; `owners`: whose shares are complete.
        """
        return len(held) >= self.settings.minimum

    def report(self, ref: MaskRef, share: Share, header: bytes) -> Elements:
        """What this client reports on a share of that mask, the same whenever it is asked (S46).

        * `header`: of the mask, as its owner has bound it to the share.
        """
        return np.empty(0, dtype=np.uint32)

    @abstractmethod
    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        """The mask of an upload; `owners` are those whose shares are complete."""

    def finish_mask(self, expanded: Elements, secret: bytes, owners: Sequence[int]) -> Elements:
        """What `mask` would make of the secret, from what `prepare` expanded of it before."""
        return expanded

    def accept(self, owners: Sequence[int]) -> None:
        """Raise `RemoteProtocolError` if a sum over these owners would not hide this client."""

    def missing(self, held: Mapping[MaskRef, Share], terms: Sequence[Term]) -> tuple[int, ...]:
        """The owners of those shares that an answer would take and that are not here."""
        return tuple(term.ref.owner for term in terms if term.ref not in held)

    @abstractmethod
    def answer(
        self, held: Mapping[MaskRef, Share], terms: Sequence[Term], owners: Sequence[int]
    ) -> Answer:
        """The one answer of this client for a sum.

        * `owners`: everybody whose shares are complete, in the sum or not.
        """


class ServerScheme(Scheme, ABC):
    """The server's side, once the roster is fixed."""

    answer_type: ClassVar[type]
    """The message that clients answer with."""

    def __init__(self, round_: Round, entropy: Entropy) -> None:
        super().__init__(round_)
        self.entropy = entropy

    def are_peers(self, owner: int, recipient: int) -> bool:
        """Whether a member sends a share to another client."""
        return owner != recipient and recipient in self.round.positions

    def examine(self, reports: Mapping[int, Mapping[int, Elements]]) -> Findings:
        """Who lied, by the reports: uploader -> owner -> what it says of that owner's share."""
        return Findings()

    @abstractmethod
    def choose(
        self,
        owners: Sequence[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair] = (),
    ) -> tuple[int, ...]:
        """U1, ascending: whose updates are summed; `RecoveryError` if no sum can be recovered.

        * `owners`: whose shares are complete; `held`: uploader -> whose shares have reached it.
        * `accused`: pairs (owner, holder) whose share must not be relied on.
        """

    def answering(
        self,
        survivors: Collection[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair],
    ) -> frozenset[int]:
        """Members of U1 who are in no quarrel: if they are enough, no other answers are used.

        The arguments are those, and the result, of `choose`.
        """
        return frozenset(survivors)

    @abstractmethod
    def check_answer(self, asked: MaskSum, sender: int, answer: Answer) -> None:
        """Raise `RemoteProtocolError` unless the answer is well-formed."""

    def suffice(self, asked: MaskSum, answered: Collection[int]) -> bool:
        """Whether the answers of so many can be enough, if none of them is wrong."""
        return len(answered) >= self.settings.sharing_threshold

    @abstractmethod
    def recover(
        self, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> tuple[Elements, tuple[int, ...]]:
        """The sum of the masks, and the clients whose answers contradict the others.

        `RecoveryError` if it cannot be found. Call when nobody can change an answer any more.
        """

    def recovery(self, asked: MaskSum, answers: Mapping[int, Answer]) -> RecoverMasks:
        """`recover` as a job, for a scheme that does better than all columns at once."""
        return _RecoverWhole(self, asked, answers)


class _RecoverWhole(RecoverMasks):
    """A recovery that cannot be cut: all of it is done when it is opened."""

    def __init__(self, scheme: ServerScheme, asked: MaskSum, answers: Mapping[int, Answer]) -> None:
        self.columns = scheme.settings.length
        self._scheme, self._asked, self._answers = scheme, asked, answers

    def open(self) -> None:
        self._mask, self.suspects = self._scheme.recover(self._asked, self._answers)

    def run(self, start: int, stop: int) -> Elements:
        return self._mask[start:stop]

    def take_away(self, total: Elements, start: int, part: Elements) -> None:
        left = total[start : start + part.size]
        left[:] = self._scheme.settings.group.subtract(left, part)
