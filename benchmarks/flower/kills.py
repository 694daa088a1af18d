"""SIGKILL of a SuperNode, and of the app it runs, in every stage of real rounds.

One deployment, as in `deployment`. In each run of two rounds the last SuperNode is killed once, and
started again when the run is over. Tells of every round how long it took, whose updates are in its
average, and how far that is from plain FedAvg over them. Flower notices a dead node when two of its
heartbeats are missing, after up to a minute; a stage that waits for the node takes so long.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from deployment import EXAMPLE, Deployment

sys.path.insert(0, str(EXAMPLE / "digits"))

import task

RECEIVED, SENT = "Received successfully", "Sent successfully"
STAGES = {
    "hello": (RECEIVED, 1),
    "open": (RECEIVED, 2),
    "roster": (RECEIVED, 3),
    "train": (RECEIVED, 4),
    "after the upload": (SENT, 4),
    "answer": (RECEIVED, 5),
    "between the rounds": (SENT, 5),
    "second train": (RECEIVED, 6),
    "second answer": (RECEIVED, 7),
}
"""What its log has said how often when the node is killed."""

ROUNDS = 2
NOTICED = 65.0
"""Seconds after which Flower takes a killed node for dead, and lets it come back."""
PATIENCE = 900.0
"""Seconds for one run: what counts here are the averages."""
EXACT = 1e-6


def measure(nodes: int, stages: list[str] | None, tell: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder), nodes, tell, PATIENCE) as deployed,
    ):
        for stage in stages or STAGES:
            found[stage] = figures = _run(deployed, nodes, stage)
            tell(f"killed in {stage}: {figures}")
    return found


def _run(deployed: Deployment, nodes: int, stage: str) -> dict[str, Any]:
    victim, over = nodes - 1, threading.Event()
    killed: list[float] = []
    killer = threading.Thread(target=_kill, args=(deployed, victim, *STAGES[stage], over, killed))
    killer.start()
    try:
        run = deployed.run("lightsecagg", ROUNDS)
    finally:
        over.set()
        killer.join()
    if not killed:
        raise RuntimeError(f"the run was over before anybody was killed in {stage}")
    time.sleep(max(0.0, killed[0] + NOTICED - time.monotonic()))
    deployed.start_node(victim)
    sets = [list(range(nodes)), list(range(victim))]
    averages = [_included(before, after, sets, nodes) for before, after in pairwise(run["models"])]
    return {"seconds": run["rounds"], "enrolment": round(run["enrolment"], 1), "rounds": averages}


def _kill(
    deployed: Deployment,
    node: int,
    line: str,
    times: int,
    over: threading.Event,
    killed: list[float],
) -> None:
    """Kill the node when its log has said this so many times more than now."""
    times += deployed.log_of(node).count(line)
    while not over.wait(0.02):
        if deployed.log_of(node).count(line) >= times:
            deployed.kill_node(node)
            killed.append(time.monotonic())
            return


def _included(
    before: task.Arrays, after: task.Arrays, sets: list[list[int]], nodes: int
) -> dict[str, Any]:
    """Whose average a model is, and how exactly; an error if it is nobody's."""
    errors = {len(chosen): _error(before, after, chosen, nodes) for chosen in sets}
    best = min(errors, key=lambda count: errors[count])
    if errors[best] >= EXACT:
        raise RuntimeError(f"the model is the average of no such nodes: {errors}")
    return {"updates": best, "error": f"{errors[best]:.0e}"}


def _error(before: task.Arrays, after: task.Arrays, chosen: list[int], nodes: int) -> float:
    data = [task.load(position, nodes) for position in chosen]
    trained = [task.train(before, *mine) for mine in data]
    weights = [len(labels) for _, labels in data]
    return max(
        float(np.abs(np.average([t[name] for t in trained], axis=0, weights=weights) - array).max())
        for name, array in after.items()
    )
