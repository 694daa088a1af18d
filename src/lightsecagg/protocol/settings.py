"""Everything that the parties of a round must agree on, and its hash, the context C0.

A server proposes `Settings`; a client holds a `Policy` and refuses what falls short of it. The
server may tighten what a policy demands, never loosen it. Every signature of the advertise step
is over C0, so two clients with different settings never accept each other's keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightsecagg.crypto.transcript import HASH_LENGTH, context_hash, uint
from lightsecagg.errors import DecodeError, ParameterError
from lightsecagg.field import ntt
from lightsecagg.field.group import Elements, Group
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.foreign import decode, shown
from lightsecagg.masks.checked_sharing import BLINDS
from lightsecagg.masks.short_keys import COINS, LONG_SHARE, RING_DIMENSION, key_length
from lightsecagg.params import Decoding, Parameters, ShareMode, ThreatModel
from lightsecagg.protocol.buffering import Buffering
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.schemes.traits import Traits, protocols, traits_of

MAX_LENGTH = 2**30 - 1
"""The most elements of an upload or share: its length in bytes must fit 32 bits."""


NO_MODEL = bytes(HASH_LENGTH)
"""What a round names as its global model where vectors are summed that descend from none."""


POINT_RULE = "ntt-leaves/1"
"""Names the rule that gives position j of the roster its evaluation point (`ntt.points`)."""


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
    instructions: bytes = b""
    short_keys: tuple[int, int, int] | None = None
    """n, the coins of the noise, and t. The last fields are left out where they are empty."""
    word_bits: int | None = None
    """b where uploads are over Z_{2^b}; left out where they are over F_q."""


_decoder = msgspec.msgpack.Decoder(_Fields)


@dataclass(frozen=True)
class Settings:
    """The settings of one synchronous round, or of one epoch of the asynchronous mode."""

    protocol: str
    """A name that `traits_of` finds."""
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
    instructions: bytes = b""
    """Hash of the training instructions; empty without instructions. All clients must have the
    same: if only one trained with a large learning rate, the sum would be its update."""

    def __post_init__(self) -> None:
        for name in ("session", "allow_list", "model"):
            if len(getattr(self, name)) != HASH_LENGTH:
                raise ParameterError(f"{name} must be {HASH_LENGTH} bytes")
        if len(self.instructions) not in (0, HASH_LENGTH):
            raise ParameterError(f"instructions must be {HASH_LENGTH} bytes, or none")
        if self.round < 0:
            raise ParameterError(f"round {self.round} must not be negative")
        self._check_budget()
        self.parameters.share_length(self.dimension)
        if self.length > MAX_LENGTH:
            raise ParameterError(
                f"dimension d = {self.dimension} is too large: an upload has at most "
                f"{MAX_LENGTH} elements"
            )
        self.traits.check(self)
        group = self.traits.group(self.parameters)
        if self.quantizer.group != group:
            raise ParameterError(
                f"updates of {self.protocol} are summed modulo {group.modulus}, not modulo "
                f"{self.quantizer.group.modulus}: the quantizer must use the protocol's group"
            )

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
    def group(self) -> Group:
        """What uploads are vectors over: F_q where masks are coded, Z_{2^32} elsewhere."""
        return self.quantizer.group

    @cached_property
    def field(self) -> PrimeField:
        """F_q: what shares are vectors over."""
        return PrimeField(self.parameters.modulus)

    @property
    def one_sum(self) -> bool:
        """Whether the roster is used for one sum, a round's; else for one buffer after another."""
        return self.buffering is None

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
        """Elements of an upload: the vector and, if weighted, the sample count."""
        return self.quantizer.length(self.dimension)

    @property
    def has_short_keys(self) -> bool:
        """Whether keys are shared instead of masks."""
        return self.parameters.share_mode is ShareMode.SHORT_KEY

    @property
    def uses_seeds(self) -> bool:
        """Whether U of the shares are sent as seeds; of keys, only where shares are long."""
        if self.has_short_keys:
            return self.shared_length >= LONG_SHARE
        return self.parameters.share_mode is ShareMode.SEEDED

    @property
    def secret_length(self) -> int:
        """Elements of what a client shares: its mask, or the key that is stretched to it."""
        return key_length(self.length - self.dimension) if self.has_short_keys else self.length

    @cached_property
    def share_length(self) -> int:
        """L"""
        return self.parameters.share_length(self.secret_length)

    @cached_property
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
        """Names how an update was asked for and becomes group elements; the same in a repeat."""
        quantizer = self.quantizer
        return context_hash(
            "reading of an update",
            *map(uint, (self.group.modulus, self.dimension, quantizer.max_samples)),
            uint(quantizer.weighted),
            struct.pack(">dd", quantizer.bound, quantizer.scale),
            self.instructions,
        )

    def to_bytes(self) -> bytes:
        """One canonical encoding: what C0 hashes and `Opening` carries."""
        parameters, quantizer = self.parameters, self.quantizer
        fields = msgspec.structs.astuple(
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
                instructions=self.instructions,
                short_keys=self._short_keys,
                word_bits=self._word_bits,
            )
        )
        while fields[-1] in (b"", None):
            fields = fields[:-1]
        return msgspec.msgpack.encode(fields)

    @property
    def _short_keys(self) -> tuple[int, int, int] | None:
        """What a client finds itself, bound so that two parties never mean different things."""
        return (RING_DIMENSION, COINS, self.quantizer.step) if self.has_short_keys else None

    @property
    def _word_bits(self) -> int | None:
        """Bound for the same reason, and so that who knows no such group refuses."""
        return None if self.group == self.field else self.group.modulus.bit_length() - 1

    @classmethod
    def from_bytes(cls, data: bytes) -> Settings:
        """The inverse of `to_bytes`; `DecodeError` or `ParameterError` for anything else."""
        fields = decode(_decoder.decode, data, "settings")
        if fields.point_rule != POINT_RULE:
            raise DecodeError(f"unknown rule for the points: {shown(repr(fields.point_rule))}")
        if fields.protocol not in protocols():
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
        quantizer = make_quantizer(
            parameters,
            fields.dimension,
            fields.bound,
            max_samples=fields.max_samples,
            weighted=fields.weighted,
            scale=fields.scale,
            buffering=fields.buffering,
            decoding=_decoding(fields.short_keys),
            group=traits_of(fields.protocol).group(parameters),
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
            instructions=fields.instructions,
        )
        if fields.short_keys != settings._short_keys:
            raise DecodeError(
                f"short keys with n, coins, t = {fields.short_keys} are refused: these settings "
                f"have {settings._short_keys}"
            )
        if fields.word_bits != settings._word_bits:
            raise DecodeError(
                f"{settings.protocol} settings with uploads of words of {fields.word_bits} bits "
                f"are refused: this release has {settings._word_bits}; use the same on both sides"
            )
        if settings.to_bytes() != data:
            raise DecodeError("malformed settings: not in their one canonical form")
        return settings

    def average(
        self, total: Elements, included: int, in_place: bool = False
    ) -> tuple[NDArray[np.float64], int]:
        """The weighted average that a sum over so many clients stands for, and the sample count.

        For an unweighted quantizer, the plain sum and `included`. `RecoveryError` if the average is
        beyond the bound, or the count not one of so many clients: an upload was false (S47).

        * `in_place`: spend the total, whose memory the average takes over (`with_room`).
        """
        if not self.quantizer.weighted:
            return self.quantizer.plain_sum(total, included, in_place=in_place), included
        return self.quantizer.weighted_mean(total, included, in_place)

    def buffer_average(self, total: Elements, weights: Iterable[int]) -> NDArray[np.float64]:
        """sum w x / sum w of a buffer, Eq. (35) and (37); with sample counts, sum w s x / sum w s.

        The denominator is the sum of the very integers that weighted the updates, at least 1
        each, so c_g cancels and nothing divides by zero. Refuses what `average` refuses.
        """
        return self.buffer_mean(total, weights)[0]

    def buffer_mean(
        self, total: Elements, weights: Iterable[int], in_place: bool = False
    ) -> tuple[NDArray[np.float64], int]:
        """The average of a buffer and its denominator: sum w, or sum w s with sample counts.

        * `in_place`: as in `average`.
        """
        weight = sum(weights)
        if self.quantizer.weighted:
            return self.quantizer.weighted_mean(total, weight, in_place)
        return self.quantizer.plain_sum(total, weight, weight, in_place), weight


def _decoding(short_keys: tuple[int, int, int] | None) -> Decoding | None:
    """Which decoding a foreign t may stand for; that it is the right t is compared later."""
    if short_keys is None:
        return None
    return Decoding.DITHERED if short_keys[2] == 1 else Decoding.EXACT


def hash_model(model: bytes | memoryview) -> bytes:
    """What `Settings.model` holds: a hash of the serialised global model."""
    return context_hash("global model", bytes(model))


def version_hash(model: bytes, number: int) -> bytes:
    """That of a round's or a version's model; where there is none every number is its own."""
    return hash_model(model) if model else context_hash("no global model", uint(number))
