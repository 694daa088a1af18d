"""A SuperLink that lies about what a node should do, and nodes that compare what they were told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from local_grid import Node
from small_flower import (
    MODEL,
    Federation,
    answer_in,
    arrays,
    error,
    expected,
    malicious,
    record,
    samples,
    stage_of,
    update,
)

from lightsecagg.drivers.flower import layout, mod, strategy
from lightsecagg.drivers.flower.mod import REFUSED
from lightsecagg.flower import lightsecagg_mod
from lightsecagg.protocol.epoch_queue import Models

VICTIM = 104
TINY = 1e-7

# -- what a node is told (S57) -------------------------------------------------------------------


def steered_app() -> ClientApp:
    """An app that takes its learning rate from wherever the server may put it."""
    app = ClientApp(mods=[lightsecagg_mod])

    def trained(message: Message, context: Context, rate: float) -> Message:
        given = arrays(message.content["arrays"])
        if next(iter(context.run_config), "") == "zoom":
            rate *= TINY
        rate *= float(context.run_config.get("rate", 1.0))
        for told in message.content.config_records.values():
            rate *= float(told.get("rate", 1.0))  # type: ignore[arg-type]
        for measured in message.content.metric_records.values():
            rate *= float(measured.get("rate", 1.0))  # type: ignore[arg-type]
        if message.metadata.group_id == "gently":
            rate *= TINY
        full = update(given, context.node_id, 1)
        moved = {name: given[name] + rate * (full[name] - given[name]) for name in given}
        metrics = MetricRecord({"num-examples": samples(context.node_id)})
        content = RecordDict({"arrays": record(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return trained(message, context, 1.0)

    @app.train("gently")
    def train_gently(message: Message, context: Context) -> Message:
        return trained(message, context, TINY)

    return app


def in_the_run_config(node: Node, message: Message) -> None:
    node.run_config["rate"] = TINY


def in_a_config_record(node: Node, message: Message) -> None:
    message.content["config"]["rate"] = TINY  # type: ignore[index,assignment]


def in_another_config_record(node: Node, message: Message) -> None:
    message.content["more"] = ConfigRecord({"rate": TINY})


def in_a_metric_record(node: Node, message: Message) -> None:
    message.content["more"] = MetricRecord({"rate": TINY})


def in_the_message_type(node: Node, message: Message) -> None:
    message.metadata.message_type = "train.gently"


LIES: list[Callable[[Node, Message], None]] = [
    in_the_run_config,
    in_a_config_record,
    in_another_config_record,
    in_a_metric_record,
    in_the_message_type,
]


def steered(lie: Callable[[Node, Message], None], **options: Any) -> Federation:
    """A federation whose SuperLink lets everybody but one node train hardly at all."""
    federation = Federation(8, attempts=1, **{"timeout": 60, **options})
    for node in federation.nodes.values():
        node.app = steered_app()
        node.run_config = {"rate": 1.0}

        def before(message: Message, node: Node = node) -> None:
            if stage_of(message) == "train" and node.node_id != VICTIM:
                lie(node, message)

        node.before = before
    return federation


def change_of_the_victim(federation: Federation) -> float:
    """How far what the sum says about the victim is from its update."""
    result = federation.run(1)
    assert result.arrays is not None
    change = arrays(result.arrays)["weight"].astype(np.float64) - MODEL["weight"]
    total = sum(samples(node) for node in federation.ids)
    wanted = update(MODEL, VICTIM, 1)["weight"] - MODEL["weight"]
    return float(np.abs(change * total / samples(VICTIM) - wanted).max())


def forget_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags that name the arrays alone."""

    def naive_records(records: RecordDict, *known: Any) -> bytes:
        return layout.hash_records(RecordDict(dict(records.array_records)))

    def naive(run_config: bytes, records: bytes, *told: Any) -> bytes:
        return layout.hash_assignment(b"", records, "", "", {}, "")

    for module in (mod, strategy):
        monkeypatch.setattr(module, "hash_records", naive_records)
        monkeypatch.setattr(module, "hash_assignment", naive)


def careless_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sums whatever comes."""
    monkeypatch.setattr(Models, "check", lambda models, tag, time: None)


@pytest.mark.parametrize("lie", LIES)
def test_S57_tags_that_name_the_model_alone_let_a_superlink_single_a_node_out(
    lie: Callable[[Node, Message], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attack: one node trains, the others hardly do, and the sum is that node's update."""
    forget_what_was_told(monkeypatch)
    options = {"threat_model": "malicious-server", "node_config": malicious(tmp_path)}
    assert change_of_the_victim(steered(lie, **options)) < 1e-4


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("threat_model", ["honest-but-curious", "malicious-server"])
def test_S57_nodes_that_were_told_different_things_answer_for_no_sum(
    threat_model: str,
    lie: Callable[[Node, Message], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    careless_server(monkeypatch)
    federation = steered(lie, threat_model=threat_model, node_config=malicious(tmp_path))
    for node in federation.nodes.values():
        if threat_model == "honest-but-curious":
            del node.node_config["lightsecagg-threat-model"]
    answers: list[Message] = []
    for node in federation.nodes.values():
        node.after = lambda message, reply: answers.append(reply) is None
    with pytest.raises(RuntimeError, match="LightSecAgg, round 1: "):
        federation.run(1)
    assert not any(answer_in(reply) for reply in answers)
    assert REFUSED in federation.grid.reasons


@pytest.mark.parametrize("lie", LIES)
def test_S57_a_server_takes_no_update_from_a_node_that_was_told_something_else(
    lie: Callable[[Node, Message], None],
) -> None:
    with pytest.raises(RuntimeError, match="1 of 8 nodes have sent an update"):
        steered(lie).run(1)


def in_the_order_of_the_run_config(node: Node, message: Message) -> None:
    items = reversed(list(node.run_config.items()))
    node.run_config.clear()
    node.run_config.update(list(items))


def in_the_group(node: Node, message: Message) -> None:
    message.metadata.group_id = "gently"


@pytest.mark.parametrize("lie", [in_the_order_of_the_run_config, in_the_group])
def test_S57_what_is_not_hashed_does_not_reach_the_app(
    lie: Callable[[Node, Message], None],
) -> None:
    federation = steered(lie)
    for node in federation.nodes.values():
        node.run_config = {"rate": 1.0, "zoom": 1}
    assert error(federation.run(1), expected(MODEL, [list(federation.ids)])) < 1e-6


def test_S57_a_node_with_another_run_config_is_left_out_from_the_start() -> None:
    federation = steered(lambda node, message: None)
    federation.nodes[VICTIM].run_config = {"rate": 2.0}
    rest = [node for node in federation.ids if node != VICTIM]
    assert error(federation.run(1), expected(MODEL, [rest])) < 1e-6
    assert federation.strategy._current().nodes == set(rest)


def test_S57_a_run_config_that_most_nodes_do_not_have_is_not_guessed() -> None:
    federation = steered(lambda node, message: None, privacy=1, dropouts=5)
    for node_id in list(federation.ids)[::2]:
        federation.nodes[node_id].run_config = {"rate": 2.0}
    with pytest.raises(RuntimeError, match="enrolment: no run_config is that of most nodes"):
        federation.run(1)


def test_S57_a_strategy_that_asks_nodes_for_different_things_is_refused() -> None:
    federation = Federation(8)
    inner = federation.strategy.inner.strategy
    configure = inner.configure_train

    def configured(*arguments: Any) -> Any:
        messages = list(configure(*arguments))
        messages[3].metadata.message_type = "train.gently"
        return messages

    inner.configure_train = configured  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="different models, configs or message types"):
        federation.run(1)
