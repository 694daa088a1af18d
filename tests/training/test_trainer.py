from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightsecagg.errors import ConfigurationError, InputRefused, ParameterError
from lightsecagg.training import (
    Examples,
    LocalConfig,
    ServerConfig,
    ServerOptimizer,
    Task,
    TaskConfig,
    evaluate,
    federated_averaging,
    initial_model,
    load_task,
    local_update,
    model_layout,
    training_pool,
    weighted_average,
)
from lightsecagg.training.trainer import effective_steps

DIGITS = TaskConfig("digits", clients=20)


class PointTask(Task):
    """Client i wants the one weight to be at its centre: (w - centre_i)^2 / 2 per example."""

    centres = (0.0, 1.0, 10.0)
    sizes = (4, 4, 4)

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def client_data(self, client: int) -> Examples:
        rows = self.sizes[client]
        return Examples(torch.ones(rows, 1), torch.full((rows, 1), self.centres[client]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        squares: Tensor = (model(inputs) - targets).square().mean() / 2
        return squares

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"weight": float(next(model.parameters()))}


class UnevenTask(PointTask):
    sizes = (2, 10, 40)


def points(task: type[PointTask] = PointTask) -> PointTask:
    return task(TaskConfig("points", clients=3))


ZERO = np.zeros(1, dtype=np.float32)


def test_one_step_is_one_gradient_step() -> None:
    update = local_update(points(), 2, ZERO, LocalConfig(batch_size=4, learning_rate=0.1))
    assert update.delta.dtype == np.float32
    assert update.delta == pytest.approx([1.0])  # 0.1 * (10 - 0)
    assert update.samples == 4
    assert update.extras == {}


def test_epochs_and_batches_count_steps() -> None:
    config = LocalConfig(epochs=3, batch_size=2, learning_rate=0.1)
    update = local_update(points(), 1, ZERO, config)
    assert update.delta == pytest.approx([1 - 0.9**6])


def test_fedprox_pulls_towards_the_global_model() -> None:
    config = LocalConfig(
        epochs=2, batch_size=4, learning_rate=0.1, algorithm="fedprox", proximal_mu=2.0
    )
    # w1 = 0.1; w2 = w1 + 0.1 * ((1 - w1) - 2 * w1)
    update = local_update(points(), 1, ZERO, config)
    assert update.delta == pytest.approx([0.1 + 0.1 * (0.9 - 0.2)])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_are_what_a_constant_gradient_moves(momentum: float) -> None:
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for _ in range(7):
        weight.grad = torch.tensor(-1.0, dtype=torch.float64)
        optimizer.step()
    assert effective_steps(7, momentum) == pytest.approx(weight.item())


def test_fednova_equals_fedavg_when_all_take_the_same_steps() -> None:
    plain = LocalConfig(epochs=2, batch_size=2, learning_rate=0.1, momentum=0.5)
    nova = LocalConfig(epochs=2, batch_size=2, learning_rate=0.1, momentum=0.5, algorithm="fednova")
    (first,) = federated_averaging(points(), 1, plain)
    (second,) = federated_averaging(points(), 1, nova)
    assert second.model == pytest.approx(first.model, rel=1e-5)


def test_fednova_stays_at_the_optimum_where_fedavg_is_biased_by_uneven_steps() -> None:
    task = points(UnevenTask)
    optimum = np.array(UnevenTask.sizes) @ UnevenTask.centres / sum(UnevenTask.sizes)
    model = np.array([optimum], dtype=np.float32)

    def drift(algorithm: Any) -> float:
        local = LocalConfig(batch_size=1, learning_rate=1e-3, algorithm=algorithm)
        updates = [local_update(task, client, model, local) for client in range(3)]
        server = ServerOptimizer(ServerConfig(), model_layout(task), local)
        return float(abs(server.step(model, weighted_average(updates)) - model)[0])

    assert drift("fedavg") > 10 * drift("fednova")


def test_fednova_uploads_nothing_but_sums() -> None:
    config = LocalConfig(batch_size=1, learning_rate=0.02, algorithm="fednova", step_limit=80)
    assert config.extras == ("local_steps",)
    updates = [local_update(points(UnevenTask), client, ZERO, config) for client in range(3)]
    assert [u.extras["local_steps"] for u in updates] == pytest.approx([2 / 80, 10 / 80, 40 / 80])
    mean = weighted_average(updates)
    assert mean.extras["local_steps"] * 80 == pytest.approx((2 * 2 + 10 * 10 + 40 * 40) / 52)
    config = LocalConfig(batch_size=1, algorithm="fednova", step_limit=39)
    with pytest.raises(ParameterError, match="raise step_limit"):
        local_update(points(UnevenTask), 2, ZERO, config)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_seed_decides_the_update_and_the_callers_generator_is_untouched(
    optimizer: Any,
) -> None:
    task = load_task(TaskConfig("synthetic-femnist", clients=2, image_size=12, classes=5))
    model = initial_model(task, seed=4)
    config = LocalConfig(batch_size=16, learning_rate=0.01, optimizer=optimizer)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = local_update(task, 0, model, config, seed=4, round_index=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    again = local_update(task, 0, model, config, seed=4, round_index=1)
    assert first.delta.tobytes() == again.delta.tobytes()
    for seed, round_index in ((5, 1), (4, 2)):
        other = local_update(task, 0, model, config, seed=seed, round_index=round_index)
        assert not np.array_equal(other.delta, first.delta)


def test_initial_models_follow_the_seed() -> None:
    assert np.array_equal(initial_model(DIGITS, seed=1), initial_model(DIGITS, seed=1))
    assert not np.array_equal(initial_model(DIGITS, seed=1), initial_model(DIGITS, seed=2))


def test_the_global_model_is_left_alone() -> None:
    model = initial_model(DIGITS)
    before = model.copy()
    update = local_update(DIGITS, 0, model)
    assert np.array_equal(model, before)
    assert not np.shares_memory(update.delta, model)


class NormTask(Task):
    """Five features, batch-norm, and as many examples as the option `rows` says."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def client_data(self, client: int) -> Examples:
        rows = int(self.options["rows"])
        generator = torch.Generator().manual_seed(client)
        inputs = torch.randn(rows, 5, generator=generator)
        return Examples(inputs, torch.arange(rows) % 2)


def norm_task(rows: int) -> NormTask:
    return NormTask(TaskConfig("norm", clients=2, options=(("rows", str(rows)),)))


def test_batch_norm_skips_a_last_batch_of_one_and_averages_its_statistics() -> None:
    task = norm_task(9)
    layout = model_layout(task)
    update = local_update(task, 0, initial_model(task), LocalConfig(batch_size=4))
    assert update.samples == 9
    assert update.delta[layout.parameters :].any()


@pytest.mark.parametrize(("rows", "batch"), [(0, 4), (1, 4), (9, 1)])
def test_batch_norm_refuses_what_it_cannot_train_on(rows: int, batch: int) -> None:
    task = norm_task(rows)
    with pytest.raises(ConfigurationError, match="batch-norm needs two or more"):
        local_update(task, 0, initial_model(task), LocalConfig(batch_size=batch))


def test_a_client_without_data_is_refused_and_one_example_suffices_otherwise() -> None:
    class Few(PointTask):
        sizes = (0, 1, 1)

    with pytest.raises(ConfigurationError, match=r"client 0 has 0 example\(s\)"):
        local_update(points(Few), 0, ZERO)
    assert local_update(points(Few), 1, ZERO).samples == 1


def test_S13_a_result_that_is_not_finite_is_refused() -> None:
    config = LocalConfig(epochs=30, batch_size=1, learning_rate=1e6)
    with pytest.raises(InputRefused, match="loss is not finite"):
        local_update(points(), 2, ZERO, config)

    class Poisoned(PointTask):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            weight = next(model.parameters())
            weight.register_hook(lambda gradient: gradient * float("nan"))
            return super().loss(model, batch)

    with pytest.raises(InputRefused, match="client 1: 1 of 1 numbers"):
        local_update(points(Poisoned), 1, ZERO, LocalConfig(batch_size=4))


def test_labels_beyond_the_outputs_are_refused() -> None:
    class Wrong(NormTask):
        def client_data(self, client: int) -> Examples:
            data = super().client_data(client)
            return Examples(data.inputs, data.targets + 1)

    task = Wrong(TaskConfig("norm", clients=2, options=(("rows", "8"),)))
    with pytest.raises(ConfigurationError, match=r"run from \d to 2, but the model has 2 outputs"):
        local_update(task, 0, initial_model(task))


def test_a_torch_dataset_serves_as_data() -> None:
    class Wrapped(NormTask):
        def client_data(self, client: int) -> Any:
            data = super().client_data(client)
            return TensorDataset(data.inputs, data.targets)

    config = TaskConfig("norm", clients=2, options=(("rows", "8"),))
    model = initial_model(NormTask(config))
    plain, wrapped = (local_update(kind(config), 0, model) for kind in (NormTask, Wrapped))
    assert plain.delta.tobytes() == wrapped.delta.tobytes()


def test_a_half_precision_model_trains() -> None:
    class Half(NormTask):
        def model(self) -> nn.Module:
            return super().model().to(torch.bfloat16)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            inputs, targets = batch
            return super().loss(model, (inputs.to(torch.bfloat16), targets))

    task = Half(TaskConfig("norm", clients=2, options=(("rows", "8"),)))
    assert local_update(task, 0, initial_model(task)).delta.any()


def test_frozen_parameters_do_not_move() -> None:
    class Frozen(NormTask):
        def model(self) -> nn.Module:
            model = super().model()
            model[0].requires_grad_(False)  # type: ignore[index]
            return model

    task = Frozen(TaskConfig("norm", clients=2, options=(("rows", "8"),)))
    config = LocalConfig(algorithm="fedprox", proximal_mu=0.1)
    update = local_update(task, 0, initial_model(task), config)
    assert not update.delta[:24].any()
    assert update.delta[24:].any()


@pytest.mark.parametrize("client", [-1, 20])
def test_an_unknown_client_is_refused(client: int) -> None:
    with pytest.raises(ParameterError, match="there is no client"):
        local_update(DIGITS, client, initial_model(DIGITS))


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"momentum": 1.0},
        {"weight_decay": -1.0},
        {"optimizer": "lbfgs"},
        {"optimizer": "adam", "momentum": 0.9},
        {"algorithm": "scaffold"},
        {"algorithm": "fedprox"},
        {"algorithm": "fedavg", "proximal_mu": 0.1},
        {"algorithm": "fednova", "optimizer": "adam"},
        {"step_limit": 0},
    ],
)
def test_bad_local_configurations_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        LocalConfig(**bad)


@pytest.mark.parametrize(
    ("partition", "least"), [("iid", 0.85), ("dirichlet", 0.75), ("shards", 0.6)]
)
def test_federated_averaging_learns_the_digits(partition: Any, least: float) -> None:
    task = TaskConfig("digits", clients=20, partition=partition, dirichlet_alpha=0.3)
    local = LocalConfig(epochs=5, batch_size=8, learning_rate=0.2)
    *_, last = federated_averaging(task, 4, local, seed=1)
    assert last.metrics["accuracy"] > least
    assert last.metrics == evaluate(task, last.model)


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "fedyogi"])
def test_server_optimisers_learn_the_digits(name: Any) -> None:
    server = ServerConfig(name, learning_rate=0.5 if name == "fedavgm" else 0.03)
    local = LocalConfig(epochs=2, batch_size=16, learning_rate=0.1)
    task = TaskConfig("digits", clients=5)
    *_, last = federated_averaging(task, 6, local, server, clients_per_round=4)
    assert last.metrics["accuracy"] > 0.7


def test_clients_per_round_is_checked() -> None:
    with pytest.raises(ParameterError, match="clients_per_round is 21"):
        next(federated_averaging(DIGITS, 1, clients_per_round=21))


def test_a_child_process_trains_on_one_thread_and_returns_the_same_bits() -> None:
    threads = torch.get_num_threads()
    model = initial_model(DIGITS, seed=3)
    with training_pool() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        remote = pool.submit(local_update, DIGITS, 7, model, LocalConfig(), seed=3).result()
        refused = pool.submit(local_update, DIGITS, 20, model)
        with pytest.raises(ParameterError, match="there is no client 20"):
            refused.result()
    assert torch.get_num_threads() == threads
    try:
        torch.set_num_threads(1)
        here = local_update(DIGITS, 7, model, LocalConfig(), seed=3)
    finally:
        torch.set_num_threads(threads)
    assert remote.delta.tobytes() == here.delta.tobytes()
    assert remote.samples == here.samples
    with pytest.raises(ParameterError, match="workers is 0"):
        training_pool(0)
