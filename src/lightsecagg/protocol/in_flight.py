"""The sum in flight at the server, from its announcement to its end.

    agree       malicious-server mode: m signatures on (C1, t, tags)
    recover     the answers decode the weighted sum of the masks in one shot
    landed      it is known, or lost: its masks are burnt, so it never flies again

There is one at a time. A sum that is announced never changes: who is asked again is asked for the
same tags, after a crash too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from lightsecagg.errors import RemoteProtocolError
from lightsecagg.protocol.buffers import sum_statement, sum_terms, sum_weights
from lightsecagg.protocol.interface import Output, Phase, Send
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.journal_facts import SumAgreed, SumAnnounced
from lightsecagg.protocol.messages import Consent, SumRequest
from lightsecagg.protocol.promises import Promises
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.schemes.interface import Answer, MaskRef, MaskSum
from lightsecagg.protocol.server_machine import Course


class Chosen(NamedTuple):
    """A sum that can be asked for."""

    request: SumRequest
    uploads: list[Upload]
    """In the order of the tags."""
    clients: Collection[int]
    """Who is asked."""
    holders: Collection[int]
    """Who holds good shares of all its masks."""
    trusted: Collection[int]
    """Those of them who are in no quarrel (R59)."""
    owners: frozenset[int]
    """Whose shares are complete, in the sum or not."""
    held: Mapping[int, frozenset[int]] = {}
    """Of a round: uploader -> owners whose shares have reached it."""


class InFlight:
    """The sum that is asked for, if there is one; see the module."""

    def __init__(self, course: Course, promises: Promises) -> None:
        self.spare_answers = 2
        """Answers that are awaited beyond U while anybody may still give one; two locate a liar."""
        self.recovery: Recovery | None = None
        self.phase = Phase.UPLOAD
        """AGREE or RECOVER while a sum is in flight."""
        self._course, self._promises = course, promises
        self._announced: SumAnnounced | None = None
        self._signatures: tuple[tuple[int, bytes], ...] = ()
        """While facts are replayed: what was in flight when the server ended."""

    @property
    def masks(self) -> list[MaskRef]:
        """Of its uploads."""
        return [] if self.recovery is None else [term.ref for term in self.recovery.asked.terms]

    @property
    def flight(self) -> Recovery:
        """The sum in flight, where there is one for certain."""
        if self.recovery is None:
            raise AssertionError("no sum is in flight")
        return self.recovery

    @property
    def refusals(self) -> Mapping[int, tuple[int, ...]]:
        """Clients that refused the sum in flight, and whose shares they lack."""
        return {} if self.recovery is None else self.recovery.agreement.refusals

    @property
    def is_protected(self) -> bool:
        """Whether anybody is asked."""
        return self._course.settings.traits.protected

    # -- taking off --------------------------------------------------------------------------

    def announce(self, chosen: Chosen) -> list[Output]:
        """Ask for the sum of these uploads."""
        flight = self._take_off(chosen)
        good, at_peace = (tuple(sorted(clients)) for clients in (flight.holders, flight.trusted))
        self._promises.facts.append(SumAnnounced(chosen.request, good, at_peace))
        if not self.is_protected:
            return [*flight.jobs, *flight.collect()]
        asked = self._course.away.online(chosen.clients)
        return [*(Send(client, chosen.request) for client in asked), *flight.jobs]

    def _take_off(self, chosen: Chosen) -> Recovery:
        scheme, registration = self._course.registration.scheme, self._course.registration
        weights = sum_weights(scheme.round, chosen.request)
        self.recovery = flight = Recovery(
            scheme,
            registration.allow_list,
            sum_statement(scheme.round.context, chosen.request),
            chosen.request,
            MaskSum(sum_terms(chosen.request, weights), chosen.owners, chosen.held),
            clients=chosen.clients,
            holders=chosen.holders,
            trusted=chosen.trusted,
            uploads=chosen.uploads,
        )
        self.phase = flight.first_phase
        return flight

    # -- who consents and answers ------------------------------------------------------------

    def on_consent(self, sender: int, message: Consent) -> list[Output]:
        """A signature; who comes with one after the agreement gets the certificate."""
        flight = self.flight
        flight.agreement.on_signature(sender, message.signature)
        awaited = not flight.collected and sender not in flight.answers
        if self.phase is Phase.RECOVER and awaited:
            return [Send(sender, flight.certificate)]
        return []

    def on_answer(self, sender: int, message: Answer) -> bool:
        """Take an answer; False if it comes again or too late."""
        if self.phase is not Phase.RECOVER:
            raise RemoteProtocolError(f"client {sender} answered before the agreement")
        return self.flight.on_answer(sender, message)

    def agree(self) -> list[Output]:
        """Signatures are here: from now on they are answered for."""
        flight = self.flight
        self.phase = Phase.RECOVER
        certificate = flight.certificate
        self._promises.facts.append(SumAgreed(certificate.signatures))
        return [Send(client, certificate) for client in sorted(flight.agreement.signatures)]

    @property
    def has_answers(self) -> bool:
        """Whether the answers suffice that are here, without those of who is away."""
        parameters, flight = self._course.settings.parameters, self.flight
        wanted = parameters.survivors + self.spare_answers
        used = flight.trusted if len(flight.trusted) >= wanted else flight.holders
        return len(flight.answers.keys() & used) >= wanted

    @property
    def can_proceed(self) -> bool:
        """Whether the phase has messages enough."""
        flight = self.flight
        if self.phase is Phase.AGREE:
            return flight.agreement.reached
        scheme = self._course.registration.scheme
        return flight.collected or scheme.suffice(flight.asked, flight.good_answers.keys())

    def end(self) -> Recovery:
        """It is known, or lost."""
        flight = self.flight
        flight.end()
        self.recovery, self.phase = None, Phase.UPLOAD
        return flight

    # -- surviving a crash -------------------------------------------------------------------

    @property
    def announced(self) -> SumAnnounced | None:
        """While facts are replayed: what was in flight when the server ended."""
        return self._announced

    def replay(self, fact: SumAnnounced | SumAgreed | None) -> bool:
        """It was announced, or agreed on, or (None) it had ended; False out of order."""
        match fact:
            case SumAnnounced():
                self._announced = fact
            case _ if self._announced is None:
                return False
            case SumAgreed(signatures):
                self._signatures = signatures
            case _:
                self._announced, self._signatures = None, ()
        return True

    def fly_again(self, chosen: Chosen) -> None:
        """After all facts: the sum that was in flight is asked for again."""
        flight, self._announced = self._take_off(chosen), None
        flight.agreement.signatures.update(self._signatures)
        if self._signatures:
            self.phase = Phase.RECOVER
        if not self.is_protected:
            flight.collected = True
