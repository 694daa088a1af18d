"""A node as Flower's users write it."""

from __future__ import annotations

from typing import Any

from bench import task
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def make_app(mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = {name: array.numpy() for name, array in message.content["arrays"].items()}
        partition = int(context.node_config["partition-id"])
        images, labels = task.load(partition, int(context.node_config["num-partitions"]))
        trained = task.train(model, images, labels)
        arrays = ArrayRecord({name: Array(array) for name, array in trained.items()})
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


app = make_app([])
