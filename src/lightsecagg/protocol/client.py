"""A client: in a round, Section 4.1, or in an epoch of buffers, Section 4.2 and Appendix F.

Theory of operation. A client registers once per roster (Opening, Advertise, Roster); C1 and
everybody's evaluation points then hold for all sums of that roster. From then on it is two
machines, which share C1, the keys and the ledger (`Seat`):

    contributor   draws masks and shares them ahead of time (`restock`), and hides an update under
                  the oldest of them whenever training is done (`set_input`)
    holder        keeps its peers' shares, reports on them, and answers for buffers

A message goes to the machine whose table names it. What the one does to the other is here: a mask
is worth nothing once its owner's own share is burnt, and a version has one model for both.

    Registered   has both machines, each in a state of its own

A client may be one of the two alone. One that only holds draws no masks; one that only contributes
keeps no share, reports on none and answers for no sum, like a client that is away.

Where the roster serves one sum (`Settings.one_sum`, a round) the mask is drawn with the roster, and
there is a barrier: SharesClosed names those whose shares are complete. Then its update leaves, and
right before it the reports on the shares that are held here. Nothing of a peer is taken after that,
and the keys go with the upload. Without protection there is no roster: everything begins with the
opening.

A failed buffer is never formed again: its masks are burnt. A client whose process ends goes on from
its `snapshot`, and without one joins the next epoch; `client_machine` says what storing it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, get_args

import msgspec
from msgspec.structs import replace

from lightsecagg.crypto.entropy import Entropy, system_entropy
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import LocalProtocolError, ParameterError, RemoteProtocolError
from lightsecagg.protocol import holder as holding
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
from lightsecagg.protocol.interface import (
    SERVER,
    NeedInput,
    Output,
    Phase,
    RoundAborted,
    Send,
    Update,
)
from lightsecagg.protocol.kept_shares import AnyHolding, Holding, Snapshot, parts_of, set_apart
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import (
    AbortRound,
    Message,
    Opening,
    Refusal,
    Roster,
    SharesClosed,
    UploadDropped,
)
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.agreement import ROUND
from lightsecagg.protocol.roles.registration import accept_opening
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.schemes.interface import MaskRef
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.settings import Settings


class Registered(Fixed, frozen=True, kw_only=True):
    """On a roster; the states of both machines, or of the one that it is."""

    private_keys: tuple[bytes, ...]
    """Of a round: none once the update has left."""
    contributor: Ready | None
    holder: AnyHolding | None
    owners: tuple[int, ...] | None = None
    """Of a round: whose shares are complete, once the server has said so."""

    def __repr__(self) -> str:
        return repr(self.holder or self.contributor)


AnyState = Waiting | Advertised | Registered | Closed


class _Snapshot(Stored, frozen=True):
    state: AnyState


class Client(ClientMachine[AnyState]):
    """One client and one roster; see the theory of operation and `interface`."""

    decoder = msgspec.msgpack.Decoder(_Snapshot)
    holder_type: ClassVar[type[Holder]] = Holder

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
        buffered = all(traits_of(protocol).buffered for protocol in policy.protocols)
        if policy.buffering is not None and not buffered:
            raise ParameterError("the asynchronous mode needs a protocol with buffers")
        self._stock = 1 if policy.buffering is None else policy.buffering.stock
        """How many masks of one owner peers keep."""
        self._begins_as = (Ready() if contributes else None, Holding() if holds else None)
        self._contributor = Contributor(client, identity, policy, entropy, self.abort)
        self._holder = self.holder_type(identity, policy, self.refused_shares, self.late_messages)

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
        return self._contributor.room(self._ready or Ready(), self._stock)

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
        state, ready = self._stocking()
        if not 1 <= count <= self.room:
            raise LocalProtocolError(
                f"{self.stock} masks are ready and {len(ready.outstanding)} in use; peers keep at "
                f"most {self._stock} per owner, so {count} more would push out old ones"
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
        (state, ready), gone = self._stocking(), sorted(set(serials))
        if unknown := [serial for serial in gone if serial not in ready.stock]:
            raise LocalProtocolError(f"masks {unknown} are not ready: there is nothing to discard")
        holder = state.holder
        if holder is not None:
            holder = self._holder.burn(holder, [MaskRef(self.client, serial) for serial in gone])
        left = {*ready.stock, *ready.outstanding}.difference(gone)
        self._change(self._with(state, ready.keep_only(left), holder))

    def take_model(self, model: bytes) -> list[Output]:
        """Training from this model (`hash_model`) begins; refuse it once too often (S44)."""
        self._stocking()
        return self._contributor.count_model(self.ledger, model)

    @property
    def upload_is_due(self) -> bool:
        """Whether the upload would leave now if the input were set.

        A driver that has no input for this round withdraws here and no sooner: at any other
        moment its silence or its words would be about the input (S44).
        """
        state = self.state
        if not isinstance(state, Registered) or state.contributor is None:
            return False
        return state.owners is not None and state.contributor.is_asked

    def set_input(
        self, update: Update, version: int = 0, model: bytes | None = None
    ) -> list[Output]:
        """Mask and upload an update that was trained from the model of time `version`.

        In a round it leaves when sharing is closed. In an epoch it takes the oldest mask of the
        stock; call `restock` first if there is none. The update is spent from now on.

        * `version`: the time of the global model, as the server gave it; 0 in a round.
        * `model`: the hash of the model that was really trained from (`hash_model`). Compute it
          here: a server that may name any hash also escapes `max_attempts`. Only in rounds, and
          where the policy holds it, it may be left out.
        """
        state, ready = self._contributing()
        if self._settings(state).one_sum:
            return self._put_off(state, ready, update, version, model)
        if model is None:
            raise LocalProtocolError(
                "hand over the hash of the model that was trained from: model=hash_model(...)"
            )
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

    def _put_off(
        self, state: Registered, ready: Ready, update: Update, version: int, model: bytes | None
    ) -> list[Output]:
        """Of a round: the update waits until sharing is closed, and leaves then."""
        if version:
            raise LocalProtocolError("a round has one model, of version 0")
        self._check_model(self._settings(state), model)
        ready = self._contributor.put_off(self._seat(state), ready, update)
        self._change(replace(state, contributor=ready))
        return self._upload_if_ready()

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

    def _upload_if_ready(self) -> list[Output]:
        state = self.state
        if not isinstance(state, Registered) or state.owners is None:
            return []
        if state.contributor is None or state.contributor.pending is None:
            return []
        seat = self._seat(state)
        ready, (*stored, upload) = self._contributor.upload_pending(seat, state.contributor)
        reports = self._holder.report_all(seat, state.holder) if state.holder else []
        self._key_cache = None
        self.state = replace(state, contributor=ready, private_keys=())
        return [*stored, *reports, upload]

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
            raise LocalProtocolError(f"the {self.mode} is over for client {self.client}: {reason}")
        if not isinstance(self.state, Registered):
            raise LocalProtocolError(f"client {self.client} is not registered yet")
        if self.state.contributor is None:
            raise LocalProtocolError(f"client {self.client} only holds shares: it has no updates")
        return self.state, self.state.contributor

    def _stocking(self) -> tuple[Registered, Ready]:
        """The same, where it draws masks ahead of time; a round has one mask and one model."""
        state, ready = self._contributing()
        if self._settings(state).one_sum:
            raise LocalProtocolError("a round has one mask, drawn with the roster, and one model")
        return state, ready

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
        update = state.contributor.update if state.contributor else b""
        return Seat(self._scheme(state), self.ledger, key, keys, state.owners, update)

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
        if self._settings(state).one_sum:
            raise RemoteProtocolError("a round's upload waits for no other sum, and is not dropped")
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
        if settings.one_sum and Phase.ADVERTISE not in settings.traits.phases:
            # A roster of nobody: there is nobody to share with, and sharing is closed already.
            seated = self._sit_down(message.settings, Roster(()), (), owners=())
            return [*self.ledger.persisted(), *seated]
        self.state = advertised = self._advertise(message, settings)
        return [*self.ledger.persisted(), Send(SERVER, advertised.advertise)]

    def _on_roster(self, state: Advertised, message: Roster) -> list[Output]:
        self._enter_roster(state, message)
        return self._sit_down(state.settings, message, state.private_keys)

    def _sit_down(
        self,
        settings: bytes,
        roster: Roster,
        private_keys: tuple[bytes, ...],
        owners: tuple[int, ...] | None = None,
    ) -> list[Output]:
        """On a roster: both machines begin, in a round with the one mask that it takes."""
        contributor, holder = self._begins_as
        self.state = state = Registered(
            settings=settings,
            roster=roster,
            private_keys=private_keys,
            contributor=contributor,
            holder=holder,
            owners=owners,
        )
        if contributor is None:
            return []
        if not self._settings(state).one_sum:
            return [NeedInput()]
        seat = self._seat(state)
        drawn = self._contributor.restock(seat, contributor, 1)
        if holder is not None:
            holder, _ = self._holder.keep_own(seat, holder, drawn.own)
        self.state = replace(state, contributor=drawn.state, holder=holder)
        return [*drawn.outputs, NeedInput()]

    def _on_shares_closed(self, state: Registered, message: SharesClosed) -> list[Output]:
        """Of a round: upload; or leave, if no sum can be answered."""
        scheme, holder = self._scheme(state), state.holder
        if not scheme.settings.one_sum or holder is None:
            raise RemoteProtocolError(self._unexpected(message, holder))
        if state.owners is not None:
            return self._on_repeated_close(state, holder, message)
        _check_ids(message.owners, scheme.round)
        if self.client not in message.owners:
            raise RemoteProtocolError("the owner list lacks this client, whose shares were sent")
        seat = self._seat(state)
        if missing := self._holder.lacks(seat, holder, message.owners):
            reason = f"the shares of {len(missing)} peers are missing; too few are held here"
            self._forget(reason)
            return [Send(SERVER, Refusal(ROUND, missing)), RoundAborted(reason)]
        self.state = replace(state, owners=message.owners)
        return self._upload_if_ready()

    def _on_repeated_close(
        self, state: Registered, holder: AnyHolding, message: SharesClosed
    ) -> list[Output]:
        """A server that resumes after a crash says again what it had said, and hears the same."""
        if message.owners != state.owners:
            raise RemoteProtocolError("the server closed sharing twice, with different owners")
        seat = self._seat(state)
        if not seat.update or holder.time >= 0:
            return self._on_late(state, message)  # nothing has left yet, or the shares are burnt
        return self._holder.report_all(seat, holder)


TRANSITIONS: Table = table(
    get_args(AnyState),
    [
        on(State, AbortRound, Client._on_abort),
        on(Waiting, Opening, Client._on_opening),
        on(Opened, Opening, Client._on_repeated_opening),
        on(Advertised, Roster, Client._on_roster),
        on(Registered, Roster, Client._on_repeated_roster),
        on(Waiting, UploadDropped, Client._on_late),
        on(Advertised, UploadDropped, Client._on_late),
        on(Registered, UploadDropped, Client._on_dropped),
        on(Registered, SharesClosed, Client._on_shares_closed),
        *(
            on(Registered, message, Client._to_holder)
            for message in dict.fromkeys(message for _, message in holding.TRANSITIONS)
        ),
    ],
)
"""(state, message) -> handler. What is not here is refused."""

Client.transitions = TRANSITIONS


def _check_ids(owners: tuple[int, ...], round_: Round) -> None:
    if len(set(owners)) != len(owners):
        raise RemoteProtocolError("the owner list names a client twice")
    if strangers := [client for client in owners if client not in round_.positions]:
        raise RemoteProtocolError(f"the owner list names {strangers}, who are not on the roster")
