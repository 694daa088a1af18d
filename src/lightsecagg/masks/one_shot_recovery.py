"""One-shot recovery of the aggregate model, Section 4.1, phase 3, and its weighted form, Eq. (35).

Encoding is linear, so the sum of the shares that client j holds is the j-th share of the sum of
the masks. From any U such answers the server decodes the aggregate mask at once, at a cost that
does not grow with the number of clients that dropped out, and subtracts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from lightsecagg.errors import FieldError, NotEnoughAnswers
from lightsecagg.field.mds import MdsCode
from lightsecagg.field.prime import Elements, PrimeField


def aggregate_shares(
    field: PrimeField, shares: Iterable[Elements], weights: Iterable[int] | None = None
) -> Elements:
    """A client's answer: the sum, or integer-weighted sum, of the shares it holds."""
    if weights is None:
        return field.sum(shares)
    return field.weighted_sum(list(weights), list(shares))


def recover_mask(code: MdsCode, answers: Mapping[int, Elements], dimension: int) -> Elements:
    """The aggregate mask, of length d, from any U or more answers (by position).

    Exactly U of the answers are used; check them first (`MdsCode.find_inconsistent`) if there
    are more.
    """
    if len(answers) < code.survivors:
        raise NotEnoughAnswers(
            f"the aggregate mask takes U = {code.survivors} answers, got {len(answers)}"
        )
    length = code.share_length(dimension)
    for position, answer in answers.items():
        if answer.shape != (length,):
            raise FieldError(
                f"the answer at position {position} has shape {answer.shape}, not ({length},)"
            )
    return recover_pieces(code, answers, 0, length).reshape(-1)[:dimension]


def recover_pieces(
    code: MdsCode, answers: Mapping[int, Elements], start: int, stop: int
) -> Elements:
    """Columns of the U - T pieces of the aggregate mask, as rows; decoding mixes no columns."""
    positions = sorted(answers)[: code.survivors]
    known = np.stack([answers[position][start:stop] for position in positions])
    return code.decode(positions, known)


def unmask(field: PrimeField, masked_sum: Elements, aggregate_mask: Elements) -> Elements:
    """The sum of the models: the sum of the masked models less the aggregate mask."""
    return field.subtract(masked_sum, aggregate_mask)
