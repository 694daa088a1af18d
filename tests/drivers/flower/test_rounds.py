"""Rounds in Flower: the average is FedAvg's, in two exchanges, whatever nodes drop out where."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Result,
    Strategy,
    dp_fixed_clipping,
)
from local_grid import Killed, LocalGrid, Node
from small_flower import (
    MODEL,
    Federation,
    accuracy,
    arrays,
    at_round,
    error,
    expected,
    fed_avg,
    plain,
    record,
    samples,
    stage_of,
    update,
)

from lightsecagg.drivers.flower.agreed import FORGOTTEN
from lightsecagg.drivers.flower.mod import UNPROTECTED
from lightsecagg.errors import ParameterError
from lightsecagg.flower import LightSecAgg, lightsecagg_mod

EXACT = 1e-6
"""The largest difference from plain FedAvg; the arrays are float32."""

# -- the average -------------------------------------------------------------------------------


def test_every_promise_of_the_page_names_tests_that_exist() -> None:
    here = Path(__file__).parent
    page = (here.parents[2] / "docs" / "flower.md").read_text("utf-8")
    promised = set(re.findall(r"`(test_\w+)`", page))
    known = {
        name
        for file in here.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    assert promised
    assert promised <= known


def test_two_lines_give_what_plain_flower_gives() -> None:
    federation = Federation(8)
    result = federation.run(3)
    assert error(result, expected(MODEL, [list(federation.ids)] * 3)) < EXACT
    assert error(plain(fed_avg(8), 8, 3), expected(MODEL, [list(federation.ids)] * 3)) < EXACT


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedProx(proximal_mu=0.1, fraction_evaluate=0.0),
        lambda: FedAvgM(server_momentum=0.9, fraction_evaluate=0.0),
        lambda: FedAdam(eta=0.1, fraction_evaluate=0.0),
        lambda: FedAdagrad(eta=0.1, fraction_evaluate=0.0),
        lambda: FedYogi(eta=0.1, fraction_evaluate=0.0),
    ],
    ids=["prox", "momentum", "adam", "adagrad", "yogi"],
)
def test_strategies_that_average_do_what_they_do_without_masks(
    make: Callable[[], Strategy],
) -> None:
    result, wanted = Federation(6, strategy=make()).run(3), plain(make(), 6, 3)
    assert wanted.arrays is not None
    assert error(result, arrays(wanted.arrays)) < 1e-4  # optimisers divide by small numbers


def test_a_node_loads_nothing_of_the_server() -> None:
    """Every message is a new process: what is imported is paid for in each exchange."""
    code = (
        "import sys; from lightsecagg.flower import lightsecagg_mod\n"
        "print(*(name for name in sys.modules if 'lightsecagg' in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "lightsecagg.drivers.flower.mod" in loaded
    assert not loaded & {
        "lightsecagg.drivers.flower.strategy",
        "lightsecagg.protocol.server",
        "lightsecagg.drivers.federation.provisioning",
    }


def test_a_round_takes_two_exchanges_and_enrolment_three() -> None:
    federation = Federation(6, dropouts=1)
    federation.run(1)
    assert federation.grid.pushed == 6 * (3 + 2)
    federation = Federation(6, dropouts=1)
    federation.run(4)
    assert federation.grid.pushed == 6 * (3 + 4 * 2)


def test_privacy_and_dropouts_may_be_fractions() -> None:
    federation = Federation(10, privacy=0.15, dropouts=0.35)
    federation.run(1)
    parameters = federation.strategy._current().settings.parameters
    assert (parameters.privacy, parameters.dropouts, parameters.survivors) == (2, 3, 7)
    with pytest.raises(ParameterError, match=r"privacy = 1\.5 must be a count, or a fraction"):
        Federation(4, privacy=1.5)


def test_metrics_are_averaged_under_the_mask_and_others_stay() -> None:
    federation = Federation(6, metrics={"loss": 1.0})
    result = federation.run(1)
    weights = [samples(node) for node in federation.ids]
    loss = np.average([0.001 * node for node in federation.ids], weights=weights)
    assert result.train_metrics_clientapp[1] == pytest.approx({"loss": loss}, abs=1e-6)
    assert Federation(6).run(1).train_metrics_clientapp[1] == {}
    with pytest.raises(ParameterError, match="largest value of metric 'loss' is 0"):
        Federation(6, metrics={"loss": 0})


def test_without_weights_everybody_counts_alike() -> None:
    federation = Federation(5, max_samples=1, dropouts=1)
    result = federation.run(1)
    updates = [update(MODEL, node, 1) for node in federation.ids]
    mean = {name: np.mean([u[name] for u in updates], axis=0) for name in MODEL}
    assert error(result, mean) < EXACT


def test_a_larger_change_than_the_bound_is_clipped_and_logged_at_the_node(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(caplog, monkeypatch)
    federation = Federation(5, bound=0.25, dropouts=1)
    result = federation.run(1)
    assert result.arrays is not None
    moved = max(np.abs(arrays(result.arrays)[name] - MODEL[name]).max() for name in MODEL)
    assert 0.05 < moved <= 0.25
    changes = [
        np.concatenate([(update(MODEL, node, 1)[name] - MODEL[name]).ravel() for name in MODEL])
        for node in federation.ids
    ]
    lines = [text for text in caplog.messages if "clipped" in text]
    assert lines == [
        f"lightsecagg: {100 * np.mean(np.abs(change) > 0.25):.3g} % of the entries were clipped to "
        "the bound 0.25; if training stalls, raise it"
        for change in changes
    ]
    caplog.clear()
    Federation(5, bound=0.51, dropouts=1).run(1)
    assert not [text for text in caplog.messages if "clipped" in text]


def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest see what Flower's logger gets; it hands nothing on by itself.

    A program that another test has run in this process may have set its level.
    """
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level("INFO")
    caplog.set_level("INFO", logger="flwr")


def test_a_torch_model_with_batch_norm_trains_with_two_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    logged(caplog, monkeypatch)
    torch.manual_seed(1)
    weights = torch.randn(6, generator=torch.manual_seed(0))

    def new_model() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )

    def fit(message: Message, context: Context) -> Message:
        model = new_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        features = torch.randn(40, 6, generator=torch.manual_seed(context.node_id))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features)[:, 0], features @ weights)
            loss.backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 40, "loss": loss.item()}),
        }
        return Message(RecordDict(content), reply_to=message)

    def run(mods: list[Any], *wrap: Callable[[Strategy], Strategy]) -> Result:
        app, grid = ClientApp(mods=mods), LocalGrid()
        app.train()(fit)
        for node in range(101, 105):
            grid.add(node, app)
        strategy: Strategy = fed_avg(4)
        for wrapper in wrap:
            strategy = wrapper(strategy)
        return strategy.start(grid, ArrayRecord(initial), num_rounds=4)

    initial = new_model().state_dict()
    plain_result = run([])
    result = run(
        [lightsecagg_mod],
        lambda inner: LightSecAgg(
            inner,
            privacy=1,
            dropouts=1,
            bound=10.0,
            max_samples=100,
            metrics={"loss": 1e3},
            poll_interval=0.001,
        ),
    )
    assert plain_result.arrays is not None
    assert result.arrays is not None
    found, wanted = arrays(result.arrays), arrays(plain_result.arrays)
    assert found.keys() == wanted.keys() == initial.keys()
    steps = found.pop("1.num_batches_tracked")
    assert (steps.dtype, steps) == (np.int64, 0)  # the server's; plain Flower makes floats of it
    for name, values in found.items():
        assert values.dtype == np.float32
        assert np.abs(values - wanted[name]).max() < 1e-4
    losses = [metrics["loss"] for metrics in result.train_metrics_clientapp.values()]
    assert losses[-1] < losses[0] / 4  # type: ignore[operator]
    kept = [text for text in caplog.messages if "1.num_batches_tracked" in text]
    assert kept == [
        "LightSecAgg: '1.num_batches_tracked': no floats, so they are not averaged; the server's "
        "stay"
    ]
    new_model().load_state_dict(result.arrays.to_torch_state_dict())


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.bool_])
def test_arrays_without_floats_keep_the_servers_value_under_every_strategy(kind: type) -> None:
    given = np.array([3, 0, 1], dtype=kind)
    model = {"before": given, **MODEL, "behind": given}
    for strategy in (fed_avg(5), FedAdam(eta=0.1, fraction_evaluate=0.0)):
        result = Federation(5, strategy=strategy, dropouts=1).run(2, model)
        assert result.arrays is not None
        found = arrays(result.arrays)
        assert list(found) == list(model)
        for name in ("before", "behind"):
            assert found[name].dtype == kind
            assert np.array_equal(found[name], given)
        assert not np.array_equal(found["weight"], MODEL["weight"])


def test_evaluation_is_the_wrapped_strategys() -> None:
    strategy = FedAvg(min_available_nodes=2)
    result = Federation(5, strategy=strategy, dropouts=1).run(1)
    weights = [samples(node) for node in range(101, 106)]
    wanted = np.average([accuracy(node) for node in range(101, 106)], weights=weights)
    assert result.evaluate_metrics_clientapp[1] == pytest.approx({"accuracy": wanted})


def test_evaluation_under_the_mask_gives_what_it_gives_in_the_clear() -> None:
    options = {"dropouts": 1, "metrics": {"loss": 1.0}}
    clear = Federation(5, strategy=FedAvg(min_available_nodes=2), **options).run(2)
    masked = Federation(
        5, strategy=FedAvg(min_available_nodes=2), evaluation={"accuracy": 1.0}, **options
    )
    result = masked.run(2)
    for server_round in (1, 2):
        wanted = clear.evaluate_metrics_clientapp[server_round]
        assert result.evaluate_metrics_clientapp[server_round] == pytest.approx(wanted, abs=1e-5)
        loss = clear.train_metrics_clientapp[server_round]
        assert result.train_metrics_clientapp[server_round] == pytest.approx(loss, abs=1e-5)
    assert masked.grid.pushed == 5 * (3 + 2 * (2 + 2))


def test_evaluation_goes_on_without_the_nodes_that_fail() -> None:
    federation = Federation(
        8, strategy=FedAvg(min_available_nodes=2), evaluation={"accuracy": 1.0}, attempts=1
    )
    spoil(federation.nodes[102], "evaluate", "exception", 1)
    spoil(federation.nodes[104], "evaluate", "silence", 2)
    result = federation.run(2)
    rest = list(federation.ids)
    for server_round, gone in ((1, 102), (2, 104)):
        there = [node for node in rest if node != gone]
        weights = [samples(node) for node in there]
        wanted = np.average([accuracy(node) for node in there], weights=weights)
        found = result.evaluate_metrics_clientapp[server_round]["accuracy"]
        assert found == pytest.approx(wanted, abs=1e-5)
    assert error(result, expected(MODEL, [rest] * 2)) < EXACT


def test_a_part_of_the_nodes_trains_and_all_of_them_help() -> None:
    federation = Federation(8, strategy=fed_avg(8, fraction_train=0.5), privacy=1, dropouts=1)
    trained: list[set[int]] = []

    def note(message: Message, node_id: int) -> None:
        if stage_of(message) == "train":
            trained[-1].add(node_id)

    for node_id, node in federation.nodes.items():
        node.before = lambda message, node_id=node_id: note(message, node_id)  # type: ignore[misc]
    configure = federation.strategy.configure_train

    def counted(*arguments: Any) -> Any:
        trained.append(set())
        return configure(*arguments)

    federation.strategy.configure_train = counted  # type: ignore[method-assign]
    result = federation.run(4)
    assert [len(nodes) for nodes in trained] == [4] * 4
    assert error(result, expected(MODEL, [sorted(nodes) for nodes in trained])) < EXACT


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"fraction_train": 0.5}, "train"),
        ({"fraction_train": 0.5, "fraction_evaluate": 1.0}, "train"),
        ({"fraction_evaluate": 0.5}, "evaluate"),
    ],
)
def test_a_fraction_that_chooses_too_few_nodes_is_refused_before_anybody_trains(
    options: dict[str, float], stage: str
) -> None:
    def federation(**more: Any) -> Federation:
        strategy = FedAvg(**{"fraction_evaluate": 0.0, **options, **more})
        return Federation(6, strategy=strategy, evaluation={"accuracy": 1.0})

    few = federation()
    refusal = (
        rf"fraction_{stage}=0\.5 of 6 nodes is 3, and a sum over fewer than T \+ 2 = 4 .*"
        rf"min_{stage}_nodes=4"
    )
    with pytest.raises(ParameterError, match=refusal):
        few.run(1)
    assert few.grid.pushed == 0
    assert federation(**{f"min_{stage}_nodes": 4}).run(1).arrays
    assert federation(**{f"fraction_{stage}": 0.67}).run(1).arrays


def test_a_strategy_that_chooses_the_evaluators_itself_is_asked_and_not_guessed() -> None:
    class Everybody(FedAvg):
        def configure_evaluate(self, *arguments: Any) -> Any:
            self.fraction_evaluate, fraction = 1.0, self.fraction_evaluate
            yield from super().configure_evaluate(*arguments)
            self.fraction_evaluate = fraction

    strategy = Everybody(fraction_evaluate=0.5)
    federation = Federation(6, strategy=strategy, evaluation={"accuracy": 1.0})
    assert federation.run(1).evaluate_metrics_clientapp[1]


def test_the_log_counts_updates_and_names_what_is_not_masked_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(caplog, monkeypatch)
    federation = Federation(8, strategy=FedAvg(min_available_nodes=2))
    federation.nodes[102].app = _broken_app()
    federation.run(3)
    lines = Counter(caplog.messages)
    assert lines["aggregate_train: 7 of 8 updates are in the average"] == 3
    assert not any("aggregate_train: Received" in line for line in lines)
    assert lines["aggregate_evaluate: Received 7 results and 1 failures"] == 3  # Flower's, in clear
    once = [line for line in caplog.messages if "LightSecAgg(" in line]
    assert ["metrics=" in line or "evaluation=" in line for line in once] == [True, True]

    caplog.clear()
    options = {"metrics": {"loss": 1.0}, "evaluation": {"accuracy": 1.0}}
    Federation(8, strategy=FedAvg(min_available_nodes=2), **options).run(1)
    assert "aggregate_evaluate: 8 of 8 updates are in the average" in caplog.messages
    assert not [line for line in caplog.messages if "LightSecAgg(" in line or "Received" in line]


def test_an_app_that_returns_no_weight_is_named_in_the_log_of_its_node(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(caplog, monkeypatch)
    federation = Federation(4, strategy=fed_avg(4, weighted_by_key="rows"), privacy=1, dropouts=1)
    with pytest.raises(RuntimeError, match="0 of 4 nodes have sent an update"):
        federation.run(1)
    reason = "no update: the app returned no metric 'rows', which weights its update"
    assert sum(reason in line for line in caplog.messages) == 4


def test_a_node_without_a_folder_warns_once_and_not_in_a_simulation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(caplog, monkeypatch)
    Federation(4, privacy=1, dropouts=1).run(2)
    assert sum("lightsecagg-dir" in line for line in caplog.messages) == 4
    caplog.clear()
    monkeypatch.setitem(sys.modules, "flwr.simulation.ray_transport.ray_actor", sys)
    Federation(4, privacy=1, dropouts=1).run(2)
    assert not any("lightsecagg-dir" in line for line in caplog.messages)


# -- dropouts (R30) ----------------------------------------------------------------------------


def fail(message: Message) -> None:
    raise ValueError("secret text 42")


def die(message: Message) -> None:
    raise Killed


def stay_silent(node: Node) -> None:
    """It works, and nothing of it arrives."""
    node.after = lambda message, reply: False


def spoil(node: Node, stage: str, how: str, at: int) -> None:
    """Let a node drop out in the `at`-th message of a stage, and be well again in the next round.

    The first relay is the roster; those that follow are answers.
    """
    met: Counter[str] = Counter()

    def before(message: Message) -> None:
        met[stage_of(message)] += 1
        node.after = lambda message, reply: True
        if stage_of(message) != stage or met[stage] != at:
            return
        if how == "exception":
            fail(message)
        if how == "killed":
            die(message)
        stay_silent(node)

    node.before = before


STAGES = {
    "hello": ("hello", 1),
    "open": ("open", 1),
    "roster": ("relay", 1),
    "train": ("train", 1),
    "answer": ("relay", 2),
}


@pytest.mark.parametrize("how", ["exception", "silence", "killed"])
@pytest.mark.parametrize("stage", STAGES)
def test_R30_up_to_D_nodes_may_drop_out_anywhere(stage: str, how: str) -> None:
    federation = Federation(8)
    kind, at = STAGES[stage]
    for node_id in (102, 106):
        spoil(federation.nodes[node_id], kind, how, at)
    result = federation.run(1)
    included = set(federation.ids)
    if stage != "answer":  # whoever has uploaded is in the sum, dead or alive
        included -= {102, 106}
    assert error(result, expected(MODEL, [sorted(included)])) < EXACT


@pytest.mark.parametrize("how", ["exception", "silence", "killed"])
@pytest.mark.parametrize("stage", STAGES)
def test_R30_one_more_is_an_error_and_never_a_wrong_model(stage: str, how: str) -> None:
    federation = Federation(8, attempts=1)
    kind, at = STAGES[stage]
    for node_id in (102, 104, 106):
        spoil(federation.nodes[node_id], kind, how, at)
    with pytest.raises(RuntimeError, match=r"LightSecAgg, (enrolment|round 1): "):
        federation.run(1)


@pytest.mark.parametrize("stage", ["train", "answer"])
def test_R30_who_is_missing_is_asked_again_in_the_same_round(stage: str) -> None:
    federation = Federation(8, attempts=2)
    kind, at = STAGES[stage]
    for node_id in (102, 104, 106):
        spoil(federation.nodes[node_id], kind, "exception", at)
    assert error(federation.run(1), expected(MODEL, [list(federation.ids)])) < EXACT


def test_R30_the_answer_of_a_lost_reply_is_given_again_and_is_the_same() -> None:
    federation = Federation(8, attempts=2)
    for node_id in (102, 104, 106):
        spoil(federation.nodes[node_id], "relay", "silence", 2)
    assert error(federation.run(2), expected(MODEL, [list(federation.ids)] * 2)) < EXACT


def test_R30_a_lost_upload_is_lost_and_there_is_no_second_one() -> None:
    federation = Federation(8, attempts=2)
    for node_id in (102, 104, 106):
        spoil(federation.nodes[node_id], "train", "silence", 1)
    with pytest.raises(RuntimeError, match="5 of 8 nodes have sent an update, and 6 are needed"):
        federation.run(1)


def test_R30_nodes_come_and_go_for_many_rounds() -> None:
    federation = Federation(8)
    included: list[list[int]] = []
    down: set[int] = set()

    def before(message: Message, node_id: int) -> None:
        if node_id in down:
            fail(message)

    for node_id, node in federation.nodes.items():
        node.before = lambda message, node_id=node_id: before(message, node_id)  # type: ignore[misc]
    configure = federation.strategy.configure_train

    def next_round(server_round: int, *arguments: Any) -> Any:
        if server_round > 1:
            down.clear()
            down.update({101 + server_round % 8, 101 + (3 * server_round) % 8})
        included.append([node for node in federation.ids if node not in down])
        return configure(server_round, *arguments)

    federation.strategy.configure_train = next_round  # type: ignore[method-assign]
    assert error(federation.run(9), expected(MODEL, included)) < EXACT
    assert federation.strategy._number > 0
    assert len({tuple(nodes) for nodes in included}) > 4


def test_R30_a_node_that_never_answers_is_in_every_sum() -> None:
    federation = Federation(8)
    met: Counter[str] = Counter()

    def before(message: Message) -> None:
        met[stage_of(message)] += 1
        if stage_of(message) == "relay" and met["relay"] > 1:  # the first one is the roster
            fail(message)

    federation.nodes[104].before = before
    result = federation.run(5)
    assert error(result, expected(MODEL, [list(federation.ids)] * 5)) < EXACT


def test_R30_an_app_that_cannot_train_still_helps_the_others() -> None:
    """Two that cannot train, and two other nodes that vanish afterwards: D = 2 each time."""
    federation = Federation(8)
    for node_id in (102, 104):
        federation.nodes[node_id].app = _broken_app()
    for node_id in (106, 107):
        spoil(federation.nodes[node_id], "relay", "killed", 2)
    included = [node for node in federation.ids if node not in (102, 104)]
    assert error(federation.run(1), expected(MODEL, [included])) < EXACT


def _broken_app() -> ClientApp:
    app = ClientApp(mods=[lightsecagg_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("secret text 42")

    return app


def test_R35_waiting_for_nodes_has_an_end() -> None:
    federation = Federation(4, strategy=FedAvg(min_available_nodes=5), dropouts=1)
    with pytest.raises(TimeoutError, match=r"only 4 nodes are connected.*min_available_nodes"):
        federation.run(1)


def test_recovery_ends_with_the_last_answer_that_it_needs() -> None:
    """Dead nodes are not waited for: the timeout would be longer than the test may take."""
    federation = Federation(8, timeout=10_000)
    federation.grid.notices_death = True
    for node_id in (102, 106):
        stop = federation.nodes[node_id]

        def before(message: Message, stop: Node = stop, met: Counter[str] = Counter()) -> None:  # noqa: B006
            met[f"{stop.node_id} {stage_of(message)}"] += 1
            if met[f"{stop.node_id} relay"] == 2:
                die(message)

        stop.before = before
    assert error(federation.run(1), expected(MODEL, [list(federation.ids)])) < EXACT


# -- nodes that come, leave and forget -----------------------------------------------------------


def test_a_new_node_is_enrolled_when_it_is_chosen() -> None:
    federation = Federation(6, dropouts=1)
    at_round(federation, 2, lambda: federation.grid.add(150, federation.app) and None)
    everybody = [*federation.ids, 150]
    wanted = expected(MODEL, [list(federation.ids), everybody, everybody])
    assert error(federation.run(3), wanted) < EXACT


def test_a_node_that_forgot_sits_out_a_round_and_is_enrolled_again() -> None:
    federation = Federation(6, dropouts=1)

    def restart() -> None:
        federation.nodes[103].state = RecordDict()

    at_round(federation, 2, restart)
    rest = [node for node in federation.ids if node != 103]
    wanted = expected(MODEL, [list(federation.ids), rest, list(federation.ids)])
    assert error(federation.run(3), wanted) < EXACT
    assert FORGOTTEN in federation.grid.reasons


def test_a_model_of_another_shape_begins_a_new_epoch() -> None:
    federation = Federation(5, dropouts=1)
    federation.run(1)
    before = federation.strategy._current()
    small = {"weight": np.ones(3, dtype=np.float32)}
    assert error(federation.run(1, small), expected(small, [list(federation.ids)])) < EXACT
    assert federation.strategy._current() is not before


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        FedMedian(),
        FedTrimmedAvg(),
        Krum(),
        MultiKrum(),
        Bulyan(),
        QFedAvg(client_learning_rate=0.1),
        FedXgbBagging(),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_strategies_that_look_at_single_updates_are_refused(strategy: Strategy) -> None:
    with pytest.raises(ParameterError, match=f"{type(strategy).__name__} looks at single updates"):
        LightSecAgg(strategy, privacy=1, dropouts=1, bound=1.0)


def test_a_subclass_may_change_anything_but_the_average() -> None:
    class Chooses(FedAvg):
        def configure_train(self, *arguments: Any) -> Any:
            return super().configure_train(*arguments)

    class Averages(FedAvg):
        def aggregate_train(self, *arguments: Any) -> Any:
            return super().aggregate_train(*arguments)

    LightSecAgg(Chooses(), privacy=1, dropouts=1, bound=1.0)
    with pytest.raises(ParameterError, match="a subclass that leaves aggregate_train alone"):
        LightSecAgg(Averages(), privacy=1, dropouts=1, bound=1.0)


def test_the_mod_without_the_wrapper_sends_nothing() -> None:
    federation = Federation(4, privacy=1, dropouts=1)
    result = fed_avg(4).start(federation.grid, record(MODEL), num_rounds=1)
    assert not result.arrays
    assert set(federation.grid.reasons) == {UNPROTECTED}


def test_the_wrapper_without_the_mod_says_what_is_missing() -> None:
    federation = Federation(4, privacy=1, dropouts=1, mods=[])
    with pytest.raises(RuntimeError, match="lightsecagg_mod as the first of its mods"):
        federation.run(1)


def test_a_mod_in_front_of_ours_is_refused() -> None:
    federation = Federation(4, privacy=1, dropouts=1, mods=[fixedclipping_mod, lightsecagg_mod])
    with pytest.raises(RuntimeError, match="lightsecagg_mod as the first of its mods"):
        federation.run(1)


@pytest.mark.parametrize(
    ("nodes", "privacy", "dropouts", "enough"),
    [(4, 2, 1, 5), (2, 0.2, 0.3, 3), (2, 1, 10, 13)],
)
def test_too_few_nodes_are_refused_with_the_number_that_is_enough(
    nodes: int, privacy: float, dropouts: float, enough: int
) -> None:
    remedy = (
        rf"connected nodes: {nodes}, .*at least {enough}\. .*num-supernodes={max(10, enough)}\".*"
        rf"min_available_nodes={enough} \("
    )
    few = Federation(nodes, privacy=privacy, dropouts=dropouts)
    with pytest.raises(RuntimeError, match=remedy):
        few.run(1)
    assert few.grid.pushed == 0  # nothing was asked of them
    options = {"privacy": privacy, "dropouts": dropouts}
    with pytest.raises(RuntimeError, match="connected nodes"):
        Federation(enough - 1, **options).run(1)
    assert Federation(enough, **options).run(1).arrays


def test_shares_of_nodes_that_no_number_meets_are_refused() -> None:
    with pytest.raises(RuntimeError, match="enrolment: N - D = 2 clients may remain"):
        Federation(4, privacy=0.6, dropouts=0.5).run(1)


@pytest.mark.parametrize("kind", [np.complex64, np.str_])
def test_what_is_no_number_is_refused_by_name(kind: type) -> None:
    model = {**MODEL, "steps": np.zeros(1, dtype=kind)}
    with pytest.raises(ParameterError, match=r"array 'steps' is of .*only floats can be averaged"):
        Federation(4, privacy=1, dropouts=1).run(1, model)
    with pytest.raises(ParameterError, match="has no floats"):
        Federation(4, privacy=1, dropouts=1).run(1, {"steps": np.zeros(1, dtype=np.int64)})


def test_different_models_for_different_nodes_are_refused() -> None:
    class Personal(FedAvg):
        def configure_train(self, *arguments: Any) -> Any:
            messages = list(super().configure_train(*arguments))
            for number, message in enumerate(messages):
                message.content = RecordDict(dict(message.content))
                message.content["arrays"] = record({"w": np.full(3, number, dtype=np.float32)})
            return messages

    with pytest.raises(ParameterError, match="different models, configs or message types to"):
        Federation(4, privacy=1, dropouts=1, strategy=Personal()).run(1)


# -- differential privacy ------------------------------------------------------------------------


def private(inner: Strategy, clients: int, **options: Any) -> Strategy:
    return DifferentialPrivacyClientSideFixedClipping(
        inner, noise_multiplier=0.5, clipping_norm=0.3, num_sampled_clients=clients, **options
    )


def test_noise_is_right_for_the_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    deviations: list[float] = []
    monkeypatch.setattr(
        dp_fixed_clipping,
        "add_gaussian_noise_inplace",
        lambda model, deviation: deviations.append(deviation),
    )
    federation = Federation(
        8, strategy=private(fed_avg(8), 8), mods=[lightsecagg_mod, fixedclipping_mod]
    )
    for node_id in (102, 106):
        spoil(federation.nodes[node_id], "train", "exception", 2)
    result = federation.run(2)
    assert deviations == [pytest.approx(0.5 * 0.3 / 8), pytest.approx(0.5 * 0.3 / 6)]
    assert result.arrays is not None
    moved = [arrays(result.arrays)[name] - MODEL[name] for name in MODEL]
    assert 0 < np.sqrt(sum(np.sum(m.astype(np.float64) ** 2) for m in moved)) <= 2 * 0.3


def test_an_update_that_no_mod_has_clipped_is_clipped_where_noise_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dp_fixed_clipping, "add_gaussian_noise_inplace", lambda *given: None)
    clipped, left = (
        Federation(4, privacy=1, dropouts=1, strategy=private(fed_avg(4), 4), mods=mods).run(1)
        for mods in ([lightsecagg_mod, fixedclipping_mod], [lightsecagg_mod])
    )
    assert clipped.arrays is not None
    assert error(left, arrays(clipped.arrays)) < 1e-6


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 4), "clips single updates"),
        (
            DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.1, 4),
            "clips single updates",
        ),
        (DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.1, 4), "adaptive clipping"),
        (private(FedMedian(), 4), "FedMedian looks at single updates"),
    ],
)
def test_privacy_that_needs_single_updates_is_refused(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        LightSecAgg(strategy, privacy=1, dropouts=1, bound=1.0)


def test_an_accountant_is_refused() -> None:
    strategy = private(FedAvg(), 4)
    strategy.accountant = object()  # type: ignore[attr-defined]
    with pytest.raises(ParameterError, match="accountant"):
        LightSecAgg(strategy, privacy=1, dropouts=1, bound=1.0)


def test_privacy_outside_is_refused() -> None:
    federation = Federation(4, privacy=1, dropouts=1)
    outside = private(federation.strategy, 4)
    with pytest.raises(ParameterError, match="differential privacy goes inside"):
        outside.start(federation.grid, record(MODEL), num_rounds=1)
