"""SecAgg's self and pairwise masks and their cancelling, Section 3, Eq. (1).

Client i uploads

    x~_i = x_i + n_i + sum over j > i of z_ij - sum over j < i of z_ji,

where n_i = PRG(b_i) and z_ij = PRG(a_ij), j running over its neighbours. Between two uploads z_ij
cancels. If client j drops, its neighbours' uploads keep their z_ij; the server rebuilds sk_j, hence
a_ij, and takes them away together with the n_i of the survivors. The paper's example, N = 3 and
client 1 drops:

    x_2 + x_3 = x~_2 + x~_3 + (z_12 + z_13 - n_2 - n_3).

With D dropped and N - D surviving clients that is up to D (N - D) + N - D expansions of d elements,
the cost that dominates SecAgg. Masks are therefore vectors of Z_{2^32}, in which the words of a
stream are a mask as they come; they are added up as they are expanded, block by block in cache, and
no mask ever exists as a whole. Columns do not mix, so any range of them can be found alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.errors import LocalProtocolError
from lightsecagg.field.group import Elements
from lightsecagg.field.words import WORDS

Orphan = tuple[int, int, bytes]
"""(survivor i, dropped client j, seed a_ij): a pairwise mask that did not cancel."""


class SignedSeeds:
    """Seeds whose masks are added, and seeds whose masks are subtracted."""

    def __init__(self, plus: Iterable[bytes] = ()) -> None:
        self._plus = list(plus)
        self._minus: list[bytes] = []

    def __repr__(self) -> str:
        return f"SignedSeeds({len(self._plus)} added, {len(self._minus)} subtracted)"

    def add(self, owner: int, peer: int, seed: bytes) -> None:
        """The pairwise mask of `owner` and `peer`, with the sign it has in the owner's upload."""
        if owner == peer:
            raise LocalProtocolError(f"client {owner} has no pairwise mask with itself")
        (self._plus if owner < peer else self._minus).append(seed)

    def sum(self, start: int, stop: int) -> Elements:
        """The columns from `start` up to `stop` of the sum of all masks."""
        total = np.zeros(stop - start, dtype=np.uint32)
        prg.add_words(total, self._minus, start)
        np.negative(total, out=total)
        prg.add_words(total, self._plus, start)
        return total


def mask_vector(
    x: Elements, self_seed: bytes, pairwise_seeds: Mapping[int, bytes], own_id: int
) -> Elements:
    """x~_i, the upload of client i = `own_id`, Eq. (1).

    - `x` is a vector over Z_{2^32}.
    - `self_seed` is b_i; `pairwise_seeds` maps every neighbour j to a_ij.
    """
    WORDS.check(x)
    return WORDS.add(x, client_mask(self_seed, pairwise_seeds, own_id, x.size))


def client_mask(
    self_seed: bytes, pairwise_seeds: Mapping[int, bytes], own_id: int, length: int
) -> Elements:
    """x~_i - x_i: all that client i = `own_id` adds to its vector."""
    seeds = SignedSeeds(plus=[self_seed])
    for peer, seed in pairwise_seeds.items():
        seeds.add(own_id, peer, seed)
    return seeds.sum(0, length)


def remaining_masks(self_seeds: Iterable[bytes], orphans: Iterable[Orphan]) -> SignedSeeds:
    """All that the survivors' uploads still hold beside their vectors.

    - `self_seeds` holds b_i of every client whose upload is in the sum, once.
    - `orphans` holds every pair of such a client and a neighbour whose upload is not, once.
    """
    seeds = SignedSeeds(plus=self_seeds)
    for survivor, dropped, seed in orphans:
        seeds.add(survivor, dropped, seed)
    return seeds


def unmask(
    masked_sum: Elements, self_seeds: Iterable[bytes], orphans: Iterable[Orphan]
) -> Elements:
    """The sum of the survivors' vectors from the sum of their uploads."""
    WORDS.check(masked_sum)
    return WORDS.subtract(masked_sum, remaining_masks(self_seeds, orphans).sum(0, masked_sum.size))
