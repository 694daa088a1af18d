"""A round of SecAgg as its clients and its server both see it: who masks, shares and answers what.

Client i has two secrets, each of them 32 bytes: the seed b_i of its self mask and the private key
sk_i of its pairwise masks. It shares both with its *holders*, that is, its neighbours in the
sharing graph and itself; any t of them can rebuild one. After the uploads every holder reveals one
share per client whose share it holds:

    of b_i     if i survived     the server takes PRG(b_i) away
    of sk_i    if i dropped      the server derives the a_ij that did not cancel

and never both: with b_i and sk_i, the upload of client i would lie open. SecAgg is the complete
graph, SecAgg+ a sparse one; nothing else distinguishes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Final

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.transcript import uint
from lightsecagg.field import ntt, shamir
from lightsecagg.masks.sharing_graph import SharingGraph
from lightsecagg.protocol.roster import Round

SECRET_SHARE_BYTES: Final = 4 * shamir.LIMBS
"""A share of one secret, as field elements."""

SHARE_BYTES: Final = 2 * SECRET_SHARE_BYTES
"""What one holder gets: a share of b_i, then a share of sk_i."""


class SecAggRound:
    """The sharing graph of a round and what follows from it."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.threshold = round_.settings.sharing_threshold
        """t"""
        self._neighbours: dict[int, frozenset[int]] = {}

    @cached_property
    def graph(self) -> SharingGraph:
        """The members by id: on SecAgg+'s ring, or all of them neighbours."""
        members = self.round.members
        ring = self.round.graph or range(len(members))
        order = tuple(members[position] for position in ring)
        return SharingGraph(order, self.round.settings.degree(len(members)))

    def neighbours(self, client: int) -> frozenset[int]:
        """With whom `client` masks and shares."""
        if client not in self._neighbours:
            self._neighbours[client] = frozenset(self.graph.neighbours(client))
        return self._neighbours[client]

    def holders(self, owner: int) -> frozenset[int]:
        """Who gets a share of the owner's secrets, the owner included."""
        return self.neighbours(owner) | {owner}

    def points(self, clients: Iterable[int]) -> list[int]:
        """The evaluation points of `clients`."""
        return [self._all_points[self.round.positions[client]] for client in clients]

    @cached_property
    def _all_points(self) -> list[int]:
        settings = self.round.settings
        return [int(point) for point in ntt.points(settings.field, settings.parameters.clients)]

    def hides(self, client: int, others: Collection[int]) -> bool:
        """Whether at least one honest neighbour of `client` is among `others`.

        Of its neighbours, at most T are corrupt, and on a sparse graph fewer than t. A client
        whose honest neighbours have all dropped is masked by nothing that stays secret.
        """
        needed = min(self.threshold, self.round.settings.parameters.privacy + 1)
        return len(self.neighbours(client).intersection(others)) >= needed

    def revealed(
        self, holder: int, held: Collection[int], owners: Collection[int]
    ) -> tuple[int, ...]:
        """Of which `owners` the answer of `holder` has shares, in the order of the answer.

        `held` is whose shares have reached it; its upload says so.
        """
        found = self.holders(holder).intersection(held).intersection(owners)
        return tuple(sorted(found, key=self.round.positions.__getitem__))

    def mask_key(self, client: int) -> bytes:
        """The public half of sk_i: the last of the advertised keys; the first one seals."""
        return self.round.keys[self.round.positions[client]][-1]

    def self_seed(self, secret: bytes, owner: int) -> bytes:
        """What b_i expands from, bound to this round and client."""
        return prg.derive_seed(secret, self.round.context, "self mask", uint(owner))

    def pairwise_seed(self, key: AgreementKey, own: int, peer: int) -> bytes:
        """a_ij, from the private mask key of either side and the public one of the other."""
        secret = key.agree(self.mask_key(peer), peer)
        return secret.symmetric_seed(self.round.context, "pairwise mask", own, peer)
