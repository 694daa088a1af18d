"""A federation in Flower, in this process, beside what plain Flower makes of the same updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from local_grid import LocalGrid, Node

from lightsecagg.crypto.identity import IdentityKey
from lightsecagg.drivers.flower.parcels import detach
from lightsecagg.field.prime import DEFAULT_FIELD
from lightsecagg.flower import LightSecAgg, lightsecagg_mod
from lightsecagg.protocol.messages import AggregatedShare
from lightsecagg.protocol.wire import Codec

CODEC = Codec(DEFAULT_FIELD)

Arrays = dict[str, np.ndarray[Any, Any]]
MODEL: Arrays = {
    "weight": np.linspace(-3, 3, 35, dtype=np.float32).reshape(5, 7),
    "bias": np.zeros(7, dtype=np.float32),
}


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def arrays(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def samples(node: int) -> int:
    """How many samples a node has."""
    return 20 + 3 * (node % 17)


def accuracy(node: int) -> float:
    """How well any model does at a node."""
    return 0.3 + 0.01 * (node % 13)


def update(model: Arrays, node: int, server_round: int) -> Arrays:
    """What a node makes of a model: the same in every run, another one in every round."""
    random = np.random.default_rng([node, server_round])
    return {
        name: (array + random.uniform(-0.5, 0.5, array.shape)).astype(np.float32)
        for name, array in model.items()
    }


def make_app(mods: list[Any] | None = None) -> ClientApp:
    """An app as users write it."""
    app = ClientApp(mods=[lightsecagg_mod] if mods is None else mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        given = message.content["arrays"]
        server_round = int(message.content["config"]["server-round"])
        trained = update(arrays(given), context.node_id, server_round)
        metrics = MetricRecord(
            {"num-examples": samples(context.node_id), "loss": 0.001 * context.node_id}
        )
        return Message(
            RecordDict({"arrays": record(trained), "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord(
            {"num-examples": samples(context.node_id), "accuracy": accuracy(context.node_id)}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def stage_of(message: Message) -> str:
    """What the server asks for: hello, open, train, relay; or evaluate, for a plain message."""
    parcel, _ = detach(message.content)
    return "evaluate" if parcel is None else str(parcel.numbers["stage"])


class Federation:
    """N nodes, a grid, and a wrapped strategy."""

    def __init__(
        self,
        clients: int = 8,
        *,
        strategy: Strategy | None = None,
        mods: list[Any] | None = None,
        node_config: Mapping[int, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.grid = LocalGrid()
        self.app = make_app(mods)
        self.ids = range(101, 101 + clients)
        for node_id in self.ids:
            self.grid.add(node_id, self.app, **(node_config or {}).get(node_id, {}))
        # Replies are there at the first look, so a short timeout waits for silent nodes only.
        chosen = {"privacy": 2, "dropouts": 2, "bound": 1.0, "max_samples": 100}
        chosen |= {"timeout": 0.05, "poll_interval": 0.001}
        self.strategy = LightSecAgg(strategy or fed_avg(clients), **(chosen | options))

    @property
    def nodes(self) -> dict[int, Node]:
        return self.grid.nodes

    def run(self, rounds: int = 2, model: Arrays = MODEL) -> Result:
        return self.strategy.start(self.grid, record(model), num_rounds=rounds)


def at_round(federation: Federation, number: int, act: Callable[[], None]) -> None:
    """Do something before Flower's round `number`."""
    configure = federation.strategy.configure_train

    def configured(server_round: int, *arguments: Any) -> Any:
        if server_round == number:
            act()
        return configure(server_round, *arguments)

    federation.strategy.configure_train = configured  # type: ignore[method-assign]


def fed_avg(clients: int, **options: Any) -> FedAvg:
    """FedAvg that needs no more than two nodes."""
    return FedAvg(min_train_nodes=2, min_available_nodes=2, fraction_evaluate=0.0, **options)


def expected(model: Arrays, included: Mapping[int, list[int]] | list[list[int]]) -> Arrays:
    """Plain FedAvg over the nodes that are included in each round."""
    rounds = list(included.values()) if isinstance(included, Mapping) else included
    for server_round, nodes in enumerate(rounds, 1):
        weights = np.array([samples(node) for node in nodes], dtype=np.float64)
        updates = [update(model, node, server_round) for node in nodes]
        model = {
            name: np.average(
                [u[name].astype(np.float64) for u in updates], axis=0, weights=weights
            ).astype(np.float32)
            for name in model
        }
    return model


def error(result: Result, wanted: Arrays) -> float:
    """The largest difference."""
    assert result.arrays is not None
    found = arrays(result.arrays)
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)


def plain(strategy: Strategy, clients: int, rounds: int, model: Arrays = MODEL) -> Result:
    """What Flower makes of it without this package."""
    grid = LocalGrid()
    app = make_app([])
    for node_id in range(101, 101 + clients):
        grid.add(node_id, app)
    return strategy.start(grid, record(model), num_rounds=rounds)


def folders(tmp_path: Path, clients: int = 8, **more: Any) -> dict[int, dict[str, Any]]:
    """A folder for each node, as its operator names it."""
    config: dict[int, dict[str, Any]] = {}
    for node_id in range(101, 101 + clients):
        folder = tmp_path / str(node_id)
        folder.mkdir(exist_ok=True)
        config[node_id] = {"lightsecagg_dir": str(folder), **more}
    return config


def malicious(tmp_path: Path, listed: int = 8) -> dict[int, dict[str, Any]]:
    """Nodes with identities of their operators, and an allow-list of the first `listed`."""
    demands = {"lightsecagg_threat_model": "malicious-server", "lightsecagg_privacy": 1}
    config = folders(tmp_path, **demands)
    allow_list = tmp_path / "allow-list"
    lines = ["# the federation"]
    for position, node in enumerate(config):
        key = IdentityKey.generate()
        (tmp_path / f"{node}.key").write_text(key.private_bytes().hex())
        (tmp_path / f"{node}.key").chmod(0o600)
        config[node]["lightsecagg_identity"] = str(tmp_path / f"{node}.key")
        config[node]["lightsecagg_allow_list"] = str(allow_list)
        if position < listed:
            lines.append(f"{key.public.hex()}  # node {node}")
    allow_list.write_text("\n".join(lines))
    return config


def answer_in(reply: Message) -> AggregatedShare | None:
    """The answer among a reply's frames."""
    if reply.has_error():
        return None
    parcel, _ = detach(reply.content)
    assert parcel is not None
    found = [CODEC.decode(frame) for frame in parcel.frames]
    return next((message for message in found if isinstance(message, AggregatedShare)), None)
