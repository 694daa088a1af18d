"""Child processes for local training: one thread each, and no secret of the parent inside.

    with training_pool(workers=2) as pool:
        future = pool.submit(local_update, task_config, client, model, local_config, seed=1)

A child is spawned, not forked: a fork would copy the parent's masks and keys into it. It ends with
its parent, even one that is killed in the middle of a training.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from concurrent.futures import ProcessPoolExecutor

from lightsecagg.errors import ParameterError
from lightsecagg.training.trainer import use_one_thread


def training_pool(workers: int = 1) -> ProcessPoolExecutor:
    """An executor whose processes train on one thread each; close it, or use `with`."""
    if workers < 1:
        raise ParameterError(f"workers is {workers}; it must be at least 1")
    return ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
    )


def end_with_parent() -> None:
    """In a child of `multiprocessing`: end when the parent does, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _begin() -> None:
    end_with_parent()
    use_one_thread()
