"""The planner's unit costs, measured on this machine from real parties.

Per peer and per message they come from simulated rounds, smaller than any federation, so that they
follow whatever the implementation does; per element from the inner loops. It takes a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.sealing import MAC_LENGTH, SALT_LENGTH, ShareKind, sealed_length
from lightsecagg.drivers.cohort import Cohort
from lightsecagg.field import ntt
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import PrimeField
from lightsecagg.masks import short_keys
from lightsecagg.params import DEFAULT_MODULUS, Parameters, ShareMode
from lightsecagg.protocol.interface import Phase, Send, Update
from lightsecagg.protocol.messages import Advertise, SealedShare
from lightsecagg.protocol.quantizers import make_quantizer
from lightsecagg.protocol.roster import sign_keys
from lightsecagg.protocol.schemes.traits import traits_of
from lightsecagg.protocol.share_exchange import bundles
from lightsecagg.protocol.wire import Codec
from lightsecagg_lab.planning.unit_costs import UnitCosts
from lightsecagg_lab.schemes.baseline_traits import ProtocolName
from lightsecagg_lab.schemes.pairwise_masks import client_mask
from lightsecagg_lab.simulation.synchronous import simulate_round

_BLOCK = 2**18
"""Elements of the vectors that are timed: more than the first caches hold."""
_TRIES = 3


class _Rehearsal(NamedTuple):
    """CPU seconds of a small round by phase, the median of a few."""

    client: dict[Phase, float]
    """The mean over all clients."""
    server: dict[Phase, float]
    spread: dict[Phase, float]
    """The part of the server's that is cut by columns."""


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
    stretched, noisy = _short_keys()
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
        stretched_element=stretched,
        noisy_element=noisy,
        agreement=_agreement(),
        quantised_element=plain.client[Phase.UPLOAD] / _BLOCK,
        taken_element=(plain.server[Phase.UPLOAD] - plain.spread[Phase.UPLOAD]) / (4 * _BLOCK),
        summed_element=plain.spread[Phase.UPLOAD] / (4 * _BLOCK),
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
) -> _Rehearsal:
    vector = np.linspace(-0.5, 0.5, dimension, dtype=np.float32)

    def update(client: int) -> Update:
        return Update(vector + np.float32(client * 1e-6))

    cohorts = [_cohort(clients, protocol, mode, dimension) for _ in range(_TRIES)]
    runs = [simulate_round(cohort, update).meter.phases for cohort in cohorts]
    return _Rehearsal(
        client={
            phase: median(run[phase].client_seconds for run in runs) / clients for phase in runs[0]
        },
        server={phase: median(run[phase].server.seconds for run in runs) for phase in runs[0]},
        spread={
            phase: median(run[phase].server.spread_seconds for run in runs) for phase in runs[0]
        },
    )


def _cohort(
    clients: int,
    protocol: ProtocolName = ProtocolName.LIGHTSECAGG,
    mode: ShareMode = ShareMode.SEEDED,
    dimension: int = 64,
) -> Cohort:
    privacy = clients // 2 - 1
    traits, parameters = traits_of(protocol), Parameters(clients, privacy, 1, share_mode=mode)
    graph = (clients // 2, clients // 4) if traits.ring else ()
    parameters, neighbours, threshold = traits.resolve(parameters, *graph)
    return Cohort(
        protocol,
        parameters,
        make_quantizer(parameters, dimension, 1.0, group=traits.group(parameters)),
        dimension,
        neighbours,
        threshold,
        graph_security=0,
    )


def _relaying(clients: int) -> float:
    """The server's CPU seconds for one short share, without clients that would make them."""
    cohort = _cohort(clients)
    settings = cohort.next_round()
    server = cohort.server(settings)
    codec = Codec(settings.group)
    server.start()
    for client in cohort.clients:
        keys = (AgreementKey.generate().public,)
        signature = sign_keys(cohort.identity(client), settings.context, client, keys)
        server.receive(client, Advertise(keys, signature))
    salt, sealed = bytes(SALT_LENGTH), bytes(sealed_length(prg.SEED_LENGTH))
    mac = bytes(MAC_LENGTH if settings.traits.checked else 0)
    seconds = 0.0
    for owner in range(clients):
        shares = (
            SealedShare(owner, peer, ShareKind.SEED, prg.SEED_LENGTH, salt, sealed, mac=mac)
            for peer in range(clients)
            if peer != owner
        )
        for data in [codec.encode(bundle) for bundle in bundles(shares)]:
            started = time.process_time()
            outputs = server.receive(owner, codec.decode(data))
            seconds += time.process_time() - started
            for output in outputs:
                started = time.process_time()
                if isinstance(output, Send):
                    codec.encode(output.message)
                seconds += time.process_time() - started
    return seconds / (clients * (clients - 1))


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
    return _fastest(lambda: client_mask(bytes(32), seeds, 0, _BLOCK)) / (8 * _BLOCK)


def _short_keys() -> tuple[float, float]:
    field, context = PrimeField(DEFAULT_MODULUS), bytes(32)
    key = np.full(short_keys.key_length(scalars=0), 3, dtype=np.uint32)
    mask = np.zeros(_BLOCK, dtype=np.uint32)
    stretching = _fastest(lambda: short_keys.expand(field, context, key, _BLOCK))
    noise = _fastest(lambda: short_keys.add_noise(field, mask, context, _BLOCK, 3))
    return stretching / _BLOCK, noise / _BLOCK


def _agreement() -> float:
    """With 16 peers: a key remembers with whom it agreed."""
    one, others = AgreementKey.generate(), [AgreementKey.generate().public for _ in range(16)]

    def many() -> None:
        key = AgreementKey(one.private_bytes())
        for other in others:
            key.agree(other, 1).symmetric_seed(bytes(32), "rehearsal", 0, 1)

    return _fastest(many) / len(others)


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
