"""LightSecAgg's server in a synchronous round: one-shot recovery, Section 4.1, phase 3."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.errors import CryptoError, NotEnoughAnswers, RemoteProtocolError
from lightsecagg.field.prime import Elements
from lightsecagg.masks.one_shot_recovery import recover_mask, unmask
from lightsecagg.protocol.interface import Aggregate
from lightsecagg.protocol.mask_sharing import check_share_length
from lightsecagg.protocol.messages import AggregatedShare, Message, SealedShare
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
        answers: dict[int, Elements] = {
            self._round.positions[client]: message.vector
            for client, message in self._answers.items()
            if isinstance(message, AggregatedShare)
        }
        responders = tuple(sorted(self._answers))
        suspects = self._find_suspects(answers)
        trusted = {position: answers[position] for position in answers if position not in suspects}
        aggregate_mask = recover_mask(self.settings.code, trusted, self.settings.length)
        return Aggregate(
            total=unmask(self.settings.field, masked_sum, aggregate_mask),
            included=self._survivors,
            responders=responders,
            suspects=tuple(sorted(self._round.members[position] for position in suspects)),
        )

    def _find_suspects(self, answers: dict[int, Elements]) -> tuple[int, ...]:
        """Positions of answers that contradict the rest (S14).

        The random combination is drawn now, when nobody can change an answer any more.
        """
        code = self.settings.code
        if len(answers) < code.survivors:
            raise NotEnoughAnswers(
                f"only {len(answers)} clients answered, U = {code.survivors} are needed"
            )
        if len(answers) == code.survivors:
            return ()
        positions = sorted(answers)
        length, columns = self.settings.share_length, code.check_columns
        coefficients = prg.draw_uniform(length * columns, code.field.modulus, self._entropy)
        stacked = np.stack([answers[position] for position in positions])
        return code.find_inconsistent(positions, stacked, coefficients.reshape(length, columns))
