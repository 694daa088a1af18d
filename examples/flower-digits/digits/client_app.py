"""A node: an app as Flower's users write it, with one mod."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits import task
from lightsecagg.flower import lightsecagg_mod

app = ClientApp(mods=[lightsecagg_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    partition = int(context.node_config["partition-id"])
    images, labels = task.load(partition, int(context.node_config["num-partitions"]))
    trained = task.train(model, images, labels)
    arrays = ArrayRecord({name: Array(array) for name, array in trained.items()})
    metrics = MetricRecord(
        {"num-examples": len(labels), "accuracy": task.accuracy(model, images, labels)}
    )
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
