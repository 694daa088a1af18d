"""A SuperLink that lies about what a node should do, and nodes that compare what they were told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import EvaluateIns, GetParametersIns, GetPropertiesIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.serverapp.strategy import FedAvg
from local_grid import Node, carried
from small_flower import (
    CODEC,
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
from lightsecagg.drivers.flower.mod import REFUSED, UNMASKED, UNPROTECTED
from lightsecagg.drivers.flower.parcels import Parcel, attach, detach
from lightsecagg.errors import ParameterError
from lightsecagg.flower import lightsecagg_mod
from lightsecagg.protocol.messages import MaskedUpload
from lightsecagg.protocol.waiting import Models

VICTIM = 104
TINY = 1e-7

# -- what a node is told (S57) -------------------------------------------------------------------


def steered_app(*mods: Any) -> ClientApp:
    """An app that takes its learning rate from wherever the server may put it."""
    app = ClientApp(mods=[lightsecagg_mod, *mods])

    def trained(message: Message, context: Context, rate: float) -> Message:
        given = arrays(message.content["arrays"])
        if next(iter(context.run_config), "") == "zoom":
            rate *= TINY
        rate *= float(context.run_config.get("rate", 1.0))
        for told in message.content.config_records.values():
            rate *= float(told.get("rate", 1.0))  # type: ignore[arg-type]
        for measured in message.content.metric_records.values():
            rate *= float(measured.get("rate", 1.0))  # type: ignore[arg-type]
        metadata = message.metadata
        named = (metadata.group_id, metadata.message_id, metadata.reply_to_message_id)
        slow = metadata.ttl > 1e6 or metadata.created_at < 1e6 or metadata.src_node_id == 7
        ids = metadata.run_id, context.run_id, context.series_id
        if "gently" in (*named, *given) or slow or 7 in ids:
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


def in_the_run_id(node: Node, message: Message) -> None:
    node.run_id = 7


def in_the_series(node: Node, message: Message) -> None:
    node.series_id = 7


def in_the_message_type(node: Node, message: Message) -> None:
    message.metadata.message_type = "train.gently"


def in_an_array_of_integers(node: Node, message: Message) -> None:
    given = message.content["arrays"]
    message.content["arrays"] = ArrayRecord({**given, "gently": Array(np.array([1]))})  # type: ignore[dict-item]


LIES: list[Callable[[Node, Message], None]] = [
    in_the_run_config,
    in_a_config_record,
    in_another_config_record,
    in_a_metric_record,
    in_the_run_id,
    in_the_series,
    in_the_message_type,
]
ALL_LIES = [*LIES, in_an_array_of_integers]


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

    def naive(run: bytes, records: bytes, *told: Any) -> bytes:
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


@pytest.mark.parametrize("lie", ALL_LIES)
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


@pytest.mark.parametrize("lie", ALL_LIES)
def test_S57_a_server_takes_no_update_from_a_node_that_was_told_something_else(
    lie: Callable[[Node, Message], None],
) -> None:
    with pytest.raises(RuntimeError, match="1 of 8 nodes have sent an update"):
        steered(lie).run(1)


@pytest.mark.parametrize("lie", LIES)
def test_S57_an_update_is_not_used_again_under_other_settings(
    lie: Callable[[Node, Message], None], tmp_path: Path
) -> None:
    """Two announcements: the first steers and is never summed, the second is the same for all."""
    options = {"threat_model": "malicious-server", "node_config": malicious(tmp_path)}
    federation = steered(lie, **options)
    with pytest.raises(RuntimeError, match="1 of 8 nodes have sent an update"):
        federation.run(1)
    for node in federation.nodes.values():
        node.before = lambda message: None
        node.run_config, node.run_id, node.series_id = {"rate": 1.0}, 1, 0
    # The victim has sent its update from this assignment; the others train anew (S42).
    rest = [node for node in federation.ids if node != VICTIM]
    assert error(federation.run(1), expected(MODEL, [rest])) < 1e-6


@pytest.mark.parametrize("lie", LIES)
def test_S57_a_node_takes_no_second_assignment_in_one_round(
    lie: Callable[[Node, Message], None],
) -> None:
    """The same parcel again, beside other settings, after the upload."""
    federation = steered(lambda node, message: None)
    victim, again = federation.nodes[VICTIM], []

    def after(message: Message, reply: Message) -> bool:
        if stage_of(message) == "train" and not again:
            ((copied, _),) = carried(Message(RecordDict(dict(message.content)), VICTIM, "train"))
            lie(victim, copied)
            again.append(copied)
        return True

    victim.after = after
    federation.run(1)
    trained: list[Message] = []

    def note(message: Message, context: Context, call_next: Any) -> Message:
        trained.append(message)
        return call_next(message, context)  # type: ignore[no-any-return]

    victim.app = steered_app(note)
    reply = ask(victim, again[0].metadata.message_type, again[0].content)
    parcel, rest = detach(reply.content)
    assert parcel is not None
    assert parcel.numbers["failed"]
    frames = [CODEC.decode(frame) for frame in parcel.frames]
    assert not any(isinstance(frame, MaskedUpload) for frame in frames)
    assert not rest
    assert not trained


def in_the_order_of_the_run_config(node: Node, message: Message) -> None:
    items = reversed(list(node.run_config.items()))
    node.run_config.clear()
    node.run_config.update(list(items))


def in_the_group(node: Node, message: Message) -> None:
    message.metadata.group_id = "gently"


def in_the_ttl(node: Node, message: Message) -> None:
    message.metadata.ttl = 1e7


def in_the_time(node: Node, message: Message) -> None:
    message.metadata.created_at = 1.0


def in_another_id(name: str) -> Callable[[Node, Message], None]:
    def lie(node: Node, message: Message) -> None:
        real = message.metadata.message_id
        told = 7 if name in ("_run_id", "_src_node_id") else "gently"
        message.metadata.__dict__[name] = told

        def after(asked: Message, reply: Message) -> bool:
            reply.metadata.__dict__["_reply_to_message_id"] = real  # the SuperLink finds it
            node.after = usual
            return True

        usual, node.after = node.after, after

    return lie


UNSIGNED = [
    in_the_order_of_the_run_config,
    in_the_group,
    in_the_ttl,
    in_the_time,
    *map(in_another_id, ("_run_id", "_src_node_id", "_message_id", "_reply_to_message_id")),
]


@pytest.mark.parametrize("lie", UNSIGNED)
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


# -- messages without masks (S58) ----------------------------------------------------------------

FEATURES = np.random.default_rng(1).normal(size=(9, 6))
LABELS = np.random.default_rng(2).normal(size=9)
CALLED: list[str] = []
"""The functions of the app that were called."""


def measuring_app() -> ClientApp:
    """An app that replies to whatever it is asked for."""
    app = ClientApp(mods=[lightsecagg_mod])

    def measured(message: Message, context: Context) -> Message:
        CALLED.append(message.metadata.message_type)
        given = message.content.get("arrays", {})
        weights = np.concatenate([np.zeros(6), *(a.numpy().ravel() for a in given.values())])[-6:]
        loss = float(np.mean((FEATURES @ weights - LABELS) ** 2))
        metrics = MetricRecord({"num-examples": samples(context.node_id), "loss": loss})
        content = {"metrics": metrics, **({"arrays": given} if given else {})}
        return Message(RecordDict(content), reply_to=message)

    for register in (app.train, app.evaluate, app.query):
        register()(measured)
        register("again")(measured)
    CALLED.clear()
    return app


def ask(node: Node, message_type: str, content: RecordDict) -> Message:
    """What a node replies to a message of the SuperLink's own making."""
    ((arrived, _),) = carried(Message(content, node.node_id, message_type))
    node.inbox.append(("asked", arrived))
    done = node.work()
    assert done is not None
    return done[1]


def loss_of(reply: Message) -> float:
    assert not reply.has_error(), reply.error.reason
    return float(reply.content["metrics"]["loss"])  # type: ignore[arg-type]


def gradient_of(node: Node, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The gradient of a node's loss, by two questions for each weight."""
    steps = np.eye(6)
    return (
        np.array(
            [
                loss_of(
                    ask(node, "evaluate", RecordDict({"arrays": record({"w": weights + step})}))
                )
                - loss_of(
                    ask(node, "evaluate", RecordDict({"arrays": record({"w": weights - step})}))
                )
                for step in steps
            ]
        )
        / 2
    )


WEIGHTS = np.linspace(-1, 1, 6)
GRADIENT = 2 * FEATURES.T @ (FEATURES @ WEIGHTS - LABELS) / len(LABELS)


def measured(federation: Federation) -> Node:
    """One of its nodes, all of which have the app that replies."""
    for node in federation.nodes.values():
        node.app = measuring_app()
    return federation.nodes[VICTIM]


def test_S58_twelve_evaluations_in_the_clear_are_a_nodes_gradient() -> None:
    """The attack, where nothing is promised: see the next tests."""
    node = measured(Federation(8))
    assert np.abs(gradient_of(node, WEIGHTS) - GRADIENT).max() < 1e-12


TYPES = ["evaluate", "evaluate.again", "query", "query.again"]


class Talkative(NumPyClient):
    """A client of Flower's older API that replies to whatever it is asked for."""

    def get_parameters(self, config: dict[str, Any]) -> Any:
        CALLED.append("get_parameters")
        return [WEIGHTS]

    def get_properties(self, config: dict[str, Any]) -> Any:
        CALLED.append("get_properties")
        return {"patients": 42}

    def evaluate(self, parameters: Any, config: dict[str, Any]) -> Any:
        CALLED.append("evaluate")
        return 0.5, 42, {}


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("message_type", ["get_parameters", "get_properties", "evaluate"])
def test_S58_clients_of_the_older_api_reply_to_nothing_in_the_clear_either(
    message_type: str, closed: bool, tmp_path: Path
) -> None:
    """And the attack, where the operator demands nothing."""
    federation = Federation(8, node_config=malicious(tmp_path) if closed else {})
    node = federation.nodes[VICTIM]
    node.app = ClientApp(lambda context: Talkative().to_client(), mods=[lightsecagg_mod])
    content = {
        "get_parameters": lambda: compat.getparametersins_to_recorddict(GetParametersIns({})),
        "get_properties": lambda: compat.getpropertiesins_to_recorddict(GetPropertiesIns({})),
        "evaluate": lambda: compat.evaluateins_to_recorddict(
            EvaluateIns(ndarrays_to_parameters([WEIGHTS]), {}), keep_input=True
        ),
    }[message_type]()
    CALLED.clear()
    reply = ask(node, message_type, content)
    assert len(CALLED) == (not closed)
    assert reply.has_error() == closed
    assert not closed or reply.error.reason == UNMASKED


@pytest.mark.parametrize("message_type", TYPES)
def test_S58_a_node_in_malicious_server_mode_replies_to_nothing_in_the_clear(
    message_type: str, tmp_path: Path
) -> None:
    node = measured(Federation(8, node_config=malicious(tmp_path)))
    content = RecordDict({"arrays": record({"w": WEIGHTS})})
    for _ in range(12):
        assert ask(node, message_type, content).error.reason == UNMASKED
    assert ask(node, message_type, RecordDict()).error.reason == UNMASKED
    assert ask(node, "train.again", content).error.reason == UNPROTECTED
    assert not CALLED


@pytest.mark.parametrize("message_type", TYPES)
def test_S58_masked_evaluations_close_those_in_the_clear(message_type: str) -> None:
    strategy = FedAvg(min_available_nodes=2)
    federation = Federation(8, strategy=strategy, evaluation={"loss": 100.0}, timeout=60)
    node = measured(federation)
    result = federation.run(1, {"w": WEIGHTS})
    assert result.evaluate_metrics_clientapp[1]["loss"] > 0  # type: ignore[operator]
    CALLED.clear()
    content = RecordDict({"arrays": record({"w": WEIGHTS})})
    assert ask(node, message_type, content).error.reason == UNMASKED
    assert not CALLED


def test_S58_a_strategy_of_malicious_server_mode_evaluates_nothing_in_the_clear(
    tmp_path: Path,
) -> None:
    options = {"threat_model": "malicious-server", "node_config": malicious(tmp_path)}
    federation = Federation(8, strategy=FedAvg(min_available_nodes=2), timeout=60, **options)
    with pytest.raises(ParameterError, match="malicious-server mode has no evaluation in the cl"):
        federation.run(1)


@pytest.mark.parametrize("demanded", [True, False])
def test_S58_a_strategy_of_malicious_server_mode_closes_the_clear_for_everybody(
    demanded: bool, tmp_path: Path
) -> None:
    config = malicious(tmp_path)
    if not demanded:
        del config[VICTIM]["lightsecagg_threat_model"]
    federation = Federation(8, threat_model="malicious-server", node_config=config, timeout=60)
    federation.run(1)
    node = measured(federation)
    assert ask(node, "evaluate", RecordDict()).error.reason == UNMASKED


@pytest.mark.parametrize(
    ("stage", "message_type"),
    [
        ("train", "evaluate"),
        ("train", "query"),
        ("evaluate", "train"),
        ("evaluate", "train.again"),
        ("evaluate", "query"),
    ],
)
def test_S58_a_parcel_for_one_type_of_message_is_refused_in_another(
    stage: str, message_type: str
) -> None:
    strategy = FedAvg(min_available_nodes=2)
    federation = Federation(8, strategy=strategy, evaluation={"loss": 100.0}, attempts=1)
    node = measured(federation)
    replies: list[Message] = []

    def before(message: Message) -> None:
        if stage_of(message) == stage:
            message.metadata.message_type = message_type
            CALLED.clear()

    def after(message: Message, reply: Message) -> bool:
        if message.metadata.message_type == message_type and stage_of(message) == stage:
            assert not CALLED
            replies.append(reply)
        return True

    node.before, node.after = before, after
    federation.run(1, {"w": WEIGHTS})
    assert [reply.error.reason for reply in replies] == [REFUSED]


def test_S58_a_parcel_in_a_query_does_not_reach_the_app() -> None:
    node = measured(Federation(8))
    reply = ask(node, "query", attach(Parcel({"stage": "hello"}), RecordDict()))
    assert detach(reply.content)[0] is not None
    assert not CALLED


# -- what a failure reveals (S62) ----------------------------------------------------------------


class Asker:
    """A SuperLink that asks one node, enrolled in malicious-server mode, whatever it likes."""

    def __init__(self, tmp_path: Path, app: ClientApp, **demands: Any) -> None:
        config = malicious(tmp_path)
        for node_id in config:
            config[node_id] |= demands
        options = {"threat_model": "malicious-server", "node_config": config, "attempts": 1}
        self._federation = Federation(8, evaluation={"loss": 10.0}, timeout=60, **options)
        for node in self._federation.nodes.values():
            node.app = app
        self.node = self._federation.nodes[VICTIM]
        self.enrol()

    def enrol(self) -> None:
        """Everybody takes part in a round, so that there is an epoch to ask in."""
        found: list[Parcel | None] = []
        self.node.after = lambda message, reply: (
            found.append(detach(message.content)[0]) is None or True
        )
        model = {"w": np.random.default_rng().normal(size=6)}
        with contextlib.suppress(RuntimeError):
            self._federation.run(1, model)
        self._parcel = next(p for p in found if p is not None and p.numbers["stage"] == "train")
        self._version = int(self._parcel.numbers["version"])

    def fails(self, stage: str, told: dict[str, Any], **numbers: Any) -> bool:
        """Whether the node has no update for a model."""
        self._version += 1
        given = {**self._parcel.numbers, "stage": stage, "version": self._version, "first": 0}
        given.pop("protocol")
        config = ConfigRecord({"question": self._version, **told})
        content = RecordDict({"arrays": record({"w": WEIGHTS}), "config": config})
        reply = ask(self.node, stage, attach(Parcel(given | numbers), content))
        parcel, _ = detach(reply.content)
        assert parcel is not None
        return bool(parcel.numbers["failed"])


@pytest.mark.parametrize("limit", [5e-324, 1e-310, 1e-101, 0.0, -1.0, 1e101, np.inf, np.nan])
def test_S62_limits_that_no_metric_has_do_not_reach_the_app(limit: float, tmp_path: Path) -> None:
    """A loss of 3 over a limit of 1e-308 is infinite, and one of 1 is not: a question answered."""
    asker = Asker(tmp_path, measuring_app())
    CALLED.clear()
    assert asker.fails("evaluate", {}, metrics=["loss"], limits=[limit])
    assert not CALLED


def replying_app(change: Any, loss: float, count: int = 1) -> ClientApp:
    """An app whose training adds about `change` to every entry, never twice the same."""
    app = ClientApp(mods=[lightsecagg_mod])

    def replied(message: Message, context: Context) -> Message:
        CALLED.append(message.metadata.message_type)
        given = arrays(message.content["arrays"])
        told = message.content.config_records.get("config", ConfigRecord())
        change_now = np.nan if told.get("fail") else change
        metrics = MetricRecord({"num-examples": count + len(CALLED), "loss": loss})
        moved = record(
            {name: array + change_now * (1 + 1e-3 * len(CALLED)) for name, array in given.items()}
        )
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    app.train()(replied)
    app.evaluate()(replied)
    return app


@pytest.mark.parametrize("loss", [0.0, 1e300, -1e300, np.inf, -np.inf, np.nan])
def test_S62_no_loss_and_no_limit_makes_a_node_refuse(loss: float, tmp_path: Path) -> None:
    asker = Asker(tmp_path, replying_app(0.01, loss))
    for limit in (1e-100, 1.0, 1e100):
        assert not asker.fails("evaluate", {}, metrics=["loss"], limits=[limit])
        asker.enrol()


def test_S62_no_clipping_norm_makes_a_node_refuse(tmp_path: Path) -> None:
    asker = Asker(tmp_path, replying_app(0.5, 1.0))
    for norm in (1e-12, 0.5, 1.3, 1e12):
        assert not asker.fails("train", {"clipping_norm": norm}, metrics=[], limits=[])
        asker.enrol()


@pytest.mark.parametrize("entry", [1.001, -1e6])
def test_S62_no_bound_makes_a_node_refuse(entry: float, tmp_path: Path) -> None:
    """The bound of the settings, which is 1 here, is the server's unless the operator sets one."""
    change = np.array([entry, 0.1, 0.2, 0.3, 0.4, 0.5])
    asker = Asker(tmp_path, replying_app(change, 1.0))
    assert not asker.fails("train", {}, metrics=[], limits=[])


@pytest.mark.parametrize("count", [90, 100, 101, 10**9])
def test_S62_no_limit_of_sample_counts_makes_a_node_refuse(count: int, tmp_path: Path) -> None:
    """Settings allow 100; a server that varies them would find a count that is refused."""
    asker = Asker(tmp_path, replying_app(0.5, 1.0, count))
    assert not asker.fails("train", {}, metrics=[], limits=[])


@pytest.mark.parametrize("norm", [0.0, -1.0, np.nan, "1"])
def test_S62_a_clipping_norm_that_is_none_does_not_reach_the_app(norm: Any, tmp_path: Path) -> None:
    asker = Asker(tmp_path, replying_app(0.5, 1.0))
    CALLED.clear()
    assert asker.fails("train", {"clipping_norm": norm}, metrics=[], limits=[])
    assert not CALLED


@pytest.mark.parametrize("most", [3, 16])
def test_S62_an_app_that_fails_is_asked_so_often_and_not_again(most: int, tmp_path: Path) -> None:
    demands = {} if most == 16 else {"lightsecagg_max_failures": most}
    asker = Asker(tmp_path, replying_app(np.inf, 1.0), **demands)
    CALLED.clear()
    for asked in range(1, most + 3):  # enrolment was the first time
        assert asker.fails("train", {}, metrics=[], limits=[])
        assert len(CALLED) == min(asked, most - 1)
    asker.enrol()  # a new epoch and a new process do not begin to count anew
    CALLED.clear()
    assert asker.fails("train", {}, metrics=[], limits=[])
    assert not CALLED


def test_S62_updates_are_no_failures(tmp_path: Path) -> None:
    asker = Asker(tmp_path, replying_app(0.5, 1.0), lightsecagg_max_failures=1)
    for _ in range(3):
        assert not asker.fails("train", {}, metrics=[], limits=[])
        asker.enrol()


def test_S62_an_update_between_two_failures_does_not_undo_the_first(tmp_path: Path) -> None:
    """Else a server would ask something harmless in between, and never stop asking."""
    asker = Asker(tmp_path, replying_app(0.5, 1.0), lightsecagg_max_failures=2)
    for fail in (True, False, True):
        assert asker.fails("train", {"fail": fail}, metrics=[], limits=[]) is fail
        asker.enrol()
    CALLED.clear()
    assert asker.fails("train", {"fail": False}, metrics=[], limits=[])
    assert not CALLED
