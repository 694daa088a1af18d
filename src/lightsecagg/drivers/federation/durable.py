"""Files that outlive a crash: whole or absent, checksummed, and one process at a time.

A process without a free descriptor has no broken disk: connections come and go, so whoever opens a
file here waits a while for one (R60).
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from lightsecagg import system
from lightsecagg.errors import ConfigurationError, JournalError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_CHECKSUM = 32
_PATIENCE = 60.0
"""Seconds to wait for a descriptor: several times what a stranger may hold one."""
_PAUSE = 0.1


def checksummed(place: str, content: bytes) -> bytes:
    """Content with a checksum that binds it to its place."""
    return hashlib.sha256(place.encode() + b"\0" + content).digest() + content


def verified(place: str, stored: bytes) -> bytes:
    """The inverse of `checksummed`; `JournalError` if a bit is wrong or it belongs elsewhere."""
    # A damaged database may hand out a number or a text where bytes were stored.
    content = stored[_CHECKSUM:] if isinstance(stored, bytes) else b""
    if checksummed(place, content) != stored:
        raise JournalError(f"the stored entry {place} is damaged")
    return content


def patiently(opening: Callable[[], T]) -> T:
    """What `opening` returns; it is tried again while no descriptor is free."""
    deadline = 0.0
    while True:
        try:
            return opening()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            now = time.monotonic()
            if not deadline:
                deadline = now + _PATIENCE
                _log.warning("%s: a file waits for a descriptor to become free", error.strerror)
            elif now > deadline:
                raise
        time.sleep(_PAUSE)


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that it is whole or absent, whatever happens."""
    temporary = path.with_suffix(".tmp")
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_new(path: Path, data: bytes | memoryview) -> None:
    """Write and sync a file that nothing refers to yet: a crash may leave half of it."""
    with new_file(path) as file:
        file.write(data)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file of its owner alone, to write; synced at the end.

    What a crash has left is removed; a link that somebody has put there is not followed (S61).
    """
    path.unlink(missing_ok=True)
    descriptor = patiently(lambda: system.new_private(path))
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Let the names in a folder outlive a crash."""
    patiently(lambda: system.sync_folder(path))


class ProcessLock:
    """Held by one object of one process at a time; a process that dies lets go of it."""

    _descriptor = -1

    def __init__(self, path: Path, refusal: str) -> None:
        """`ConfigurationError` with this `refusal` if somebody else holds it."""
        self._descriptor = system.open_private(path)
        try:
            system.lock(self._descriptor)
        except OSError as error:
            self.release()
            raise ConfigurationError(refusal) from error

    def release(self) -> None:
        """Let go; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()
