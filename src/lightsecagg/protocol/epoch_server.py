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
coming while a buffer is in flight; the uploads wait for the next. The parts are `epoch_collector`
(masks, reports on them, uploads that wait), `roles.recovery` (the buffer in flight) and
`epoch_memory` (what outlives the process).

A buffer that fails is never formed again, because its masks are burnt: its updates are lost, its
owners train anew. The time goes up with every buffer, failed or not. Only buffers that clients will
accept are formed: an upload that is too stale, or whose shares have expired, is dropped before it
spoils the others'. So is one whose shares contradict each other (S46): an upload waits until
everybody online has reported on its mask, or until `proceed`, and a buffer is formed only where
enough clients hold good shares of all its masks. A client that was away gets what it missed with
`rejoin`. The driver updates the model on `BufferAggregate`,

    x <- x + eta_g * average,        see `Settings.buffer_average`      Eq. (35)-(37)

calls `publish` with the hash of the new model, and tells clients the time together with the model.

A server that is `durable` survives a crash. Whenever it promises something (a roster, a mask that
is complete, an upload, a buffer, an agreement, a result) facts of it go before the outputs, to be
appended (`journal_facts`). An upload counts from `stored` on. Then nothing that was acknowledged is
lost, and an announced buffer never changes: who is asked again is asked for the same tags.
`restore` replays the facts, and says what a driver does next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.errors import DecodeError, LocalProtocolError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.foreign import explain
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffers import buffer_statement, buffer_terms, buffer_weights
from lightsecagg.protocol.epoch_collector import EpochCollector
from lightsecagg.protocol.epoch_queue import WaitingUpload
from lightsecagg.protocol.epoch_stock import Shared
from lightsecagg.protocol.interface import (
    BufferAggregate,
    BufferFailed,
    EpochChanged,
    Output,
    Persist,
    Phase,
    Send,
)
from lightsecagg.protocol.jobs import Job, Result, Upload, UploadInMemory
from lightsecagg.protocol.journal_facts import (
    VERSION,
    AnyFact,
    Recall,
    RecallShares,
    RosterFixed,
    SharesTaken,
    SumAgreed,
    SumAnnounced,
    SumEnded,
    TimeSkipped,
    UploadBuffered,
    UploadsDropped,
    decode_facts,
)
from lightsecagg.protocol.messages import (
    Advertise,
    AggregatedShare,
    BufferedUpload,
    Consent,
    Message,
    Opening,
    Refusal,
    Reports,
    ReportsWanted,
    ShareBundle,
    SumRequest,
)
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.schemes.interface import MaskRef, MaskSum
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import bundles

_ELSEWHERE = UploadInMemory(np.empty(0, dtype=np.uint32))


class _Announced(NamedTuple):
    """A buffer that was in flight when the server ended."""

    fact: SumAnnounced
    signatures: tuple[tuple[int, bytes], ...] = ()


class EpochServer(EpochCollector):
    """The server of one epoch; see the theory of operation and `interface`."""

    _announced: _Announced | None = None

    # -- the driver's side -------------------------------------------------------------------

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        self._check_started("delivering messages to it")
        self._registration.check_invited(sender)
        handler = TRANSITIONS.get((self.phase, type(message)))
        member = self.phase is Phase.ADVERTISE or sender in self._members
        if handler is None or not (member or isinstance(message, Advertise)):
            raise self._unexpected(sender, message)
        flight = self._flight
        if isinstance(message, Consent | Refusal | AggregatedShare) and flight is not None:
            handler = handler if message.time == flight.time else EpochServer._on_late
        outputs = handler(self, sender, message)
        # Shares move no phase on, and they are most of the messages. An upload counts when it is
        # stored; what may fail with it must promise nothing else.
        if not isinstance(message, ShareBundle) and not (self._durable and self._taken):
            outputs += self._advance()
        return self._released(outputs)

    def leave(self, client: int) -> list[Output]:
        """The client is offline and may be back soon: a buffer in flight waits for it."""
        self._offline.add(client)
        self._gone.discard(client)
        return self._released(self._advance())

    def drop(self, client: int) -> list[Output]:
        """The client is offline; what it has delivered stays."""
        self._offline.add(client)
        self._gone.add(client)
        return self._released(self._advance())

    def lose(self, client: int) -> list[Output]:
        """The client has no memory of this epoch any more: nothing is kept for it."""
        self._lost.add(client)
        self._mailbox.missed.pop(client, None)
        return self.drop(client)

    def rejoin(self, client: int) -> list[Output]:
        """The client is back, with its memory: it gets what it missed."""
        self._offline.discard(client)
        self._gone.discard(client)
        if self.phase is Phase.ADVERTISE and client not in self._registration.advertised:
            return [Send(client, Opening(self.settings.to_bytes()))]
        if self._roster is None or client not in self._members:
            return []
        messages: list[Message] = []
        if not self._stock.relay.has_begun(client):  # perhaps it lacks the roster
            messages.append(self._roster)
        flight = self._flight
        asked = [] if flight is None else [term.ref for term in flight.asked.terms]
        # Its shares before the buffer, all others after it: clients keep the newest ones only, and
        # could otherwise lose the very shares that they are asked for.
        urgent, others = self._mailbox.read(client, asked)
        # Nobody remembers whether these had left, and clients take an owner's masks in order.
        again = self._stored_shares(client, self._stock.unreported(client))
        messages += [*bundles(again), *urgent]
        if flight is not None:
            messages.append(flight.request)
        messages += others
        coming = {*self._mailbox.missed.get(client, {})}
        coming.update(MaskRef(share.owner, share.serial) for share in again)
        wanted = [mask for mask in self._stock.unreported(client) if mask not in coming]
        if wanted:
            messages.append(ReportsWanted(tuple(wanted)))
        missed: list[Output] = [Send(client, message) for message in messages]
        return self._released(missed + self._advance())

    @property
    def can_proceed(self) -> bool:
        """See `AnyServerParty.can_proceed`."""
        if self.phase is Phase.UPLOAD:
            return self.summable >= self.settings.parameters.privacy + 2
        return super().can_proceed

    @property
    def takes_all(self) -> bool:
        """Whether a `flush` now would leave nothing waiting."""
        return self.phase is Phase.UPLOAD and self.can_proceed and self.summable == self.unsummed

    def proceed(self) -> list[Output]:
        """The deadline of the current phase fired; while collecting, that of the reports.

        Uploads that wait for reports wait no longer.
        """
        self._check_started("its first deadline")
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
        return self._released(super().computed(job, result))

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

    def forgo(self) -> list[Output]:
        """No buffer could be formed for long: older models' updates without company are dropped.

        Their owners may have no room for another mask before that.
        """
        return self._released(self._drop_hopeless(patient=False))

    def skip(self) -> list[Output]:
        """No buffer of this time will be formed: the next model is of the time after it.

        For models that change without a buffer: after an update that nobody can send again.
        """
        if self.phase is not Phase.UPLOAD:
            raise LocalProtocolError(f"cannot skip a buffer in phase {self.phase}")
        self.time += 1
        self._facts.append(TimeSkipped(self.time))
        return self._released(self._drop_useless())

    # -- surviving a crash -------------------------------------------------------------------

    def _released(self, outputs: list[Output]) -> list[Output]:
        """The outputs of a call; behind the facts that it has promised, if it is durable."""
        facts, self._facts = self._facts, []
        upload, self._taken = self._taken, None
        shares, self._completed = self._completed, []
        past, self._past = self._past, []
        if not self._durable:
            return outputs
        if not facts:
            self._past = past
            return outputs
        record = EpochChanged(
            facts=tuple(facts),
            upload=upload,
            shares=tuple(shares),
            past=tuple((mask.owner, mask.serial) for mask in past),
        )
        results = [isinstance(each, BufferAggregate | BufferFailed) for each in outputs]
        first = results.index(True) + 1 if any(results) else 0
        return [*outputs[:first], Persist(record), *outputs[first:]]

    def stored(self, record: EpochChanged, upload: Upload | None) -> list[Output]:
        """This record is durable; its upload, if it has one, counts and is read there."""
        if record.upload is None or upload is None:
            return []
        self._queue.move(record.upload.tag, upload)
        return self._released(self._advance())

    def unstored(self, record: EpochChanged) -> list[Output]:
        """This record `can_fail`, and has: what has just come with it is given up.

        Nothing of it has left. Masks are gone as if their shares had never come; an upload's owner
        is told, its mask stays used. What else it promised is promised with the next record.
        """
        news = SharesTaken | UploadBuffered | UploadsDropped
        self._facts += [fact for fact in record.facts if not isinstance(fact, news)]
        self._past += [MaskRef(*mask) for mask in record.past]
        self._forget({MaskRef(share.owner, share.serial) for share in record.shares})
        # What was to leave behind the record is lost, others' shares with it.
        outputs = self._send_missed_again()
        if record.upload is not None:
            self._forget(self._queue.give_up(record.upload.tag))
            outputs += self._tell_dropped(record.upload.tag)
        # What is past goes with the next record: who replays the facts must not look for it.
        self._facts.append(UploadsDropped(tuple((m.owner, m.serial) for m in self._past)))
        return outputs

    @classmethod
    def restore(
        cls,
        facts: Iterable[bytes],
        allow_list: AllowList,
        recall: Recall,
        recall_shares: RecallShares,
        entropy: Entropy = system_entropy,
    ) -> Self:
        """The durable server that has promised these facts (`EpochChanged`), in their order.

        * `recall`: tag -> the stored upload; `recall_shares`: owner and serial -> stored shares.

        Then `publish` the models that updates may come from, run the jobs of `resume`, `rejoin`
        every client that comes back, and `drop` who has not by your deadline. What was on its way
        when the server ended is lost, as with any connection: a client gets the shares that it
        lacks when it is back, and one whose upload did not come is told so by its own driver
        (`UploadDropped`).
        """
        first, others = decode_facts(facts)
        settings = Settings.from_bytes(first.settings)
        members = [member.client for member in first.roster.members]
        server = cls(
            settings,
            allow_list,
            first.buffer_size,
            members,
            entropy,
            time=first.time,
            durable=True,
        )
        server._started, server.phase = True, cls.after_roster
        server._fix_roster(first.roster)
        server._offline, server._gone = set(members), set(members)
        try:
            for fact in others:
                server._replay(fact)
        except (KeyError, RemoteProtocolError) as error:
            raise DecodeError(f"malformed facts of an epoch: {explain(error)}") from error
        server._recall_shares, server._past = recall_shares, []
        server._stock.restored = set(server._stock.reports)
        for waiting in server._queue.waiting:
            server._queue.move(waiting.tag, recall(waiting.tag))
        if server._announced is not None:
            server._fly_again(server._announced, recall)
        return server

    def _replay(self, fact: AnyFact) -> None:
        """What has happened before the crash happens again, in memory."""
        match fact:
            case SharesTaken(owner, serial, time, header):
                self._stock.relay.restore(owner, serial)
                self._stock.add(owner, serial, Shared(time, header))
                self._forget(self._stock.pushed_out(owner, self._oldest(owner)))
            case UploadBuffered(tag, shared):
                if self.settings.traits.protected:
                    self._forget(self._stock.use(tag)[1])
                if not self._queue.put(tag, _ELSEWHERE, shared, stored=True):
                    self._forget([MaskRef(tag.owner, tag.serial)])
            case UploadsDropped(masks):
                self._forget(self._queue.remove(MaskRef(*mask) for mask in masks))
            case SumAnnounced(request):
                self._announced = _Announced(fact)
                self._queue.take(request.tags)
            case SumAgreed(signatures) if self._announced is not None:
                self._announced = _Announced(self._announced.fact, signatures)
            case SumEnded(time) if self._announced is not None:
                tags = self._announced.fact.request.tags
                self._forget(MaskRef(tag.owner, tag.serial) for tag in tags)
                self._announced, self.time = None, time
            case TimeSkipped(time):
                self.time = time
            case _:
                raise DecodeError(f"malformed facts of an epoch: {type(fact).__name__} comes first")

    def _fly_again(self, announced: _Announced, recall: Recall) -> None:
        """The buffer that was in flight is asked for again."""
        fact = announced.fact
        uploads = [recall(tag) for tag in fact.request.tags]
        self._flight = flight = self._take_off(fact.request, uploads, fact.holders, fact.trusted)
        flight.agreement.signatures.update(announced.signatures)
        self.phase = Phase.RECOVER if announced.signatures else flight.first_phase
        if not self.settings.traits.protected:
            flight.collected = True

    def resume(self) -> list[Output]:
        """After `restore`: what was being computed, to be computed again."""
        return [] if self._flight is None else [*self._flight.jobs]

    # -- registration ------------------------------------------------------------------------

    def _on_advertise(self, sender: int, message: Advertise) -> list[Output]:
        fresh = self._registration.on_advertise(sender, message)
        return [] if fresh else self._on_late(sender, message)

    def _close_advertise(self) -> list[Output]:
        outputs = super()._close_advertise()
        if self._roster is not None:
            settings = self.settings.to_bytes()
            self._facts.append(
                RosterFixed(VERSION, settings, self.buffer_size, self.time, self._roster)
            )
        return outputs

    # -- the buffer in flight ----------------------------------------------------------------

    def _advance(self) -> list[Output]:
        """Go on where nothing is awaited any more."""
        match self.phase:
            case Phase.ADVERTISE if self._started and not self._is_waiting():
                return self._close_advertise()
            case Phase.AGREE if self._in_flight.agreement.reached or not self._is_waiting():
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
        trusted = self._stock.part([waiting.mask for waiting in chosen])[0]
        self._flight = flight = self._take_off(buffer, uploads, holders, trusted)
        self.phase = flight.first_phase
        good, at_peace = (tuple(sorted(clients)) for clients in (flight.holders, flight.trusted))
        self._facts.append(SumAnnounced(buffer, good, at_peace))
        if not self.settings.traits.protected:
            return [*flight.jobs, *flight.collect()]  # there is nothing to ask for
        online = [client for client in self._members if client not in self._offline]
        return [*(Send(client, buffer) for client in online), *flight.jobs]

    def _take_off(
        self,
        buffer: SumRequest,
        uploads: list[Upload],
        holders: Iterable[int],
        trusted: Iterable[int],
    ) -> Recovery:
        round_ = self._scheme.round
        terms = buffer_terms(buffer, buffer_weights(round_, self._buffering, buffer))
        return Recovery(
            self._scheme,
            self._allow_list,
            buffer_statement(round_.context, buffer),
            buffer,
            MaskSum(terms, frozenset(tag.owner for tag in buffer.tags)),
            clients=self._members,
            holders=holders,
            trusted=trusted,
            uploads=uploads,
        )

    def _on_signature(self, sender: int, message: Consent) -> list[Output]:
        flight = self._in_flight
        flight.agreement.on_signature(sender, message.signature)
        awaited = not flight.collected and sender not in flight.answers
        if self.phase is Phase.RECOVER and awaited:
            return [Send(sender, flight.certificate)]
        return []

    def _on_refusal(self, sender: int, message: Refusal) -> list[Output]:
        self._in_flight.agreement.on_refusal(sender, message.missing)
        return []

    def _on_answer(self, sender: int, message: AggregatedShare) -> list[Output]:
        if self.phase is not Phase.RECOVER:
            raise RemoteProtocolError(f"client {sender} answered before the agreement")
        fresh = self._in_flight.on_answer(sender, message)
        return [] if fresh else self._on_late(sender, message)

    def _close_agree(self) -> list[Output]:
        flight = self._in_flight
        if not flight.agreement.reached:
            return self._fail(flight.agreement.shortfall)
        self.phase = Phase.RECOVER
        certificate = flight.certificate
        self._facts.append(SumAgreed(certificate.signatures))
        return [Send(client, certificate) for client in sorted(flight.agreement.signatures)]

    def _finish(self, flight: Recovery, total: Elements) -> list[Output]:
        aggregate = BufferAggregate(
            time=flight.time,
            total=total,
            owners=flight.asked.in_sum,
            weights=flight.weights,
            responders=tuple(sorted(flight.good_answers)),
            suspects=tuple(sorted({*flight.suspects, *self._stock.suspects})),
            accused=tuple(sorted(self._stock.accused)),
            staleness=tuple(flight.time - tag.version for tag in flight.request.tags),
        )
        return [aggregate, *self._land(flight), *self._advance()]

    def _lose(self, reason: str) -> list[Output]:
        return self._fail(reason) + self._advance()

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

    def _land(self, flight: Recovery) -> list[Output]:
        self._forget(term.ref for term in flight.asked.terms)
        # An owner that saw no buffer would for ever count its upload as waiting.
        unaware = {*self._offline, *self.refusals}
        if not self.settings.traits.protected:
            unaware.update(self._members)  # nobody saw it
        outputs = [
            output
            for tag in flight.request.tags
            if tag.owner in unaware
            for output in self._tell_dropped(tag)
        ]
        self._flight = None
        self.time += 1
        self.phase = Phase.UPLOAD
        self._facts.append(SumEnded(self.time))
        return outputs

    # -- helpers -----------------------------------------------------------------------------

    @property
    def _enough_answers(self) -> bool:
        wanted, flight = self.settings.parameters.survivors + self.spare_answers, self._in_flight
        used = flight.trusted if len(flight.trusted) >= wanted else flight.holders
        return len(flight.answers.keys() & used) >= wanted or not self._is_waiting()


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
    **at(Reports, EpochServer._on_reports, *_REGISTERED),
    **at(BufferedUpload, EpochServer._on_upload, *_REGISTERED),
    **at(Consent, EpochServer._on_late, Phase.UPLOAD),
    **at(Consent, EpochServer._on_signature, *_IN_FLIGHT),
    **at(Refusal, EpochServer._on_late, Phase.UPLOAD),
    **at(Refusal, EpochServer._on_refusal, *_IN_FLIGHT),
    **at(AggregatedShare, EpochServer._on_late, Phase.UPLOAD),
    **at(AggregatedShare, EpochServer._on_answer, *_IN_FLIGHT),
}
"""(phase, message) -> handler. What is not here is refused."""
