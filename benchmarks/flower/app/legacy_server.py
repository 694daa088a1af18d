"""FedAvg of Flower's older API under Flower's SecAgg+, over the complete graph."""

from __future__ import annotations

import time
from typing import Any

from bench import task
from bench.clock import Clock
from bench.limits import limits
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import Grid, LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    nodes, clock = int(context.run_config["nodes"]), Clock()
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.2)
    initial = task.new_model()

    def look(server_round: int, parameters: list[Any], config: dict[str, Any]) -> None:
        clock.look(dict(zip(initial, parameters, strict=True)))

    strategy = FedAvg(
        min_fit_clients=nodes,
        min_available_clients=nodes,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(list(initial.values())),
        evaluate_fn=look,
    )
    config = ServerConfig(num_rounds=int(context.run_config["rounds"]))
    _, dropouts = limits(nodes)
    fit = SecAggPlusWorkflow(num_shares=nodes, reconstruction_threshold=nodes - dropouts)
    DefaultWorkflow(fit_workflow=fit)(grid, LegacyContext(context, config, strategy))
    clock.report(str(context.run_config["report"]))
