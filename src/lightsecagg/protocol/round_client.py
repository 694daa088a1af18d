"""A client in one synchronous round, whatever the protocol.

Theory of operation. A client is always in one of the states below (`client_machine`). The table
`TRANSITIONS` names, for each state, the messages that it takes; every other message is refused
and changes nothing. A repeated message is answered with the same bytes or ignored, a late one is
ignored and counted, and one that contradicts an earlier one is refused.

    Waiting      knows its identity, its policy and its ledger
    Advertised   has drawn fresh keys and signed them
    Sharing      has drawn its mask and sent its shares; collects its peers' shares and its input
    Uploaded     has sent its masked update; the mask is gone
    Signed       malicious-server mode: has consented to U1; the update is spent
    Answered     has answered once; keeps the answer, because a repeated request gets it again
    Closed       the round is over for this client; all secrets are gone

Protocols differ in what they share, how they mask and what they answer: that is the business of the
scheme (`schemes.interface`) that the client holds from the roster on. Plain summation has no roster
and nothing to share: its clients go from Waiting to the end of Sharing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import CryptoError, LocalProtocolError, MaskAlreadyUsed, RemoteProtocolError
from lightsecagg.params import ThreatModel
from lightsecagg.protocol.client_machine import (
    Advertised,
    ClientMachine,
    Closed,
    Fixed,
    Opened,
    State,
    Stored,
    Table,
    Waiting,
    on,
    table,
)
from lightsecagg.protocol.contributor import (
    ExpandedMasks,
    bind_upload,
    check_input,
    hide,
    send_shares,
)
from lightsecagg.protocol.holder import check_address, open_peer_share
from lightsecagg.protocol.interface import (
    SERVER,
    NeedInput,
    Output,
    Phase,
    RoundAborted,
    Send,
    Update,
)
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
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
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.agreement import (
    ROUND,
    check_certificate,
    check_of_round,
    survivor_statement,
)
from lightsecagg.protocol.roles.registration import accept_opening
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.interface import ClientScheme, MaskRef, Term
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import Share, header_of, seal_shares
from lightsecagg.protocol.wire import Codec


class Sharing(Fixed, frozen=True):
    """Shares are sent; peers' shares and the input come in."""

    sealing_key: bytes
    secret: bytes
    """What the scheme needs to mask."""
    held: dict[int, Share]
    """Owner -> share, the own one included."""
    reports: dict[int, bytes]
    """Owner -> what is reported on its share."""
    pending: tuple[str, bytes, int] | None = None
    """The update, until sharing is closed: dtype, bytes, samples."""
    owners: tuple[int, ...] | None = None
    """Whose shares are complete, once the server has said so."""


class Uploaded(Fixed, frozen=True):
    """The masked update is sent."""

    held: dict[int, Share]
    owners: tuple[int, ...]
    fingerprint: bytes


class Signed(Fixed, frozen=True):
    """The client has consented to these survivors; it will never consent to others."""

    held: dict[int, Share]
    owners: tuple[int, ...]
    survivors: tuple[int, ...]
    signature: bytes


class Answered(Fixed, frozen=True):
    """The client has answered; only the answer is left."""

    survivors: tuple[int, ...]
    answer: bytes
    signature: bytes
    """Consent to the survivors, to be repeated; empty where none was asked for."""


AnyState = Waiting | Advertised | Sharing | Uploaded | Signed | Answered | Closed


class _Snapshot(Stored, frozen=True):
    state: AnyState


class RoundClient(ClientMachine[AnyState]):
    """One client in one round; see the module's theory of operation and `interface`."""

    mode = "round"
    decoder = msgspec.msgpack.Decoder(_Snapshot)
    _fingerprint = b""
    """Of the pending update, unless that came with a snapshot: hashing takes as long as masking."""

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        ledger: Ledger,
        entropy: Entropy = system_entropy,
    ) -> None:
        super().__init__(client, identity, policy, ledger, entropy)
        self._masks = ExpandedMasks()

    # -- the driver's side -------------------------------------------------------------------

    def set_input(self, update: Update, model: bytes | None = None) -> list[Output]:
        """Take the update that `NeedInput` asked for; see `ClientParty.set_input`."""
        self._check_process()
        state = self.state
        if not isinstance(state, Sharing):
            raise LocalProtocolError(
                f"client {self.client} takes its input between NeedInput and the upload, "
                f"not while {state!r}"
            )
        if state.pending is not None:
            raise MaskAlreadyUsed(
                "the input is already set: masking a second one with the same mask would reveal "
                "their difference"
            )
        self._check_newest()
        settings = self._settings(state)
        self._check_model(settings, model)
        check_input(settings, update)  # now: a failure at upload time would be the server's
        self._fingerprint = fingerprint = self.ledger.fingerprint(update)
        commitment = self.ledger.commitment(fingerprint, update.samples, settings.reading)
        self.ledger.check_update(settings.model, fingerprint, commitment)
        vector = np.ascontiguousarray(update.vector)
        pending = (vector.dtype.str, vector.tobytes(), update.samples)
        self.ledger.count_change()
        return self._upload_if_ready(replace(state, pending=pending))

    def _check_model(self, settings: Settings, model: bytes | None) -> None:
        """Mask nothing that was trained from another model than the round names (S08, S42)."""
        if model is None and self._policy.model is None:
            raise LocalProtocolError(
                "the policy leaves the model open: hand over the hash of the one that was trained "
                "from, set_input(update, model=hash_model(...))"
            )
        if model is not None and model != settings.model:
            raise RemoteProtocolError(
                "the server gave this client another global model than the one that it names to "
                "everybody: its update could be told apart in the sum, and is not masked"
            )

    @property
    def stored(self) -> int:
        """See `ClientParty.stored`; an input that waits in the same place is not counted."""
        state = self.state
        if not isinstance(state, Sharing | Uploaded | Signed):
            return 0
        secret = len(state.secret) if isinstance(state, Sharing) else 0
        secret += self._masks.nbytes
        return secret + sum(len(share) for _, share in state.held.values())

    @property
    def upload_is_due(self) -> bool:
        """Whether the upload would leave now if the input were set.

        A driver that has no input for this round withdraws here and no sooner: at any other
        moment its silence or its words would be about the input (S44).
        """
        return isinstance(self.state, Sharing) and self.state.owners is not None

    # -- transitions -------------------------------------------------------------------------

    def _on_opening(self, state: Waiting, message: Opening) -> list[Output]:
        settings = accept_opening(message, self._policy, self.ledger)
        if Phase.ADVERTISE not in settings.traits.phases:
            return self._skip_sharing(message)
        self.state = advertised = self._advertise(message, settings)
        return [*self.ledger.persisted(), Send(SERVER, advertised.advertise)]

    def _skip_sharing(self, message: Opening) -> list[Output]:
        """A roster of nobody: there is nobody to share with, and sharing is closed already."""
        self.state = Sharing(
            settings=message.settings,
            roster=Roster(()),
            sealing_key=b"",
            secret=b"",
            held={},
            reports={},
            owners=(),
        )
        return [*self.ledger.persisted(), NeedInput()]

    def _on_roster(self, state: Advertised, message: Roster) -> list[Output]:
        scheme, key = self._enter_roster(state, message), self._sealing_key(state.private_keys[0])
        mask = scheme.prepare(0, state.private_keys, self._entropy)
        sealed = seal_shares(scheme.round, key, self.client, mask.outgoing)
        self._masks.keep(0, mask)
        self.state = Sharing(
            settings=state.settings,
            roster=message,
            sealing_key=state.private_keys[0],
            secret=mask.secret,
            held={self.client: mask.own},
            reports={self.client: self._report(scheme, self.client, mask.own, sealed.header)},
        )
        return [*send_shares(sealed.shares), NeedInput()]

    def _report(self, scheme: ClientScheme, owner: int, share: Share, header: bytes) -> bytes:
        return scheme.settings.field.to_bytes(scheme.report(MaskRef(owner), share, header))

    def _on_shares(self, state: Sharing, message: ShareBundle) -> list[Output]:
        """Open the peers' shares; one that does not open is simply not held."""
        scheme = self._scheme(state)
        if state.owners is not None:
            return self._on_late(state, message)
        for share in message.shares:
            check_address(scheme, share)
        if all(share.owner in state.held for share in message.shares):
            return self._on_late(state, message)
        held, reports = dict(state.held), dict(state.reports)
        for share in message.shares:
            owner = share.owner
            if owner in held:
                continue
            try:
                if share.serial != 0:
                    raise CryptoError("a synchronous round has one mask per client, serial 0")
                key = self._sealing_key(state.sealing_key)
                held[owner] = open_peer_share(scheme, key, share)
            except CryptoError as error:
                self.refused_shares[owner] = str(error)
            else:
                header = header_of(scheme.round, share)
                reports[owner] = self._report(scheme, owner, held[owner], header)
        if len(held) > len(state.held):
            self.state = replace(state, held=held, reports=reports)
        return []

    def _on_shares_closed(self, state: Sharing, message: SharesClosed) -> list[Output]:
        scheme = self._scheme(state)
        if state.owners is not None:
            return self._on_repeated_close(state, message)
        _check_ids(message.owners, scheme.round, "owner list")
        if self.client not in message.owners:
            raise RemoteProtocolError("the owner list lacks this client, whose shares were sent")
        missing = [owner for owner in scheme.peers if owner not in state.held]
        if not scheme.suffices(state.held, message.owners):
            reason = f"the shares of {len(missing)} peers are missing; too few are held here"
            self._forget(reason)
            return [Send(SERVER, Refusal(ROUND, tuple(missing))), RoundAborted(reason)]
        return self._upload_if_ready(replace(state, owners=message.owners))

    def _on_repeated_close(
        self, state: Sharing | Uploaded | Signed, message: SharesClosed
    ) -> list[Output]:
        """A server that resumes after a crash says again what it had said."""
        if message.owners != state.owners:
            raise RemoteProtocolError("the server closed sharing twice, with different owners")
        return self._on_late(state, message)

    def _upload_if_ready(self, state: Sharing) -> list[Output]:
        self.state = state
        if state.pending is None or state.owners is None:
            return []
        scheme = self._scheme(state)
        settings = scheme.settings
        dtype, data, samples = state.pending
        update = Update(np.frombuffer(data, dtype=dtype), samples)
        fingerprint = self._fingerprint or self.ledger.fingerprint(update)
        commitment = self.ledger.commitment(fingerprint, samples, settings.reading)
        seed = self.ledger.rounding_seed(settings.model, commitment)
        mask = self._masks.take(scheme, 0, state.secret, state.owners)
        masked = hide(settings, update, seed, mask)
        held = _in_roster_order(scheme.round, state.held)
        reports = b"".join(state.reports[owner] for owner in held)
        if settings.traits.protected:
            digest = hashlib.sha256(settings.group.to_buffer(masked)).digest()
            bind_upload(self.ledger, scheme.round.context, 0, digest, self.abort)
        self.ledger.count_upload(settings.model, commitment, fingerprint)
        self._key_cache = None
        self.state = Uploaded(
            settings=state.settings,
            roster=state.roster,
            held=state.held,
            owners=state.owners,
            fingerprint=fingerprint,
        )
        elements = settings.field.from_bytes(reports, len(reports) // 4)
        upload = MaskedUpload(_bitmap(scheme.round, held), masked, elements)
        return [*self.ledger.persisted(), Send(SERVER, upload)]

    def _on_survivors(self, state: Uploaded, message: SumRequest) -> list[Output]:
        check_of_round(message)
        scheme = self._scheme(state)
        round_, survivors = scheme.round, message.survivors
        self._check_survivors(round_, state.owners, survivors)
        scheme.accept(survivors)
        missing = scheme.missing(_by_mask(state.held), _terms(survivors))
        if missing:
            return [Send(SERVER, Refusal(ROUND, missing))]
        self.ledger.consent(round_.settings.model, state.fingerprint, survivors)
        if round_.settings.parameters.threat_model is ThreatModel.HONEST_BUT_CURIOUS:
            return [*self.ledger.persisted(), *self._answer_once(state, survivors)]
        signature = survivor_statement(round_.context, survivors).sign(self._identity)
        self.state = Signed(
            settings=state.settings,
            roster=state.roster,
            held=state.held,
            owners=state.owners,
            survivors=survivors,
            signature=signature,
        )
        return [*self.ledger.persisted(), Send(SERVER, Consent(ROUND, signature))]

    def _on_repeated_survivors(self, state: Signed | Answered, message: SumRequest) -> list[Output]:
        if message.survivors != state.survivors:
            raise RemoteProtocolError(
                "a second, different survivor set in one round is refused: answering both would "
                "reveal a client's model"
            )
        if state.signature:
            return [Send(SERVER, Consent(ROUND, state.signature))]
        if isinstance(state, Signed):
            raise AssertionError("a signed state holds its signature")
        return [Send(SERVER, self._answer_again(state))]

    def _on_certificate(self, state: Signed, message: Certificate) -> list[Output]:
        check_of_round(message)
        round_ = self._scheme(state).round
        statement = survivor_statement(round_.context, state.survivors)
        check_certificate(round_, self._policy.allow_list, statement, message.signatures)
        return self._answer_once(state, state.survivors)

    def _on_repeated_certificate(self, state: Answered, message: Certificate) -> list[Output]:
        check_of_round(message)
        return [Send(SERVER, self._answer_again(state))]

    def _answer_once(self, state: Uploaded | Signed, survivors: tuple[int, ...]) -> list[Output]:
        scheme = self._scheme(state)
        answer = scheme.answer(_by_mask(state.held), _terms(survivors), state.owners)
        packed = Codec(scheme.settings.group).encode(answer)
        signature = state.signature if isinstance(state, Signed) else b""
        self.state = Answered(state.settings, state.roster, survivors, packed, signature)
        return [Send(SERVER, answer)]

    def _answer_again(self, state: Answered) -> Message:
        return Codec(self._settings(state).group).decode(state.answer)

    # -- helpers -----------------------------------------------------------------------------

    def _forget(self, reason: str) -> None:
        super()._forget(reason)
        self._masks.keep_only(())

    def _check_survivors(
        self, round_: Round, owners: tuple[int, ...], survivors: tuple[int, ...]
    ) -> None:
        """S03, except for missing shares, which are answered with a refusal."""
        _check_ids(survivors, round_, "survivor set")
        if self.client not in survivors:
            raise RemoteProtocolError("the survivor set lacks this client, which has uploaded")
        least = round_.settings.minimum
        if len(survivors) < least:
            raise RemoteProtocolError(
                f"a survivor set of {len(survivors)} is refused: a sum over fewer than "
                f"{least} clients does not hide its members"
            )
        if strangers := sorted(set(survivors) - set(owners)):
            raise RemoteProtocolError(f"survivors {strangers} had not shared their masks")


TRANSITIONS: Table = table(
    get_args(AnyState),
    [
        on(State, AbortRound, RoundClient._on_abort),
        on(Waiting, Opening, RoundClient._on_opening),
        on(Opened, Opening, RoundClient._on_repeated_opening),
        on(Advertised, Roster, RoundClient._on_roster),
        on(Fixed, Roster, RoundClient._on_repeated_roster),
        on(Sharing, ShareBundle, RoundClient._on_shares),
        on(Fixed, ShareBundle, RoundClient._on_late),
        on(Sharing, SharesClosed, RoundClient._on_shares_closed),
        on(Uploaded, SharesClosed, RoundClient._on_repeated_close),
        on(Signed, SharesClosed, RoundClient._on_repeated_close),
        on(Answered, SharesClosed, RoundClient._on_late),
        on(Uploaded, SumRequest, RoundClient._on_survivors),
        on(Signed, SumRequest, RoundClient._on_repeated_survivors),
        on(Answered, SumRequest, RoundClient._on_repeated_survivors),
        on(Signed, Certificate, RoundClient._on_certificate),
        on(Answered, Certificate, RoundClient._on_repeated_certificate),
    ],
)
"""(state, message) -> handler. What is not here is refused."""

RoundClient.transitions = TRANSITIONS


def _check_ids(ids: tuple[int, ...], round_: Round, what: str) -> None:
    if len(set(ids)) != len(ids):
        raise RemoteProtocolError(f"the {what} names a client twice")
    if strangers := [client for client in ids if client not in round_.positions]:
        raise RemoteProtocolError(f"the {what} names {strangers}, who are not on the roster")


def _bitmap(round_: Round, held: Mapping[int, Share]) -> bytes:
    bits = np.zeros(len(round_.members), dtype=np.uint8)
    bits[[round_.positions[owner] for owner in held]] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _in_roster_order(round_: Round, held: Mapping[int, Share]) -> dict[int, Share]:
    return {owner: held[owner] for owner in round_.members if owner in held}


def _by_mask(held: Mapping[int, Share]) -> dict[MaskRef, Share]:
    return {MaskRef(owner): share for owner, share in held.items()}


def _terms(survivors: tuple[int, ...]) -> tuple[Term, ...]:
    return tuple(Term(MaskRef(client)) for client in survivors)
