"""The one door to the operating system's randomness.

Whatever draws a key, a seed, a mask or a permutation takes an argument
`entropy: Entropy = system_entropy`, so that a test can replay it and an auditor can find every
draw by searching for one name. Nothing is buffered here: two processes after a fork, or two
restored snapshots, never see the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from lightsecagg.errors import CryptoError

Entropy = Callable[[int], bytes]
"""Returns that many fresh, uniform, secret bytes on every call."""


def system_entropy(count: int) -> bytes:
    """`count` bytes from the operating system's generator, asked anew on every call."""
    return os.urandom(count)


def draw(entropy: Entropy, count: int) -> bytes:
    """`count` bytes from `entropy`, refusing a source that returns fewer or more."""
    drawn = entropy(count)
    if len(drawn) != count:
        raise CryptoError(
            f"the entropy source returned {len(drawn)} bytes instead of {count}; "
            "a short draw would make keys guessable"
        )
    return drawn


def random_order(items: Sequence[int], entropy: Entropy = system_entropy) -> tuple[int, ...]:
    """A uniformly random permutation: sort by random 128-bit keys, and again should two be equal.

    All orders of distinct keys are equally likely, so the permutation is exactly uniform.
    """
    while True:
        drawn = draw(entropy, 16 * len(items))
        keys = [drawn[16 * i : 16 * (i + 1)] for i in range(len(items))]
        if len(set(keys)) == len(keys):
            return tuple(item for _, item in sorted(zip(keys, items, strict=True)))
