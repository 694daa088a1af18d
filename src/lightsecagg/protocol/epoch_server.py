"""The server in one epoch of the buffered-asynchronous mode, Section 4.2 and Appendix F.3.

Theory of operation. After registration (one roster per epoch) the server relays stock, collects
uploads, and whenever K distinct owners have one waiting it flushes:

    advertise  keys, from every invited client
    upload     collects: masks are checked when their shares are delivered; uploads wait, oldest
               first; at K owners, or on `flush`, a buffer of time t is formed
    agree      malicious-server mode: m signatures on (C1, t, tags)
    recover    U answers decode the weighted sum of the masks in one shot; `BufferAggregate`
    done       too few have registered

Without protection (`no_masks`, FedBuff) nothing is shared and nobody is asked: a buffer is summed
where it is formed.

`TRANSITIONS` names, for each phase, the messages that it takes. Shares, reports and uploads go on
coming while a buffer is in flight; the uploads wait for the next. The parts are `epoch_stock`
(masks and reports on them), `epoch_queue` (uploads that wait), `epoch_flight` (the buffer in
flight) and `epoch_memory` (what outlives the process).

A buffer that fails is never formed again, because its masks are burnt: its updates are lost, its
owners train anew. The time goes up with every buffer, failed or not. Only buffers that clients will
accept are formed: an upload that is too stale, or whose shares have expired, is dropped before it
spoils the others'. So is one whose shares contradict each other (S46): an upload waits until
everybody online has reported on its mask, or until `proceed`, and a buffer is formed only where
enough clients hold good shares of all its masks. A client that was away gets what it missed with
`rejoin`. The driver updates the model on `BufferAggregate`,

    x <- x + eta_g * average,        see `Settings.buffer_average`      Eq. (35)-(37)

calls `publish` with the hash of the new model, and tells clients the time together with the model.

A server that survives a crash is stored as `snapshot()`, after every call and before the outputs of
that call leave, beside the upload that the call brought (`BufferedUpload`, by owner and serial).
Then nothing that was acknowledged is lost, and an announced buffer never changes: who is asked
again is asked for the same tags. One that is `durable` asks for less: whenever it promises
something (a roster, a mask that is complete, an upload, a buffer, an agreement, a result) a record
of all its promises goes before the outputs. The shares of a mask go with its record and stay until
every recipient has reported on its own: an upload under the mask may be acknowledged at once, and
they could be on their way, or wait for somebody who is away, when the server is killed. An upload
counts from `stored` on. `restore` says what a driver does next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.errors import (
    LocalProtocolError,
    ParameterError,
    RecoveryError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.epoch_flight import Flight
from lightsecagg.protocol.epoch_memory import Memory, Recall
from lightsecagg.protocol.epoch_queue import Keep, Models, UploadQueue, WaitingUpload, in_memory
from lightsecagg.protocol.epoch_stock import MaskStock, check_chain
from lightsecagg.protocol.interface import (
    BufferAggregate,
    BufferFailed,
    EpochChanged,
    Output,
    Persist,
    Phase,
    RoundAborted,
    Send,
)
from lightsecagg.protocol.jobs import Job, Result, Upload
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    BufferedUpload,
    Consent,
    MaskReport,
    Message,
    Opening,
    Refusal,
    Roster,
    SealedShare,
    ShareBundle,
    SumRequest,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.roles.registration import Registration
from lightsecagg.protocol.roles.relay import Mailbox, Outbox
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.settings import Settings


class EpochServer:
    """The server of one epoch; see the theory of operation and `interface`."""

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        buffer_size: int,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        spare_answers: int = 0,
        keep: Keep = in_memory,
        time: int = 0,
        *,
        durable: bool = False,
    ) -> None:
        """`keep` says where an upload is kept until it is summed.

        * `spare_answers`: wait for U + this many answers; one detects a liar, two name it.
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
        self.settings = settings
        self.buffer_size = buffer_size
        self.phase = Phase.ADVERTISE
        self.time = time
        """t: the version of the current model, and the time of the next buffer."""
        self.paused = False
        """Whether buffers are formed by `flush` alone, because the epoch is to end."""
        self.late_messages: Counter[str] = Counter()
        """Messages that came again or too late and were ignored, by type."""
        self._allow_list = allow_list
        self._buffering: Buffering = settings.buffering
        self._entropy = entropy
        self._spare = spare_answers
        self._keep = keep
        self._registration = Registration(settings, allow_list, invited)
        self._started = False
        self._offline: set[int] = set()
        self._returning: set[int] = set()
        """Those of them that the buffer in flight waits for."""
        self._durable = durable
        self._has_promised = False
        self._taken: BufferedUpload | None = None
        self._completed: list[SealedShare] = []
        self._lost: set[int] = set()
        """Clients without a memory of this epoch."""
        self._models = Models(self._buffering)
        self._mailbox = Mailbox()
        self._roster: Roster | None = None
        self._members: tuple[int, ...] = ()
        self._scheme: ServerScheme
        self._stock: MaskStock
        self._queue: UploadQueue
        self._flight: Flight | None = None

    # -- the driver's side -------------------------------------------------------------------

    @property
    def pending(self) -> frozenset[int]:
        """Clients that the current phase still waits for; nobody while collecting."""
        return frozenset(self._awaited())

    @property
    def refusals(self) -> dict[int, tuple[int, ...]]:
        """Who refused the buffer in flight, and whose shares it lacks."""
        return {} if self._flight is None else self._flight.agreement.refusals

    @property
    def waiting(self) -> int:
        """How many distinct owners have an upload waiting."""
        return 0 if self._roster is None else self._queue.owners

    @property
    def summable(self) -> int:
        """How many of the waiting uploads may share a buffer now; `flush` wants T + 2."""
        return 0 if self._roster is None else len(self._choose())

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

    def start(self) -> list[Output]:
        """Open the epoch."""
        if self._started:
            raise LocalProtocolError("the epoch was started already")
        self._started = True
        return [*self._registration.open()]

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        if not self._started:
            raise LocalProtocolError("start the epoch before delivering messages to it")
        self._registration.check_invited(sender)
        handler = TRANSITIONS.get((self.phase, type(message)))
        member = self.phase is Phase.ADVERTISE or sender in self._members
        if handler is None or not (member or isinstance(message, Advertise)):
            raise RemoteProtocolError(
                f"client {sender} sent {type(message).__name__} in phase {self.phase}"
            )
        outputs = handler(self, sender, message)
        # Shares move no phase on, and they are most of the messages.
        if not isinstance(message, ShareBundle):
            outputs += self._advance()
        return self._released(outputs)

    def leave(self, client: int) -> list[Output]:
        """The client is offline and may be back soon: a buffer in flight waits for it."""
        self._offline.add(client)
        self._returning.add(client)
        return self._released(self._advance())

    def drop(self, client: int) -> list[Output]:
        """The client is offline; what it has delivered stays."""
        self._offline.add(client)
        self._returning.discard(client)
        return self._released(self._advance())

    def lose(self, client: int) -> list[Output]:
        """The client has no memory of this epoch any more: nothing is kept for it."""
        self._lost.add(client)
        self._mailbox.missed.pop(client, None)
        return self.drop(client)

    def rejoin(self, client: int) -> list[Output]:
        """The client is back, with its memory: it gets what it missed."""
        self._offline.discard(client)
        self._returning.discard(client)
        if self.phase is Phase.ADVERTISE and client not in self._registration.advertised:
            return [Send(client, Opening(self.settings.to_bytes()))]
        if self._roster is None or client not in self._members:
            return []
        messages: list[Message] = []
        if not self._stock.relay.has_begun(client):  # perhaps it lacks the roster
            messages.append(self._roster)
        flight = self._flight
        asked = () if flight is None else flight.asked.terms
        # Its shares before the buffer, all others after it: clients keep the newest ones only, and
        # could otherwise lose the very shares that they are asked for.
        urgent, others = self._mailbox.read(client, [term.ref for term in asked])
        messages += urgent
        if flight is not None:
            messages.append(flight.buffer)
        messages += [*others, *self._stock.unreported(client)]
        missed: list[Output] = [Send(client, message) for message in messages]
        return self._released(missed + self._advance())

    def publish(self, model: bytes, version: int | None = None) -> None:
        """The hash of the model of a version, by default of the current time.

        Uploads that name another model, or a version that was never published, are refused:
        clients refuse a buffer whose owners disagree about it. So call this for every version,
        also for one that a lost buffer has left unchanged, before clients get its model.
        """
        self._models.publish(model, self.time if version is None else version, self.time)

    @property
    def can_proceed(self) -> bool:
        """See `BufferedServerParty.can_proceed`."""
        parameters = self.settings.parameters
        match self.phase:
            case Phase.ADVERTISE:
                return len(self._registration.advertised) >= self.settings.minimum
            case Phase.UPLOAD:
                return self.summable >= parameters.privacy + 2
            case Phase.AGREE:
                return self._in_flight.agreement.reached
            case Phase.RECOVER:
                return len(self._in_flight.good_answers) >= parameters.survivors
            case _:
                return False

    def proceed(self) -> list[Output]:
        """The deadline of the current phase fired; while collecting, that of the reports.

        Uploads that wait for reports wait no longer.
        """
        if not self._started:
            raise LocalProtocolError("start the epoch before its first deadline")
        match self.phase:
            case Phase.ADVERTISE:
                return self._released(self._close_advertise())
            case Phase.AGREE:
                return self._released(self._close_agree())
            case Phase.RECOVER if not self._in_flight.collected:
                return [*self._in_flight.collect()]
            case Phase.UPLOAD:
                self._await_no_reports()
                return self._released(self._advance())
            case _:
                return []

    def computed(self, job: Job, result: Result) -> list[Output]:
        """Take the result of a job; one of a buffer that was lost meanwhile changes nothing."""
        flight = self._flight
        if flight is None or not flight.asked_for(job):
            return []
        if isinstance(result, RecoveryError):
            return self._released(self._fail(str(result)) + self._advance())
        more = flight.summed(job, result)
        if more is not None:
            return [*more]
        return self._released(self._finish(flight, result) + self._advance())

    def flush(self) -> list[Output]:
        """Form a buffer now, with as many updates as wait, at most K; await no more reports."""
        if self.phase is not Phase.UPLOAD:
            raise LocalProtocolError(f"cannot flush in phase {self.phase}")
        self._await_no_reports()
        least = self.settings.parameters.privacy + 2
        chosen = self._choose()
        if len(chosen) < least:
            raise LocalProtocolError(
                f"{len(chosen)} of {self.waiting} waiting updates may share a buffer now; clients "
                f"accept T + 2 = {least} or more"
            )
        return self._released(self._drop_useless() + self._announce(chosen))

    def skip(self) -> list[Output]:
        """No buffer of this time will be formed: the next model is of the time after it.

        For models that change without a buffer: after an update that nobody can send again.
        """
        if self.phase is not Phase.UPLOAD:
            raise LocalProtocolError(f"cannot skip a buffer in phase {self.phase}")
        self.time += 1
        self._has_promised = True
        return self._released(self._drop_useless())

    # -- surviving a crash -------------------------------------------------------------------

    def _released(self, outputs: list[Output]) -> list[Output]:
        """The outputs of a call; behind the record of what it has promised, if it is durable."""
        promised, self._has_promised = self._has_promised, False
        upload, self._taken = self._taken, None
        shares, self._completed = self._completed, []
        if not (promised and self._durable):
            return outputs
        memory = self._memory().promises()
        kept = tuple((mask.owner, mask.serial) for mask in self._needed())
        relayed = tuple((mask.owner, mask.serial) for mask, _ in memory.lacking)
        results = [isinstance(each, BufferAggregate | BufferFailed) for each in outputs]
        first = results.index(True) + 1 if any(results) else 0
        return [
            *outputs[:first],
            Persist(EpochChanged(memory.to_bytes(), kept, upload, relayed, tuple(shares))),
            *outputs[first:],
        ]

    def _needed(self) -> list[MaskRef]:
        """The masks of uploads that wait or are being summed."""
        if self._roster is None:
            return []
        flying = [] if self._flight is None else [term.ref for term in self._flight.asked.terms]
        return flying + [waiting.mask for waiting in self._queue.waiting]

    def stored(self, record: EpochChanged, upload: Upload | None) -> list[Output]:
        """This record is durable; its upload, if it has one, counts and is read there."""
        if record.upload is None or upload is None:
            return []
        self._queue.move(record.upload.tag, upload)
        return self._released(self._advance())

    def unstored(self, record: EpochChanged) -> list[Output]:
        """This record `can_fail`, and has: what has just come with it is given up.

        Nothing of it has left. Masks are gone as if their shares had never come; an upload's owner
        is told, its mask stays used.
        """
        for share in record.shares:
            self._stock.shared[share.owner].pop(share.serial, None)
            self._forget([MaskRef(share.owner, share.serial)])
        if record.upload is None:
            return []
        self._forget(self._queue.give_up(record.upload.tag))
        return self._tell_dropped(record.upload.tag)

    def snapshot(self) -> bytes:
        """All that it must remember but the vectors of uploads; store it before outputs leave."""
        memory = self._memory()
        memory.remember_missed(self._mailbox)
        return memory.to_bytes()

    def _memory(self) -> Memory:
        roster, flight = self._roster, self._flight
        memory = Memory(
            settings=self.settings.to_bytes(),
            invited=self._registration.invited,
            buffer_size=self.buffer_size,
            spare_answers=self._spare,
            started=self._started,
            phase=self.phase,
            time=self.time,
            offline=sorted(self._offline),
            advertised=dict(self._registration.advertised),
            roster=roster,
            models=dict(self._models.known),
        )
        if roster is not None:
            memory.remember(self._stock, self._queue, self._mailbox)
        if flight is not None:
            memory.remember_flight(flight)
        return memory

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        allow_list: AllowList,
        recall: Recall,
        entropy: Entropy = system_entropy,
        keep: Keep = in_memory,
        *,
        durable: bool = False,
        shares: Iterable[SealedShare] = (),
    ) -> Self:
        """The server of a snapshot, or of the record of its promises (`EpochChanged`).

        * `recall`: tag -> the stored upload. Those that no tag of the snapshot names are past.
        * `shares`: those that were stored apart, of an owner in the order of its masks.

        Then run the jobs of `resume`, `rejoin` every client that comes back, and `drop` who has
        not by your deadline. What was on its way when the server ended is lost, as with any
        connection: a client gets the shares that it may lack when it is back, and one whose upload
        did not come is told so by its own driver (`UploadDropped`).
        """
        memory = Memory.from_bytes(snapshot)
        settings = Settings.from_bytes(memory.settings)
        size, spare = memory.buffer_size, memory.spare_answers
        server = cls(
            settings,
            allow_list,
            size,
            memory.invited,
            entropy,
            spare,
            keep,
            memory.time,
            durable=durable,
        )
        server._started, server.phase = memory.started, memory.phase
        server._registration.advertised.update(memory.advertised)
        server._models.known = dict(memory.models)
        server._offline = set(memory.offline)
        if memory.roster is not None:
            server._fix_roster(memory.roster, memory.check_secret)
            memory.recall(server._stock, server._queue, server._mailbox, recall, shares)
        if memory.buffer is not None:
            uploads = [recall(tag) for tag in memory.buffer.tags]
            server._flight = server._take_off(memory.buffer, uploads, frozenset(memory.holders))
            memory.recall_flight(server._flight)
            if not settings.traits.protected:
                server._flight.collected = True
        return server

    def resume(self) -> list[Output]:
        """After `restore`: what was being computed, to be computed again."""
        return [] if self._flight is None else [*self._flight.jobs]

    # -- registration ------------------------------------------------------------------------

    def _on_advertise(self, sender: int, message: Advertise) -> list[Output]:
        fresh = self._registration.on_advertise(sender, message)
        return [] if fresh else self._on_late(sender, message)

    def _on_late(self, sender: int, message: Message) -> list[Output]:
        """A message that has done its work before, or can no longer do it."""
        self.late_messages[type(message).__name__] += 1
        return []

    def _close_advertise(self) -> list[Output]:
        least, came = self.settings.minimum, self._registration.advertised
        if len(came) < least:
            reason = f"only {len(came)} clients advertised their keys, at least {least} are needed"
            self.phase = Phase.DONE
            invited = self._registration.invited
            return [*(Send(c, AbortRound(reason)) for c in invited), RoundAborted(reason)]
        ends: tuple[bytes, ...] = ()
        check_secret = b""
        if self.settings.traits.checked:
            check_secret = draw(self._entropy, prg.SEED_LENGTH)
            ends = tuple(
                check_chain(check_secret, self.settings.context, client)[-1]
                for client in self._registration.invited
                if client in came
            )
        roster = self._registration.make_roster(self._entropy, ends)
        self._fix_roster(roster, check_secret)
        self.phase = Phase.UPLOAD
        self._has_promised = True
        return [*self._registration.announce(roster)]

    def _fix_roster(self, roster: Roster, check_secret: bytes) -> None:
        self._roster = roster
        self._scheme = self._registration.scheme(roster, self._entropy)
        self._members = self._scheme.round.members
        self._stock = MaskStock(self._scheme, check_secret)
        self._queue = UploadQueue(
            self._scheme.round, self._allow_list, self._buffering, self._stock, self._keep
        )

    # -- stock -------------------------------------------------------------------------------

    def _on_shares(self, sender: int, message: ShareBundle) -> list[Output]:
        shares = self._stock.take(sender, message, self.time)
        if shares is None:
            return self._on_late(sender, message)
        if not shares:
            return []
        self._has_promised = True
        self._completed = shares
        outputs, outbox = self._drop_pushed_out(sender), Outbox()
        for share in shares:
            if share.recipient not in self._lost:
                self._mailbox.put(share.recipient, share)
            if share.recipient not in self._offline:
                outputs += outbox.put(share)
        outputs += outbox.flush()
        masks = dict.fromkeys(MaskRef(sender, share.serial) for share in shares)
        online = [client for client in self._members if client not in self._offline]
        for complete in self._stock.ask(masks):  # who is away is asked when it is back
            outputs += [Send(client, complete) for client in online]
        return outputs

    def _drop_pushed_out(self, owner: int) -> list[Output]:
        """Clients keep so many shares of an owner; forget the masks that they may have forgotten.

        Which of its masks they have burnt differs from client to client, and those of uploads that
        were dropped are kept, too. So the newest serials alone are certain.
        """
        oldest = self._stock.relay.complete[owner] - self._buffering.stock + 1
        waiting = [w.tag for w in self._queue.waiting if w.owner == owner]
        outputs = self._drop(tag for tag in waiting if tag.serial < oldest)
        self._forget(self._stock.pushed_out(owner, oldest))
        return outputs

    def _on_report(self, sender: int, message: MaskReport) -> list[Output]:
        fresh = self._stock.on_report(sender, message)
        self._mailbox.delivered(sender, MaskRef(message.owner, message.serial))
        return [] if fresh else self._on_late(sender, message)

    # -- uploads -----------------------------------------------------------------------------

    def _on_upload(self, sender: int, message: BufferedUpload) -> list[Output]:
        tag = message.tag
        if self._queue.is_repeat(sender, tag):
            return self._on_late(sender, message)
        hidden = self.settings.traits.protected
        if hidden and tag.serial not in self._stock.shared.get(sender, {}):
            # Its shares were lost with a connection; the owner goes on with another mask.
            return [Send(sender, UploadDropped(tag.serial))]
        self._queue.check(sender, message, self.time)
        self._models.check(tag, self.time)
        shared, passed_over = self.time, list[MaskRef]()
        if hidden:
            shared, passed_over = self._stock.use(sender, tag.serial)
        self._forget(passed_over)
        self._has_promised = True
        if self._queue.put(message, shared, stored=not self._durable):
            self._taken = message
            return []
        self._forget([MaskRef(sender, tag.serial)])
        return self._tell_dropped(tag)

    def _choose(self) -> list[WaitingUpload]:
        return self._queue.choose(self.buffer_size, self.time, self._offline)

    def _await_no_reports(self) -> None:
        self._stock.unawaited.update(waiting.mask for waiting in self._queue.waiting)

    def _drop_useless(self) -> list[Output]:
        self._models.expire(self.time)
        return self._drop(self._queue.useless(self.time, self._offline))

    def _drop(self, tags: Iterable[Tag]) -> list[Output]:
        """These uploads wait no longer; their owners are told."""
        dropped = list(tags)
        self._has_promised = self._has_promised or bool(dropped)
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

    # -- the buffer in flight ----------------------------------------------------------------

    def _advance(self) -> list[Output]:
        """Go on where nothing is awaited any more."""
        match self.phase:
            case Phase.ADVERTISE if self._started and self._all_in:
                return self._close_advertise()
            case Phase.AGREE if self._in_flight.agreement.reached or self._all_in:
                return self._close_agree() + self._advance()
            case Phase.RECOVER if not self._in_flight.collected and self._enough_answers:
                return [*self._in_flight.collect()]
            case Phase.UPLOAD if self._may_announce and self.waiting >= self.buffer_size:
                chosen, dropped = self._choose(), self._drop_useless()
                full = len(chosen) >= self.buffer_size
                return dropped + self._announce(chosen) if full else dropped
            case _:
                return []

    def _announce(self, chosen: list[WaitingUpload]) -> list[Output]:
        buffer = SumRequest(self.time, tuple(waiting.tag for waiting in chosen))
        self._queue.take(buffer.tags)
        holders = frozenset(self._members).intersection(
            *(self._stock.holders(waiting.mask) for waiting in chosen)
        )
        uploads = [waiting.upload for waiting in chosen]
        self._flight = flight = self._take_off(buffer, uploads, holders)
        self.phase = flight.phase
        self._has_promised = True
        if not self.settings.traits.protected:
            return [*flight.jobs, *flight.collect()]  # there is nothing to ask for
        online = [client for client in self._members if client not in self._offline]
        return [*(Send(client, buffer) for client in online), *flight.jobs]

    def _take_off(self, buffer: SumRequest, uploads: list[Any], holders: frozenset[int]) -> Flight:
        parts = (self._scheme, self._allow_list, self._buffering)
        return Flight(*parts, buffer, uploads, holders)

    def _on_signature(self, sender: int, message: Consent) -> list[Output]:
        flight = self._in_flight
        if message.time != flight.time:
            return self._on_late(sender, message)
        flight.agreement.on_signature(sender, message.signature)
        awaited = not flight.collected and sender not in flight.answers
        if self.phase is Phase.RECOVER and awaited:
            return [Send(sender, flight.certificate)]
        return []

    def _on_refusal(self, sender: int, message: Refusal) -> list[Output]:
        flight = self._in_flight
        if message.time != flight.time:
            return self._on_late(sender, message)
        flight.agreement.on_refusal(sender, message.missing)
        return []

    def _on_answer(self, sender: int, message: AggregatedShare) -> list[Output]:
        flight = self._in_flight
        if message.time != flight.time:
            return self._on_late(sender, message)
        return [] if flight.on_answer(sender, message) else self._on_late(sender, message)

    def _close_agree(self) -> list[Output]:
        flight = self._in_flight
        if not flight.agreement.reached:
            return self._fail(flight.agreement.shortfall)
        self.phase = flight.phase = Phase.RECOVER
        self._has_promised = True
        certificate = flight.certificate
        return [Send(client, certificate) for client in sorted(flight.agreement.signatures)]

    def _finish(self, flight: Flight, total: Elements) -> list[Output]:
        aggregate = BufferAggregate(
            time=flight.time,
            total=total,
            owners=flight.asked.in_sum,
            weights=flight.weights,
            responders=tuple(sorted(flight.good_answers)),
            suspects=tuple(sorted({*flight.suspects, *self._stock.suspects})),
            accused=tuple(sorted(self._stock.accused)),
            staleness=tuple(flight.time - tag.version for tag in flight.buffer.tags),
        )
        return [aggregate, *self._land(flight)]

    def _fail(self, reason: str) -> list[Output]:
        flight = self._in_flight
        failed = BufferFailed(
            time=flight.time,
            owners=flight.asked.in_sum,
            reason=reason,
            missing=tuple(sorted({o for lacks in self.refusals.values() for o in lacks})),
            suspects=self._stock.suspects,
            accused=tuple(sorted(self._stock.accused)),
        )
        return [failed, *self._land(flight)]

    def _land(self, flight: Flight) -> list[Output]:
        self._forget(term.ref for term in flight.asked.terms)
        # An owner that saw no buffer would for ever count its upload as waiting.
        unaware = {*self._offline, *self.refusals}
        if not self.settings.traits.protected:
            unaware.update(self._members)  # nobody saw it
        outputs = [
            output
            for tag in flight.buffer.tags
            if tag.owner in unaware
            for output in self._tell_dropped(tag)
        ]
        self._flight = None
        self.time += 1
        self.phase = Phase.UPLOAD
        self._has_promised = True
        return outputs

    # -- helpers -----------------------------------------------------------------------------

    @property
    def _in_flight(self) -> Flight:
        if self._flight is None:
            raise AssertionError("no buffer is in flight")
        return self._flight

    @property
    def _may_announce(self) -> bool:
        """A buffer that too few can sign and answer for would only burn its masks."""
        if self._roster is None or self.paused:
            return False
        online = sum(client not in self._offline for client in self._members)
        return online >= self._queue.needed_holders

    @property
    def _enough_answers(self) -> bool:
        wanted = self.settings.parameters.survivors + self._spare
        return len(self._in_flight.good_answers) >= wanted or self._all_in

    @property
    def _all_in(self) -> bool:
        return next(self._awaited(), None) is None

    def _awaited(self) -> Iterator[int]:
        """Its first element, or that there is none, costs less than the whole of `pending`."""
        expected: Iterable[int] = ()
        delivered: Container[int] = ()
        flight = self._flight
        if self.phase is Phase.ADVERTISE:
            expected, delivered = self._registration.invited, self._registration.advertised
        elif flight is not None and not flight.collected:
            signed = self.phase is Phase.AGREE
            expected = self._members
            delivered = flight.agreement.signatures if signed else flight.answers
        for client in expected:
            away = client in self._offline and client not in self._returning
            if not (client in delivered or client in self.refusals or away):
                yield client


M = TypeVar("M")
Handler = Callable[[EpochServer, int, Any], list[Output]]


def at(
    message: type[M], do: Callable[[EpochServer, int, M], list[Output]], *phases: Phase
) -> dict[tuple[Phase, type], Handler]:
    """Rows of the table: in these phases, a message of this type is handled so."""
    return {(phase, message): do for phase in phases}


_IN_FLIGHT = (Phase.AGREE, Phase.RECOVER)
_REGISTERED = (Phase.UPLOAD, *_IN_FLIGHT)

TRANSITIONS: Mapping[tuple[Phase, type], Handler] = {
    **at(Advertise, EpochServer._on_advertise, Phase.ADVERTISE),
    **at(Advertise, EpochServer._on_late, *_REGISTERED, Phase.DONE),
    **at(ShareBundle, EpochServer._on_shares, *_REGISTERED),
    **at(MaskReport, EpochServer._on_report, *_REGISTERED),
    **at(BufferedUpload, EpochServer._on_upload, *_REGISTERED),
    **at(Consent, EpochServer._on_late, Phase.UPLOAD),
    **at(Consent, EpochServer._on_signature, *_IN_FLIGHT),
    **at(Refusal, EpochServer._on_late, Phase.UPLOAD),
    **at(Refusal, EpochServer._on_refusal, *_IN_FLIGHT),
    **at(AggregatedShare, EpochServer._on_late, Phase.UPLOAD),
    **at(AggregatedShare, EpochServer._on_answer, *_IN_FLIGHT),
}
"""(phase, message) -> handler. What is not here is refused."""
