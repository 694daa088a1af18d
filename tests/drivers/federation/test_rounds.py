"""Whole federations over the in-process transport, with plain vectors (no torch)."""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_federation import DIMENSION, Federation

from laboratory import baseline
from lightsecagg.errors import Aborted
from lightsecagg.params import ThreatModel
from memory_transport import MemoryServer


@pytest.mark.parametrize(
    ("protocol", "threat_model"),
    [
        ("lightsecagg", ThreatModel.MALICIOUS_SERVER),
        ("lightsecagg", ThreatModel.HONEST_BUT_CURIOUS),
        baseline("secagg", ThreatModel.MALICIOUS_SERVER),
        baseline("secagg", ThreatModel.HONEST_BUT_CURIOUS),
        baseline("secagg+", ThreatModel.HONEST_BUT_CURIOUS),
        baseline("plain", ThreatModel.HONEST_BUT_CURIOUS),
    ],
)
def test_three_rounds_sum_everybody(
    tmp_path: Path, protocol: str, threat_model: ThreatModel
) -> None:
    federation = Federation(tmp_path, protocol=protocol, threat_model=threat_model)
    records = asyncio.run(federation.run(number=3))
    assert [record.round for record in records] == [1, 2, 3]
    assert all(record.included == list(range(8)) for record in records)
    federation.check(records[-1])


def test_clients_that_never_connect_are_not_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    (record,) = asyncio.run(federation.run(clients=[0, 1, 2, 4, 5, 7]))
    assert record.included == [0, 1, 2, 4, 5, 7]
    federation.check(record)


def test_a_client_whose_training_fails_withdraws_and_joins_the_next_round(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.jobs[3].fail_in = 1
    # Nobody waits for it: the deadline is far longer than the test may take.
    records = asyncio.run(federation.run(number=2, upload=600.0))
    assert 3 not in records[0].included
    assert records[0].dropped == {"upload": [3]}
    assert 3 in records[1].included
    federation.check(records[-1])


def test_R35_too_few_clients_end_in_an_explained_abort(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    with pytest.raises(Aborted, match=r"only 3 clients connected within 0\.3 s, 6 are needed"):
        asyncio.run(federation.run(clients=[0, 1, 2], wait_for_clients=0.3))


def test_clients_hear_why_the_server_gave_up(tmp_path: Path) -> None:
    federation = Federation(tmp_path)

    async def scenario() -> list[BaseException | None]:
        clients = [federation.client(i) for i in range(3)]
        async with federation.connected(clients) as tasks:
            with pytest.raises(Aborted):
                await federation.server(wait_for_clients=3.0).run()
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    for error in asyncio.run(scenario()):
        assert isinstance(error, Aborted)
        assert "the server said goodbye: only 3 clients connected" in str(error)


def test_R37_settings_below_a_clients_policy_are_explained_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path)
    federation.client_tables[5] = {"privacy": 3}
    with caplog.at_level(logging.INFO, "lightsecagg"):
        records = asyncio.run(federation.run(number=2, advertise=600.0))
    reason = "the server proposed privacy T = 2, this client demands 3"
    assert all(record.included == [0, 1, 2, 3, 4, 6, 7] for record in records)
    assert all(record.dropped == {"advertise": [5]} for record in records)
    said = [item.getMessage() for item in caplog.records if reason in item.getMessage()]
    # Once per round on each side, and no more.
    assert sum(line.startswith("client 5: round") for line in said) == 2
    assert sum("client 5 dropped in phase advertise: it withdraws" in line for line in said) == 2
    assert len(said) == 4


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        ({"minimum": 9}, "this client demands 9"),
        ({"share_mode": "paper"}, "this client demands paper"),
        ({"bound": 1e6}, "this client's is 1000000.0"),
        ({"scale": 1e12}, "this client demands 1e+12"),
        ({"max_share_bytes": 1}, "this client allows 1"),
    ],
)
def test_S01_a_clients_file_can_make_every_demand_of_a_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, demand: dict[str, Any], reason: str
) -> None:
    federation = Federation(tmp_path)
    federation.client_tables[5] = demand
    with caplog.at_level(logging.INFO, "lightsecagg"):
        (record,) = asyncio.run(federation.run(number=1, advertise=600.0))
    assert record.dropped == {"advertise": [5]}
    assert any(reason in item.getMessage() for item in caplog.records)


def test_a_server_restarted_after_its_last_round_tells_clients_that_come_back(
    tmp_path: Path,
) -> None:
    """The first server died after its last round was stored and before it said goodbye."""
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    asyncio.run(federation.run())
    federation.transport = MemoryServer(range(4))

    async def scenario() -> None:
        async with federation.connected([federation.client(i) for i in range(4)]) as clients:
            assert await asyncio.wait_for(federation.server().run(), 10) == []
            await asyncio.wait_for(asyncio.gather(*clients), 10)

    asyncio.run(scenario())


def test_R35_a_finished_server_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client comes back, the others have left: told, and the end comes all the same."""
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    asyncio.run(federation.run())
    federation.transport = MemoryServer(range(4))
    monkeypatch.setattr("lightsecagg.session.server.COMEBACK", 0.5)

    async def scenario() -> None:
        async with federation.connected([federation.client(2)]) as clients:
            assert await asyncio.wait_for(federation.server().run(), 10) == []
            await asyncio.wait_for(asyncio.gather(*clients), 10)

    asyncio.run(scenario())


def test_R40_a_finished_server_that_waits_for_clients_can_be_stopped(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    asyncio.run(federation.run())
    federation.transport = MemoryServer(range(4))

    async def scenario() -> None:
        server = federation.server()
        running = asyncio.create_task(server.run())
        await asyncio.sleep(0)
        server.stop()
        assert await asyncio.wait_for(running, 10) == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_R38_memory_does_not_grow_with_the_number_of_rounds(tmp_path: Path) -> None:
    """Server and clients together; what grows is the report, by a few KB, and no vector of 80 KB.

    `lightsecagg bench soak` does the same with processes and for a thousand rounds.
    """
    dimension, rounds, warm = 20_000, 30, 10
    federation = Federation(tmp_path, 4, dimension=dimension, privacy=1, dropouts=1)
    traced: dict[int, int] = {}
    apply = federation.job.apply

    def applied(aggregate: Any, samples: int, completed: int) -> Any:
        for job in federation.jobs.values():
            job.given.clear()  # what the test itself would keep
        gc.collect()
        traced[completed] = tracemalloc.get_traced_memory()[0]
        return apply(aggregate, samples, completed)

    federation.job.apply = applied
    tracemalloc.start()
    try:
        records = asyncio.run(federation.run(number=rounds))
    finally:
        tracemalloc.stop()
    assert len(records) == rounds
    growth = (traced[rounds] - traced[warm]) / (rounds - warm)
    assert growth < dimension, f"{growth:.0f} bytes a round"


@pytest.mark.slow
def test_R39_sixty_clients_are_summed(tmp_path: Path) -> None:
    """A small part of the load that `lightsecagg bench soak --clients 1000` puts on a server."""
    federation = Federation(tmp_path, 60, privacy=15, dropouts=15)
    phases = dict.fromkeys(("advertise", "share", "upload", "agree", "recover"), 100)
    (record,) = asyncio.run(federation.run(wait_for_clients=100, **phases))
    assert record.included == list(range(60))
    federation.check(record)


def test_S01_a_client_that_expects_a_larger_model_says_so_in_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training client learns the length of updates with the model: its file bounds it."""
    federation = Federation(tmp_path)
    for client, limit in ((5, DIMENSION - 1), (6, DIMENSION)):
        job = federation.jobs[client]
        federation.jobs[client] = SimpleNamespace(dimension=None, compute=job.compute)
        federation.client_tables[client] = {"max_dimension": limit}
    with caplog.at_level(logging.INFO, "lightsecagg"):
        (record,) = asyncio.run(federation.run(number=1, advertise=600.0))
    assert record.dropped == {"advertise": [5]}
    reason = f"dimension {DIMENSION}, beyond this client's max_dimension = {DIMENSION - 1}"
    assert any(reason in item.getMessage() for item in caplog.records)
