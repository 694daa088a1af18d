"""Where a message is kept while it arrives and waits: in memory, or in a file if it is long.

The file has no name, so that nothing of it outlives the process. What is made of it is a view of
the mapped file: a server that takes one upload after the other has one in memory, however many
have arrived (R53).
"""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from lightsecagg.errors import TransportError

Data = bytes | memoryview
"""A whole message."""


class Keeper(Protocol):
    """Takes the parts of one message, in order."""

    blocks: bool
    """Whether its methods may wait for the disk: then call them in a thread."""

    def add(self, part: memoryview) -> None:
        """Keep the next part."""

    def whole(self) -> Data:
        """The message; call once, after the last part."""

    def discard(self) -> None:
        """There will be no last part."""


Keep = Callable[[int], Keeper]
"""A keeper for a message of this length."""


class InMemory:
    """For short messages, and for those who have no disk."""

    blocks = False

    def __init__(self, length: int) -> None:
        self._parts: list[memoryview] = []

    def add(self, part: memoryview) -> None:
        """Keep the next part, not copied."""
        self._parts.append(part)

    def whole(self) -> Data:
        """The parts, joined."""
        return b"".join(self._parts)

    def discard(self) -> None:
        """Keep nothing."""
        self._parts.clear()


class OnDisk:
    """In a file without a name, which is gone when nobody looks at it any more."""

    blocks = True

    def __init__(self, folder: Path, length: int) -> None:
        self._folder, self._length = folder, length
        self._waiting: list[memoryview] = []
        self._file: IO[bytes] | None = None
        self._writing = threading.Lock()
        self._discarded = False

    def add(self, part: memoryview) -> None:
        """Write the next part; the first one waits for the second, so that a thread writes both."""
        self._waiting.append(part)
        if self._file is None and len(self._waiting) == 1:
            return
        try:
            with self._writing:
                if not self._discarded:
                    self._write_all()
        except OSError as error:
            # Without the name of the folder: the peer is told.
            raise TransportError(f"a message cannot be kept on disk: {error.strerror}") from error
        finally:
            if self._discarded:
                self._close()

    def _write_all(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        for part in self._waiting:
            while part:
                part = part[self._file.write(part) :]
        self._waiting.clear()

    def whole(self) -> Data:
        """A view of the file; of nothing, if nobody wants it any more."""
        if self._discarded:
            return b""
        if self._file is None:
            raise AssertionError("a long message has two parts or more")
        with self._file as file:
            return memoryview(mmap.mmap(file.fileno(), self._length, access=mmap.ACCESS_READ))

    def discard(self) -> None:
        """Close the file, which has no name to be removed by.

        A thread that is still writing, since whoever waited for it was cancelled, closes it then.
        """
        self._discarded = True
        if self._writing.acquire(blocking=False):
            try:
                self._waiting.clear()
                self._close()
            finally:
                self._writing.release()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def keeping(folder: Path | None, short: int) -> Keep:
    """Messages of up to `short` bytes in memory, longer ones in this folder, if there is one."""
    return InMemory if folder is None else partial(_by_length, folder, short)


def _by_length(folder: Path, short: int, length: int) -> Keeper:
    return InMemory(length) if length <= short else OnDisk(folder, length)
