"""Flower's older API: a fit workflow in place of the default one.

    fit = LightSecAggWorkflow(privacy=0.2, dropouts=0.3, bound=1.0)
    workflow = DefaultWorkflow(fit_workflow=fit)

The clients take the same mod, `ClientApp(client_fn, mods=[lightsecagg_mod])`, and everything
between them and the server is the same: the old strategy's instructions become the messages of a
strategy of the new kind, and what comes of them one result for the old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
from flwr.common import Code, FitRes, Status
from flwr.compat.common import recorddict_compat as compat
from flwr.server import Grid, LegacyContext
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, Strategy
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp.strategy import FedAvg as MessageFedAvg

from lightsecagg.drivers.flower.strategy import LightSecAgg
from lightsecagg.errors import ParameterError

_AVERAGING = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)


class LightSecAggWorkflow:
    """One fit round under masks; takes the options of `LightSecAgg`."""

    def __init__(self, **options: Any) -> None:
        for name in ("metrics", "evaluation"):
            if options.get(name):
                raise ParameterError(
                    "the metrics of fit and evaluate are not averaged under the mask in Flower's "
                    f"older API; leave {name} out, or use the newer one"
                )
        self._instructions = _Instructions()
        self._secure = LightSecAgg(self._instructions, **options)

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run one round, as `DefaultWorkflow` asks for it."""
        if not isinstance(context, LegacyContext):
            raise TypeError(f"expected a LegacyContext, got {type(context).__name__}")
        _check(context.strategy)
        number = cast(int, context.state.config_records[MAIN_CONFIGS_RECORD][Key.CURRENT_ROUND])
        model = context.state.array_records[MAIN_PARAMS_RECORD]
        chosen = context.strategy.configure_fit(
            server_round=number,
            parameters=compat.arrayrecord_to_parameters(model, keep_input=True),
            client_manager=context.client_manager,
        )
        self._instructions.messages = [
            Message(
                compat.fitins_to_recorddict(fitins, keep_input=True),
                proxy.node_id,
                MessageType.TRAIN,
                group_id=str(number),
            )
            for proxy, fitins in chosen
        ]
        average, _ = self._secure.train(number, model, ConfigRecord(), grid)
        if average is None:
            return
        parameters = compat.arrayrecord_to_parameters(average, keep_input=True)
        result = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
        updated, metrics = context.strategy.aggregate_fit(number, [(chosen[0][0], result)], [])
        if updated is not None:
            record = compat.parameters_to_arrayrecord(updated, keep_input=True)
            context.state.array_records[MAIN_PARAMS_RECORD] = record
            context.history.add_metrics_distributed_fit(server_round=number, metrics=metrics)


class _Instructions(MessageFedAvg):
    """A strategy of the newer kind that sends what it is given."""

    def __init__(self) -> None:
        super().__init__(weighted_by_key="num_examples")
        self.messages: list[Message] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The old strategy's instructions."""
        return self.messages


def _check(strategy: Strategy) -> None:
    averaging = {kind.aggregate_fit for kind in _AVERAGING}
    if type(strategy).aggregate_fit not in averaging:
        names = ", ".join(kind.__name__ for kind in _AVERAGING)
        raise ParameterError(
            f"{type(strategy).__name__} looks at single updates, or aggregates in a way of its "
            f"own, and LightSecAgg has only their average; take {names} or FedProx"
        )
