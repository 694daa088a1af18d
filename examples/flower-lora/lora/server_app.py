"""The server: FedAvg over adapters, wrapped. The backbone never travels."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from lightsecagg.flower import LightSecAgg
from lora.adapters import new_adapters

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = LightSecAgg(
        FedAvg(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0),
        privacy=config["privacy"],
        dropouts=config["dropouts"],
        bound=1.0,
        max_samples=1000,
        metrics={"accuracy": 1.0},
    )
    initial = ArrayRecord({name: Array(array) for name, array in new_adapters().items()})
    strategy.start(grid, initial, num_rounds=int(config["rounds"]))
