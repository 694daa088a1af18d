"""What a protocol is before any secret is drawn: its phases, its limits and its sizes.

There is one `Traits` value per protocol, and `TRAITS` finds it by the name that `Settings` carry.
Whoever must know what a protocol does (settings, policies, budgets, forecasts, reports) asks here
and never for its name. Nothing in this module draws, masks or recovers: that is what the schemes
do, which `schemes.registry` finds by the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from lightsecagg.crypto import prg
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.field import shamir
from lightsecagg.masks.sharing_graph import leak_bound
from lightsecagg.params import ShareMode, ThreatModel
from lightsecagg.protocol.interface import Phase

if TYPE_CHECKING:
    from lightsecagg.protocol.settings import Policy, Settings

SECRET_SHARE_BYTES: Final = 4 * shamir.LIMBS
"""SecAgg: a share of one secret, as field elements."""

SHAMIR_SHARE_BYTES: Final = 2 * SECRET_SHARE_BYTES
"""SecAgg: what one holder gets, a share of b_i, then a share of sk_i."""


class ProtocolName(StrEnum):
    """The protocols that come with this package; `schemes.registry.register` adds others."""

    LIGHTSECAGG = "lightsecagg"
    SECAGG = "secagg"
    SECAGG_PLUS = "secagg+"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of one kind that every client of a full roster sends, and receives."""

    count: int
    length: int
    """Bytes of one of them, before it is sealed."""


@dataclass(frozen=True)
class Traits:
    """One protocol. The defaults are those of a scheme that shares with everybody."""

    name: str
    """What `Settings.protocol` says, on the wire as well."""
    label: str
    """Its name for a reader."""
    key_count: int = 1
    """How many X25519 pairs a client draws; the first one seals shares."""
    phases: tuple[Phase, ...] = tuple(phase for phase in Phase if phase is not Phase.DONE)
    """The phases of a synchronous round, in order; `agree` in malicious-server mode only."""
    weakness: str = ""
    """Why there is no malicious-server mode; empty where there is one."""
    buffered: bool = False
    """Whether there is an asynchronous mode."""
    protected: bool = True
    """Whether anything hides an update from the server."""
    ring: bool = False
    """Whether the roster brings a random ring, whose neighbours mask and share; else all do."""
    share_modes: tuple[ShareMode, ...] = ()
    """How masks may be shared; empty where `Parameters.share_mode` means nothing."""

    @property
    def threat_models(self) -> tuple[ThreatModel, ...]:
        """The threat models that it has an answer to."""
        return (ThreatModel.HONEST_BUT_CURIOUS,) if self.weakness else tuple(ThreatModel)

    # -- limits ------------------------------------------------------------------------------

    def check(self, settings: Settings) -> None:
        """Raise `ParameterError` unless these settings can work and protect."""
        if settings.parameters.threat_model not in self.threat_models:
            raise ParameterError(self.weakness)
        if not self.ring and (settings.neighbours or settings.threshold):
            raise ParameterError("only secagg+ has neighbours and a threshold of its own")

    def check_policy(self, policy: Policy, settings: Settings) -> None:
        """Raise `RemoteProtocolError` if settings break what a policy says of this protocol."""

    def check_roster(self, policy: Policy, settings: Settings, members: int) -> None:
        """Raise `RemoteProtocolError` if a roster of so many does not protect its members."""

    def minimum(self, settings: Settings) -> int:
        """The fewest clients that a roster or survivor set may hold."""
        return settings.parameters.minimum

    def degree(self, settings: Settings, members: int) -> int:
        """With how many peers each of so many clients shares and masks."""
        return members - 1

    # -- sizes -------------------------------------------------------------------------------

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        """What a client sends to its peers, by kind."""
        return {}


class CodedMaskTraits(Traits):
    """LightSecAgg: masks of which any U shares tell the sum, and T shares nothing."""

    def check_policy(self, policy: Policy, settings: Settings) -> None:
        """The share mode that the client demands, and no more shares than it has room for."""
        parameters = settings.parameters
        if policy.share_mode is not None and parameters.share_mode is not policy.share_mode:
            raise refused(
                f"{parameters.share_mode} shares, this client demands {policy.share_mode}"
            )
        masks = 1 if settings.buffering is None else settings.buffering.stock
        size = 4 * masks * parameters.clients * settings.share_length
        if policy.max_share_bytes is not None and size > policy.max_share_bytes:
            raise refused(
                f"{masks} x N = {parameters.clients} shares of L = {settings.share_length} "
                f"elements, {size} bytes, this client allows {policy.max_share_bytes}; raise U - T"
            )

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        """L elements each; in seeded mode, seeds to the U clients after the owner.

        For U = N the owner is one of them itself.
        """
        peers, U = settings.parameters.clients - 1, settings.parameters.survivors
        if settings.parameters.share_mode is ShareMode.PAPER:
            return {ShareKind.EXPLICIT: Shares(peers, 4 * settings.share_length)}
        seeds = min(peers, U)
        return {
            ShareKind.EXPLICIT: Shares(peers - seeds, 4 * settings.share_length),
            ShareKind.SEED: Shares(seeds, prg.SEED_LENGTH),
        }


class PairwiseMaskTraits(Traits):
    """SecAgg, and on a random ring SecAgg+: masks between pairs, and two shared secrets each."""

    def check(self, settings: Settings) -> None:
        """The threshold must fit the graph, the threat model and the field."""
        super().check(settings)
        if self.ring:
            self._check_ring(settings)
        parameters = settings.parameters
        N, T, t = parameters.clients, parameters.privacy, parameters.survivors
        if parameters.threat_model is ThreatModel.MALICIOUS_SERVER and 2 * t <= N + T:
            raise ParameterError(
                f"{self.name} in malicious-server mode needs a threshold t with 2t > N + T, "
                f"but t = {t}, N = {N}, T = {T}: a server that tells two halves of the clients "
                "different stories could rebuild both secrets of one client; raise survivors"
            )
        if settings.field.modulus <= 2**16:
            raise ParameterError(
                f"{self.name} shares its secrets in 16-bit limbs, which q = "
                f"{settings.field.modulus} cannot hold; take a modulus above 2^16"
            )

    def _check_ring(self, settings: Settings) -> None:
        k, t, N = settings.neighbours, settings.sharing_threshold, settings.parameters.clients
        if not 0 < k < N:
            raise ParameterError(
                f"{self.name} needs a number of neighbours k with 0 < k < N = {N}, got {k}"
            )
        if not 0 < t <= k:
            raise ParameterError(
                f"{self.name} needs a threshold t with 0 < t <= k = {k}, got {t}: only a "
                "client's neighbours hold shares of its key"
            )

    def check_roster(self, policy: Policy, settings: Settings, members: int) -> None:
        """Refuse a sparse graph that does not protect so many members."""
        if not self.ring:
            return
        absent = settings.parameters.clients - members
        bound = leak_bound(
            clients=members,
            privacy=settings.parameters.privacy,
            dropouts=max(0, settings.parameters.dropouts - absent),
            degree=self.degree(settings, members),
            threshold=settings.sharing_threshold,
        )
        if policy.graph_security and bound * 2**policy.graph_security >= 1:
            raise refused(
                f"k = {settings.neighbours} neighbours and threshold t = "
                f"{settings.sharing_threshold}, which leave some of {members} clients unprotected "
                f"with a probability of up to {min(1.0, float(bound)):.2g}, this client allows "
                f"2^-{policy.graph_security}; see find_graph_parameters"
            )

    def minimum(self, settings: Settings) -> int:
        """On a ring all N - D: that it stays connected was computed for D dropouts.

        A part that is cut off from the rest would be summed alone.
        """
        parameters = settings.parameters
        if not self.ring:
            return parameters.minimum
        return max(parameters.minimum, parameters.clients - parameters.dropouts)

    def degree(self, settings: Settings, members: int) -> int:
        """On a ring k, and one more if k and the members are odd: no such graph exists."""
        if not self.ring:
            return members - 1
        degree = min(settings.neighbours, members - 1)
        return degree + degree * members % 2

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        """To every neighbour a share of each secret."""
        neighbours = self.degree(settings, settings.parameters.clients)
        return {ShareKind.SHAMIR: Shares(neighbours, SHAMIR_SHARE_BYTES)}


class NoMaskTraits(Traits):
    """Plain summation: nothing is shared, nobody answers."""

    def degree(self, settings: Settings, members: int) -> int:
        """Nobody has anything to share."""
        return 0


def refused(what: str) -> RemoteProtocolError:
    """What a client says of settings that break its policy."""
    return RemoteProtocolError(f"round settings refused: the server proposed {what}")


def traits_of(protocol: str) -> Traits:
    """The traits of the protocol with this name."""
    try:
        return TRAITS[protocol]
    except KeyError:
        raise ParameterError(
            f"protocol {protocol!r} is unknown; choose one of {', '.join(TRAITS)}"
        ) from None


TRAITS: Final[dict[str, Traits]] = {
    traits.name: traits
    for traits in (
        CodedMaskTraits(
            ProtocolName.LIGHTSECAGG, "LightSecAgg", buffered=True, share_modes=tuple(ShareMode)
        ),
        PairwiseMaskTraits(ProtocolName.SECAGG, "SecAgg", key_count=2),
        PairwiseMaskTraits(
            ProtocolName.SECAGG_PLUS,
            "SecAgg+",
            key_count=2,
            ring=True,
            weakness="secagg+ in malicious-server mode is refused: the server picks the graph and "
            "could surround a client with colluders; use lightsecagg or secagg",
        ),
        NoMaskTraits(
            ProtocolName.PLAIN,
            "plain FedAvg",
            key_count=0,
            phases=(Phase.UPLOAD,),
            buffered=True,
            protected=False,
            weakness="plain summation protects from nobody: it has no malicious-server mode",
        ),
    )
}
"""By name. Schemes from elsewhere are added by `schemes.registry.register`."""
