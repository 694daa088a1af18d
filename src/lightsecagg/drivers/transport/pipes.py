"""A server whose streams are pairs of pipes: whatever holds the other ends is the carrier.

The ends are in the same event loop (`memory`), or reached by remote calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container

from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.link import Link
from lightsecagg.drivers.transport.mailbox import Mailbox
from lightsecagg.drivers.transport.stream_client import told_to_client
from lightsecagg.drivers.transport.stream_server import StreamServer
from lightsecagg.errors import TransportError

Pipe = Mailbox[bytes]
"""One direction of a stream."""


class PipeServer(StreamServer):
    """A `ServerCommunicator` that gives each client a pipe to the server and one from it."""

    def __init__(self, clients: Container[int], limits: Limits | None = None) -> None:
        super().__init__(clients, limits or Limits())
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = False

    async def start(self) -> None:
        """Accept clients from now on."""
        self._listening = True

    async def close(self) -> None:
        """End every stream."""
        self._listening = False
        await super().close()
        await asyncio.gather(*self._tasks)

    def accept(self, client: int) -> tuple[Pipe, Pipe]:
        """A client's pipes, to the server and from it; each holds one chunk."""
        if not self._listening:
            raise TransportError("no server listens: start the server first")
        link = self._admit(client)
        inwards: Pipe = Mailbox(1)
        outwards: Pipe = Mailbox(1)
        task = asyncio.create_task(self._carry(link, inwards, outwards))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return inwards, outwards

    async def _carry(self, link: Link, inwards: Pipe, outwards: Pipe) -> None:
        try:
            reason = await link.run(inwards.get, outwards.put)
            inwards.close(reason)
            outwards.close(told_to_client(reason))
        finally:
            self._release(link)
