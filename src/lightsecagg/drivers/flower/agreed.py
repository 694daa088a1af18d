"""What the server and the nodes agree on beforehand.

Apart from both: a ClientApp is a new process for every message, which should not have to load the
server's half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from lightsecagg.field.staleness import StalenessTable
from lightsecagg.protocol.allow_list import AllowList
from lightsecagg.protocol.buffering import Buffering

MASKS_AHEAD = 2
"""How many masks a node has shared before they are needed."""

FORGOTTEN = "lightsecagg: this node does not know this epoch, or has lost its memory of it"
"""The error of a node that must be enrolled again."""

_LIFETIME = 2**20  # memory is bounded by the number of masks, and epochs end long before


def buffering(clients: int) -> Buffering:
    """A round of at most so many clients as a buffer: equal weights, no staleness."""
    return Buffering(table=StalenessTable((1,), 1), max_updates=clients, share_lifetime=_LIFETIME)


def allow_list_of(keys: Iterable[bytes]) -> AllowList:
    """Ids for identity keys: 31 bits of their hash, or the next that is free.

    Flower's node ids have 64 bits, and change with every start of a node without keys.
    """
    identities: dict[int, bytes] = {}
    for key in sorted(keys):
        client = int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1
        while client in identities:
            client += 1
        identities[client] = key
    return AllowList(identities)
