from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lightsecagg.errors import InputRefused, ParameterError
from lightsecagg.training import (
    AverageUpdate,
    LocalConfig,
    LocalUpdate,
    ServerConfig,
    ServerOptimizer,
    pack,
    unpack,
    weighted_average,
)


@dataclass(frozen=True)
class Plane:
    """Two parameters; optionally a running mean and a running variance after them."""

    size: int = 2
    parameters: int = 2
    nonnegative: tuple[tuple[int, int], ...] = ()


WITH_STATISTICS = Plane(size=4, nonnegative=((3, 4),))


def vector(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def average(*values: float, **extras: float) -> AverageUpdate:
    return AverageUpdate(vector(*values), extras)


def test_fedavg_adds_the_average() -> None:
    optimizer = ServerOptimizer(ServerConfig(), Plane())
    model = vector(1.0, 2.0)
    assert np.array_equal(optimizer.step(model, average(0.5, -1.0)), vector(1.5, 1.0))
    assert np.array_equal(model, vector(1.0, 2.0))


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedyogi"])
def test_a_schedule_scales_the_step_of_parameters_alone(name: str) -> None:
    config = ServerConfig(name, learning_rate=0.5)  # type: ignore[arg-type]
    model, seen = vector(1.0, 2.0, 3.0, 4.0), average(0.5, -1.0, 0.25, -0.25)
    whole, half = (
        ServerOptimizer(config, WITH_STATISTICS).step(model, seen, rate=rate) for rate in (1.0, 0.5)
    )
    assert half[:2] - model[:2] == pytest.approx((whole[:2] - model[:2]) / 2)
    assert np.array_equal(half[2:], whole[2:])


def test_fedavgm_accumulates_momentum() -> None:
    config = ServerConfig("fedavgm", learning_rate=0.5, momentum=0.9)
    optimizer = ServerOptimizer(config, Plane())
    model = optimizer.step(vector(0.0, 0.0), average(1.0, -2.0))
    assert model == pytest.approx([0.5, -1.0])
    # m = 0.9 * (1, -2) + (1, 0) = (1.9, -1.8)
    assert optimizer.step(model, average(1.0, 0.0)) == pytest.approx([0.5 + 0.95, -1.0 - 0.9])


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_the_adaptive_steps_follow_the_published_update(name: str) -> None:
    config = ServerConfig(name, learning_rate=0.1, momentum=0.9, beta2=0.99, adaptivity=0.01)  # type: ignore[arg-type]
    optimizer = ServerOptimizer(config, Plane(size=1, parameters=1))
    model, m, v = vector(1.0), 0.0, 0.01**2
    x = 1.0
    for delta in (0.5, -0.25, 0.0, 0.001):
        m = 0.9 * m + 0.1 * delta
        if name == "fedadam":
            v = 0.99 * v + 0.01 * delta**2
        else:
            sign = (v > delta**2) - (v < delta**2)
            v = v - 0.01 * delta**2 * sign
        x += 0.1 * m / (v**0.5 + 0.01)
        model = optimizer.step(model, average(delta))
        assert model == pytest.approx([x], rel=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedyogi"])
def test_every_optimiser_descends_a_quadratic(name: str) -> None:
    rate = 0.1 if name in ("fedadam", "fedyogi") else 0.5
    optimizer = ServerOptimizer(ServerConfig(name, learning_rate=rate), Plane())  # type: ignore[arg-type]
    model = vector(3.0, -4.0)
    for _ in range(200):
        model = optimizer.step(model, AverageUpdate(-0.1 * model))
    assert np.abs(model).max() < 0.3


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedyogi"])
def test_batch_norm_statistics_are_averaged_whatever_the_optimiser(name: str) -> None:
    config = ServerConfig(name, learning_rate=0.3)  # type: ignore[arg-type]
    optimizer = ServerOptimizer(config, WITH_STATISTICS)
    model = vector(0.0, 0.0, 5.0, 1.0)
    for _ in range(2):
        model = optimizer.step(model, average(1.0, 1.0, -1.0, 0.5))
    assert model[2:] == pytest.approx([3.0, 2.0])


def test_a_running_variance_cannot_become_negative() -> None:
    optimizer = ServerOptimizer(ServerConfig(), WITH_STATISTICS)
    after = optimizer.step(vector(0.0, 0.0, 0.0, 1e-6), average(0.0, 0.0, -1.0, -1e-5))
    assert np.array_equal(after, vector(0.0, 0.0, -1.0, 0.0))


def test_fednova_multiplies_the_two_averages() -> None:
    local = LocalConfig(algorithm="fednova", step_limit=100)
    optimizer = ServerOptimizer(ServerConfig(), WITH_STATISTICS, local)
    after = optimizer.step(vector(0, 0, 0, 0), average(0.1, -0.2, 1.0, 1.0, local_steps=0.25))
    assert after == pytest.approx([2.5, -5.0, 1.0, 1.0])
    with pytest.raises(ParameterError, match="local_steps"):
        optimizer.step(vector(0, 0, 0, 0), average(0.1, 0.1, 0.1, 0.1))
    for steps in (0.0, -0.25):
        with pytest.raises(InputRefused, match="local steps is not positive: some client lied"):
            optimizer.step(vector(0, 0, 0, 0), average(0.1, 0.1, 0.1, 0.1, local_steps=steps))


def test_a_resumed_optimiser_continues_exactly() -> None:
    config = ServerConfig("fedyogi", learning_rate=0.1)
    running = ServerOptimizer(config, Plane())
    model = running.step(vector(1.0, 1.0), average(0.2, -0.3))
    resumed = ServerOptimizer(config, Plane())
    resumed.load_state(running.state())
    update = average(-0.1, 0.4)
    assert np.array_equal(running.step(model, update), resumed.step(model, update))
    with pytest.raises(ParameterError, match="another model"):
        resumed.load_state({"m": np.zeros(3), "v": np.zeros(3)})


def test_bad_averages_are_refused() -> None:
    optimizer = ServerOptimizer(ServerConfig(), Plane())
    with pytest.raises(ParameterError, match="2 coordinates"):
        optimizer.step(vector(1.0), average(1.0))
    with pytest.raises(InputRefused, match="not finite"):
        optimizer.step(vector(1.0, 1.0), average(np.nan, 0.0))
    huge = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"), pytest.raises(InputRefused, match="float32"):
        optimizer.step(vector(huge, 0.0), average(huge, 0.0))


@pytest.mark.parametrize(
    "bad",
    [
        {"algorithm": "adam"},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"momentum": 1.0},
        {"beta2": -0.1},
        {"adaptivity": 0.0},
    ],
)
def test_bad_constants_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        ServerConfig(**bad)  # type: ignore[arg-type]


def test_packing_scales_the_extras_to_the_bound_and_back() -> None:
    update = LocalUpdate(vector(0.1, 0.2), 7, {"local_steps": 0.5})
    packed = pack(update, bound=0.25)
    assert packed.dtype == np.float32
    assert packed == pytest.approx([0.1, 0.2, 0.125])
    again = unpack(packed, ["local_steps"], bound=0.25)
    assert np.array_equal(again.delta, update.delta)
    assert again.extras == {"local_steps": 0.5}
    with pytest.raises(InputRefused, match="local_steps"):
        pack(LocalUpdate(vector(0.0), 1, {"local_steps": 1.5}))
    with pytest.raises(ParameterError, match="extras"):
        unpack(vector(), ["local_steps"])


def test_the_average_is_weighted_by_samples() -> None:
    updates = [
        LocalUpdate(vector(1.0, 0.0), 1, {"local_steps": 0.1}),
        LocalUpdate(vector(0.0, 2.0), 3, {"local_steps": 0.5}),
    ]
    mean = weighted_average(updates)
    assert mean.delta == pytest.approx([0.25, 1.5])
    assert mean.extras["local_steps"] == pytest.approx(0.4)
    with pytest.raises(ParameterError, match="no update"):
        weighted_average([])


def test_S22_an_update_shows_no_number_in_its_repr() -> None:
    shown = repr(LocalUpdate(vector(0.123), 4242, {"local_steps": 0.987}))
    assert not any(secret in shown for secret in ("0.123", "4242", "0.987"))
