"""Everything that the parties of a round must agree on, and its hash, the context C0.

A server proposes `Settings`; a client holds a `Policy` and refuses what falls short of it. The
server may tighten what a policy demands, never loosen it. Every signature of the advertise step
is over C0, so two clients that were told different settings never accept each other's keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto.identity import check_identity_key
from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash, uint
from lightsecagg.errors import (
    CryptoError,
    DecodeError,
    ParameterError,
)
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import Elements, PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.field.staleness import MAX_SCALE, StalenessTable
from lightsecagg.foreign import decode, shown
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.masks.sharing_graph import SIGMA
from lightsecagg.params import Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.schemes.traits import TRAITS, Traits, refused, traits_of
from lightsecagg.protocol.schemes.traits import ProtocolName as ProtocolName

MAX_LENGTH = 2**30 - 1
"""The most elements of an upload or share: its length in bytes must fit 32 bits."""

MAX_UNANNOUNCED_DIMENSION = 2**26
"""The longest vector for which a client makes masks without having been told to expect it."""

SINGLED_OUT_SCALE = 2.0**16
"""The least c_l where an update may have a weight of its own: the paper's."""

NO_MODEL = bytes(HASH_LENGTH)
"""What a round names as its global model where vectors are summed that descend from none."""

MAX_ATTEMPTS = 2
"""The most uploads for one global model: a round, and one repeat of it (S42)."""

POINT_RULE = "ntt-leaves/1"
"""Names the rule that gives position j of the roster its evaluation point (`ntt.points`)."""


class AllowList:
    """Who may take part: client id -> Ed25519 identity key.

    In malicious-server mode this list must not be the server's to write.
    """

    def __init__(self, identities: Mapping[int, bytes]) -> None:
        for client, key in identities.items():
            if not 0 <= client < 0xFFFFFFFF:
                raise ParameterError(f"client id {client} must be in [0, 2^32 - 1)")
            try:
                check_identity_key(key, f"client {client}")
            except CryptoError as error:
                raise ParameterError(str(error)) from error
        if len(set(identities.values())) != len(identities):
            raise ParameterError("two clients of the allow-list share an identity key")
        self._identities = dict(sorted(identities.items()))

    def __contains__(self, client: int) -> bool:
        return client in self._identities

    def __len__(self) -> int:
        return len(self._identities)

    def __getitem__(self, client: int) -> bytes:
        return self._identities[client]

    @property
    def clients(self) -> tuple[int, ...]:
        """All ids, ascending."""
        return tuple(self._identities)

    @cached_property
    def digest(self) -> bytes:
        """What C0 binds."""
        parts: Iterable[bytes] = (
            part for client, key in self._identities.items() for part in (uint(client), key)
        )
        return context_hash("allow-list", *parts)


@dataclass(frozen=True, slots=True)
class Buffering:
    """The settings of the buffered-asynchronous mode, Section 4.2 and Appendix F.

    They decide which sums clients answer for, so every client pins them in its policy.
    """

    table: StalenessTable
    """The integer weights w(tau) for tau = 0..tau_max, and c_g."""
    max_updates: int
    """K_max: the most updates in one buffer."""
    max_ratio: float = 64.0
    """R: the largest max w / min w within one buffer."""
    strict: bool | None = None
    """Demand T + 2 owners per weight value: different integer weights reveal low bits, and the
    server hands out versions, hence weights. None demands it in malicious-server mode. Where all
    weights are equal it changes nothing."""
    stock: int = 4
    """How many unused masks of one owner a peer keeps; the oldest goes first."""
    share_lifetime: int = 64
    """A share expires this many buffers after it arrived."""

    def __post_init__(self) -> None:
        for name in ("max_updates", "stock"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.share_lifetime <= self.table.max_staleness:
            raise ParameterError(
                f"share_lifetime = {self.share_lifetime} must exceed tau_max = "
                f"{self.table.max_staleness}: an update that is still welcome needs its shares"
            )
        if not 1 <= self.max_ratio <= MAX_SCALE:
            raise ParameterError(f"max_ratio R = {self.max_ratio} must be in [1, 2^31]")

    def per_weight(self, parameters: Parameters) -> int:
        """The fewest owners that share a weight in a buffer: T + 2 if strict, otherwise 1."""
        strict = self.strict
        if strict is None:
            strict = parameters.threat_model is ThreatModel.MALICIOUS_SERVER
        return parameters.privacy + 2 if strict else 1

    def singles_out(self, parameters: Parameters) -> bool:
        """Whether one update may have a weight of its own in a buffer."""
        return self.table.ratio > 1 and self.per_weight(parameters) == 1

    def weights(self, now: int, versions: Iterable[int]) -> tuple[int, ...]:
        """w(t - t_i) for each update; `ParameterError` for a staleness outside [0, tau_max]."""
        return tuple(self.table.weight(now - version) for version in versions)


class _Fields(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings as they are hashed and sent; the order is wire format."""

    protocol: str
    threat_model: ThreatModel
    share_mode: ShareMode
    point_rule: str
    session: bytes
    round: int
    allow_list: bytes
    model: bytes
    clients: int
    privacy: int
    dropouts: int
    survivors: int
    modulus: int
    neighbours: int
    dimension: int
    weighted: bool
    bound: float
    max_samples: int
    scale: float
    buffering: Buffering | None
    threshold: int


_decoder = msgspec.msgpack.Decoder(_Fields)


@dataclass(frozen=True)
class Settings:
    """The settings of one synchronous round, or of one epoch of the asynchronous mode."""

    protocol: str
    """A name that `TRAITS` knows."""
    parameters: Parameters
    """For SecAgg and SecAgg+, `survivors` is the threshold t of the secret sharing."""
    quantizer: Quantizer
    dimension: int
    """Entries of the vector that a client contributes."""
    session: bytes
    """Names the federation; 32 bytes that no other federation uses."""
    round: int
    """Strictly increasing in a session, also when a round is tried again."""
    allow_list: bytes
    """`AllowList.digest`"""
    model: bytes = NO_MODEL
    """Hash of the global model that clients train from; see `hash_model`."""
    neighbours: int = 0
    """SecAgg+: the degree k of the sharing graph; 0 for the complete graph."""
    buffering: Buffering | None = None
    """The asynchronous mode's settings; `round` then numbers epochs, and `model` is NO_MODEL."""
    threshold: int = 0
    """SecAgg+: how many of its neighbours rebuild a client's secret; 0 stands for U."""

    def __post_init__(self) -> None:
        for name in ("session", "allow_list", "model"):
            if len(getattr(self, name)) != HASH_LENGTH:
                raise ParameterError(f"{name} must be {HASH_LENGTH} bytes")
        if self.round < 0:
            raise ParameterError(f"round {self.round} must not be negative")
        if self.quantizer.field.modulus != self.parameters.modulus:
            raise ParameterError("quantizer and parameters must use the same field")
        self._check_budget()
        self.parameters.share_length(self.dimension)
        if self.length > MAX_LENGTH:
            raise ParameterError(
                f"dimension d = {self.dimension} is too large: an upload has at most "
                f"{MAX_LENGTH} elements; sum the vector in parts"
            )
        self.traits.check(self)

    def _check_budget(self) -> None:
        if self.buffering is None:
            summands, weight = self.parameters.clients, 1
        else:
            summands, weight = self.buffering.max_updates, self.buffering.table.max_weight
            if not self.traits.buffered:
                raise ParameterError(f"{self.protocol} has no asynchronous mode")
            if summands < self.parameters.privacy + 2:
                raise ParameterError(
                    f"buffers of at most K_max = {summands} updates cannot reach T + 2 = "
                    f"{self.parameters.privacy + 2} owners, the fewest that clients accept"
                )
        if self.quantizer.summands < summands or self.quantizer.max_weight < weight:
            raise ParameterError(
                f"the quantizer's budget covers {self.quantizer.summands} vectors of weight "
                f"{self.quantizer.max_weight}, but {summands} of weight {weight} may be summed: "
                "the sum could wrap around"
            )

    @property
    def traits(self) -> Traits:
        """What the protocol is."""
        return traits_of(self.protocol)

    @property
    def field(self) -> PrimeField:
        """F_q"""
        return self.quantizer.field

    @property
    def minimum(self) -> int:
        """The fewest clients that a roster or survivor set may hold."""
        return self.traits.minimum(self)

    @property
    def sharing_threshold(self) -> int:
        """SecAgg's t: how many shares rebuild a secret."""
        return self.threshold or self.parameters.survivors

    def degree(self, members: int) -> int:
        """With how many peers each of so many clients shares and masks."""
        return self.traits.degree(self, members)

    @property
    def length(self) -> int:
        """Field elements of an upload: the vector and, if weighted, the sample count."""
        return self.quantizer.length(self.dimension)

    @property
    def share_length(self) -> int:
        """L"""
        return self.parameters.share_length(self.length)

    @property
    def shared_length(self) -> int:
        """L + 2: elements of a share on its way, with the blinds of the check (S46)."""
        return self.share_length + BLINDS

    @cached_property
    def code(self) -> MdsCode:
        """The T-private MDS code over the points of all N positions."""
        parameters = self.parameters
        points = ntt.points(self.field, parameters.clients)
        return MdsCode(self.field, parameters.survivors, parameters.privacy, points)

    @cached_property
    def context(self) -> bytes:
        """C0"""
        return context_hash("round settings", self.to_bytes())

    @cached_property
    def reading(self) -> bytes:
        """Names how updates become field elements and sums numbers again; the same in a repeat."""
        quantizer = self.quantizer
        return context_hash(
            "reading of an update",
            *map(uint, (self.field.modulus, self.dimension, quantizer.max_samples)),
            uint(quantizer.weighted),
            struct.pack(">dd", quantizer.bound, quantizer.scale),
        )

    def to_bytes(self) -> bytes:
        """One canonical encoding: what C0 hashes and `Opening` carries."""
        parameters, quantizer = self.parameters, self.quantizer
        return msgspec.msgpack.encode(
            _Fields(
                protocol=self.protocol,
                threat_model=parameters.threat_model,
                share_mode=parameters.share_mode,
                point_rule=POINT_RULE,
                session=self.session,
                round=self.round,
                allow_list=self.allow_list,
                model=self.model,
                clients=parameters.clients,
                privacy=parameters.privacy,
                dropouts=parameters.dropouts,
                survivors=parameters.survivors,
                modulus=parameters.modulus,
                neighbours=self.neighbours,
                dimension=self.dimension,
                weighted=quantizer.weighted,
                bound=quantizer.bound,
                max_samples=quantizer.max_samples,
                scale=quantizer.scale,
                buffering=self.buffering,
                threshold=self.threshold,
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Settings:
        """The inverse of `to_bytes`; `DecodeError` or `ParameterError` for anything else."""
        fields = decode(_decoder.decode, data, "settings")
        if fields.point_rule != POINT_RULE:
            raise DecodeError(f"unknown rule for the points: {shown(repr(fields.point_rule))}")
        if fields.protocol not in TRAITS:
            name = shown(repr(fields.protocol))
            raise DecodeError(f"malformed settings: unknown protocol {name}")
        parameters = Parameters(
            clients=fields.clients,
            privacy=fields.privacy,
            dropouts=fields.dropouts,
            survivors=fields.survivors,
            threat_model=fields.threat_model,
            share_mode=fields.share_mode,
            modulus=fields.modulus,
        )
        quantizer = Quantizer(
            field=PrimeField(fields.modulus),
            bound=fields.bound,
            summands=fields.buffering.max_updates if fields.buffering else fields.clients,
            max_weight=fields.buffering.table.max_weight if fields.buffering else 1,
            max_samples=fields.max_samples,
            weighted=fields.weighted,
            scale=fields.scale,
        )
        settings = cls(
            protocol=traits_of(fields.protocol).name,
            parameters=parameters,
            quantizer=quantizer,
            dimension=fields.dimension,
            session=fields.session,
            round=fields.round,
            allow_list=fields.allow_list,
            model=fields.model,
            neighbours=fields.neighbours,
            buffering=fields.buffering,
            threshold=fields.threshold,
        )
        if settings.to_bytes() != data:
            raise DecodeError("malformed settings: not in their one canonical form")
        return settings

    def average(self, total: Elements, included: int) -> tuple[NDArray[np.float64], int]:
        """The weighted average that a sum over so many clients stands for, and the sample count.

        For an unweighted quantizer, the plain sum and 1. `RecoveryError` if the average is beyond
        the bound, or the count not one of so many clients: somebody's upload was false (S47).
        """
        if not self.quantizer.weighted:
            return self.quantizer.plain_sum(total, included), 1
        return self.quantizer.weighted_mean(total, included)

    def buffer_average(self, total: Elements, weights: Iterable[int]) -> NDArray[np.float64]:
        """sum w x / sum w of a buffer, Eq. (35) and (37); with sample counts, sum w s x / sum w s.

        The denominator is the sum of the very integers that weighted the updates, at least 1
        each, so c_g cancels and nothing divides by zero. Refuses what `average` refuses.
        """
        weight = sum(weights)
        if self.quantizer.weighted:
            return self.quantizer.weighted_mean(total, weight)[0]
        return self.quantizer.plain_sum(total, weight, divisor=weight)


def hash_model(model: bytes | memoryview) -> bytes:
    """What `Settings.model` holds: a hash of the serialised global model."""
    return context_hash("global model", bytes(model))


@dataclass(frozen=True, slots=True)
class Policy:
    """What a client demands of every round; the server may only tighten it (S01).

    `docs/security.md` goes through all settings and says which of them a policy bounds, and why
    the others are the server's to choose.
    """

    allow_list: AllowList
    session: bytes
    privacy: int
    """The least T."""
    threat_model: ThreatModel = ThreatModel.HONEST_BUT_CURIOUS
    """`malicious-server` also refuses honest-but-curious rounds."""
    protocols: tuple[str, ...] = (ProtocolName.LIGHTSECAGG,)
    dimension: int | None = None
    """The length of the vectors this client contributes, if it is known in advance; otherwise
    the server may ask for at most `MAX_UNANNOUNCED_DIMENSION`, lest it exhaust the memory."""
    model: bytes = NO_MODEL
    """Hash of the global model that this client was given (S08). The server must name the same:
    if it could name any, it could name a new one each time and evade `max_attempts`."""
    buffering: Buffering | None = None
    """The asynchronous mode's settings, exactly; None for synchronous rounds (S09)."""
    max_attempts: int = MAX_ATTEMPTS
    """How often this client uploads an update trained from one and the same global model, at most
    `MAX_ATTEMPTS`; in rounds without a model, how often in the whole session. In the asynchronous
    mode its peers see to it that one of them is summed, so that there is no limit."""
    max_openings: int = 16
    """In how many rounds from one and the same global model this client takes part, those
    included that end before its upload (S44); without a model, in the whole session, and so many
    epochs of the asynchronous mode."""
    minimum: int = 0
    """The fewest clients whose updates may be summed. T + 2 is always demanded; a client that
    wants to hide in a larger crowd says so here, and takes `max_attempts` = 1: two sums from one
    model may differ by fewer."""
    share_mode: ShareMode | None = None
    """LightSecAgg: how masks are shared. None takes either: seeded shares rest on AES as a
    pseudorandom generator, the paper's do not but cost more; neither is a stricter form of the
    other, so that the server cannot tighten one into the other."""
    bound: float | None = None
    """The bound for the entries of an update, exactly (S44). A client whose update lies beyond it
    is missing from the sum, and the server sees that: were the bound the server's to choose, it
    could search for the largest entry. None leaves it to the server."""
    scale: float | None = None
    """The least c_l. In a sum with different integer weights, the low log2(w_max) bits belong to
    few updates; a small c_l puts all of an update into them (S43). None demands 2^16, the paper's,
    of buffers in which an update may have a weight of its own, and nothing elsewhere: where all
    have the same weight, or T + 2 share each, a coarse sum is still a sum over as many clients.
    Updates of entries far below 1 need more: c_l times their size should far exceed w_max."""
    max_share_bytes: int | None = None
    """LightSecAgg: the most bytes that the shares of one round may take at this client, those
    that it makes and those that it holds 4 N L each; `stock` times as much in the asynchronous
    mode. The server's T and U decide about L."""
    graph_security: int = SIGMA
    """SecAgg+: sigma; a random sharing graph may fail to protect with probability 2^-sigma.
    Zero accepts every graph, for benchmarks on made-up data only."""

    def __post_init__(self) -> None:
        repeats = self.model != NO_MODEL and self.buffering is None
        if repeats and self.max_attempts > MAX_ATTEMPTS:
            raise ParameterError(
                f"max_attempts = {self.max_attempts} must be at most {MAX_ATTEMPTS}: every rerun "
                "of one global model is another chance to compare sums; raise it only for rounds "
                "without a model"
            )
        if self.buffering is not None and self.buffering.max_updates < self.minimum:
            raise ParameterError(
                f"a sum over {self.minimum} clients at least and buffers of at most K_max = "
                f"{self.buffering.max_updates} updates exclude each other; raise max_updates or "
                "lower the minimum"
            )

    def check(self, settings: Settings) -> None:
        """Raise `RemoteProtocolError` unless a round with these settings is acceptable."""
        parameters = settings.parameters
        if settings.protocol not in self.protocols:
            wanted = " or ".join(self.protocols)
            raise refused(f"protocol {settings.protocol}, this client takes part in {wanted}")
        if settings.session != self.session:
            raise refused("another session")
        if settings.allow_list != self.allow_list.digest:
            raise refused("another allow-list than this client's")
        if parameters.clients > len(self.allow_list):
            raise refused(f"N = {parameters.clients} exceeds the allow-list")
        if parameters.privacy < self.privacy:
            raise refused(f"privacy T = {parameters.privacy}, this client demands {self.privacy}")
        if (
            self.threat_model is ThreatModel.MALICIOUS_SERVER
            and parameters.threat_model is not ThreatModel.MALICIOUS_SERVER
        ):
            raise refused(f"threat model {parameters.threat_model}, not malicious-server")
        if settings.buffering != self.buffering:
            raise refused("other asynchronous settings than this client's")
        if self.dimension is not None and settings.dimension != self.dimension:
            raise refused(f"dimension {settings.dimension}, this client's is {self.dimension}")
        if self.dimension is None and settings.dimension > MAX_UNANNOUNCED_DIMENSION:
            raise refused(
                f"dimension {settings.dimension}, beyond {MAX_UNANNOUNCED_DIMENSION}; a client "
                "that expects such vectors says so in its policy"
            )
        if settings.model != self.model:
            raise refused("a global model other than the one this client was given")
        if settings.minimum < self.minimum:
            raise refused(
                f"sums over {settings.minimum} clients, this client demands {self.minimum}"
            )
        if self.bound is not None and settings.quantizer.bound != self.bound:
            raise refused(
                f"bound {settings.quantizer.bound} for the entries of an update, this client's is "
                f"{self.bound}; who changes it changes it at every client"
            )
        self._check_scale(settings)
        settings.traits.check_policy(self, settings)
        self.check_graph(settings, parameters.clients)

    def _check_scale(self, settings: Settings) -> None:
        least, buffering = self.scale, settings.buffering
        if least is None:
            singles_out = buffering is not None and buffering.singles_out(settings.parameters)
            least = SINGLED_OUT_SCALE if singles_out else 0.0
        if settings.quantizer.scale < least:
            raise refused(
                f"scale c_l = {settings.quantizer.scale:g}, this client demands {least:g}: the "
                "coarser the rounding, the more of an update lies in the low bits that different "
                "weights reveal; lower the bound or the weights, or take strict buffers"
            )

    def check_graph(self, settings: Settings, members: int) -> None:
        """Refuse a sharing graph that does not protect a roster of so many members."""
        settings.traits.check_roster(self, settings, members)
