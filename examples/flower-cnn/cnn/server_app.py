"""The server: averages the nodes' networks, and tests the average."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from cnn import task
from lightsecagg.flower import LightSecAgg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=float(context.run_config["fraction-evaluate"]))
    # Changed for secure aggregation: two nodes of ten may look with the server, two may vanish.
    strategy = LightSecAgg(
        strategy, privacy=0.2, dropouts=0.2, bound=5.0, metrics={"train_loss": 10.0}
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = task.Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": task.accuracy(net, task.load_test_data())})

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.Net().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    for number, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}")
