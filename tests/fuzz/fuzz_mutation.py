"""Inputs bred from seeds by plain chance: what runs where no fuzzer is installed."""

from __future__ import annotations

import random
from collections.abc import Sequence

INTERESTING = (0, 1, 0x7F, 0x80, 0x90, 0x91, 0xC0, 0xC4, 0xD9, 0xDC, 0xDD, 0xDF, 0xFE, 0xFF)
"""Bytes at the edges of integers, and the first bytes of msgpack's kinds."""
LONGEST = 1 << 16


def mutant(coins: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A seed with one to four changes."""
    data = bytearray(coins.choice(seeds))
    for _ in range(coins.randint(1, 4)):
        _change(coins, data, seeds)
    return bytes(data[:LONGEST])


def _change(coins: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = coins.randrange(len(data) + 1)
    end = min(len(data), at + coins.choice((1, 2, 4, 8, 32)))
    match coins.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << coins.randrange(8)
        case 1 if at < len(data):
            data[at] = coins.choice(INTERESTING)
        case 2 if at < len(data):
            data[at] = (data[at] + coins.choice((-1, 1))) % 256
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = data[at:end]
        case 5:
            data[at:at] = coins.randbytes(coins.choice((1, 2, 4)))
        case 6:
            del data[at:]
        case 7:
            other = coins.choice(seeds)
            data[at:end] = other[coins.randrange(len(other) + 1) :][: coins.randrange(64)]
