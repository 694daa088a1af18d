"""A TCP proxy on loopback that delays, holds back and cuts what passes through it (R33).

    proxy = FaultProxy(server.address)
    await proxy.start()
    client = GrpcClient(proxy.address, ...)

It sees bytes, not messages, so it works with TLS. Faults can be set for what is connected and for
connections still to come. Holding one connection while others go on reorders messages across
connections; cutting one, so that its client reconnects and repeats itself, duplicates them.

`FaultyNetwork` has one for each client, in a thread, for programs without an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


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
        if self._listener is None:
            raise RuntimeError("start it first")
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
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
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


class FaultyNetwork:
    """A proxy in front of the server for each client; a context manager."""

    def __init__(self, target: str, clients: Iterable[int]) -> None:
        self._proxies = {client: FaultProxy(target) for client in clients}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def address(self, client: int) -> str:
        """Where this client finds the server."""
        return self._proxies[client].address

    def partition(self, clients: Iterable[int]) -> None:
        """What these and the server send each other is held back."""
        self._each(clients, FaultProxy.partition)

    def heal(self, clients: Iterable[int]) -> None:
        """What was held back goes through."""
        self._each(clients, FaultProxy.heal)

    def refuse(self, *, refusing: bool) -> None:
        """Whether the server cannot be reached at all."""

        def set_(proxy: FaultProxy) -> None:
            proxy.refusing = refusing
            if refusing:
                proxy.cut_all()

        self._each(self._proxies, set_)

    def _each(self, clients: Iterable[int], act: Callable[[FaultProxy], None]) -> None:
        async def all_() -> None:
            for client in clients:
                act(self._proxies[client])

        self._call(all_)

    async def _start(self) -> None:
        for proxy in self._proxies.values():
            await proxy.start()

    async def _close(self) -> None:
        for proxy in self._proxies.values():
            await proxy.close()

    def _call(self, what: Callable[[], Coroutine[None, None, None]]) -> None:
        asyncio.run_coroutine_threadsafe(what(), self._loop).result()
