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

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Self

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.errors import (
    LocalProtocolError,
    RecoveryError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import commit
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import (
    Aggregate,
    Output,
    Persist,
    Phase,
    Record,
    RoundAborted,
    Send,
    SharingClosed,
    SurvivorsChosen,
    UploadTaken,
)
from lightsecagg.protocol.jobs import (
    Compute,
    Job,
    Result,
    SumUploads,
    Unmask,
    Upload,
    UploadInMemory,
)
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    Certificate,
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
from lightsecagg.protocol.roles.agreement import (
    ROUND,
    Agreement,
    check_of_round,
    survivor_statement,
)
from lightsecagg.protocol.roles.registration import Registration
from lightsecagg.protocol.roles.relay import Outbox, Relay
from lightsecagg.protocol.schemes.interface import (
    Answer,
    Findings,
    MaskRef,
    MaskSum,
    ServerScheme,
    Term,
)
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.settings import Settings

_ORDER = tuple(Phase)

# Which phase a message belongs to; the scheme says what an answer is.
_PHASE_OF: dict[type, Phase] = {
    Advertise: Phase.ADVERTISE,
    ShareBundle: Phase.SHARE,
    MaskedUpload: Phase.UPLOAD,
    Consent: Phase.AGREE,
}


class RoundServer:
    """The server of one round; see the module's theory of operation and `interface`."""

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        *,
        durable: bool = False,
    ) -> None:
        """A `durable` server asks for what it must remember to be stored (`Persist`)."""
        self.settings = settings
        self.phase = settings.traits.phases[0]
        self.late_messages: Counter[str] = Counter()
        """Messages that came after their phase, by type."""
        self._allow_list = allow_list
        self._entropy = entropy
        self._registration = Registration(settings, allow_list, invited)
        self._started = False
        self._gone: set[int] = set()
        self._witness: tuple[Phase, int | None] = (Phase.DONE, None)
        self._roster: Roster | None = None
        self._answer_type = scheme_of(settings.protocol).server.answer_type
        self._scheme_cache: ServerScheme | None = None
        self._relay: Relay | None = None
        self._outbox = Outbox()
        self._complete: list[int] = []
        self._durable = durable
        self._storing: dict[int, UploadTaken] = {}
        self._overdue = False  # the deadline fired while an upload was being stored
        self._uploads: dict[int, Upload] = {}
        self._held: dict[int, frozenset[int]] = {}
        self._check_secret = b""
        self._reports: dict[int, dict[int, Elements]] = {}
        self._findings = Findings()
        self._survivors: tuple[int, ...] = ()
        self._in_sum: frozenset[int] = frozenset()
        self._asked = MaskSum(())
        self._summing: SumUploads | None = None
        self._masked_sum: Elements | None = None
        self._collected = False  # all that can still happen is a result
        self._unmasking: Unmask | None = None
        self._agreement: Agreement | None = None
        self._answers: dict[int, Answer] = {}
        if self.phase is Phase.UPLOAD:  # nobody has anything to advertise or to share
            self._scheme_cache = self._registration.scheme(Roster(()), entropy)
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
        server._roster = roster
        server._scheme_cache = server._registration.scheme(roster, entropy)
        server._complete, server._check_secret = list(closed.owners), closed.check_secret
        server.phase = Phase.UPLOAD
        return server

    # -- the driver's side -------------------------------------------------------------------

    @property
    def roster(self) -> Roster | None:
        """What `resume` needs, once it is announced."""
        return self._roster

    @property
    def owners(self) -> tuple[int, ...]:
        """Whose shares are complete."""
        return tuple(sorted(self._complete))

    @property
    def closed(self) -> SharesClosed:
        """What `resume` needs besides; not to be known to anybody before sharing is closed."""
        return SharesClosed(self.owners, self._check_secret)

    def request_for(self, client: int) -> list[Output]:
        """What the current phase asks of this client, again: for one that has reconnected.

        Sharing cannot be resumed: shares that were under way may be lost in both directions.
        """
        opening = Opening(self.settings.to_bytes())
        if self._collected:
            return []
        if self.phase is Phase.ADVERTISE:
            return [Send(client, opening)]
        if self.phase is Phase.UPLOAD and self._roster is None:  # it has begun with the upload
            return [Send(client, opening)] if client in self.pending else []
        if self.phase is Phase.UPLOAD and client in self._complete:
            return [Send(client, self.closed)]
        if self.phase is Phase.AGREE and client in self._in_sum:
            return [Send(client, SumRequest(ROUND, self._survivors))]
        if self.phase is Phase.RECOVER and client in self._in_sum:
            again: list[Output] = [Send(client, SumRequest(ROUND, self._survivors))]
            if self._agreed.signatures:
                again.append(Send(client, Certificate(ROUND, self._agreed.certificate)))
            return again
        return []

    @property
    def pending(self) -> frozenset[int]:
        """Clients whose messages the current phase still waits for."""
        if self._collected:
            return frozenset()
        return frozenset(self._expected).difference(self._delivered, self.refusals, self._gone)

    @property
    def _expected(self) -> Collection[int]:
        """Who has to send something in this phase; the same from its first to its last message."""
        match self.phase:
            case Phase.ADVERTISE:
                return self._registration.invited
            case Phase.SHARE:
                return self._members
            case Phase.UPLOAD:
                return self._complete
            case Phase.AGREE | Phase.RECOVER:
                return self._survivors
            case Phase.DONE:
                return ()

    @property
    def _delivered(self) -> Collection[int]:
        """Who has sent all of it."""
        match self.phase:
            case Phase.ADVERTISE:
                return self._registration.advertised
            case Phase.SHARE:
                return self._complete
            case Phase.UPLOAD:
                return self._uploads
            case Phase.AGREE:
                return self._agreed.signatures
            case Phase.RECOVER:
                return self._answers
            case Phase.DONE:
                return ()

    @property
    def refusals(self) -> dict[int, tuple[int, ...]]:
        """Clients that refused U1, and whose shares they lack."""
        return {} if self._agreement is None else self._agreement.refusals

    @property
    def survivors(self) -> tuple[int, ...]:
        """U1, once it is announced."""
        return self._survivors

    def start(self) -> list[Output]:
        """Open the round."""
        if self._started:
            raise LocalProtocolError("the round was started already")
        self._started = True
        return [*self._registration.open(), *self._advance_if_complete()]

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        if not self._started:
            raise LocalProtocolError("start the round before delivering messages to it")
        self._registration.check_invited(sender)
        if isinstance(message, Consent | Refusal | AggregatedShare):
            check_of_round(message)
        if self.phase is Phase.DONE or self._collected or self._is_late(message):
            self.late_messages[type(message).__name__] += 1
            return []
        if isinstance(message, Refusal):
            return self._on_refusal(sender, message)
        if self._phase_of(message) is not self.phase:
            raise RemoteProtocolError(
                f"client {sender} sent {type(message).__name__} in phase {self.phase}"
            )
        if sender in self._gone:
            self.late_messages[type(message).__name__] += 1
            return []
        outputs = self._take(sender, message)
        return outputs + self._advance_if_complete()

    def drop(self, client: int) -> list[Output]:
        """The client is gone; what it has delivered stays."""
        self._gone.add(client)
        return self._advance_if_complete()

    @property
    def can_proceed(self) -> bool:
        """See `ServerParty.can_proceed`."""
        least = self.settings.minimum
        match self.phase:
            case Phase.ADVERTISE | Phase.SHARE | Phase.UPLOAD:
                return len(self._delivered) >= least
            case Phase.AGREE:
                return self._agreed.reached
            case Phase.RECOVER:
                usable = self._answers.keys() - self._doubted
                return self._collected or self._scheme.suffice(self._asked, usable)
            case Phase.DONE:
                return False

    def proceed(self) -> list[Output]:
        """The deadline of the current phase fired."""
        if not self._started:
            raise LocalProtocolError("start the round before its first deadline")
        # Whoever is late now is out of this phase for good, though not of those before it.
        self._overdue = bool(self._storing)
        return [] if self._collected or self._overdue else self._close_phase()

    def computed(self, job: Job, result: Result) -> list[Output]:
        """Take the result of a job; see `ServerParty.computed`."""
        if job is not self._summing and job is not self._unmasking:
            return []  # the round was aborted meanwhile
        if isinstance(result, RecoveryError):
            return self._abort(str(result))
        if job is self._summing:
            self._summing, self._masked_sum = None, result
            return self._unmask_if_ready()
        return self._finish(result)

    def stored(self, record: UploadTaken, upload: Upload | None) -> list[Output]:
        """Count an upload that is durable; see `ServerParty.stored`."""
        if self._storing.get(record.client) is not record:
            return []  # the round was aborted meanwhile
        client = record.client
        del self._storing[client]
        if upload is None:
            del self._uploads[client], self._held[client], self._reports[client]
            self._gone.add(client)
        else:
            self._uploads[client] = upload
        if self._overdue and not self._storing:
            self._overdue = False
            return self._close_phase()
        return self._advance_if_complete()

    # -- phases ------------------------------------------------------------------------------

    def _take(self, sender: int, message: Message) -> list[Output]:
        match message:
            case Advertise():
                return self._on_advertise(sender, message)
            case ShareBundle():
                return self._on_shares(sender, message)
            case MaskedUpload():
                return self._on_upload(sender, message)
            case Consent():
                return self._on_signature(sender, message)
            case AggregatedShare() | UnmaskingShares():
                return self._on_answer(sender, message)
            case _:
                raise AssertionError("the phases know no other message")

    def _advance_if_complete(self) -> list[Output]:
        outputs: list[Output] = []
        while not self._is_settled() and not self._is_waiting():
            outputs += self._close_phase()
        return outputs

    def _is_settled(self) -> bool:
        """Whether no message can move the round on."""
        return not self._started or self._collected or self.phase is Phase.DONE

    def _is_waiting(self) -> bool:
        """Whether anybody is pending, or an upload is being stored.

        It is enough to know one client that is. Building `pending` for every message would make
        a phase quadratic in N, and the recovery of small models slower than its arithmetic.
        """
        phase, client = self._witness
        still_pending = phase is self.phase and not (
            client in self._delivered or client in self.refusals or client in self._gone
        )
        if not still_pending:
            self._witness = (self.phase, max(self.pending, default=None))
        return self._witness[1] is not None or bool(self._storing)

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
                return self._close_recover()
            case Phase.DONE:
                return []

    def _on_advertise(self, sender: int, message: Advertise) -> list[Output]:
        self._registration.on_advertise(sender, message)
        return []

    def _close_advertise(self) -> list[Output]:
        if abort := self._too_few(len(self._registration.advertised), "advertised their keys"):
            return abort
        checks: tuple[bytes, ...] = ()
        if self.settings.traits.checked:
            self._check_secret = draw(self._entropy, prg.SEED_LENGTH)
            checks = (commit(self._check_secret),)
        self._roster = roster = self._registration.make_roster(self._entropy, checks)
        self._scheme_cache = self._registration.scheme(roster, self._entropy)
        self._relay = Relay(self._scheme, single=True)
        self.phase = Phase.SHARE
        return [*self._registration.announce(roster)]

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
        if self._roster is None:
            raise AssertionError("shares follow the roster")
        self.phase = Phase.UPLOAD
        closed = self.closed
        late = AbortRound("the shares of this client were not complete in time")
        return [
            *self._persist(SharingClosed(self._roster, closed)),
            *self._outbox.flush(),
            *(Send(c, closed if c in self._complete else late) for c in self._members),
        ]

    def _on_upload(self, sender: int, message: MaskedUpload) -> list[Output]:
        if sender not in self._complete:
            raise RemoteProtocolError(f"client {sender} had not shared its mask")
        size = len(self._members)
        if message.vector.shape != (self.settings.length,):
            raise RemoteProtocolError(
                f"client {sender} uploaded {message.vector.size} elements instead of "
                f"{self.settings.length}"
            )
        if len(message.held) != (size + 7) // 8:
            raise RemoteProtocolError(
                f"client {sender} sent a bitmap of {len(message.held)} bytes for {size} members"
            )
        bits = np.unpackbits(np.frombuffer(message.held, np.uint8), bitorder="little")
        if bits[size:].any():
            raise RemoteProtocolError(f"client {sender} sent a bitmap with stray bits")
        held = [self._members[k] for k in np.flatnonzero(bits)]
        length = self.settings.traits.report_length(self.settings)
        if message.reports.size != length * len(held):
            raise RemoteProtocolError(
                f"client {sender} reported {message.reports.size} elements on {len(held)} shares "
                f"instead of {length} on each"
            )
        # A copy: a view would keep the whole message in memory.
        rows = message.reports.copy().reshape(len(held), length)
        reports = dict(zip(held, rows, strict=True))
        if sender in self._uploads:
            return self._on_repeated_upload(sender, message.vector, reports)
        self._uploads[sender] = UploadInMemory(message.vector)
        self._held[sender] = frozenset(held)
        self._reports[sender] = reports
        record = UploadTaken(sender, message)
        if self._durable:
            self._storing[sender] = record
        return self._persist(record)

    def _on_repeated_upload(
        self, sender: int, vector: Elements, reports: dict[int, Elements]
    ) -> list[Output]:
        before = self._reports[sender]
        if (
            not self._uploads[sender].equals(vector)
            or before.keys() != reports.keys()
            or not all(np.array_equal(before[owner], reports[owner]) for owner in before)
        ):
            raise RemoteProtocolError(f"client {sender} sent two different uploads")
        return []

    def _close_upload(self) -> list[Output]:
        if abort := self._too_few(len(self._uploads), "uploaded their masked updates"):
            return abort
        self._findings = self._scheme.examine(self._reports)
        self._reports = {}
        try:
            survivors = self._scheme.choose(self._complete, self._held, self._findings.accused)
        except RecoveryError as error:
            return self._abort(str(error))
        self._survivors = survivors
        self._in_sum = frozenset(survivors)
        terms = tuple(Term(MaskRef(client)) for client in survivors)
        self._asked = MaskSum(terms, frozenset(self._complete), self._held)
        self._agreement = Agreement(
            self.settings.parameters.quorum,
            self._allow_list,
            survivor_statement(self._scheme.round.context, survivors),
            survivors,
            self._complete,
        )
        self._summing = SumUploads(
            self.settings.field, self.settings.length, [self._uploads[c] for c in survivors]
        )
        self._uploads = {}
        chosen, compute = self._persist(SurvivorsChosen(survivors)), Compute(self._summing)
        if Phase.RECOVER not in self.settings.traits.phases:
            return [*chosen, compute, *self._close_recover()]
        malicious = self.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        self.phase = Phase.AGREE if malicious else Phase.RECOVER
        # Who is left out hears of it, and can forget its secrets.
        announced = SumRequest(ROUND, survivors)
        left_out = AbortRound("the round goes on without it")
        sends = [
            Send(client, announced if client in survivors else left_out) for client in self.owners
        ]
        return [*chosen, *sends, compute]

    def _on_refusal(self, sender: int, message: Refusal) -> list[Output]:
        if self.phase is Phase.UPLOAD:
            return self.drop(sender)
        if self.phase not in (Phase.AGREE, Phase.RECOVER):
            raise RemoteProtocolError(f"client {sender} refused nothing that was asked of it")
        self._agreed.on_refusal(sender, message.missing)
        return self._advance_if_complete()

    def _on_signature(self, sender: int, message: Consent) -> list[Output]:
        self._agreed.on_signature(sender, message.signature)
        return []

    def _close_agree(self) -> list[Output]:
        if not self._agreed.reached:
            return self._abort(self._agreed.shortfall)
        self.phase = Phase.RECOVER
        certificate = Certificate(ROUND, self._agreed.certificate)
        return [Send(client, certificate) for client in sorted(self.pending)]

    def _on_answer(self, sender: int, message: Answer) -> list[Output]:
        if sender not in self._in_sum:
            raise RemoteProtocolError(f"client {sender} is not in the survivor set")
        known = self._answers.get(sender)
        if known is not None:
            if message != known:
                raise RemoteProtocolError(f"client {sender} gave two different answers")
            return []
        self._scheme.check_answer(self._asked, sender, message)
        self._answers[sender] = message
        return []

    def _close_recover(self) -> list[Output]:
        self._collected = True
        doubted = self._doubted
        self._answers = {c: answer for c, answer in self._answers.items() if c not in doubted}
        return self._unmask_if_ready()

    def _unmask_if_ready(self) -> list[Output]:
        if self._masked_sum is None or not self._collected:
            return []
        masks = self._scheme.recovery(self._asked, self._answers)
        self._unmasking = Unmask(self._masked_sum, masks)
        self._masked_sum = None
        return [Compute(self._unmasking)]

    def _finish(self, total: Elements) -> list[Output]:
        if self._unmasking is None:
            raise AssertionError("the result follows the recovery")
        aggregate = Aggregate(
            total=total,
            included=self._survivors,
            responders=tuple(sorted(self._answers)),
            suspects=tuple(sorted({*self._unmasking.suspects, *self._findings.named})),
            accused=tuple(sorted(self._findings.accused)),
        )
        self.phase = Phase.DONE
        self._unmasking = None
        self._answers = {}
        return [aggregate]

    # -- helpers -----------------------------------------------------------------------------

    @property
    def _scheme(self) -> ServerScheme:
        if self._scheme_cache is None:
            raise AssertionError("the scheme follows the roster")
        return self._scheme_cache

    @property
    def _doubted(self) -> set[int]:
        """Whose answers sum a share in doubt; they were asked for their consent."""
        return {holder for owner, holder in self._findings.accused if owner in self._in_sum}

    @property
    def _agreed(self) -> Agreement:
        if self._agreement is None:
            raise AssertionError("the agreement follows the upload")
        return self._agreement

    @property
    def _members(self) -> tuple[int, ...]:
        return () if self._scheme_cache is None else self._scheme_cache.round.members

    def _persist(self, record: Record) -> list[Output]:
        return [Persist(record)] if self._durable else []

    def _phase_of(self, message: Message) -> Phase | None:
        if isinstance(message, self._answer_type):
            return Phase.RECOVER
        return _PHASE_OF.get(type(message))

    def _is_late(self, message: Message) -> bool:
        phase = self._phase_of(message)
        return phase is not None and _ORDER.index(phase) < _ORDER.index(self.phase)

    def _too_few(self, count: int, what: str) -> list[Output]:
        least = self.settings.minimum
        if count >= least:
            return []
        return self._abort(f"only {count} clients {what}, at least {least} are needed")

    def _abort(self, reason: str) -> list[Output]:
        told = self._members or self._registration.invited
        self.phase = Phase.DONE
        self._summing, self._masked_sum, self._unmasking = None, None, None
        self._relay, self._outbox = None, Outbox()
        self._answers = {}
        self._uploads, self._storing = {}, {}
        outputs: list[Output] = [Send(client, AbortRound(reason)) for client in told]
        accused = tuple(sorted(self._findings.accused))
        return [*outputs, RoundAborted(reason, self._findings.named, accused)]
