"""A TCP proxy on loopback that delays, holds back and cuts what passes through it (R33).

    proxy = FaultProxy(server.address)
    await proxy.start()
    client = GrpcClient(proxy.address, ...)

It sees bytes, not messages, so it works with TLS. Faults can be set for what is connected and for
connections still to come. Holding one connection while others go on reorders messages across
connections; cutting one, so that its client reconnects and repeats itself, duplicates them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class ProxiedConnection:
    """One connection through the proxy; number them in the order in which they were made."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    open_gate: asyncio.Event = field(default_factory=asyncio.Event)
    forwarded: int = 0
    """Bytes that went from the client to the server."""

    def hold(self) -> None:
        """Forward nothing, in either direction, until `release()`; lose nothing."""
        self.open_gate.clear()

    def release(self) -> None:
        """Forward again."""
        self.open_gate.set()

    def cut(self) -> None:
        """Break the connection on both sides, losing what is on its way."""
        self.client.transport.abort()
        self.server.transport.abort()


class FaultProxy:
    """Forwards connections to `target` ("host:port") and does them harm on request."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: list[ProxiedConnection] = []
        """All connections so far, the broken ones too."""
        self.delay = 0.0
        """Seconds that every piece of data waits."""
        self.cut_after: int | None = None
        """A connection is cut once so many bytes have gone to the server."""
        self.refusing = False
        """New connections are closed at once."""
        self.partitioned = False
        """New connections are held from the start; see `partition`."""

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        self._listener = await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    @property
    def address(self) -> str:
        """Where clients connect."""
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut_all(self) -> None:
        """Break every connection."""
        for connection in self.connections:
            connection.cut()

    def partition(self) -> None:
        """Forward nothing any more, without telling anybody."""
        self.partitioned = True
        for connection in self.connections:
            connection.hold()

    def heal(self) -> None:
        """End the partition; what was held back goes through."""
        self.partitioned = False
        for connection in self.connections:
            connection.release()

    async def close(self) -> None:
        """Break every connection and stop listening."""
        if self._listener is not None:
            self._listener.close()
        self.cut_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = ProxiedConnection(writer, server_writer)
        if not self.partitioned:
            connection.release()
        self.connections.append(connection)
        for source, target, upwards in (
            (reader, server_writer, True),
            (server_reader, writer, False),
        ):
            task = asyncio.create_task(self._pump(connection, source, target, upwards))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        connection: ProxiedConnection,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        upwards: bool,
    ) -> None:
        try:
            while data := await source.read(64 * 1024):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await connection.open_gate.wait()
                if upwards:
                    room = len(data)
                    if self.cut_after is not None:
                        room = self.cut_after - connection.forwarded
                    target.write(data[:room])
                    connection.forwarded += len(data[:room])
                    if room < len(data):
                        break
                else:
                    target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            connection.cut()
