"""What the clients of all transports share: one link, an inbox, and orderly ends."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from lightsecagg.drivers.transport.communicator import Limits, Traffic
from lightsecagg.drivers.transport.framing import MAX_MESSAGE
from lightsecagg.drivers.transport.keeping import Data
from lightsecagg.drivers.transport.link import CLOSED_BY_PEER, CLOSED_HERE, Link, Read, Write
from lightsecagg.drivers.transport.mailbox import Mailbox
from lightsecagg.errors import LocalProtocolError, ParameterError, RemoteProtocolError


def told_to_client(reason: str) -> str:
    """How a client hears why its server cut the stream."""
    return f"the server cut the stream: {reason}"


class StreamClient(ABC):
    """A `ClientCommunicator` over whatever `_open` connects to."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._link: Link | None = None
        self._inbox: Mailbox[bytes] = Mailbox(limits.queue)
        self._running: asyncio.Task[str] | None = None
        self._closing = False
        self.traffic = Traffic()

    @abstractmethod
    async def _open(self) -> tuple[Read, Write]:
        """Connect, within `connect_timeout`; `TransportError` says what to check, or `Refused`."""

    @abstractmethod
    async def _shut(self) -> None:
        """Free what `_open` made; called after the link has ended."""

    async def connect(self) -> None:
        """Try once to open a stream."""
        if self._link is not None and self._link.reason is None:
            raise LocalProtocolError("this client is connected already; close it first")
        await self.close()
        read, write = await self._open()
        inbox = self._inbox = Mailbox(self._limits.queue)
        self._closing = False

        def on_cut(reason: str) -> None:
            closed = reason == CLOSED_BY_PEER
            inbox.close("the server closed the stream" if closed else reason)

        self._link = Link(self._limits, self.traffic, self._accept, self._deliver, on_cut)
        self._running = asyncio.create_task(self._link.run(read, write, linger=True))

    async def send(self, data: bytes) -> None:
        """Queue one message for the server."""
        if not 0 < len(data) <= MAX_MESSAGE:
            raise ParameterError(f"a message has 1 to {MAX_MESSAGE} bytes, not {len(data)}")
        if self._link is None:
            raise LocalProtocolError("this client is not connected; call connect() first")
        await self._link.send(data)

    async def receive(self) -> bytes:
        """The next whole message from the server; cancelling the wait loses nothing."""
        if self._link is None:
            raise LocalProtocolError("this client is not connected; call connect() first")
        return await self._inbox.get()

    async def close(self) -> None:
        """Let queued messages leave until the deadline, then end the stream."""
        link, running = self._link, self._running
        if link is None or running is None:
            return
        self._closing = True
        self._inbox.clear()
        link.finish()
        try:
            await asyncio.wait([running], timeout=self._limits.close_timeout)
        finally:
            link.cut(CLOSED_HERE)
            self._running = None
            try:
                await asyncio.gather(running, return_exceptions=True)
            finally:  # also for who is cancelled in this very moment
                await self._shut()

    def _accept(self, length: int) -> None:
        if length > self._limits.max_message:
            raise RemoteProtocolError(
                f"the server announced a message of {length} bytes, "
                f"this client accepts {self._limits.max_message}; one that expects larger models "
                "raises its max_dimension"
            )

    async def _deliver(self, message: Data) -> None:
        # After close() nobody reads: what still arrives must not hold up the end of the stream.
        if not self._closing:
            await self._inbox.put(bytes(message))
