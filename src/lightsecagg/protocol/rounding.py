"""Fresh uniform words for stochastic rounding, through the one door to randomness."""

from __future__ import annotations

import numpy as np

from lightsecagg.crypto import prg
from lightsecagg.crypto.entropy import Entropy, draw
from lightsecagg.field.prime import Elements


def uniform_words(count: int, entropy: Entropy) -> Elements:
    """`count` uniform 32-bit words; how `Quantizer.quantise_and_mask` wants its coins."""
    words = np.empty(count, dtype=np.uint32)
    prg.aes_ctr_keystream(draw(entropy, prg.SEED_LENGTH))(words)
    return words
