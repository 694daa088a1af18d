"""The links of a federation, real ones: a namespace for each party, shaped rates, added latency.

    client --- tbf rate, each way --- bridge --- delay line --- server

Every client has a veth pair to a bridge, with a token bucket at both ends: one for each direction.
The server hangs on the bridge by the delay line, so every frame between it and a client is delayed
once. Queues are long enough to drop nothing. The server's own link has no bucket.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

from lightsecagg_lab.experiments.delay_line import Tap, start_delay_line
from lightsecagg_lab.experiments.namespaces import Namespace, visiting

SERVER_ADDRESS: Final = "192.0.2.1"
"""Of the range that is reserved for documentation: nobody's."""
_CONGESTION: Final = "cubic"
"""What most systems use; namespaces would inherit whatever this machine prefers."""
_BURST, _LIMIT = "128kb", "16mb"
"""Of a token bucket: two frames of 64 KiB at once, and a queue beyond any window of ours."""
_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class ShapedLinks:
    """Where each party is to be."""

    server: Path
    """Its namespace."""
    clients: tuple[Path, ...]


@contextmanager
def shaped_links(clients: int, bandwidth: float, latency: float) -> Iterator[ShapedLinks]:
    """Namespaces for a server and its clients: `bandwidth` in Mbit/s, `latency` in ms one way."""
    with ExitStack() as stack:

        def namespace() -> Namespace:
            made = Namespace()
            stack.callback(made.close)
            return made

        hub, server, homes = namespace(), namespace(), [namespace() for _ in range(clients)]
        hub.run("ip link add name hub type bridge", "ip link set dev hub up")
        for number, home in enumerate(homes):
            _wire(hub, home, number, bandwidth)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightsecagg-"))
        line = start_delay_line(
            Tap(server.path, "wan", _address_commands("wan", SERVER_ADDRESS)),
            Tap(hub.path, "wan", ("ip link set dev wan master hub up",)),
            latency / 1e3,
            Path(folder) / "delay-line.log",
        )
        stack.callback(_end, line)
        yield ShapedLinks(server.path, tuple(home.path for home in homes))


def _wire(hub: Namespace, home: Namespace, number: int, bandwidth: float) -> None:
    bucket = f"root tbf rate {bandwidth}mbit burst {_BURST} limit {_LIMIT}"
    home.run(
        f"ip link add name wan type veth peer name client{number} netns {hub.path}",
        *_address_commands("wan", client_address(number)),
        f"tc qdisc add dev wan {bucket}",
    )
    hub.run(
        f"ip link set dev client{number} master hub up",
        f"tc qdisc add dev client{number} {bucket}",
    )


def client_address(number: int) -> str:
    """Of the client with that number, from 0 on."""
    return f"192.0.2.{number + 2}"


def _address_commands(device: str, address: str) -> tuple[str, ...]:
    return (
        f"ip address add {address}/24 dev {device}",
        f"ip link set dev {device} up",
        f"ip route change 192.0.2.0/24 dev {device} congctl {_CONGESTION}",
    )


def _end(process: SpawnProcess) -> None:
    process.terminate()
    process.join()


def raw_transfer(links: ShapedLinks, client: int, size: int) -> tuple[float, float]:
    """What TCP alone does: seconds of a round trip, and to send `size` bytes and hear of it.

    The connection is fresh: it begins with slow start, as after a pause for training.
    """
    with visiting(links.server):
        listener = socket.create_server((SERVER_ADDRESS, 0))
    with closing(listener):
        listener.settimeout(_PATIENCE)
        server = threading.Thread(target=_swallow, args=(listener, size))
        server.start()
        address = listener.getsockname()
        with visiting(links.clients[client]):
            began = time.perf_counter()
            connection = socket.create_connection(address, _PATIENCE)
            round_trip = time.perf_counter() - began
        with closing(connection):
            began = time.perf_counter()
            connection.sendall(bytes(size))
            connection.recv(1)
            seconds = time.perf_counter() - began
        server.join()
    return round_trip, seconds


def _swallow(listener: socket.socket, size: int) -> None:
    connection, _ = listener.accept()
    with closing(connection):
        connection.settimeout(_PATIENCE)
        buffer, left = bytearray(1 << 20), size
        while left > 0 and (taken := connection.recv_into(buffer)):
            left -= taken
        connection.sendall(b".")
