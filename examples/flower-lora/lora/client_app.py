"""A node. Torch is imported where it is needed: the answer stage starts a process without it."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from lightsecagg.flower import lightsecagg_mod

LINES = 256
app = ClientApp(mods=[lightsecagg_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    from lora import model

    given = {name: array.numpy() for name, array in message.content["arrays"].items()}
    trained, found = model.train(given, seed=int(context.node_config["partition-id"]), lines=LINES)
    arrays = ArrayRecord({name: Array(array) for name, array in trained.items()})
    metrics = MetricRecord({"num-examples": LINES, "accuracy": found})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
