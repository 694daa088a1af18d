"""Deal the training examples to clients: iid, dirichlet, shards or natural; NumPy only.

Every partition is disjoint, complete (each example belongs to exactly one client), gives each
client at least `min_samples` examples, and is a function of its arguments and the generator.
A client's indices are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightsecagg.errors import ConfigurationError

Indices = NDArray[np.int64]

# One example cannot train a batch-norm layer, so no client is left with fewer than two.
MIN_SAMPLES = 2


def iid(
    samples: int, clients: int, rng: np.random.Generator, *, min_samples: int = MIN_SAMPLES
) -> list[Indices]:
    """Shuffle, then cut into pieces whose sizes differ by at most one."""
    _refuse_too_few(samples, clients, min_samples)
    return [np.sort(part) for part in np.array_split(rng.permutation(samples), clients)]


def dirichlet(
    labels: NDArray[np.int64],
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_samples: int = MIN_SAMPLES,
) -> list[Indices]:
    """Cut each class by proportions drawn from Dir(alpha): small alpha, skewed labels and sizes.

    Clients left with fewer than `min_samples` are then topped up from the largest ones.
    """
    _refuse_too_few(len(labels), clients, min_samples)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.extend(piece.tolist())
    _top_up(parts, min_samples)
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def shards(
    labels: NDArray[np.int64],
    clients: int,
    per_client: int,
    rng: np.random.Generator,
    *,
    min_samples: int = MIN_SAMPLES,
) -> list[Indices]:
    """Sort by label, cut into `clients * per_client` shards, deal `per_client` to each client."""
    _refuse_too_few(len(labels), clients, max(min_samples, per_client))
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_label, clients * per_client)
    hands = rng.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[k] for k in hand])) for hand in hands]


def natural(
    groups: NDArray[np.int64],
    clients: int,
    rng: np.random.Generator,
    *,
    min_samples: int = MIN_SAMPLES,
) -> list[Indices]:
    """Give each client whole groups (writers, users): they are shuffled and dealt round robin."""
    names = rng.permutation(np.unique(groups))
    if len(names) < clients:
        raise ConfigurationError(
            f"the natural partition has {len(names)} writers for {clients} clients; "
            f"use at most {len(names)} clients or another partition"
        )
    parts = [np.flatnonzero(np.isin(groups, names[k::clients])) for k in range(clients)]
    for client, part in enumerate(parts):
        if len(part) < min_samples:
            raise ConfigurationError(
                f"client {client} of the natural partition has {len(part)} example(s), fewer than "
                f"{min_samples}; use fewer clients, so that each gets several writers"
            )
    return parts


def _refuse_too_few(samples: int, clients: int, min_samples: int) -> None:
    if samples < clients * min_samples:
        raise ConfigurationError(
            f"{samples} training examples are too few for {clients} clients with at least "
            f"{min_samples} each; use fewer clients"
        )


def _top_up(parts: list[list[int]], min_samples: int) -> None:
    """Move examples from the largest part to each part below the minimum, in client order."""
    for part in parts:
        while len(part) < min_samples:
            part.append(max(parts, key=len).pop())
