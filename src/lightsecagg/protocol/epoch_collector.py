"""What the server of an epoch collects: masks that are shared ahead, reports, and uploads.

It goes on all the time, also while a buffer is in flight (`epoch_server`). The parts are
`epoch_stock` (masks and reports on them) and `epoch_queue` (uploads that wait).

What a client may lack is kept for it (`Mailbox`). A durable server stores the shares of a mask with
the record that it is complete, until every recipient has reported on its own: an upload under the
mask may be acknowledged at once, and they could be on their way, or wait for somebody who is away,
when the server is killed.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.errors import ParameterError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.epoch_queue import Models, UploadQueue, WaitingUpload
from lightsecagg.protocol.epoch_stock import MaskStock
from lightsecagg.protocol.interface import Output, Phase, Send
from lightsecagg.protocol.jobs import UploadInMemory
from lightsecagg.protocol.journal_facts import (
    AnyFact,
    RecallShares,
    SharesTaken,
    UploadBuffered,
    UploadsDropped,
)
from lightsecagg.protocol.messages import (
    BufferedUpload,
    Reports,
    Roster,
    SealedShare,
    ShareBundle,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.roles.relay import Mailbox, Outbox
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.server_machine import ServerMachine
from lightsecagg.protocol.settings import Settings


class EpochCollector(ServerMachine):
    """The server of one epoch as far as it collects; see the module."""

    mode = "epoch"
    after_roster = Phase.UPLOAD

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        buffer_size: int,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        time: int = 0,
        *,
        durable: bool = False,
    ) -> None:
        """What an epoch has beside its settings.

        * `time`: of the model that the epoch begins with. Times go on from epoch to epoch, so that
          who has trained through the end of one brings its update to the next.
        * `durable`: ask for what is promised to be stored.
        """
        if settings.buffering is None:
            raise ParameterError("the asynchronous mode needs settings with buffering")
        least = settings.parameters.privacy + 2
        if not least <= buffer_size <= settings.buffering.max_updates:
            raise ParameterError(
                f"buffer size K = {buffer_size} must be T + 2 = {least} to K_max = "
                f"{settings.buffering.max_updates}"
            )
        super().__init__(settings, allow_list, invited, entropy, durable=durable)
        self.buffer_size = buffer_size
        self.time = time
        """t: the version of the current model, and the time of the next buffer."""
        self.paused = False
        """Whether no more buffers are formed, because the server is to stop."""
        self.most_waiting: int | None = None
        """Of how many owners one upload each may wait; others are refused, and lost to their
        owners. None: all."""
        self.spare_answers = 2
        """Answers that are awaited beyond U while anybody may still give one; two locate a liar."""
        self.closing = False
        """Whether the epoch is to end: an older model's updates that are too few are dropped."""
        self._buffering: Buffering = settings.buffering
        self._offline: set[int] = set()
        """Who is away; the buffer in flight waits for those who are not `_gone`."""
        self._facts: list[AnyFact] = []
        """What is promised with the outputs of this call."""
        self._past: list[MaskRef] = []
        self._taken: BufferedUpload | None = None
        self._completed: list[SealedShare] = []
        self._recall_shares: RecallShares = lambda owner, serial: ()
        self._lost: set[int] = set()
        """Clients without a memory of this epoch."""
        self._models = Models(self._buffering)
        self._mailbox, self._outbox = Mailbox(), Outbox()
        self._stock: MaskStock
        self._queue: UploadQueue

    # -- what is here ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many distinct owners have an upload waiting."""
        return 0 if self._roster is None else self._queue.owners

    @property
    def unsummed(self) -> int:
        """How many uploads wait or are being summed."""
        return len(self._needed())

    @property
    def summable(self) -> int:
        """How many of the waiting uploads may share a buffer now; `flush` wants T + 2."""
        return 0 if self._roster is None else len(self._choose())

    def _choose(self) -> list[WaitingUpload]:
        return self._queue.choose(self.buffer_size, self.time, self._offline)

    @property
    def members(self) -> tuple[int, ...]:
        """Whoever is on the roster, in its order; nobody before there is one."""
        return self._members

    def has_waiting(self, client: int) -> bool:
        """Whether an upload of this client waits for a buffer; one in flight does not."""
        return self._roster is not None and any(w.owner == client for w in self._queue.waiting)

    @property
    def uploaders(self) -> frozenset[int]:
        """Whose uploads it has taken in this epoch."""
        return frozenset() if self._roster is None else frozenset(self._queue.last_tag)

    def is_stored(self, tag: Tag) -> bool:
        """Whether this upload came before, and will not be given up."""
        if self._roster is None or self._queue.last_tag.get(tag.owner) != tag:
            return False
        return MaskRef(tag.owner, tag.serial) not in self._queue.unstored

    def serials(self, client: int) -> tuple[list[int], list[int]]:
        """A client's masks that it may use, and those of its uploads that are not summed yet."""
        if client not in self._members:
            return [], []
        used = [serial for owner, serial in self._needed() if owner == client]
        return sorted(self._stock.shared.get(client, {})), used

    def publish(self, model: bytes, version: int | None = None) -> None:
        """The hash of the model of a version, by default of the current time.

        Uploads that name another model, or a version that was never published, are refused:
        clients refuse a buffer whose owners disagree about it. So call this for every version,
        also for one that a lost buffer has left unchanged, before clients get its model.
        """
        self._models.publish(model, self.time if version is None else version, self.time)

    def _needed(self) -> list[MaskRef]:
        """The masks of uploads that wait or are being summed."""
        if self._roster is None:
            return []
        flying = [] if self._flight is None else [term.ref for term in self._flight.asked.terms]
        return flying + [waiting.mask for waiting in self._queue.waiting]

    def _fix_roster(self, roster: Roster) -> None:
        super()._fix_roster(roster)
        self._stock = MaskStock(self._scheme)
        self._queue = UploadQueue(
            self._scheme.round, self._allow_list, self._buffering, self._stock
        )

    # -- stock -------------------------------------------------------------------------------

    def _on_shares(self, sender: int, message: ShareBundle) -> list[Output]:
        shares = self._stock.take(sender, message, self.time)
        if shares is None:
            return self._on_late(sender, message)
        if not shares:
            return []
        masks = {share.serial: self._stock.shared[sender][share.serial] for share in shares}
        self._facts += [SharesTaken(sender, serial, *mask) for serial, mask in masks.items()]
        self._completed = shares
        outputs = self._drop_pushed_out(sender)
        for share in shares:
            if share.recipient not in self._lost:
                self._mailbox.put(share.recipient, share)
            if share.recipient not in self._offline:  # who is away gets it when it is back
                outputs += self._outbox.put(share)
        if self._outbox.owners >= set(self._members) - self._offline:
            outputs += self._outbox.flush()  # nobody is awaited
        return outputs

    @property
    def has_shares_to_relay(self) -> bool:
        """Whether shares wait for others that go to the same clients."""
        return bool(self._outbox.owners)

    def relay(self) -> list[Output]:
        """Pass on the shares that wait: no others are expected soon."""
        return [*self._outbox.flush()]

    def _send_missed_again(self) -> list[Output]:
        """All shares that somebody online may lack; who has them reports again."""
        self._outbox = Outbox()
        online = set(self._members) - self._offline
        outputs: list[Output] = []
        for client in online:
            for message in self._mailbox.missed.get(client, {}).values():
                if isinstance(message, SealedShare):
                    outputs += self._outbox.put(message)
        return outputs

    def _drop_pushed_out(self, owner: int) -> list[Output]:
        """Clients keep so many shares of an owner; forget the masks that they may have forgotten.

        Which of its masks they have burnt differs from client to client, and those of uploads that
        were dropped are kept, too. So the newest serials alone are certain.
        """
        oldest = self._oldest(owner)
        waiting = [w.tag for w in self._queue.waiting if w.owner == owner]
        outputs = self._drop(tag for tag in waiting if tag.serial < oldest)
        self._forget(self._stock.pushed_out(owner, oldest))
        return outputs

    def _oldest(self, owner: int) -> int:
        return self._stock.relay.complete[owner] - self._buffering.stock + 1

    def _on_reports(self, sender: int, message: Reports) -> list[Output]:
        fresh = False
        for report in message.reports:
            mask = MaskRef(report.owner, report.serial)
            fresh |= self._stock.on_report(sender, report)
            self._mailbox.delivered(sender, mask)
        return [] if fresh else self._on_late(sender, message)

    def _stored_shares(self, client: int, masks: Iterable[MaskRef]) -> list[SealedShare]:
        """Of these masks, what is stored for a client since before a crash."""
        return [
            share
            for mask in sorted(self._stock.restored.intersection(masks))
            for share in self._recall_shares(mask.owner, mask.serial)
            if share.recipient == client
        ]

    # -- uploads -----------------------------------------------------------------------------

    def _on_upload(self, sender: int, message: BufferedUpload) -> list[Output]:
        tag = message.tag
        if self._queue.is_repeat(sender, tag):
            return self._on_late(sender, message)
        hidden = self.settings.traits.protected
        unknown = hidden and tag.serial not in self._stock.shared.get(sender, {})
        if unknown or self._has_no_room(sender):
            # Its shares were lost with a connection, or the epoch is about to end. The owner goes
            # on with another mask and another update: it cannot know that this one is in no sum.
            return [Send(sender, UploadDropped(tag.serial))]
        self._queue.check(sender, message, self.time)
        self._models.check(tag, self.time)
        shared, passed_over = self.time, list[MaskRef]()
        if hidden:
            shared, passed_over = self._stock.use(tag)
        self._forget(passed_over)
        self._facts.append(UploadBuffered(tag, shared))
        # Before it is summed all holders have to report on its mask.
        outputs: list[Output] = self.relay() if sender in self._outbox.owners else []
        kept = UploadInMemory(message.vector)
        if self._queue.put(tag, kept, shared, stored=not self._durable):
            self._taken = message
            return outputs
        self._forget([MaskRef(sender, tag.serial)])
        return outputs + self._tell_dropped(tag)

    def _has_no_room(self, owner: int) -> bool:
        """Owners count, not uploads: two of one owner share no buffer, and keep out no other's."""
        if self.most_waiting is None:
            return False
        return self.has_waiting(owner) or self.waiting >= self.most_waiting

    def _await_no_reports(self) -> None:
        self._stock.unawaited.update(waiting.mask for waiting in self._queue.waiting)

    def _drop_useless(self) -> list[Output]:
        self._models.expire(self.time)
        return self._drop_hopeless(patient=not self.closing)

    def _drop_hopeless(self, *, patient: bool) -> list[Output]:
        return self._drop(
            self._queue.useless(self.time, self._offline, self._lost, patient=patient)
        )

    def _drop(self, tags: Iterable[Tag]) -> list[Output]:
        """These uploads wait no longer; their owners are told."""
        dropped = list(tags)
        if dropped:
            self._facts.append(UploadsDropped(tuple((t.owner, t.serial) for t in dropped)))
        self._forget(self._queue.take(dropped))
        return [output for tag in dropped for output in self._tell_dropped(tag)]

    def _tell_dropped(self, tag: Tag) -> list[Output]:
        dropped = UploadDropped(tag.serial)
        if tag.owner not in self._offline:
            return [Send(tag.owner, dropped)]
        self._mailbox.put(tag.owner, dropped)
        return []

    def _forget(self, masks: Iterable[MaskRef]) -> None:
        """Of masks that are past nobody needs shares or reports."""
        for mask in masks:
            self._stock.forget(mask)
            self._mailbox.forget(mask)
            self._past.append(mask)

    @property
    def _may_announce(self) -> bool:
        """A buffer that too few can sign and answer for would only burn its masks."""
        if self._roster is None or self.paused:
            return False
        online = sum(client not in self._offline for client in self._members)
        return online >= self._queue.needed_holders
