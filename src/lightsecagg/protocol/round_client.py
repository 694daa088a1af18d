"""A client in one synchronous round, whatever the protocol.

Theory of operation. A client is always in one of the states below; each is frozen and holds only
what later steps still need, so secrets leave with the transition that used them. The table
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

import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self, TypeVar, get_args

import msgspec
import numpy as np

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash
from lightsecagg.errors import (
    CryptoError,
    DecodeError,
    FieldError,
    LocalProtocolError,
    MaskAlreadyUsed,
    ParameterError,
    RemoteProtocolError,
)
from lightsecagg.foreign import decode, shown
from lightsecagg.params import ThreatModel
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
    Advertise,
    Certificate,
    MaskedUpload,
    Message,
    Opening,
    Refusal,
    Roster,
    ShareBundle,
    SharesClosed,
    SurvivorSet,
    SurvivorSignature,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.agreement import check_certificate, survivor_statement
from lightsecagg.protocol.roles.contributor import (
    check_input,
    hide,
    seal_shares,
    send_shares,
)
from lightsecagg.protocol.roles.holder import check_address, open_peer_share
from lightsecagg.protocol.roles.registration import accept_opening, draw_keys, enter_roster
from lightsecagg.protocol.roster import Round, fix_round
from lightsecagg.protocol.schemes.interface import ClientScheme, MaskRef, Term
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import Share
from lightsecagg.protocol.wire import Codec


class State(msgspec.Struct, frozen=True, tag=True):
    """Base of the states; its `repr` shows no field, because most of them are secret."""

    def __repr__(self) -> str:
        return type(self).__name__

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []  # rich, which draws tracebacks with local variables, asks for this instead


S = TypeVar("S", bound=State)


class Waiting(State, frozen=True):
    """Nothing has happened yet."""


class Advertised(State, frozen=True):
    """Fresh keys are advertised."""

    settings: bytes
    private_keys: tuple[bytes, ...]
    advertise: Advertise


class Sharing(State, frozen=True):
    """Shares are sent; peers' shares and the input come in."""

    settings: bytes
    roster: Roster
    sealing_key: bytes
    secret: bytes
    """What the scheme needs to mask."""
    held: dict[int, Share]
    """Owner -> share, the own one included."""
    pending: tuple[str, bytes, int] | None = None
    """The update, until sharing is closed: dtype, bytes, samples."""
    owners: tuple[int, ...] | None = None
    """Whose shares are complete, once the server has said so."""
    check_secret: bytes = b""
    """By which the shares are to be reported on; it came with the owners."""


class Uploaded(State, frozen=True):
    """The masked update is sent."""

    settings: bytes
    roster: Roster
    held: dict[int, Share]
    owners: tuple[int, ...]
    fingerprint: bytes


class Signed(State, frozen=True):
    """The client has consented to these survivors; it will never consent to others."""

    settings: bytes
    roster: Roster
    held: dict[int, Share]
    owners: tuple[int, ...]
    survivors: tuple[int, ...]
    signature: bytes


class Answered(State, frozen=True):
    """The client has answered; only the answer is left."""

    settings: bytes
    roster: Roster
    survivors: tuple[int, ...]
    answer: bytes
    signature: bytes
    """Consent to the survivors, to be repeated; empty where none was asked for."""


class Closed(State, frozen=True):
    """The round is over for this client."""

    reason: str


AnyState = Waiting | Advertised | Sharing | Uploaded | Signed | Answered | Closed

# (state, message) -> method. What is not here is refused.
TRANSITIONS: dict[tuple[type, type], str] = {
    (Waiting, Opening): "_on_opening",
    (Advertised, Opening): "_on_repeated_opening",
    (Advertised, Roster): "_on_roster",
    (Sharing, Opening): "_on_repeated_opening",
    (Sharing, Roster): "_on_repeated_roster",
    (Sharing, ShareBundle): "_on_shares",
    (Sharing, SharesClosed): "_on_shares_closed",
    (Uploaded, Opening): "_on_repeated_opening",
    (Uploaded, Roster): "_on_repeated_roster",
    (Uploaded, ShareBundle): "_on_late",
    (Uploaded, SharesClosed): "_on_repeated_close",
    (Uploaded, SurvivorSet): "_on_survivors",
    (Signed, Opening): "_on_repeated_opening",
    (Signed, Roster): "_on_repeated_roster",
    (Signed, ShareBundle): "_on_late",
    (Signed, SharesClosed): "_on_repeated_close",
    (Signed, SurvivorSet): "_on_repeated_survivors",
    (Signed, Certificate): "_on_certificate",
    (Answered, Opening): "_on_repeated_opening",
    (Answered, Roster): "_on_repeated_roster",
    (Answered, ShareBundle): "_on_late",
    (Answered, SharesClosed): "_on_late",
    (Answered, SurvivorSet): "_on_repeated_survivors",
    (Answered, Certificate): "_on_repeated_certificate",
    **{(state, AbortRound): "_on_abort" for state in get_args(AnyState)},
}


class _Snapshot(msgspec.Struct, frozen=True):
    protocol: str
    client: int
    state: AnyState
    ledger: bytes

    def __repr__(self) -> str:
        return f"_Snapshot(client={self.client}, state={self.state!r})"


_decoder = msgspec.msgpack.Decoder(_Snapshot)


class RoundClient:
    """One client in one round; see the module's theory of operation and `interface`."""

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        ledger: Ledger,
        entropy: Entropy = system_entropy,
    ) -> None:
        """`ledger` is this client's memory of the session, the same one in every round (S06)."""
        if client not in policy.allow_list or policy.allow_list[client] != identity.public:
            raise ParameterError(f"client {client} is not on the allow-list with this identity")
        self._scheme_class = scheme_of(*policy.protocols).client
        self.client = client
        self.state: AnyState = Waiting()
        self.ledger = ledger
        self.refused_shares: dict[int, str] = {}
        """Owners whose shares did not open, and why."""
        self.late_messages: Counter[str] = Counter()
        """Messages that came again or too late and were ignored, by type."""
        self._process = os.getpid()
        self._identity = identity
        self._policy = policy
        self._entropy = entropy
        self._settings_cache: tuple[bytes, Settings] | None = None
        self._scheme_cache: ClientScheme | None = None
        self._key_cache: AgreementKey | None = None

    # -- the driver's side -------------------------------------------------------------------

    def receive(self, sender: int, message: Message) -> list[Output]:
        """Take a message; see `ClientParty.receive`."""
        if sender != SERVER:
            raise RemoteProtocolError(f"client {self.client} only listens to the server")
        self._check_process()
        before = self.state
        method = TRANSITIONS.get((type(before), type(message)))
        if method is None:
            raise RemoteProtocolError(self._unexpected(message))
        if not isinstance(message, AbortRound):
            self._check_newest_round()
        handler: Callable[[Message], list[Output]] = getattr(self, method)
        try:
            outputs = handler(message)
        except (CryptoError, DecodeError, FieldError, ParameterError) as error:
            self.state = before
            raise RemoteProtocolError(f"{type(message).__name__} refused: {error}") from error
        if self.state is not before:
            self.ledger.count_change()
        return outputs

    def set_input(self, update: Update) -> list[Output]:
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
        self._check_newest_round()
        settings = self._settings(state.settings)
        check_input(settings, update)  # now: a failure at upload time would be the server's
        self.ledger.check_update(settings.model, *self._committed(settings, update))
        vector = np.ascontiguousarray(update.vector)
        pending = (vector.dtype.str, vector.tobytes(), update.samples)
        self.state = msgspec.structs.replace(state, pending=pending)
        self.ledger.count_change()
        return self._upload_if_ready()

    def abort(self, reason: str) -> None:
        """The driver gives this round up; all secrets are forgotten (S07)."""
        self.state = Closed(reason)
        self._scheme_cache = self._key_cache = None
        self.ledger.count_change()

    @property
    def stored(self) -> int:
        """See `ClientParty.stored`; an input that waits in the same place is not counted."""
        state = self.state
        if not isinstance(state, Sharing | Uploaded | Signed):
            return 0
        secret = len(state.secret) if isinstance(state, Sharing) else 0
        return secret + sum(len(share) for _, share in state.held.values())

    @property
    def upload_is_due(self) -> bool:
        """Whether the upload would leave now if the input were set.

        A driver that has no input for this round withdraws here and no sooner: at any other
        moment its silence or its words would be about the input (S44).
        """
        return isinstance(self.state, Sharing) and self.state.owners is not None

    @property
    def generation(self) -> int:
        """Grows with every change, over all rounds of the ledger; see `restore`."""
        return self.ledger.generation

    def snapshot(self) -> bytes:
        """The whole state, secrets included; see `ClientParty.snapshot`."""
        self._check_process()
        stored = _Snapshot(
            self._policy.protocols[0], self.client, self.state, self.ledger.to_bytes()
        )
        payload = msgspec.msgpack.encode(stored)
        return context_hash("snapshot", payload) + payload

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        identity: IdentityKey,
        policy: Policy,
        generation: int,
        entropy: Entropy = system_entropy,
    ) -> Self:
        """The party of a snapshot, if it is no older than `generation`.

        The driver keeps `generation` apart from the snapshot and raises it whenever outputs
        leave; a snapshot from before would make the client answer twice (S06). The ledger comes
        with the snapshot: give the next round's party this one's, not an older copy.
        """
        payload = snapshot[HASH_LENGTH:]
        if snapshot[:HASH_LENGTH] != context_hash("snapshot", payload):
            raise DecodeError("malformed snapshot: its checksum is wrong; it was cut or altered")
        stored = decode(_decoder.decode, payload, "snapshot")
        if stored.protocol not in policy.protocols:
            raise DecodeError(f"this is a snapshot of {stored.protocol}")
        ledger = Ledger.from_bytes(stored.ledger)
        if ledger.generation < generation:
            raise MaskAlreadyUsed(
                f"snapshot of generation {ledger.generation} is older than {generation}: "
                "resuming from it could answer twice, which would reveal a client's model"
            )
        party = cls(stored.client, identity, policy, ledger, entropy)
        party.state = stored.state
        if not isinstance(stored.state, Waiting | Closed):
            # The policy may have changed since; the allow-list must not have.
            policy.check(party._settings(stored.state.settings))
        return party

    def __reduce__(self) -> NoReturn:
        raise LocalProtocolError(
            "a party is not copied or pickled: two copies could answer differently, which would "
            "reveal a client's model; store snapshot() and restore it"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(client={self.client}, state={self.state!r})"

    # -- transitions -------------------------------------------------------------------------

    def _on_opening(self, message: Opening) -> list[Output]:
        settings = accept_opening(message, self._policy, self.ledger)
        if Phase.ADVERTISE not in settings.traits.phases:
            return self._skip_sharing(message)
        keys = draw_keys(settings, self.client, self._identity, self._entropy)
        privates = tuple(pair.private_bytes() for pair in keys.pairs)
        self.state = Advertised(message.settings, privates, keys.advertise)
        return [*self.ledger.persisted(), Send(SERVER, keys.advertise)]

    def _skip_sharing(self, message: Opening) -> list[Output]:
        """A roster of nobody: there is nobody to share with, and sharing is closed already."""
        self.state = Sharing(
            settings=message.settings,
            roster=Roster(()),
            sealing_key=b"",
            secret=b"",
            held={},
            owners=(),
        )
        return [*self.ledger.persisted(), NeedInput()]

    def _on_repeated_opening(self, message: Opening) -> list[Output]:
        state = self.state
        if isinstance(state, Waiting | Closed):
            raise AssertionError("the transition table names no such state")
        if message.settings != state.settings:
            raise RemoteProtocolError("the server opened two rounds at once with this client")
        if isinstance(state, Advertised):
            return [Send(SERVER, state.advertise)]
        return self._on_late(message)

    def _on_roster(self, message: Roster) -> list[Output]:
        state = self._in(Advertised)
        settings = self._settings(state.settings)
        scheme = enter_roster(
            settings, self._policy, message, self.client, state.advertise, self._scheme_class
        )
        mask = scheme.prepare(0, state.private_keys, self._entropy)
        key = AgreementKey(state.private_keys[0])
        outputs = send_shares(seal_shares(scheme, key, mask, 0, self._entropy))
        self._scheme_cache, self._key_cache = scheme, key
        self.state = Sharing(
            settings=state.settings,
            roster=message,
            sealing_key=state.private_keys[0],
            secret=mask.secret,
            held={self.client: mask.own},
        )
        return [*outputs, NeedInput()]

    def _on_repeated_roster(self, message: Roster) -> list[Output]:
        state = self.state
        if not isinstance(state, Sharing | Uploaded | Signed | Answered):
            raise AssertionError("the transition table names no other state")
        if message != state.roster:
            raise RemoteProtocolError(
                "a second, different roster in one round is refused: shares for two rosters would "
                "reveal this client's mask"
            )
        return self._on_late(message)

    def _on_shares(self, message: ShareBundle) -> list[Output]:
        """Open the peers' shares; one that does not open is simply not held."""
        state = self._in(Sharing)
        scheme = self._scheme(state)
        if state.owners is not None:
            return self._on_late(message)
        for share in message.shares:
            check_address(scheme, share)
        if all(share.owner in state.held for share in message.shares):
            return self._on_late(message)
        held = dict(state.held)
        for share in message.shares:
            if share.owner in held:
                continue
            try:
                if share.serial != 0:
                    raise CryptoError("a synchronous round has one mask per client, serial 0")
                held[share.owner] = open_peer_share(scheme, self._sealing_key(state), share)
            except CryptoError as error:
                self.refused_shares[share.owner] = str(error)
        if len(held) > len(state.held):
            self.state = msgspec.structs.replace(state, held=held)
        return []

    def _on_shares_closed(self, message: SharesClosed) -> list[Output]:
        state = self._in(Sharing)
        scheme = self._scheme(state)
        if state.owners is not None:
            return self._on_repeated_close(message)
        _check_ids(message.owners, scheme.round, "owner list")
        if self.client not in message.owners:
            raise RemoteProtocolError("the owner list lacks this client, whose shares were sent")
        scheme.open_check(message.check_secret)
        self.state = msgspec.structs.replace(
            state, owners=message.owners, check_secret=message.check_secret
        )
        missing = [owner for owner in scheme.peers if owner not in state.held]
        if not scheme.suffices(state.held, message.owners):
            self.abort(f"the shares of {len(missing)} peers are missing; too few are held here")
            return [Send(SERVER, Refusal(tuple(missing))), RoundAborted(self._closed_reason())]
        return self._upload_if_ready()

    def _on_repeated_close(self, message: SharesClosed) -> list[Output]:
        """A server that resumes after a crash says again what it had said."""
        state = self.state
        if not isinstance(state, Sharing | Uploaded | Signed):
            raise AssertionError("the transition table names no other state")
        if message.owners != state.owners:
            raise RemoteProtocolError("the server closed sharing twice, with different owners")
        self._scheme(state).open_check(message.check_secret)
        return self._on_late(message)

    def _upload_if_ready(self) -> list[Output]:
        state = self._in(Sharing)
        if state.pending is None or state.owners is None:
            return []
        scheme = self._scheme(state)
        settings = scheme.settings
        dtype, data, samples = state.pending
        update = Update(np.frombuffer(data, dtype=dtype), samples)
        fingerprint, commitment = self._committed(settings, update)
        seed = self.ledger.rounding_seed(settings.model, commitment)
        masked = hide(settings, update, seed, scheme.mask(state.secret, state.owners))
        held = _in_roster_order(scheme.round, state.held)
        reports = scheme.report(_by_mask(held), state.check_secret)
        self.ledger.count_upload(settings.model, commitment)
        self._key_cache = None
        self.state = Uploaded(
            settings=state.settings,
            roster=state.roster,
            held=state.held,
            owners=state.owners,
            fingerprint=fingerprint,
        )
        upload = MaskedUpload(_bitmap(scheme.round, held), masked, reports)
        return [*self.ledger.persisted(), Send(SERVER, upload)]

    def _on_survivors(self, message: SurvivorSet) -> list[Output]:
        state = self._in(Uploaded)
        scheme = self._scheme(state)
        round_, survivors = scheme.round, message.survivors
        self._check_survivors(round_, state.owners, survivors)
        scheme.accept(survivors)
        missing = scheme.missing(_by_mask(state.held), _terms(survivors))
        if missing:
            return [Send(SERVER, Refusal(missing))]
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
        return [*self.ledger.persisted(), Send(SERVER, SurvivorSignature(signature))]

    def _on_repeated_survivors(self, message: SurvivorSet) -> list[Output]:
        state = self.state
        if not isinstance(state, Signed | Answered):
            raise AssertionError("the transition table names no other state")
        if message.survivors != state.survivors:
            raise RemoteProtocolError(
                "a second, different survivor set in one round is refused: answering both would "
                "reveal a client's model"
            )
        if state.signature:
            return [Send(SERVER, SurvivorSignature(state.signature))]
        if isinstance(state, Signed):
            raise AssertionError("a signed state holds its signature")
        return [Send(SERVER, self._answer_again(state))]

    def _on_certificate(self, message: Certificate) -> list[Output]:
        state = self._in(Signed)
        round_ = self._scheme(state).round
        statement = survivor_statement(round_.context, state.survivors)
        check_certificate(round_, self._policy.allow_list, statement, message.signatures)
        return self._answer_once(state, state.survivors)

    def _on_repeated_certificate(self, message: Certificate) -> list[Output]:
        state = self._in(Answered)
        return [Send(SERVER, self._answer_again(state))]

    def _on_late(self, message: Message) -> list[Output]:
        """A message that has done its work before, or can no longer do it."""
        self.late_messages[type(message).__name__] += 1
        return []

    def _on_abort(self, message: AbortRound) -> list[Output]:
        if isinstance(self.state, Closed):
            return []
        reason = shown(message.reason)
        self.abort(reason)
        return [RoundAborted(reason)]

    def _answer_once(self, state: Uploaded | Signed, survivors: tuple[int, ...]) -> list[Output]:
        scheme = self._scheme(state)
        answer = scheme.answer(_by_mask(state.held), _terms(survivors), state.owners)
        packed = Codec(scheme.settings.field).encode(answer)
        signature = state.signature if isinstance(state, Signed) else b""
        self.state = Answered(state.settings, state.roster, survivors, packed, signature)
        return [Send(SERVER, answer)]

    def _answer_again(self, state: Answered) -> Message:
        return Codec(self._settings(state.settings).field).decode(state.answer)

    # -- helpers -----------------------------------------------------------------------------

    def _in(self, kind: type[S]) -> S:
        """The current state, which the transition table promises to be a `kind`."""
        if not isinstance(self.state, kind):
            raise AssertionError(f"expected {kind.__name__}, in {self.state!r}")
        return self.state

    def _committed(self, settings: Settings, update: Update) -> tuple[bytes, bytes]:
        """What the ledger calls the update, and the upload that is made of it."""
        fingerprint = self.ledger.fingerprint(update)
        commitment = self.ledger.commitment(fingerprint, update.samples, settings.reading)
        return fingerprint, commitment

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise MaskAlreadyUsed(
                "this party was copied by a fork: the copy and the original could answer "
                "differently, which would reveal a client's model; restore a snapshot instead"
            )

    def _check_newest_round(self) -> None:
        """Refuse to go on once a newer round was opened with the same ledger (S06, S07)."""
        state = self.state
        if isinstance(state, Waiting | Closed):
            return
        number = self._settings(state.settings).round
        if number != self.ledger.last_round:
            raise RemoteProtocolError(
                f"round {number} is over: this client has opened round {self.ledger.last_round}"
            )

    def _unexpected(self, message: Message) -> str:
        kind = type(message).__name__
        if isinstance(self.state, Closed):
            return f"{kind} refused: the round is over for client {self.client}, its secrets gone"
        return f"{kind} is not expected by client {self.client} while {self.state!r}"

    def _closed_reason(self) -> str:
        return self._in(Closed).reason

    def _settings(self, data: bytes) -> Settings:
        if self._settings_cache is None or self._settings_cache[0] != data:
            self._settings_cache = (data, Settings.from_bytes(data))
        return self._settings_cache[1]

    def _scheme(self, state: Sharing | Uploaded | Signed | Answered) -> ClientScheme:
        if self._scheme_cache is None:
            settings = self._settings(state.settings)
            round_ = fix_round(settings, self._policy.allow_list, state.roster)
            self._scheme_cache = self._scheme_class(round_, self.client)
        return self._scheme_cache

    def _sealing_key(self, state: Sharing) -> AgreementKey:
        """The key that opens shares; it remembers what was agreed when the own ones were sealed."""
        if self._key_cache is None:
            self._key_cache = AgreementKey(state.sealing_key)
        return self._key_cache

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
