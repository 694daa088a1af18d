"""A small federation over real sockets is measured, and its sum is that of the survivors."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("grpc")

from lightsecagg_lab.experiments.federation_bench import FederationBench, LoopWatch, measure


def test_a_federation_is_measured() -> None:
    bench = FederationBench(
        clients=5, privacy=1, dropouts=1, lost=1, dimension=50, processes=1, timeout=300.0
    )
    run = measure(bench, ("lightsecagg",))["runs"]["lightsecagg"]
    assert run["included"] == 4
    assert run["dropped"] == {"upload": 1}
    assert run["max_abs_difference"] <= run["quantisation_bound"]
    assert set(run["phases"]) == {"advertise", "share", "upload", "agree", "recover"}
    assert run["cpu_seconds"] > run["server_cpu_seconds"] > 0, "the clients' is in it"
    assert run["longest_callback_ms"] > 0
    assert "ratio_to_plain" not in run


def test_one_event_is_told_from_many_in_a_row() -> None:
    """In CPU time of the loop's thread, which others' work does not change."""

    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    async def scenario(watch: LoopWatch) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        for _ in range(20):
            loop.call_soon(work, 0.01)
        loop.call_soon(work, 0.03)
        loop.call_soon(done.set)
        await done.wait()

    real, watch = asyncio.Handle._run, LoopWatch()
    with watch.callbacks():
        asyncio.run(scenario(watch))
    assert 0.03 <= watch.longest_callback < 0.2
    assert asyncio.Handle._run is real
