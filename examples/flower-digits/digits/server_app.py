"""The server: FedAvg, wrapped."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits import task
from lightsecagg.flower import LightSecAgg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)
    strategy = LightSecAgg(
        strategy,
        privacy=config["privacy"],
        dropouts=config["dropouts"],
        bound=1.0,
        max_samples=2000,
        metrics={"accuracy": 1.0},
    )
    models: list[task.Arrays] = []
    times: list[float] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = {name: array.numpy() for name, array in arrays.items()}
        models.append(model)
        times.append(time.time())
        return MetricRecord({"accuracy": task.accuracy(model, *task.load_test())})

    initial = ArrayRecord({name: Array(array) for name, array in task.new_model().items()})
    strategy.start(grid, initial, num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
    if config["report"]:  # the model after every round, to be looked at elsewhere
        stacked = {name: np.stack([model[name] for model in models]) for name in models[0]}
        np.savez(str(config["report"]), times=times, **stacked)
