"""One live stream, either end of it: chunks in, chunks out, both at once, every wait bounded.

A link does not know what carries the chunks. It is given `read` (a chunk, or None at the end of
the stream) and `write`, and runs one task for each direction; either may raise `PeerGone`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lightsecagg.drivers.transport.communicator import Limits, Traffic
from lightsecagg.drivers.transport.framing import GOODBYE, Reassembler, chunks
from lightsecagg.drivers.transport.keeping import Data, InMemory, Keep
from lightsecagg.drivers.transport.mailbox import Mailbox
from lightsecagg.errors import PeerGone
from lightsecagg.foreign import explain

Read = Callable[[], Awaitable[bytes | None]]
Write = Callable[[bytes], Awaitable[None]]

CLOSED_HERE = "closed by this side"
CLOSED_BY_PEER = "closed by the peer"
LOST = "the connection was lost"


class Link:
    """A stream to one peer, from the moment it is accepted until it is cut."""

    def __init__(
        self,
        limits: Limits,
        traffic: Traffic,
        accept: Callable[[int], None],
        deliver: Callable[[Data], Awaitable[None]],
        on_cut: Callable[[str], None],
        keep: Keep = InMemory,
    ) -> None:
        """`accept` is asked before a message is reassembled, `keep` where; `deliver` may wait:
        back-pressure; `on_cut` is called once, with the reason, at the moment the link ends."""
        self._limits = limits
        self._traffic = traffic
        self._reassembler = Reassembler(accept, keep)
        self._deliver = deliver
        self._on_cut = on_cut
        self._outbox: Mailbox[bytes] = Mailbox(limits.queue)
        self.waiting = 0
        """Bytes that are queued and have not left."""
        self._ended = asyncio.Event()
        self.reason: str | None = None
        """Why the link ended, once it has."""
        self.released = asyncio.Event()
        """Set by the carrier when nothing of this link is left."""

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting for room; a peer that takes no chunk in time is cut meanwhile.

        However long the messages before it are, one that takes them slowly is waited for.
        """
        await self._outbox.put(message)
        self.waiting += len(message)

    def post(self, message: bytes) -> None:
        """Queue a message without waiting; `waiting` is the caller's to bound."""
        self._outbox.put_now(message)
        self.waiting += len(message)

    def finish(self) -> None:
        """Queue nothing more; the link ends when what is queued has left."""
        self._outbox.close(CLOSED_HERE)

    def cut(self, reason: str) -> None:
        """End the link now; only the first reason counts."""
        if self.reason is not None:
            return
        self.reason = reason
        self._outbox.close(reason)
        self._outbox.clear()
        self._ended.set()
        self._on_cut(reason)

    async def run(self, read: Read, write: Write, *, linger: bool = False) -> str:
        """Move chunks until the link is cut; return the reason.

        A finished link says goodbye. If it is to `linger`, the peer then ends the stream, so that
        what is still on its way to it is not lost.
        """
        tasks = [
            asyncio.create_task(self._receive_all(read)),
            asyncio.create_task(self._send_all(write, linger)),
            asyncio.create_task(self._wait_for_the_end()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()
        finally:
            self.cut(LOST)
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also if this, too, is cancelled
                self._reassembler.discard()
        assert self.reason is not None  # noqa: S101 - cut() has set it
        return self.reason

    async def _wait_for_the_end(self) -> None:
        await self._ended.wait()

    async def _receive_all(self, read: Read) -> None:
        try:
            while not self._reassembler.ended:
                await self._receive(read)
            self.cut(CLOSED_BY_PEER)
        except TimeoutError:
            self.cut(self._stalled("stalled inside a message"))
        except Exception as error:  # a chunk does no harm beyond its link (S41)
            self.cut(explain(error))

    async def _receive(self, read: Read) -> None:
        """One chunk. No variable outlives the call: of a peer that is silent nothing is kept."""
        chunk = await self._read(read)
        if chunk is None:
            inside = self._reassembler.inside_message
            raise PeerGone("the stream ended inside a message" if inside else LOST)
        message = await self._feed(chunk)
        if message is not None:
            self._traffic.messages_in += 1
            self._traffic.bytes_in += len(message)
            await self._deliver(message)

    async def _feed(self, chunk: bytes) -> Data | None:
        if not self._reassembler.blocks:
            return self._reassembler.feed(chunk)
        writing = asyncio.ensure_future(asyncio.to_thread(self._reassembler.feed, chunk))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # A file must not be closed, and its number given to another, while it is written to.
            await asyncio.gather(writing, return_exceptions=True)
            raise

    async def _read(self, read: Read) -> bytes | None:
        # Silence between messages is the protocol's business; silence inside one is a stall.
        inside = self._reassembler.inside_message
        async with asyncio.timeout(self._limits.stall_timeout if inside else None):
            return await read()

    async def _send_all(self, write: Write, linger: bool) -> None:
        try:
            while await self._send_next(write):
                pass
            if self.reason is not None:  # cut, not finished: there is nothing to say
                return
            await self._write(write, GOODBYE)
            if linger:
                await self._ended.wait()
            self.cut(CLOSED_HERE)
        except TimeoutError:
            self.cut(self._stalled("took no data"))
        except Exception as error:
            self.cut(explain(error))

    async def _send_next(self, write: Write) -> bool:
        """The next message of the outbox; False once it is closed and empty."""
        message = await self._next_message()
        if message is None:
            return False
        for chunk in chunks(message):
            await self._write(write, chunk)
        self._traffic.messages_out += 1
        self._traffic.bytes_out += len(message)
        self.waiting -= len(message)
        return True

    async def _write(self, write: Write, chunk: bytes) -> None:
        async with asyncio.timeout(self._limits.stall_timeout):
            await write(chunk)

    async def _next_message(self) -> bytes | None:
        """The next message of the outbox; None once it is closed and empty."""
        try:
            return await self._outbox.get()
        except PeerGone:
            return None

    def _stalled(self, what: str) -> str:
        return f"the peer {what} for {self._limits.stall_timeout:g} s"
