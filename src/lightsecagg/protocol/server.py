"""The server: of a round, Section 4.1, or of an epoch of buffers, Section 4.2 and Appendix F.3.

Theory of operation. After registration (one roster) the server relays shares, collects uploads and
asks for sums: for one in a round (`one_sum`), for one after another in an epoch (`buffer_sums`).

    advertise  keys, from every invited client
    share      of a round: sealed shares, from every roster member
    upload     uploads, and reports on shares
    agree      malicious-server mode: m signatures on (C1, t, tags)
    recover    answers, from which the sum of the masks follows
    done       too few were there; of a round also: it has its result

Without protection (`no_masks`, FedBuff) nothing is shared and nobody is asked.

`TRANSITIONS` names, for each phase, the messages that it takes. The parts are `roles.registration`
(keys, the roster, who is away), the sums, `in_flight` (the one that is asked for) and `promises`.

Sums of whole vectors are jobs (`jobs`), which the driver runs: the uploads are summed from the
moment when a sum is announced, while clients agree and answer; when the answers are in, the masks
are recovered and taken away. From then on everything that still arrives is late.

The driver of an epoch updates the model on `BufferAggregate`,

    x <- x + eta_g * average,        see `Settings.buffer_average`      Eq. (35)-(37)

calls `publish` with the hash of the new model, and tells clients the time together with the model.

A server that is `durable` survives a crash. Whenever it promises something (a roster, a mask that
is complete, an upload, a sum, an agreement, a result) facts of it go before the outputs, to be
appended (`journal_facts`). An upload counts from `stored` on. Then nothing that was acknowledged is
lost, and an announced sum never changes: who is asked again is asked for the same tags. `restore`
replays the facts, and says what a driver does next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self, TypeVar

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.errors import (
    DecodeError,
    LocalProtocolError,
    ParameterError,
    RecoveryError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.foreign import explain
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffer_sums import Buffers
from lightsecagg.protocol.in_flight import InFlight
from lightsecagg.protocol.intake import Intake
from lightsecagg.protocol.interface import (
    BufferAggregate,
    BufferFailed,
    Output,
    Phase,
    Promised,
    Send,
)
from lightsecagg.protocol.jobs import Job, Result, Upload
from lightsecagg.protocol.journal_facts import Recall, RecallShares, decode_facts
from lightsecagg.protocol.messages import (
    Advertise,
    AggregatedShare,
    Consent,
    MaskedUpload,
    Message,
    Opening,
    Refusal,
    Reports,
    Roster,
    ShareBundle,
    UnmaskingShares,
)
from lightsecagg.protocol.one_sum import OneSum
from lightsecagg.protocol.promises import Promises
from lightsecagg.protocol.roles.registration import Registration
from lightsecagg.protocol.schemes.interface import Answer, MaskRef
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.server_machine import Course, ServerMachine, Waiting
from lightsecagg.protocol.server_sums import Parts, Sums
from lightsecagg.protocol.settings import Settings


class Server(ServerMachine):
    """The server of one roster; see the theory of operation and `interface`."""

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        *,
        buffer_size: int = 0,
        time: int = 0,
        durable: bool = False,
    ) -> None:
        """What a roster has beside its settings.

        * `buffer_size`: K; 0 in a round.
        * `time`: of the model that an epoch begins with. Times go on from epoch to epoch, so that
          who has trained through the end of one brings its update to the next.
        * `durable`: ask for what is promised to be stored (`Persist`).
        """
        super().__init__(settings)
        self._registration = Registration(settings, allow_list, invited, entropy)
        self._course = Course(settings, self._registration)
        self._away, self._durable = self._course.away, durable
        self._promises = Promises(settings.one_sum)
        self.in_flight = InFlight(self._course, self._promises)
        self._waiting = Waiting()
        parts = Parts(
            settings,
            allow_list,
            entropy,
            self._course,
            self._promises,
            self.in_flight,
            durable,
        )
        one_sum = settings.one_sum
        if one_sum and buffer_size:
            raise ParameterError("a round has one sum: buffers need settings with buffering")
        self._sums: Sums = OneSum(parts) if one_sum else Buffers(parts, buffer_size, time)
        self._answers = scheme_of(settings.protocol).server.answer_type
        if Phase.ADVERTISE not in settings.traits.phases and one_sum:
            self._registration.fix(Roster(()))  # nobody has anything to advertise or to share
            self._begin()

    # -- the driver's side -------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """See `ServerParty.phase`."""
        phase = self._course.phase
        return self.in_flight.phase if phase is Phase.UPLOAD else phase

    @property
    def members(self) -> tuple[int, ...]:
        """Whoever is on the roster, in its order; nobody before there is one."""
        return self._course.members

    @property
    def pending(self) -> frozenset[int]:
        """Clients whose messages the current phase still waits for."""
        expected, delivered = self._exchange()
        return frozenset(expected).difference(delivered, self.refusals, self._away.gone)

    @property
    def refusals(self) -> Mapping[int, tuple[int, ...]]:
        """Clients that refused the sum in flight, and whose shares they lack."""
        return self.in_flight.refusals

    @property
    def uploaders(self) -> frozenset[int]:
        """Whose uploads it has taken."""
        return self._sums.uploaders

    @property
    def asked(self) -> tuple[int, ...]:
        """Whose updates are in the sum in flight; nobody's if there is none."""
        flight = self.in_flight.recovery
        return () if flight is None else flight.request.survivors

    def start(self) -> list[Output]:
        """Tell everybody who is invited."""
        if self._started:
            raise LocalProtocolError(f"the {self.mode} was started already")
        self._started = True
        return self._released([*self._registration.open(), *self._advance()])

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        self._check_started("delivering messages to it")
        self._registration.check_invited(sender)
        handler = self._handler(sender, message)
        outputs = handler(self, sender, message)
        # Shares of stock move no phase on, and they are most of the messages. An upload counts when
        # it is stored; what may fail with it must promise nothing else.
        relayed = isinstance(message, ShareBundle) and not self.settings.one_sum
        if not relayed and not (self._durable and self._promises.upload):
            outputs += self._advance()
        return self._released(outputs)

    def _handler(self, sender: int, message: Message) -> Handler:
        """What to do with a message: it may be late, or is refused."""
        handler = TRANSITIONS.get((self.phase, type(message)))
        known = self.phase is Phase.ADVERTISE or not self.members or sender in self.members
        answers = isinstance(message, AggregatedShare | UnmaskingShares)
        foreign = answers and not isinstance(message, self._answers)
        if handler is None or (foreign and self.phase is not Phase.DONE):
            raise self._unexpected(sender, message)
        if not known and not isinstance(message, Advertise):
            raise RemoteProtocolError(f"client {sender} is not on the roster")
        flight = self.in_flight.recovery
        if isinstance(message, Consent | Refusal | AggregatedShare) and flight is not None:
            handler = handler if message.time == flight.time else Server._on_late
        settled = flight is not None and flight.collected
        if self.settings.one_sum and (settled or sender in self._away.gone):
            return Server._on_late  # all that can still happen is a result, or it is out
        return handler

    def leave(self, client: int) -> list[Output]:
        """The client is offline and may be back soon: a buffer in flight waits for it."""
        self._away.offline.add(client)
        self._away.gone.discard(client)
        return self._released(self._advance())

    def drop(self, client: int) -> list[Output]:
        """The client is gone; what it has delivered stays."""
        if not self.settings.one_sum:
            self._away.offline.add(client)
        self._away.gone.add(client)
        return self._released(self._advance())

    def lose(self, client: int) -> list[Output]:
        """The client has no memory of this epoch any more: nothing is kept for it."""
        self._away.lost.add(client)
        self.intake.mailbox.missed.pop(client, None)
        return self.drop(client)

    def rejoin(self, client: int) -> list[Output]:
        """The client is back, with its memory: it gets what it missed, and is asked again."""
        if not self.settings.one_sum:
            self._away.offline.discard(client)
            self._away.gone.discard(client)
        advertised = client in self._registration.advertised
        if self.phase is Phase.ADVERTISE and (self.settings.one_sum or not advertised):
            return [Send(client, Opening(self.settings.to_bytes()))]
        if self.phase is Phase.DONE:
            return []
        return self._released(self._sums.again(client) + self._advance())

    @property
    def can_proceed(self) -> bool:
        """See `ServerParty.can_proceed`."""
        match self.phase:
            case Phase.ADVERTISE:
                return len(self._registration.advertised) >= self.settings.minimum
            case Phase.SHARE | Phase.UPLOAD:
                return self._sums.can_proceed
            case Phase.AGREE | Phase.RECOVER:
                return self.in_flight.can_proceed
            case Phase.DONE:
                return False

    def proceed(self) -> list[Output]:
        """The deadline of the current phase fired; while an epoch collects, that of the reports."""
        self._check_started("its first deadline")
        match self.phase:
            case Phase.ADVERTISE:
                outputs = self._close_advertise()
            case Phase.SHARE | Phase.UPLOAD:
                outputs = self._sums.proceed()
            case Phase.AGREE:
                outputs = self._close_agree()
            case Phase.RECOVER if not self.in_flight.flight.collected:
                return [*self.in_flight.flight.collect()]
            case _:
                return []
        return self._released(outputs + self._advance())

    def computed(self, job: Job, result: Result) -> list[Output]:
        """Take the result of a job; one that nobody waits for any more changes nothing."""
        flight = self.in_flight.recovery
        if flight is None or not flight.asked_for(job):
            return []
        if isinstance(result, RecoveryError):
            return self._released(self._lose(str(result)))
        more = flight.summed(result)
        return self._released(self._finish(result) if more is None else [*more])

    # -- an epoch's driver -------------------------------------------------------------------

    @property
    def _buffers(self) -> Buffers:
        if not isinstance(self._sums, Buffers):
            raise LocalProtocolError("a round has one sum, and no buffers")
        return self._sums

    @property
    def intake(self) -> Intake:
        """Of an epoch: what it takes in, and what waits."""
        return self._buffers.intake

    @property
    def buffer_size(self) -> int:
        """K"""
        return self._buffers.size

    @property
    def paused(self) -> bool:
        """Whether no more buffers are formed, because the server is to stop."""
        return self._buffers.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._buffers.paused = paused

    @property
    def time(self) -> int:
        """t: the version of the current model, and the time of the next buffer."""
        return self.intake.time

    @property
    def unsummed(self) -> int:
        """How many uploads wait or are being summed."""
        return len(self._needed())

    @property
    def summable(self) -> int:
        """How many of the waiting uploads may share a buffer now; `flush` wants T + 2."""
        return len(self._buffers.choose())

    @property
    def takes_all(self) -> bool:
        """Whether a `flush` now would leave nothing waiting."""
        return self.phase is Phase.UPLOAD and self.can_proceed and self.summable == self.unsummed

    def serials(self, client: int) -> tuple[list[int], list[int]]:
        """A client's masks that it may use, and those of its uploads that are not summed yet."""
        used = [serial for owner, serial in self._needed() if owner == client]
        return self.intake.ready(client), used

    def flush(self) -> list[Output]:
        """Form a buffer now, with as many updates as wait, at most K; await no more reports."""
        if self.phase is not Phase.UPLOAD:
            raise LocalProtocolError(f"cannot flush in phase {self.phase}")
        return self._released(self._buffers.flush())

    def forgo(self) -> list[Output]:
        """No buffer could be formed for long: older models' updates without company are dropped.

        Their owners may have no room for another mask before that.
        """
        return self._released(self.intake.drop_hopeless(patient=False))

    def skip(self) -> list[Output]:
        """No buffer of this time will be formed: the next model is of the time after it.

        For models that change without a buffer: after an update that nobody can send again.
        """
        if self.phase is not Phase.UPLOAD:
            raise LocalProtocolError(f"cannot skip a buffer in phase {self.phase}")
        return self._released(self._buffers.skip())

    # -- surviving a crash -------------------------------------------------------------------

    def _released(self, outputs: list[Output]) -> list[Output]:
        """The outputs of a call; behind the facts that it has promised, if it is durable."""
        if not self._durable:
            self._promises.forget()
            return outputs
        results = [isinstance(each, BufferAggregate | BufferFailed) for each in outputs]
        first = results.index(True) + 1 if any(results) else 0
        return [*outputs[:first], *self._promises.hand_out(), *outputs[first:]]

    def stored(self, record: Promised, upload: Upload | None) -> list[Output]:
        """This record is durable; its upload, if it has one, counts and is read there."""
        if record.upload is not None and upload is None:
            raise LocalProtocolError(
                "say where the upload is stored; if it is not, call `unstored`"
            )
        return self._released(self._advance()) if self._sums.stored(record, upload) else []

    def unstored(self, record: Promised) -> list[Output]:
        """This record `can_fail`, and has: what has just come with it is given up.

        Nothing of it has left. What else it promised is promised with the next record.
        """
        outputs = self._sums.unstored(record)
        return self._released(outputs + self._advance()) if self.settings.one_sum else outputs

    @classmethod
    def restore(
        cls,
        facts: Iterable[bytes],
        allow_list: AllowList,
        recall: Recall,
        recall_shares: RecallShares,
        entropy: Entropy = system_entropy,
    ) -> Self:
        """The durable server that has promised these facts (`Promised`), in their order.

        * `recall`: tag -> the stored upload; `recall_shares`: owner and serial -> stored shares.

        Then, in an epoch, `publish` the models that updates may come from. Run the outputs of
        `resume`, `rejoin` every client that comes back, and `drop` who has not by your deadline.
        What was on its way when the server ended is lost, as with any connection: a client gets
        what it lacks when it is back, and one whose upload did not come is told so by its own
        driver (`UploadDropped`).
        """
        first, others = decode_facts(facts)
        settings = Settings.from_bytes(first.settings)
        server = cls(
            settings,
            allow_list,
            first.invited,
            entropy,
            buffer_size=first.buffer_size,
            time=first.time,
            durable=True,
        )
        server._started = True
        if first.roster.members:
            server._registration.fix(first.roster)
            server._begin()
        if not settings.one_sum:
            server._away.offline, server._away.gone = set(server.members), set(server.members)
        try:
            for fact in others:
                if not server._sums.replay(fact):
                    name = type(fact).__name__
                    raise DecodeError(f"malformed facts of a server: {name} is out of order")
        except (KeyError, RemoteProtocolError) as error:
            raise DecodeError(f"malformed facts of a server: {explain(error)}") from error
        server._promises.forget()
        server._sums.restored(recall, recall_shares)
        return server

    def resume(self) -> list[Output]:
        """After `restore`: what was being computed, to be computed again, or can go on now."""
        flight = self.in_flight.recovery
        again: list[Output] = [] if flight is None else [*flight.jobs]
        return again + self._released(self._advance()) if self.settings.one_sum else again

    # -- registration ------------------------------------------------------------------------

    def _on_advertise(self, sender: int, message: Advertise) -> list[Output]:
        fresh = self._registration.on_advertise(sender, message)
        return [] if fresh else self._on_late(sender, message)

    def _close_advertise(self) -> list[Output]:
        """Fix the roster of those who came in time, if they are enough."""
        advertised = len(self._registration.advertised)
        if abort := self._course.too_few(advertised, "advertised their keys"):
            return abort
        outputs = self._registration.close()
        self._begin()
        self._promises.facts += self._sums.fixed()
        return [*outputs]

    def _begin(self) -> None:
        """The roster is fixed."""
        self._course.phase = self._sums.after_roster
        self._sums.begin(self._registration.scheme)

    # -- phases ------------------------------------------------------------------------------

    def _exchange(self) -> tuple[Collection[int], Collection[int]]:
        """Who has to send something in this phase, and who has sent all of it."""
        match self.phase:
            case Phase.ADVERTISE:
                return self._registration.invited, self._registration.advertised
            case Phase.SHARE | Phase.UPLOAD:
                return self._sums.exchange()
            case Phase.AGREE:
                flight = self.in_flight.flight
                return flight.clients, flight.agreement.signatures
            case Phase.RECOVER if not self.in_flight.flight.collected:
                return self.in_flight.flight.clients, self.in_flight.flight.answers
            case _:
                return (), ()

    def _is_waiting(self) -> bool:
        gone, refusals = self._away.gone, self.refusals
        return self._waiting.for_anybody(self.phase, *self._exchange(), gone, refusals)

    def _advance(self) -> list[Output]:
        """Go on where nothing is awaited any more."""
        outputs: list[Output] = []
        while self._started:
            phase = self.phase
            outputs += self._step(phase)
            if self.phase is phase or self.phase is Phase.DONE:
                break
        return outputs

    def _step(self, phase: Phase) -> list[Output]:
        match phase:
            case Phase.ADVERTISE if not self._is_waiting():
                return self._close_advertise()
            case Phase.SHARE | Phase.UPLOAD:
                return self._sums.advance(self._is_waiting)
            case Phase.AGREE if self._is_enough(self.in_flight.flight.agreement.reached):
                return self._close_agree()
            case Phase.RECOVER if not self.in_flight.flight.collected:
                if self._is_enough(self.in_flight.has_answers):
                    return [*self.in_flight.flight.collect()]
        return []

    def _is_enough(self, reached: bool) -> bool:
        return (reached and not self._sums.awaits_all) or not self._is_waiting()

    def _close_agree(self) -> list[Output]:
        """No more signatures are awaited."""
        agreement = self.in_flight.flight.agreement
        return self.in_flight.agree() if agreement.reached else self._lose(agreement.shortfall)

    def _finish(self, total: Elements) -> list[Output]:
        return self._sums.land(total) + self._advance()

    def _lose(self, reason: str) -> list[Output]:
        return self._sums.fail(reason) + self._advance()

    def _needed(self) -> list[MaskRef]:
        """The masks of uploads that wait or are being summed."""
        return self.in_flight.masks + self._sums.unsummed

    # -- messages ----------------------------------------------------------------------------

    def _on_shares(self, sender: int, message: ShareBundle) -> list[Output]:
        return self._or_late(self._sums.on_shares(sender, message), sender, message)

    def _on_reports(self, sender: int, message: Reports) -> list[Output]:
        return self._or_late(self._sums.on_reports(sender, message), sender, message)

    def _on_upload(self, sender: int, message: MaskedUpload) -> list[Output]:
        return self._or_late(self._sums.on_upload(sender, message), sender, message)

    def _or_late(self, outputs: list[Output] | None, sender: int, message: Message) -> list[Output]:
        return self._on_late(sender, message) if outputs is None else outputs

    def _on_consent(self, sender: int, message: Consent) -> list[Output]:
        return self.in_flight.on_consent(sender, message)

    def _on_refusal(self, sender: int, message: Refusal) -> list[Output]:
        self.in_flight.flight.agreement.on_refusal(sender, message.missing)
        return []

    def _on_past(self, sender: int, message: Message) -> list[Output]:
        """Nothing is in flight: of an epoch it is about a sum that is past."""
        if self.settings.one_sum and not isinstance(message, Refusal):
            raise self._unexpected(sender, message)
        if not self.settings.one_sum:
            return self._on_late(sender, message)
        self._away.gone.add(sender)  # too few shares have reached it, and it has left
        return []

    def _unexpected(self, sender: int, message: Message) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"client {sender} sent {type(message).__name__} in phase {self.phase}"
        )

    def _on_answer(self, sender: int, message: Answer) -> list[Output]:
        fresh = self.in_flight.on_answer(sender, message)
        return [] if fresh else self._on_late(sender, message)


M = TypeVar("M")
Handler = Callable[[Server, int, Any], list[Output]]


def at(
    message: type[M], do: Callable[[Server, int, M], list[Output]], *phases: Phase
) -> dict[tuple[Phase, type], Handler]:
    """Rows of the table: in these phases, a message of this type is handled so."""
    return {(phase, message): do for phase in phases}


_IN_FLIGHT = (Phase.AGREE, Phase.RECOVER)
_COLLECTING = (Phase.UPLOAD, *_IN_FLIGHT)
_FROM_CLIENTS = (
    Advertise,
    ShareBundle,
    Reports,
    MaskedUpload,
    Consent,
    Refusal,
    AggregatedShare,
    UnmaskingShares,
)

TRANSITIONS: Mapping[tuple[Phase, type], Handler] = {
    **at(Advertise, Server._on_advertise, Phase.ADVERTISE),
    **at(Advertise, Server._on_late, Phase.SHARE, *_COLLECTING),
    **at(ShareBundle, Server._on_shares, Phase.SHARE, *_COLLECTING),
    **at(Reports, Server._on_reports, *_COLLECTING),
    **at(MaskedUpload, Server._on_upload, *_COLLECTING),
    **at(Consent, Server._on_past, Phase.UPLOAD),
    **at(Consent, Server._on_consent, *_IN_FLIGHT),
    **at(Refusal, Server._on_past, Phase.UPLOAD),
    **at(Refusal, Server._on_refusal, *_IN_FLIGHT),
    **at(AggregatedShare, Server._on_past, Phase.UPLOAD),
    **at(AggregatedShare, Server._on_answer, *_IN_FLIGHT),
    **at(UnmaskingShares, Server._on_answer, *_IN_FLIGHT),
    **{(Phase.DONE, message): Server._on_late for message in _FROM_CLIENTS},
}
"""(phase, message) -> handler. What is not here is refused."""
