"""What the server of buffers takes in: masks that are shared ahead, reports on them, and uploads.

It goes on all the time, also while a buffer is in flight (`buffer_sums`). The parts are `stock`
(masks, and reports on them), `waiting` (uploads), and mailbox and outbox of `roles.relay`.

What a client may lack is kept for it (`Mailbox`). A durable server stores the shares of a mask with
the record that it is complete, until every recipient has reported on its own: an upload under the
mask may be acknowledged at once, and they could be on their way, or wait for somebody who is away,
when the server is killed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.interface import Output, Promised, Send
from lightsecagg.protocol.jobs import UploadInMemory
from lightsecagg.protocol.journal_facts import (
    RecallShares,
    SharesTaken,
    UploadsDropped,
    UploadWaits,
)
from lightsecagg.protocol.messages import (
    MaskedUpload,
    Message,
    Reports,
    ReportsWanted,
    SealedShare,
    ShareBundle,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.promises import Promises
from lightsecagg.protocol.roles.registration import Away
from lightsecagg.protocol.roles.relay import Mailbox, Outbox
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import bundles
from lightsecagg.protocol.stock import MaskStock, Shared
from lightsecagg.protocol.waiting import BufferQueue

_ELSEWHERE = UploadInMemory(np.empty(0, dtype=np.uint32))


class Intake:
    """Takes masks, reports and uploads; see the module."""

    def __init__(
        self,
        settings: Settings,
        buffering: Buffering,
        allow_list: AllowList,
        away: Away,
        promises: Promises,
        time: int,
    ) -> None:
        self.time = time
        """t: the version of the current model, and the time of the next buffer."""
        self.most_waiting: int | None = None
        """Of how many owners one upload each may wait; others are refused, and lost to their
        owners. None: all."""
        self.closing = False
        """Whether the epoch is to end: an older model's updates that are too few are dropped."""
        self.recall_shares: RecallShares = lambda owner, serial: ()
        self.mailbox, self.outbox = Mailbox(), Outbox()
        self.queue = BufferQueue(settings, allow_list, buffering)
        self.stock: MaskStock
        """From the roster on."""
        self._settings, self._away, self._promises = settings, away, promises
        self._members: tuple[int, ...] = ()

    def begin(self, scheme: ServerScheme) -> None:
        """The roster is fixed."""
        self._members = scheme.round.members
        self.stock = MaskStock(scheme)
        self.queue.begin(scheme.round)
        self.queue.use(self.stock)

    # -- what is here ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many distinct owners have an upload waiting."""
        return self.queue.owners

    def may_fill(self, givers: Collection[int]) -> bool:
        """Whether a buffer could be formed with one more update of each of these clients."""
        return self.queue.may_fill(self.time, givers)

    def has_waiting(self, client: int) -> bool:
        """Whether an upload of this client waits for a buffer; one in flight does not."""
        return any(waiting.owner == client for waiting in self.queue.waiting)

    def is_stored(self, tag: Tag) -> bool:
        """Whether this upload came before, and will not be given up."""
        last = self.queue.last_tag.get(tag.owner)
        return last == tag and MaskRef(tag.owner, tag.serial) not in self.queue.unstored

    @property
    def has_shares_to_relay(self) -> bool:
        """Whether shares wait for others that go to the same clients; see `relay`."""
        return bool(self.outbox.owners)

    def ready(self, client: int) -> list[int]:
        """Serials of a client's masks that it may use."""
        return sorted(self.stock.shared.get(client, {})) if client in self._members else []

    def publish(self, model: bytes, version: int | None = None) -> None:
        """The hash of the model of a version, by default of the current time.

        Uploads that name another model, or a version that was never published, are refused:
        clients refuse a buffer whose owners disagree about it. So call this for every version,
        also for one that a lost buffer has left unchanged, before clients get its model.
        """
        self.queue.models.publish(model, self.time if version is None else version, self.time)

    # -- shares and reports ------------------------------------------------------------------

    def on_shares(self, sender: int, message: ShareBundle) -> list[Output] | None:
        """Take shares, and relay those of masks that are complete; None if all are past."""
        shares = self.stock.take(sender, message, self.time)
        if not shares:
            return None if shares is None else []
        masks = {share.serial: self.stock.shared[sender][share.serial] for share in shares}
        self._promises.facts += [SharesTaken(sender, serial, *of) for serial, of in masks.items()]
        self._promises.shares = shares
        outputs = self._drop_pushed_out(sender)
        for share in shares:
            if share.recipient not in self._away.lost:
                self.mailbox.put(share.recipient, share)
            if share.recipient not in self._away.offline:  # who is away gets it when it is back
                outputs += self.outbox.put(share)
        if self.outbox.owners >= set(self._away.online(self._members)):
            outputs += self.relay()  # nobody is awaited
        return outputs

    def relay(self) -> list[Output]:
        """Pass on the shares that wait: no others are expected soon.

        Call it when nothing else is on its way here, or a moment later. It happens by itself where
        everybody who is online has shared, and where an upload needs it.
        """
        return [*self.outbox.flush()]

    def _drop_pushed_out(self, owner: int) -> list[Output]:
        """Clients keep so many shares of an owner; forget the masks that they may have forgotten.

        Which of its masks they have burnt differs from client to client, and those of uploads that
        were dropped are kept, too. So the newest serials alone are certain.
        """
        oldest = self._oldest(owner)
        waiting = [w.tag for w in self.queue.waiting if w.owner == owner]
        outputs = self.drop(tag for tag in waiting if tag.serial < oldest)
        self.forget(self.stock.pushed_out(owner, oldest))
        return outputs

    def _oldest(self, owner: int) -> int:
        return self.stock.relay.complete[owner] - self.queue.buffering.stock + 1

    def on_reports(self, sender: int, message: Reports) -> list[Output] | None:
        """Take reports; None if all come again or too late."""
        fresh = False
        for report in message.reports:
            fresh |= self.stock.on_report(sender, report)
            self.mailbox.delivered(sender, MaskRef(report.owner, report.serial))
        return [] if fresh else None

    def await_no_reports(self) -> None:
        """Uploads that wait for reports wait no longer."""
        self.stock.unawaited.update(waiting.mask for waiting in self.queue.waiting)

    def missed_by(
        self, client: int, asked: Collection[MaskRef]
    ) -> tuple[list[Message], list[Message]]:
        """What a client that is back may lack: before it is asked about these masks, and after.

        Clients keep the newest shares only, and could otherwise lose the very ones that they are
        asked for.
        """
        urgent, others = self.mailbox.read(client, asked)
        # Nobody remembers whether these had left, and clients take an owner's masks in order.
        again = self._stored_shares(client, self.stock.unreported(client))
        coming = {*self.mailbox.missed.get(client, {})}
        coming.update(MaskRef(share.owner, share.serial) for share in again)
        wanted = [mask for mask in self.stock.unreported(client) if mask not in coming]
        if wanted:
            others.append(ReportsWanted(tuple(wanted)))
        return [*bundles(again), *urgent], others

    def _stored_shares(self, client: int, masks: Iterable[MaskRef]) -> list[SealedShare]:
        """Of these masks, what is stored for a client since before a crash."""
        return [
            share
            for mask in sorted(self.stock.restored.intersection(masks))
            for share in self.recall_shares(mask.owner, mask.serial)
            if share.recipient == client
        ]

    # -- uploads -----------------------------------------------------------------------------

    def on_upload(
        self, sender: int, message: MaskedUpload, *, durable: bool
    ) -> list[Output] | None:
        """Let an upload wait; None if it came before. A `durable` server's counts when stored."""
        tag = message.tag
        if self.queue.is_repeat(sender, tag):
            return None
        hidden = self._settings.traits.protected
        unknown = hidden and tag.serial not in self.stock.shared.get(sender, {})
        if unknown or self._has_no_room(sender):
            # Its shares were lost with a connection, or the epoch is about to end. The owner goes
            # on with another mask and another update: it cannot know that this one is in no sum.
            return [Send(sender, UploadDropped(tag.serial))]
        self.queue.check(sender, message, self.time)
        shared, passed_over = self.time, list[MaskRef]()
        if hidden:
            shared, passed_over = self.stock.use(tag)
        self.forget(passed_over)
        self._promises.facts.append(UploadWaits(tag, shared))
        # Before it is summed all holders have to report on its mask.
        outputs: list[Output] = self.relay() if sender in self.outbox.owners else []
        if self.queue.put(tag, UploadInMemory(message.vector), shared, stored=not durable):
            self._promises.upload = message
            return outputs
        self.forget([MaskRef(sender, tag.serial)])
        return outputs + self.report_dropped(tag)

    def _has_no_room(self, owner: int) -> bool:
        """Owners count, not uploads: two of one owner share no buffer, and keep out no other's."""
        if self.most_waiting is None:
            return False
        return self.has_waiting(owner) or self.waiting >= self.most_waiting

    def drop_useless(self) -> list[Output]:
        """Uploads that no buffer will ever take, at this time, wait no longer."""
        self.queue.models.expire(self.time)
        return self.drop_hopeless(patient=not self.closing)

    def drop_hopeless(self, *, patient: bool) -> list[Output]:
        """The same; `patient`: wait for the company that an older model's update needs."""
        away = self._away
        useless = self.queue.useless(self.time, away.offline, away.lost, patient=patient)
        return self.drop(useless)

    def drop(self, tags: Iterable[Tag]) -> list[Output]:
        """These uploads wait no longer; their owners hear of it."""
        dropped = list(tags)
        if dropped:
            masks = tuple((tag.owner, tag.serial) for tag in dropped)
            self._promises.facts.append(UploadsDropped(masks))
        self.forget(self.queue.take(dropped))
        return [output for tag in dropped for output in self.report_dropped(tag)]

    def report_dropped(self, tag: Tag) -> list[Output]:
        """Let the owner hear that its upload is in no sum, when it is back."""
        dropped = UploadDropped(tag.serial)
        if tag.owner not in self._away.offline:
            return [Send(tag.owner, dropped)]
        self.mailbox.put(tag.owner, dropped)
        return []

    def forget(self, masks: Iterable[MaskRef]) -> None:
        """Of masks that are past nobody needs shares or reports."""
        for mask in masks:
            self.stock.forget(mask)
            self.mailbox.forget(mask)
            self._promises.past.append(mask)

    # -- surviving a crash -------------------------------------------------------------------

    def undo(self, record: Promised) -> list[Output]:
        """A record that `can_fail` has: the masks or the upload in it are given up.

        Masks are gone as if their shares had never come; an upload's owner hears of it, and its
        mask stays used.
        """
        self._promises.take_back(record)
        self.forget({MaskRef(share.owner, share.serial) for share in record.shares})
        # What was to leave behind the record is lost, others' shares with it.
        outputs = self._send_missed_again()
        if record.upload is not None:
            self.forget(self.queue.give_up(record.upload.tag))
            outputs += self.report_dropped(record.upload.tag)
        # What is past goes with the next record: who replays the facts must not look for it.
        past = tuple((mask.owner, mask.serial) for mask in self._promises.past)
        self._promises.facts.append(UploadsDropped(past))
        return outputs

    def _send_missed_again(self) -> list[Output]:
        """All shares that somebody online may lack; who has them reports again."""
        self.outbox = Outbox()
        outputs: list[Output] = []
        for client in self._away.online(self._members):
            for message in self.mailbox.missed.get(client, {}).values():
                if isinstance(message, SealedShare):
                    outputs += self.outbox.put(message)
        return outputs

    def replay(self, fact: SharesTaken | UploadWaits | UploadsDropped) -> None:
        """What was taken in before a crash is taken in again, without the uploads themselves."""
        match fact:
            case SharesTaken(owner, serial, time, header):
                self.stock.relay.restore(owner, serial)
                self.stock.add(owner, serial, Shared(time, header))
                self.forget(self.stock.pushed_out(owner, self._oldest(owner)))
            case UploadWaits(tag, shared):
                if self._settings.traits.protected:
                    self.forget(self.stock.use(tag)[1])
                if not self.queue.put(tag, _ELSEWHERE, shared, stored=True):
                    self.forget([MaskRef(tag.owner, tag.serial)])
            case UploadsDropped(masks):
                self.forget(self.queue.remove(MaskRef(*mask) for mask in masks))
