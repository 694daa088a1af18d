"""What leaves a node: masked vectors, keys and shares, and nothing that tells of its data (S16)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from local_grid import LocalGrid, Node
from small_flower import (
    MODEL,
    Arrays,
    Federation,
    arrays,
    fed_avg,
    make_app,
    record,
    samples,
    stage_of,
    update,
)

from lightsecagg.drivers.flower import mod, strategy
from lightsecagg.drivers.flower.agreed import FORGOTTEN
from lightsecagg.drivers.flower.layout import hash_assignment
from lightsecagg.drivers.flower.mod import REFUSED, UNPROTECTED
from lightsecagg.drivers.flower.node import Memory
from lightsecagg.drivers.flower.parcels import Parcel, attach, detach
from lightsecagg.flower import lightsecagg_mod

COUNT = 54_321
LOSS = 0.123456789
SENTENCE = "a patient with a fever in the evening"


def telling_app(*mods: object) -> ClientApp:
    """An app whose count and metrics are easy to find."""
    app = ClientApp(mods=list(mods))  # type: ignore[arg-type]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_id == 103:
            raise ValueError(SENTENCE)
        trained = update(arrays(message.content["arrays"]), context.node_id, 1)
        if context.node_id == 104:
            trained["weight"][2, 3] = np.nan
        metrics = MetricRecord({"num-examples": COUNT, "secret-loss": LOSS, "who": context.node_id})
        content = RecordDict({"arrays": record(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def traces(node: int) -> Iterator[bytes]:
    """Every form in which a node's secrets could be found, none so short as to occur by chance."""
    trained: Arrays = update(MODEL, node, 1)
    for name, array in trained.items():
        for kind in (np.float32, np.float64):
            yield array.astype(kind).tobytes()[16:32]
            yield (array.astype(kind) - MODEL[name].astype(kind)).tobytes()[16:32]
    for layout in "<>":
        yield struct.pack(f"{layout}q", COUNT)
        yield struct.pack(f"{layout}d", LOSS)
        yield struct.pack(f"{layout}d", float(COUNT))
    for text in (str(LOSS), "num-examples", "secret-loss", "patient", "fever in the"):
        yield text.encode()


def found(grid: LocalGrid) -> set[bytes]:
    """The traces of nodes among all that their replies consist of."""
    return {
        trace
        for node, objects in grid.seen
        for content in objects
        for trace in traces(node)
        if trace in content
    }


def test_S16_the_search_finds_everything_in_plain_flower() -> None:
    grid = LocalGrid()
    for node in range(105, 109):
        grid.add(node, telling_app())
    fed_avg(4).start(grid, record(MODEL), num_rounds=1)
    seen = found(grid)
    assert update(MODEL, 105, 1)["weight"].tobytes()[16:32] in seen
    assert struct.pack("<d", LOSS) in seen
    assert {b"num-examples", b"secret-loss"} <= seen


def test_S16_nothing_of_an_update_a_count_or_a_metric_leaves_a_node() -> None:
    options = {"max_samples": 2**16, "metrics": {"secret-loss": 1.0}, "attempts": 1}
    federation = Federation(8, **options)
    for node in federation.nodes.values():
        node.app = telling_app(lightsecagg_mod)
    result = federation.run(1)
    assert result.train_metrics_clientapp[1]["secret-loss"] == pytest.approx(LOSS, abs=1e-5)
    assert len(federation.grid.seen) == 8 * 5
    assert found(federation.grid) == set()


def test_S16_nothing_of_an_evaluation_leaves_a_node() -> None:
    federation = Federation(
        8,
        strategy=FedAvg(min_available_nodes=2),
        max_samples=2**16,
        evaluation={"secret-loss": 1.0},
    )
    for node in federation.nodes.values():
        node.app = evaluating_app()
    result = federation.run(1)
    found_loss = result.evaluate_metrics_clientapp[1]["secret-loss"]
    assert found_loss == pytest.approx(LOSS, abs=1e-5)
    assert len(federation.grid.seen) == 8 * 7
    assert found(federation.grid) == set()


def evaluating_app() -> ClientApp:
    """An app whose evaluation is easy to find."""
    app = make_app()
    app._registered_funcs.pop("evaluate.default", None)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": COUNT, "secret-loss": LOSS})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_S22_errors_of_apps_and_of_ours_reach_the_server_as_constants() -> None:
    federation = Federation(8, dropouts=3, attempts=1)
    for node in federation.nodes.values():
        node.app = telling_app(lightsecagg_mod)
    federation.nodes[105].node_config["lightsecagg-dir"] = "/patients/fever in the evening"
    federation.run(1)
    assert set(federation.grid.reasons) <= {REFUSED, FORGOTTEN, UNPROTECTED}
    assert REFUSED in federation.grid.reasons
    assert found(federation.grid) == set()


def test_S22_a_memory_shows_no_secret() -> None:
    memory = Memory(identity=b"private key", ledger=b"ledger")
    assert "private" not in repr(memory)
    assert "private" not in str([memory])


def told_otherwise(node: Node) -> None:
    """Let the server tell a node another limit of a metric than its peers."""

    def before(message: Message) -> None:
        if stage_of(message) == "train":
            parcel, rest = detach(message.content)
            assert parcel is not None
            numbers = {**parcel.numbers, "limits": [1e30]}
            message.content = attach(Parcel(numbers, parcel.frames), rest)

    node.before = before


def test_S08_a_server_that_tells_nodes_different_things_finds_one_in_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack, on tags that name the records alone: everybody's metric but one vanishes."""
    for module in (mod, strategy):
        naive = lambda run, records, *told: hash_assignment(run, records, "", "", {}, "")  # noqa: E731
        monkeypatch.setattr(module, "hash_assignment", naive)
    federation = Federation(8, metrics={"loss": 1.0})
    for node_id in set(federation.ids) - {104}:
        told_otherwise(federation.nodes[node_id])
    loss = federation.run(1).train_metrics_clientapp[1]["loss"]
    total = sum(samples(node) for node in federation.ids)
    assert isinstance(loss, float)
    assert loss * total / samples(104) == pytest.approx(0.001 * 104, rel=1e-4)


def test_S08_what_nodes_are_told_is_in_their_tags() -> None:
    federation = Federation(8, metrics={"loss": 1.0}, attempts=1)
    for node_id in set(federation.ids) - {104}:
        told_otherwise(federation.nodes[node_id])
    with pytest.raises(RuntimeError, match="1 of 8 nodes have sent an update"):
        federation.run(1)
