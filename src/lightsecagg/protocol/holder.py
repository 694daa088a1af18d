"""A holder: keeps the shares of masks, each until a sum burns it, and answers for sums.

Theory of operation. A holder is in one state from the roster on (`kept_shares`):

    Holding    keeps shares, and has consented to no sum yet
    Signed     malicious-server mode: has signed the sum of time t; the answer waits
    Answered   has answered for the sum of time t; a repeated request gets the same again

From each of the three the next sum leads on, where the roster serves more than one; one that was
signed and never certified is lost. `TRANSITIONS` names, for each state, the messages that it takes,
beside those of registration.

Shares are kept under (owner, serial), the newest ones of each owner; memory has an end. Serials of
one owner only increase, so a share that was used and is delivered again is not kept. The holder
reports on each share when it comes, by coefficients that follow from the header of its mask (S46).

For a sum of time t it checks every tag, computes the weights itself, and *burns* the shares: the
answer is computed and the shares are forgotten in the same step in which the sum is signed (or,
honest-but-curious, answered). One sum per t, t strictly increasing. With the shares it burns
(owner, model): of one owner and one model, whatever versions the server gives it, one update is
summed and no other (S42). A round has one sum, of time 0: it reports on its shares when sharing is
closed, and consents for itself alone (`Ledger.consent`).

A share comes through the server, which is to blame for one that it should not have passed on; the
message is refused. Whether a share opens is between its owner and this holder: one that does not is
simply not held, and whoever asks for it later hears that it is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import CryptoError, ParameterError, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.buffers import (
    check_models,
    check_tag,
    sum_statement,
    sum_terms,
    sum_weights,
)
from lightsecagg.protocol.client_machine import Seat, State, on, table
from lightsecagg.protocol.interface import SERVER, Output, Send
from lightsecagg.protocol.kept_shares import (
    Answered,
    AnyHolding,
    Data,
    Holding,
    KeptShare,
    Part,
    R,
    Signed,
    become,
    dated,
    kept_for,
    with_share,
)
from lightsecagg.protocol.messages import (
    AggregatedShare,
    Certificate,
    Consent,
    Refusal,
    Report,
    Reports,
    ReportsWanted,
    SealedShare,
    ShareBundle,
    SumRequest,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.agreement import check_certificate
from lightsecagg.protocol.schemes.interface import ClientScheme, MaskRef, Term
from lightsecagg.protocol.share_exchange import Share, header_of, open_share
from lightsecagg.protocol.wire import Codec

Step = tuple[AnyHolding, list[Output]]
"""The state that follows, and what is said."""


def check_address(scheme: ClientScheme, share: SealedShare) -> None:
    """Refuse a share that is not from a peer to this client."""
    if share.recipient != scheme.client or share.owner not in scheme.peers:
        raise RemoteProtocolError(
            f"a share from client {share.owner} to client {share.recipient} "
            f"is not for client {scheme.client}"
        )


def open_peer_share(scheme: ClientScheme, key: AgreementKey | None, share: SealedShare) -> Share:
    """What a peer has sealed for this client; `CryptoError` if it is of no use."""
    if key is None:
        raise CryptoError("nothing is shared here, so there is no key that opens it")
    try:
        scheme.admit(share.kind, share.length)
        plaintext = open_share(scheme.round, key, scheme.client, share)
        scheme.check(share.kind, plaintext)
    except ParameterError as error:
        raise CryptoError(str(error)) from error
    return share.kind.value, plaintext


class Holder:
    """What a holder does in its states; see the module."""

    def __init__(
        self,
        identity: IdentityKey,
        policy: Policy,
        refused_shares: dict[int, str],
        late: Counter[str],
    ) -> None:
        """`refused_shares` and `late`: where it notes what did not open, or came too late."""
        self.parts: Mapping[bytes, bytes] = {}
        """Where `snapshot_apart` left its parts, by SHA-256: for the driver to set after a
        `restore`. Looked up when an answer takes them."""
        self._identity, self._policy = identity, policy
        self._refused_shares, self._late = refused_shares, late
        self._seat: Seat
        """Of the message that is being taken."""

    def take(self, seat: Seat, state: AnyHolding, message: object) -> Step | None:
        """Take a message of the table; None: it is not expected in this state."""
        self._seat = seat
        handler = TRANSITIONS.get((type(state), type(message)))
        return None if handler is None else handler(self, state, message)

    # -- keeping shares ----------------------------------------------------------------------

    def _on_shares(self, state: AnyHolding, message: ShareBundle) -> Step:
        """Keep the peers' shares and report on them; one that does not open is simply not kept.

        Nor is one that comes after a newer one of its owner: it may have been used. A server that
        cannot know what has arrived here sends it again in good faith, and gets the same report.
        """
        scheme, one_sum = self._seat.scheme, self._seat.scheme.settings.one_sum
        for share in message.shares:
            check_address(scheme, share)
        if self._seat.owners is not None:
            self._late["SealedShare"] += len(
                message.shares
            )  # sharing is closed: they count for nobody
            return state, []
        for share in message.shares:
            if share.serial <= state.last_serial.get(share.owner, -1):
                self._late["SealedShare"] += 1
                continue
            try:
                if one_sum and share.serial:
                    raise CryptoError("a synchronous round has one mask per client, serial 0")
                opened = open_peer_share(scheme, self._seat.key, share)
            except CryptoError as error:
                self._refused_shares[share.owner] = f"share {share.serial}: {error}"
            else:
                kept = KeptShare(opened, header=header_of(scheme.round, share))
                state = self._keep(state, share.owner, share.serial, kept)
        masks = [MaskRef(share.owner, share.serial) for share in message.shares]
        return state, [] if one_sum else self._report(scheme, state, masks)

    def keep_own(self, seat: Seat, state: AnyHolding, own: Mapping[int, KeptShare]) -> Step:
        """Keep this client's own shares of the masks that it has just drawn, by serial."""
        client = seat.scheme.client
        for serial, share in own.items():
            state = self._keep(state, client, serial, share)
        if seat.scheme.settings.one_sum:
            return state, []
        return state, self._report(seat.scheme, state, [MaskRef(client, s) for s in own])

    def lacks(self, seat: Seat, state: AnyHolding, owners: Sequence[int]) -> tuple[int, ...]:
        """Of a round: the peers whose shares are missing, if no sum could do with what is here."""
        if seat.scheme.suffices(state.kept, owners):
            return ()
        return tuple(owner for owner in seat.scheme.peers if owner not in state.kept)

    def report_all(self, seat: Seat, state: AnyHolding) -> list[Output]:
        """Of a round: whose shares are held here, and what is reported on them."""
        scheme = seat.scheme
        if not scheme.settings.traits.protected:
            return []
        reports = [
            self._report_on(scheme, MaskRef(owner, 0), state.kept[owner][0])
            for owner in scheme.round.members
            if 0 in state.kept.get(owner, {})
        ]
        return [Send(SERVER, Reports(tuple(reports)))]

    def _on_wanted(self, state: AnyHolding, message: ReportsWanted) -> Step:
        """Report on these masks again."""
        if self._seat.scheme.settings.one_sum:
            raise RemoteProtocolError("a round's reports are sent when sharing is closed")
        members = self._seat.scheme.round.members
        if strangers := [owner for owner, _ in message.masks if owner not in members]:
            raise RemoteProtocolError(f"clients {strangers} have no masks to report on")
        return state, self._report(
            self._seat.scheme, state, (MaskRef(*mask) for mask in message.masks)
        )

    def _report(
        self, scheme: ClientScheme, state: Holding, masks: Iterable[MaskRef]
    ) -> list[Output]:
        """What it reports on its shares; it is the same whenever it is asked (S46)."""
        if not scheme.settings.traits.checked:
            return []
        kept = [(ref, state.kept.get(ref.owner, {}).get(ref.serial)) for ref in masks]
        reports = tuple(self._report_on(scheme, ref, share) for ref, share in kept)
        return [Send(SERVER, Reports(reports))] if reports else []

    def _report_on(self, scheme: ClientScheme, ref: MaskRef, kept: KeptShare | None) -> Report:
        values = b""  # it did not open, was lost, or is used
        if kept is not None:
            said = scheme.report(ref, self._whole(kept), kept.header)
            values = scheme.settings.field.to_bytes(said)
        return Report(ref.owner, ref.serial, values)

    def _keep(self, state: R, owner: int, serial: int, share: KeptShare) -> R:
        """Keep the newest shares of each owner; memory has an end."""
        changed = with_share(state, owner, serial, share)
        changed = replace(changed, last_serial={**state.last_serial, owner: serial})
        buffering = self._policy.buffering
        if buffering is not None and len(changed.kept[owner]) > buffering.stock:
            return self.burn(changed, [MaskRef(owner, min(changed.kept[owner]))])
        return changed

    def burn(self, state: R, masks: Iterable[MaskRef]) -> R:
        """The shares of these masks are forgotten."""
        kept = dict(state.kept)
        for owner, serial in masks:
            if owner not in kept:
                continue  # SecAgg+: not of everybody in a sum there is a share here
            kept[owner] = {s: share for s, share in kept[owner].items() if s != serial}
        return replace(state, kept=kept)

    def _expire(self, state: R) -> R:
        """Forget the shares and models that are too old for any buffer that may still come."""
        if (buffering := self._policy.buffering) is None:
            return replace(state, kept={})  # there is no other sum
        lifetime = buffering.share_lifetime
        old = [
            MaskRef(owner, serial)
            for owner, of in state.kept.items()
            for serial, kept in of.items()
            if kept.since is not None and state.time - kept.since > lifetime
        ]
        state = self.burn(state, old)
        kept = {
            owner: {s: dated(share, state.time) for s, share in of.items()}
            for owner, of in state.kept.items()
        }
        oldest = state.time - buffering.table.max_staleness
        models = {version: model for version, model in state.models.items() if version >= oldest}
        for model in set(state.models.values()) - set(models.values()):
            self._seat.ledger.close_model(model)
        return replace(state, kept=kept, models=models)

    def _whole(self, kept: KeptShare) -> Share:
        kind, data = kept.share
        return kind, self._bytes(data)

    def _bytes(self, data: Data) -> bytes:
        return self.parts[data.digest] if isinstance(data, Part) else data

    # -- answering ---------------------------------------------------------------------------

    def _on_request(self, state: AnyHolding, message: SumRequest) -> Step:
        scheme = self._seat.scheme
        if message.time <= state.time:
            raise RemoteProtocolError(
                f"a sum of time {message.time} is refused: this client has consented to "
                f"another of time {state.time}; answering both would reveal a client's model"
            )
        weights = self._weights(message)
        if scheme.settings.one_sum:
            self._check_survivors(message)
        else:
            self._check_tags(state, message)
        terms = sum_terms(message, weights)
        held = self._shares_for(state, message)
        if missing := scheme.missing(held, terms):
            return state, [Send(SERVER, Refusal(message.time, missing))]
        self._account_for(message)
        return self._consent(scheme, state, message, terms, held)

    def _weights(self, message: SumRequest) -> tuple[int, ...]:
        return sum_weights(self._seat.scheme.round, message, self._policy.minimum)

    def _shares_for(self, state: AnyHolding, message: SumRequest) -> dict[MaskRef, Share]:
        """Of the masks in the sum; in a round also of the others, for whom SecAgg answers too."""
        if self._seat.scheme.settings.one_sum:
            found = {MaskRef(o, s): kept for o, of in state.kept.items() for s, kept in of.items()}
        else:
            found = kept_for(state, message.tags)
        return {ref: self._whole(kept) for ref, kept in found.items()}

    def _check_survivors(self, message: SumRequest) -> None:
        """S03: who is asked is in the sum, and everybody in it has shared."""
        seat, survivors = self._seat, message.survivors
        if not seat.update or seat.owners is None:
            raise RemoteProtocolError("a sum is asked for before this client has uploaded")
        if seat.scheme.client not in survivors:
            raise RemoteProtocolError("the survivor set lacks this client, which has uploaded")
        if strangers := sorted(set(survivors) - set(seat.owners)):
            raise RemoteProtocolError(f"survivors {strangers} had not shared their masks")
        seat.scheme.accept(survivors)

    def _check_tags(self, state: AnyHolding, message: SumRequest) -> None:
        round_ = self._seat.scheme.round
        settings = round_.settings
        for tag in message.tags:
            check_tag(round_, self._policy.allow_list, tag)
        if settings.buffering is None:
            raise AssertionError("a round has one model")
        crowd = settings.buffering.per_model(settings.parameters, self._policy.minimum)
        check_models(message, state.models, crowd)

    def _account_for(self, message: SumRequest) -> None:
        """What is consented to is in the ledger, and nothing that contradicts it before (S42)."""
        ledger, settings = self._seat.ledger, self._seat.scheme.settings
        if settings.one_sum:
            ledger.consent(settings.model, self._seat.update, message.survivors)
            return
        pairs = [(tag.owner, tag.model) for tag in message.tags]
        ledger.check_buffer(pairs)
        ledger.consent_to_buffer(pairs)

    def _on_another_request(self, state: Signed | Answered, message: SumRequest) -> Step:
        if message == state.buffer:
            return state, self._reply(state)
        return self._on_request(state, message)

    def _consent(
        self,
        scheme: ClientScheme,
        state: AnyHolding,
        request: SumRequest,
        terms: tuple[Term, ...],
        held: Mapping[MaskRef, Share],
    ) -> Step:
        """Compute the answer and forget the shares, in one step."""
        settings, owners = scheme.settings, self._seat.owners
        answer = scheme.answer(held, terms, scheme.round.members if owners is None else owners)
        if isinstance(answer, AggregatedShare):
            answer = AggregatedShare(answer.vector, request.time)
        burnt = self.burn(state, (term.ref for term in terms))
        # No later buffer may name another model of these versions (S08).
        models = {**state.models, **{tag.version: tag.model for tag in request.tags}}
        burnt = self._expire(replace(burnt, models=models, time=request.time))
        said = {"buffer": request, "answer": Codec(settings.group).encode(answer)}
        if settings.parameters.threat_model is ThreatModel.MALICIOUS_SERVER:
            signature = sum_statement(scheme.round.context, request).sign(self._identity)
            signed = become(Signed, burnt, **said, signature=signature)
            return signed, [
                *self._seat.ledger.persisted(),
                Send(SERVER, Consent(request.time, signature)),
            ]
        answered = become(Answered, burnt, **said)
        return answered, [*self._seat.ledger.persisted(), Send(SERVER, answer)]

    def _reply(self, state: Signed | Answered) -> list[Output]:
        """The same again."""
        if isinstance(state, Signed):
            return [Send(SERVER, Consent(state.time, state.signature))]
        codec = Codec(self._seat.scheme.settings.group)
        return [Send(SERVER, codec.decode(self._bytes(state.answer)))]

    def _on_certificate(self, state: Signed, message: Certificate) -> Step:
        self._check_time(state, message)
        round_ = self._seat.scheme.round
        statement = sum_statement(round_.context, state.buffer)
        check_certificate(round_, self._policy.allow_list, statement, message.signatures)
        answered = become(Answered, state, buffer=state.buffer, answer=state.answer)
        return answered, self._reply(answered)

    def _on_repeated_certificate(self, state: Answered, message: Certificate) -> Step:
        self._check_time(state, message)
        return state, self._reply(state)

    def _check_time(self, state: Signed | Answered, message: Certificate) -> None:
        if message.time != state.time:
            raise RemoteProtocolError(
                f"a certificate for time {message.time}, for which this client signed nothing"
            )


TRANSITIONS: Mapping[tuple[type[State], type], Callable[[Any, Any, Any], Step]] = table(
    get_args(AnyHolding),
    [
        on(Holding, ShareBundle, Holder._on_shares),
        on(Holding, ReportsWanted, Holder._on_wanted),
        on(Holding, SumRequest, Holder._on_request),
        on(Signed, SumRequest, Holder._on_another_request),
        on(Answered, SumRequest, Holder._on_another_request),
        on(Signed, Certificate, Holder._on_certificate),
        on(Answered, Certificate, Holder._on_repeated_certificate),
    ],
)
"""(state, message) -> handler. What is not here is refused."""
