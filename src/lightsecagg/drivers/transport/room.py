"""Room for bytes, shared: whoever finds too little waits until others have given theirs back."""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """So many bytes; first come, first served, so that long takers are not overtaken for ever."""

    def __init__(self, size: int) -> None:
        self.left = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, bytes_: int) -> None:
        """Take so many bytes, of at most `size`; cancelling the wait takes nothing."""
        if not self._waiting and bytes_ <= self.left:
            self.left -= bytes_
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((bytes_, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.left += bytes_  # it was ours already
            self._serve()
            raise

    def give_back(self, bytes_: int) -> None:
        """Give back what was taken."""
        self.left += bytes_
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            bytes_, turn = self._waiting[0]
            if not turn.cancelled():
                if bytes_ > self.left:
                    return
                self.left -= bytes_
                turn.set_result(None)
            self._waiting.popleft()
