"""A transport from elsewhere, bare TCP with a length before each chunk, carries a federation.

It has what every transport needs and no more; a real one learns from the peer's certificate who
has connected, instead of believing it.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from pathlib import Path

from small_federation import Federation

from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.link import Read, Write
from lightsecagg.drivers.transport.stream_client import StreamClient
from lightsecagg.drivers.transport.stream_server import StreamServer
from lightsecagg.errors import TransportError


def ends(reader: StreamReader, writer: StreamWriter) -> tuple[Read, Write]:
    """What a link asks for: one chunk in, None at the end of the stream; one chunk out."""

    async def read() -> bytes | None:
        try:
            length = int.from_bytes(await reader.readexactly(4), "big")
            return await reader.readexactly(length)
        except asyncio.IncompleteReadError:
            return None

    async def write(chunk: bytes) -> None:
        writer.write(len(chunk).to_bytes(4, "big") + chunk)
        await writer.drain()

    return read, write


async def hang_up(writer: StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class TcpServer(StreamServer):
    """Listens, admits, runs the link, releases it."""

    port: int | None = None

    async def start(self) -> None:
        self._serving: set[asyncio.Task[None] | None] = set()
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        try:
            link = self._admit(int.from_bytes(await reader.readexactly(4), "big"))
            try:
                await link.run(*ends(reader, writer))
            finally:
                self._release(link)
        except (asyncio.IncompleteReadError, TransportError):
            pass  # gone before it said who it is, too late, or a stranger
        finally:
            await hang_up(writer)

    async def close(self) -> None:
        self._listener.close()
        await super().close()
        await asyncio.gather(*(task for task in self._serving if task is not None))

    def client(self, client: int) -> TcpClient:
        return TcpClient(self, client, self._limits)


class TcpClient(StreamClient):
    """Connects and says who it is."""

    def __init__(self, server: TcpServer, client: int, limits: Limits) -> None:
        super().__init__(limits)
        self._server, self._client = server, client

    async def _open(self) -> tuple[Read, Write]:
        if self._server.port is None:
            raise TransportError("no server listens yet")  # the client's driver tries again
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writer.write(self._client.to_bytes(4, "big"))
        return ends(reader, self._writer)

    async def _shut(self) -> None:
        await hang_up(self._writer)


def test_a_transport_from_elsewhere_carries_a_federation(tmp_path: Path) -> None:
    async def run() -> None:
        transport = TcpServer(range(4), Limits())
        federation = Federation(tmp_path, 4, transport=transport, privacy=1, dropouts=1)
        (record,) = await federation.run()
        federation.check(record)
        assert record.included == [0, 1, 2, 3]
        assert all(transport.stats.clients[client].messages_in for client in range(4))

    asyncio.run(run())


def test_who_is_not_admitted_is_hung_up_on() -> None:
    """A stranger, and one that leaves before it has said who it is."""

    async def run() -> None:
        transport = TcpServer(range(4), Limits())
        await transport.start()
        for said in (b"\0\0\0\x09", b"\0"):
            reader, writer = await asyncio.open_connection("127.0.0.1", transport.port)
            writer.write(said)
            writer.write_eof()
            assert await reader.read() == b""
            await hang_up(writer)
        await transport.close()

    asyncio.run(run())
