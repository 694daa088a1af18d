"""Metrics of the clients: from a value to a masked coordinate, and from the mean back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lightsecagg.errors import ConfigurationError, InputRefused
from lightsecagg.training.metrics import MAX_METRICS, Metric, metrics_of, to_extras

torch = pytest.importorskip("torch")

from lightsecagg import training  # noqa: E402
from lightsecagg.cli.task import check_task  # noqa: E402
from lightsecagg.training import Examples, LocalConfig, Task, TaskConfig  # noqa: E402
from lightsecagg.training.trainer import new_model  # noqa: E402

RMSE = Metric("rmse", 2.0, 10.0)


def test_the_mean_of_the_coordinates_is_the_mean_of_the_values() -> None:
    values, weights = np.array([2.0, 10.0, 3.7]), np.array([1.0, 5.0, 4.0]) / 10
    mean = sum(w * RMSE.to_extra(v) for w, v in zip(weights, values, strict=True))
    assert RMSE.from_extra(mean) == pytest.approx(float(weights @ values))
    assert (RMSE.to_extra(2.0), RMSE.to_extra(10.0)) == (-1.0, 1.0)


@pytest.mark.parametrize(("value", "counts_as"), [(1.0, 2.0), (11.0, 10.0), (math.inf, 10.0)])
def test_values_beyond_the_bounds_count_as_the_bound(value: float, counts_as: float) -> None:
    assert RMSE.to_extra(value) == RMSE.to_extra(counts_as)


def test_a_value_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InputRefused, match="the metric 'rmse' is not a number"):
        RMSE.to_extra(math.nan)


def test_the_error_covers_a_coordinate_that_was_moved() -> None:
    moved = RMSE.from_extra(RMSE.to_extra(5.0) + 0.01)
    assert 0 < abs(moved - 5.0) <= RMSE.error(0.01)


@pytest.mark.parametrize(
    ("metrics", "complaint"),
    [
        ({"": (0, 1)}, "a name of 1 to 64 characters"),
        ({"x" * 65: (0, 1)}, "a name of 1 to 64 characters"),
        ({"a\x1b[2Jb": (0, 1)}, "not printable"),
        ({3: (0, 1)}, "a name of 1 to 64 characters"),
        ({"rmse": (1, 1)}, "two finite bounds"),
        ({"rmse": (0, math.inf)}, "two finite bounds"),
        ({"rmse": (math.nan, 1)}, "two finite bounds"),
        ({"rmse": 1}, "a dict such as"),
        ({"rmse": ("low", 1)}, "a dict such as"),
        ({"local_steps": (0, 1)}, "local_steps"),
        ({str(i): (0, 1) for i in range(MAX_METRICS + 1)}, "64 at most"),
    ],
)
def test_what_a_task_names_is_checked(metrics: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        metrics_of(metrics)


@pytest.mark.parametrize("values", [{}, {"mae": 3.0}, {"rmse": 3.0, "mae": 3.0}])
def test_measure_returns_what_was_named(values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=r"the task's metrics are \['rmse'\]"):
        to_extras((RMSE,), values)


class Clouds(Task):
    """Two classes; the client's number says how many of its four labels are right."""

    def model(self) -> Any:
        return torch.nn.Linear(1, 2)

    def client_data(self, client: int) -> Examples:
        right = torch.arange(4) < client
        inputs = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
        return Examples(inputs, torch.where(right, (inputs[:, 0] > 0).long(), 2))


class Measured(Clouds):
    metrics: Mapping[str, tuple[float, float]] = {"accuracy": (0, 1)}

    def model(self) -> Any:
        return torch.nn.Linear(1, 3)


SEPARATES = np.array([-1, 1, 0, 0, 0, -9], dtype=np.float32)


def test_a_classifier_needs_to_name_its_metrics_only() -> None:
    task = Measured(TaskConfig("mine", clients=5))
    assert [metric.name for metric in training.task_metrics(task)] == ["accuracy"]
    measured = [training.measure(task, client, SEPARATES)["accuracy"] for client in range(5)]
    assert measured == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_a_task_that_names_none_measures_nothing() -> None:
    class Unasked(Clouds):
        def measure(self, model: Any, client: int) -> dict[str, float]:
            raise AssertionError("nobody asked")

    assert training.measure(Unasked(TaskConfig("mine")), 0, SEPARATES[:4]) == {}


def test_the_configuration_asks_for_the_metrics_of_a_classifier() -> None:
    names = ["accuracy", "loss"]
    asked = TaskConfig("digits", client_metrics=True)
    assert [metric.name for metric in training.task_metrics(asked)] == names
    assert training.task_metrics(TaskConfig("digits")) == ()


def test_task_check_measures_too() -> None:
    config = TaskConfig("digits", client_metrics=True, model="logistic")
    report = check_task(config, LocalConfig(), 0, evaluate=False)
    task = training.load_task(config)
    with torch.no_grad():
        expected = task.measure(new_model(task), 0)
    assert report["metrics"] == pytest.approx(expected)
