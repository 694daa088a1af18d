"""LightSecAgg's client in a synchronous round, Section 4.1 and Algorithm 1.

It shares its mask with the T-private MDS code, adds the mask to its update, and answers with the
sum of the shares of U1. The steps it has in common with the baselines are in `round_client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import draw
from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.errors import CryptoError, FieldError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.mask_encoding import (
    EncodedMask,
    MaskId,
    encode_mask,
    encode_seeded_mask,
    expand_share,
    seeded_positions,
)
from lightsecagg.masks.one_shot_recovery import aggregate_shares
from lightsecagg.params import ShareMode
from lightsecagg.protocol.messages import AggregatedShare, Message
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.round_client import OutgoingShare, RoundClient, Share
from lightsecagg.protocol.settings import ProtocolName


class LightSecAggClient(RoundClient):
    """One client of LightSecAgg in one synchronous round."""

    protocol: ClassVar = (ProtocolName.LIGHTSECAGG,)
    key_count: ClassVar = 1

    def _make_shares(
        self, round_: Round, private_keys: tuple[bytes, ...]
    ) -> tuple[bytes, Share, list[OutgoingShare]]:
        seeds, encoded = self._encode(round_)
        own = round_.positions[self.client]
        shares: dict[int, OutgoingShare] = {}
        for position, recipient in enumerate(round_.members):
            if position in seeds:
                shares[position] = OutgoingShare(recipient, ShareKind.SEED, seeds[position])
            else:
                explicit = round_.settings.field.to_bytes(encoded.shares[position])
                shares[position] = OutgoingShare(recipient, ShareKind.EXPLICIT, explicit)
        kept = shares.pop(own)
        secret = round_.settings.field.to_bytes(encoded.mask)
        return secret, (kept.kind.value, kept.plaintext), list(shares.values())

    def _encode(self, round_: Round) -> tuple[dict[int, bytes], EncodedMask]:
        """A fresh mask: the seeds (by position) of seeded recipients, and the rest."""
        settings, code = round_.settings, round_.settings.code
        parameters, length = settings.parameters, settings.share_length
        modulus = settings.field.modulus
        if parameters.share_mode is ShareMode.PAPER:
            rows = prg.draw_uniform(parameters.survivors * length, modulus, self._entropy)
            pieces, noise = np.split(
                rows.reshape(parameters.survivors, length), [parameters.pieces]
            )
            return {}, encode_mask(code, pieces, noise, settings.length)
        members = len(round_.members)
        own = round_.positions[self.client]
        mask_id = MaskId(round_.context, self.client)
        seeds = {
            position: draw(self._entropy, prg.SEED_LENGTH)
            for position in seeded_positions(own, members, parameters.survivors)
        }
        seeded = {
            position: expand_share(seed, mask_id, round_.members[position], length, modulus)
            for position, seed in seeds.items()
        }
        return seeds, encode_seeded_mask(code, seeded, members, settings.length)

    def _check_share(self, round_: Round, kind: ShareKind, length: int) -> None:
        expected = {
            ShareKind.SEED: prg.SEED_LENGTH,
            ShareKind.EXPLICIT: 4 * round_.settings.share_length,
        }.get(kind)
        if expected is None:
            raise CryptoError(f"LightSecAgg has no shares of kind {kind.name}")
        if length != expected:
            raise CryptoError(f"a share of kind {kind.name} has {expected} bytes, not {length}")

    def _check_plaintext(self, round_: Round, kind: ShareKind, plaintext: bytes) -> None:
        if kind is ShareKind.EXPLICIT:
            try:
                round_.settings.field.from_bytes(plaintext, round_.settings.share_length)
            except FieldError as error:
                raise CryptoError(f"the share holds no field elements: {error}") from error

    def _mask(self, round_: Round, secret: bytes, held: Mapping[int, Share]) -> Elements:
        return round_.settings.field.from_bytes(secret, round_.settings.length)

    def _after_upload(self, secret: bytes) -> bytes:
        return b""

    def _answer(
        self,
        round_: Round,
        secret: bytes,
        held: Mapping[int, Share],
        owners: tuple[int, ...],
        survivors: tuple[int, ...],
    ) -> AggregatedShare:
        shares = (self._share_of(round_, owner, held[owner]) for owner in survivors)
        return AggregatedShare(aggregate_shares(round_.settings.field, shares))

    def _share_of(self, round_: Round, owner: int, share: Share) -> Elements:
        """A held share as field elements; a seed is expanded only now."""
        settings = round_.settings
        kind, data = share
        if kind == ShareKind.EXPLICIT.value:
            return settings.field.from_bytes(data, settings.share_length)
        mask_id = MaskId(round_.context, owner)
        return expand_share(
            data, mask_id, self.client, settings.share_length, settings.field.modulus
        )

    def _pack_answer(self, round_: Round, answer: Message) -> bytes:
        if not isinstance(answer, AggregatedShare):
            raise AssertionError("LightSecAgg answers with an aggregated share")
        return round_.settings.field.to_bytes(answer.vector)

    def _unpack_answer(self, round_: Round, packed: bytes) -> AggregatedShare:
        settings = round_.settings
        return AggregatedShare(settings.field.from_bytes(packed, settings.share_length))
