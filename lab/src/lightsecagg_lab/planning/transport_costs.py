"""What carrying messages costs beside the parties' own work: gRPC, TLS, framing, files.

`experiments.links` measures it in the processes of real federations and fits these terms to them;
`STATED` is what it found on the machine that it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

INITIAL_WINDOW = 10 * 1448
"""Bytes that TCP sends before it hears of the first (RFC 6928)."""
FRAME = 1514 / 1448
"""Bytes on a link per byte of a message: headers of Ethernet, IP and TCP."""


@dataclass(frozen=True, slots=True)
class TransportCosts:
    """Seconds of one core per message and byte, and what a sender may be ahead."""

    source: str
    """Where the figures come from."""
    server_message: float
    """The server, for a message to or from a client."""
    server_byte: float
    """The server, for a byte to or from a client."""
    client_message: float
    """A client, for a message to or from the server."""
    client_byte: float
    """A client, for a byte to or from the server."""
    stored_upload: float
    """Elapsed at the server until a short upload is on disk; one upload after the other."""
    stored_byte: float
    """More of it for each byte of an upload."""
    result_byte: float
    """Elapsed at the server, per byte of an update, until the average is made and stored."""
    fluid: bool = False
    """Whether links are full from the first byte: without headers, slow start and flow control."""


STATED = TransportCosts(
    source="stated: two cores of an AMD EPYC (Zen 3), ext4, rounded",
    server_message=1.1e-3,
    server_byte=6.4e-9,
    client_message=7.0e-4,
    client_byte=6.5e-9,
    stored_upload=3.1e-3,
    stored_byte=3.2e-9,
    result_byte=2.1e-8,
)

FREE = TransportCosts("nothing: messages carry themselves", 0, 0, 0, 0, 0, 0, 0, fluid=True)


def window(clients: int) -> int:
    """Bytes that each of so many clients may be ahead of the server's reading (R53)."""
    return min(max(2**25 // max(clients, 1), 2**19), 2**22)


def slow_start(size: int, rate: float, round_trip: float) -> float:
    """Seconds that TCP's slow start adds to a transfer, beyond size / rate.

    - `rate` in bytes a second, `round_trip` in seconds

    The window begins with w and doubles with every round trip until it fills the link, after

        k = log2(rate * round_trip / w) round trips,

    rounded up, in which w (2^k - 1) bytes are sent instead of k * rate * round_trip; a transfer
    that is shorter than that is done before. A connection begins so, and anew after silence.
    """
    full = rate * round_trip / INITIAL_WINDOW
    if full <= 1:
        return 0.0
    doublings = min(ceil(log2(full)), ceil(log2(size / INITIAL_WINDOW + 1)) - 1)
    sent = INITIAL_WINDOW * ((1 << doublings) - 1)
    return max(0.0, doublings * round_trip - sent / rate)
