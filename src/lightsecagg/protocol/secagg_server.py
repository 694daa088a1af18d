"""SecAgg's server in a synchronous round; with a sparse graph, SecAgg+'s.

Recovery rebuilds the survivors' self-mask seeds b_i and the dropped clients' mask keys sk_j from t
shares each, expands every mask that is left in the sum of the uploads, and takes it away: N - D
self masks and up to D (N - D) pairwise ones. Masks between two dropped clients are in no upload, so
they are never made. This is the cost that LightSecAgg's one-shot recovery avoids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import (
    FieldError,
    InconsistentAnswers,
    NotEnoughAnswers,
    RemoteProtocolError,
)
from lightsecagg.field import shamir
from lightsecagg.field.prime import Elements
from lightsecagg.masks.pairwise_masks import Orphan, unmask
from lightsecagg.masks.sharing_graph import random_order
from lightsecagg.protocol.interface import Aggregate
from lightsecagg.protocol.messages import Message, SealedShare, UnmaskingShares
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.secagg_round import SECRET_SHARE_BYTES, SHARE_BYTES, SecAggRound
from lightsecagg.protocol.settings import ProtocolName


class SecAggServer(RoundServer):
    """The server of SecAgg or SecAgg+ in one synchronous round."""

    protocol: ClassVar = (ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)
    key_count: ClassVar = 2
    answer_type: ClassVar = UnmaskingShares

    def _make_graph(self, members: int) -> tuple[int, ...]:
        if self.settings.protocol is ProtocolName.SECAGG_PLUS:
            return random_order(range(members), self._entropy)
        return ()

    def _are_peers(self, owner: int, recipient: int) -> bool:
        return recipient in self._secagg.neighbours(owner)

    def _check_share(self, sender: int, message: SealedShare) -> None:
        if message.kind is not ShareKind.SHAMIR or message.length != SHARE_BYTES:
            raise RemoteProtocolError(
                f"client {sender} sent a share of kind {message.kind.name} and "
                f"{message.length} bytes"
            )

    def _choose_survivors(self) -> tuple[int, ...]:
        """All who uploaded, if that hides everybody and every secret can be rebuilt.

        Leaving somebody out would not help: its mask key is in the same hands as its seed.
        """
        secagg, survivors = self._secagg, frozenset(self._uploads)
        bare = sorted(client for client in survivors if not secagg.hides(client, survivors))
        if bare:
            raise NotEnoughAnswers(
                f"too few neighbours of clients {bare} uploaded: their updates would not be hidden"
            )
        lost = sorted(
            owner
            for owner in self._secrets_needed(survivors)
            if self._holding(owner, survivors) < secagg.threshold
        )
        if lost:
            raise NotEnoughAnswers(
                f"the secrets of clients {lost} are out of reach: fewer than t = "
                f"{secagg.threshold} of those who uploaded hold shares of them"
            )
        return tuple(sorted(survivors))

    def _secrets_needed(self, survivors: frozenset[int]) -> list[int]:
        """Survivors, and dropped owners with whom a survivor has masked."""
        return [
            owner
            for owner in self._complete
            if owner in survivors or not survivors.isdisjoint(self._secagg.neighbours(owner))
        ]

    def _holding(self, owner: int, survivors: frozenset[int]) -> int:
        holders = self._secagg.holders(owner) & survivors
        return sum(owner in self._held[holder] for holder in holders)

    def _check_answer(self, sender: int, message: Message) -> None:
        if not isinstance(message, UnmaskingShares):
            raise AssertionError("the phase admits no other message")
        for shares, owners in (
            (message.of_seeds, self._survivors),
            (message.of_keys, self._dropped),
        ):
            count = len(self._revealed(sender, owners))
            try:
                self._parse(shares, count)
            except FieldError as error:
                raise RemoteProtocolError(
                    f"client {sender} answered for {count} clients: {error}"
                ) from error

    def _recover(self, masked_sum: Elements) -> Aggregate:
        secagg, field = self._secagg, self.settings.field
        seeds = self._rebuild("self-mask seed", self._survivors, lambda answer: answer.of_seeds)
        keys = self._rebuild("mask key", self._dropped, lambda answer: answer.of_keys)
        self_seeds = [secagg.self_seed(secret, owner) for owner, secret in seeds.items()]
        return Aggregate(
            total=unmask(masked_sum, self_seeds, self._orphans(keys), field),
            included=self._survivors,
            responders=tuple(sorted(self._answers)),
        )

    def _orphans(self, keys: Mapping[int, bytes]) -> Iterator[Orphan]:
        """The pairwise masks of one survivor and one dropped client each."""
        for dropped, private in keys.items():
            key = AgreementKey(private)
            if key.public != self._secagg.mask_key(dropped):
                raise InconsistentAnswers(
                    f"the mask key rebuilt for client {dropped} does not match the one that it "
                    "advertised: it shared another key, or a holder's share is wrong"
                )
            for survivor in sorted(self._secagg.neighbours(dropped).intersection(self._survivors)):
                yield survivor, dropped, self._secagg.pairwise_seed(key, dropped, survivor)

    def _rebuild(
        self, what: str, owners: Sequence[int], blob: Callable[[UnmaskingShares], bytes]
    ) -> dict[int, bytes]:
        """Owner -> secret, each from exactly t shares.

        Owners whose shares come from the same t responders are rebuilt together: on the complete
        graph, normally all of them, with one set of Lagrange coefficients and one matrix product.
        """
        owners = sorted(owners, key=self._secagg.round.positions.__getitem__)
        if not owners:
            return {}
        answers = {c: a for c, a in self._answers.items() if isinstance(a, UnmaskingShares)}
        responders = sorted(answers)
        t = self._secagg.threshold
        column = {owner: index for index, owner in enumerate(owners)}
        holds = np.zeros((len(responders), len(owners)), dtype=bool)
        shares: list[Elements] = []
        for row, responder in enumerate(responders):
            revealed = self._revealed(responder, owners)
            holds[row, [column[owner] for owner in revealed]] = True
            shares.append(self._parse(blob(answers[responder]), len(revealed)))
        self._check_enough(what, owners, holds.sum(axis=0))
        # Answers list owners in roster order, as the columns do: share (r, o) is row line[r, o].
        line = holds.cumsum(axis=1) - 1
        chosen = holds & (holds.cumsum(axis=0) <= t)
        patterns, group_of = np.unique(chosen, axis=1, return_inverse=True)
        secrets: dict[int, bytes] = {}
        for group, pattern in enumerate(patterns.T):
            rows = np.flatnonzero(pattern)
            columns = np.flatnonzero(group_of.reshape(-1) == group)
            stacked = np.stack([shares[row][line[row, columns]] for row in rows])
            names = [owners[int(index)] for index in columns]
            points = self._secagg.points(responders[row] for row in rows)
            secrets.update(self._reconstruct(what, names, stacked, points))
        return secrets

    def _reconstruct(
        self, what: str, owners: list[int], shares: Elements, points: list[int]
    ) -> dict[int, bytes]:
        field, t = self.settings.field, self._secagg.threshold
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
        t = self._secagg.threshold
        if lacking := [owner for owner, n in zip(owners, counts, strict=True) if n < t]:
            raise NotEnoughAnswers(
                f"only {len(self._answers)} clients answered: the {what} of clients {lacking} "
                f"needs t = {t} shares"
            )

    @property
    def _dropped(self) -> tuple[int, ...]:
        """Owners that are not in U1 and with whom a survivor has masked."""
        survivors = frozenset(self._survivors)
        return tuple(sorted(frozenset(self._secrets_needed(survivors)) - survivors))

    def _revealed(self, responder: int, owners: Sequence[int]) -> tuple[int, ...]:
        return self._secagg.revealed(responder, self._held[responder], owners)

    def _parse(self, shares: bytes, count: int) -> Elements:
        """`count` shares of one secret each, as rows."""
        elements = self.settings.field.from_bytes(shares, count * SECRET_SHARE_BYTES // 4)
        return elements.reshape(count, shamir.LIMBS)

    @property
    def _secagg(self) -> SecAggRound:
        if self._round is None:
            raise AssertionError("the graph follows the roster")
        if self._secagg_cache is None:
            self._secagg_cache = SecAggRound(self._round)
        return self._secagg_cache

    _secagg_cache: SecAggRound | None = None
