"""A client in one epoch of the buffered-asynchronous mode, Section 4.2 and Appendix F.

Theory of operation. A client registers once per epoch (Opening, Advertise, Roster, as in a
synchronous round); C1 and everybody's evaluation points then hold for the whole epoch. From then
on it is two machines, which share C1, the keys and the ledger (`Seat`):

    contributor   draws masks and shares them ahead of time (`restock`), and hides an update under
                  the oldest of them whenever training is done (`set_input`)
    holder        keeps its peers' shares, reports on them, and answers for buffers

A message goes to the machine whose table names it. What the one does to the other is here: a mask
is worth nothing once its owner's own share is burnt, and a version has one model for both.

    Registered   has both machines, each in a state of its own

A client may be one of the two alone. One that only holds draws no masks; one that only contributes
keeps no share, reports on none and answers for no sum, like a client that is away.

A failed buffer is never formed again: its masks are burnt. A client whose process ends goes on from
its `snapshot`, and without one joins the next epoch; `client_machine` says what storing it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec
from msgspec.structs import replace

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import LocalProtocolError, ParameterError, RemoteProtocolError
from lightsecagg.protocol import holder as holding
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.client_machine import (
    Advertised,
    ClientMachine,
    Closed,
    Fixed,
    Opened,
    Seat,
    State,
    Stored,
    Table,
    Waiting,
    on,
    table,
)
from lightsecagg.protocol.contributor import Contributor, Ready
from lightsecagg.protocol.holder import Holder
from lightsecagg.protocol.interface import SERVER, NeedInput, Output, Send, Update
from lightsecagg.protocol.kept_shares import AnyHolding, Holding, Snapshot, parts_of, set_apart
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import AbortRound, Message, Opening, Roster, UploadDropped
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.registration import accept_opening
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.schemes.traits import traits_of


class Registered(Fixed, frozen=True, kw_only=True):
    """On a roster; the states of both machines, or of the one that it is."""

    private_keys: tuple[bytes, ...]
    contributor: Ready | None
    holder: AnyHolding | None

    def __repr__(self) -> str:
        return repr(self.holder or self.contributor)


AnyState = Waiting | Advertised | Registered | Closed


class _Snapshot(Stored, frozen=True):
    state: AnyState


class EpochClient(ClientMachine[AnyState]):
    """One client in one epoch; see the theory of operation and `interface`."""

    mode = "epoch"
    decoder = msgspec.msgpack.Decoder(_Snapshot)

    def __init__(
        self,
        client: int,
        identity: IdentityKey,
        policy: Policy,
        ledger: Ledger,
        entropy: Entropy = system_entropy,
        *,
        contributes: bool = True,
        holds: bool = True,
    ) -> None:
        """`contributes` and `holds`: which of the two machines it is."""
        super().__init__(client, identity, policy, ledger, entropy)
        if policy.buffering is None or not all(
            traits_of(protocol).buffered for protocol in policy.protocols
        ):
            raise ParameterError("the asynchronous mode needs a policy with buffering")
        self._buffering: Buffering = policy.buffering
        self._begins_as = (Ready() if contributes else None, Holding() if holds else None)
        self._contributor = Contributor(client, identity, policy, entropy, self.abort)
        self._holder = Holder(
            identity, policy, policy.buffering, self.refused_shares, self.late_messages
        )

    # -- the driver's side -------------------------------------------------------------------

    @property
    def keeps_masks(self) -> bool:
        """See `Contributor.keeps_masks`."""
        return self._contributor.keeps_masks

    @keeps_masks.setter
    def keeps_masks(self, keeps: bool) -> None:
        self._contributor.keeps_masks = keeps

    @property
    def parts(self) -> Mapping[bytes, bytes]:
        """See `Holder.parts`."""
        return self._holder.parts

    @parts.setter
    def parts(self, parts: Mapping[bytes, bytes]) -> None:
        self._holder.parts = parts

    @property
    def stored(self) -> int:
        """See `ClientParty.stored`."""
        ready, holder = self._ready, self._holds
        return (
            (ready.stored if ready else 0)
            + (holder.stored if holder else 0)
            + (self._contributor.masks.nbytes)
        )

    @property
    def stock(self) -> int:
        """How many shared masks are ready; an upload takes one."""
        return len(self._ready.stock) if self._ready else 0

    @property
    def room(self) -> int:
        """How many more masks may be shared before peers drop old ones."""
        return self._contributor.room(self._ready or Ready(), self._buffering.stock)

    @property
    def is_registered(self) -> bool:
        """Whether it is on a roster: it can share masks and upload."""
        return isinstance(self.state, Registered)

    @property
    def serials(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of its masks, those that are ready, and those whose uploads wait for their buffer."""
        if not isinstance(self.state, Registered) or self.state.contributor is None:
            return (), ()
        ready, shared = self.state.contributor, self._settings(self.state).traits.protected
        return tuple(sorted(ready.stock)) if shared else (), ready.outstanding

    @property
    def time(self) -> int:
        """The time of the last buffer that this client has signed or answered for."""
        return self._holds.time if self._holds else -1

    @property
    def needed_parts(self) -> frozenset[bytes]:
        """What must be in `parts`, because a snapshot left it there."""
        return parts_of(self._holds) if self._holds else frozenset()

    def snapshot_apart(self) -> Snapshot:
        """`snapshot` in kilobytes, with the peers' explicit shares and the answer beside it.

        They come once, and are read at most once. The order that protects: store `parts`, then
        `content`, then let the outputs leave, then delete all parts but the `needed` ones.
        """
        state = self.state
        if not isinstance(state, Registered) or state.holder is None:
            return Snapshot(self._pack(state), {}, frozenset())
        slim, parts = set_apart(state.holder)
        return Snapshot(self._pack(replace(state, holder=slim)), parts, parts_of(slim))

    def restock(self, count: int = 1) -> list[Output]:
        """Draw and share `count` more masks, ahead of time."""
        state, ready = self._contributing()
        if not 1 <= count <= self.room:
            raise LocalProtocolError(
                f"{self.stock} masks are ready and {len(ready.outstanding)} in use; peers keep at "
                f"most {self._buffering.stock} per owner, so {count} more would push out old ones"
            )
        seat = self._seat(state)
        drawn = self._contributor.restock(seat, ready, count)
        holder, reports = state.holder, list[Output]()
        if holder is not None:
            holder, reports = self._holder.keep_own(seat, holder, drawn.own)
        self._change(self._with(state, drawn.state, holder))
        return [*drawn.outputs, *reports]

    def discard(self, serials: Iterable[int]) -> None:
        """The shares of these masks were lost on their way: no upload is to be wasted on them."""
        (state, ready), gone = self._contributing(), sorted(set(serials))
        if unknown := [serial for serial in gone if serial not in ready.stock]:
            raise LocalProtocolError(f"masks {unknown} are not ready: there is nothing to discard")
        holder = state.holder
        if holder is not None:
            holder = self._holder.burn(holder, [MaskRef(self.client, serial) for serial in gone])
        left = {*ready.stock, *ready.outstanding}.difference(gone)
        self._change(self._with(state, ready.keep_only(left), holder))

    def take_model(self, model: bytes) -> list[Output]:
        """Training from this model (`hash_model`) begins; refuse it once too often (S44)."""
        self._contributing()
        return self._contributor.count_model(self.ledger, model)

    def set_input(self, update: Update, version: int, model: bytes) -> list[Output]:
        """Mask and upload an update that was trained from the model of time `version`.

        Takes the oldest mask of the stock; call `restock` first if there is none. The update is
        spent from now on.

        * `version`: the time of the global model, as the server gave it.
        * `model`: the hash of the model that was really trained from (`hash_model`). Compute it
          here: a server that may name any hash also escapes `max_attempts`.
        """
        state, ready = self._contributing()
        holder = state.holder
        known = {} if holder is None else holder.models
        if version < 0 or known.get(version, model) != model:
            raise RemoteProtocolError(
                f"the server gave this client two different models of version {version}, or "
                "another one than its peers have trained from"
            )
        seat = self._seat(state)
        ready, outputs = self._contributor.upload(seat, ready, update, version, model)
        if holder is not None:
            holder = replace(holder, models={**known, version: model})
        self._change(self._with(state, ready, holder))
        return outputs

    # -- the two machines --------------------------------------------------------------------

    @property
    def _ready(self) -> Ready | None:
        return self.state.contributor if isinstance(self.state, Registered) else None

    @property
    def _holds(self) -> AnyHolding | None:
        return self.state.holder if isinstance(self.state, Registered) else None

    def _contributing(self) -> tuple[Registered, Ready]:
        """Its state, where it can be asked for an update."""
        self._check_process()
        self._check_newest()
        if isinstance(self.state, Closed):
            reason = self.state.reason
            raise LocalProtocolError(f"the epoch is over for client {self.client}: {reason}")
        if not isinstance(self.state, Registered):
            raise LocalProtocolError(f"client {self.client} is not registered yet")
        if self.state.contributor is None:
            raise LocalProtocolError(f"client {self.client} only holds shares: it has no updates")
        return self.state, self.state.contributor

    def _with(
        self, state: Registered, ready: Ready | None, holder: AnyHolding | None
    ) -> Registered:
        """Both machines have gone on; a mask goes with its owner's own share."""
        protected = self._settings(state).traits.protected
        if ready is not None and holder is not None and protected:
            own = holder.kept.get(self.client, {})
            if not own.keys() >= {*ready.stock, *ready.outstanding}:
                ready = ready.keep_only(own)
        if ready is not None:
            self._contributor.masks.keep_only(ready.stock)
        return replace(state, contributor=ready, holder=holder)

    def _seat(self, state: Registered) -> Seat:
        keys = state.private_keys  # none where nothing is shared
        key = self._sealing_key(keys[0]) if keys else None
        return Seat(self._scheme(state), self.ledger, key, keys)

    def _to_holder(self, state: Registered, message: Message) -> list[Output]:
        if state.holder is None:
            return self._on_late(state, message)
        step = self._holder.take(self._seat(state), state.holder, message)
        if step is None:
            raise RemoteProtocolError(self._unexpected(message, state.holder))
        if step[0] is not state.holder:
            self.state = self._with(state, state.contributor, step[0])
        return step[1]

    def _on_dropped(self, state: Registered, message: UploadDropped) -> list[Output]:
        """Stop counting an upload; its mask stays used and its update spent."""
        ready = state.contributor
        left = None if ready is None else self._contributor.drop(ready, message.serial)
        if left is None:
            return self._on_late(state, message)
        self.state = replace(state, contributor=left)
        return []

    def _change(self, state: Registered) -> None:
        """The driver's doing, not a message's."""
        self.state = state
        self.ledger.count_change()

    def _forget(self, reason: str) -> None:
        super()._forget(reason)
        self._contributor.masks.keep_only(())

    # -- registration ------------------------------------------------------------------------

    def _on_opening(self, state: Waiting, message: Opening) -> list[Output]:
        settings = accept_opening(message, self._policy, self.ledger)
        self.state = advertised = self._advertise(message, settings)
        return [*self.ledger.persisted(), Send(SERVER, advertised.advertise)]

    def _on_roster(self, state: Advertised, message: Roster) -> list[Output]:
        self._enter_roster(state, message)
        contributor, holder = self._begins_as
        self.state = Registered(
            settings=state.settings,
            roster=message,
            private_keys=state.private_keys,
            contributor=contributor,
            holder=holder,
        )
        return [NeedInput()] if contributor else []


TRANSITIONS: Table = table(
    get_args(AnyState),
    [
        on(State, AbortRound, EpochClient._on_abort),
        on(Waiting, Opening, EpochClient._on_opening),
        on(Opened, Opening, EpochClient._on_repeated_opening),
        on(Advertised, Roster, EpochClient._on_roster),
        on(Registered, Roster, EpochClient._on_repeated_roster),
        on(Waiting, UploadDropped, EpochClient._on_late),
        on(Advertised, UploadDropped, EpochClient._on_late),
        on(Registered, UploadDropped, EpochClient._on_dropped),
        *(
            on(Registered, message, EpochClient._to_holder)
            for message in dict.fromkeys(message for _, message in holding.TRANSITIONS)
        ),
    ],
)
"""(state, message) -> handler. What is not here is refused."""

EpochClient.transitions = TRANSITIONS
