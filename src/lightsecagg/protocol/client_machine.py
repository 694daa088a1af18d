"""What a client is before its roster: a state, a table of transitions, and a snapshot.

Theory of operation. A client is always in one state, a frozen value that holds only what later
steps still need, so secrets leave with the transition that used them. A table names, for each state
and message, the handler; every other message is refused and changes nothing. What follows
registration is the business of `client`.

    Waiting      knows its identity, its policy and its ledger
    Advertised   has drawn fresh keys and signed them
    ...
    Closed       the round or epoch is over for this client; all secrets are gone

Storing it. A client that must survive a process boundary is stored as `snapshot()`, durably,
*before* the outputs of the same call leave, together with its `generation`, and comes back with
`restore`. What that order protects from: an upload or an answer that left and is forgotten could be
made a second time, for another sum, and two of them reveal a client's model (S06).

* The driver keeps the generation apart from the snapshot (in another file, or a counter that is
  never rolled back) and gives it to `restore`, which refuses every older snapshot.
* The ledger within the snapshot refuses, also in later rounds and epochs, updates that are spent,
  second sums for one model, and rounds that are over. It cannot refuse what it does not remember:
  if ledger and generation are rolled back together with the snapshot, nothing notices.
* A driver that cannot promise this abandons the party and waits for the next round or epoch.

A snapshot holds seeds in place of the masks that they expand to; the masks themselves are kept in
memory, and are derived again after a restart.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, Self, TypeVar

import msgspec

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
from lightsecagg.protocol.interface import SERVER, Output, RoundAborted, Send
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import AbortRound, Advertise, Message, Opening, Roster
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roles.registration import draw_keys, enter_roster
from lightsecagg.protocol.roster import fix_round
from lightsecagg.protocol.schemes.interface import ClientScheme
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.settings import Settings

SNAPSHOT_VERSION = 4
"""Of the states' layout; there is no reading of another one."""


class State(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the states; its `repr` shows no field, because most of them are secret."""

    def __repr__(self) -> str:
        return type(self).__name__

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []  # rich, which draws tracebacks with local variables, asks for this instead


class Waiting(State, frozen=True):
    """Nothing has happened yet."""


class Opened(State, frozen=True):
    """Base of the states between the opening and the end."""

    settings: bytes


class Advertised(Opened, frozen=True):
    """Fresh keys are advertised."""

    private_keys: tuple[bytes, ...]
    advertise: Advertise


class Fixed(Opened, frozen=True):
    """Base of the states that follow the roster."""

    roster: Roster


class Closed(State, frozen=True):
    """The round or epoch is over for this client."""

    reason: str


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot; each machine says which states it knows."""

    version: int
    protocol: str
    client: int
    ledger: bytes
    state: Any

    def __repr__(self) -> str:
        return f"{type(self).__name__}(client={self.client})"


AnyState = TypeVar("AnyState", bound=State)
S = TypeVar("S", bound=State)
M = TypeVar("M")
P = TypeVar("P")

T = TypeVar("T")

Handler = Callable[[Any, Any, Any], list[Output]]
Row = tuple[type[State], type, Callable[[Any, Any, Any], T]]
Table = Mapping[tuple[type[State], type], Handler]
"""(state, message) -> what to do. What is not here is refused."""


def on(state: type[S], message: type[M], do: Callable[[P, S, M], T]) -> Row[T]:
    """A row of a table: in this state, a message of this type is handled so."""
    return state, message, do


def table(
    states: Iterable[type[State]], rows: Sequence[Row[T]]
) -> Mapping[tuple[type[State], type], Callable[[Any, Any, Any], T]]:
    """The rows as a table; those of a state hold for what derives from it, but for its own."""
    cells = {(state, message): do for state, message, do in rows}
    if len(cells) < len(rows):
        raise LookupError("two rows for one message in one state")
    found: dict[tuple[type[State], type], Callable[[Any, Any, Any], T]] = {}
    for state in states:
        for base in state.__mro__:
            mine = {(state, message): do for (of, message), do in cells.items() if of is base}
            found = mine | found
    return found


class Seat(NamedTuple):
    """A client's place in a round or an epoch: what its machines share from the roster on."""

    scheme: ClientScheme
    ledger: Ledger
    key: AgreementKey | None
    """It seals the shares that leave, and opens those that come; None where nothing is shared."""
    private_keys: tuple[bytes, ...]
    """Of the advertised pairs; the first one is that key."""
    owners: tuple[int, ...] | None = None
    """Of a round: whose shares are complete, once sharing is closed."""
    update: bytes = b""
    """Of a round: the fingerprint of the update that this client has uploaded; empty before."""

    def __repr__(self) -> str:
        return f"Seat(client={self.scheme.client})"


class ClientMachine(Generic[AnyState]):
    """A client with a state and a table; see the module and `interface`."""

    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]
    """Of its snapshots, with its states."""
    transitions: ClassVar[Table]

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
        self.mode = "round" if policy.buffering is None else "epoch"
        """What it calls the time between opening and end."""
        self._scheme_class = scheme_of(*policy.protocols, share_mode=policy.share_mode).client
        self.client = client
        self.state: AnyState = _any(Waiting())
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
        handler = self.transitions.get((type(before), type(message)))
        if handler is None:
            raise RemoteProtocolError(self._unexpected(message))
        if not isinstance(message, AbortRound):
            self._check_newest()
        try:
            outputs = handler(self, before, message)
        except (CryptoError, DecodeError, FieldError, ParameterError) as error:
            self.state = before
            raise RemoteProtocolError(f"{type(message).__name__} refused: {error}") from error
        if self.state is not before:
            self.ledger.count_change()
        return outputs

    def abort(self, reason: str) -> None:
        """The driver gives this round or epoch up; all secrets are forgotten (S07)."""
        self._forget(reason)
        self.ledger.count_change()

    @property
    def generation(self) -> int:
        """Grows with every change, over all rounds of the ledger; see `restore`."""
        return self.ledger.generation

    def snapshot(self) -> bytes:
        """The whole state, secrets included; see `ClientParty.snapshot`."""
        return self._pack(self.state)

    def _pack(self, state: AnyState) -> bytes:
        self._check_process()
        protocol = self._policy.protocols[0]
        payload = msgspec.msgpack.encode(
            Stored(SNAPSHOT_VERSION, protocol, self.client, self.ledger.to_bytes(), state)
        )
        return context_hash("client snapshot", payload) + payload

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        identity: IdentityKey,
        policy: Policy,
        generation: int,
        entropy: Entropy = system_entropy,
    ) -> Self:
        """The party of a snapshot, if it is no older than `generation`; see the module.

        The ledger comes with the snapshot: give the next round's or epoch's party this one's, not
        an older copy. The policy may have changed since, but must still admit the settings.
        """
        payload = snapshot[HASH_LENGTH:]
        if snapshot[:HASH_LENGTH] != context_hash("client snapshot", payload):
            raise DecodeError(
                "malformed snapshot: its checksum is wrong; it was cut or altered, or is of "
                "another release"
            )
        stored: Stored = decode(cls.decoder.decode, payload, "snapshot")
        if stored.version != SNAPSHOT_VERSION:
            raise DecodeError(
                f"a snapshot of version {stored.version} is not read by this release, which has "
                f"{SNAPSHOT_VERSION}; join the next round or epoch"
            )
        if stored.protocol not in policy.protocols:
            raise DecodeError(f"this is a snapshot of {shown(stored.protocol)}")
        ledger = Ledger.from_bytes(stored.ledger)
        if ledger.generation < generation:
            raise MaskAlreadyUsed(
                f"snapshot of generation {ledger.generation} is older than {generation}: "
                "resuming from it could answer twice, which would reveal a client's model"
            )
        party = cls(stored.client, identity, policy, ledger, entropy)
        party.state = stored.state
        if isinstance(stored.state, Opened):
            policy.check(party._settings(stored.state))
        return party

    def __reduce__(self) -> NoReturn:
        raise LocalProtocolError(
            "a party is not copied or pickled: two copies could answer differently, or use one "
            "mask twice, which would reveal a client's model; store snapshot() and restore it"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(client={self.client}, state={self.state!r})"

    # -- registration and the end ------------------------------------------------------------

    def _advertise(self, message: Opening, settings: Settings) -> Advertised:
        """Fresh keys for settings that this client has accepted."""
        keys = draw_keys(settings, self.client, self._identity, self._entropy)
        privates = tuple(pair.private_bytes() for pair in keys.pairs)
        return Advertised(message.settings, privates, keys.advertise)

    def _enter_roster(self, state: Advertised, roster: Roster) -> ClientScheme:
        """The scheme of the roster, if it is accepted."""
        scheme = enter_roster(
            self._settings(state),
            self._policy,
            roster,
            self.client,
            state.advertise,
            self._scheme_class,
        )
        self._scheme_cache, self._key_cache = scheme, None
        return scheme

    def _on_repeated_opening(self, state: Opened, message: Opening) -> list[Output]:
        if message.settings != state.settings:
            raise RemoteProtocolError(
                f"the server opened two {self.mode}s at once with this client"
            )
        if isinstance(state, Advertised):
            return [Send(SERVER, state.advertise)]
        return self._on_late(state, message)

    def _on_repeated_roster(self, state: Fixed, message: Roster) -> list[Output]:
        if message != state.roster:
            raise RemoteProtocolError(
                f"a second, different roster in one {self.mode} is refused: shares for two rosters "
                "would reveal this client's mask"
            )
        return self._on_late(state, message)

    def _on_late(self, state: State, message: Message) -> list[Output]:
        """A message that has done its work before, or can no longer do it."""
        self.late_messages[type(message).__name__] += 1
        return []

    def _on_abort(self, state: State, message: AbortRound) -> list[Output]:
        if isinstance(state, Closed):
            return []
        reason = shown(message.reason)
        self._forget(reason)
        return [RoundAborted(reason)]

    # -- helpers -----------------------------------------------------------------------------

    def _forget(self, reason: str) -> None:
        self.state = _any(Closed(reason))
        self._scheme_cache = self._key_cache = None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise MaskAlreadyUsed(
                "this party was copied by a fork: the copy and the original could answer "
                "differently, or use one mask twice, which would reveal a client's model; restore "
                "a snapshot instead"
            )

    def _check_newest(self) -> None:
        """Go on no more once a newer one was opened with the same ledger (S06, S07)."""
        state = self.state
        if not isinstance(state, Opened):
            return
        number, newest = self._settings(state).round, self.ledger.last_round
        if number != newest:
            # The ledger is the newer party's now: this change is none of its generations.
            self._forget(f"this client has opened {self.mode} {newest}")
            raise RemoteProtocolError(
                f"{self.mode} {number} is over: this client has opened {self.mode} {newest}"
            )

    def _unexpected(self, message: Message, state: object = None) -> str:
        kind = type(message).__name__
        if isinstance(self.state, Closed):
            return (
                f"{kind} refused: the {self.mode} is over for client {self.client}, its secrets "
                "gone"
            )
        return f"{kind} is not expected by client {self.client} while {state or self.state!r}"

    def _settings(self, state: Opened) -> Settings:
        data = state.settings
        if self._settings_cache is None or self._settings_cache[0] != data:
            self._settings_cache = (data, Settings.from_bytes(data))
        return self._settings_cache[1]

    def _scheme(self, state: Fixed) -> ClientScheme:
        if self._scheme_cache is None:
            round_ = fix_round(self._settings(state), self._policy.allow_list, state.roster)
            self._scheme_cache = self._scheme_class(round_, self.client)
        return self._scheme_cache

    def _sealing_key(self, private: bytes) -> AgreementKey:
        """The key that opens shares; it remembers what was agreed when the own ones were sealed."""
        if self._key_cache is None:
            self._key_cache = AgreementKey(private)
        return self._key_cache


def _any(state: Any) -> Any:
    """Waiting and Closed are states of every machine, which no type variable can say."""
    return state
