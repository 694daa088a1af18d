"""Uniform words for stochastic rounding, from a seed that nobody else knows."""

from __future__ import annotations

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.field.prime import Elements


def uniform_words(count: int, seed: bytes) -> Elements:
    """`count` uniform 32-bit words; how `Quantizer.quantise_and_mask` wants its coins.

    * `seed`: `prg.SEED_LENGTH` bytes, used for this update only (`Ledger.rounding_seed`).
    """
    words = np.empty(count, dtype=np.uint32)
    prg.aes_ctr_keystream(seed)(words)
    return words
