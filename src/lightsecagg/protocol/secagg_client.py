"""SecAgg's client (Bonawitz et al., CCS 2017) in a synchronous round; on a sparse graph SecAgg+'s.

It adds a self mask and one mask per neighbour to its update, Eq. (1), and answers with shares: for
each client whose share it holds, of the self mask's seed or of the mask key. Which of the two is
decided by the survivor set alone: whoever had shared and is not in it has dropped. So the two
lists cannot overlap, and as a client answers once, it never reveals both secrets of one peer.

Departures from the original, on the side of caution:

* Two key pairs. The keys that seal shares are never shared themselves; with a single pair,
  rebuilding the keys of the dropped clients would open every share that was sealed to them.
* In malicious-server mode clients sign the survivor set, and 2t > N + T.
* On a sparse graph a client takes part only while enough of its own neighbours do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import msgspec
import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.agreement import AgreementKey
from lightsecagg.crypto.entropy import draw
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, FieldError, RemoteProtocolError
from lightsecagg.field import shamir
from lightsecagg.field.prime import Elements
from lightsecagg.foreign import decode
from lightsecagg.masks.pairwise_masks import client_mask
from lightsecagg.protocol.messages import Message, UnmaskingShares
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.round_client import RoundClient
from lightsecagg.protocol.secagg_round import SECRET_SHARE_BYTES, SHARE_BYTES, SecAggRound
from lightsecagg.protocol.settings import ProtocolName
from lightsecagg.protocol.share_exchange import OutgoingShare, Share

_decoder = msgspec.msgpack.Decoder(UnmaskingShares)


class SecAggClient(RoundClient):
    """One client of SecAgg or SecAgg+ in one synchronous round."""

    protocol: ClassVar = (ProtocolName.SECAGG, ProtocolName.SECAGG_PLUS)
    key_count: ClassVar = 2

    def _make_shares(
        self, round_: Round, private_keys: tuple[bytes, ...]
    ) -> tuple[bytes, Share, list[OutgoingShare]]:
        self._policy.check_graph(round_.settings, len(round_.members))
        seed, mask_key = draw(self._entropy, prg.SEED_LENGTH), private_keys[-1]
        secret = seed + mask_key
        shares = self._share_secrets(self._secagg(round_), secret)
        own = shares.pop(self.client)
        outgoing = [OutgoingShare(peer, ShareKind.SHAMIR, share) for peer, share in shares.items()]
        return secret, (ShareKind.SHAMIR.value, own), outgoing

    def _share_secrets(self, secagg: SecAggRound, secret: bytes) -> dict[int, bytes]:
        """Holder -> its shares of b_i and sk_i."""
        field = secagg.round.settings.field
        holders = sorted(secagg.holders(self.client))
        secrets = np.frombuffer(secret, dtype=np.uint8).reshape(2, shamir.SECRET_BYTES)
        shape = shamir.noise_shape(len(secrets), secagg.threshold)
        noise = prg.draw_uniform(shape[0] * shape[1], field.modulus, self._entropy)
        shares = shamir.share(field, secrets, secagg.points(holders), noise.reshape(shape))
        return {holder: field.to_bytes(both) for holder, both in zip(holders, shares, strict=True)}

    def _check_share(self, round_: Round, kind: ShareKind, length: int) -> None:
        if kind is not ShareKind.SHAMIR or length != SHARE_BYTES:
            raise CryptoError(
                f"SecAgg's shares are of kind SHAMIR and {SHARE_BYTES} bytes, "
                f"not of kind {kind.name} and {length}"
            )

    def _check_plaintext(self, round_: Round, kind: ShareKind, plaintext: bytes) -> None:
        try:
            round_.settings.field.from_bytes(plaintext, SHARE_BYTES // 4)
        except FieldError as error:
            raise CryptoError(f"the share holds no field elements: {error}") from error

    def _peers(self, round_: Round) -> frozenset[int]:
        return self._secagg(round_).neighbours(self.client)

    def _enough_shares(
        self, round_: Round, held: Mapping[int, Share], owners: tuple[int, ...]
    ) -> bool:
        """Whether this client is hidden among those it is going to mask with.

        How many shares have reached it does not matter: it answers with those it holds.
        """
        return len(owners) >= round_.settings.minimum and self._secagg(round_).hides(
            self.client, owners
        )

    def _mask(self, round_: Round, secret: bytes, owners: tuple[int, ...]) -> Elements:
        """Self mask and pairwise masks, with those neighbours whose shares are complete.

        Both sides of a pair must decide alike, or their mask stays in the sum: so it is the
        server's list that counts, which everybody got, not what has opened here.
        """
        secagg = self._secagg(round_)
        seed, key = secret[: prg.SEED_LENGTH], AgreementKey(secret[prg.SEED_LENGTH :])
        pairwise = {
            peer: secagg.pairwise_seed(key, self.client, peer)
            for peer in sorted(secagg.neighbours(self.client).intersection(owners))
        }
        settings = round_.settings
        own = secagg.self_seed(seed, self.client)
        return client_mask(own, pairwise, self.client, settings.length, settings.field)

    def _after_upload(self, secret: bytes) -> bytes:
        return b""

    def _check_survivors(
        self, round_: Round, owners: tuple[int, ...], survivors: tuple[int, ...]
    ) -> None:
        super()._check_survivors(round_, owners, survivors)
        if not self._secagg(round_).hides(self.client, survivors):
            raise RemoteProtocolError(
                "the survivor set is refused: too few neighbours of this client are in it, and "
                "with the others' keys its update would lie open"
            )

    def _missing_shares(
        self, round_: Round, held: Mapping[int, Share], survivors: Iterable[int]
    ) -> tuple[int, ...]:
        """None that matter: any t holders will do, and an answer may leave an owner out."""
        return ()

    def _answer(
        self,
        round_: Round,
        secret: bytes,
        held: Mapping[int, Share],
        owners: tuple[int, ...],
        survivors: tuple[int, ...],
    ) -> UnmaskingShares:
        secagg = self._secagg(round_)
        dropped = frozenset(owners).difference(survivors)
        alive = secagg.revealed(self.client, held, survivors)
        dead = secagg.revealed(self.client, held, dropped)
        return UnmaskingShares(
            of_seeds=b"".join(held[owner][1][:SECRET_SHARE_BYTES] for owner in alive),
            of_keys=b"".join(held[owner][1][SECRET_SHARE_BYTES:] for owner in dead),
        )

    def _pack_answer(self, round_: Round, answer: Message) -> bytes:
        return msgspec.msgpack.encode(answer)

    def _unpack_answer(self, round_: Round, packed: bytes) -> UnmaskingShares:
        return decode(_decoder.decode, packed, "stored answer")

    def _secagg(self, round_: Round) -> SecAggRound:
        if self._secagg_cache is None or self._secagg_cache.round is not round_:
            self._secagg_cache = SecAggRound(round_)
        return self._secagg_cache

    _secagg_cache: SecAggRound | None = None
