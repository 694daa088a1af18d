"""The buffer in flight at the server of an epoch, from its announcement to its end.

    agree       malicious-server mode: m signatures on (C1, t, tags)
    recover     U answers decode the weighted sum of the masks in one shot
    landed      `BufferAggregate`, or `BufferFailed`: its masks are burnt, so it never flies again

There is one at a time; the time goes up when it lands. An announced buffer never changes: who is
asked again is asked for the same tags, after a crash too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.buffers import buffer_statement, buffer_terms, buffer_weights
from lightsecagg.protocol.intake import Intake, Promises
from lightsecagg.protocol.interface import BufferAggregate, BufferFailed, Output, Phase, Send
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import Recall, SumAgreed, SumAnnounced, SumEnded
from lightsecagg.protocol.messages import AggregatedShare, Consent, SumRequest
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.roles.registration import Away, Registration
from lightsecagg.protocol.schemes.interface import MaskRef, MaskSum
from lightsecagg.protocol.waiting import WaitingUpload


class _Announced(NamedTuple):
    """A buffer that was in flight when the server ended."""

    fact: SumAnnounced
    signatures: tuple[tuple[int, bytes], ...] = ()


class InFlight:
    """The buffer that is asked for, if there is one; see the module."""

    def __init__(
        self, registration: Registration, intake: Intake, away: Away, promises: Promises
    ) -> None:
        self.spare_answers = 2
        """Answers that are awaited beyond U while anybody may still give one; two locate a liar."""
        self.recovery: Recovery | None = None
        self.phase = Phase.UPLOAD
        """AGREE or RECOVER while a buffer is in flight."""
        self._registration, self._intake = registration, intake
        self._away, self._promises = away, promises
        self._announced: _Announced | None = None
        """While facts are replayed."""

    @property
    def masks(self) -> list[MaskRef]:
        """Of its uploads."""
        return [] if self.recovery is None else [term.ref for term in self.recovery.asked.terms]

    @property
    def _flight(self) -> Recovery:
        if self.recovery is None:
            raise AssertionError("no buffer is in flight")
        return self.recovery

    @property
    def _is_protected(self) -> bool:
        """Whether anybody is asked."""
        return self._registration.scheme.settings.traits.protected

    # -- taking off --------------------------------------------------------------------------

    def announce(self, chosen: Sequence[WaitingUpload]) -> list[Output]:
        """Ask everybody for the sum of these uploads."""
        members, stock = self._registration.members, self._intake.stock
        buffer = SumRequest(self._intake.time, tuple(waiting.tag for waiting in chosen))
        self._intake.queue.take(buffer.tags)
        held = (stock.holders(waiting.mask) for waiting in chosen)
        holders = frozenset(members).intersection(*held)
        trusted = stock.part([waiting.mask for waiting in chosen])[0]
        uploads = [waiting.upload for waiting in chosen]
        flight = self._take_off(buffer, uploads, holders, trusted)
        good, at_peace = (tuple(sorted(clients)) for clients in (flight.holders, flight.trusted))
        self._promises.facts.append(SumAnnounced(buffer, good, at_peace))
        if not self._is_protected:
            return [*flight.jobs, *flight.collect()]
        online = self._away.online(members)
        return [*(Send(client, buffer) for client in online), *flight.jobs]

    def _take_off(
        self,
        buffer: SumRequest,
        uploads: list[Upload],
        holders: Iterable[int],
        trusted: Iterable[int],
    ) -> Recovery:
        scheme = self._registration.scheme
        round_, buffering = scheme.round, self._intake.queue.buffering
        terms = buffer_terms(buffer, buffer_weights(round_, buffering, buffer))
        self.recovery = flight = Recovery(
            scheme,
            self._registration.allow_list,
            buffer_statement(round_.context, buffer),
            buffer,
            MaskSum(terms, frozenset(tag.owner for tag in buffer.tags)),
            clients=round_.members,
            holders=holders,
            trusted=trusted,
            uploads=uploads,
        )
        self.phase = flight.first_phase
        return flight

    # -- who consents and answers ------------------------------------------------------------

    def on_consent(self, sender: int, message: Consent) -> list[Output]:
        """A signature; who comes with one after the agreement gets the certificate."""
        flight = self._flight
        flight.agreement.on_signature(sender, message.signature)
        awaited = not flight.collected and sender not in flight.answers
        if self.phase is Phase.RECOVER and awaited:
            return [Send(sender, flight.certificate)]
        return []

    def on_answer(self, sender: int, message: AggregatedShare) -> bool:
        """Take an answer; False if it comes again or too late."""
        if self.phase is not Phase.RECOVER:
            raise RemoteProtocolError(f"client {sender} answered before the agreement")
        return self._flight.on_answer(sender, message)

    def close_agree(self) -> list[Output]:
        """No more signatures are awaited."""
        flight = self._flight
        if not flight.agreement.reached:
            return self.fail(flight.agreement.shortfall)
        self.phase = Phase.RECOVER
        certificate = flight.certificate
        self._promises.facts.append(SumAgreed(certificate.signatures))
        return [Send(client, certificate) for client in sorted(flight.agreement.signatures)]

    @property
    def has_answers(self) -> bool:
        """Whether the answers suffice that are here, without those of who is away."""
        parameters, flight = self._registration.scheme.settings.parameters, self._flight
        wanted = parameters.survivors + self.spare_answers
        used = flight.trusted if len(flight.trusted) >= wanted else flight.holders
        return len(flight.answers.keys() & used) >= wanted

    # -- landing -----------------------------------------------------------------------------

    def land(self, total: Elements) -> list[Output]:
        """Its sum is known."""
        flight, stock = self._flight, self._intake.stock
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
        return [aggregate, *self._end()]

    def fail(self, reason: str) -> list[Output]:
        """Its sum cannot be known."""
        flight, stock = self._flight, self._intake.stock
        refusals = flight.agreement.refusals
        failed = BufferFailed(
            time=flight.time,
            owners=flight.asked.in_sum,
            reason=reason,
            missing=tuple(sorted({o for lacks in refusals.values() for o in lacks})),
            suspects=stock.suspects,
            accused=tuple(sorted(stock.accused)),
        )
        return [failed, *self._end()]

    def _end(self) -> list[Output]:
        flight = self._flight
        self._intake.forget(self.masks)
        # An owner that saw no buffer would for ever count its upload as waiting.
        unaware = {*self._away.offline, *flight.agreement.refusals}
        if not self._is_protected:
            unaware.update(self._registration.members)  # nobody saw it
        outputs = [
            output
            for tag in flight.request.tags
            if tag.owner in unaware
            for output in self._intake.report_dropped(tag)
        ]
        self.recovery, self.phase = None, Phase.UPLOAD
        self._intake.time += 1
        self._promises.facts.append(SumEnded(self._intake.time))
        return outputs

    # -- surviving a crash -------------------------------------------------------------------

    def replay(self, fact: SumAnnounced | SumAgreed | SumEnded) -> bool:
        """What has happened before a crash happens again, in memory; False out of order."""
        match fact:
            case SumAnnounced(request):
                self._announced = _Announced(fact)
                self._intake.queue.take(request.tags)
            case SumAgreed(signatures) if self._announced is not None:
                self._announced = _Announced(self._announced.fact, signatures)
            case SumEnded(time) if self._announced is not None:
                tags = self._announced.fact.request.tags
                self._intake.forget(MaskRef(tag.owner, tag.serial) for tag in tags)
                self._announced, self._intake.time = None, time
            case _:
                return False
        return True

    def fly_again(self, recall: Recall) -> None:
        """After all facts: the buffer that was in flight is asked for again."""
        announced, self._announced = self._announced, None
        if announced is None:
            return
        fact = announced.fact
        uploads = [recall(tag) for tag in fact.request.tags]
        flight = self._take_off(fact.request, uploads, fact.holders, fact.trusted)
        flight.agreement.signatures.update(announced.signatures)
        if announced.signatures:
            self.phase = Phase.RECOVER
        if not self._is_protected:
            flight.collected = True
