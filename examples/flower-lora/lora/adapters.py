"""What travels: the adapters and the head, a few thousand numbers. Needs no torch."""

from __future__ import annotations

import numpy as np

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, CLASSES = 32, 64, 4, 2, 16, 4
RANK = 4
Arrays = dict[str, np.ndarray]


def new_adapters() -> Arrays:
    """As LoRA begins: one factor at random, the other zero, so that nothing is changed yet.

    Every run has its own: nodes train from a model once, ever.
    """
    random = np.random.default_rng()
    arrays: Arrays = {}
    for block in range(BLOCKS):
        for place in ("query", "value"):
            down = random.normal(0, WIDTH**-0.5, (RANK, WIDTH)).astype(np.float32)
            arrays[f"{block}.{place}.down"] = down
            arrays[f"{block}.{place}.up"] = np.zeros((WIDTH, RANK), dtype=np.float32)
    arrays["head.weight"] = random.normal(0, 0.01, (CLASSES, WIDTH)).astype(np.float32)
    arrays["head.bias"] = np.zeros(CLASSES, dtype=np.float32)
    return arrays
