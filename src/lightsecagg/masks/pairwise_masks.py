"""SecAgg's self and pairwise masks and their cancelling, Section 3, Eq. (1).

Client i uploads

    x~_i = x_i + n_i + sum over j > i of z_ij - sum over j < i of z_ji,

where n_i = PRG(b_i) and z_ij = PRG(a_ij), j running over its neighbours. Between two uploads z_ij
cancels. If client j drops, its neighbours' uploads keep their z_ij; the server rebuilds sk_j, hence
a_ij, and takes them away together with the n_i of the survivors. The paper's example, N = 3 and
client 1 drops:

    x_2 + x_3 = x~_2 + x~_3 + (z_12 + z_13 - n_2 - n_3).

With D dropped and N - D surviving clients that is up to D (N - D) + N - D expansions of d elements,
the cost that dominates SecAgg. Masks are therefore added up as they are expanded, block by block
in cache; no mask ever exists as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.errors import LocalProtocolError
from lightsecagg.field import kernels
from lightsecagg.field.prime import Elements, PrimeField

Orphan = tuple[int, int, bytes]
"""(survivor i, dropped client j, seed a_ij): a pairwise mask that did not cancel."""

# Masks expanded side by side, so that one pass over the totals adds several of them.
_BATCH = 4


def mask_vector(
    x: Elements,
    self_seed: bytes,
    pairwise_seeds: Mapping[int, bytes],
    own_id: int,
    field: PrimeField,
) -> Elements:
    """x~_i, the upload of client i = `own_id`, Eq. (1).

    - `x` is a vector over the field.
    - `self_seed` is b_i; `pairwise_seeds` maps every neighbour j to a_ij.
    """
    field.check(x)
    return field.add(x, client_mask(self_seed, pairwise_seeds, own_id, x.size, field))


def client_mask(
    self_seed: bytes,
    pairwise_seeds: Mapping[int, bytes],
    own_id: int,
    length: int,
    field: PrimeField,
) -> Elements:
    """x~_i - x_i: all that client i = `own_id` adds to its vector."""
    seeds = _Seeds(plus=[self_seed])
    for peer, seed in pairwise_seeds.items():
        seeds.add(own_id, peer, seed)
    return _sum_of_masks(seeds, length, field)


def orphaned_masks(orphans: Iterable[Orphan], length: int, field: PrimeField) -> Elements:
    """What pairs of one survivor and one dropped client left in the sum of the uploads."""
    return remaining_masks((), orphans, length, field)


def remaining_masks(
    self_seeds: Iterable[bytes], orphans: Iterable[Orphan], length: int, field: PrimeField
) -> Elements:
    """All that the survivors' uploads still hold beside their vectors, summed up.

    - `self_seeds` holds b_i of every client whose upload is in the sum, once.
    - `orphans` holds every pair of such a client and a neighbour whose upload is not, once.
    """
    seeds = _Seeds(plus=self_seeds)
    for survivor, dropped, seed in orphans:
        seeds.add(survivor, dropped, seed)
    return _sum_of_masks(seeds, length, field)


def unmask(
    masked_sum: Elements,
    self_seeds: Iterable[bytes],
    orphans: Iterable[Orphan],
    field: PrimeField,
) -> Elements:
    """The sum of the survivors' vectors from the sum of their uploads."""
    field.check(masked_sum)
    masks = remaining_masks(self_seeds, orphans, masked_sum.size, field)
    return field.subtract(masked_sum, masks)


class _Seeds:
    """Seeds whose masks are added, and seeds whose masks are subtracted."""

    def __init__(self, plus: Iterable[bytes] = ()) -> None:
        self.plus = list(plus)
        self.minus: list[bytes] = []

    def add(self, owner: int, peer: int, seed: bytes) -> None:
        """The pairwise mask of `owner` and `peer`, with the sign it has in the owner's upload."""
        if owner == peer:
            raise LocalProtocolError(f"client {owner} has no pairwise mask with itself")
        (self.plus if owner < peer else self.minus).append(seed)


def _sum_of_masks(seeds: _Seeds, length: int, field: PrimeField) -> Elements:
    total = _sum_of_expansions(seeds.plus, length, field)
    if not seeds.minus:
        return total
    return field.subtract(total, _sum_of_expansions(seeds.minus, length, field))


def _sum_of_expansions(seeds: Iterable[bytes], length: int, field: PrimeField) -> Elements:
    """The sum of PRG(seed) over all seeds, in O(length) memory."""
    # 64-bit words hold the sum of 2^32 elements, more than there are pairs of clients.
    totals = np.zeros(length, dtype=np.uint64)
    buffers = np.empty((_BATCH, min(length, prg.BLOCK_WORDS)), dtype=np.uint32)
    for batch in _batches(seeds):
        expansions = [prg.Expansion(prg.aes_ctr_keystream(seed), field.modulus) for seed in batch]
        for start in range(0, length, prg.BLOCK_WORDS):
            part = totals[start : start + prg.BLOCK_WORDS]
            blocks = [buffer[: part.size] for buffer in buffers[: len(batch)]]
            for expansion, block in zip(expansions, blocks, strict=True):
                expansion.fill(block)
            kernels.active().accumulate(part, blocks)
        for expansion in expansions:
            positions, values = expansion.patches()
            totals[positions] += values
    return kernels.active().reduce(totals, field.modulus)


def _batches(seeds: Iterable[bytes]) -> Iterator[list[bytes]]:
    remaining = iter(seeds)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
