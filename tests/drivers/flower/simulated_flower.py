"""A program: the digits of examples/flower-digits in Flower's simulation engine.

Prints the largest difference between the model and plain FedAvg over the nodes that were there. Two
of ten nodes fail in every round: one while it trains, one after its upload.
"""

from __future__ import annotations

import json

import numpy as np
from digits import client_app, task
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from lightsecagg.drivers.flower.parcels import detach
from lightsecagg.flower import LightSecAgg, lightsecagg_mod

NODES, ROUNDS = 10, 3


def unreliable_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Node 3 fails in training, node 7 when it should answer for the second time or later."""
    parcel, _ = detach(message.content)
    stage = "" if parcel is None else parcel.numbers["stage"]
    first = 0 if parcel is None else parcel.numbers.get("first", 0)
    position = context.node_config["partition-id"]
    if (position, stage) == (3, "train") or (position == 7 and stage == "relay" and first > 1):
        raise ValueError("out of order")
    return call_next(message, context)


client = ClientApp(mods=[unreliable_mod, lightsecagg_mod])
client.train()(client_app.train)
server = ServerApp()


def fed_avg(model: task.Arrays, positions: list[int]) -> task.Arrays:
    """The plain average."""
    data = [task.load(position, NODES) for position in positions]
    trained = [task.train(model, *mine) for mine in data]
    weights = [len(labels) for _, labels in data]
    return {name: np.average([t[name] for t in trained], axis=0, weights=weights) for name in model}


@server.main()
def main(grid: Grid, context: Context) -> None:
    model = task.new_model()
    strategy = LightSecAgg(
        FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0.0),
        privacy=2,
        dropouts=3,
        bound=1.0,
        max_samples=2000,
    )
    initial = ArrayRecord({name: Array(array) for name, array in model.items()})
    errors: list[float] = []

    def check(server_round: int, arrays: ArrayRecord) -> None:
        nonlocal model
        got = {name: array.numpy() for name, array in arrays.items()}
        if server_round:
            wanted = fed_avg(model, [p for p in range(NODES) if p != 3])
            errors.append(max(float(np.abs(got[name] - wanted[name]).max()) for name in got))
        model = got

    strategy.start(grid, initial, num_rounds=ROUNDS, evaluate_fn=check)
    print(
        "RESULT",
        json.dumps({"errors": errors, "accuracy": task.accuracy(model, *task.load_test())}),
    )


if __name__ == "__main__":
    run_simulation(
        server,
        client,
        NODES,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
