"""Registration: from the opening, by way of fresh keys, to the roster that fixes C1.

The same in a round and in an epoch of the asynchronous mode. A client takes an opening that its
policy and its ledger admit (S01, S06, S44), draws fresh keys and signs them over C0; it accepts
one roster (S02), and holds the scheme of that roster from then on. The server refuses keys that
clients would refuse (S45), and lists those that came in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy, random_order
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.interface import Send
from lightsecagg.protocol.journal_facts import VERSION, RosterFixed
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.messages import AbortRound, Advertise, Member, Opening, Roster
from lightsecagg.protocol.policy import Policy
from lightsecagg.protocol.roster import accept_roster, check_fresh, check_keys, fix_round, sign_keys
from lightsecagg.protocol.schemes.interface import ClientScheme, ServerScheme
from lightsecagg.protocol.schemes.registry import scheme_of
from lightsecagg.protocol.settings import Settings


class FreshKeys(NamedTuple):
    """A client's keys for one round or epoch."""

    pairs: tuple[AgreementKey, ...]
    """Of LightSecAgg one, of SecAgg two; the first one seals shares."""
    advertise: Advertise

    def __repr__(self) -> str:
        return f"FreshKeys({len(self.pairs)})"


def accept_opening(message: Opening, policy: Policy, ledger: Ledger) -> Settings:
    """The client's half, first step: the settings, if this client takes part."""
    settings = Settings.from_bytes(message.settings)
    policy.check(settings)
    # An epoch names no model, and its uploads are of many: what counts is how many epochs are
    # opened and ended again without an upload.
    unconfirmed, most = policy.model is None or not settings.one_sum, policy.max_openings
    ledger.check_round(settings.round, settings.model, policy.max_attempts)
    if unconfirmed:
        ledger.check_unconfirmed(most)
    if settings.one_sum:
        ledger.count_opening(settings.model, most)
    if unconfirmed:
        ledger.count_unconfirmed(most)
    ledger.open_round(settings.round, settings.model, policy.max_attempts)
    return settings


def draw_keys(
    settings: Settings, client: int, identity: IdentityKey, entropy: Entropy
) -> FreshKeys:
    """The client's half, second step: keys that nobody has seen before, and their signature."""
    pairs = tuple(AgreementKey.generate(entropy) for _ in range(settings.traits.key_count))
    keys = tuple(pair.public for pair in pairs)
    return FreshKeys(pairs, Advertise(keys, sign_keys(identity, settings.context, client, keys)))


def enter_roster(
    settings: Settings,
    policy: Policy,
    roster: Roster,
    client: int,
    advertise: Advertise,
    scheme: type[ClientScheme],
) -> ClientScheme:
    """The client's half, third step: its scheme, once it accepts the roster."""
    round_ = accept_roster(settings, policy.allow_list, roster, client, advertise.keys)
    policy.check_graph(settings, len(round_.members))
    return scheme(round_, client)


@dataclass(slots=True)
class Away:
    """Members who are not here."""

    offline: set[int] = field(default_factory=set)
    """Those who may be back soon included."""
    gone: set[int] = field(default_factory=set)
    """Whom no phase waits for."""
    lost: set[int] = field(default_factory=set)
    """Those without a memory of this epoch."""

    def online(self, members: Iterable[int]) -> list[int]:
        """Those of them who are here."""
        return [client for client in members if client not in self.offline]


class Registration:
    """The server's half: who was invited, the keys of those who came, and the roster of them."""

    def __init__(
        self,
        settings: Settings,
        allow_list: AllowList,
        invited: Iterable[int] | None,
        entropy: Entropy,
    ) -> None:
        """Invite these clients, or everybody on the allow-list."""
        if settings.allow_list != allow_list.digest:
            raise ParameterError("the settings were made for another allow-list")
        self.invited = tuple(allow_list.clients if invited is None else invited)
        self.advertised: dict[int, Advertise] = {}
        self.allow_list = allow_list
        self.roster: Roster | None = None
        self.scheme: ServerScheme
        """Of the roster."""
        self._guests = frozenset(self.invited)
        self._settings, self._entropy = settings, entropy
        self._taken_keys: set[bytes] = set()
        self._check_invited()

    def _check_invited(self) -> None:
        least, most = self._settings.minimum, self._settings.parameters.clients
        if strangers := [c for c in self.invited if c not in self.allow_list]:
            raise ParameterError(f"clients {strangers} are invited but not on the allow-list")
        if len(self._guests) != len(self.invited):
            raise ParameterError("a client is invited twice")
        if not least <= len(self.invited) <= most:
            raise ParameterError(
                f"{len(self.invited)} clients are invited; these parameters take "
                f"{least} to N = {most}"
            )

    def open(self) -> list[Send]:
        """Tell everybody the settings."""
        opening = Opening(self._settings.to_bytes())
        return [Send(client, opening) for client in self.invited]

    def check_invited(self, sender: int) -> None:
        """Refuse strangers."""
        if sender not in self._guests:
            raise RemoteProtocolError(f"client {sender} was not invited")

    def on_advertise(self, sender: int, message: Advertise) -> bool:
        """Take a client's keys; False if they were here already."""
        if sender in self.advertised:
            if message != self.advertised[sender]:
                raise RemoteProtocolError(f"client {sender} advertised two sets of keys")
            return False
        count = self._settings.traits.key_count
        check_keys(self._settings, self.allow_list, sender, message.keys, message.signature, count)
        check_fresh(sender, message.keys, self._taken_keys)
        self._taken_keys.update(message.keys)
        self.advertised[sender] = message
        return True

    def close(self) -> list[Send]:
        """Fix the roster: everybody whose keys are here, in the order of the invitations."""
        members = tuple(
            Member(client, self.advertised[client].keys, self.advertised[client].signature)
            for client in self.invited
            if client in self.advertised
        )
        ring = self._settings.traits.ring
        graph = random_order(range(len(members)), self._entropy) if ring else ()
        roster = Roster(members, graph)
        self.fix(roster)
        late = AbortRound("the keys of this client were not advertised in time")
        return [Send(c, roster if c in self.advertised else late) for c in self.invited]

    def fix(self, roster: Roster) -> None:
        """Hold this roster and its scheme from now on."""
        round_ = fix_round(self._settings, self.allow_list, roster)
        protocol, mode = self._settings.protocol, self._settings.parameters.share_mode
        self.scheme = scheme_of(protocol, share_mode=mode).server(round_, self._entropy)
        self.roster = roster

    def fact(self, buffer_size: int, time: int) -> RosterFixed:
        """The promise of this roster."""
        if self.roster is None:
            raise AssertionError("a roster is promised, and there is none")
        settings = self._settings.to_bytes()
        return RosterFixed(VERSION, settings, self.invited, buffer_size, time, self.roster)

    @property
    def members(self) -> tuple[int, ...]:
        """Whoever is on the roster, in its order; nobody before there is one."""
        return () if self.roster is None else self.scheme.round.members
