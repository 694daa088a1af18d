"""Which strategies can be wrapped, and what they are given instead of replies.

A wrapped strategy sees one reply, whose arrays are the average. Strategies that only average, and
then do what they like with the average, cannot tell the difference. Those that compare, sort or
drop single updates would do so with one, and silently become FedAvg: they are refused. A subclass
may change whatever it likes but `aggregate_train`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    Strategy,
)

from lightsecagg.errors import ParameterError

AVERAGING = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi)
"""What they do with replies is average them. FedProx does what FedAvg does."""

_SERVER_CLIPS = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)


class Inner:
    """A strategy that is fit to be wrapped."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._noise: DifferentialPrivacyClientSideFixedClipping | None = None
        if isinstance(strategy, DifferentialPrivacyClientSideFixedClipping):
            _check_noise(strategy)
            self._noise, strategy = strategy, strategy.strategy
        if isinstance(strategy, _SERVER_CLIPS):
            raise ParameterError(
                f"{type(strategy).__name__} clips single updates at the server, which sees none; "
                "take DifferentialPrivacyClientSideFixedClipping"
            )
        if isinstance(strategy, DifferentialPrivacyClientSideAdaptiveClipping):
            raise ParameterError(
                "adaptive clipping needs a bit of every client, which the server does not see; "
                "take DifferentialPrivacyClientSideFixedClipping"
            )
        averaging = {kind.aggregate_train for kind in AVERAGING}
        if not isinstance(strategy, FedAvg) or type(strategy).aggregate_train not in averaging:
            names = ", ".join(kind.__name__ for kind in AVERAGING)
            raise ParameterError(
                f"{type(strategy).__name__} looks at single updates, or aggregates in a way of its "
                f"own, and LightSecAgg has only their average; wrap {names} or FedProx, or a "
                "subclass that leaves aggregate_train alone (what it does after averaging, do in a "
                "subclass of LightSecAgg)"
            )
        self._average: FedAvg = strategy

    @property
    def private(self) -> bool:
        """Whether noise is added, which counts every client alike."""
        return self._noise is not None

    @property
    def weighted_by(self) -> str:
        """The metric that weights a client's update."""
        return self._average.weighted_by_key

    @property
    def fractions(self) -> dict[str, float]:
        """Which part of the nodes trains and evaluates."""
        average = self._average
        return {"train": average.fraction_train, "evaluate": average.fraction_evaluate}

    def evaluators(self, nodes: int) -> int:
        """How many of so many nodes FedAvg will ask to evaluate; all, if another strategy asks."""
        average = self._average
        asks = type(average).configure_evaluate is FedAvg.configure_evaluate
        if not asks or not average.fraction_evaluate:
            return nodes
        return max(int(nodes * average.fraction_evaluate), average.min_evaluate_nodes)

    def aggregate(
        self, server_round: int, asked: Message, average: ArrayRecord, metrics: MetricRecord, n: int
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the strategy makes of the average over n clients."""
        reply = Message(RecordDict({"arrays": average, "metrics": metrics}), reply_to=asked)
        with self._noise_for(n), _no_count_of_replies():
            return self.strategy.aggregate_train(server_round, [reply])

    def aggregate_evaluate(
        self, server_round: int, asked: Message, metrics: MetricRecord
    ) -> MetricRecord | None:
        """What the strategy makes of average metrics."""
        reply = Message(RecordDict({"metrics": metrics}), reply_to=asked)
        with _no_count_of_replies():
            return self.strategy.aggregate_evaluate(server_round, [reply])

    @contextmanager
    def _noise_for(self, survivors: int) -> Iterator[None]:
        """Noise for the clients that are in the average, not for those that were asked.

        One client moves an average over n by clipping_norm / n: after dropouts the noise that
        was meant for all of them would be too little.
        """
        if self._noise is None:
            yield
            return
        sampled, self._noise.num_sampled_clients = self._noise.num_sampled_clients, survivors
        try:
            yield
        finally:
            self._noise.num_sampled_clients = sampled


@contextmanager
def _no_count_of_replies() -> Iterator[None]:
    """Keep "Received 1 results" out of the log: the one reply is an average over many."""

    def tell(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("%s: Received %s results")

    FLOWER_LOGGER.addFilter(tell)
    try:
        yield
    finally:
        FLOWER_LOGGER.removeFilter(tell)


def _check_noise(strategy: DifferentialPrivacyClientSideFixedClipping) -> None:
    if strategy.accountant is not None:
        raise ParameterError(
            "Flower's accountant counts replies, of which a secure aggregation has one; leave "
            "accountant out, and account for noise_multiplier and the number of rounds elsewhere"
        )
