"""One buffer after another at the server, Section 4.2 and Appendix F.3.

Shares, reports and uploads go on coming while a buffer is in flight; the uploads wait for the next
(`intake`). At K owners, or on `flush`, a buffer of time t is formed. The time goes up with every
buffer, failed or not; one that fails is never formed again, because its masks are burnt: its
updates are lost, and their owners train anew. Only buffers that clients will accept are formed: an
upload that is too stale, or whose shares have expired, is dropped before it spoils the others'. So
is one whose shares contradict each other (S46): an upload waits until everybody online has reported
on its mask, or until `proceed`, and a buffer is formed only where enough clients hold good shares
of all its masks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from lightsecagg.errors import LocalProtocolError, ParameterError
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.in_flight import Chosen
from lightsecagg.protocol.intake import Intake
from lightsecagg.protocol.interface import (
    BufferAggregate,
    BufferFailed,
    Output,
    Phase,
    Promised,
    Send,
)
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import (
    AnyFact,
    Recall,
    RecallShares,
    SharesTaken,
    SumAgreed,
    SumAnnounced,
    SumEnded,
    TimeSkipped,
    UploadsDropped,
    UploadWaits,
)
from lightsecagg.protocol.messages import MaskedUpload, Message, Reports, ShareBundle, SumRequest
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.server_sums import Parts, Sums
from lightsecagg.protocol.waiting import WaitingUpload


class Buffers(Sums):
    """The sums of a roster that serves many; see the module."""

    after_roster: ClassVar = Phase.UPLOAD
    awaits_all: ClassVar = False

    def __init__(self, parts: Parts, size: int, time: int) -> None:
        """`size`: K; `time`: of the model that the epoch begins with."""
        buffering = parts.settings.buffering
        if buffering is None:
            raise ParameterError("buffers need settings with buffering")
        least, most = parts.settings.parameters.privacy + 2, buffering.max_updates
        if not least <= size <= most:
            raise ParameterError(
                f"buffer size K = {size} must be T + 2 = {least} to K_max = {most}"
            )
        self.size, self.paused = size, False
        self._parts, self._settings = parts, parts.settings
        self._away, self._promises = parts.course.away, parts.promises
        self._in_flight = parts.in_flight
        self.intake = Intake(
            parts.settings, buffering, parts.allow_list, self._away, parts.promises, time
        )

    def begin(self, scheme: ServerScheme) -> None:
        """The roster is fixed."""
        self.intake.begin(scheme)

    def fixed(self) -> list[AnyFact]:
        """The roster itself: masks are promised from now on."""
        return [self._parts.course.registration.fact(self.size, self.intake.time)]

    @property
    def unsummed(self) -> list[MaskRef]:
        """The masks of uploads that wait."""
        return [waiting.mask for waiting in self.intake.queue.waiting]

    @property
    def uploaders(self) -> frozenset[int]:
        """Whose uploads it has taken."""
        return frozenset(self.intake.queue.last_tag)

    def exchange(self) -> tuple[Collection[int], Collection[int]]:
        """Nobody has to send anything."""
        return (), ()

    def on_shares(self, sender: int, message: ShareBundle) -> list[Output] | None:
        """Take shares, and relay those of masks that are complete; None if all are past."""
        return self.intake.on_shares(sender, message)

    def on_reports(self, sender: int, message: Reports) -> list[Output] | None:
        """Take reports; None if all come again or too late."""
        return self.intake.on_reports(sender, message)

    def on_upload(self, sender: int, message: MaskedUpload) -> list[Output] | None:
        """Let an upload wait; None if it came before."""
        return self.intake.on_upload(sender, message, durable=self._parts.durable)

    def stored(self, record: Promised, upload: Upload | None) -> bool:
        """An upload counts, and is read there."""
        if record.upload is None or upload is None:
            return False
        self.intake.queue.move(record.upload.tag, upload)
        return True

    def unstored(self, record: Promised) -> list[Output]:
        """What has just come with it is given up; what else it promised goes with the next."""
        return self.intake.undo(record)

    # -- forming buffers ---------------------------------------------------------------------

    def choose(self) -> list[WaitingUpload]:
        """The buffer that could be formed now; fewer than T + 2 make none."""
        return self.intake.queue.choose(self.size, self.intake.time, self._away.offline)

    def advance(self, is_waiting: Callable[[], bool]) -> list[Output]:
        """A buffer, when K owners have an upload waiting that may share one."""
        if not self._may_announce or self.intake.waiting < self.size:
            return []
        chosen, dropped = self.choose(), self.intake.drop_useless()
        full = len(chosen) >= self.size
        return dropped + self._announce(chosen) if full else dropped

    @property
    def _may_announce(self) -> bool:
        """A buffer that too few can sign and answer for would only burn its masks."""
        online = len(self._away.online(self._parts.course.members))
        return not self.paused and online >= self.intake.queue.needed_holders

    @property
    def can_proceed(self) -> bool:
        """Whether `flush` would lose nothing now."""
        return len(self.choose()) >= self._settings.parameters.privacy + 2

    def proceed(self) -> list[Output]:
        """The deadline of the reports: uploads that wait for some wait no longer."""
        self.intake.await_no_reports()
        return []

    def flush(self) -> list[Output]:
        """Form a buffer now, with as many updates as wait, at most K; await no more reports."""
        self.intake.await_no_reports()
        least = self._settings.parameters.privacy + 2
        chosen = self.choose()
        if len(chosen) < least:
            raise LocalProtocolError(
                f"{len(chosen)} of {self.intake.waiting} waiting updates may share a buffer now; "
                f"clients accept T + 2 = {least} or more"
            )
        return self.intake.drop_useless() + self._announce(chosen)

    def skip(self) -> list[Output]:
        """No buffer of this time will be formed."""
        self.intake.time += 1
        self._promises.facts.append(TimeSkipped(self.intake.time))
        return self.intake.drop_useless()

    def _announce(self, chosen: Sequence[WaitingUpload]) -> list[Output]:
        """Ask everybody for the sum of these uploads."""
        members, stock = self._parts.course.members, self.intake.stock
        request = SumRequest(self.intake.time, tuple(waiting.tag for waiting in chosen))
        self.intake.queue.take(request.tags)
        held = (stock.holders(waiting.mask) for waiting in chosen)
        return self._in_flight.announce(
            Chosen(
                request,
                [waiting.upload for waiting in chosen],
                clients=members,
                holders=frozenset(members).intersection(*held),
                trusted=stock.part([waiting.mask for waiting in chosen])[0],
                owners=frozenset(request.survivors),
            )
        )

    # -- landing -----------------------------------------------------------------------------

    def land(self, total: Elements) -> list[Output]:
        """Its sum is known."""
        flight, stock = self._in_flight.flight, self.intake.stock
        aggregate = BufferAggregate(
            time=flight.time,
            total=total,
            owners=flight.asked.in_sum,
            weights=flight.weights,
            responders=tuple(sorted(flight.good_answers)),
            suspects=tuple(sorted({*flight.suspects, *stock.suspects})),
            accused=tuple(sorted(stock.accused)),
            staleness=tuple(flight.time - tag.version for tag in flight.request.tags),
        )
        return [aggregate, *self._end(flight)]

    def fail(self, reason: str) -> list[Output]:
        """Its sum cannot be known."""
        flight, stock = self._in_flight.flight, self.intake.stock
        refusals = flight.agreement.refusals
        failed = BufferFailed(
            time=flight.time,
            owners=flight.asked.in_sum,
            reason=reason,
            missing=tuple(sorted({o for lacks in refusals.values() for o in lacks})),
            suspects=stock.suspects,
            accused=tuple(sorted(stock.accused)),
        )
        return [failed, *self._end(flight)]

    def _end(self, flight: Recovery) -> list[Output]:
        self.intake.forget(self._in_flight.masks)
        # An owner that saw no buffer would for ever count its upload as waiting.
        unaware = {*self._away.offline, *flight.agreement.refusals}
        if not self._in_flight.is_protected:
            unaware.update(self._parts.course.members)  # nobody saw it
        outputs = [
            output
            for tag in flight.request.tags
            if tag.owner in unaware
            for output in self.intake.report_dropped(tag)
        ]
        self._in_flight.end()
        self.intake.time += 1
        self._promises.facts.append(SumEnded(self.intake.time))
        return outputs

    # -- who is back, and a server that is ---------------------------------------------------

    def again(self, client: int) -> list[Output]:
        """What a client that is back missed."""
        course, flight = self._parts.course, self._in_flight.recovery
        roster = course.registration.roster
        if roster is None or client not in course.members:
            return []
        before, after = self.intake.missed_by(client, self._in_flight.masks)
        begun = self.intake.stock.relay.has_begun(client)
        messages: list[Message] = [*([] if begun else [roster]), *before]  # perhaps it lacks it
        messages += [*([] if flight is None else [flight.request]), *after]
        return [Send(client, message) for message in messages]

    def replay(self, fact: AnyFact) -> bool:
        """What has happened before a crash happens again, in memory; False out of order."""
        match fact:
            case SharesTaken() | UploadWaits() | UploadsDropped():
                self.intake.replay(fact)
            case SumAnnounced(request):
                self.intake.queue.take(request.tags)
                self._in_flight.replay(fact)
            case SumAgreed():
                return self._in_flight.replay(fact)
            case SumEnded(time) if (announced := self._in_flight.announced) is not None:
                self.intake.forget(MaskRef(t.owner, t.serial) for t in announced.request.tags)
                self.intake.time = time
                self._in_flight.replay(None)
            case TimeSkipped(time):
                self.intake.time = time
            case _:
                return False
        return True

    def restored(self, recall: Recall, recall_shares: RecallShares) -> None:
        """After all facts: uploads and shares are read where they are stored."""
        intake = self.intake
        intake.recall_shares = recall_shares
        intake.stock.restored = set(intake.stock.reports)
        for waiting in intake.queue.waiting:
            intake.queue.move(waiting.tag, recall(waiting.tag))
        if (announced := self._in_flight.announced) is None:
            return
        request = announced.request
        self._in_flight.fly_again(
            Chosen(
                request,
                [recall(tag) for tag in request.tags],
                clients=self._parts.course.members,
                holders=announced.holders,
                trusted=announced.trusted,
                owners=frozenset(request.survivors),
            )
        )
