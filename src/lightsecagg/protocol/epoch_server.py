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
coming while a buffer is in flight; the uploads wait for the next. The parts are
`roles.registration` (keys, the roster, who is away), `intake` (masks, reports on them, uploads that
wait, and what the call under way promises) and `roles.recovery` (the buffer in flight).

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
from typing import Any, Self, TypeVar

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.errors import DecodeError, LocalProtocolError, ParameterError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.foreign import explain
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.in_flight import InFlight
from lightsecagg.protocol.intake import Intake, Promises
from lightsecagg.protocol.interface import (
    BufferAggregate,
    BufferFailed,
    EpochChanged,
    Output,
    Phase,
    Send,
)
from lightsecagg.protocol.jobs import Job, Result, Upload
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
    ShareBundle,
)
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.server_machine import ServerMachine
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.waiting import WaitingUpload


class EpochServer(ServerMachine):
    """The server of one epoch; see the theory of operation and `interface`."""

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
        super().__init__(settings, allow_list, invited, entropy, durable=durable)
        self.buffer_size = buffer_size
        self.paused = False
        """Whether no more buffers are formed, because the server is to stop."""
        self._promises = Promises()
        self.intake = Intake(settings, allow_list, self._away, self._promises, time)
        self.in_flight = InFlight(self._registration, self.intake, self._away, self._promises)
        least, most = settings.parameters.privacy + 2, self.intake.queue.buffering.max_updates
        if not least <= buffer_size <= most:
            raise ParameterError(
                f"buffer size K = {buffer_size} must be T + 2 = {least} to K_max = {most}"
            )

    # -- the driver's side -------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """See `AnyServerParty.phase`."""
        return self.in_flight.phase if self._phase is Phase.UPLOAD else self._phase

    @property
    def _flight(self) -> Recovery | None:
        return self.in_flight.recovery

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
        return len(self._choose())

    def serials(self, client: int) -> tuple[list[int], list[int]]:
        """A client's masks that it may use, and those of its uploads that are not summed yet."""
        used = [serial for owner, serial in self._needed() if owner == client]
        return self.intake.ready(client), used

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        self._check_started("delivering messages to it")
        self._registration.check_invited(sender)
        handler = TRANSITIONS.get((self.phase, type(message)))
        member = self.phase is Phase.ADVERTISE or sender in self.members
        if handler is None or not (member or isinstance(message, Advertise)):
            raise self._unexpected(sender, message)
        flight = self._flight
        if isinstance(message, Consent | Refusal | AggregatedShare) and flight is not None:
            handler = handler if message.time == flight.time else EpochServer._on_late
        outputs = handler(self, sender, message)
        # Shares move no phase on, and they are most of the messages. An upload counts when it is
        # stored; what may fail with it must promise nothing else.
        if not isinstance(message, ShareBundle) and not (self._durable and self._promises.upload):
            outputs += self._advance()
        return self._released(outputs)

    def leave(self, client: int) -> list[Output]:
        """The client is offline and may be back soon: a buffer in flight waits for it."""
        self._away.offline.add(client)
        self._away.gone.discard(client)
        return self._released(self._advance())

    def drop(self, client: int) -> list[Output]:
        """The client is offline; what it has delivered stays."""
        self._away.offline.add(client)
        self._away.gone.add(client)
        return self._released(self._advance())

    def lose(self, client: int) -> list[Output]:
        """The client has no memory of this epoch any more: nothing is kept for it."""
        self._away.lost.add(client)
        self.intake.mailbox.missed.pop(client, None)
        return self.drop(client)

    def rejoin(self, client: int) -> list[Output]:
        """The client is back, with its memory: it gets what it missed."""
        self._away.offline.discard(client)
        self._away.gone.discard(client)
        if self.phase is Phase.ADVERTISE and client not in self._registration.advertised:
            return [Send(client, Opening(self.settings.to_bytes()))]
        roster, flight = self._registration.roster, self._flight
        if roster is None or client not in self.members:
            return []
        before, after = self.intake.missed_by(client, self.in_flight.masks)
        begun = self.intake.stock.relay.has_begun(client)
        messages: list[Message] = [*([] if begun else [roster]), *before]  # perhaps it lacks it
        messages += [*([] if flight is None else [flight.request]), *after]
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
                return self._released(self.in_flight.close_agree())
            case Phase.RECOVER if not self._in_flight.collected:
                return [*self._in_flight.collect()]
            case Phase.UPLOAD:
                self.intake.await_no_reports()
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
        self.intake.await_no_reports()
        least = self.settings.parameters.privacy + 2
        chosen = self._choose()
        if len(chosen) < least:
            raise LocalProtocolError(
                f"{len(chosen)} of {self.intake.waiting} waiting updates may share a buffer now; "
                f"clients accept T + 2 = {least} or more"
            )
        return self._released(self.intake.drop_useless() + self.in_flight.announce(chosen))

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
        self.intake.time += 1
        self._promises.facts.append(TimeSkipped(self.time))
        return self._released(self.intake.drop_useless())

    # -- surviving a crash -------------------------------------------------------------------

    def _released(self, outputs: list[Output]) -> list[Output]:
        """The outputs of a call; behind the facts that it has promised, if it is durable."""
        if not self._durable:
            self._promises.forget()
            return outputs
        results = [isinstance(each, BufferAggregate | BufferFailed) for each in outputs]
        first = results.index(True) + 1 if any(results) else 0
        return [*outputs[:first], *self._promises.hand_out(), *outputs[first:]]

    def stored(self, record: EpochChanged, upload: Upload | None) -> list[Output]:
        """This record is durable; its upload, if it has one, counts and is read there."""
        if record.upload is None or upload is None:
            return []
        self.intake.queue.move(record.upload.tag, upload)
        return self._released(self._advance())

    def unstored(self, record: EpochChanged) -> list[Output]:
        """This record `can_fail`, and has: what has just come with it is given up.

        Nothing of it has left. What else it promised is promised with the next record.
        """
        return self.intake.undo(record)

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
        server._started = True
        server._registration.fix(first.roster)
        server._begin()
        server._away.offline, server._away.gone = set(members), set(members)
        try:
            for fact in others:
                server._replay(fact)
        except (KeyError, RemoteProtocolError) as error:
            raise DecodeError(f"malformed facts of an epoch: {explain(error)}") from error
        intake = server.intake
        intake.recall_shares = recall_shares
        server._promises.forget()
        intake.stock.restored = set(intake.stock.reports)
        for waiting in intake.queue.waiting:
            intake.queue.move(waiting.tag, recall(waiting.tag))
        server.in_flight.fly_again(recall)
        return server

    def _replay(self, fact: AnyFact) -> None:
        """What has happened before the crash happens again, in memory."""
        match fact:
            case SharesTaken() | UploadBuffered() | UploadsDropped():
                self.intake.replay(fact)
            case SumAnnounced() | SumAgreed() | SumEnded() if self.in_flight.replay(fact):
                pass
            case TimeSkipped(time):
                self.intake.time = time
            case _:
                raise DecodeError(f"malformed facts of an epoch: {type(fact).__name__} comes first")

    def resume(self) -> list[Output]:
        """After `restore`: what was being computed, to be computed again."""
        return [] if self._flight is None else [*self._flight.jobs]

    # -- registration ------------------------------------------------------------------------

    def _on_advertise(self, sender: int, message: Advertise) -> list[Output]:
        fresh = self._registration.on_advertise(sender, message)
        return [] if fresh else self._on_late(sender, message)

    def _close_advertise(self) -> list[Output]:
        outputs = super()._close_advertise()
        if self._registration.roster is not None:
            settings = self.settings.to_bytes()
            self._promises.facts.append(
                RosterFixed(
                    VERSION, settings, self.buffer_size, self.time, self._registration.roster
                )
            )
        return outputs

    # -- the buffer in flight ----------------------------------------------------------------

    def _advance(self) -> list[Output]:
        """Go on where nothing is awaited any more."""
        match self.phase:
            case Phase.ADVERTISE if self._started and not self._is_waiting():
                return self._close_advertise()
            case Phase.AGREE if self._in_flight.agreement.reached or not self._is_waiting():
                return self.in_flight.close_agree() + self._advance()
            case Phase.RECOVER if self._is_answered:
                return [*self._in_flight.collect()]
            case Phase.UPLOAD if self._may_announce and self.intake.waiting >= self.buffer_size:
                chosen, dropped = self._choose(), self.intake.drop_useless()
                full = len(chosen) >= self.buffer_size
                return dropped + self.in_flight.announce(chosen) if full else dropped
            case _:
                return []

    def _on_consent(self, sender: int, message: Consent) -> list[Output]:
        return self.in_flight.on_consent(sender, message)

    def _on_refusal(self, sender: int, message: Refusal) -> list[Output]:
        self._in_flight.agreement.on_refusal(sender, message.missing)
        return []

    def _on_answer(self, sender: int, message: AggregatedShare) -> list[Output]:
        fresh = self.in_flight.on_answer(sender, message)
        return [] if fresh else self._on_late(sender, message)

    def _finish(self, flight: Recovery, total: Elements) -> list[Output]:
        return self.in_flight.land(total) + self._advance()

    def _lose(self, reason: str) -> list[Output]:
        return self.in_flight.fail(reason) + self._advance()

    # -- helpers -----------------------------------------------------------------------------

    def _begin(self) -> None:
        super()._begin()
        self.intake.begin(self._scheme)

    def _on_shares(self, sender: int, message: ShareBundle) -> list[Output]:
        outputs = self.intake.on_shares(sender, message)
        return self._on_late(sender, message) if outputs is None else outputs

    def _on_reports(self, sender: int, message: Reports) -> list[Output]:
        outputs = self.intake.on_reports(sender, message)
        return self._on_late(sender, message) if outputs is None else outputs

    def _on_upload(self, sender: int, message: BufferedUpload) -> list[Output]:
        outputs = self.intake.on_upload(sender, message, durable=self._durable)
        return self._on_late(sender, message) if outputs is None else outputs

    @property
    def _is_answered(self) -> bool:
        enough = self.in_flight.has_answers or not self._is_waiting()
        return enough and not self._in_flight.collected

    def _choose(self) -> list[WaitingUpload]:
        return self.intake.queue.choose(self.buffer_size, self.time, self._away.offline)

    def _needed(self) -> list[MaskRef]:
        """The masks of uploads that wait or are being summed."""
        return self.in_flight.masks + [waiting.mask for waiting in self.intake.queue.waiting]

    @property
    def _may_announce(self) -> bool:
        """A buffer that too few can sign and answer for would only burn its masks."""
        online = len(self._away.online(self.members))
        return not self.paused and online >= self.intake.queue.needed_holders


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
    **at(Consent, EpochServer._on_consent, *_IN_FLIGHT),
    **at(Refusal, EpochServer._on_late, Phase.UPLOAD),
    **at(Refusal, EpochServer._on_refusal, *_IN_FLIGHT),
    **at(AggregatedShare, EpochServer._on_late, Phase.UPLOAD),
    **at(AggregatedShare, EpochServer._on_answer, *_IN_FLIGHT),
}
"""(phase, message) -> handler. What is not here is refused."""
