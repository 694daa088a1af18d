"""A child process that ends with its parent, even one that is killed (R32)."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading


def end_with_parent() -> None:
    """In a child of `multiprocessing`: end when the parent does, however that ends."""
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end, daemon=True).start()


def wait_for_parents_end() -> None:
    """In a child of `multiprocessing`: returns when the parent has ended, however that was."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # The other end of a pipe that only the parent holds: the system closes it.
        multiprocessing.connection.wait([parent.sentinel])


def _end() -> None:
    wait_for_parents_end()
    os._exit(1)
