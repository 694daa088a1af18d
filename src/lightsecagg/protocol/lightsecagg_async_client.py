"""LightSecAgg's client in the buffered-asynchronous mode, Section 4.2 and Appendix F.

Theory of operation. A client registers once per epoch (Opening, Advertise, Roster, as in a
synchronous round); C1 and everybody's evaluation points then hold for the whole epoch. From then
on four things go on at once:

* stock: the client draws masks, numbered by a serial, and shares them ahead of time (`restock`);
* work: whenever training is done, `set_input` masks the update with the oldest mask of the stock
  and uploads it with a signed tag;
* keeping: it keeps its peers' shares under (owner, serial). Serials of one owner only increase,
  so a share that was used and is delivered again is refused. When a mask's shares are complete it
  reports on the one that it keeps, once, by coefficients to which the roster binds the server;
* answering: for a buffer of time t it checks every tag, computes the weights itself, and *burns*
  the shares: the answer is computed and the shares are forgotten in the same step in which the
  buffer is signed (or, honest-but-curious, answered). One buffer per t, t strictly increasing.
  With the shares it burns (owner, model): of one owner and one model, whatever versions the
  server gives it, one update is summed and no other (S42). Signers know of their own epoch only,
  so an owner uploads from one model in one epoch.

A failed buffer is never formed again: its masks are burnt. A client that crashed has lost its
shares and joins the next epoch. An update is spent when it is uploaded, because its buffer may be
summed without its owner.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NoReturn

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import (
    CryptoError,
    DecodeError,
    LocalProtocolError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.field.prime import Elements
from lightsecagg.foreign import shown
from lightsecagg.masks.checked_sharing import CHAIN_LENGTH, is_in_chain
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.buffers import (
    buffer_statement,
    buffer_terms,
    buffer_weights,
    check_models,
    check_tag,
    hash_upload,
    sign_tag,
)
from lightsecagg.protocol.interface import SERVER, NeedInput, Output, RoundAborted, Send, Update
from lightsecagg.protocol.ledger import Ledger
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
    UploadDropped,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.agreement import check_certificate
from lightsecagg.protocol.roles.contributor import (
    check_input,
    hide,
    seal_shares,
    send_shares,
)
from lightsecagg.protocol.roles.holder import check_address, open_peer_share
from lightsecagg.protocol.roles.registration import accept_opening, draw_keys, enter_roster
from lightsecagg.protocol.schemes.interface import ClientScheme, MaskRef, Term
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import Share


@dataclass(frozen=True, slots=True)
class KeptShare:
    """A peer's share that waits for its buffer."""

    share: Share = field(repr=False)
    since: int | None = None
    """The first buffer that this client consented to after the share came; it expires by this.

    Not the last one before: a client that was away for long would forget what it has just got.
    """
    report: MaskReport | None = None
    """What this client has said of it; it says the same again (S46)."""


@dataclass(frozen=True, slots=True)
class Consent:
    """The one buffer that this client has signed or answered for, at its time."""

    buffer: BufferAnnounced
    answer: Elements = field(repr=False)
    signature: bytes | None
    """None in honest-but-curious mode, where the answer goes out at once."""
    released: bool
    """Whether the answer has left."""


class AsyncLightSecAggClient:
    """One client of asynchronous LightSecAgg in one epoch; see the theory of operation."""

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        ledger: Ledger,
        entropy: Entropy = system_entropy,
    ) -> None:
        if client not in policy.allow_list or policy.allow_list[client] != identity.public:
            raise ParameterError(f"client {client} is not on the allow-list with this identity")
        self._scheme_class = scheme_of(*policy.protocols).client
        if policy.buffering is None or not all(
            traits_of(protocol).protected and traits_of(protocol).buffered
            for protocol in policy.protocols
        ):
            raise ParameterError("the asynchronous mode needs a policy with buffering")
        self.client = client
        self.ledger = ledger
        self.refused_shares: dict[int, str] = {}
        """Owners whose latest share did not open, and why."""
        self.late_messages: Counter[str] = Counter()
        """Messages that came again or too late and were ignored, by type."""
        self._process = os.getpid()
        self._identity = identity
        self._policy = policy
        self._buffering: Buffering = policy.buffering
        self._entropy = entropy
        self._closed: str | None = None
        self._settings: Settings | None = None
        self._keys: tuple[AgreementKey, ...] = ()
        self._advertise: Advertise | None = None
        self._roster: Roster | None = None
        self._scheme: ClientScheme | None = None
        self._next_serial = 0
        self._stock: dict[int, bytes] = {}  # serial -> what the scheme makes the mask of
        self._kept: dict[int, dict[int, KeptShare]] = {}  # owner -> serial -> share
        self._last_serial: dict[int, int] = {}
        self._chains: dict[int, tuple[int, bytes]] = {}  # owner -> the last secret, and its number
        self._outstanding: set[int] = set()  # serials that wait for their buffer
        self._models: dict[int, bytes] = {}  # version -> hash, as used or signed for here
        self._time = -1
        self._consent: Consent | None = None

    @property
    def stock(self) -> int:
        """How many shared masks are ready; an upload takes one."""
        return len(self._stock)

    @property
    def room(self) -> int:
        """How many more masks may be shared before peers drop old ones."""
        return self._buffering.stock - len(self._stock) - len(self._outstanding)

    @property
    def time(self) -> int:
        """The time of the last buffer that this client has signed or answered for."""
        return self._time

    # -- the driver's side -------------------------------------------------------------------

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message; see `ClientParty.receive`."""
        if sender != SERVER:
            raise RemoteProtocolError(f"client {self.client} only listens to the server")
        self._check_process()
        self._check_newest_epoch()
        if self._closed is not None:
            if isinstance(message, AbortRound):
                return []
            raise RemoteProtocolError(
                f"{type(message).__name__} refused: the epoch is over for client {self.client}"
            )
        try:
            return self._take(message)
        except (CryptoError, DecodeError, ParameterError) as error:
            raise RemoteProtocolError(f"{type(message).__name__} refused: {error}") from error

    def restock(self, count: int = 1) -> list[Output]:
        """Draw and share `count` more masks, ahead of time."""
        scheme, keys = self._registered()
        if not 1 <= count <= self.room:
            raise LocalProtocolError(
                f"{self.stock} masks are ready and {len(self._outstanding)} in use; peers keep at "
                f"most {self._buffering.stock} per owner, so {count} more would push out old ones"
            )
        shares: list[SealedShare] = []
        private = tuple(key.private_bytes() for key in keys)
        if scheme.settings.traits.checked and self._next_serial + count > CHAIN_LENGTH:
            raise LocalProtocolError(
                f"an epoch has {CHAIN_LENGTH} masks of one client; join the next one"
            )
        for _ in range(count):
            serial = self._next_serial
            self._next_serial += 1
            mask = scheme.prepare(serial, private, self._entropy)
            self._stock[serial] = mask.secret
            self._keep(self.client, serial, mask.own)
            shares += seal_shares(scheme, keys[0], mask, serial, self._entropy)
        return [*send_shares(shares)]

    def set_input(self, update: Update, version: int, model: bytes) -> list[Output]:
        """Mask and upload an update that was trained from the model of time `version`.

        Takes the oldest mask of the stock; call `restock` first if there is none. The update is
        spent from now on.

        * `version`: the time of the global model, as the server gave it.
        * `model`: the hash of the model that was really trained from (`hash_model`). Compute it
          here: a server that may name any hash also escapes `max_attempts`.
        """
        scheme, _ = self._registered()
        settings = scheme.settings
        check_input(settings, update)
        if not self._stock:
            raise LocalProtocolError("no shared mask is ready; call restock first")
        fingerprint = self.ledger.fingerprint(update)
        self.ledger.check_unspent(fingerprint)
        self.ledger.check_attempts(model, self._policy.max_attempts)
        self.ledger.check_epoch(model)
        if version < 0 or self._models.get(version, model) != model:
            raise RemoteProtocolError(
                f"the server gave this client two different models of version {version}, or "
                "another one than its peers have trained from"
            )
        serial = min(self._stock)
        commitment = self.ledger.commitment(fingerprint, update.samples, settings.reading)
        mask = scheme.mask(self._stock.pop(serial), scheme.round.members)
        masked = hide(settings, update, self.ledger.rounding_seed(model, commitment), mask)
        self._outstanding.add(serial)
        self._models[version] = model
        self.ledger.count_upload(model)
        self.ledger.spend(fingerprint)
        self.ledger.count_change()
        digest = hash_upload(settings.field, masked)
        context = scheme.round.context
        tag = sign_tag(self._identity, context, self.client, serial, version, model, digest)
        return [*self.ledger.persisted(), Send(SERVER, BufferedUpload(tag, masked))]

    def abort(self, reason: str) -> None:
        """The epoch is over for this client; all secrets are forgotten (S07)."""
        self._closed = reason
        self._keys = ()
        self._stock, self._kept, self._consent = {}, {}, None

    def __reduce__(self) -> NoReturn:
        raise LocalProtocolError(
            "a party is not copied or pickled: two copies could use the same mask, which would "
            "reveal a client's model; a client without its memory joins the next epoch"
        )

    def __repr__(self) -> str:
        return f"AsyncLightSecAggClient(client={self.client}, time={self._time})"

    # -- registration ------------------------------------------------------------------------

    def _take(self, message: Message) -> list[Output]:
        match message:
            case Opening():
                return self._on_opening(message)
            case Roster():
                return self._on_roster(message)
            case ShareBundle():
                return self._on_shares(message)
            case MaskComplete():
                return self._on_complete(message)
            case BufferAnnounced():
                return self._on_buffer(message)
            case BufferCertificate():
                return self._on_certificate(message)
            case UploadDropped():
                return self._on_dropped(message)
            case AbortRound():
                reason = shown(message.reason)
                self.abort(reason)
                return [RoundAborted(reason)]
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a client")

    def _on_opening(self, message: Opening) -> list[Output]:
        if self._settings is not None:
            if message.settings != self._settings.to_bytes() or self._advertise is None:
                raise RemoteProtocolError("the server opened two epochs at once with this client")
            if self._scheme is not None:
                return self._ignore(message)
            return [Send(SERVER, self._advertise)]
        self._settings = accept_opening(message, self._policy, self.ledger)
        self.ledger.count_change()
        fresh = draw_keys(self._settings, self.client, self._identity, self._entropy)
        self._keys, self._advertise = fresh.pairs, fresh.advertise
        return [*self.ledger.persisted(), Send(SERVER, self._advertise)]

    def _on_roster(self, message: Roster) -> list[Output]:
        if self._roster is not None and message == self._roster:
            return self._ignore(message)
        if self._settings is None or self._advertise is None or self._scheme is not None:
            raise RemoteProtocolError("one roster per epoch, after the keys are advertised")
        self._scheme = enter_roster(
            self._settings,
            self._policy,
            message,
            self.client,
            self._advertise,
            self._scheme_class,
        )
        self._roster = message
        ends = zip(self._scheme.round.members, message.checks, strict=False)
        self._chains = {owner: (-1, end) for owner, end in ends}
        return [NeedInput()]

    def _ignore(self, message: Message) -> list[Output]:
        self.late_messages[type(message).__name__] += 1
        return []

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise MaskAlreadyUsed(
                "this party was copied by a fork: the copy and the original could use the same "
                "mask, which would reveal a client's model; join the next epoch instead"
            )

    def _check_newest_epoch(self) -> None:
        """Go on no more once a newer epoch was opened with the same ledger (S06, S07)."""
        if self._settings is not None and self._settings.round != self.ledger.last_round:
            self.abort(f"this client has opened epoch {self.ledger.last_round}")

    def _registered(self) -> tuple[ClientScheme, tuple[AgreementKey, ...]]:
        self._check_process()
        self._check_newest_epoch()
        if self._closed is not None:
            raise LocalProtocolError(f"the epoch is over for client {self.client}: {self._closed}")
        if self._scheme is None:
            raise LocalProtocolError(f"client {self.client} is not registered yet")
        return self._scheme, self._keys

    # -- keeping shares ----------------------------------------------------------------------

    def _on_shares(self, message: ShareBundle) -> list[Output]:
        """Keep the peers' shares; one that does not open is simply not kept."""
        scheme = self._scheme
        if scheme is None:
            raise RemoteProtocolError("a share arrived before the roster")
        newest = dict(self._last_serial)
        for share in message.shares:
            check_address(scheme, share)
            if share.serial <= newest.get(share.owner, -1):
                raise RemoteProtocolError(
                    f"share {share.serial} of client {share.owner} is refused: serials only "
                    f"increase and {newest[share.owner]} was seen; a used share must not come back"
                )
            newest[share.owner] = share.serial
        for share in message.shares:
            try:
                opened = open_peer_share(scheme, self._keys[0], share)
            except CryptoError as error:
                self.refused_shares[share.owner] = f"share {share.serial}: {error}"
            else:
                self._keep(share.owner, share.serial, opened)
        return []

    def _on_complete(self, message: MaskComplete) -> list[Output]:
        """Report on the share of a mask that is kept here; a repeat gets the same again."""
        owner, serial = message.owner, message.serial
        if self._scheme is None or owner not in self._chains:
            raise RemoteProtocolError(f"no mask of client {owner} is to be checked here")
        last, known = self._chains[owner]
        if not is_in_chain(known, last, message.check_secret, serial):
            raise RemoteProtocolError(
                f"the server reveals another secret for mask {serial} of client {owner} than the "
                "roster binds it to: reports by different coefficients would reveal masks"
            )
        if serial > last:
            self._chains[owner] = (serial, message.check_secret)
        kept = self._kept.get(owner, {}).get(serial)
        if kept is None:  # it did not open, was lost, or is used
            return [Send(SERVER, MaskReport(owner, serial, ()))]
        if kept.report is None:
            held = {MaskRef(owner, serial): kept.share}
            values = self._scheme.report(held, message.check_secret)
            kept = replace(kept, report=MaskReport(owner, serial, tuple(map(int, values))))
            self._kept[owner][serial] = kept
        assert kept.report is not None  # noqa: S101 - made above
        return [Send(SERVER, kept.report)]

    def _on_dropped(self, message: UploadDropped) -> list[Output]:
        """Stop counting an upload; its mask stays used and its update spent."""
        if message.serial not in self._outstanding:
            return self._ignore(message)
        self._outstanding.remove(message.serial)
        return []

    def _keep(self, owner: int, serial: int, share: Share) -> None:
        """Keep the newest shares of each owner, this client included; memory has an end."""
        self._last_serial[owner] = serial
        kept = self._kept.setdefault(owner, {})
        kept[serial] = KeptShare(share)
        if len(kept) > self._buffering.stock:
            self._forget(owner, min(kept))

    def _forget(self, owner: int, serial: int) -> None:
        del self._kept[owner][serial]
        if owner == self.client:
            self._stock.pop(serial, None)
            self._outstanding.discard(serial)

    def _expire(self) -> None:
        for owner, kept in self._kept.items():
            for serial, share in list(kept.items()):
                if share.since is None:
                    kept[serial] = replace(share, since=self._time)
                elif self._time - share.since > self._buffering.share_lifetime:
                    self._forget(owner, serial)
        oldest = self._time - self._buffering.table.max_staleness
        past = {self._models.pop(version) for version in list(self._models) if version < oldest}
        for model in past - set(self._models.values()):
            self.ledger.close_model(model)

    # -- answering ---------------------------------------------------------------------------

    def _on_buffer(self, message: BufferAnnounced) -> list[Output]:
        if self._scheme is None:
            raise RemoteProtocolError("a buffer was announced before the roster")
        if self._consent is not None and message == self._consent.buffer:
            return self._reply(self._consent)
        if message.time <= self._time:
            raise RemoteProtocolError(
                f"a buffer of time {message.time} is refused: this client has consented to "
                f"another of time {self._time}; answering both would reveal a client's model"
            )
        round_ = self._scheme.round
        weights = buffer_weights(round_, self._buffering, message, self._policy.minimum)
        for tag in message.tags:
            check_tag(round_, self._policy.allow_list, tag)
        check_models(message, self._models)
        terms = buffer_terms(message, weights)
        if missing := self._scheme.missing(self._held(terms), terms):
            return [Send(SERVER, BufferRefusal(message.time, missing))]
        self.ledger.check_buffer((tag.owner, tag.model) for tag in message.tags)
        self._consent = self._burn(self._scheme, message, terms)
        return [*self.ledger.persisted(), *self._reply(self._consent)]

    def _held(self, terms: tuple[Term, ...]) -> dict[MaskRef, Share]:
        """Those shares of the terms' masks that are kept here."""
        kept = {term.ref: self._kept.get(term.ref.owner, {}) for term in terms}
        return {ref: of[ref.serial].share for ref, of in kept.items() if ref.serial in of}

    def _burn(
        self, scheme: ClientScheme, buffer: BufferAnnounced, terms: tuple[Term, ...]
    ) -> Consent:
        """Compute the answer and forget the shares, in one step."""
        answer = scheme.answer(self._held(terms), terms, scheme.round.members)
        if not isinstance(answer, AggregatedShare):
            raise AssertionError("a scheme with an asynchronous mode answers with a sum of shares")
        for tag in buffer.tags:
            self._forget(tag.owner, tag.serial)
            self._models[tag.version] = tag.model  # no later buffer may name another (S08)
        self._time = buffer.time
        self.ledger.consent_to_buffer((tag.owner, tag.model) for tag in buffer.tags)
        self._expire()
        self.ledger.count_change()
        malicious = scheme.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        statement = buffer_statement(scheme.round.context, buffer)
        signature = statement.sign(self._identity) if malicious else None
        return Consent(buffer, answer.vector, signature, released=not malicious)

    def _reply(self, consent: Consent) -> list[Output]:
        if consent.released:
            return [Send(SERVER, BufferAnswer(consent.buffer.time, consent.answer))]
        assert consent.signature is not None  # noqa: S101 - unreleased means signed
        return [Send(SERVER, BufferSignature(consent.buffer.time, consent.signature))]

    def _on_certificate(self, message: BufferCertificate) -> list[Output]:
        consent, scheme = self._consent, self._scheme
        if consent is None or scheme is None or message.time != consent.buffer.time:
            raise RemoteProtocolError(
                f"a certificate for time {message.time}, for which this client signed nothing"
            )
        if consent.released:
            return self._reply(consent)
        statement = buffer_statement(scheme.round.context, consent.buffer)
        check_certificate(scheme.round, self._policy.allow_list, statement, message.signatures)
        self._consent = Consent(consent.buffer, consent.answer, consent.signature, released=True)
        return self._reply(self._consent)
