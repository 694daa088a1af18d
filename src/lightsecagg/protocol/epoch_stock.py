"""The masks of an epoch at the server: whose shares are complete, and what is known of them.

A mask is ready for an upload when all its shares have been relayed. Then every holder is told the
secret of its check, and reports (S46); a mask counts as good at those whose reports agree. A mask
is forgotten when its upload is summed or dropped, or when its owner has passed it over.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

import numpy as np

from lightsecagg.crypto.transcript import derive_key, uint
from lightsecagg.errors import RemoteProtocolError
from lightsecagg.masks.checked_sharing import (
    BLINDS,
    CHAIN_LENGTH,
    CheckChain,
    Pair,
    name_liars,
    part_quarrels,
)
from lightsecagg.protocol.messages import MaskComplete, MaskReport, SealedShare, ShareBundle
from lightsecagg.protocol.roles.relay import Relay
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme

Values = tuple[int, ...]


class MaskStock:
    """Masks that were shared ahead of time, and the reports on their shares."""

    def __init__(self, scheme: ServerScheme, check_secret: bytes) -> None:
        """`check_secret`: what all chains of check secrets follow from (`chain_end`)."""
        self.relay = Relay(scheme)
        self.shared: dict[int, dict[int, int]] = {}
        """Owner -> serial -> the time at which its shares were complete; unused masks only."""
        self.reports: dict[MaskRef, dict[int, Values]] = {}
        """Mask -> holder -> what it said."""
        self.unawaited: set[MaskRef] = set()
        """Masks that go without the reports still missing."""
        self.accused: dict[Pair, int] = {}
        """Pairs of this epoch, and how many liars the reports on that mask tell."""
        self.check_secret = check_secret
        self._chains: dict[int, CheckChain] = {}
        self._scheme = scheme
        self._members = scheme.round.members
        self._checked = scheme.settings.traits.checked
        self._judged: dict[MaskRef, tuple[int, frozenset[int]]] = {}  # after so many reports

    def take(self, sender: int, message: ShareBundle, time: int) -> list[SealedShare] | None:
        """The shares of those masks that these complete; None if all of these are past."""
        last = max((share.serial for share in message.shares), default=0)
        if self._checked and last >= CHAIN_LENGTH:
            raise RemoteProtocolError(
                f"client {sender} shares its mask {last}; an epoch has {CHAIN_LENGTH}"
            )
        shares = self.relay.take(sender, message)
        if shares:
            mine = self.shared.setdefault(sender, {})
            mine.update((share.serial, time) for share in shares)
        return shares

    def use(self, owner: int, serial: int) -> tuple[int, list[MaskRef]]:
        """An upload takes this mask: when it was shared, and the older ones that it passes over."""
        unused = self.shared[owner]
        self.shared[owner] = {s: time for s, time in unused.items() if s > serial}
        return unused[serial], [MaskRef(owner, s) for s in unused if s < serial]

    def pushed_out(self, owner: int, oldest: int) -> list[MaskRef]:
        """Forget an owner's unused masks before this one: its peers may have."""
        unused = self.shared[owner]
        old = [serial for serial in unused if serial < oldest]
        for serial in old:
            del unused[serial]
        return [MaskRef(owner, serial) for serial in old]

    def forget(self, mask: MaskRef) -> None:
        """The mask is past."""
        self.reports.pop(mask, None)
        self._judged.pop(mask, None)
        self.unawaited.discard(mask)

    # -- checked sharing ---------------------------------------------------------------------

    def ask(self, masks: Iterable[MaskRef]) -> list[MaskComplete]:
        """The owners can change nothing any more: by what everybody is to check these masks."""
        ready = [m for m in masks if self._checked and m.serial in self.shared[m.owner]]
        self.reports.update((mask, {}) for mask in ready)
        return [self.completion(mask) for mask in ready]

    def completion(self, mask: MaskRef) -> MaskComplete:
        """What holders need to check a mask."""
        return MaskComplete(mask.owner, mask.serial, self.secret(mask.owner, mask.serial))

    def secret(self, owner: int, serial: int) -> bytes:
        """By which this mask is checked."""
        if owner not in self._chains:
            context = self._scheme.settings.context
            self._chains[owner] = check_chain(self.check_secret, context, owner)
        return self._chains[owner][serial]

    def unreported(self, client: int) -> list[MaskComplete]:
        """What to ask of a client that is back."""
        return [self.completion(mask) for mask, said in self.reports.items() if client not in said]

    def on_report(self, sender: int, message: MaskReport) -> bool:
        """Take a report; False if it comes again or too late."""
        mask, q = MaskRef(message.owner, message.serial), self._scheme.settings.field.modulus
        sound = all(0 <= value < q for value in message.values)
        if len(message.values) not in (0, BLINDS) or not sound:
            raise RemoteProtocolError(
                f"client {sender} reported {len(message.values)} values, or some beyond F_q, "
                f"instead of {BLINDS} elements"
            )
        if mask not in self.reports:
            return False
        if (known := self.reports[mask].get(sender)) is not None:
            if known != message.values:
                raise RemoteProtocolError(f"client {sender} reported twice on one share")
            return False
        self.reports[mask][sender] = message.values
        return True

    def holders(self, mask: MaskRef) -> frozenset[int]:
        """Who holds a share of a mask that agrees with the others', as far as reports tell."""
        if not self._checked:
            return frozenset(self._members)
        came, known = len(self.reports[mask]), self._judged.get(mask)
        if known is None or known[0] != came:
            said = {
                client: {mask.owner: np.array(values, dtype=np.uint32)}
                for client, values in self.reports[mask].items()
                if values
            }
            accused = self._scheme.examine(said).accused
            spare = len(said) - self._scheme.settings.parameters.survivors
            self.accused |= dict.fromkeys(accused, spare // 2)
            known = came, frozenset(said) - {holder for _, holder in accused}
            self._judged[mask] = known
        return known[1]

    def part(self, masks: Collection[MaskRef]) -> tuple[frozenset[int], frozenset[int]]:
        """Who is in no quarrel about these masks, and the owners whom some of them doubt (R59).

        Nobody is doubted where more pairs quarrel than liars can be told.
        """
        if not self._checked:
            return frozenset(self._members), frozenset()
        if not all(mask in self.reports for mask in masks):
            return (
                frozenset(),
                frozenset(),
            )  # a sum of before a crash: who holds good shares is kept
        heard = frozenset(self._members).intersection(*(self.reports[m] for m in masks))
        doubts = {(m.owner, holder) for m in masks for holder in heard - self.holders(m)}
        left, doubted, pairs = part_quarrels(heard, doubts)
        spare = len(heard) - self._scheme.settings.parameters.survivors
        return (left, doubted) if pairs <= max(0, spare) // 2 else (heard, frozenset())

    def awaits_reports(self, mask: MaskRef, offline: Container[int]) -> bool:
        """Whether somebody online has still to report on a mask."""
        if not self._checked or mask in self.unawaited:
            return False
        said = self.reports[mask]
        return any(c not in said and c not in offline for c in self._members)

    def possible_holders(self, mask: MaskRef) -> int:
        """How many may turn out to hold a good share, those included that are still silent."""
        silent = len(self._members) - len(self.reports[mask]) if self._checked else 0
        return len(self.holders(mask)) + silent

    @property
    def suspects(self) -> tuple[int, ...]:
        """Who must have lied in this epoch, if as few did as the most reports on a mask tell."""
        liars = max(self.accused.values(), default=0)
        return name_liars((pair for pair, few in self.accused.items() if few == liars), liars)


def check_chain(check_secret: bytes, context: bytes, owner: int) -> CheckChain:
    """The secrets by which an owner's masks are checked."""
    return CheckChain(derive_key(check_secret, context, "check seed", uint(owner)))
