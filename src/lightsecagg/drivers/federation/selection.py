"""Who is invited to a round when more clients are ready than it takes.

Never by their ids: the same few would train for ever, and the model would be theirs. This is about
fairness alone. Nothing secret depends on it, and clients do not rely on it: a malicious server
invites whom it likes, which is why T bounds the corrupt among all admitted identities.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Literal

Sampling = Literal["random", "fair"]


def choose(
    ready: Collection[int],
    count: int,
    number: int,
    *,
    sampling: Sampling,
    seed: int,
    invited: Mapping[int, int],
    first: Collection[int] = (),
) -> list[int]:
    """At most `count` of the clients that are `ready` for round `number`, in ascending order.

    * `first`: those that are ready come before all others (they are bound to a set, S42);
    * `sampling`: `fair` takes the least recently `invited` (client -> round) next, and lots decide
      between equals; `random` draws lots alone.

    The same arguments give the same clients, after a restart too.
    """
    lots = random.Random(f"{seed}/{number}")  # noqa: S311 - who is invited is no secret
    order = sorted(ready)
    lots.shuffle(order)
    if sampling == "fair":
        order.sort(key=lambda client: invited.get(client, 0))
    order.sort(key=lambda client: client not in first)
    return sorted(order[:count])
