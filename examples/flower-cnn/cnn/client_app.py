"""A node: trains the network on its own images."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from lightsecagg.flower import lightsecagg_mod

app = ClientApp(mods=[lightsecagg_mod])  # changed for secure aggregation: the mod


@app.train()
def train(message: Message, context: Context) -> Message:
    # Here, and not above: nodes that only answer for others' masks start without torch.
    from cnn import task

    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = task.load_data(
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        int(context.run_config["batch-size"]),
    )
    loss = task.train(
        net,
        data,
        int(context.run_config["local-epochs"]),
        float(context.run_config["learning-rate"]),
    )
    metrics = MetricRecord({"num-examples": len(data.dataset), "train_loss": loss})
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)
