"""Child processes for local training: one thread each, and no secret of the parent inside.

    with training_pool(workers=2) as pool:
        future = pool.submit(local_update, task_config, client, model, local_config, seed=1)

A child is spawned, not forked: a fork would copy the parent's masks and keys into it. It ends with
its parent, even one that is killed in the middle of a training.
"""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor

from lightsecagg.errors import ParameterError
from lightsecagg.training.parent import end_with_parent
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


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches it too: no traceback
    end_with_parent()
    use_one_thread()
