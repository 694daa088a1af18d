"""Early stopping: when, by which figure, and that everybody ends cleanly."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from network_federation import NetworkFederation
from small_federation import Federation

from lightsecagg.drivers.federation.config import ServerConfig, load_config
from lightsecagg.drivers.federation.programs import build_server
from lightsecagg.drivers.federation.stopping import EarlyStopping
from lightsecagg.drivers.federation.training_tables import StoppingTable
from lightsecagg.errors import ConfigurationError
from lightsecagg.session.record import MetricMean, RoundRecord
from memory_transport import MemoryServer


def stops_after(values: list[float | None], **table: Any) -> int | None:
    """After how many completed rounds with these values of `loss` the rule stops, if it does."""
    rule = EarlyStopping(StoppingTable(**({"figure": "loss", "goal": "lower"} | table)))
    for completed, value in enumerate(values, 1):
        record = RoundRecord(completed, "plain", [])
        record.figures = {} if value is None else {"loss": value}
        assert rule.observe(record.to_json()) == (value is not None)
        if rule.reason(completed) is not None:
            return completed
    return None


@pytest.mark.parametrize(
    ("values", "table", "expected"),
    [
        ([3, 2, 1, 0.5], {"patience": 1}, None),
        ([3, 2, 2, 2], {"patience": 2}, 4),
        ([3, 2, 2, 1, 1, 1], {"patience": 2}, 6),
        ([3, 2, 2, 2, 2], {"patience": 2, "min_rounds": 5}, 5),
        ([3, 2.95, 2.9, 2.85], {"patience": 2, "least_change": 0.1}, 3),
        ([3, 2.9, 2.8], {"patience": 1, "least_change": 0.09}, None),
        ([1, 2, 3], {"patience": 2, "goal": "higher"}, None),
        ([1, 2, 3], {"patience": 2, "goal": "lower"}, 3),
        ([1, math.nan, math.nan], {"patience": 2}, 3),
        ([math.nan, math.nan, 1, 0], {"patience": 3}, None),
        ([1, None, None, None, 1], {"patience": 2}, None),
        ([1, None, 1, None, 1], {"patience": 2}, 5),
    ],
)
def test_when_it_stops(values: list[float | None], table: Any, expected: int | None) -> None:
    assert stops_after(values, **table) == expected


def test_aborted_rounds_do_not_count() -> None:
    rule = EarlyStopping(StoppingTable(figure="loss", goal="lower", patience=1))
    aborted = RoundRecord(1, "plain", [], aborted="too few")
    assert rule.observe(aborted.to_json())
    assert rule.reason(1) is None


def test_a_metric_of_the_clients_is_named_with_its_prefix() -> None:
    rule = EarlyStopping(StoppingTable(figure="clients.rmse", goal="lower", patience=1))
    record = RoundRecord(1, "plain", [])
    record.figures = {"rmse": 1.0}
    assert not rule.observe(record.to_json()), "the server's own figure is another one"
    record.metrics = {"rmse": MetricMean(2.0, 0.1)}
    assert rule.observe(record.to_json())
    assert rule.reason(1) is None
    assert rule.observe(record.to_json())
    assert "clients.rmse has not improved on 2 by more than 0 for 1 rounds" in str(rule.reason(2))


def run(federation: Federation, figures: list[float], number: int, **table: Any) -> Any:
    """A federation whose rounds have these figures, with all its clients to their goodbye."""
    federation.job.evaluate = lambda: {"loss": figures.pop(0)}

    async def scenario() -> Any:
        clients = [federation.client(i) for i in range(4)]
        server = federation.server(number=number, upload=60, agree=60, recover=60, settle=5)
        rule = StoppingTable(figure="loss", goal="lower", **table)
        server._learning.stopping = EarlyStopping(rule)
        tasks = [asyncio.create_task(client.run()) for client in clients]
        records = await asyncio.wait_for(server.run(), 120)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        ends = [client._finished for client in clients]
        return records, [(end and end.goodbye, end and end.error) for end in ends]

    return asyncio.run(scenario())


def small(folder: Path) -> Federation:
    return Federation(folder, 4, privacy=1, dropouts=1)


def test_the_federation_ends_clients_hear_goodbye_and_the_report_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    records, goodbyes = run(small(tmp_path), [3.0, 2.0, 2.5, 2.0], number=9, patience=2)
    reason = "stopped early after 4 rounds: loss has not improved on 2 by more than 0 for 2 rounds"
    assert [record.stopped for record in records] == [None, None, None, reason]
    assert goodbyes == [(reason, None)] * 4
    stored = json.loads((tmp_path / "rounds.json").read_text())
    assert [record["stopped"] for record in stored] == [None, None, None, reason]
    assert f"goodbye to 4 clients: {reason}" in caplog.text


def test_a_restarted_server_remembers_the_rounds_before(tmp_path: Path) -> None:
    """The first server is told to do two rounds; the second needs one more to make it three."""
    federation = small(tmp_path)
    run(federation, [2.0, 2.0], number=2, patience=2)
    federation.transport = MemoryServer(range(4))
    records, _ = run(federation, [2.0, 1.0], number=9, patience=2)
    assert len(records) == 1
    assert "stopped early after 3 rounds" in records[0].stopped


def test_a_round_without_the_figure_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records, _ = run(small(tmp_path), [], number=1, patience=1)
    assert records[0].stopped is None
    assert "round 1 has no figure of [early_stopping] to judge by" in caplog.text


@pytest.mark.parametrize("figure", ["clients.accuracy", "accuracy"])
def test_a_figure_that_no_round_will_have_is_found_at_start(tmp_path: Path, figure: str) -> None:
    federation = NetworkFederation(tmp_path, 4)
    config = load_config(
        ServerConfig,
        federation.made.server,
        [f'early_stopping={{figure = "{figure}", goal = "higher"}}', "vectors={dimension = 3}"],
    ).model_copy(update={"training": None})
    with pytest.raises(ConfigurationError, match=r"no round will have it; name one that"):
        build_server(config)


def test_the_figures_that_a_task_reports_are_known() -> None:
    pytest.importorskip("sklearn")
    from lightsecagg.drivers.federation.jobs import TrainingServer
    from lightsecagg.drivers.federation.training_tables import TrainingTable

    task = {"task": "digits", "model": "logistic", "client_metrics": True}
    job = TrainingServer(TrainingTable(task=task), 1.0)
    assert job.reports("clients.accuracy")
    assert job.reports("accuracy")
    assert not job.reports("clients.rmse")
