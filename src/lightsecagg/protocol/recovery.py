"""From the clients' answers to the aggregate mask, at the server (Section 4.1, phase 3; S14)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy
from lightsecagg.errors import NotEnoughAnswers
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import Elements
from lightsecagg.masks.one_shot_recovery import recover_mask
from lightsecagg.protocol.roster import Round


def decode_answers(
    round_: Round, answers: Mapping[int, Elements], entropy: Entropy
) -> tuple[Elements, tuple[int, ...]]:
    """The aggregate mask, and the clients whose answers contradict the others.

    * `answers`: client -> sum of shares. Call when nobody can change an answer any more: the
      random combinations that catch wrong ones are drawn now.
    """
    code = round_.settings.code
    if len(answers) < code.survivors:
        raise NotEnoughAnswers(
            f"only {len(answers)} clients answered, U = {code.survivors} are needed"
        )
    by_position = {round_.positions[client]: vector for client, vector in answers.items()}
    suspects = _find_suspects(code, by_position, entropy)
    trusted = {
        position: vector for position, vector in by_position.items() if position not in suspects
    }
    mask = recover_mask(code, trusted, round_.settings.length)
    return mask, tuple(sorted(round_.members[position] for position in suspects))


def _find_suspects(
    code: MdsCode, answers: Mapping[int, Elements], entropy: Entropy
) -> tuple[int, ...]:
    if len(answers) == code.survivors:
        return ()  # any U answers are consistent
    positions = sorted(answers)
    stacked = np.stack([answers[position] for position in positions])
    length, columns = stacked.shape[1], code.check_columns
    coefficients = prg.draw_uniform(length * columns, code.field.modulus, entropy)
    return code.find_inconsistent(positions, stacked, coefficients.reshape(length, columns))
