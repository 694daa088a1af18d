"""A child process that ends with its parent, even one that is killed (R32)."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading


def end_with_parent() -> None:
    """In a child of `multiprocessing`: end when the parent does, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    # The other end of a pipe that only the parent holds: the system closes it.
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
