"""Rounds against buffers with a straggler: how long until the model is good, over real sockets.

The same clients, data and local training, the same number of client processes over loopback TLS;
one client (or more) trains ten times as long as the others. Rounds wait for it, buffers do not.
Time runs from the first training to the sum whose model reaches the accuracy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightsecagg.drivers.federation.demo import run_demo
from lightsecagg.drivers.federation.demo_config import DemoConfig
from lightsecagg.drivers.federation.report import drawing
from lightsecagg.errors import Aborted
from lightsecagg.training.config import LocalConfig

_MODES = ("sync", "async")


@dataclass(frozen=True, slots=True)
class Stragglers:
    """What to compare."""

    clients: int = 8
    buffer: int = 4
    slow: int = 1
    slowdown: float = 10.0
    least_training: float = 1.0
    """Seconds of a fast client's training, at least: as if its data were larger."""
    accuracy: float = 0.9
    rounds: int = 12
    flushes: int = 40
    timeout: float = 600.0
    seed: int = 0


def compare_modes(
    plan: Stragglers,
    tell: Callable[[str], None] = lambda line: None,
    ask: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Both, one after the other; each ends with its last round or buffer."""
    base = DemoConfig(
        clients=plan.clients,
        privacy=max(1, plan.clients // 4),
        dropouts=plan.clients // 4,
        buffer=plan.buffer,
        dropout=0,
        local=LocalConfig(epochs=5, batch_size=16, learning_rate=0.1),
        bound=4.0,
        slow=plan.slow,
        slowdown=plan.slowdown,
        least_training=plan.least_training,
        timeout=plan.timeout,
        seed=plan.seed,
    )
    configs = {
        "sync": replace(base, rounds=plan.rounds),
        "async": replace(base, mode="async", rounds=plan.flushes, server_rate=0.5),
    }
    runs = {}
    for name in _MODES:
        tell(f"{name}: {configs[name].rounds} sums, {plan.slow} of {plan.clients} clients slow")
        runs[name] = _run(configs[name], plan.accuracy, ask)
    reached = [runs[name]["seconds_to_accuracy"] for name in _MODES]
    ratio = None if None in reached else reached[0] / reached[1]
    return {"plan": asdict(plan), "runs": runs, "sync_over_async": ratio}


def _run(config: DemoConfig, accuracy: float, ask: Callable[[], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lightsecagg-") as folder:
        result = run_demo(config, Path(folder), lambda *progress: None, ask)
    if result.interrupted is not None:
        raise SystemExit(result.interrupted)
    if not result.audit.clean or result.hung:
        raise Aborted(f"this must not happen: {result.audit}")
    began = min(note["time"] for note in result.notes if note["what"] == "trains")
    curve = [
        (record["time"] - began, record["figures"]["accuracy"])
        for record in result.records
        if record["figures"]
    ]
    return {
        "sums": len(result.records),
        "exact": all(each.exact for each in result.compared),
        "seconds_to_accuracy": next((when for when, found in curve if found >= accuracy), None),
        "final_accuracy": curve[-1][1],
        "curve": curve,
    }


def draw(document: dict[str, Any], path: Path) -> None:
    """Accuracy over time, of both."""
    pyplot = drawing("the picture")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    names = {"sync": "rounds", "async": "buffers"}
    for name, run in document["runs"].items():
        seconds, found = zip(*run["curve"], strict=True)
        axes.plot(seconds, found, marker="o", markersize=3, label=names[name])
    plan = document["plan"]
    axes.axhline(plan["accuracy"], color="#8c8c8c", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("accuracy on the test set")
    axes.set_title(
        f"digits over TLS, {plan['slow']} of {plan['clients']} clients "
        f"{plan['slowdown']:g} times slower"
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
