"""The one sum of a round at the server, from shares to U1.

    share     sealed shares, from every roster member; relayed when an owner's are complete
    upload    reports on them and masked updates, from every owner of complete shares

A phase ends when nobody is pending any more, or at `proceed`; if too few messages are there, the
round is aborted and everybody is told why. An upload that is being stored has been delivered; its
phase does not end before it is durable or given up, past a deadline too.

U1, once announced, never changes: it is a function of the messages received before. Its members
alone are asked for the sum: whoever is left out hears so, and forgets its secrets.

A durable server promises whose shares are complete before anybody hears it, each upload with the
reports of its owner before it counts, and U1 before it is announced. Shares are no promise: a round
that ends before its uploads is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

import numpy as np

from lightsecagg.errors import DecodeError, FieldError, RecoveryError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.protocol.in_flight import Chosen
from lightsecagg.protocol.interface import Aggregate, Output, Phase, Promised, Send
from lightsecagg.protocol.jobs import Upload, UploadInMemory
from lightsecagg.protocol.journal_facts import (
    AnyFact,
    Recall,
    RecallShares,
    Reported,
    SharingClosed,
    SumAgreed,
    SumAnnounced,
    UploadWaits,
)
from lightsecagg.protocol.messages import (
    AbortRound,
    MaskedUpload,
    Opening,
    Report,
    Reports,
    ShareBundle,
    SharesClosed,
    SumRequest,
    Tag,
)
from lightsecagg.protocol.roles.agreement import ROUND
from lightsecagg.protocol.roles.relay import Outbox, Relay
from lightsecagg.protocol.schemes.interface import MaskRef, ServerScheme
from lightsecagg.protocol.server_sums import Parts, Sums
from lightsecagg.protocol.share_exchange import header_of
from lightsecagg.protocol.waiting import UploadQueue

_ELSEWHERE = UploadInMemory(np.empty(0, dtype=np.uint32))


class OneSum(Sums):
    """The sums of a roster that serves one; see the module."""

    after_roster: ClassVar = Phase.SHARE
    awaits_all: ClassVar = True

    def __init__(self, parts: Parts) -> None:
        self._parts, self._settings = parts, parts.settings
        self._course, self._promises = parts.course, parts.promises
        self.owners: dict[int, bytes] = {}
        """Whose shares are complete, and the header of its mask."""
        self.reports: dict[int, dict[int, Elements]] = {}
        """Client -> owner whose share it holds -> what it reports on that share (S46)."""
        self.survivors: tuple[int, ...] = ()
        """U1, once it is announced."""
        self._queue = UploadQueue(parts.settings, parts.allow_list)
        self._scheme: ServerScheme
        self._relay: Relay | None = None
        self._outbox = Outbox()
        self._overdue = False  # the deadline fired while an upload was being stored

    def begin(self, scheme: ServerScheme) -> None:
        """The roster is fixed; without protection of nobody, and everybody may upload."""
        self._scheme = scheme
        self._queue.begin(scheme.round)
        if Phase.ADVERTISE in self._settings.traits.phases:
            self._relay = Relay(scheme, single=True)
            return
        self.owners = dict.fromkeys(self._course.registration.invited, b"")
        self._course.phase = Phase.UPLOAD
        self._promise_sharing()

    def fixed(self) -> list[AnyFact]:
        """Nothing: it is promised when sharing is closed, before which nothing can go on."""
        return []

    @property
    def unsummed(self) -> list[MaskRef]:
        """The masks of uploads that wait."""
        return [waiting.mask for waiting in self._queue.waiting]

    @property
    def uploaders(self) -> frozenset[int]:
        """Whose uploads it has taken."""
        return frozenset(self._queue.last_tag)

    def exchange(self) -> tuple[Collection[int], Collection[int]]:
        """Roster members share; owners of complete shares upload."""
        if self._course.phase is Phase.SHARE:
            return self._course.members, self.owners
        return self.owners, self._queue.last_tag

    # -- shares ------------------------------------------------------------------------------

    def on_shares(self, sender: int, message: ShareBundle) -> list[Output] | None:
        """Take shares, and relay them when the owner's are complete."""
        if self._relay is None:
            return None
        shares = self._relay.take(sender, message)
        if shares:
            self.owners[sender] = header_of(self._scheme.round, shares[0])
        return [send for share in shares or () for send in self._outbox.put(share)]

    def _close_share(self) -> list[Output]:
        course, self._relay = self._course, None
        if abort := course.too_few(len(self.owners), "shared their masks"):
            return abort
        course.phase = Phase.UPLOAD
        self._promise_sharing()
        late = AbortRound("the shares of this client were not complete in time")
        return [
            *self._outbox.flush(),
            *(Send(c, self.closed if c in self.owners else late) for c in course.members),
        ]

    def _promise_sharing(self) -> None:
        course = self._course
        self._promises.facts += [
            course.registration.fact(buffer_size=0, time=ROUND),
            SharingClosed(tuple(sorted(self.owners.items()))),
        ]

    @property
    def closed(self) -> SharesClosed:
        """Whose shares are complete."""
        return SharesClosed(tuple(sorted(self.owners)))

    # -- reports and uploads -----------------------------------------------------------------

    def on_reports(self, sender: int, message: Reports) -> list[Output] | None:
        """Take the reports of an owner, all or none; None if they come again, or too late."""
        if self._parts.in_flight.recovery is not None:
            return None
        if sender not in self.owners or not self._settings.traits.protected:
            raise RemoteProtocolError(f"client {sender} has nothing to report on")
        said = self._read(sender, message.reports)
        if (before := self.reports.get(sender)) is None:
            self.reports[sender] = said
            return []
        if before.keys() != said.keys() or any((before[o] != said[o]).any() for o in said):
            raise RemoteProtocolError(f"client {sender} reported twice, and not the same")
        return None

    def _read(self, sender: int, reports: tuple[Report, ...]) -> dict[int, Elements]:
        length = BLINDS if self._settings.traits.checked else 0
        field = self._settings.field
        said: dict[int, Elements] = {}
        for report in reports:
            if report.owner not in self._scheme.round.positions or report.serial:
                raise RemoteProtocolError(
                    f"client {sender} reported on mask {report.serial} of client {report.owner}, "
                    "which is not of this round"
                )
            if report.owner in said:
                raise RemoteProtocolError(f"client {sender} reported twice on one share")
            try:
                said[report.owner] = field.from_bytes(report.values, length)
            except FieldError as error:
                raise RemoteProtocolError(
                    f"client {sender} reported on a share what is not {length} elements: {error}"
                ) from error
        return said

    def on_upload(self, sender: int, message: MaskedUpload) -> list[Output] | None:
        """Take the upload of an owner; None if it came before, or comes too late."""
        if self._parts.in_flight.recovery is not None:
            return None
        tag = message.tag
        if sender not in self.owners:
            raise RemoteProtocolError(f"client {sender} had not shared its mask")
        if sender in self._queue.last_tag:
            if tag != self._queue.last_tag[sender]:
                raise RemoteProtocolError(f"client {sender} sent two different uploads")
            return None
        self._queue.check(sender, message, ROUND)
        if tag.header != self.owners[sender]:
            raise RemoteProtocolError(
                f"the tag of client {sender} names another header of its mask than its shares came "
                "under"
            )
        if self._settings.traits.protected and sender not in self.reports:
            raise RemoteProtocolError(f"client {sender} uploaded before it had reported")
        stored = not self._parts.durable
        self._queue.put(tag, UploadInMemory(message.vector), ROUND, stored=stored)
        if not stored:
            self._promises.facts += [self._reported(sender), UploadWaits(tag, ROUND)]
            self._promises.upload = message
        return []

    def _reported(self, client: int) -> Reported:
        said = self.reports.get(client, {})
        field = self._settings.field
        reports = (Report(owner, 0, field.to_bytes(values)) for owner, values in said.items())
        return Reported(client, tuple(reports))

    def stored(self, record: Promised, upload: Upload | None) -> bool:
        """An upload is durable, and read there from now on."""
        if record.upload is None or upload is None:
            return False
        self._queue.move(record.upload.tag, upload)
        return True

    def unstored(self, record: Promised) -> list[Output]:
        """An upload cannot be stored: its owner is gone, and hears it from the driver."""
        if record.upload is not None and self._is_storing(record.upload.tag):
            self._queue.give_up(record.upload.tag)
            self._course.away.gone.add(record.upload.tag.owner)
        return []

    def _is_storing(self, tag: Tag) -> bool:
        return MaskRef(tag.owner, tag.serial) in self._queue.unstored

    # -- U1 ----------------------------------------------------------------------------------

    def advance(self, is_waiting: Callable[[], bool]) -> list[Output]:
        """To the uploads when all have shared, and to the sum when all have uploaded."""
        outputs: list[Output] = []
        if self._course.phase is Phase.SHARE and not is_waiting():
            outputs += self._close_share()
        uploads = self._course.phase is Phase.UPLOAD and not self._queue.unstored
        if uploads and (self._overdue or not is_waiting()):
            outputs += self._close_upload()
        return outputs

    @property
    def can_proceed(self) -> bool:
        """Whether as many are there as a sum takes."""
        return len(self.exchange()[1]) >= self._settings.minimum

    def proceed(self) -> list[Output]:
        """Whoever is late now is out of this phase for good, though not of those before it."""
        if self._course.phase is Phase.SHARE:
            return self._close_share()
        self._overdue = bool(self._queue.unstored)
        return [] if self._overdue else self._close_upload()

    def _close_upload(self) -> list[Output]:
        course, self._overdue = self._course, False
        if abort := course.too_few(len(self._queue.last_tag), "uploaded their masked updates"):
            return abort
        try:
            survivors = self._choose()
        except RecoveryError as error:
            return course.abort(str(error))
        outputs = self._parts.in_flight.announce(self._ask_for(survivors))
        if not self._settings.traits.protected:
            return outputs
        left_out = AbortRound("the round goes on without it")
        others = [client for client in sorted(self.owners) if client not in survivors]
        return [*(Send(client, left_out) for client in others), *outputs]

    @property
    def _held(self) -> dict[int, frozenset[int]]:
        """Uploader -> owners whose shares have reached it."""
        uploaders = self._queue.last_tag
        return {client: frozenset(self.reports.get(client, {})) for client in uploaders}

    def _examine(self) -> None:
        said = {client: self.reports.get(client, {}) for client in self._queue.last_tag}
        self._course.findings = self._scheme.examine(said)

    def _choose(self) -> tuple[int, ...]:
        self._examine()
        accused = self._course.findings.accused
        return self._scheme.choose(sorted(self.owners), self._held, accused)

    def _ask_for(self, survivors: tuple[int, ...]) -> Chosen:
        held, accused = self._held, self._course.findings.accused
        # Answers that sum a share in doubt are not used; who gives them may consent.
        doubted = {holder for owner, holder in accused if owner in survivors}
        of = {waiting.owner: waiting for waiting in self._queue.waiting}
        self.survivors = survivors
        request = SumRequest(ROUND, tuple(map(Tag, survivors)))
        chosen = Chosen(
            request,
            [of[client].upload for client in survivors],
            clients=survivors,
            holders=set(survivors) - doubted,
            trusted=self._scheme.answering(survivors, held, accused),
            owners=frozenset(self.owners),
            held=held,
        )
        self._queue.waiting = []
        return chosen

    def land(self, total: Elements) -> list[Output]:
        """The round has its result."""
        self._course.phase = Phase.DONE
        flight, findings = self._parts.in_flight.flight, self._course.findings
        aggregate = Aggregate(
            total=total,
            included=self.survivors,
            responders=tuple(sorted(flight.good_answers)),
            suspects=tuple(sorted({*flight.suspects, *findings.named})),
            accused=tuple(sorted(findings.accused)),
        )
        flight.end()
        return [aggregate]

    def fail(self, reason: str) -> list[Output]:
        """The round has none."""
        self._parts.in_flight.flight.end()
        return self._course.abort(reason)

    # -- who is back, and a server that is ---------------------------------------------------

    def again(self, client: int) -> list[Output]:
        """What this client is asked now, once more.

        Sharing cannot be resumed: shares that were under way may be lost in both directions.
        """
        in_flight, settings = self._parts.in_flight, self._settings
        flight = in_flight.recovery
        if flight is not None:
            if flight.collected or client not in self.survivors:
                return []
            again: list[Output] = [Send(client, flight.request)]
            if in_flight.phase is Phase.RECOVER and flight.agreement.signatures:
                again.append(Send(client, flight.certificate))
            return again
        if self._course.phase is not Phase.UPLOAD or client not in self.owners:
            return []
        if settings.traits.protected:
            return [Send(client, self.closed)]
        uploaded = client in self._queue.last_tag
        return [] if uploaded else [Send(client, Opening(settings.to_bytes()))]

    def replay(self, fact: AnyFact) -> bool:
        """What has happened before a crash happens again, in memory; False out of order."""
        match fact:
            case SharingClosed(masks):
                self.owners, self._relay = dict(masks), None
                self._course.phase = Phase.UPLOAD
            case Reported(client, reports) if client in self.owners:
                self.reports[client] = self._read(client, reports)
            case UploadWaits(tag) if tag.owner in self.owners:
                self._queue.put(tag, _ELSEWHERE, ROUND, stored=True)
            case SumAnnounced() | SumAgreed():
                return self._parts.in_flight.replay(fact)
            case _:
                return False
        return True

    def restored(self, recall: Recall, recall_shares: RecallShares) -> None:
        """After all facts: the uploads are read where they are stored."""
        for waiting in self._queue.waiting:
            self._queue.move(waiting.tag, recall(waiting.tag))
        if (announced := self._parts.in_flight.announced) is None:
            return
        survivors = announced.request.survivors
        if not survivors or not set(survivors) <= self._queue.last_tag.keys():
            raise DecodeError("malformed facts of a server: a sum of updates that are not stored")
        self._examine()
        chosen = self._ask_for(survivors)
        again = chosen._replace(holders=announced.holders, trusted=announced.trusted)
        self._parts.in_flight.fly_again(again)
