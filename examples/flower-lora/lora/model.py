"""A small transformer, frozen, with adapters on its queries and values; import where it is needed.

The backbone is made from a seed, the same on every node: it stands for a model that all of them
have. The task: which of four pairs of neighbouring letters occurs in a line.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lora.adapters import (
    BLOCKS,
    CLASSES,
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Arrays,
)

PAIRS = ((1, 2), (3, 4), (5, 6), (7, 8))
_BACKBONE = 20220829


def data(seed: int, lines: int) -> tuple[Tensor, Tensor]:
    """Lines of letters, and which pair is in them."""
    random = np.random.default_rng(seed)
    letters = random.integers(9, VOCABULARY, (lines, LENGTH))
    labels = random.integers(0, CLASSES, lines)
    places = random.integers(0, LENGTH - 1, lines)
    for line, (label, place) in enumerate(zip(labels, places, strict=True)):
        letters[line, place : place + 2] = PAIRS[label]
    return torch.from_numpy(letters), torch.from_numpy(labels)


class Backbone:
    """The frozen part."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(_BACKBONE)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random) * shape[-1] ** -0.5

        self.letters = draw(VOCABULARY, WIDTH) * WIDTH**0.5
        self.places = draw(LENGTH, WIDTH)
        self.blocks = [
            {
                name: draw(WIDTH, WIDTH)
                for name in ("query", "key", "value", "mix", "wide", "narrow")
            }
            for _ in range(BLOCKS)
        ]

    def scores(self, lines: Tensor, adapters: dict[str, Tensor]) -> Tensor:
        """What the head says of each line."""
        x = self.letters[lines] + self.places
        for number, block in enumerate(self.blocks):

            def adapted(place: str, number: int = number) -> Tensor:
                low = adapters[f"{number}.{place}.up"] @ adapters[f"{number}.{place}.down"]
                return self.blocks[number][place] + low

            y = functional.layer_norm(x, (WIDTH,))
            parts = (y @ adapted("query").T, y @ block["key"].T, y @ adapted("value").T)
            query, key, value = (
                part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in parts
            )
            seen = functional.scaled_dot_product_attention(query, key, value)
            x = x + seen.transpose(1, 2).flatten(-2) @ block["mix"].T
            y = functional.layer_norm(x, (WIDTH,))
            x = x + functional.gelu(y @ block["wide"].T) @ block["narrow"].T
        return x.amax(dim=1) @ adapters["head.weight"].T + adapters["head.bias"]


def train(arrays: Arrays, seed: int, lines: int = 256, epochs: int = 1) -> tuple[Arrays, float]:
    """The adapters after local training, and the accuracy of those that were received."""
    letters, labels = data(seed, lines)
    adapters = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in arrays.items()}
    backbone, found = Backbone(), accuracy(arrays, letters, labels)
    optimiser = torch.optim.Adam(adapters.values(), lr=0.01)
    for _ in range(epochs):
        for start in range(0, lines, 32):
            batch = slice(start, start + 32)
            optimiser.zero_grad()
            scores = backbone.scores(letters[batch], adapters)
            functional.cross_entropy(scores, labels[batch]).backward()
            optimiser.step()
    return {name: adapter.detach().numpy() for name, adapter in adapters.items()}, found


def accuracy(arrays: Arrays, letters: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        adapters = {name: torch.from_numpy(array) for name, array in arrays.items()}
        guesses = Backbone().scores(letters, adapters).argmax(dim=1)
    return float((guesses == labels).float().mean())
