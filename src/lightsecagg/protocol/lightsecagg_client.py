"""LightSecAgg's client in a synchronous round, Section 4.1 and Algorithm 1.

It shares its mask with the T-private MDS code, adds the mask to its update, and answers with the
sum of the shares of U1. The steps it has in common with the baselines are in `round_client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lightsecagg.crypto.sealing import ShareKind
from lightsecagg.field.prime import Elements
from lightsecagg.masks.one_shot_recovery import aggregate_shares
from lightsecagg.protocol.mask_sharing import (
    check_share_elements,
    check_share_length,
    draw_mask,
    share_elements,
)
from lightsecagg.protocol.messages import AggregatedShare, Message
from lightsecagg.protocol.roster import Round
from lightsecagg.protocol.round_client import RoundClient
from lightsecagg.protocol.settings import ProtocolName
from lightsecagg.protocol.share_exchange import OutgoingShare, Share


class LightSecAggClient(RoundClient):
    """One client of LightSecAgg in one synchronous round."""

    protocol: ClassVar = (ProtocolName.LIGHTSECAGG,)
    key_count: ClassVar = 1

    def _make_shares(
        self, round_: Round, private_keys: tuple[bytes, ...]
    ) -> tuple[bytes, Share, list[OutgoingShare]]:
        shared = draw_mask(round_, self.client, 0, self._entropy)
        return round_.settings.field.to_bytes(shared.mask), shared.own, shared.outgoing

    def _check_share(self, round_: Round, kind: ShareKind, length: int) -> None:
        check_share_length(round_.settings, kind, length)

    def _check_plaintext(self, round_: Round, kind: ShareKind, plaintext: bytes) -> None:
        check_share_elements(round_.settings, kind, plaintext)

    def _mask(self, round_: Round, secret: bytes, owners: tuple[int, ...]) -> Elements:
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
        shares = (share_elements(round_, owner, 0, self.client, held[owner]) for owner in survivors)
        return AggregatedShare(aggregate_shares(round_.settings.field, shares))

    def _pack_answer(self, round_: Round, answer: Message) -> bytes:
        if not isinstance(answer, AggregatedShare):
            raise AssertionError("LightSecAgg answers with an aggregated share")
        return round_.settings.field.to_bytes(answer.vector)

    def _unpack_answer(self, round_: Round, packed: bytes) -> AggregatedShare:
        settings = round_.settings
        return AggregatedShare(settings.field.from_bytes(packed, settings.share_length))
