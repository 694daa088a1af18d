"""What SecAgg, SecAgg+ and plain summation are: phases, limits and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import ParameterError
from lightsecagg.field.group import Group
from lightsecagg.field.words import WORDS
from lightsecagg.params import Parameters, ThreatModel
from lightsecagg.protocol.messages import UnmaskingShares
from lightsecagg.protocol.schemes.traits import Resolved, Shares, Traits, refused
from lightsecagg.protocol.wire import Codec
from lightsecagg_lab.schemes import shamir
from lightsecagg_lab.schemes.sharing_graph import find_graph_parameters, leak_bound

if TYPE_CHECKING:
    from lightsecagg.protocol.policy import Policy
    from lightsecagg.protocol.settings import Settings

SECRET_SHARE_BYTES: Final = 4 * shamir.LIMBS
"""SecAgg: a share of one secret, as field elements."""

SHAMIR_SHARE_BYTES: Final = 2 * SECRET_SHARE_BYTES
"""SecAgg: what one holder gets, a share of b_i, then a share of sk_i."""


class ProtocolName(StrEnum):
    """LightSecAgg and its baselines."""

    LIGHTSECAGG = "lightsecagg"
    SECAGG = "secagg"
    SECAGG_PLUS = "secagg+"
    PLAIN = "plain"


class PairwiseMaskTraits(Traits):
    """SecAgg, and on a random ring SecAgg+: masks between pairs, and two shared secrets each."""

    def resolve(self, parameters: Parameters, neighbours: int = 0, threshold: int = 0) -> Resolved:
        """The smallest t: it tolerates most and rebuilds fastest; on a ring, the finder's k and t.

        SecAgg's t stands where others have U.
        """
        self.check_wishes(neighbours, threshold)
        N, T, D = parameters.clients, parameters.privacy, parameters.dropouts
        if not self.ring:
            smallest = max(T + 1, parameters.quorum)
            return Resolved(replace(parameters, survivors=threshold or smallest))
        parameters = replace(parameters, survivors=0)
        if neighbours and threshold:
            return Resolved(parameters, neighbours, threshold)
        found = find_graph_parameters(N, T, D)
        return Resolved(parameters, neighbours or found.degree, threshold or found.threshold)

    def group(self, parameters: Parameters) -> Group:
        """Masks that only cancel need no field, and streams of words are masks as they come."""
        return WORDS

    def describe(self, settings: Settings) -> dict[str, Any]:
        """k, t, and how likely the ring fails to protect."""
        N = settings.parameters.clients
        return {
            "neighbours": self.degree(settings, N),
            "threshold": settings.sharing_threshold,
            "leak_probability": min(1.0, float(self.leak(settings, N))),
        }

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
        bound = self.leak(settings, members)
        if policy.graph_security and bound * 2**policy.graph_security >= 1:
            raise refused(
                f"k = {settings.neighbours} neighbours and threshold t = "
                f"{settings.sharing_threshold}, which leave some of {members} clients unprotected "
                f"with a probability of up to {min(1.0, float(bound)):.2g}, this client allows "
                f"2^-{policy.graph_security}; see find_graph_parameters"
            )

    def leak(self, chosen: Settings | Resolved, members: int) -> Fraction:
        """Where everybody is everybody's neighbour, nothing is left to chance."""
        if not self.ring:
            return Fraction(0)
        parameters = chosen.parameters
        absent = parameters.clients - members
        return leak_bound(
            clients=members,
            privacy=parameters.privacy,
            dropouts=max(0, parameters.dropouts - absent),
            degree=self.degree(chosen, members),
            threshold=chosen.threshold,
        )

    def minimum(self, settings: Settings) -> int:
        """On a ring all N - D: that it stays connected was computed for D dropouts.

        A part that is cut off from the rest would be summed alone.
        """
        parameters = settings.parameters
        if not self.ring:
            return parameters.minimum
        return max(parameters.minimum, parameters.clients - parameters.dropouts)

    def degree(self, chosen: Settings | Resolved, members: int) -> int:
        """On a ring k, and one more if k and the members are odd: no such graph exists."""
        if not self.ring:
            return members - 1
        degree = min(chosen.neighbours, members - 1)
        return degree + degree * members % 2

    def shares(self, settings: Settings) -> Mapping[ShareKind, Shares]:
        """To every neighbour a share of each secret."""
        neighbours = self.degree(settings, settings.parameters.clients)
        return {ShareKind.SHAMIR: Shares(neighbours, SHAMIR_SHARE_BYTES)}

    def answer_bytes(self, settings: Settings, dropped: int) -> int:
        """A survivor holds shares of its neighbours and of itself; some neighbours dropped."""
        N = settings.parameters.clients
        held = self.degree(settings, N) + 1
        least, most = max(0, held - (N - dropped)), min(dropped, held - 1)
        answers = (
            UnmaskingShares(
                of_seeds=bytes((held - dead) * SECRET_SHARE_BYTES),
                of_keys=bytes(dead * SECRET_SHARE_BYTES),
            )
            for dead in range(least, most + 1)
        )
        return max(len(Codec(settings.group).encode(answer)) for answer in answers)


class NoMaskTraits(Traits):
    """Plain summation: nothing is shared, nobody answers."""

    def describe(self, settings: Settings) -> dict[str, Any]:
        """It has none."""
        return {}

    def degree(self, chosen: Settings | Resolved, members: int) -> int:
        """Nobody has anything to share."""
        return 0
