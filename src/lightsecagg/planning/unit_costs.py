"""What one peer, one message and one element cost in CPU seconds: stated, or measured here.

`STATED` was measured by `calibrate` on the machine that it names. `calibrate` rehearses a few
rounds of real parties, smaller than any federation, and times the inner loops; it takes a few
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import median

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.crypto.sealing import SALT_LENGTH, ShareKind, sealed_length
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import PrimeField
from lightsecagg.field.quantization import Quantizer
from lightsecagg.masks.pairwise_masks import client_mask
from lightsecagg.params import DEFAULT_MODULUS, Parameters, ShareMode
from lightsecagg.planning.rehearsal import Rehearsal, rehearse
from lightsecagg.protocol.interface import Phase, Send
from lightsecagg.protocol.lightsecagg_server import LightSecAggServer
from lightsecagg.protocol.messages import Advertise, SealedShare
from lightsecagg.protocol.roster import sign_keys
from lightsecagg.protocol.settings import AllowList, ProtocolName, Settings
from lightsecagg.protocol.wire import Codec

_BLOCK = 2**18
"""Elements of the vectors that are timed: more than the first caches hold."""
_TRIES = 3


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """CPU seconds of one core."""

    source: str
    """Where the figures come from."""
    advertise: float
    """A client's keys of a round and their signature."""
    verify: float
    """One roster entry: keys and signature."""
    peer: float
    """LightSecAgg, share phase: one peer, its roster entry, a share sent and one received."""
    secagg_peer: float
    """SecAgg, share phase: the same."""
    relay: float
    """The server's work for one share, as far as it does not grow with N."""
    relay_growth: float
    """The part that grows, per client of the roster."""
    sealed_byte: float
    """A client seals or opens a byte of a long share."""
    relayed_byte: float
    """The server takes in and passes on a byte of a long share."""
    seed: float
    """A seed is made ready to expand."""
    element: float
    """An element is expanded from a seed."""
    masked_element: float
    """An element is expanded from a seed and added to a total."""
    agreement: float
    """SecAgg: a pairwise seed from a key agreement."""
    quantised_element: float
    """A client checks, quantises, masks and encodes an element of its update."""
    summed_element: float
    """The server decodes and adds up an element of an upload or answer."""
    product: float
    """A multiplication in a matrix product over F_q."""
    butterfly: float
    """One of the M log2 M steps of the transforms that complete a codeword."""
    survivor: float
    """Per client: the bookkeeping of the server in each of the later phases."""
    rebuild: float
    """SecAgg+: one secret rebuilt from the shares of its own set of neighbours."""


def calibrate() -> UnitCosts:
    """Measure this machine, in a few seconds."""
    more = _rehearsal(24)
    secagg = _rehearsal(16, ProtocolName.SECAGG)
    sparse = _rehearsal(16, ProtocolName.SECAGG_PLUS)
    explicit = _rehearsal(8, mode=ShareMode.PAPER, dimension=_BLOCK)
    plain = _rehearsal(4, ProtocolName.PLAIN, dimension=_BLOCK)
    product, butterfly = _products(), _butterflies()
    peer = more.client[Phase.SHARE] / 23
    few, many = _relaying(16), _relaying(112)
    growth = max(0.0, many - few) / (112 - 16)
    relay = few - 16 * growth
    seed, element = _expansion()
    # T = 3, D = 1, U = 7: a share has a quarter of the elements, and 7 of them travel each way.
    share_bytes = 7 * _BLOCK
    encoding = _BLOCK / 4 * (7 * element + 8 * 7 * product)
    long = explicit.client[Phase.SHARE] - 7 * (peer - seed) - encoding
    return UnitCosts(
        source="measured here",
        advertise=more.client[Phase.ADVERTISE],
        verify=more.server[Phase.ADVERTISE] / 24,
        peer=peer,
        secagg_peer=secagg.client[Phase.SHARE] / 15,
        relay=relay,
        relay_growth=growth,
        sealed_byte=max(long, 0.0) / (2 * share_bytes),
        relayed_byte=max(explicit.server[Phase.SHARE] - 56 * (relay + 8 * growth), 0.0)
        / (8 * share_bytes),
        seed=seed,
        element=element,
        masked_element=_masking(),
        agreement=_agreement(),
        quantised_element=plain.client[Phase.UPLOAD] / _BLOCK,
        summed_element=plain.server[Phase.UPLOAD] / (4 * _BLOCK),
        product=product,
        butterfly=butterfly,
        survivor=more.server[Phase.UPLOAD] / 24,
        rebuild=sparse.server[Phase.RECOVER] / 16,
    )


def _rehearsal(
    clients: int,
    protocol: ProtocolName = ProtocolName.LIGHTSECAGG,
    mode: ShareMode = ShareMode.SEEDED,
    dimension: int = 64,
) -> Rehearsal:
    """The median of a few rounds, phase by phase."""
    identities, allow_list = _federation(clients)
    settings = _settings(clients, allow_list, protocol, mode, dimension)
    runs = [rehearse(settings, identities, allow_list) for _ in range(_TRIES)]
    return Rehearsal(
        client={phase: median(run.client[phase] for run in runs) for phase in Phase},
        server={phase: median(run.server[phase] for run in runs) for phase in Phase},
    )


def _relaying(clients: int) -> float:
    """The server's CPU seconds for one short share, without clients that would make them."""
    identities, allow_list = _federation(clients)
    settings = _settings(clients, allow_list)
    server = LightSecAggServer(settings, allow_list)
    codec = Codec(settings.field)
    server.start()
    for client, identity in enumerate(identities):
        keys = (AgreementKey.generate().public,)
        signature = sign_keys(identity, settings.context, client, keys)
        server.receive(client, Advertise(keys, signature))
    salt, sealed = bytes(SALT_LENGTH), bytes(sealed_length(prg.SEED_LENGTH))
    seconds = 0.0
    for owner in range(clients):
        bundle = [
            codec.encode(SealedShare(owner, peer, ShareKind.SEED, prg.SEED_LENGTH, salt, sealed))
            for peer in range(clients)
            if peer != owner
        ]
        # Message by message, as they come: in one go they would find everything in the cache.
        for data in bundle:
            started = time.process_time()
            outputs = server.receive(owner, codec.decode(data))
            seconds += time.process_time() - started
            for output in outputs:
                started = time.process_time()
                if isinstance(output, Send):
                    codec.encode(output.message)
                seconds += time.process_time() - started
    return seconds / (clients * (clients - 1))


def _settings(
    clients: int,
    allow_list: AllowList,
    protocol: ProtocolName = ProtocolName.LIGHTSECAGG,
    mode: ShareMode = ShareMode.SEEDED,
    dimension: int = 64,
) -> Settings:
    privacy = clients // 2 - 1
    survivors = privacy + 1 if protocol is ProtocolName.SECAGG else 0
    sparse = protocol is ProtocolName.SECAGG_PLUS
    parameters = Parameters(clients, privacy, 1, survivors, share_mode=mode)
    return Settings(
        protocol=protocol,
        parameters=parameters,
        quantizer=Quantizer(PrimeField(parameters.modulus), 1.0, clients),
        dimension=dimension,
        session=bytes(32),
        round=1,
        allow_list=allow_list.digest,
        model=bytes(32),
        neighbours=clients // 2 if sparse else 0,
        threshold=clients // 4 if sparse else 0,
    )


@lru_cache
def _federation(clients: int) -> tuple[list[IdentityKey], AllowList]:
    identities = [IdentityKey.generate() for _ in range(clients)]
    return identities, AllowList({c: key.public for c, key in enumerate(identities)})


def _fastest(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of a few runs."""
    work()
    times = []
    for _ in range(_TRIES):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def _expansion() -> tuple[float, float]:
    def seconds(count: int, length: int) -> float:
        seeds = [bytes([k]) * prg.SEED_LENGTH for k in range(count)]

        def expand() -> None:
            for seed in seeds:
                prg.expand(prg.derive_seed(seed, b"", "rehearsal"), length, DEFAULT_MODULUS)

        return _fastest(expand) / count

    short, long = seconds(64, 16), seconds(4, _BLOCK)
    return short, max(long - short, 0.0) / _BLOCK


def _masking() -> float:
    seeds = {k: bytes([k]) * prg.SEED_LENGTH for k in range(1, 8)}
    field = PrimeField(DEFAULT_MODULUS)
    return _fastest(lambda: client_mask(bytes(32), seeds, 0, _BLOCK, field)) / (8 * _BLOCK)


def _agreement() -> float:
    one, other = AgreementKey.generate(), AgreementKey.generate()

    def many() -> None:
        for _ in range(16):
            one.agree(other.public, 1).symmetric_seed(bytes(32), "rehearsal", 0, 1)

    return _fastest(many) / 16


def _products() -> float:
    field = PrimeField(DEFAULT_MODULUS)
    a = np.full((50, 90), field.modulus - 2, dtype=np.uint32)
    b = np.full((90, 4096), field.modulus - 3, dtype=np.uint32)
    return _fastest(lambda: field.matmul(a, b)) / (50 * 90 * 4096)


def _butterflies() -> float:
    """From completing codewords of N = 200, U = 140: a transform of M = 256 points both ways."""
    field = PrimeField(DEFAULT_MODULUS)
    code = MdsCode(field, 140, 100, ntt.points(field, 200))
    positions, targets = list(range(140)), list(range(140, 200))

    def complete(columns: int) -> float:
        shares = np.full((140, columns), field.modulus - 2, dtype=np.uint32)
        return _fastest(lambda: code.complete(positions, shares, targets))

    return max(complete(4096) - complete(256), 0.0) / ((4096 - 256) * 256 * 8)


def describe(costs: UnitCosts) -> dict[str, float | str]:
    """For reports and JSON."""
    return {item.name: getattr(costs, item.name) for item in fields(costs)}


STATED = UnitCosts(
    source="stated: one core of an AMD EPYC (Zen 3, AVX2), native kernels, rounded",
    advertise=3.0e-4,
    verify=2.0e-4,
    peer=5.5e-4,
    secagg_peer=5.5e-4,
    relay=2.0e-5,
    relay_growth=2.0e-8,
    sealed_byte=1.0e-9,
    relayed_byte=2.0e-10,
    seed=3.5e-5,
    element=1.1e-9,
    masked_element=1.5e-9,
    agreement=5.5e-5,
    quantised_element=3.0e-8,
    summed_element=1.4e-9,
    product=9.0e-11,
    butterfly=4.5e-10,
    survivor=7.0e-5,
    rebuild=3.0e-4,
)
