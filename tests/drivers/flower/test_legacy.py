"""Flower's older API: the same round as a workflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg, FedMedian, Strategy
from flwr.server.workflow import DefaultWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
from local_grid import LocalGrid
from small_flower import MODEL, expected, samples, update

from lightsecagg.errors import ParameterError
from lightsecagg.flower import LightSecAggWorkflow, lightsecagg_mod

NODES = range(101, 107)


class Numbers(NumPyClient):
    """A client as users of the older API write it."""

    def __init__(self, node: int) -> None:
        self.node = node

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        if self.node == 102:
            raise ValueError("secret text 42")
        model = dict(zip(MODEL, parameters, strict=True))
        trained = update(model, self.node, int(config["round"]))
        return list(trained.values()), samples(self.node), {"loss": 0.5}


def run(strategy: Strategy, rounds: int = 2, **options: Any) -> tuple[LegacyContext, LocalGrid]:
    grid = LocalGrid()
    app = ClientApp(lambda context: Numbers(context.node_id).to_client(), mods=[lightsecagg_mod])
    for node in NODES:
        grid.add(node, app)
    empty = Context(1, 1, {}, RecordDict(), {})
    context = LegacyContext(empty, ServerConfig(num_rounds=rounds), strategy)
    chosen = {"privacy": 1, "dropouts": 1, "bound": 1.0, "max_samples": 100, **options}
    fit = LightSecAggWorkflow(**chosen, timeout=30.0, poll_interval=0.001)
    DefaultWorkflow(fit_workflow=fit)(grid, context)
    return context, grid


def strategy(kind: type[FedAvg]) -> Strategy:
    return kind(
        min_fit_clients=len(NODES),
        min_available_clients=len(NODES),
        fraction_evaluate=0.0,
        initial_parameters=ndarrays_to_parameters(list(MODEL.values())),
        on_fit_config_fn=lambda server_round: {"round": server_round},
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_older_api_gives_fedavgs_model_without_the_node_that_failed() -> None:
    context, grid = run(strategy(FedAvg))
    wanted = expected(MODEL, [[node for node in NODES if node != 102]] * 2)
    found = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
    for array, name in zip(found, MODEL, strict=True):
        assert np.abs(array - wanted[name]).max() < 1e-6
    assert not any("42" in reason for reason in grid.reasons)


def test_the_older_api_refuses_what_needs_single_updates() -> None:
    with pytest.raises(ParameterError, match="FedMedian looks at single updates"):
        run(strategy(FedMedian))
    with pytest.raises(ParameterError, match="leave metrics out"):
        run(strategy(FedAvg), metrics={"loss": 1.0})
    with pytest.raises(ParameterError, match="leave evaluation out"):
        run(strategy(FedAvg), evaluation={"loss": 1.0})
