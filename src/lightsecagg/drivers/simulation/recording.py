"""Remembers the coins of a client's rounding, so that the recovered sum can be checked exactly.

Rounding is random, so the sum that the server should recover is known only to whoever knows the
coins. A simulated client draws them as ever, from the operating system, through a source that
keeps the latest draw; masking draws its coins last. The simulation then computes every included
client's quantised vector again, without any mask, and compares the sums element for element. Wrong
coins would make that comparison fail, never pass.
"""

from __future__ import annotations

from lightsecagg.crypto.entropy import system_entropy
from lightsecagg.field.prime import Elements
from lightsecagg.protocol.interface import Update
from lightsecagg.protocol.rounding import uniform_words
from lightsecagg.protocol.settings import Settings


class RecordingEntropy:
    """The operating system's randomness, with a memory of one draw."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest = b""

    def __call__(self, count: int) -> bytes:
        self.latest = system_entropy(count)
        return self.latest

    def __repr__(self) -> str:
        return "RecordingEntropy()"


class GivenCoins:
    """The operating system's randomness, except for one draw: the coins of the next rounding.

    Rounding is not secret in a simulation; given coins make a run reproducible and let it compute
    the very vector that a client masked.
    """

    __slots__ = ("coins",)

    def __init__(self) -> None:
        self.coins: bytes | None = None

    def __call__(self, count: int) -> bytes:
        coins, self.coins = self.coins, None
        return system_entropy(count) if coins is None else coins

    def __repr__(self) -> str:
        return "GivenCoins()"


def quantised(settings: Settings, update: Update, coins: bytes) -> Elements:
    """The vector that a client with this input and these coins masked."""
    words = uniform_words(update.vector.size, lambda count: coins)
    return settings.quantizer.quantise(update.vector, words, update.samples)
