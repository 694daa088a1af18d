"""A bounded queue that can be closed: whoever waits at it is woken and told why.

`asyncio.Queue` cannot be closed before Python 3.13, and a sender that waits for room in the queue
of a peer that is gone would wait for ever (R35).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from lightsecagg.errors import PeerGone

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out, at most `capacity` items; cancelling a waiter loses nothing."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._closed: str | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T) -> None:
        """Add an item, waiting for room; `PeerGone` once the mailbox is closed."""
        while self._capacity is not None and len(self._items) >= self._capacity:
            await self._change()
        self.put_now(item)

    def put_now(self, item: T) -> None:
        """Add an item without waiting, whatever the capacity."""
        if self._closed is not None:
            raise PeerGone(self._closed)
        self._items.append(item)
        self._wake()

    async def get(self) -> T:
        """Take the oldest item, waiting for one; `PeerGone` once closed and empty."""
        while not self._items:
            await self._change()
        item = self._items.popleft()
        self._wake()
        return item

    def close(self, reason: str) -> None:
        """Take no more items; what is inside can still be taken."""
        if self._closed is None:
            self._closed = reason
        self._wake()

    def clear(self) -> None:
        """Drop what is inside."""
        self._items.clear()
        self._wake()

    async def _change(self) -> None:
        if self._closed is not None:
            raise PeerGone(self._closed)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        # Everybody looks again: waiters are few (one pump, one or two callers), and so no wake-up
        # is lost to a waiter that was cancelled.
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
