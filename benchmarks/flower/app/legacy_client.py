"""The same node in Flower's older API, with Flower's SecAgg+."""

from __future__ import annotations

from typing import Any

from bench import task
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp


class Digits(NumPyClient):
    def __init__(self, partition: int, partitions: int) -> None:
        self._where = partition, partitions

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        images, labels = task.load(*self._where)
        model = dict(zip(task.new_model(), parameters, strict=True))
        trained = task.train(model, images, labels)
        return list(trained.values()), len(labels), {}


def client_fn(context: Context) -> Client:
    config = context.node_config
    return Digits(int(config["partition-id"]), int(config["num-partitions"])).to_client()


app = ClientApp(client_fn, mods=[secaggplus_mod])
