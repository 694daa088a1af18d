"""A contributor: draws masks, shares each with all holders, and hides one update under each.

Theory of operation. A contributor is in one state from the roster on:

    Ready   has masks that are shared (`stock`), and uploads that wait for their sum (`outstanding`)

`restock` draws masks ahead of time, numbered by a serial; `upload` takes the oldest of them. An
update is spent when it is uploaded, because it may be summed without its owner. What is shared is
kept by holders (`holder`); a contributor that is a holder too keeps its own share like any other,
and a mask is worth nothing once that is gone. Whoever holds both machines says so (`keep_only`).

Where a roster serves one sum there is one mask, drawn with the roster. The update waits (`pending`)
until sharing is closed: a scheme's masks may depend on whose shares are complete. Its rule for the
ledger is that of a repeat: the same update again, at most twice, and spent when it is consented to
(`Ledger`).

Nothing here decides what is answered for, and no share of another client is ever seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from lightsecagg.crypto.entropy import Entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import InputRefused, LocalProtocolError, MaskAlreadyUsed
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.buffers import hash_upload, make_tag
from lightsecagg.protocol.client_machine import Seat, State
from lightsecagg.protocol.interface import SERVER, Output, Send, Update
from lightsecagg.protocol.kept_shares import KeptShare
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import MaskedUpload, SealedShare, Tag
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.rounding import uniform_words
from lightsecagg.protocol.schemes.interface import ClientScheme, PreparedMask
from lightsecagg.protocol.settings import Settings
from lightsecagg.protocol.share_exchange import bundles, seal_shares


def send_shares(shares: Iterable[SealedShare]) -> list[Send]:
    """Hand them to the server, together."""
    return [Send(SERVER, bundle) for bundle in bundles(shares)]


def check_input(settings: Settings, update: Update) -> None:
    """Refuse an update that could not be masked: its shape, NaN and over-range entries (S13)."""
    if update.vector.shape != (settings.dimension,):
        raise InputRefused(
            f"the update has shape {update.vector.shape}, but vectors of {settings.dimension} "
            "entries are summed"
        )
    settings.quantizer.check(update.vector, update.samples)


def hide(settings: Settings, update: Update, rounding_seed: bytes, mask: Elements) -> Elements:
    """The masked update; the seed decides the stochastic rounding (`Ledger.rounding_seed`)."""
    vector, words = update.vector, uniform_words(mask.size, rounding_seed)
    # What was a coin becomes an element: new memory for another vector takes longer than to mask.
    return settings.quantizer.quantise_and_mask(
        vector, words[: vector.size], mask, update.samples, out=words
    )


def bind_upload(
    ledger: Ledger, context: bytes, serial: int, digest: bytes, give_up: Callable[[str], None]
) -> None:
    """Let the ledger know the upload before it leaves; under a second one all is forgotten.

    * `digest`: a hash of the masked upload, always by the same function.
    """
    try:
        ledger.bind_upload(context, serial, digest)
    except MaskAlreadyUsed as error:
        give_up(str(error))
        raise


class ExpandedMasks:
    """Masks in memory: what the secrets in a state expand to, by serial.

    They spare an upload the expansion, and die with the process.
    """

    def __init__(self) -> None:
        self._masks: dict[int, Elements] = {}

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(mask.nbytes for mask in self._masks.values())

    def keep(self, serial: int, mask: PreparedMask) -> None:
        """Keep what is expanded by now, if it is."""
        if mask.expanded is not None:
            self._masks[serial] = mask.expanded

    def take(
        self, scheme: ClientScheme, serial: int, secret: bytes, owners: Sequence[int]
    ) -> Elements:
        """The mask of an upload, for the last time."""
        known = self._masks.pop(serial, None)
        if known is None:
            return scheme.mask(secret, owners)
        return scheme.finish_mask(known, secret, owners)

    def keep_only(self, serials: Collection[int]) -> None:
        """Forget all others."""
        self._masks = {s: mask for s, mask in self._masks.items() if s in serials}


class SharedMask(msgspec.Struct, frozen=True, array_like=True):
    """A mask that is shared and not used."""

    secret: bytes
    """What the scheme makes the mask of."""
    header: bytes
    """Under which its shares count; empty without checks."""

    def __repr__(self) -> str:
        return "SharedMask()"


class Ready(State, frozen=True):
    """Masks in stock, and uploads that wait for their sum."""

    next_serial: int = 0
    stock: dict[int, SharedMask] = msgspec.field(default_factory=dict)
    """By serial."""
    outstanding: tuple[int, ...] = ()
    """Serials of the uploads that wait for their sum, ascending."""
    pending: tuple[str, bytes, int] | None = None
    """Of a round: the update, until sharing is closed: dtype, bytes, samples."""
    update: bytes = b""
    """Of a round: the fingerprint of the update that was uploaded."""

    @property
    def stored(self) -> int:
        """Bytes of its secrets."""
        return sum(len(mask.secret) for mask in self.stock.values())

    @property
    def is_asked(self) -> bool:
        """Of a round: whether it has a mask, and no update yet."""
        return bool(self.stock) and self.pending is None

    def keep_only(self, serials: Collection[int]) -> Ready:
        """Without the masks that are not among these."""
        return replace(
            self,
            stock={s: mask for s, mask in self.stock.items() if s in serials},
            outstanding=tuple(s for s in self.outstanding if s in serials),
        )


class Restocked(NamedTuple):
    """What becomes of a contributor that has drawn masks."""

    state: Ready
    own: dict[int, KeptShare]
    """Its own shares of them, for the holder that it may be."""
    outputs: list[Send]


class _Hidden(NamedTuple):
    """What becomes of a contributor that has hidden an update."""

    state: Ready
    upload: MaskedUpload


class Contributor:
    """What a contributor does in its state; see the module."""

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        entropy: Entropy,
        give_up: Callable[[str], None],
    ) -> None:
        """`give_up`: forget everything, because a mask was about to be used twice."""
        self.client = client
        self.masks = ExpandedMasks()
        self.keeps_masks = True
        """Whether masks that are shared ahead stay in memory, so that their uploads need not expand
        them; for a driver to deny that ends this process before the upload."""
        self._identity, self._policy, self._entropy = identity, policy, entropy
        self._give_up = give_up
        self._fingerprint = b""
        """Of the pending update, unless it came with a snapshot: hashing takes as long as masking.
        """

    def room(self, state: Ready, most: int) -> int:
        """How many more masks may be shared before one that is needed is too old.

        The server counts serials, those of masks included whose shares were lost on their way.

        * `most`: masks of one owner that a holder keeps.
        """
        oldest = min([*state.stock, *state.outstanding], default=state.next_serial)
        return most - (state.next_serial - oldest)

    def restock(self, seat: Seat, state: Ready, count: int) -> Restocked:
        """Draw and share `count` more masks, ahead of time."""
        scheme, first = seat.scheme, state.next_serial
        scheme.expands_ahead = self.keeps_masks
        stock, shares = dict(state.stock), list[SealedShare]()
        own: dict[int, KeptShare] = {}
        for serial in range(first, first + count):
            mask = scheme.prepare(serial, seat.private_keys, self._entropy)
            header = b""
            if seat.key is not None:
                self.masks.keep(serial, mask)
                sealed = seal_shares(scheme.round, seat.key, self.client, mask.outgoing, serial)
                header = sealed.header
                own[serial] = KeptShare(mask.own, header=header)
                shares += sealed.shares
            stock[serial] = SharedMask(mask.secret, header)
        changed = replace(state, stock=stock, next_serial=first + count)
        return Restocked(changed, own, send_shares(shares))

    def count_model(self, ledger: Ledger, model: bytes) -> list[Output]:
        """Training from this model begins; refuse it once too often (S44).

        Whether an upload follows is an answer. A server that gives one model again and again, in
        epochs with ever other bounds, would have many of them about one update.
        """
        ledger.count_opening(model, self._policy.max_openings)
        return [*ledger.persisted()]

    def put_off(self, seat: Seat, state: Ready, update: Update) -> Ready:
        """Of a round: check the update, and keep it until sharing is closed."""
        settings, ledger = seat.scheme.settings, seat.ledger
        if state.pending is not None or state.update:
            raise MaskAlreadyUsed(
                "the input is already set: masking a second one with the same mask would reveal "
                "their difference"
            )
        check_input(settings, update)  # now: a failure at upload time would be the server's
        self._fingerprint = fingerprint = ledger.fingerprint(update)
        commitment = ledger.commitment(fingerprint, update.samples, settings.reading)
        ledger.check_update(settings.model, fingerprint, commitment)
        vector = np.ascontiguousarray(update.vector)
        return replace(state, pending=(vector.dtype.str, vector.tobytes(), update.samples))

    def upload_pending(self, seat: Seat, state: Ready) -> tuple[Ready, list[Output]]:
        """Of a round: sharing is closed, so the update leaves."""
        if state.pending is None:
            raise AssertionError("there is no update to upload")
        settings, ledger = seat.scheme.settings, seat.ledger
        dtype, data, samples = state.pending
        update = Update(np.frombuffer(data, dtype=dtype), samples)
        fingerprint = self._fingerprint or ledger.fingerprint(update)
        commitment = ledger.commitment(fingerprint, samples, settings.reading)
        hidden = self._hide(seat, state, update, commitment, 0, settings.model)
        ledger.count_upload(settings.model, commitment, fingerprint)
        return replace(hidden.state, pending=None, update=fingerprint), [
            *ledger.persisted(),
            Send(SERVER, hidden.upload),
        ]

    def upload(
        self, seat: Seat, state: Ready, update: Update, version: int, model: bytes
    ) -> tuple[Ready, list[Output]]:
        """Hide an update under the oldest mask, and spend it."""
        settings, ledger = seat.scheme.settings, seat.ledger
        check_input(settings, update)
        if not state.stock:
            raise LocalProtocolError("no shared mask is ready; call restock first")
        fingerprint = ledger.fingerprint(update)
        ledger.check_unspent(fingerprint)
        ledger.check_attempts(model, self._policy.max_attempts)
        ledger.check_epoch(model)
        commitment = ledger.commitment(fingerprint, update.samples, settings.reading)
        hidden = self._hide(seat, state, update, commitment, version, model)
        ledger.count_upload(model)
        ledger.spend(fingerprint)
        return hidden.state, [*ledger.persisted(), Send(SERVER, hidden.upload)]

    def _hide(
        self,
        seat: Seat,
        state: Ready,
        update: Update,
        commitment: bytes,
        version: int,
        model: bytes,
    ) -> _Hidden:
        scheme, settings = seat.scheme, seat.scheme.settings
        owners = scheme.round.members if seat.owners is None else seat.owners
        serial = min(state.stock)
        of = state.stock[serial]
        mask = self.masks.take(scheme, serial, of.secret, owners)
        masked = hide(settings, update, seat.ledger.rounding_seed(model, commitment), mask)
        digest = hash_upload(settings.group, masked)
        if seat.key is not None:
            bind_upload(seat.ledger, scheme.round.context, serial, digest, self._give_up)
        changed = replace(
            state,
            stock={s: mask for s, mask in state.stock.items() if s != serial},
            outstanding=(*state.outstanding, serial),
        )
        tag = Tag(self.client, serial, of.header, version, model, digest, b"")
        signed = make_tag(scheme.round, self._identity, tag)
        return _Hidden(changed, MaskedUpload(signed, masked))

    def drop(self, state: Ready, serial: int) -> Ready | None:
        """Stop counting an upload; its mask stays used and its update spent. None: it never was."""
        if serial not in state.outstanding:
            return None
        return replace(state, outstanding=tuple(s for s in state.outstanding if s != serial))
