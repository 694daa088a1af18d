"""LightSecAgg's server in a synchronous round: one-shot recovery, Section 4.1, phase 3."""

from __future__ import annotations

from typing import ClassVar

from lightsecagg.errors import CryptoError, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.one_shot_recovery import unmask
from lightsecagg.protocol.interface import Aggregate
from lightsecagg.protocol.mask_sharing import check_share_length
from lightsecagg.protocol.messages import AggregatedShare, Message, SealedShare
from lightsecagg.protocol.recovery import decode_answers
from lightsecagg.protocol.round_server import RoundServer
from lightsecagg.protocol.settings import ProtocolName


class LightSecAggServer(RoundServer):
    """The server of LightSecAgg in one synchronous round."""

    protocol: ClassVar = (ProtocolName.LIGHTSECAGG,)
    key_count: ClassVar = 1
    answer_type: ClassVar = AggregatedShare

    def _check_share(self, sender: int, message: SealedShare) -> None:
        try:
            check_share_length(self.settings, message.kind, message.length)
        except CryptoError as error:
            raise RemoteProtocolError(f"share of client {sender} refused: {error}") from error

    def _check_answer(self, sender: int, message: Message) -> None:
        if not isinstance(message, AggregatedShare):
            raise AssertionError("the phase admits no other message")
        if message.vector.shape != (self.settings.share_length,):
            raise RemoteProtocolError(
                f"client {sender} answered with {message.vector.size} elements instead of "
                f"{self.settings.share_length}"
            )

    def _recover(self, masked_sum: Elements) -> Aggregate:
        if self._round is None:
            raise AssertionError("recovery follows the roster")
        answers = {
            client: message.vector
            for client, message in self._answers.items()
            if isinstance(message, AggregatedShare)
        }
        aggregate_mask, suspects = decode_answers(self._round, answers, self._entropy)
        return Aggregate(
            total=unmask(self.settings.field, masked_sum, aggregate_mask),
            included=self._survivors,
            responders=tuple(sorted(answers)),
            suspects=suspects,
        )
