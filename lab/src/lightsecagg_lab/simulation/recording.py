"""The vector that a simulated client masked, so that the recovered sum can be checked exactly.

Rounding is random, so the sum that the server should recover is known only to whoever knows the
coins. They follow from the client's ledger, which a simulation holds. It computes every included
client's quantised vector again, without any mask, and compares the sums element for element. Wrong
coins would make that comparison fail, never pass.
"""

from __future__ import annotations

import numpy as np

from lightsecagg.field.prime import Elements
from lightsecagg.field.quantization import signed
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.ledger import Ledger
from lightsecagg.protocol.rounding import uniform_words
from lightsecagg.protocol.settings import Settings


def quantised(settings: Settings, ledger: Ledger, update: Update, model: bytes) -> Elements:
    """What the client with this ledger makes of an update that was trained from `model`."""
    fingerprint = ledger.fingerprint(update)
    commitment = ledger.commitment(fingerprint, update.samples, settings.reading)
    words = uniform_words(update.vector.size, ledger.rounding_seed(model, commitment))
    return settings.quantizer.quantise(update.vector, words, update.samples)


def largest_error(settings: Settings, total: Elements, expected: Elements) -> int:
    """By how many quanta an element of a recovered sum is off, the most."""
    difference = settings.group.subtract(total, expected)
    return int(np.abs(signed(settings.group, difference)).max())


def allowed_error(settings: Settings) -> int:
    """How far it may be: not at all, but for the noise that dithered decoding leaves."""
    return settings.quantizer.residue
