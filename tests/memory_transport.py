"""An in-process transport for tests: the same links, budgets and back-pressure, no socket."""

from __future__ import annotations

from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.link import Read, Write
from lightsecagg.drivers.transport.pipes import Pipe, PipeServer
from lightsecagg.drivers.transport.stream_client import StreamClient


class MemoryServer(PipeServer):
    """A `ServerCommunicator` that clients of the same event loop connect to."""

    def client(self, client: int) -> MemoryClient:
        """The other end, for the client of this id."""
        return MemoryClient(self, client, self._limits)


class MemoryClient(StreamClient):
    """A `ClientCommunicator` of a `MemoryServer`."""

    def __init__(self, server: MemoryServer, client: int, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())
        self._server = server
        self._client = client
        self._pipes: tuple[Pipe, Pipe] | None = None

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
