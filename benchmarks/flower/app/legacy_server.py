"""FedAvg of Flower's older API under Flower's SecAgg+, over the complete graph."""

from __future__ import annotations

import time

from bench import task
from bench.clock import Clock
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
    strategy = FedAvg(
        min_fit_clients=nodes,
        min_available_clients=nodes,
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(list(task.new_model().values())),
        evaluate_fn=lambda server_round, parameters, config: clock.look(),
    )
    config = ServerConfig(num_rounds=int(context.run_config["rounds"]))
    fit = SecAggPlusWorkflow(num_shares=nodes, reconstruction_threshold=nodes - 1)
    DefaultWorkflow(fit_workflow=fit)(grid, LegacyContext(context, config, strategy))
    clock.report(str(context.run_config["report"]))
