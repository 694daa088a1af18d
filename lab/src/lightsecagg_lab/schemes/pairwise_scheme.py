"""SecAgg's masks (Bonawitz et al., CCS 2017); on a random ring, SecAgg+'s (Bell et al., CCS 2020).

Client i has two secrets, each of them 32 bytes: the seed b_i of its self mask and the private key
sk_i of its pairwise masks. It shares both with its *holders*, that is, its neighbours in the
sharing graph and itself; any t of them can rebuild one. It adds its self mask and one mask per
neighbour to its update, Eq. (1), modulo 2^32: pairwise masks need a group and no field. (Shares of
the secrets are over F_q.) After the uploads every holder reveals one share per client whose
share it holds:

    of b_i     if i survived     the server takes PRG(b_i) away
    of sk_i    if i dropped      the server derives the a_ij that did not cancel

and never both: with b_i and sk_i, the upload of client i would lie open. Which of the two is
decided by the survivor set alone: whoever had shared and is not in it has dropped. So the two lists
cannot overlap, and as a client answers once, it never reveals both secrets of one peer. SecAgg is
the complete graph, SecAgg+ a sparse one; nothing else distinguishes them.

Departures from the original, on the side of caution:

* Two key pairs. The keys that seal shares are never shared themselves; with a single pair,
  rebuilding the keys of the dropped clients would open every share that was sealed to them.
* In malicious-server mode clients sign the survivor set, and 2t > N + T.
* On a sparse graph a client takes part only while enough of its own neighbours do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import Entropy, draw
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.crypto.transcript import uint
from lightsecagg.errors import (
    FieldError,
    InconsistentAnswers,
    NotEnoughAnswers,
    RemoteProtocolError,
)
from lightsecagg.field import ntt
from lightsecagg.field.prime import Elements
from lightsecagg.field.words import WORDS
from lightsecagg.masks.checked_sharing import Pair
from lightsecagg.protocol.jobs import RecoverMasks
from lightsecagg.protocol.messages import UnmaskingShares
from lightsecagg.protocol.schemes.interface import (
    Answer,
    ClientScheme,
    MaskRef,
    MaskSum,
    PreparedMask,
    Scheme,
    ServerScheme,
    Term,
)
from lightsecagg.protocol.share_exchange import OutgoingShare, Share
from lightsecagg_lab.schemes import shamir
from lightsecagg_lab.schemes.baseline_traits import SECRET_SHARE_BYTES
from lightsecagg_lab.schemes.pairwise_masks import Orphan, SignedSeeds, client_mask, remaining_masks
from lightsecagg_lab.schemes.sharing_graph import SharingGraph


class PairwiseMasks(Scheme):
    """The sharing graph of a round and what follows from it, for clients and server alike."""

    @property
    def threshold(self) -> int:
        """t"""
        return self.settings.sharing_threshold

    @cached_property
    def graph(self) -> SharingGraph:
        """The members by id: on SecAgg+'s ring, or all of them neighbours."""
        members = self.round.members
        ring = self.round.graph or range(len(members))
        order = tuple(members[position] for position in ring)
        return SharingGraph(order, self.settings.degree(len(members)))

    @cached_property
    def _neighbours(self) -> dict[int, frozenset[int]]:
        return {}

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
        clients = self.settings.parameters.clients
        return [int(point) for point in ntt.points(self.settings.field, clients)]

    def hides(self, client: int, others: Collection[int]) -> bool:
        """Whether at least one honest neighbour of `client` is among `others`.

        Of its neighbours, at most T are corrupt, and on a sparse graph fewer than t. A client
        whose honest neighbours have all dropped is masked by nothing that stays secret.
        """
        needed = min(self.threshold, self.settings.parameters.privacy + 1)
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


class PairwiseMasksClient(PairwiseMasks, ClientScheme):
    """One client of SecAgg or SecAgg+."""

    def _find_peers(self) -> frozenset[int]:
        return self.neighbours(self.client)

    def prepare(
        self, serial: int, private_keys: tuple[bytes, ...], entropy: Entropy
    ) -> PreparedMask:
        """Draw b_i; share it and sk_i. Expand the masks with all peers, beside the training."""
        secret = draw(entropy, prg.SEED_LENGTH) + private_keys[-1]
        shares = self.share_secrets(secret, entropy)
        own = shares.pop(self.client)
        outgoing = [OutgoingShare(peer, ShareKind.SHAMIR, share) for peer, share in shares.items()]
        expanded = self.mask(secret, self.round.members) if self.expands_ahead else None
        return PreparedMask(secret, (ShareKind.SHAMIR.value, own), outgoing, expanded)

    def share_secrets(self, secret: bytes, entropy: Entropy) -> dict[int, bytes]:
        """Holder -> its shares of b_i and sk_i."""
        field = self.settings.field
        holders = sorted(self.holders(self.client))
        secrets = np.frombuffer(secret, dtype=np.uint8).reshape(2, shamir.SECRET_BYTES)
        shape = shamir.noise_shape(len(secrets), self.threshold)
        noise = prg.draw_uniform(shape[0] * shape[1], field.modulus, entropy)
        shares = shamir.share(field, secrets, self.points(holders), noise.reshape(shape))
        return {holder: field.to_bytes(both) for holder, both in zip(holders, shares, strict=True)}

    def check(self, kind: ShareKind, plaintext: bytes) -> None:
        """Both shares are field elements."""
        self.check_elements(plaintext)

    def suffices(self, held: Collection[int], owners: Sequence[int]) -> bool:
        """Whether this client is hidden among those it is going to mask with.

        How many shares have reached it does not matter: it answers with those it holds.
        """
        return len(owners) >= self.settings.minimum and self.hides(self.client, owners)

    def mask(self, secret: bytes, owners: Sequence[int]) -> Elements:
        """Self mask and pairwise masks, with those neighbours whose shares are complete.

        Both sides of a pair must decide alike, or their mask stays in the sum: so it is the
        server's list that counts, which everybody got, not what has opened here.
        """
        pairwise = self._pairwise_seeds(secret, self.peers.intersection(owners))
        own = self.self_seed(secret[: prg.SEED_LENGTH], self.client)
        return client_mask(own, pairwise, self.client, self.settings.length)

    def finish_mask(self, expanded: Elements, secret: bytes, owners: Sequence[int]) -> Elements:
        """Without the masks of those peers whose shares are not complete."""
        absent = self._pairwise_seeds(secret, self.peers.difference(owners))
        if not absent:
            return expanded
        orphans = ((self.client, peer, seed) for peer, seed in absent.items())
        return WORDS.subtract(expanded, remaining_masks((), orphans).sum(0, expanded.size))

    def _pairwise_seeds(self, secret: bytes, peers: Collection[int]) -> dict[int, bytes]:
        """Peer j -> a_ij"""
        key = AgreementKey(secret[prg.SEED_LENGTH :])
        return {peer: self.pairwise_seed(key, self.client, peer) for peer in sorted(peers)}

    def accept(self, owners: Sequence[int]) -> None:
        """With the keys of its dropped neighbours, this client must still be masked."""
        if not self.hides(self.client, owners):
            raise RemoteProtocolError(
                "the survivor set is refused: too few neighbours of this client are in it, and "
                "with the others' keys its update would lie open"
            )

    def missing(self, held: Mapping[MaskRef, Share], terms: Sequence[Term]) -> tuple[int, ...]:
        """None that matter: any t holders will do, and an answer may leave an owner out."""
        return ()

    def answer(
        self, held: Mapping[MaskRef, Share], terms: Sequence[Term], owners: Sequence[int]
    ) -> UnmaskingShares:
        """Shares of the survivors' seeds and of the dropped clients' keys."""
        survivors = [term.ref.owner for term in terms]
        shares = {ref.owner: share for ref, (_, share) in held.items()}
        alive = self.revealed(self.client, shares, survivors)
        dead = self.revealed(self.client, shares, frozenset(owners).difference(survivors))
        return UnmaskingShares(
            of_seeds=b"".join(shares[owner][:SECRET_SHARE_BYTES] for owner in alive),
            of_keys=b"".join(shares[owner][SECRET_SHARE_BYTES:] for owner in dead),
        )


class PairwiseMasksServer(PairwiseMasks, ServerScheme):
    """The server of SecAgg or SecAgg+.

    Recovery rebuilds the survivors' self-mask seeds b_i and the dropped clients' mask keys sk_j
    from t shares each, and expands every mask that is left in the sum of the uploads: N - D self
    masks and up to D (N - D) pairwise ones. Masks between two dropped clients are in no upload, so
    they are never made. This is the cost that LightSecAgg's one-shot recovery avoids.
    """

    answer_type: ClassVar = UnmaskingShares

    def are_peers(self, owner: int, recipient: int) -> bool:
        """Neighbours share with each other."""
        return recipient in self.neighbours(owner)

    def choose(
        self,
        owners: Sequence[int],
        held: Mapping[int, frozenset[int]],
        accused: Collection[Pair] = (),
    ) -> tuple[int, ...]:
        """All who uploaded, if that hides everybody and every secret can be rebuilt.

        Leaving somebody out would not help: its mask key is in the same hands as its seed.
        """
        survivors = frozenset(held)
        bare = sorted(client for client in survivors if not self.hides(client, survivors))
        if bare:
            raise NotEnoughAnswers(
                f"too few neighbours of clients {bare} uploaded: their updates would not be hidden"
            )
        needed = survivors.union(self._dropped(owners, survivors))
        lost = sorted(
            owner
            for owner in needed
            if sum(owner in held[holder] for holder in self.holders(owner) & survivors)
            < self.threshold
        )
        if lost:
            raise NotEnoughAnswers(
                f"the secrets of clients {lost} are out of reach: fewer than t = "
                f"{self.threshold} of those who uploaded hold shares of them"
            )
        return tuple(sorted(survivors))

    def _dropped(self, owners: Iterable[int], survivors: Iterable[int]) -> tuple[int, ...]:
        """Owners that are not in the sum and with whom a survivor has masked."""
        alive = frozenset(survivors)
        return tuple(
            owner
            for owner in sorted(owners)
            if owner not in alive and not alive.isdisjoint(self.neighbours(owner))
        )

    def check_answer(self, asked: MaskSum, sender: int, answer: Answer) -> None:
        """One share per client that the sender holds one of."""
        if not isinstance(answer, UnmaskingShares):
            raise AssertionError("the phase admits no other message")
        survivors = asked.in_sum
        for shares, owners in (
            (answer.of_seeds, survivors),
            (answer.of_keys, self._dropped(asked.owners, survivors)),
        ):
            count = len(self.revealed(sender, asked.held[sender], owners))
            try:
                self._parse(shares, count)
            except FieldError as error:
                raise RemoteProtocolError(
                    f"client {sender} answered for {count} clients: {error}"
                ) from error

    def suffice(self, asked: MaskSum, answered: Collection[int]) -> bool:
        """t of its holders for every secret that is to be rebuilt."""
        came = frozenset(answered)
        needed = (*asked.in_sum, *self._dropped(asked.owners, asked.in_sum))
        return all(
            sum(owner in asked.held[holder] for holder in self.holders(owner) & came)
            >= self.threshold
            for owner in needed
        )

    def recover(
        self, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> tuple[Elements, tuple[int, ...]]:
        """All of `recovery` at once."""
        job = self.recovery(asked, answers)
        job.open()
        return job.run(0, job.columns), ()

    def recovery(self, asked: MaskSum, answers: Mapping[int, Answer]) -> RecoverMasks:
        """Expand every mask that did not cancel; nothing tells who answered wrongly."""
        return _ExpandMasks(self, asked, answers)

    def remaining(self, asked: MaskSum, answers: Mapping[int, Answer]) -> SignedSeeds:
        """What every mask expands from that is left in the sum of the uploads."""
        given = {c: answer for c, answer in answers.items() if isinstance(answer, UnmaskingShares)}
        rebuild = _Rebuilding(self, asked.held, given).rebuild
        dropped = self._dropped(asked.owners, asked.in_sum)
        seeds = rebuild("self-mask seed", asked.in_sum, lambda answer: answer.of_seeds)
        keys = rebuild("mask key", dropped, lambda answer: answer.of_keys)
        self_seeds = [self.self_seed(secret, owner) for owner, secret in seeds.items()]
        return remaining_masks(self_seeds, self._orphans(keys, asked.in_sum))

    def _orphans(self, keys: Mapping[int, bytes], survivors: Collection[int]) -> Iterator[Orphan]:
        """The pairwise masks of one survivor and one dropped client each."""
        for dropped, private in keys.items():
            key = AgreementKey(private)
            if key.public != self.mask_key(dropped):
                raise InconsistentAnswers(
                    f"the mask key rebuilt for client {dropped} does not match the one that it "
                    "advertised: it shared another key, or a holder's share is wrong"
                )
            for survivor in sorted(self.neighbours(dropped).intersection(survivors)):
                yield survivor, dropped, self.pairwise_seed(key, dropped, survivor)

    def _parse(self, shares: bytes, count: int) -> Elements:
        """`count` shares of one secret each, as rows."""
        elements = self.settings.field.from_bytes(shares, count * SECRET_SHARE_BYTES // 4)
        return elements.reshape(count, shamir.LIMBS)


class _ExpandMasks(RecoverMasks):
    """Rebuilt secrets give the seeds; a range of columns takes that part of every stream."""

    def __init__(
        self, scheme: PairwiseMasksServer, asked: MaskSum, answers: Mapping[int, Answer]
    ) -> None:
        self.columns = scheme.settings.length
        self._scheme, self._asked, self._answers = scheme, asked, answers

    def open(self) -> None:
        self._seeds = self._scheme.remaining(self._asked, self._answers)

    def run(self, start: int, stop: int) -> Elements:
        return self._seeds.sum(start, stop)

    def take_away(self, total: Elements, start: int, part: Elements) -> None:
        left = total[start : start + part.size]
        left[:] = self._scheme.settings.group.subtract(left, part)

    def finish(self, total: Elements) -> Elements:
        """No seed is needed any more."""
        self._seeds, self._answers = SignedSeeds(), {}
        return total


class _Rebuilding:
    """The secrets of one sum, rebuilt from the shares that the answers reveal."""

    def __init__(
        self,
        scheme: PairwiseMasksServer,
        held: Mapping[int, frozenset[int]],
        answers: Mapping[int, UnmaskingShares],
    ) -> None:
        self._scheme, self._held, self._answers = scheme, held, answers

    def rebuild(
        self, what: str, owners: Collection[int], blob: Callable[[UnmaskingShares], bytes]
    ) -> dict[int, bytes]:
        """Owner -> secret, each from exactly t shares.

        Owners whose shares come from the same t responders are rebuilt together: on the complete
        graph, normally all of them, with one set of Lagrange coefficients and one matrix product.
        """
        owners = sorted(owners, key=self._scheme.round.positions.__getitem__)
        if not owners:
            return {}
        responders = sorted(self._answers)
        column = {owner: index for index, owner in enumerate(owners)}
        holds = np.zeros((len(responders), len(owners)), dtype=bool)
        shares: list[Elements] = []
        for row, responder in enumerate(responders):
            revealed = self._scheme.revealed(responder, self._held[responder], owners)
            holds[row, [column[owner] for owner in revealed]] = True
            shares.append(self._scheme._parse(blob(self._answers[responder]), len(revealed)))
        self._check_enough(what, owners, holds.sum(axis=0))
        # Answers list owners in roster order, as the columns do: share (r, o) is row line[r, o].
        line = holds.cumsum(axis=1) - 1
        chosen = holds & (holds.cumsum(axis=0) <= self._scheme.threshold)
        patterns, group_of = np.unique(chosen, axis=1, return_inverse=True)
        secrets: dict[int, bytes] = {}
        for group, pattern in enumerate(patterns.T):
            rows = np.flatnonzero(pattern)
            columns = np.flatnonzero(group_of.ravel() == group)
            stacked = np.stack([shares[row][line[row, columns]] for row in rows])
            names = [owners[int(index)] for index in columns]
            points = self._scheme.points(responders[row] for row in rows)
            secrets.update(self._reconstruct(what, names, stacked, points))
        return secrets

    def _reconstruct(
        self, what: str, owners: list[int], shares: Elements, points: list[int]
    ) -> dict[int, bytes]:
        field, t = self._scheme.settings.field, self._scheme.threshold
        try:
            rebuilt = shamir.reconstruct(field, shares, points, t)
        except InconsistentAnswers as error:
            if len(owners) > 1:  # one by one, to name the client
                for index, owner in enumerate(owners):
                    alone = np.ascontiguousarray(shares[:, index : index + 1])
                    self._reconstruct(what, [owner], alone, points)
            raise InconsistentAnswers(
                f"the {what} of client {owners[0]} does not rebuild: the client or one of t = {t} "
                "holders gave a wrong share"
            ) from error
        return {owner: secret.tobytes() for owner, secret in zip(owners, rebuilt, strict=True)}

    def _check_enough(
        self, what: str, owners: Sequence[int], counts: np.ndarray[tuple[int], np.dtype[np.intp]]
    ) -> None:
        t = self._scheme.threshold
        if lacking := [owner for owner, n in zip(owners, counts, strict=True) if n < t]:
            raise NotEnoughAnswers(
                f"only {len(self._answers)} clients answered: the {what} of clients {lacking} "
                f"needs t = {t} shares"
            )
