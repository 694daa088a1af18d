"""FedAvg, wrapped or not."""

from __future__ import annotations

import time
from typing import Any

from bench import task
from bench.clock import Clock
from bench.limits import limits
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from lightsecagg.flower import LightSecAgg

app = ServerApp()
clock = Clock()


class Timed(LightSecAgg):
    """Knows how long enrolment took."""

    def _enrol(self, *arguments: Any) -> None:
        begin = time.monotonic()
        super()._enrol(*arguments)
        clock.enrolment += time.monotonic() - begin


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    privacy, dropouts = limits(nodes)
    least = nodes - dropouts
    strategy: Strategy = FedAvg(
        min_train_nodes=least, min_available_nodes=least, fraction_evaluate=0.0
    )
    if config["secure"]:
        strategy = Timed(strategy, privacy=privacy, dropouts=dropouts, bound=1.0, max_samples=2000)
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.2)
    initial = ArrayRecord({name: Array(array) for name, array in task.new_model().items()})

    def look(server_round: int, arrays: ArrayRecord) -> None:
        clock.look({name: array.numpy() for name, array in arrays.items()})

    strategy.start(grid, initial, num_rounds=int(config["rounds"]), evaluate_fn=look)
    clock.report(str(config["report"]))
