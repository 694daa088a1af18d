"""What a protocol is before any secret is drawn: its phases, its limits and its sizes.

There is one `Traits` value per protocol; `traits_of` finds it by the name in the `Settings`.
Whoever must know what a protocol does (settings, policies, budgets, forecasts, reports) asks here
and never for its name. Nothing in this module draws, masks or recovers: that is what the schemes
do, which `schemes.registry` finds by the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.field.group import Group
from lightsecagg.field.prime import PrimeField
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.params import DEFAULT_MODULUS, Parameters, ShareMode, ThreatModel
from lightsecagg.plugins import SCHEMES, added
from lightsecagg.protocol.interface import Phase
from lightsecagg.protocol.messages import AggregatedShare
from lightsecagg.protocol.quantizers import decoding_of, make_quantizer
from lightsecagg.protocol.wire import Codec

if TYPE_CHECKING:
    from lightsecagg.protocol.policy import Policy
    from lightsecagg.protocol.settings import Settings

LIGHTSECAGG: Final = "lightsecagg"
"""The protocol of this package; other distributions add theirs (`plugins.SCHEMES`)."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of one kind that every client of a full roster sends, and receives."""

    count: int
    length: int
    """Bytes of one of them, before it is sealed."""


class Resolved(NamedTuple):
    """A protocol's own parameters, as `Settings` take them."""

    parameters: Parameters
    neighbours: int = 0
    threshold: int = 0


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
    has_threshold: bool = False
    """Whether secrets are shared with a threshold t of their own instead of U."""
    checked: bool = False
    """Whether clients report on the shares that they hold, so that liars are found (S46)."""
    share_modes: tuple[ShareMode, ...] = ()
    """How masks may be shared; empty where `Parameters.share_mode` means nothing."""

    @property
    def threat_models(self) -> tuple[ThreatModel, ...]:
        """The threat models that it has an answer to."""
        return (ThreatModel.HONEST_BUT_CURIOUS,) if self.weakness else tuple(ThreatModel)

    # -- parameters --------------------------------------------------------------------------

    def resolve(self, parameters: Parameters, neighbours: int = 0, threshold: int = 0) -> Resolved:
        """The parameters of a round, from those that LightSecAgg would have.

        * `neighbours` k and `threshold` t, where there are such; 0 for the best.
        """
        self.check_wishes(neighbours, threshold)
        return Resolved(parameters)

    def check_wishes(self, neighbours: int, threshold: int) -> None:
        """Raise `ParameterError` for parameters that this protocol does not have."""
        if neighbours and not self.ring:
            raise ParameterError(f"neighbours are for secagg+, not for {self.name}")
        if threshold and not self.has_threshold:
            raise ParameterError(f"a threshold is for secagg and secagg+, not for {self.name}")

    def group(self, parameters: Parameters) -> Group:
        """What uploads are vectors over, and masks with them."""
        return PrimeField(parameters.modulus)

    def describe(self, settings: Settings) -> dict[str, Any]:
        """Its own parameters, for reports."""
        return {"survivors": settings.parameters.survivors}

    # -- limits ------------------------------------------------------------------------------

    def check(self, settings: Settings) -> None:
        """Raise `ParameterError` unless these settings can work and protect."""
        if settings.parameters.threat_model not in self.threat_models:
            raise ParameterError(self.weakness)
        if not self.ring and (settings.neighbours or settings.threshold):
            raise ParameterError("only secagg+ has neighbours and a threshold of its own")
        if settings.has_short_keys and ShareMode.SHORT_KEY not in self.share_modes:
            raise ParameterError(f"short keys are for lightsecagg, not for {self.name}")
        if not settings.has_short_keys and settings.quantizer.noise:
            raise ParameterError("only short keys leave noise in a sum; take a quantizer without")

    def check_policy(self, policy: Policy, settings: Settings) -> None:
        """Raise `RemoteProtocolError` if settings break what a policy says of this protocol."""

    def check_roster(self, policy: Policy, settings: Settings, members: int) -> None:
        """Raise `RemoteProtocolError` if a roster of so many does not protect its members."""

    def leak(self, chosen: Settings | Resolved, members: int) -> Fraction:
        """Bound on the probability that chance leaves one of so many members unprotected."""
        return Fraction(0)

    def minimum(self, settings: Settings) -> int:
        """The fewest clients that a roster or survivor set may hold."""
        return settings.parameters.minimum

    def degree(self, chosen: Settings | Resolved, members: int) -> int:
        """With how many peers each of so many clients shares and masks."""
        return members - 1

    # -- sizes -------------------------------------------------------------------------------

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        """What a client sends to its peers, by kind; the explicit ones grow with the vector."""
        return {}

    def answer_bytes(self, settings: Settings, dropped: int) -> int:
        """The longest answer on the wire, if so many clients vanish before their upload."""
        if ShareKind.EXPLICIT not in (shares := self.shares(settings)):
            return 0
        one = AggregatedShare(np.zeros(1, dtype=np.uint32))
        return len(Codec(settings.group).encode(one)) - 4 + shares[ShareKind.EXPLICIT].length


class CodedMaskTraits(Traits):
    """LightSecAgg: masks of which any U shares tell the sum, and T shares nothing."""

    def describe(self, settings: Settings) -> dict[str, Any]:
        """U, the share mode and L; of short keys, the decoding."""
        parameters = settings.parameters
        decoding = {"decoding": decoding_of(settings.quantizer).value}
        return {
            "survivors": parameters.survivors,
            "share_mode": parameters.share_mode.value,
            "share_length": settings.share_length,
        } | (decoding if settings.has_short_keys else {})

    def check(self, settings: Settings) -> None:
        """Short keys exist in one field, with one noise, and in sums of equal weights alone."""
        super().check(settings)
        if not settings.has_short_keys:
            return
        parameters, quantizer, buffering = (
            settings.parameters,
            settings.quantizer,
            settings.buffering,
        )
        if parameters.modulus != DEFAULT_MODULUS:
            raise ParameterError(
                f"short keys need the modulus q = {DEFAULT_MODULUS}, not {parameters.modulus}: "
                "their hardness was estimated for it, and it has the transforms"
            )
        if buffering is not None and buffering.singles_out(parameters):
            raise ParameterError(
                "short keys need equal weights: different ones reveal the noise, and with it "
                "whole updates; take constant staleness or strict buffers"
            )
        expected = make_quantizer(
            parameters,
            settings.dimension,
            quantizer.bound,
            max_samples=quantizer.max_samples,
            weighted=quantizer.weighted,
            scale=quantizer.scale,
            buffering=buffering,
            decoding=decoding_of(quantizer),
        )
        if (quantizer.step, quantizer.noise) != (expected.step, expected.noise):
            raise ParameterError(
                f"t = {quantizer.step} and Emax = {quantizer.noise} are not those of these short "
                f"keys, {expected.step} and {expected.noise}; see make_quantizer"
            )

    def check_policy(self, policy: Policy, settings: Settings) -> None:
        """The share mode that the client demands, and no more shares than it has room for."""
        parameters = settings.parameters
        if policy.share_mode is not None and parameters.share_mode is not policy.share_mode:
            raise refused(
                f"{parameters.share_mode} shares, this client demands {policy.share_mode}"
            )
        if policy.share_mode is None and settings.has_short_keys:
            raise refused(
                "short keys, which rest on ring-LWE; a client that takes this assumption too says "
                "so in its policy (share_mode = 'short-key')"
            )
        masks = 1 if settings.buffering is None else settings.buffering.stock
        size = 4 * masks * parameters.clients * settings.shared_length
        if policy.max_share_bytes is not None and size > policy.max_share_bytes:
            raise refused(
                f"{masks} x N = {parameters.clients} shares of L + 2 = {settings.shared_length} "
                f"elements, {size} bytes, this client allows {policy.max_share_bytes}; raise U - T"
            )

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        """L + 2 elements each; but with seeds, 32 bytes to the U clients after the owner.

        For U = N the owner is one of them itself.
        """
        peers, U = settings.parameters.clients - 1, settings.parameters.survivors
        if not settings.uses_seeds:
            return {ShareKind.EXPLICIT: Shares(peers, 4 * settings.shared_length)}
        seeds = min(peers, U)
        return {
            ShareKind.EXPLICIT: Shares(peers - seeds, 4 * settings.shared_length),
            ShareKind.SEED: Shares(seeds, prg.SEED_LENGTH),
        }

    def answer_bytes(self, settings: Settings, dropped: int) -> int:
        """A sum of shares has no blinds."""
        return super().answer_bytes(settings, dropped) - 4 * BLINDS


def refused(what: str) -> RemoteProtocolError:
    """What a client says of settings that break its policy."""
    return RemoteProtocolError(f"round settings refused: the server proposed {what}")


def traits_of(protocol: str) -> Traits:
    """The traits of the protocol with this name; one of another distribution is loaded."""
    if protocol not in TRAITS and protocol in added(SCHEMES):
        added(SCHEMES)[protocol].load()()
    if protocol not in TRAITS:
        raise ParameterError(
            f"protocol {protocol!r} is unknown; choose one of {', '.join(protocols())}"
        )
    return TRAITS[protocol]


def protocols() -> tuple[str, ...]:
    """The names of all protocols that can be used here, ours first."""
    return (LIGHTSECAGG, *sorted({*TRAITS, *added(SCHEMES)} - {LIGHTSECAGG}))


TRAITS: Final[dict[str, Traits]] = {
    LIGHTSECAGG: CodedMaskTraits(
        LIGHTSECAGG,
        "LightSecAgg",
        buffered=True,
        checked=True,
        share_modes=(ShareMode.SEEDED, ShareMode.PAPER, ShareMode.SHORT_KEY),
    )
}
"""By name, those that are loaded; `schemes.registry.register` adds others."""
