"""LightSecAgg's server in the buffered-asynchronous mode, Section 4.2 and Appendix F.3.

Theory of operation. After registration (one roster per epoch) the server relays stock, collects
uploads, and whenever K distinct owners have one waiting it flushes:

    collect    masks are checked when their shares are delivered; uploads wait, oldest first; at K
               owners, or on `flush`, a buffer of time t is formed
    agree      malicious-server mode: m signatures on (C1, t, tags)
    recover    U answers decode the weighted sum of the masks in one shot; `BufferAggregate`

Sums of whole vectors are jobs (`jobs`), which the driver runs: that of the uploads from the moment
when the buffer is announced, the recovery when enough answers are in. Until its result is there,
the buffer is in flight, and answers are late.

While a buffer is in flight, uploads go on waiting for the next. A buffer that fails is never
formed again, because its masks are burnt: its updates are lost, its owners train anew. The time
goes up with every buffer, failed or not. Only buffers that clients will accept are formed: an
upload that is too stale, or whose shares have expired, is dropped before it spoils the others'. So
is one whose shares contradict each other (S46): an upload waits until everybody online has reported
on its mask, or until `proceed`, and a buffer is formed only where enough clients hold good shares
of all its masks. Answers of the others are not used.
A client that was away gets what it missed with `rejoin`. The driver updates the model on
`BufferAggregate`,

    x <- x + eta_g * average,        see `Settings.buffer_average`      Eq. (35)-(37)

calls `publish` with the hash of the new model, and tells clients the time together with the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw, system_entropy
from lightsecagg.crypto.transcript import derive_key, uint
from lightsecagg.errors import (
    LocalProtocolError,
    ParameterError,
    RecoveryError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.masks.checked_sharing import (
    BLINDS,
    CHAIN_LENGTH,
    Pair,
    chain_element,
    name_liars,
)
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.buffers import (
    Rules,
    buffer_statement,
    buffer_terms,
    buffer_weights,
    check_tag,
    choose_updates,
    hash_upload,
)
from lightsecagg.protocol.interface import Phase, RoundAborted, Send
from lightsecagg.protocol.jobs import (
    Compute,
    Job,
    Result,
    SumUploads,
    Unmask,
    UploadInMemory,
)
from lightsecagg.protocol.messages import (
    AbortRound,
    Advertise,
    AggregatedShare,
    BufferAnnounced,
    BufferAnswer,
    BufferCertificate,
    BufferedUpload,
    BufferRefusal,
    BufferSignature,
    MaskComplete,
    MaskReport,
    Message,
    Opening,
    Roster,
    SealedShare,
    ShareBundle,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.roles.agreement import Agreement
from lightsecagg.protocol.roles.registration import Registration
from lightsecagg.protocol.roles.relay import Outbox, Relay
from lightsecagg.protocol.schemes.interface import Answer, MaskRef, MaskSum, ServerScheme
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import bundles


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An upload in front of the buffer."""

    upload: BufferedUpload
    shared: int
    """The time at which the shares of its mask were complete."""

    @property
    def owner(self) -> int:
        return self.upload.tag.owner

    @property
    def version(self) -> int:
        return self.upload.tag.version

    @property
    def mask(self) -> MaskRef:
        return MaskRef(self.upload.tag.owner, self.upload.tag.serial)


@dataclass(frozen=True, slots=True)
class BufferAggregate:
    """The result of one buffer."""

    time: int
    total: Elements = field(repr=False)
    """The weighted sum over F_q of the buffer's quantised updates."""
    owners: tuple[int, ...]
    weights: tuple[int, ...]
    """w(t - t_i), by owner."""
    responders: tuple[int, ...]
    suspects: tuple[int, ...] = ()
    """Clients that contradicted the others, in their answers or in too many reports on shares of
    this epoch. A suspicion, never proof."""
    accused: tuple[Pair, ...] = ()
    """Pairs (owner, holder) of this epoch: what was shared and what was reported do not agree."""


@dataclass(frozen=True, slots=True)
class BufferFailed:
    """A buffer was lost; its owners must train anew."""

    time: int
    owners: tuple[int, ...]
    reason: str
    missing: tuple[int, ...] = ()
    """Owners whose shares some client lacked, or says it lacked. A suspicion, never proof."""
    suspects: tuple[int, ...] = ()
    """As those of `BufferAggregate`."""
    accused: tuple[Pair, ...] = ()


AsyncOutput = Send | Compute | BufferAggregate | BufferFailed | RoundAborted


class AsyncLightSecAggServer:
    """The server of asynchronous LightSecAgg in one epoch; see the theory of operation."""

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        buffer_size: int,
        invited: Iterable[int] | None = None,
        entropy: Entropy = system_entropy,
        spare_answers: int = 0,
    ) -> None:
        """`spare_answers`: wait for U + this many answers; one detects a liar, two name it."""
        if not settings.traits.protected or settings.buffering is None:
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
        self.time = 0
        """t: the version of the current model, and the time of the next buffer."""
        self.late_messages: Counter[str] = Counter()
        self._allow_list = allow_list
        self._buffering: Buffering = settings.buffering
        self._entropy = entropy
        self._spare = spare_answers
        self._registration = Registration(settings, allow_list, invited)
        self._started = False
        self._offline: set[int] = set()
        self._roster: Roster | None = None
        self._scheme: ServerScheme | None = None
        self._models: dict[int, bytes] = {}  # version -> hash
        self._relay: Relay | None = None
        self._shared: dict[int, dict[int, int]] = {}  # owner -> serial -> time; unused masks only
        self._last_tag: dict[int, Tag] = {}
        self._accepted: dict[bytes, set[int]] = {}  # model -> owners; clients sum no second one
        self._mailbox: dict[int, dict[MaskRef, SealedShare | UploadDropped]] = {}
        self._check_secret = b""
        self._reports: dict[MaskRef, dict[int, Elements]] = {}  # holder -> its two elements
        self._unawaited: set[MaskRef] = set()  # masks that go without the reports still missing
        self._judged: dict[MaskRef, tuple[int, frozenset[int]]] = {}  # after so many reports
        self._accused: dict[Pair, int] = {}  # and how many liars the reports on that mask tell
        self._waiting: list[_Waiting] = []
        self._buffer: BufferAnnounced | None = None
        self._asked = MaskSum(())
        self._summing: SumUploads | None = None
        self._masked_sum: Elements | None = None
        self._collected = False  # all that can still become of the buffer is a result
        self._unmasking: Unmask | None = None
        self._agreement: Agreement | None = None
        self._holders: frozenset[int] = frozenset()  # of good shares of all the buffer's masks
        self._answers: dict[int, Answer] = {}

    # -- the driver's side -------------------------------------------------------------------

    @property
    def pending(self) -> frozenset[int]:
        """Clients that the current phase still waits for; nobody while collecting."""
        return frozenset(self._awaited())

    def _awaited(self) -> Iterator[int]:
        """Its first element, or that there is none, costs less than the whole of `pending`."""
        expected: Iterable[int] = () if self.phase is Phase.UPLOAD else self._members
        delivered: Container[int] = ()
        match self.phase:
            case Phase.ADVERTISE:
                expected, delivered = self._registration.invited, self._registration.advertised
            case Phase.AGREE:
                delivered = self._in_flight.signatures
            case Phase.RECOVER:
                delivered = self._answers
        for client in () if self._collected else expected:
            if not (client in delivered or client in self.refusals or client in self._offline):
                yield client

    @property
    def refusals(self) -> dict[int, tuple[int, ...]]:
        """Who refused the buffer in flight, and whose shares it lacks."""
        return {} if self._agreement is None else self._agreement.refusals

    @property
    def _all_in(self) -> bool:
        return next(self._awaited(), None) is None

    @property
    def waiting(self) -> int:
        """How many distinct owners have an upload waiting."""
        return len({waiting.owner for waiting in self._waiting})

    @property
    def summable(self) -> int:
        """How many of the waiting uploads may share a buffer now; `flush` wants T + 2."""
        return len(self._choose())

    def start(self) -> list[AsyncOutput]:
        """Open the epoch."""
        if self._started:
            raise LocalProtocolError("the epoch was started already")
        self._started = True
        return [*self._registration.open()]

    def receive(self, sender: int, message: Message) -> list[AsyncOutput]:
        """Take a message from the client `sender`; see `ServerParty.receive`."""
        if not self._started:
            raise LocalProtocolError("start the epoch before delivering messages to it")
        self._registration.check_invited(sender)
        match message:
            case Advertise() if self.phase is Phase.ADVERTISE:
                outputs = self._on_advertise(sender, message)
            case ShareBundle() if self._is_member(sender):
                return self._on_shares(sender, message)  # moves no phase on
            case MaskReport() if self._is_member(sender):
                outputs = self._on_report(sender, message)
            case BufferedUpload() if self._is_member(sender):
                outputs = self._on_upload(sender, message)
            case BufferSignature() | BufferRefusal() | BufferAnswer() if self._is_member(sender):
                outputs = self._on_reply(sender, message)
            case Advertise():
                return self._ignore(message)
            case _:
                raise RemoteProtocolError(
                    f"client {sender} sent {type(message).__name__} in phase {self.phase}"
                )
        return outputs + self._advance()

    def drop(self, client: int) -> list[AsyncOutput]:
        """The client is offline; what it has delivered stays."""
        self._offline.add(client)
        return self._advance()

    def rejoin(self, client: int) -> list[AsyncOutput]:
        """The client is back, with its memory: it gets what it missed."""
        self._offline.discard(client)
        if self.phase is Phase.ADVERTISE and client not in self._registration.advertised:
            return [Send(client, Opening(self.settings.to_bytes()))]
        if self._roster is None or self._relay is None or not self._is_member(client):
            return []
        messages: list[Message] = []
        if not self._relay.has_begun(client):  # it has shared nothing: perhaps it lacks the roster
            messages.append(self._roster)
        missed = self._mailbox.pop(client, {})
        if self._buffer is not None:
            # Its shares before it, all others after it: clients keep the newest ones only, and
            # could otherwise lose the very shares that they are asked for.
            masks = [term.ref for term in self._asked.terms]
            messages += _bundled(missed.pop(mask) for mask in masks if mask in missed)
            messages.append(self._buffer)
        messages += _bundled(missed.values())
        messages += [
            self._completion(mask) for mask, said in self._reports.items() if client not in said
        ]
        return [Send(client, message) for message in messages]

    def publish(self, model: bytes, version: int | None = None) -> None:
        """The hash of the model of a version, by default of the current time.

        Uploads that name another model, or a version that was never published, are refused:
        clients refuse a buffer whose owners disagree about it. So call this for every version,
        also for one that a lost buffer has left unchanged, before clients get its model.
        """
        number = self.time if version is None else version
        if not 0 <= number <= self.time:
            raise LocalProtocolError(
                f"a model of version {number} cannot be published at time {self.time}"
            )
        if self._models.setdefault(number, model) != model:
            raise LocalProtocolError(
                f"another model of version {number} was published before; clients that trained "
                "from different models of one version refuse to be summed"
            )

    def proceed(self) -> list[AsyncOutput]:
        """The deadline of the current phase fired; while collecting, that of the reports.

        Uploads that wait for reports wait no longer.
        """
        if not self._started:
            raise LocalProtocolError("start the epoch before its first deadline")
        match self.phase:
            case Phase.ADVERTISE:
                return self._close_advertise()
            case Phase.AGREE:
                return self._close_agree()
            case Phase.RECOVER if not self._collected:
                return self._close_recover()
            case Phase.UPLOAD:
                self._unawaited.update(waiting.mask for waiting in self._waiting)
                return self._advance()
            case _:
                return []

    def computed(self, job: Job, result: Result) -> list[AsyncOutput]:
        """Take the result of a job; one of a buffer that was lost meanwhile changes nothing."""
        if job is not self._summing and job is not self._unmasking:
            return []
        if isinstance(result, RecoveryError):
            return self._fail(str(result)) + self._advance()
        if job is self._summing:
            self._summing, self._masked_sum = None, result
            return self._unmask_if_ready()
        return self._finish(result) + self._advance()

    def flush(self) -> list[AsyncOutput]:
        """Form a buffer now, with as many updates as wait, at most K; await no more reports."""
        if self.phase is not Phase.UPLOAD:
            raise LocalProtocolError(f"cannot flush in phase {self.phase}")
        self._unawaited.update(waiting.mask for waiting in self._waiting)
        least = self.settings.parameters.privacy + 2
        chosen = self._choose()
        if len(chosen) < least:
            raise LocalProtocolError(
                f"{len(chosen)} of {self.waiting} waiting updates may share a buffer now; clients "
                f"accept T + 2 = {least} or more"
            )
        return self._drop_useless() + self._announce(chosen)

    # -- registration ------------------------------------------------------------------------

    @property
    def _members(self) -> tuple[int, ...]:
        return () if self._scheme is None else self._scheme.round.members

    def _is_member(self, client: int) -> bool:
        return self._scheme is not None and client in self._scheme.round.positions

    def _ignore(self, message: Message) -> list[AsyncOutput]:
        self.late_messages[type(message).__name__] += 1
        return []

    def _on_advertise(self, sender: int, message: Advertise) -> list[AsyncOutput]:
        return [] if self._registration.on_advertise(sender, message) else self._ignore(message)

    def _close_advertise(self) -> list[AsyncOutput]:
        least, count = self.settings.minimum, len(self._registration.advertised)
        if count < least:
            reason = f"only {count} clients advertised their keys, at least {least} are needed"
            self.phase = Phase.DONE
            invited = self._registration.invited
            return [*(Send(c, AbortRound(reason)) for c in invited), RoundAborted(reason)]
        ends: tuple[bytes, ...] = ()
        if self.settings.traits.checked:
            self._check_secret = draw(self._entropy, prg.SEED_LENGTH)
            came = self._registration.advertised
            ends = tuple(self._secret(c, -1) for c in self._registration.invited if c in came)
        self._roster = roster = self._registration.make_roster(self._entropy, ends)
        self._scheme = self._registration.scheme(roster, self._entropy)
        self._relay = Relay(self._scheme)
        self.phase = Phase.UPLOAD
        return [*self._registration.announce(roster)]

    # -- stock -------------------------------------------------------------------------------

    def _on_shares(self, sender: int, message: ShareBundle) -> list[AsyncOutput]:
        assert self._relay is not None  # noqa: S101 - a member's message
        last = max((share.serial for share in message.shares), default=0)
        if self.settings.traits.checked and last >= CHAIN_LENGTH:
            raise RemoteProtocolError(
                f"client {sender} shares its mask {last}; an epoch has {CHAIN_LENGTH}"
            )
        shares = self._relay.take(sender, message)
        if shares is None:
            return self._ignore(message)
        if not shares:
            return []
        self._shared.setdefault(sender, {}).update((share.serial, self.time) for share in shares)
        outputs = self._drop_pushed_out(sender)
        outbox = Outbox()
        for share in shares:
            if share.recipient not in self._offline:
                outputs += outbox.put(share)
            else:  # as a copy: a view would keep the whole bundle in memory
                self._put_by(share.recipient, replace(share, sealed=bytes(share.sealed)))
        outputs += outbox.flush()
        for serial in dict.fromkeys(share.serial for share in shares):
            outputs += self._ask_for_reports(MaskRef(sender, serial))
        return outputs

    def _put_by(self, client: int, message: SealedShare | UploadDropped) -> None:
        """Keep a message for a client that is away."""
        owner = message.owner if isinstance(message, SealedShare) else client
        self._mailbox.setdefault(client, {})[MaskRef(owner, message.serial)] = message

    def _secret(self, owner: int, serial: int) -> bytes:
        """The secret by which an owner's mask is checked, or the end of its chain."""
        seed = derive_key(self._check_secret, self.settings.context, "check seed", uint(owner))
        return chain_element(seed, serial)

    def _ask_for_reports(self, mask: MaskRef) -> list[AsyncOutput]:
        """The owner can change nothing any more: tell everybody by what to check the mask."""
        if not self.settings.traits.checked or mask.serial not in self._shared[mask.owner]:
            return []
        self._reports[mask] = {}
        complete = self._completion(mask)  # who is away is asked when it is back
        return [Send(c, complete) for c in self._members if c not in self._offline]

    def _completion(self, mask: MaskRef) -> MaskComplete:
        return MaskComplete(mask.owner, mask.serial, self._secret(mask.owner, mask.serial))

    def _on_report(self, sender: int, message: MaskReport) -> list[AsyncOutput]:
        mask, q = MaskRef(message.owner, message.serial), self.settings.field.modulus
        sound = all(0 <= value < q for value in message.values)
        if len(message.values) not in (0, BLINDS) or not sound:
            raise RemoteProtocolError(
                f"client {sender} reported {len(message.values)} values, or some beyond F_q, "
                f"instead of {BLINDS} elements"
            )
        if mask not in self._reports:
            return self._ignore(message)
        values = np.array(message.values, dtype=np.uint32)
        if (known := self._reports[mask].get(sender)) is not None:
            if not np.array_equal(known, values):
                raise RemoteProtocolError(f"client {sender} reported twice on one share")
            return self._ignore(message)
        self._reports[mask][sender] = values
        return []

    def _good_holders(self, mask: MaskRef) -> frozenset[int]:
        """Who holds a share of a mask that agrees with the others', as far as reports tell."""
        if not self.settings.traits.checked or self._scheme is None:
            return frozenset(self._members)
        came, known = len(self._reports[mask]), self._judged.get(mask)
        if known is None or known[0] != came:
            said = {c: {mask.owner: v} for c, v in self._reports[mask].items() if v.size}
            accused = self._scheme.examine(said).accused
            spare = len(said) - self.settings.parameters.survivors
            self._accused |= dict.fromkeys(accused, spare // 2)
            known = came, frozenset(said) - {holder for _, holder in accused}
            self._judged[mask] = known
        return known[1]

    def _awaits_reports(self, mask: MaskRef) -> bool:
        """Whether somebody online has still to report on a mask."""
        if not self.settings.traits.checked or mask in self._unawaited:
            return False
        return any(c not in self._reports[mask] and c not in self._offline for c in self._members)

    @property
    def _needed_holders(self) -> int:
        parameters = self.settings.parameters
        return max(parameters.survivors, parameters.quorum)

    @property
    def _suspects(self) -> tuple[int, ...]:
        """Who must have lied in this epoch, if as few did as the most reports on a mask tell."""
        liars = max(self._accused.values(), default=0)
        return name_liars((pair for pair, few in self._accused.items() if few == liars), liars)

    def _drop_pushed_out(self, owner: int) -> list[AsyncOutput]:
        """Clients keep so many shares of an owner; forget the masks that they have forgotten."""
        waiting = [w.upload.tag for w in self._waiting if w.owner == owner]
        unused = self._shared[owner]
        excess = max(0, len(waiting) + len(unused) - self._buffering.stock)
        outputs = self._drop(waiting[:excess])
        old = sorted(unused)[: max(0, excess - len(waiting))]
        for serial in old:
            del unused[serial]
        self._keep_back(MaskRef(owner, serial) for serial in old)
        return outputs

    # -- uploads and buffers -----------------------------------------------------------------

    def _on_upload(self, sender: int, message: BufferedUpload) -> list[AsyncOutput]:
        tag = message.tag
        if self._scheme is None or tag.owner != sender:
            raise RemoteProtocolError(f"client {sender} uploaded under another's tag")
        last = self._last_tag.get(sender)
        if last is not None and tag.serial <= last.serial:
            if tag == last:
                return self._ignore(message)
            raise RemoteProtocolError(
                f"client {sender} uploaded under its mask {tag.serial}, but {last.serial} was "
                "used already"
            )
        if tag.serial not in self._shared.get(sender, {}):
            # Its shares were lost with a connection; the owner goes on with another mask.
            return [Send(sender, UploadDropped(tag.serial))]
        if message.vector.shape != (self.settings.length,):
            raise RemoteProtocolError(
                f"client {sender} uploaded {message.vector.size} elements instead of "
                f"{self.settings.length}"
            )
        if tag.version > self.time:
            raise RemoteProtocolError(f"client {sender} trained from a model of the future")
        check_tag(self._scheme.round, self._allow_list, tag)
        if hash_upload(self.settings.field, message.vector) != tag.digest:
            raise RemoteProtocolError(f"the upload of client {sender} is not what its tag says")
        self._check_model(tag)
        unused = self._shared[sender]
        self._last_tag[sender] = tag
        self._shared[sender] = {s: time for s, time in unused.items() if s > tag.serial}
        self._keep_back(MaskRef(sender, serial) for serial in unused if serial < tag.serial)
        owners = self._accepted.setdefault(tag.model, set())
        if sender in owners:
            self._keep_back([MaskRef(sender, tag.serial)])
            return self._tell_dropped(tag)
        owners.add(sender)
        self._waiting.append(_Waiting(message, unused[tag.serial]))
        return []

    def _check_model(self, tag: Tag) -> None:
        """Refuse an update of another model than the published one (S45).

        Versions that are too old for any buffer are forgotten, and such uploads dropped anyway.
        """
        if tag.version < self.time - self._buffering.table.max_staleness:
            return
        if tag.version not in self._models:
            raise RemoteProtocolError(
                f"client {tag.owner} trained from a model of version {tag.version}, but none was "
                "published"
            )
        if tag.model != self._models[tag.version]:
            raise RemoteProtocolError(
                f"client {tag.owner} trained from another model of version {tag.version}"
            )

    def _advance(self) -> list[AsyncOutput]:
        if not self._started:
            return []
        if self.phase is Phase.ADVERTISE and self._all_in:
            return self._close_advertise()
        if self.phase is Phase.AGREE and self._agreed:
            return self._close_agree() + self._advance()
        if self.phase is Phase.RECOVER and not self._collected and self._enough_answers:
            return self._close_recover()
        if self.phase is Phase.UPLOAD and self.waiting >= self.buffer_size:
            chosen, dropped = self._choose(), self._drop_useless()
            if len(chosen) >= self.buffer_size:
                return dropped + self._announce(chosen)
            return dropped
        return []

    def _is_usable(self, waiting: _Waiting) -> bool:
        """Whether a buffer may take it now or later.

        It is not too stale, its shares have not expired, and enough of them may be good.
        """
        return (
            self.time - waiting.version <= self._buffering.table.max_staleness
            and self.time - waiting.shared <= self._buffering.share_lifetime
            and (
                self._awaits_reports(waiting.mask)
                or len(self._good_holders(waiting.mask)) + self._silent(waiting.mask)
                >= self._needed_holders
            )
        )

    def _silent(self, mask: MaskRef) -> int:
        """How many clients have not reported on a mask, and may still."""
        checked = self.settings.traits.checked
        return len(self._members) - len(self._reports[mask]) if checked else 0

    def _drop_useless(self) -> list[AsyncOutput]:
        oldest = self.time - self._buffering.table.max_staleness
        self._models = {v: model for v, model in self._models.items() if v >= oldest}
        return self._drop(w.upload.tag for w in self._waiting if not self._is_usable(w))

    def _drop(self, tags: Iterable[Tag]) -> list[AsyncOutput]:
        """These uploads wait no longer; their owners are told."""
        dropped = list(tags)
        self._keep_back(self._take(dropped))
        return [output for tag in dropped for output in self._tell_dropped(tag)]

    def _tell_dropped(self, tag: Tag) -> list[AsyncOutput]:
        dropped = UploadDropped(tag.serial)
        if tag.owner not in self._offline:
            return [Send(tag.owner, dropped)]
        self._put_by(tag.owner, dropped)
        return []

    def _take(self, tags: Iterable[Tag]) -> set[MaskRef]:
        """Take uploads out of the waiting ones; their masks."""
        masks = {MaskRef(tag.owner, tag.serial) for tag in tags}
        self._waiting = [w for w in self._waiting if (w.owner, w.upload.tag.serial) not in masks]
        return masks

    def _keep_back(self, masks: Iterable[MaskRef]) -> None:
        """Absent clients need no shares of masks that are past."""
        past = list(masks)
        for mask in past:
            self._reports.pop(mask, None)
            self._judged.pop(mask, None)
            self._unawaited.discard(mask)
            for missed in self._mailbox.values():
                missed.pop(mask, None)

    def _choose(self) -> list[BufferedUpload]:
        """The next buffer, by owner; shorter than K if fewer updates may be summed now.

        Enough clients must hold good shares of all its masks; while there are too few, the
        update goes whose shares fewest hold.
        """
        usable = [
            waiting
            for waiting in self._waiting
            if self._is_usable(waiting) and not self._awaits_reports(waiting.mask)
        ]
        good = {waiting.mask: self._good_holders(waiting.mask) for waiting in usable}
        while True:
            chosen = self._choose_from(usable)
            holders = frozenset(self._members).intersection(*(good[w.mask] for w in chosen))
            if len(holders) >= self._needed_holders:
                break
            usable.remove(min(chosen, key=lambda waiting: len(good[waiting.mask])))
        return [waiting.upload for waiting in sorted(chosen, key=lambda waiting: waiting.owner)]

    def _choose_from(self, usable: list[_Waiting]) -> list[_Waiting]:
        per_weight = self._buffering.per_weight(self.settings.parameters)
        return choose_updates(
            usable,
            self.buffer_size,
            lambda version: self._buffering.table.weight(self.time - version),
            Rules(self._buffering.max_ratio, per_weight),
        )

    def _announce(self, uploads: list[BufferedUpload]) -> list[AsyncOutput]:
        self._buffer = BufferAnnounced(self.time, tuple(upload.tag for upload in uploads))
        self._take(self._buffer.tags)
        assert self._scheme is not None  # noqa: S101 - uploads follow the roster
        weights = buffer_weights(self._scheme.round, self._buffering, self._buffer)
        masks = [MaskRef(tag.owner, tag.serial) for tag in self._buffer.tags]
        self._holders = self._good_holders(masks[0]).intersection(*map(self._good_holders, masks))
        self._asked = MaskSum(buffer_terms(self._buffer, weights), frozenset(self._members))
        self._summing = SumUploads(
            self.settings.field,
            self.settings.length,
            [UploadInMemory(upload.vector) for upload in uploads],
            weights,
        )
        self._agreement = Agreement(
            self.settings.parameters.quorum,
            self._allow_list,
            buffer_statement(self._scheme.round.context, self._buffer),
            self._members,
            self._asked.in_sum,
        )
        malicious = self.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        self.phase = Phase.AGREE if malicious else Phase.RECOVER
        online = [client for client in self._members if client not in self._offline]
        return [*(Send(client, self._buffer) for client in online), Compute(self._summing)]

    # -- agreement and recovery --------------------------------------------------------------

    @property
    def _in_flight(self) -> Agreement:
        if self._agreement is None:
            raise AssertionError("no buffer is in flight")
        return self._agreement

    @property
    def _agreed(self) -> bool:
        return self._in_flight.reached or self._all_in

    @property
    def _enough_answers(self) -> bool:
        wanted = self.settings.parameters.survivors + self._spare
        return len(self._good_answers) >= wanted or self._all_in

    @property
    def _good_answers(self) -> dict[int, Answer]:
        """The answers of those who hold good shares of all the buffer's masks."""
        return {c: answer for c, answer in self._answers.items() if c in self._holders}

    def _on_reply(
        self, sender: int, message: BufferSignature | BufferRefusal | BufferAnswer
    ) -> list[AsyncOutput]:
        if self._buffer is None or self._scheme is None or message.time != self._buffer.time:
            return self._ignore(message)
        match message:
            case BufferRefusal():
                self._in_flight.on_refusal(sender, message.missing)
            case BufferSignature():
                self._in_flight.on_signature(sender, message.signature)
                awaited = not self._collected and sender not in self._answers
                if self.phase is Phase.RECOVER and awaited:
                    return [Send(sender, self._certificate())]
            case BufferAnswer():
                if self.phase is not Phase.RECOVER:
                    raise RemoteProtocolError(f"client {sender} answered before the agreement")
                answer = AggregatedShare(message.vector)
                self._scheme.check_answer(self._asked, sender, answer)
                if (known := self._answers.get(sender)) is not None:
                    if answer != known:
                        raise RemoteProtocolError(f"client {sender} gave two different answers")
                    return self._ignore(message)
                if self._collected:
                    return self._ignore(message)
                self._answers[sender] = answer
        return []

    def _certificate(self) -> BufferCertificate:
        assert self._buffer is not None  # noqa: S101 - only asked for in flight
        return BufferCertificate(self._buffer.time, self._in_flight.certificate)

    def _close_agree(self) -> list[AsyncOutput]:
        if not self._in_flight.reached:
            return self._fail(self._in_flight.shortfall)
        self.phase = Phase.RECOVER
        certificate = self._certificate()
        return [Send(client, certificate) for client in sorted(self._in_flight.signatures)]

    def _close_recover(self) -> list[AsyncOutput]:
        self._collected = True
        return self._unmask_if_ready()

    def _unmask_if_ready(self) -> list[AsyncOutput]:
        if self._masked_sum is None or not self._collected:
            return []
        assert self._scheme is not None  # noqa: S101 - in flight
        masks = self._scheme.recovery(self._asked, self._good_answers)
        self._unmasking = Unmask(self.settings.field, self._masked_sum, masks)
        self._masked_sum = None
        return [Compute(self._unmasking)]

    def _finish(self, total: Elements) -> list[AsyncOutput]:
        assert self._buffer is not None  # noqa: S101 - in flight
        assert self._unmasking is not None  # noqa: S101
        aggregate = BufferAggregate(
            time=self._buffer.time,
            total=total,
            owners=self._asked.in_sum,
            weights=tuple(term.weight for term in self._asked.terms),
            responders=tuple(sorted(self._good_answers)),
            suspects=tuple(sorted({*self._unmasking.suspects, *self._suspects})),
            accused=tuple(sorted(self._accused)),
        )
        return [aggregate, *self._end_buffer()]

    def _fail(self, reason: str) -> list[AsyncOutput]:
        assert self._buffer is not None  # noqa: S101 - in flight
        owners = tuple(tag.owner for tag in self._buffer.tags)
        missing = tuple(sorted({owner for lacks in self.refusals.values() for owner in lacks}))
        accused = tuple(sorted(self._accused))
        failed = BufferFailed(self._buffer.time, owners, reason, missing, self._suspects, accused)
        return [failed, *self._end_buffer()]

    def _end_buffer(self) -> list[AsyncOutput]:
        assert self._buffer is not None  # noqa: S101 - in flight
        self._keep_back(term.ref for term in self._asked.terms)
        outputs: list[AsyncOutput] = []
        for tag in self._buffer.tags:
            # An owner that saw no buffer would for ever count its upload as waiting.
            if tag.owner in self._offline or tag.owner in self.refusals:
                outputs += self._tell_dropped(tag)
        self._buffer, self._asked, self._collected = None, MaskSum(()), False
        self._summing, self._masked_sum, self._unmasking = None, None, None
        self._agreement, self._answers = None, {}
        self.time += 1
        self.phase = Phase.UPLOAD
        return outputs


def _bundled(missed: Iterable[SealedShare | UploadDropped]) -> list[Message]:
    """What a client has missed, in as few messages as possible."""
    kept = list(missed)
    shares = [message for message in kept if isinstance(message, SealedShare)]
    notices = [message for message in kept if isinstance(message, UploadDropped)]
    return [*bundles(shares), *notices]
