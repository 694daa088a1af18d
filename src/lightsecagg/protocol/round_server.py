"""The server in one synchronous round, whatever the protocol.

Theory of operation. The server collects one kind of message per phase:

    advertise   keys                  from every invited client
    share       sealed shares         from every roster member; relayed when an owner's are complete
    upload      masked updates        from every owner of complete shares
    agree       signatures on U1      malicious-server mode only
    recover     answers               from every member of U1

A phase ends when nobody is pending any more, or at `proceed`; if too few messages are there, the
round is aborted and everybody is told why. Messages of an earlier phase are late: they are
ignored and counted. A repeated message changes nothing. Anything else is refused with
`RemoteProtocolError`, which changes nothing either; drop the client if you no longer trust it.

U1, once announced, never changes: it is a function of the messages received before.

A durable server survives a crash (`resume`). It asks its driver to store what it has promised: an
upload, before it counts; whose shares are complete and U1, before anybody hears of them. While an
upload is being stored its phase goes on, past a deadline too.

Sums of whole vectors are jobs (`jobs`), which the driver runs: the uploads are summed from the
moment when U1 is announced, while clients agree and answer; when the answers are in, the masks are
recovered and taken away. From then on everything that still arrives is late, nobody is pending, and
`proceed` has nothing to do; the result ends the round.

What shares and answers look like, who can be summed and how the masks are found is the business of
the scheme (`schemes.interface`) that the server holds from the roster on. Plain summation has the
upload phase alone: its roster is empty, and the sum of its masks zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Self

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.errors import RecoveryError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Persist,
    Phase,
    Record,
    Send,
    SharingClosed,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.jobs import Upload
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Consent,
    MaskedUpload,
    Message,
    Opening,
    Refusal,
    Roster,
    ShareBundle,
    SharesClosed,
    SumRequest,
    UnmaskingShares,
)
from lightsecagg.protocol.roles.agreement import ROUND, check_of_round, survivor_statement
from lightsecagg.protocol.roles.recovery import Recovery
from lightsecagg.protocol.roles.relay import Outbox, Relay
from lightsecagg.protocol.round_uploads import RoundUploads
from lightsecagg.protocol.schemes.interface import MaskRef, MaskSum, Term
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.server_machine import ServerMachine
from lightsecagg.protocol.settings import Settings

_ORDER = tuple(Phase)

# Which phase a message belongs to; the scheme says what an answer is.
_PHASE_OF: dict[type, Phase] = {
    Advertise: Phase.ADVERTISE,
    ShareBundle: Phase.SHARE,
    MaskedUpload: Phase.UPLOAD,
    Consent: Phase.AGREE,
}


class RoundServer(ServerMachine):
    """The server of one round; see the module's theory of operation and `interface`."""

    mode = "round"
    after_roster = Phase.SHARE

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        *,
        durable: bool = False,
    ) -> None:
        super().__init__(settings, allow_list, invited, entropy, durable=durable)
        self._phase = settings.traits.phases[0]
        self.survivors: tuple[int, ...] = ()
        """U1, once it is announced."""
        self._answer_type = scheme_of(settings.protocol).server.answer_type
        self._relay: Relay | None = None
        self._outbox = Outbox()
        self._complete: list[int] = []
        self._uploads = RoundUploads(settings)
        self._sum: Recovery | None = None
        self._overdue = False  # the deadline fired while an upload was being stored
        if self.phase is Phase.UPLOAD:  # nobody has anything to advertise or to share
            self._registration.fix(Roster(()))
            self._complete = list(self._registration.invited)

    @classmethod
    def resume(
        cls,
        settings: Settings,
        allow_list: AllowList,
        roster: Roster,
        closed: SharesClosed,
        entropy: Entropy = system_entropy,
    ) -> Self:
        """A durable server that crashed after sharing was closed, in the upload phase (R31).

        * `roster` and `closed` are what it had announced. Then hand it every upload that it had
          acknowledged (`receive`, then `stored`) and, if it had announced U1, call `proceed`: U1
          is a function of the uploads, so it comes out the same; check that it does.
        """
        members = [member.client for member in roster.members]
        server = cls(settings, allow_list, members, entropy, durable=True)
        server._started = True
        server._registration.fix(roster)
        server._complete = list(closed.owners)
        server._phase = Phase.UPLOAD
        return server

    # -- the driver's side -------------------------------------------------------------------

    @property
    def roster(self) -> Roster | None:
        """What `resume` needs, once it is announced."""
        return self._registration.roster

    @property
    def owners(self) -> tuple[int, ...]:
        """Whose shares are complete."""
        return tuple(sorted(self._complete))

    @property
    def closed(self) -> SharesClosed:
        """What `resume` needs besides."""
        return SharesClosed(self.owners)

    def request_for(self, client: int) -> list[Output]:
        """What the current phase asks of this client, again: for one that has reconnected.

        Sharing cannot be resumed: shares that were under way may be lost in both directions.
        """
        opening = Opening(self.settings.to_bytes())
        match self.phase:
            case Phase.ADVERTISE:
                return [Send(client, opening)]
            case Phase.UPLOAD if not self.members:  # it has begun with the upload
                return [Send(client, opening)] if client in self.pending else []
            case Phase.UPLOAD if client in self._complete:
                return [Send(client, self.closed)]
            case Phase.AGREE | Phase.RECOVER if not self._is_collected and client in self.survivors:
                again: list[Output] = [Send(client, self._in_flight.request)]
                if self.phase is Phase.RECOVER and self._in_flight.agreement.signatures:
                    again.append(Send(client, self._in_flight.certificate))
                return again
            case _:
                return []

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        self._check_started("delivering messages to it")
        self._registration.check_invited(sender)
        if isinstance(message, Consent | Refusal | AggregatedShare):
            check_of_round(message)
        if self._is_settled() or self._is_late(message):
            return self._on_late(sender, message)
        if isinstance(message, Refusal):
            return self._on_refusal(sender, message)
        if self._phase_of(message) is not self.phase:
            raise self._unexpected(sender, message)
        if sender in self._away.gone:
            return self._on_late(sender, message)
        outputs = self._take(sender, message)
        return outputs + self._advance()

    def drop(self, client: int) -> list[Output]:
        """The client is gone; what it has delivered stays."""
        self._away.gone.add(client)
        return self._advance()

    def proceed(self) -> list[Output]:
        """The deadline of the current phase fired."""
        self._check_started("its first deadline")
        # Whoever is late now is out of this phase for good, though not of those before it.
        self._overdue = bool(self._uploads.storing)
        return [] if self._is_settled() or self._overdue else self._close_phase()

    def stored(self, record: UploadTaken, upload: Upload | None) -> list[Output]:
        """Count an upload that is durable; see `ServerParty.stored`."""
        if self._uploads.storing.get(record.client) is not record:
            return []  # the round was aborted meanwhile
        self._uploads.stored(record.client, upload)
        if upload is None:
            self._away.gone.add(record.client)
        if self._overdue and not self._uploads.storing:
            self._overdue = False
            return self._close_phase()
        return self._advance()

    # -- phases ------------------------------------------------------------------------------

    @property
    def _flight(self) -> Recovery | None:
        return self._sum

    def _exchange(self) -> tuple[Collection[int], Collection[int]]:
        match self.phase:
            case Phase.SHARE:
                return self.members, self._complete
            case Phase.UPLOAD if self._flight is None:
                return self._complete, self._uploads.taken
            case _:
                return super()._exchange()

    def _take(self, sender: int, message: Message) -> list[Output]:
        match message:
            case Advertise():
                self._registration.on_advertise(sender, message)
            case ShareBundle():
                return self._on_shares(sender, message)
            case MaskedUpload():
                return self._on_upload(sender, message)
            case Consent():
                self._in_flight.agreement.on_signature(sender, message.signature)
            case AggregatedShare() | UnmaskingShares():
                self._in_flight.on_answer(sender, message)
            case _:
                raise AssertionError("the phases know no other message")
        return []

    def _advance(self) -> list[Output]:
        outputs: list[Output] = []
        while self._started and not (
            self._is_settled() or self._uploads.storing or self._is_waiting()
        ):
            outputs += self._close_phase()
        return outputs

    @property
    def _is_collected(self) -> bool:
        """Whether all that can still happen is a result."""
        return self._flight is not None and self._flight.collected

    def _is_settled(self) -> bool:
        """Whether no message can move the round on."""
        return self._is_collected or self.phase is Phase.DONE

    def _close_phase(self) -> list[Output]:
        match self.phase:
            case Phase.ADVERTISE:
                return self._close_advertise()
            case Phase.SHARE:
                return self._close_share()
            case Phase.UPLOAD:
                return self._close_upload()
            case Phase.AGREE:
                return self._close_agree()
            case Phase.RECOVER:
                return [*self._in_flight.collect()]
            case Phase.DONE:
                return []

    def _begin(self) -> None:
        super()._begin()
        self._relay = Relay(self._scheme, single=True)

    def _on_shares(self, sender: int, message: ShareBundle) -> list[Output]:
        if self._relay is None or sender not in self._scheme.round.positions:
            raise RemoteProtocolError(f"client {sender} is not on the roster")
        shares = self._relay.take(sender, message)
        if shares:
            self._complete.append(sender)
        return [send for share in shares or () for send in self._outbox.put(share)]

    def _close_share(self) -> list[Output]:
        self._relay = None
        if abort := self._too_few(len(self._complete), "shared their masks"):
            return abort
        if self.roster is None:
            raise AssertionError("shares follow the roster")
        self._phase = Phase.UPLOAD
        closed = self.closed
        late = AbortRound("the shares of this client were not complete in time")
        return [
            *self._persist(SharingClosed(self.roster, closed)),
            *self._outbox.flush(),
            *(Send(c, closed if c in self._complete else late) for c in self.members),
        ]

    def _on_upload(self, sender: int, message: MaskedUpload) -> list[Output]:
        if sender not in self._complete:
            raise RemoteProtocolError(f"client {sender} had not shared its mask")
        record = self._uploads.take(sender, message, self.members)
        if record is None:
            return []
        if self._durable:
            self._uploads.storing[sender] = record
        return self._persist(record)

    def _close_upload(self) -> list[Output]:
        uploads = self._uploads
        if abort := self._too_few(len(uploads.taken), "uploaded their masked updates"):
            return abort
        self._findings = self._scheme.examine(uploads.reports)
        try:
            chosen = self._scheme.choose(self._complete, uploads.held, self._findings.accused)
        except RecoveryError as error:
            return self._lose(str(error))
        self.survivors = chosen
        self._sum = flight = self._ask_for(chosen)
        self._uploads = RoundUploads(self.settings)
        persisted = self._persist(SurvivorsChosen(chosen))
        if Phase.RECOVER not in self.settings.traits.phases:
            return [*persisted, *flight.jobs, *flight.collect()]
        self._phase = flight.first_phase
        # Who is left out hears of it, and can forget its secrets.
        left_out = AbortRound("the round goes on without it")
        sends = [Send(c, flight.request if c in chosen else left_out) for c in self.owners]
        return [*persisted, *sends, *flight.jobs]

    def _ask_for(self, survivors: tuple[int, ...]) -> Recovery:
        """The sum over U1, for which its members are asked."""
        terms = tuple(Term(MaskRef(client)) for client in survivors)
        held, accused = self._uploads.held, self._findings.accused
        # Answers that sum a share in doubt are not used; who gives them may consent.
        doubted = {holder for owner, holder in accused if owner in survivors}
        return Recovery(
            self._scheme,
            self._registration.allow_list,
            survivor_statement(self._scheme.round.context, survivors),
            SumRequest(ROUND, survivors),
            MaskSum(terms, frozenset(self._complete), held),
            clients=survivors,
            holders=set(survivors) - doubted,
            trusted=self._scheme.answering(survivors, held, accused),
            uploads=[self._uploads.taken[client] for client in survivors],
        )

    def _on_refusal(self, sender: int, message: Refusal) -> list[Output]:
        if self.phase is Phase.UPLOAD:
            return self.drop(sender)
        if self.phase not in (Phase.AGREE, Phase.RECOVER):
            raise RemoteProtocolError(f"client {sender} refused nothing that was asked of it")
        self._in_flight.agreement.on_refusal(sender, message.missing)
        return self._advance()

    def _close_agree(self) -> list[Output]:
        flight = self._in_flight
        if not flight.agreement.reached:
            return self._lose(flight.agreement.shortfall)
        self._phase = Phase.RECOVER
        certificate = flight.certificate
        return [Send(client, certificate) for client in sorted(self.pending)]

    def _finish(self, flight: Recovery, total: Elements) -> list[Output]:
        aggregate = Aggregate(
            total=total,
            included=self.survivors,
            responders=tuple(sorted(flight.good_answers)),
            suspects=tuple(sorted({*flight.suspects, *self._findings.named})),
            accused=tuple(sorted(self._findings.accused)),
        )
        self._phase = Phase.DONE
        flight.end()
        return [aggregate]

    def _lose(self, reason: str) -> list[Output]:
        return self._abort(reason)

    def _abort(self, reason: str) -> list[Output]:
        if self._flight is not None:
            self._flight.end()
        self._relay, self._outbox = None, Outbox()
        self._uploads = RoundUploads(self.settings)
        return super()._abort(reason)

    # -- helpers -----------------------------------------------------------------------------

    def _persist(self, record: Record) -> list[Output]:
        return [Persist(record)] if self._durable else []

    def _phase_of(self, message: Message) -> Phase | None:
        if isinstance(message, self._answer_type):
            return Phase.RECOVER
        return _PHASE_OF.get(type(message))

    def _is_late(self, message: Message) -> bool:
        phase = self._phase_of(message)
        return phase is not None and _ORDER.index(phase) < _ORDER.index(self.phase)
