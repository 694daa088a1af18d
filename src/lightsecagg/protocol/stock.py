"""The masks at the server: whose shares are complete, and what is known of them.

A mask is ready for an upload when all its shares are here. Every holder reports on the share that
it gets (S46); a mask counts as good at those whose reports agree. A mask is forgotten when its
upload is summed or dropped, or when its owner has passed it over.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import NamedTuple

from lightsecagg.errors import FieldError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import BLINDS, Pair, name_liars, part_quarrels
from lightsecagg.protocol.messages import Report, SealedShare, ShareBundle, Tag
from lightsecagg.protocol.roles.relay import Relay
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.share_exchange import header_of


class Shared(NamedTuple):
    """A mask whose shares are complete."""

    time: int
    """When they were."""
    header: bytes
    """Under which they count; empty without checks."""


class MaskStock:
    """Masks that were shared ahead of time, and the reports on their shares."""

    def __init__(self, scheme: ServerScheme) -> None:
        self.relay = Relay(scheme)
        self.shared: dict[int, dict[int, Shared]] = {}
        """Owner -> serial -> of its unused masks whose shares are complete."""
        self.reports: dict[MaskRef, dict[int, Elements]] = {}
        """Mask -> holder -> what it said."""
        self.restored: set[MaskRef] = set()
        """Masks from before a crash, whose shares are stored."""
        self.unawaited: set[MaskRef] = set()
        """Masks that go without the reports still missing."""
        self.accused: dict[Pair, int] = {}
        """Pairs of this epoch, and how many liars the reports on that mask tell."""
        self._scheme = scheme
        self._members = scheme.round.members
        self._checked = scheme.settings.traits.checked
        self._judged: dict[MaskRef, tuple[int, frozenset[int]]] = {}  # after so many reports

    def take(self, sender: int, message: ShareBundle, time: int) -> list[SealedShare] | None:
        """The shares of those masks that these complete; None if all of these are past."""
        shares = self.relay.take(sender, message)
        for share in shares or ():
            if share.serial not in self.shared.get(sender, {}):
                self.add(sender, share.serial, Shared(time, header_of(self._scheme.round, share)))
        return shares

    def add(self, owner: int, serial: int, mask: Shared) -> None:
        """The shares of this mask are complete."""
        self.shared.setdefault(owner, {})[serial] = mask
        if self._checked:
            self.reports[MaskRef(owner, serial)] = {}

    def use(self, tag: Tag) -> tuple[int, list[MaskRef]]:
        """An upload takes its mask: when it was shared, and the older ones that it passes over."""
        unused = self.shared[tag.owner]
        if tag.header != unused[tag.serial].header:
            raise RemoteProtocolError(
                f"the tag of client {tag.owner} names another header of its mask {tag.serial} than "
                "its shares came under"
            )
        self.shared[tag.owner] = {s: mask for s, mask in unused.items() if s > tag.serial}
        passed_over = [MaskRef(tag.owner, s) for s in unused if s < tag.serial]
        return unused[tag.serial].time, passed_over

    def pushed_out(self, owner: int, oldest: int) -> list[MaskRef]:
        """Forget an owner's unused masks before this one: its peers may have."""
        unused = self.shared[owner]
        old = [serial for serial in unused if serial < oldest]
        for serial in old:
            del unused[serial]
        return [MaskRef(owner, serial) for serial in old]

    def forget(self, mask: MaskRef) -> None:
        """The mask is past."""
        self.shared.get(mask.owner, {}).pop(mask.serial, None)
        self.reports.pop(mask, None)
        self._judged.pop(mask, None)
        self.unawaited.discard(mask)
        self.restored.discard(mask)

    # -- checked sharing ---------------------------------------------------------------------

    def unreported(self, client: int) -> list[MaskRef]:
        """The masks on which this client has not reported."""
        return [mask for mask, said in self.reports.items() if client not in said]

    def on_report(self, sender: int, report: Report) -> bool:
        """Take a report; False if it comes again or too late."""
        mask = MaskRef(report.owner, report.serial)
        try:
            values = self._read(report.values)
        except FieldError as error:
            raise RemoteProtocolError(
                f"client {sender} reported on a share what is not {BLINDS} elements: {error}"
            ) from error
        if mask not in self.reports:
            return False
        if (known := self.reports[mask].get(sender)) is not None:
            if known.size and values.size and (known != values).any():
                raise RemoteProtocolError(f"client {sender} reported twice on one share")
            return False  # it may hold the share no more
        self.reports[mask][sender] = values
        return True

    def _read(self, values: bytes) -> Elements:
        return self._scheme.settings.field.from_bytes(values, BLINDS if values else 0)

    def holders(self, mask: MaskRef) -> frozenset[int]:
        """Who holds a share of a mask that agrees with the others', as far as reports tell."""
        if not self._checked:
            return frozenset(self._members)
        came, known = len(self.reports[mask]), self._judged.get(mask)
        if known is None or known[0] != came:
            said = {
                client: {mask.owner: values}
                for client, values in self.reports[mask].items()
                if values.size
            }
            accused = self._scheme.examine(said).accused
            spare = len(said) - self._scheme.settings.parameters.survivors
            self.accused |= dict.fromkeys(accused, spare // 2)
            known = came, frozenset(said) - {holder for _, holder in accused}
            self._judged[mask] = known
        return known[1]

    def part(self, masks: Collection[MaskRef]) -> tuple[frozenset[int], frozenset[int]]:
        """Who is in no quarrel about these masks, and the owners whom some of them doubt (R59).

        Nobody is doubted where too few would be left to answer.
        """
        if not self._checked:
            return frozenset(self._members), frozenset()
        heard = frozenset(self._members).intersection(*(self.reports[m] for m in masks))
        doubts = {(m.owner, holder) for m in masks for holder in heard - self.holders(m)}
        left, doubted = part_quarrels(heard, doubts)
        enough = len(left) >= self._scheme.settings.parameters.survivors
        return (left, doubted) if enough else (heard, frozenset())

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
