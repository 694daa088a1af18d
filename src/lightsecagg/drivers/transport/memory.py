"""An in-process transport for tests: the same links, budgets and back-pressure, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.link import Link, Read, Write
from lightsecagg.drivers.transport.mailbox import Mailbox
from lightsecagg.drivers.transport.stream_client import StreamClient, told_to_client
from lightsecagg.drivers.transport.stream_server import StreamServer
from lightsecagg.errors import TransportError


class MemoryServer(StreamServer):
    """A `ServerCommunicator` that clients of the same event loop connect to."""

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

    def client(self, client: int) -> MemoryClient:
        """The other end, for the client of this id."""
        return MemoryClient(self, client, self._limits)

    def accept(self, client: int) -> tuple[Mailbox[bytes], Mailbox[bytes]]:
        """A client's pipes, to the server and from it; each holds one chunk."""
        if not self._listening:
            raise TransportError("nobody listens: start the server first")
        link = self._admit(client)
        inwards: Mailbox[bytes] = Mailbox(1)
        outwards: Mailbox[bytes] = Mailbox(1)
        task = asyncio.create_task(self._carry(link, inwards, outwards))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return inwards, outwards

    async def _carry(self, link: Link, inwards: Mailbox[bytes], outwards: Mailbox[bytes]) -> None:
        try:
            reason = await link.run(inwards.get, outwards.put)
            inwards.close(reason)
            outwards.close(told_to_client(reason))
        finally:
            self._release(link)


class MemoryClient(StreamClient):
    """A `ClientCommunicator` of a `MemoryServer`."""

    def __init__(self, server: MemoryServer, client: int, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())
        self._server = server
        self._client = client
        self._pipes: tuple[Mailbox[bytes], Mailbox[bytes]] | None = None

    async def _open(self) -> tuple[Read, Write]:
        outwards, inwards = self._pipes = self._server.accept(self._client)
        return inwards.get, outwards.put

    async def _shut(self) -> None:
        if self._pipes is not None:
            for pipe in self._pipes:
                pipe.close("the client is gone")
            self._pipes = None

    def vanish(self) -> None:
        """Fail like a crashed machine: without a word, and losing what was queued."""
        if self._link is not None:
            self._link.cut("this client vanished")
        if self._pipes is not None:
            for pipe in self._pipes:
                pipe.clear()
                pipe.close("the client is gone")
