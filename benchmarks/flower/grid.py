"""CPU seconds of a round in one process, with everything serialised as Flower does it.

The first round of each run is left out: it has LightSecAgg's enrolment, and loads modules.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "drivers" / "flower"))

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg, Strategy
from local_grid import LocalGrid

from lightsecagg.flower import LightSecAgg, lightsecagg_mod

PRIVACY, DROPOUTS = 0.2, 0.3
STEP = np.float32(0.01)


def measure(
    nodes: int,
    dim: int,
    repeat: int,
    rounds: int,
    only: list[str] | None,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    chosen = only or list(CONTESTANTS)
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    figures: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for turn in range(repeat):
        for name in chosen:
            looks: list[float] = []
            CONTESTANTS[name](nodes, dim, rounds + 1, partial(_look, looks))
            found = [end - begin for begin, end in pairwise(looks[1:])]
            seconds[name] += found
            tell(f"turn {turn + 1}, {name}: {[round(second, 2) for second in found]} s of CPU")
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            figures[name].setdefault("peak_megabytes_until_then", peak)
    for name in chosen:
        figures[name]["cpu_seconds_per_round"] = round(statistics.median(seconds[name]), 2)
        figures[name]["best"] = round(min(seconds[name]), 2)
    return figures


def _look(looks: list[float]) -> None:
    looks.append(time.process_time())


def _app(*mods: Any) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained = message.content["arrays"]["w"].numpy() + STEP
        arrays = ArrayRecord({"w": Array(trained)})
        metrics = MetricRecord({"num-examples": 100})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


class Number(NumPyClient):
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return [parameters[0] + STEP], 100, {}


def _grid(nodes: int, app: ClientApp, **node_config: Any) -> LocalGrid:
    grid = LocalGrid()
    grid.seen = Nothing()
    for node in range(nodes):
        grid.add(101 + node, app, **node_config)
    return grid


class Nothing(list[Any]):
    """What the tests look at, and these figures should not pay for."""

    def append(self, _: object) -> None:
        """Forget it."""


def _vector(dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng().normal(0, 1, dim).astype(np.float32)


def _start(
    strategy: Strategy, grid: LocalGrid, dim: int, rounds: int, look: Callable[[], None]
) -> None:
    initial = ArrayRecord({"w": Array(_vector(dim))})
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=lambda number, arrays: look())


def _fed_avg() -> FedAvg:
    return FedAvg(min_train_nodes=2, min_available_nodes=2, fraction_evaluate=0.0)


def _plain(nodes: int, dim: int, rounds: int, look: Callable[[], None]) -> None:
    _start(_fed_avg(), _grid(nodes, _app()), dim, rounds, look)


def _ours(
    nodes: int, dim: int, rounds: int, look: Callable[[], None], share_mode: str = "seeded"
) -> None:
    strategy = LightSecAgg(
        _fed_avg(),
        privacy=PRIVACY,
        dropouts=DROPOUTS,
        bound=1.0,
        max_samples=100,
        share_mode=share_mode,
        poll_interval=0.001,
    )
    grid = _grid(nodes, _app(lightsecagg_mod), lightsecagg_share_mode=share_mode)
    _start(strategy, grid, dim, rounds, look)


def _short_keys(nodes: int, dim: int, rounds: int, look: Callable[[], None]) -> None:
    _ours(nodes, dim, rounds, look, "short-key")


def _secagg_plus(nodes: int, dim: int, rounds: int, look: Callable[[], None]) -> None:
    app = ClientApp(lambda context: Number().to_client(), mods=[secaggplus_mod])
    strategy = LegacyFedAvg(
        min_fit_clients=nodes,
        min_available_clients=nodes,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters([_vector(dim)]),
        evaluate_fn=lambda number, parameters, config: look(),
    )
    state = Context(1, 1, {}, RecordDict(), {})
    fit = SecAggPlusWorkflow(num_shares=nodes, reconstruction_threshold=round(0.7 * nodes))
    context = LegacyContext(state, ServerConfig(num_rounds=rounds), strategy)
    DefaultWorkflow(fit_workflow=fit)(_grid(nodes, app), context)


CONTESTANTS = {
    "plain": _plain,
    "secagg+": _secagg_plus,
    "lightsecagg": _ours,
    "lightsecagg, short keys": _short_keys,
}
