"""A client in one epoch of the buffered-asynchronous mode, Section 4.2 and Appendix F.

Theory of operation. A client registers once per epoch (Opening, Advertise, Roster, as in a
synchronous round); C1 and everybody's evaluation points then hold for the whole epoch. From then
on four things go on at once:

* stock: the client draws masks, numbered by a serial, and shares them ahead of time (`restock`);
* work: whenever training is done, `set_input` masks the update with the oldest mask of the stock
  and uploads it with a signed tag;
* keeping: it keeps its peers' shares, and reports on them (`epoch_holder`);
* answering: for a buffer of time t it checks every tag, computes the weights itself, and *burns*
  the shares: the answer is computed and the shares are forgotten in the same step in which the
  buffer is signed (or, honest-but-curious, answered). One buffer per t, t strictly increasing.
  With the shares it burns (owner, model): of one owner and one model, whatever versions the
  server gives it, one update is summed and no other (S42). Signers know of their own epoch only,
  so an owner uploads from one model in one epoch.

So the states are those of registration (`client_machine`), and then of the answer alone:

    Registered   has consented to no buffer yet
    Signed       malicious-server mode: has signed the buffer of time t; the answer waits
    Answered     has answered for the buffer of time t; a repeated request gets the same again

From each of the three the next buffer leads on; one that was signed and never certified is lost.

A failed buffer is never formed again: its masks are burnt. An update is spent when it is uploaded,
because its buffer may be summed without its owner. A client whose process ends goes on from its
`snapshot`, and without one joins the next epoch; `client_machine` says what storing it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec
from msgspec.structs import replace

from lightsecagg.errors import LocalProtocolError, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffers import (
    buffer_statement,
    buffer_terms,
    buffer_weights,
    check_models,
    check_tag,
    hash_upload,
    sign_tag,
)
from lightsecagg.protocol.client_machine import (
    Advertised,
    Closed,
    Opened,
    State,
    Stored,
    Table,
    Waiting,
    on,
    table,
)
from lightsecagg.protocol.epoch_holder import EpochHolder
from lightsecagg.protocol.epoch_states import (
    Answered,
    AnyState,
    KeptShare,
    Registered,
    Signed,
    become,
    kept_for,
)
from lightsecagg.protocol.interface import SERVER, NeedInput, Output, Send, Update
from lightsecagg.protocol.messages import (
    AbortRound,
    AggregatedShare,
    BufferedUpload,
    Certificate,
    Consent,
    Opening,
    Refusal,
    ReportsWanted,
    Roster,
    SealedShare,
    ShareBundle,
    SumRequest,
    Tag,
    UploadDropped,
)
from lightsecagg.protocol.roles.agreement import check_certificate
from lightsecagg.protocol.roles.contributor import check_input, hide, send_shares
from lightsecagg.protocol.roles.registration import accept_opening
from lightsecagg.protocol.schemes.interface import ClientScheme, MaskRef, Term
from lightsecagg.protocol.share_exchange import Share, seal_shares


class _Snapshot(Stored, frozen=True):
    state: AnyState


class EpochClient(EpochHolder):
    """One client in one epoch; see the theory of operation and `interface`."""

    decoder = msgspec.msgpack.Decoder(_Snapshot)
    keeps_masks = True
    """Whether masks that are shared ahead stay in memory, so that their uploads need not expand
    them; for a driver to deny that ends this process before the upload."""

    # -- the driver's side -------------------------------------------------------------------

    @property
    def stock(self) -> int:
        """How many shared masks are ready; an upload takes one."""
        return len(self.state.stock) if isinstance(self.state, Registered) else 0

    @property
    def room(self) -> int:
        """How many more masks may be shared before one that is needed is too old.

        The server counts serials, those of masks included whose shares were lost on their way.
        """
        if not isinstance(self.state, Registered):
            return self._buffering.stock
        needed = [*self.state.stock, *self.state.outstanding]
        oldest = min(needed, default=self.state.next_serial)
        return self._buffering.stock - (self.state.next_serial - oldest)

    @property
    def is_registered(self) -> bool:
        """Whether it is on a roster: it can share masks and upload."""
        return isinstance(self.state, Registered)

    @property
    def serials(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of its masks, those that are ready, and those whose uploads wait for their buffer."""
        if not isinstance(self.state, Registered):
            return (), ()
        shared = self._settings(self.state).traits.protected
        return tuple(sorted(self.state.stock)) if shared else (), self.state.outstanding

    def discard(self, serials: Iterable[int]) -> None:
        """The shares of these masks were lost on their way: no upload is to be wasted on them."""
        state, gone = self._registered(), sorted(set(serials))
        if unknown := [serial for serial in gone if serial not in state.stock]:
            raise LocalProtocolError(f"masks {unknown} are not ready: there is nothing to discard")
        self._change(self._without(state, [MaskRef(self.client, serial) for serial in gone]))

    @property
    def time(self) -> int:
        """The time of the last buffer that this client has signed or answered for."""
        return self.state.time if isinstance(self.state, Registered) else -1

    def restock(self, count: int = 1) -> list[Output]:
        """Draw and share `count` more masks, ahead of time."""
        state = self._registered()
        if not 1 <= count <= self.room:
            raise LocalProtocolError(
                f"{self.stock} masks are ready and {len(state.outstanding)} in use; peers keep at "
                f"most {self._buffering.stock} per owner, so {count} more would push out old ones"
            )
        scheme, first = self._scheme(state), state.next_serial
        scheme.expands_ahead = self.keeps_masks
        stock, shares = dict(state.stock), list[SealedShare]()
        changed = replace(state, stock=stock, next_serial=first + count)
        mine: list[MaskRef] = []
        for serial in range(first, first + count):
            mask = scheme.prepare(serial, state.private_keys, self._entropy)
            stock[serial] = mask.secret
            if not scheme.settings.traits.protected:
                continue  # there is nothing to share, and nothing to keep
            self._keep_mask(serial, mask)
            key = self._key(state)
            sealed = seal_shares(scheme.round, key, self.client, mask.outgoing, serial)
            kept = KeptShare(mask.own, header=sealed.header)
            changed = self._keep(changed, self.client, serial, kept)
            shares += sealed.shares
            mine.append(MaskRef(self.client, serial))
        self._change(changed)
        return [*send_shares(shares), *(self._report(changed, mine) if mine else [])]

    def take_model(self, model: bytes) -> list[Output]:
        """Training from this model (`hash_model`) begins; refuse it once too often (S44).

        Whether an upload follows is an answer. A server that gives one model again and again, in
        epochs with ever other bounds, would have many of them about one update.
        """
        self._registered()
        self.ledger.count_opening(model, self._policy.max_openings)
        return [*self.ledger.persisted()]

    def set_input(self, update: Update, version: int, model: bytes) -> list[Output]:
        """Mask and upload an update that was trained from the model of time `version`.

        Takes the oldest mask of the stock; call `restock` first if there is none. The update is
        spent from now on.

        * `version`: the time of the global model, as the server gave it.
        * `model`: the hash of the model that was really trained from (`hash_model`). Compute it
          here: a server that may name any hash also escapes `max_attempts`.
        """
        state = self._registered()
        scheme = self._scheme(state)
        settings = scheme.settings
        check_input(settings, update)
        if not state.stock:
            raise LocalProtocolError("no shared mask is ready; call restock first")
        fingerprint = self.ledger.fingerprint(update)
        self.ledger.check_unspent(fingerprint)
        self.ledger.check_attempts(model, self._policy.max_attempts)
        self.ledger.check_epoch(model)
        if version < 0 or state.models.get(version, model) != model:
            raise RemoteProtocolError(
                f"the server gave this client two different models of version {version}, or "
                "another one than its peers have trained from"
            )
        serial = min(state.stock)
        commitment = self.ledger.commitment(fingerprint, update.samples, settings.reading)
        mask = self._take_mask(scheme, serial, state.stock[serial], scheme.round.members)
        masked = hide(settings, update, self.ledger.rounding_seed(model, commitment), mask)
        digest, header = hash_upload(settings.group, masked), b""
        if settings.traits.protected:
            self._bind_upload(scheme, serial, digest)
            header = state.kept[self.client][serial].header
        self.ledger.count_upload(model)
        self.ledger.spend(fingerprint)
        self._change(
            replace(
                state,
                stock={s: secret for s, secret in state.stock.items() if s != serial},
                outstanding=(*state.outstanding, serial),
                models={**state.models, version: model},
            )
        )
        context = scheme.round.context
        of = Tag(self.client, serial, header, version, model, digest, b"")
        tag = sign_tag(self._identity, context, of)
        return [*self.ledger.persisted(), Send(SERVER, BufferedUpload(tag, masked))]

    def _registered(self) -> Registered:
        self._check_process()
        self._check_newest()
        if isinstance(self.state, Closed):
            reason = self.state.reason
            raise LocalProtocolError(f"the epoch is over for client {self.client}: {reason}")
        if not isinstance(self.state, Registered):
            raise LocalProtocolError(f"client {self.client} is not registered yet")
        return self.state

    # -- registration ------------------------------------------------------------------------

    def _on_opening(self, state: Waiting, message: Opening) -> list[Output]:
        settings = accept_opening(message, self._policy, self.ledger)
        self.state = advertised = self._advertise(message, settings)
        return [*self.ledger.persisted(), Send(SERVER, advertised.advertise)]

    def _on_roster(self, state: Advertised, message: Roster) -> list[Output]:
        self._enter_roster(state, message)
        self.state = Registered(
            settings=state.settings,
            roster=message,
            private_keys=state.private_keys,
            next_serial=0,
            stock={},
            outstanding=(),
            kept={},
            last_serial={},
            models={},
            time=-1,
        )
        return [NeedInput()]

    # -- answering ---------------------------------------------------------------------------

    def _on_buffer(self, state: Registered, message: SumRequest) -> list[Output]:
        if message.time <= state.time:
            raise RemoteProtocolError(
                f"a buffer of time {message.time} is refused: this client has consented to "
                f"another of time {state.time}; answering both would reveal a client's model"
            )
        scheme = self._scheme(state)
        weights = buffer_weights(scheme.round, self._buffering, message, self._policy.minimum)
        for tag in message.tags:
            check_tag(scheme.round, self._policy.allow_list, tag)
        crowd = self._buffering.per_model(scheme.settings.parameters, self._policy.minimum)
        check_models(message, state.models, crowd)
        terms = buffer_terms(message, weights)
        held = {ref: self._whole(kept) for ref, kept in kept_for(state, message.tags).items()}
        if missing := scheme.missing(held, terms):
            return [Send(SERVER, Refusal(message.time, missing))]
        self.ledger.check_buffer((tag.owner, tag.model) for tag in message.tags)
        return self._consent(scheme, state, message, terms, held)

    def _on_another_buffer(self, state: Signed | Answered, message: SumRequest) -> list[Output]:
        return self._reply(state) if message == state.buffer else self._on_buffer(state, message)

    def _consent(
        self,
        scheme: ClientScheme,
        state: Registered,
        buffer: SumRequest,
        terms: tuple[Term, ...],
        held: Mapping[MaskRef, Share],
    ) -> list[Output]:
        """Compute the answer and forget the shares, in one step."""
        answer = scheme.answer(held, terms, scheme.round.members)
        if not isinstance(answer, AggregatedShare):
            raise AssertionError("a scheme with an asynchronous mode answers with a sum of shares")
        burnt = self._without(state, (term.ref for term in terms))
        # No later buffer may name another model of these versions (S08).
        models = {**state.models, **{tag.version: tag.model for tag in buffer.tags}}
        self.ledger.consent_to_buffer((tag.owner, tag.model) for tag in buffer.tags)
        burnt = self._expire(replace(burnt, models=models, time=buffer.time))
        said = {"buffer": buffer, "answer": scheme.settings.field.to_bytes(answer.vector)}
        if scheme.settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER:
            statement = buffer_statement(scheme.round.context, buffer)
            signature = statement.sign(self._identity)
            consented: Signed | Answered = become(Signed, burnt, **said, signature=signature)
        else:
            consented = become(Answered, burnt, **said)
        self.state = consented
        return [*self.ledger.persisted(), *self._reply(consented)]

    def _reply(self, state: Signed | Answered) -> list[Output]:
        if isinstance(state, Signed):
            return [Send(SERVER, Consent(state.time, state.signature))]
        field = self._settings(state).field
        answer = self._bytes(state.answer)
        vector = field.from_bytes(answer, len(answer) // 4)
        return [Send(SERVER, AggregatedShare(vector, state.time))]

    def _on_certificate(self, state: Signed, message: Certificate) -> list[Output]:
        self._check_time(state, message)
        round_ = self._scheme(state).round
        statement = buffer_statement(round_.context, state.buffer)
        check_certificate(round_, self._policy.allow_list, statement, message.signatures)
        self.state = answered = become(Answered, state, buffer=state.buffer, answer=state.answer)
        return self._reply(answered)

    def _on_repeated_certificate(self, state: Answered, message: Certificate) -> list[Output]:
        self._check_time(state, message)
        return self._reply(state)

    def _check_time(self, state: Signed | Answered, message: Certificate) -> None:
        if message.time != state.time:
            raise RemoteProtocolError(
                f"a certificate for time {message.time}, for which this client signed nothing"
            )

    def _change(self, state: Registered) -> None:
        """The driver's doing, not a message's."""
        self.state = state
        self.ledger.count_change()


TRANSITIONS: Table = table(
    get_args(AnyState),
    [
        on(State, AbortRound, EpochClient._on_abort),
        on(Waiting, Opening, EpochClient._on_opening),
        on(Opened, Opening, EpochClient._on_repeated_opening),
        on(Advertised, Roster, EpochClient._on_roster),
        on(Registered, Roster, EpochClient._on_repeated_roster),
        on(Registered, ShareBundle, EpochClient._on_shares),
        on(Registered, ReportsWanted, EpochClient._on_wanted),
        on(Waiting, UploadDropped, EpochClient._on_late),
        on(Advertised, UploadDropped, EpochClient._on_late),
        on(Registered, UploadDropped, EpochClient._on_dropped),
        on(Registered, SumRequest, EpochClient._on_buffer),
        on(Signed, SumRequest, EpochClient._on_another_buffer),
        on(Answered, SumRequest, EpochClient._on_another_buffer),
        on(Signed, Certificate, EpochClient._on_certificate),
        on(Answered, Certificate, EpochClient._on_repeated_certificate),
    ],
)
"""(state, message) -> handler. What is not here is refused."""

EpochClient.transitions = TRANSITIONS
